"""A step in flight, what comes out of it, and a session that is between two lanes. Plain data."""

from __future__ import annotations

from typing import NamedTuple

from batchengine import wire
from batchengine.core import BatchEngineError
from batchengine.engine.turn import Turn
from batchengine.pages import Seal
from batchengine.pages.adoption import Chores
from batchengine.session import Session
from kv_store.arena import ArenaPlace


class Part(NamedTuple):
    """One entry of the step in flight."""

    turn: Turn
    n_tokens: int
    wants: bool


class Flight(NamedTuple):
    """A step in flight: the frame, and what to do with its answer."""

    step: wire.Step
    payload: bytes
    parts: list[Part]
    fills: list[tuple[Turn, int, ArenaPlace]]
    verify: list[Seal]
    chores: Chores
    predicted_ms: float

    def holds(self, session: Session) -> bool:
        """Whether the session computes in this step."""
        return any(part.turn.session is session for part in self.parts)


class Frozen(NamedTuple):
    """A session between two lanes, or about to stay: its turn, if any, and whether it had a seat.

    `last_ms` is when its last token was committed.
    """

    turn: Turn | None
    seated: bool
    last_ms: float


class Emission(NamedTuple):
    """Something a reader will see: a token, or the end of the stream."""

    turn: Turn
    row: wire.Row | None
    finish: str = ""


def check_answer(flight: Flight, done: wire.StepDone) -> None:
    """Every part of the answer belongs to what was asked; places in a list are no identity."""
    poisoned, asked = set(done.poisoned), flight.step.adopt
    wanted = [
        part.turn.session.key
        for index, part in enumerate(flight.parts)
        if part.wants and index not in poisoned
    ]
    if (
        wanted != [row.session for row in done.rows]
        or not poisoned <= set(range(len(flight.parts)))
        or len(done.digests) != len(flight.fills) + len(flight.chores.digest)
        or len(done.verified) != len(flight.verify)
        or len(done.adopted) != len(asked)
        or any(not 0 <= n <= adopt.rows for n, adopt in zip(done.adopted, asked, strict=True))
    ):
        raise BatchEngineError("BE2305", "the worker answered another step than it was asked")
