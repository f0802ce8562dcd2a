"""Report of one migration: plain data for the decision log, for metrics and for the caller."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any


class MoveCause(enum.StrEnum):
    """Cause of a migration."""

    ROUTER = "router"  # the session's next turn computes on another lane
    PROMOTION = "promotion"
    DEMOTION = "demotion"
    FASTER = "promotion: it ends earlier"  # of a turn that no request waits behind
    RELIEF = "demotion: urgent turns need its lane"
    IDLE = "demotion: idle"
    EVACUATION = "evacuation"  # its lane is down or drained


class MoveOutcome(enum.Enum):
    """How a migration ended."""

    MOVED = "moved"
    ALREADY = "already there"
    STAYED = "aborted"  # the session is where it was; `why` has the reason
    FAILED = "failed"  # the same, because of a defect


@dataclass(frozen=True, slots=True)
class MoveReport:
    """Report of a migration. `gap_ms`: last commit on the source to the first on the target; 0 if
    the session had nothing to compute. `why` is set for STAYED and FAILED."""

    session_id: str
    source: str  # lane names; "none": it never computed
    target: str
    cause: MoveCause
    tokens: int = 0
    pages_shared: int = 0
    pages_copied: int = 0
    rows_copied: int = 0
    rows_recomputed: int = 0
    gap_ms: float = 0.0
    total_ms: float = 0.0
    outcome: MoveOutcome = MoveOutcome.MOVED
    why: str = ""
    reason: str = ""  # why a peer was chosen, or refused, if the caller named no target

    @property
    def result(self) -> str:
        """The outcome as text."""
        return f"{self.outcome.value}: {self.why}" if self.why else self.outcome.value

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        fields = dataclasses.asdict(self)
        del fields["outcome"], fields["why"]
        return {**fields, "cause": self.cause.value, "result": self.result}
