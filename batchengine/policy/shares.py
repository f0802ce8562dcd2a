"""Shares of tenants in a step that is being planned: who is next, and whose seat may be taken.

Owns the arithmetic of rule 7 of the scheduler: plain counts that change as one plan is built, by
the tokens and seats that it grants. With one tenant every load is equal, and rows keep their order.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import attrgetter

from batchengine.policy.rows import TenantRow, TurnRow

Line = deque[TurnRow]  # sessions of one class and tenant, by deadline
ShareKey = tuple[int, str]  # a class, by rank, and a tenant


class Shares:
    """Seats, time and pages of each tenant, per weight."""

    def __init__(self, tenants: Mapping[str, TenantRow], running: Iterable[TurnRow]) -> None:
        """`tenants` empty or of one: they need no shares."""
        self.several = len(tenants) > 1
        self._tenants = tenants
        self._used: defaultdict[ShareKey, float] = defaultdict(float)
        self._seats: defaultdict[ShareKey, int] = defaultdict(int)
        self._pages: defaultdict[str, int] = defaultdict(int)
        if not self.several:
            return
        for name, tenant in tenants.items():
            self._used.update({(rank, name): used for rank, used in enumerate(tenant.used)})
        for row in running:
            self._pages[row.tenant] += row.pages_held
            if not row.paused and row.to_compute > 0:
                self._seats[row.rank, row.tenant] += 1

    # ---- what the builder grants ----

    def computed(self, row: TurnRow, ms: float) -> None:
        """Count time that the plan gives to a row."""
        if self.several:
            self._used[row.rank, row.tenant] += ms / self._weight(row)

    def seated(self, row: TurnRow, seats: int) -> None:
        """Count a seat that the plan gives to a row (1) or takes from it (-1)."""
        if self.several:
            self._seats[row.rank, row.tenant] += seats

    # ---- loads ----

    def _weight(self, row: TurnRow) -> float:
        tenant = self._tenants.get(row.tenant)
        return 1.0 if tenant is None else tenant.weight

    def used(self, row: TurnRow) -> float:
        """Milliseconds of steps per weight that the row's tenant has used in its class."""
        return self._used[row.rank, row.tenant] if self.several else 0.0

    def load(self, row: TurnRow, more: int = 0) -> float:
        """Seats per weight that the row's tenant has in its class, with `more` seats."""
        if not self.several:
            return 0.0
        return (self._seats[row.rank, row.tenant] + more) / self._weight(row)

    def owed_ms(self, row: TurnRow, decodes: Iterable[TurnRow]) -> float:
        """Time by which the row's tenant has used less than every other one that decodes in its
        class."""
        if not self.several:
            return 0.0
        others = [r for r in decodes if r.rank == row.rank and r.tenant != row.tenant]
        least = min([self.used(other) for other in others], default=0.0)
        return max(0.0, least - self.used(row)) * self._weight(row)

    def pages(self, row: TurnRow) -> float:
        """Pages per weight that the row's tenant holds."""
        return self._pages[row.tenant] / self._weight(row) if self.several else 0.0

    def since_ms(self, row: TurnRow) -> float:
        """When rule 6 last admitted a session of the row's tenant, or when that came."""
        tenant = self._tenants.get(row.tenant)
        return 0.0 if tenant is None else tenant.since_ms

    # ---- whose seat may be taken ----

    def are_rivals(self, victim: TurnRow, row: TurnRow) -> bool:
        """Whether different tenants of one class divide the seats of these rows."""
        return self.several and victim.rank == row.rank and victim.tenant != row.tenant

    def yields_page(self, row: TurnRow, first: TurnRow) -> bool:
        """Whether a page that `row` holds is better used by `first`."""
        if row.rank != first.rank or row.tenant == first.tenant:
            return row > first
        return self.pages(row) >= self.pages(first)

    # ---- order ----

    def page_order(self, row: TurnRow) -> tuple[int, float, float, int]:
        """Order in which rows get the last pages."""
        return row.rank, self.pages(row), row.deadline_ms, row.key

    def seat_order(self, row: TurnRow) -> tuple[int, float, float, float, int]:
        """Order in which waiting rows take seats."""
        return row.rank, self.load(row, 1), self.used(row), row.deadline_ms, row.key

    def token_order(self, row: TurnRow) -> tuple[int, float, float, int]:
        """Order in which rows of different tenants get tokens."""
        return row.rank, self.used(row), row.deadline_ms, row.key

    def rotation(self, rows: Iterable[TurnRow]) -> list[TurnRow]:
        """Rows by last service, where every tenant in turn has the next one."""
        by_service = sorted(rows, key=lambda r: (r.served_ms, r.key))
        if not self.several:
            return by_service
        places: Counter[str] = Counter()
        turns: list[tuple[float, float, int, TurnRow]] = []
        for row in by_service:
            places[row.tenant] += 1
            turns.append((places[row.tenant] / self._weight(row), row.served_ms, row.key, row))
        return [row for *_, row in sorted(turns)]


class Lines:
    """Sessions that want longer work: a line per class and tenant, running and waiting ones apart.

    `waiting` and `running` are sorted, so each line is sorted by deadline.
    """

    def __init__(
        self, shares: Shares, running: Iterable[TurnRow], waiting: Iterable[TurnRow]
    ) -> None:
        self._shares = shares
        self._running = _lines(running)
        self._waiting = _lines(waiting)

    def waiting(self) -> Iterator[Line]:
        """Every line of waiting sessions."""
        return iter(self._waiting.values())

    def rivals(self, row: TurnRow) -> Iterator[Line]:
        """Lines of waiting sessions in the row's class of tenants with a smaller load."""
        for (rank, tenant), line in self._waiting.items():
            is_other = rank == row.rank and tenant != row.tenant and line
            if is_other and self._shares.load(line[0]) < self._shares.load(row):
                yield line

    def head(self) -> TurnRow | None:
        """The session to serve next: by class, tenant and deadline."""
        shares = self._shares
        running = [line[0] for line in self._running.values() if line]
        waiting = [line[0] for line in self._waiting.values() if line]
        if not waiting:
            return min(running, key=shares.token_order, default=None)
        next_seat = min(waiting, key=shares.seat_order)
        if not running:
            return next_seat
        next_chunk = min(running, key=shares.token_order)
        return min(next_seat, next_chunk, key=shares.token_order)

    def take(self, row: TurnRow) -> None:
        """Remove the head."""
        lines = self._running if row.running else self._waiting
        lines[row.rank, row.tenant].popleft()

    def close(self) -> None:
        """Remove every waiting session: none of them can be admitted to this step."""
        self._waiting.clear()


def _lines(rows: Iterable[TurnRow]) -> defaultdict[ShareKey, Line]:
    found: defaultdict[ShareKey, Line] = defaultdict(deque)
    for key, run in groupby(rows, attrgetter("rank", "tenant")):
        found[key].extend(run)
    return found
