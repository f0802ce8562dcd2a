"""Fair admission of requests: in one turn of the event loop one request of each key begins.

Without it a key whose requests arrive together would have the event loop begin all of them before
it goes on with anything else. So a request of another key waits for one of them at each of its
steps, instead of for all.
"""

from __future__ import annotations

import asyncio
from collections import deque


class FairAdmission:
    """The requests that wait for their turn, by tenant."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._begun: set[str] = set()  # tenants with a request that began in this turn

    def __repr__(self) -> str:
        return f"<FairAdmission waiting={sum(map(len, self._waiting.values()))}>"

    async def begin(self, tenant: str) -> None:
        """Returns in the first turn in which this is the tenant's next request."""
        if tenant not in self._begun:
            self._begin(tenant)
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        await turn

    def _begin(self, tenant: str) -> None:
        if not self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._begun.add(tenant)

    def _next_turn(self) -> None:
        self._begun.clear()
        for tenant, waiting in list(self._waiting.items()):
            while waiting:
                turn = waiting.popleft()
                if not turn.done():  # its client is there
                    turn.set_result(None)
                    self._begin(tenant)
                    break
            else:
                del self._waiting[tenant]
