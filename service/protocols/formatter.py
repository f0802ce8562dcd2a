"""Formatting of generation events as server-sent events or one whole answer, for any protocol.

Owns the answers as they grow and the ids of events that can be resumed. Formatters do no I/O:
`service.http.relay` writes what they return.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from batchengine.core import (
    BatchEngineError,
    DoneEvent,
    PromptTokenEvent,
    SkippedEvent,
    TokenEvent,
    Usage,
)
from service.protocols.markup.parser import parser_of
from service.protocols.output import CallArguments, CallStart, OutputParser, OutputPart, Reasoning
from service.protocols.requests import HttpJob

CUT = ("shutdown", "cancelled")  # reasons of answers that the daemon ended


class SseEvent(NamedTuple):
    """One server-sent event; `name` and `id` "" = none. `data` is one line of UTF-8."""

    data: bytes
    name: str = ""
    id: str = ""


class EventIds:
    """Ids of the events of a stream that can be resumed: its turn, how many tokens were sent, and
    behind a point how many events of what follows them: the next token, or the end.

    Tokens that show no text count too, so the number is exactly what `from=` takes. The turn is
    part of the id: by the time the rest is asked for, the session may have had another.
    """

    def __init__(self, first: int, turn_of: Callable[[], str], events: int = 0) -> None:
        """`events`: how many behind token `first` the reader has. `turn_of` is called once a token
        was sent: an earlier request may have begun the turn."""
        self._first = first
        self._sent = first
        self._turn_of = turn_of
        self._known = events
        self.is_rest = first > 0 or events > 0  # the reader has the beginning of the stream

    @property
    def has_begun(self) -> bool:
        """Whether a token was sent: events have ids from then on."""
        return self._sent > self._first

    def of_token(self, events: list[SseEvent]) -> list[SseEvent]:
        """The events of one more token with their ids, but for those that the reader has."""
        before, self._sent = self._place, self._sent + 1
        last = [event._replace(id=self._place) for event in events[-1:]]
        return self._unknown(_numbered(before, events[:-1]) + last)

    def of_end(self, events: list[SseEvent]) -> list[SseEvent]:
        """The events of the end likewise; at least the last: no stream is without one."""
        last = [event._replace(id="") for event in events[-1:]]
        return self._unknown(_numbered(self._place, events[:-1])) + last

    @property
    def current(self) -> str:
        """The id of an event that changes nothing; "" = none yet."""
        return self._place if self.has_begun else ""

    @property
    def _place(self) -> str:
        return f"{self._turn_of()}:{self._sent}"

    def _unknown(self, events: list[SseEvent]) -> list[SseEvent]:
        known, self._known = self._known, 0
        return events[known:]


def _numbered(place: str, events: list[SseEvent]) -> list[SseEvent]:
    return [event._replace(id=f"{place}.{n}") for n, event in enumerate(events, 1)]


@dataclass(slots=True)
class Answer:
    """One choice as it grows.

    `parts` and `logprobs` are filled for whole answers only, `logprobs` only where wanted: lists
    of the answer, by their names, whose items are JSON already.
    `bare` counts tokens without a log-probability: an earlier stream computed and sent theirs.
    `calls` counts calls of tools, `reasoning_tokens` tokens of reasoning, also those that an
    earlier stream sent. `arguments` are those of the last call.
    `finish_reason` is one that clients know; `cut` is why the daemon ended the
    answer before its end, "" = it did not.
    """

    parser: OutputParser
    parts: list[OutputPart] = field(default_factory=list[OutputPart])
    logprobs: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    finish_reason: str = ""
    stop_string: str = ""
    cut: str = ""
    usage: Usage = field(default_factory=Usage)
    bare: int = 0
    calls: int = 0
    arguments: list[str] = field(default_factory=list[str])
    reasoning_tokens: int = 0
    reasons: bool = False  # the last part was reasoning

    def push(self, text: str) -> list[OutputPart]:
        """The parts that the text of one token completes."""
        parts = self.parser.push(text)
        self._count(parts)
        self.reasoning_tokens += self.reasons or any(isinstance(p, Reasoning) for p in parts)
        return parts

    def end(self, text: str) -> list[OutputPart]:
        """The parts that were held back until the end, whose last text is `text`."""
        is_cut = self.finish_reason != "stop" or bool(self.stop_string)
        parts = [*self.parser.push(text), *self.parser.flush(is_cut=is_cut)]
        self._count(parts)
        return parts

    @property
    def is_call_cut(self) -> bool:
        """Whether a stop string ended the answer inside a call, whose arguments are no JSON."""
        if not self.calls or not self.stop_string:
            return False
        try:
            msgspec.json.decode("".join(self.arguments))
        except (msgspec.DecodeError, RecursionError):
            return True
        return False

    def _count(self, parts: list[OutputPart]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self.calls += 1
                self.arguments.clear()
            elif isinstance(part, CallArguments):
                self.arguments.append(part.json)
        if parts:
            self.reasons = isinstance(parts[-1], Reasoning)


class Formatter(ABC):
    """Formats the events of one job, whose choices have the indices of `job.requests`.

    A stream calls `opening`, `token`, `finish`, `noop` and `failure` in the order of events; a
    whole answer calls `collect`, then `whole`.
    """

    def __init__(self, job: HttpJob) -> None:
        self.job = job
        outputs = [asked.output for asked in job.requests]
        self.answers = [Answer(parser_of(form), reasons=form.in_reasoning) for form in outputs]
        self.ids: EventIds | None = None  # of a stream that can be resumed
        self._unfinished = len(job.requests)

    @property
    def is_done(self) -> bool:
        """Whether every choice has finished."""
        return not self._unfinished

    # ---- streams ----

    is_fetched = False  # a client may ask for the answer by the id in its first event

    @abstractmethod
    def opening(self) -> list[SseEvent]:
        """The events that show a client that it was admitted."""

    def token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        """The events of one token of choice `index`; none where it shows nothing yet."""
        answer = self.answers[index]
        answer.bare += event.logprob is None
        parts = answer.push(event.text)
        shows = parts or event.logprob is not None
        events = self._token(index, event, parts) if shows else []
        return events if self.ids is None else self.ids.of_token(events)

    def prompt_token(self, index: int, event: PromptTokenEvent) -> list[SseEvent]:
        """The events of one token of the prompt of choice `index`, before any other."""
        raise NotImplementedError  # of a protocol whose requests do not ask for them

    def skip(self, index: int, event: SkippedEvent) -> None:
        """Notes one token of choice `index` that the reader has from an earlier stream."""
        self._skip(index, self.answers[index].push(event.text))

    def finish(self, index: int, event: DoneEvent) -> list[SseEvent]:
        """The last events of choice `index`, and those of the stream once every choice is over."""
        parts = self._end(index, event)
        if self.ids is None:
            return self._finish(index, parts)
        if not self.answers[index].cut:
            return self.ids.of_end(self._finish(index, parts))
        # a reader that goes on gets what was held back, and events that are not these
        return self._finish(index, [])

    @abstractmethod
    def noop(self) -> list[SseEvent]:
        """Events that change nothing but reset a client's watchdog."""

    @abstractmethod
    def failure(self, error: BatchEngineError) -> list[SseEvent]:
        """The last events of a stream that fails."""

    # ---- whole answers ----

    def collect(self, index: int, event: TokenEvent | DoneEvent) -> None:
        """Adds one event to a whole answer."""
        answer = self.answers[index]
        if isinstance(event, DoneEvent):
            answer.parts += self._end(index, event)
            return
        answer.parts += answer.push(event.text)
        if event.logprob is None:
            answer.bare += 1
        else:
            self._keep_logprob(index, event)

    def collect_prompt(self, index: int, event: PromptTokenEvent) -> None:
        """Adds one token of the prompt of choice `index`, before any other."""
        raise NotImplementedError

    @abstractmethod
    def whole(self) -> Iterator[bytes]:
        """The answer of a request that does not stream, once every choice is over, in parts of
        JSON that each take milliseconds to make."""

    # ---- inner ----

    @abstractmethod
    def _token(self, index: int, event: TokenEvent, parts: Sequence[OutputPart]) -> list[SseEvent]:
        """The events of `parts`; the first also has the token's log-probability, if any."""

    def _skip(self, index: int, parts: Sequence[OutputPart]) -> None:  # noqa: B027 (may be empty)
        """Notes parts that the reader has."""

    @abstractmethod
    def _keep_logprob(self, index: int, event: TokenEvent) -> None:
        """Adds the log-probability of a token to those of a whole answer."""

    @abstractmethod
    def _finish(self, index: int, parts: Sequence[OutputPart]) -> list[SseEvent]:
        """The events of `finish`; `parts` are those that were held back until the end."""

    def _end(self, index: int, event: DoneEvent) -> list[OutputPart]:
        """Notes the end of a choice; returns the parts that were held back until it."""
        answer = self.answers[index]
        answer.finish_reason, answer.usage = event.finish_reason, event.usage
        answer.stop_string = event.stop_string
        if event.finish_reason in CUT:  # clients know no such word
            answer.finish_reason, answer.cut = "length", event.finish_reason
        self._unfinished -= 1
        return answer.end(event.text)
