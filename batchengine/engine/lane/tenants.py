"""The time that each tenant of a lane has used, as the scheduler compares it.

Start-time fair queueing: owns the milliseconds of steps per weight of each class and tenant, and
the turns that tenants take at rule 6. A tenant that comes starts level with the least served one of
its class, and one that wants less than its share is owed `CREDIT_MS` at most: unused shares are not
saved up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from batchengine.policy.rows import RANK, TenantRow, TurnRow

CREDIT_MS = 500.0  # per weight: some steps, and far less than a quantum of all seats


class Tenants:
    """Tenants of one lane. While there is one only, nothing is counted."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """`weights`: of the tenants' shares; 1 for a tenant that is not in it."""
        self._weights = weights
        self._used: dict[tuple[int, str], float] = {}  # also of those that left a moment ago
        self._since_ms: dict[str, float] = {}
        self._present: set[tuple[int, str]] = set()

    def __repr__(self) -> str:
        return f"<Tenants {sorted(self._since_ms)}>"

    @property
    def several(self) -> bool:
        """Whether the last plan was for more than one tenant."""
        return bool(self._present)

    def weight(self, tenant: str) -> float:
        """Return the weight of the tenant's share."""
        return self._weights.get(tenant, 1.0)

    def computed(self, rank: int, tenant: str, ms: float) -> None:
        """Count the time of one entry of a step that was committed."""
        if self._present:
            key = rank, tenant
            used = self._used.get(key, 0.0)
            self._used[key] = used + ms / self.weight(tenant)

    def aged(self, tenant: str, now_ms: float) -> None:
        """Record that rule 6 admitted a session of the tenant."""
        if self._present:
            self._since_ms[tenant] = now_ms

    def clear(self) -> None:
        """Forget every count: one tenant is left, or none."""
        if self._present:
            self._used.clear()
            self._since_ms.clear()
            self._present = set()

    def rows(self, turns: Iterable[TurnRow], now_ms: float) -> dict[str, TenantRow]:
        """Return the tenants of these turns, which are several, for the scheduler."""
        present = {(turn.rank, turn.tenant) for turn in turns}
        names = {tenant for _, tenant in present}
        self._level(present)
        self._since_ms = {name: self._since_ms.get(name, now_ms) for name in names}
        return {
            name: TenantRow(
                self.weight(name),
                self._since_ms[name],
                tuple([self._used.get((rank, name), 0.0) for rank in RANK.values()]),
            )
            for name in names
        }

    def _level(self, present: set[tuple[int, str]]) -> None:
        """Raise what newcomers have used to the least of those that stayed, class by class."""
        for rank in RANK.values():
            stayed = [p for p in present & self._present if p[0] == rank]
            level = min([self._used.get(key, 0.0) for key in stayed], default=0.0)
            for key in present - self._present:
                if key[0] == rank:
                    self._used[key] = max(self._used.get(key, 0.0), level)
            here = [key for key in present if key[0] == rank]
            most = max([self._used[key] for key in here], default=0.0)
            for key in here:
                self._used[key] = max(self._used[key], most - CREDIT_MS)
            for key in [p for p in self._used if p[0] == rank and p not in present]:
                if not stayed or self._used[key] <= level:
                    del self._used[key]
        self._present = present
