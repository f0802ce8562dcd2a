"""The step in flight: its frame, what its answer applies to, and the check of the answer."""

from __future__ import annotations

from typing import NamedTuple

from batchengine import errors
from batchengine.engine.turns.turn import Turn
from batchengine.kv import Seal
from batchengine.kv.lane_kv import Chores
from batchengine.session import Session
from batchengine.wire import lane as wire
from kv_store.arenas.arena import ArenaSlot


class StepEntry(NamedTuple):
    """One entry of the step in flight. `wants`: the entry samples a token."""

    turn: Turn
    n_tokens: int
    wants: bool


class InFlightStep(NamedTuple):
    """The frame of a step in flight, and the turns, slots and seals that its answer is for."""

    step: wire.Step
    payload: bytes
    parts: list[StepEntry]
    fills: list[tuple[Turn, int, ArenaSlot]]
    verify: list[Seal]
    chores: Chores
    predicted_ms: float

    def holds(self, session: Session) -> bool:
        """Whether the session computes in this step."""
        return any(part.turn.session is session for part in self.parts)


def check_answer(in_flight: InFlightStep, done: wire.StepDone) -> None:
    """Raise STEP_MISMATCH unless every part of the answer fits the frame that was sent."""
    without_rows, asked = {*done.nonfinite, *done.unreachable}, in_flight.step.import_rows
    wanted = [
        part.turn.session.key
        for index, part in enumerate(in_flight.parts)
        if part.wants and index not in without_rows
    ]
    if (
        wanted != [row.session for row in done.rows]
        or not without_rows <= set(range(len(in_flight.parts)))
        or any(not in_flight.step.entries[index].segments for index in done.unreachable)
        or len(done.digests) != len(in_flight.fills) + len(in_flight.chores.digest)
        or len(done.verified) != len(in_flight.verify)
        or len(done.imported) != len(asked)
        or any(
            not 0 <= n <= import_rows.rows
            for n, import_rows in zip(done.imported, asked, strict=True)
        )
    ):
        raise errors.STEP_MISMATCH()
