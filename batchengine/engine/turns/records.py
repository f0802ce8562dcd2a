"""What the ledger keeps, as text, about a turn and about a session.

Owns the two JSON shapes: everything that is needed to go on with a turn in another life, and what
people and agents may ask about a session later. Refuses a damaged text by answering "unknown":
the ledger is a file, and a file may say anything.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from batchengine.core import FORM_CHAT, GenerationRequest, Sampling, Sla

CALLS_MAX = 64  # tool calls one session is remembered by: those of its last turns
CALLS_FIELD = '"calls":'  # in the text of a session that waits, or waited, for one
SAMPLE_TOKENS = 16  # of each side of a difference: enough to recognise the text


class TurnRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a turn was asked for: with the timeline and the seed it defines every later token.

    Fields may be added with a default, so that older programs and older records are read.
    `number` counts the turns one life of the engine began: those that one commit of the ledger
    holds are ordered by it.
    """

    sampling: Sampling
    tokens_max: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sla: Sla = Sla()
    park: bool = False
    form: str = FORM_CHAT
    number: int = 0

    @classmethod
    def of(cls, request: GenerationRequest, number: int = 0) -> TurnRecord:
        """The durable part of a request."""
        return cls(
            request.sampling,
            request.tokens_max,
            request.stop,
            request.ignore_eos,
            request.sla,
            request.park,
            request.form,
            number,
        )

    def request(
        self, request_id: str, session_id: str, tenant: str, prompt: list[int]
    ) -> GenerationRequest:
        """The request again, as its client had sent it."""
        return GenerationRequest(
            request_id=request_id,
            prompt=tuple(prompt),
            tokens_max=self.tokens_max,
            sampling=self.sampling,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            sla=self.sla,
            session_id=session_id,
            tenant=tenant,
            park=self.park,
            form=self.form,
        )

    def says_the_same(self, sampling: Sampling) -> bool:
        """Whether `sampling` picks the same tokens from the same logits."""
        return _essence(self.sampling) == _essence(sampling)

    def asks_the_same(self, request: GenerationRequest) -> bool:
        """Whether `request` may be this one sent again. Not by the seed: who sends none gets
        another one each time, and the one of the record counts."""
        sampling = msgspec.structs.replace(request.sampling, seed=self.sampling.seed)
        limits = (request.tokens_max, request.stop, request.ignore_eos)
        same = (self.tokens_max, self.stop, self.ignore_eos) == limits
        return same and self.says_the_same(sampling)


class Rebase(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a new prompt met the timeline of its session, and what became of the KV.

    Of a timeline of `timeline` tokens and a prompt of `prompt`, the first `shared` are equal;
    `old` and `new` are the few tokens that follow in each. `kept` tokens had KV when the turn
    was admitted (-1 = not yet), the rest was computed.
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
        """The client changed what the session had: a mere continuation shares all of it."""
        return self.shared < min(self.timeline, self.prompt)


class ParkedMark(msgspec.Struct, frozen=True, omit_defaults=True):
    """A session waits, since this Unix time, for a tool call ("" = no known one)."""

    since_s: float
    tool_call_id: str = ""

    @classmethod
    def now(cls, tool_call_id: str) -> ParkedMark:
        """The present, by the calendar: later runs and people read it. Nothing waits by it."""
        return cls(datetime.datetime.now(datetime.UTC).timestamp(), tool_call_id)


class SessionMeta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What else is durable about a session. `repr_id` is hex: whose KV it last had. `rebase` is
    of the last turn, `edit` of the last one that changed history. `parked` until the next turn."""

    repr_id: str = ""
    rebase: Rebase | None = None
    edit: Rebase | None = None
    calls: tuple[str, ...] = ()
    parked: ParkedMark | None = None


@dataclass(slots=True)
class SessionFacts:
    """What the engine remembers about a named session beside its timeline."""

    meta: SessionMeta
    old_epoch: int = 0  # of the life before this one, 0 = none: its open rows may still exist,
    old_owner: int = 0  # in arenas of this worker's engine
    changed: tuple[str, ...] = ()  # fields of the representation that are not what they were
    parks: str | None = None  # at the end of its turn, for this tool call ("" = none it knows of)
    restored: bool = False  # it came from the ledger, and has not computed since


def rebase(timeline: Sequence[int], prompt: Sequence[int], shared: int) -> Rebase:
    """How `prompt` meets `timeline`, which it shares the first `shared` tokens with."""
    end = shared + SAMPLE_TOKENS
    return Rebase(
        shared, len(timeline), len(prompt), tuple(timeline[shared:end]), tuple(prompt[shared:end])
    )


def encode(record: TurnRecord | SessionMeta) -> str:
    """As the ledger keeps it."""
    return msgspec.json.encode(record).decode()


def turn_record(text: str) -> TurnRecord | None:
    """The inverse of `encode`; None if the text is not a turn of this program."""
    try:
        return msgspec.json.decode(text, type=TurnRecord)
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError):
        return None


def session_meta(text: str) -> SessionMeta:
    """The inverse of `encode`; an empty record if the text is none."""
    try:
        return msgspec.json.decode(text, type=SessionMeta)
    except (msgspec.ValidationError, msgspec.DecodeError, ValueError):
        return SessionMeta()


def parked_row(meta: SessionMeta) -> dict[str, Any]:
    """What a listing says of a parked session, over what it would say; {} for any other."""
    if meta.parked is None:
        return {}
    since, call = round(meta.parked.since_s), meta.parked.tool_call_id
    return {"state": "parked", "parked_since": since, "tool_call_id": call or None}


def _essence(sampling: Sampling) -> Sampling:
    """Without what cannot change a token: the seed of a greedy choice, and logprobs."""
    seed = sampling.seed if sampling.temperature else 0
    return msgspec.structs.replace(sampling, seed=seed, logprobs=-1)
