"""Slots of one worker for recurrent states, and how far apart states are saved."""

from __future__ import annotations

from batchengine.core import PAGE_TOKENS
from batchengine.session_kv import StateSlot

SAVED_PER_KV = 2  # saved states take at most about this many times the bytes of the pages
INTERVAL_MIN = 1024  # tokens


class StatePool:
    """The slots of one run of a worker. Those of an earlier run are released to their own pool."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self._free = [*range(n_slots - 1, -1, -1)]  # the one that was used last is taken first

    def __repr__(self) -> str:
        return f"<StatePool {self.n_free} of {self.n_slots} free>"

    @property
    def n_free(self) -> int:
        """Slots that no state has."""
        return len(self._free)

    @property
    def n_taken(self) -> int:
        """Slots that a state has, or will have."""
        return self.n_slots - self.n_free

    def take(self) -> StateSlot | None:
        """A slot, which its taker must release; None: all are taken."""
        return StateSlot(self._free.pop(), self._free.append) if self._free else None


def save_interval(state_bytes: int, row_bytes: int) -> int:
    """Tokens between two saved states of a timeline, whose rows have `row_bytes` a token."""
    tokens = state_bytes // (SAVED_PER_KV * row_bytes)
    return max(INTERVAL_MIN, -(-tokens // PAGE_TOKENS) * PAGE_TOKENS)
