"""A turn: one generation being computed on one session, with what the scheduler needs to know.

Owns the numbers of a turn that do not belong to the session (which outlives it) nor to the
reader's stream. Plain state; the lane loop is the only writer.
"""

from __future__ import annotations

from batchengine import wire
from batchengine.core import PAGE_TOKENS, Sampling
from batchengine.engine.generation import Generation
from batchengine.scheduler import Row
from batchengine.session import Session

_ROW_FIELDS = (
    "rank", "deadline_ms", "key", "horizon_ms", "tpot_ms", "served_ms", "admitted_ms", "frontier",
    "to_compute", "open_until", "pages_held", "pages_max", "places_held", "running", "paused",
    "suspect", "pages_loose",
)  # fmt: skip
if Row._fields != _ROW_FIELDS:
    raise AssertionError("Turn.row fills the scheduler's Row by position")


class Turn:
    """One generation on one session. Times are milliseconds of the engine's clock."""

    __slots__ = (
        "admitted_ms", "cached_row", "deadline_ms", "doubts", "generation", "horizon_ms",
        "needs_match", "pages_max", "paused", "penalty_tokens", "priority", "rank", "reported",
        "salt", "served_ms", "session", "shared", "spec", "stop_early", "suspect_until",
        "timeline", "tpot_ms", "turn_id",
    )  # fmt: skip

    def __init__(
        self, session: Session, generation: Generation, *, rank: int, deadline_ms: float,
        horizon_ms: float, tpot_ms: float, now_ms: float,
    ) -> None:  # fmt: skip
        request = generation.request
        self.session = session
        self.generation = generation
        self.rank = rank
        self.deadline_ms = deadline_ms
        self.horizon_ms = horizon_ms
        self.tpot_ms = tpot_ms
        self.served_ms = now_ms
        self.admitted_ms = now_ms
        self.salt = request.tenant.encode()
        self.priority = 3 - rank  # of its pages against eviction: higher stays
        self.pages_max = -(-(len(request.prompt) + request.tokens_max) // PAGE_TOKENS)
        self.spec = spec_of(request.sampling)
        self.penalty_tokens = penalty_window(request.sampling)
        self.paused = False  # it computes nothing: its reader is slow,
        self.doubts = 0  # or so many of its pages wait for a verdict
        self.needs_match = False  # it lost KV: look once more what the store still has
        self.stop_early = bool(request.stop)  # text decides the end: it cannot wait for the emitter
        self.suspect_until = 0
        self.cached_row: Row | None = None  # valid while it waits
        self.reported = False  # its reader knows how much KV was reused
        self.timeline = 0  # tokens of the session when the turn began,
        self.shared = 0  # and how many of them begin this turn's own timeline
        self.turn_id = ""  # "" = not in the ledger

    def __repr__(self) -> str:
        return f"<Turn {self.generation.request_id} {self.session!r}>"

    def row(self, *, running: bool, loose: int | None = None) -> Row:
        """How the scheduler sees it; cached while it waits.

        `loose`: of its pages, those that only sessions without a seat hold; None = all.
        """
        if not running and self.cached_row is not None:
            return self.cached_row
        session = self.session
        pages = len(session.codes)
        # By position: 64 rows are made before every step, and names cost four times as much.
        row = Row._make(
            (
                self.rank,
                self.deadline_ms,
                session.key,
                self.horizon_ms,
                self.tpot_ms,
                self.served_ms,
                self.admitted_ms,
                session.frontier,
                len(session.tokens) - session.frontier,
                pages * PAGE_TOKENS,
                pages,
                self.pages_max,
                len(session.places),
                running,
                self.paused or session.is_expecting,
                session.suspect,
                0 if running else pages if loose is None else loose,
            )
        )
        if not running:
            self.cached_row = row
        return row

    def spec_now(self) -> wire.Spec:
        """The sampling spec for the next token, its penalty window counted."""
        if not self.penalty_tokens:
            return self.spec
        spec, window = self.spec, min(self.penalty_tokens, len(self.session.tokens))
        return wire.Spec(
            spec.temperature,
            spec.top_k,
            spec.top_p,
            spec.min_p,
            spec.repetition_penalty,
            spec.presence_penalty,
            spec.frequency_penalty,
            spec.seed,
            spec.logprobs,
            spec.bias,
            window,
        )


def penalty_window(sampling: Sampling) -> int:
    """Tokens of history the sampler needs; 0 when every penalty is off."""
    if (
        sampling.repetition_penalty == 1.0
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
    ):
        return 0
    return sampling.penalty_tokens


def spec_of(sampling: Sampling) -> wire.Spec:
    """Sampling parameters as they travel, with no history."""
    return wire.Spec(
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.seed,
        sampling.logprobs,
        sampling.logit_bias,
        0,
    )
