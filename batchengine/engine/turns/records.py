"""JSON records of turns and sessions in the ledger.

Owns the two shapes: everything that a later run needs to continue a turn, and the facts about a
session that are reported later. A text that does not parse gives None or an empty record, never an
exception.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from batchengine.core import (
    FORM_CHAT,
    FORM_RESPONSES,
    PLAIN_OUTPUT,
    Constraint,
    GenerationRequest,
    OutputForm,
    Sampling,
    Sla,
)
from kv_store import keys

CALLS_MAX = 64  # latest tool calls that are kept of one session
CALLS_FIELD = '"calls":'  # in the text of a session that waits, or waited, for a tool call
# last tokens of a timeline in which the request with a tool call's result may differ: the end of
# the answer, which a stop sequence cuts and the template writes anew
CALL_TOLERANCE = 4
SAMPLE_TOKENS = 16  # kept of each side of a difference: enough to recognise the text


def unix_s() -> float:
    """The current time, which is only reported, never waited for."""
    return datetime.datetime.now(datetime.UTC).timestamp()


_OF_LEDGER = ("number", "ended_s", "cached_tokens")  # fields of a record that no request has


class TurnRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Parameters of a turn, which with its timeline define every later token.

    Fields may be added with a default, so that older programs and older records are read.
    `number` counts the turns that one run of the engine began; it orders the turns of one commit.
    `ended_s`, seconds since the Unix epoch, and `cached_tokens`, those of its prompt that had KV,
    are written at its end.
    """

    sampling: Sampling
    tokens_max: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sla: Sla = Sla()
    park: bool = False
    form: str = FORM_CHAT
    output: OutputForm = PLAIN_OUTPUT
    constraint: Constraint | None = None
    echo: str = ""
    choices: int = 1
    number: int = 0
    ended_s: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, request: GenerationRequest, number: int = 0) -> TurnRecord:
        """Make the record of a request, which has fields of the same names."""
        names = (name for name in cls.__struct_fields__ if name not in _OF_LEDGER)
        return cls(**{name: getattr(request, name) for name in names}, number=number)

    def request(
        self, request_id: str, session_id: str, tenant: str, prompt: list[int]
    ) -> GenerationRequest:
        """Return the request as its client had sent it."""
        fields = msgspec.structs.asdict(self)
        for name in _OF_LEDGER:
            del fields[name]
        return GenerationRequest(
            request_id, tuple(prompt), session_id=session_id, tenant=tenant, **fields
        )

    @property
    def is_forgotten(self) -> bool:
        """Whether it is of a response that its client deleted; others have an echo."""
        return self.form == FORM_RESPONSES and not self.echo

    def says_the_same(self, sampling: Sampling) -> bool:
        """Whether `sampling` picks the same tokens from the same logits."""
        return _essence(self.sampling) == _essence(sampling)

    def asks_the_same(self, request: GenerationRequest) -> bool:
        """Whether `request` may be a repetition of this one. A seed is compared only if its client
        sent it: one that sends none gets a new one each time."""
        seed = request.sampling.seed if request.has_seed else self.sampling.seed
        sampling = msgspec.structs.replace(request.sampling, seed=seed)
        names = ("tokens_max", "stop", "ignore_eos", "constraint", "choices")
        same = all(getattr(self, name) == getattr(request, name) for name in names)
        return same and self.says_the_same(sampling)


class Rebase(msgspec.Struct, frozen=True, omit_defaults=True):
    """Comparison of a new prompt with the timeline of its session, and the KV that was reused.

    The first `shared` tokens of the timeline (`timeline` tokens) and the prompt (`prompt` tokens)
    are equal; `old` and `new` are the next few tokens of each. `kept` tokens had KV when the turn
    was admitted (-1 = not yet); `reason` is why not more had.
    """

    shared: int
    timeline: int
    prompt: int
    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()
    kept: int = -1
    reason: str = ""

    @property
    def is_edit(self) -> bool:
        """Whether the prompt changes the timeline, instead of continuing or repeating it."""
        return self.shared < min(self.timeline, self.prompt)


class ParkedMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """The session waits for a tool call ("" = unknown id) since the Unix time `since_s`."""

    since_s: float
    tool_call_id: str = ""

    @classmethod
    def now(cls, tool_call_id: str) -> ParkedMark:
        """Make a mark with the current time, which is only reported, never waited for."""
        return cls(unix_s(), tool_call_id)


class TimelineMark(msgspec.Struct, frozen=True):
    """A digest of a timeline's first `tokens` tokens: all but the last CALL_TOLERANCE."""

    tokens: int
    digest: str

    @classmethod
    def of(cls, timeline: Sequence[int]) -> TimelineMark:
        """Make the mark of a timeline."""
        known = max(0, len(timeline) - CALL_TOLERANCE)
        digest = hashlib.sha256(keys.token_bytes(timeline[:known]))
        return cls(known, digest.hexdigest())


class SessionMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Durable facts of a session besides its tokens. `repr_id` (hex): representation of its last
    KV. `rebase` is of the last turn, `edit` of the last that changed history. `calls`: tool calls,
    or turns whose calls it waits for. `parked`: until the next turn. `mark`: of its timeline, if it
    has tool calls. `name`: what its client calls it; `used_s`: Unix time at which its last turn
    began or ended, for listings. `parent`: the session that started it. `prompt_tokens`: of the
    last turn, as its client sent it; 0 = unknown."""

    repr_id: str = ""
    rebase: Rebase | None = None
    edit: Rebase | None = None
    calls: tuple[str, ...] = ()
    parked: ParkedMark | None = None
    mark: TimelineMark | None = None
    name: str = ""
    used_s: int = 0
    parent: str = ""
    prompt_tokens: int = 0


@dataclass(slots=True)
class SessionFacts:
    """What the engine has in memory of a named session besides its timeline."""

    meta: SessionMeta
    old_epoch: int = 0  # in an earlier run, whose arenas may have rows of it; 0 = none
    old_owner: int = 0  # incarnation of its worker in that run
    changed: tuple[str, ...] = ()  # descriptor fields that differ from those of its old KV
    parks: str | None = None  # parks at the end of its turn, for this tool call ("" = unknown id)
    restored: bool = False  # loaded from the ledger, and has not computed since


def rebase(timeline: Sequence[int], prompt: Sequence[int], shared: int) -> Rebase:
    """Compare `prompt` with `timeline`, of which the first `shared` tokens are equal."""
    end = shared + SAMPLE_TOKENS
    return Rebase(
        shared, len(timeline), len(prompt), tuple(timeline[shared:end]), tuple(prompt[shared:end])
    )


def last_prompt(meta: SessionMeta, length: int) -> int:
    """Return the tokens of the session's last prompt; all of its `length` tokens if unknown."""
    return min(meta.prompt_tokens or length, length)


def with_call(meta: SessionMeta, call: str) -> SessionMeta:
    """Return the meta of a session that waits for one more tool call."""
    calls = (*(one for one in meta.calls if one != call), call)[-CALLS_MAX:]
    return msgspec.structs.replace(meta, calls=calls)


def encode(record: TurnRecord | SessionMeta) -> str:
    """Return the record as JSON."""
    return msgspec.json.encode(record).decode()


def turn_record(text: str) -> TurnRecord | None:
    """Decode a turn; None if the text is not the record of a turn."""
    try:
        return msgspec.json.decode(text, type=TurnRecord)
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError):
        return None


def session_meta(text: str) -> SessionMeta:
    """Decode a session's meta; an empty record if the text is none."""
    try:
        return msgspec.json.decode(text, type=SessionMeta)
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError):
        return SessionMeta()


def parked_row(meta: SessionMeta) -> dict[str, Any]:
    """Return fields of a parked session that replace those of its row; {} if it is not parked."""
    if meta.parked is None:
        return {}
    since, call = round(meta.parked.since_s), meta.parked.tool_call_id
    return {"state": "parked", "parked_since": since, "tool_call_id": call or None}


def _essence(sampling: Sampling) -> Sampling:
    """Reset the fields that cannot change a token: the seed if greedy, and logprobs."""
    seed = sampling.seed if sampling.temperature else 0
    return msgspec.structs.replace(sampling, seed=seed, logprobs=-1)
