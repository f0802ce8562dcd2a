"""Questions an operator asks the engine, and chores of the store on demand.

Owns the answers that need no lane: decisions, sessions on disk, store stat, verify and gc. Moves
no session and changes no timeline.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from batchengine.core import BatchEngineError
from batchengine.engine import refusals, reports
from batchengine.engine.dispatch import Dispatcher
from batchengine.engine.journal import PARKED
from batchengine.engine.record import parked_row, session_meta
from batchengine.engine.reopen import Reopener
from batchengine.engine.tables import Tables
from batchengine.engine.upkeep import Upkeep
from kv_store.errors import StoreError

STORE_OPS = ("stat", "verify", "gc")


class Desk:
    """The part of the engine that answers questions about it."""

    _tables: Tables
    _dispatch: Dispatcher
    _reopener: Reopener | None
    _upkeep: Upkeep | None

    def lanes(self) -> list[dict[str, Any]]:
        """One row per lane."""
        return reports.lane_rows(self._tables)

    def sessions(self, tenant: str | None = None) -> list[dict[str, Any]]:
        """Named sessions in memory, anonymous ones that compute now, and interrupted ones.

        With `tenant` only those of that tenant.
        """
        rows = reports.session_rows(self._tables, tenant)
        if self._reopener is not None and self._reopener.interrupted:
            waiting = self._reopener.interrupted_rows()
            rows += [row for row in waiting if tenant in (None, row["tenant"])]
        return rows

    def has_session(self, tenant: str, session_id: str) -> bool:
        """Whether `sessions` has this one."""
        name, tables = (tenant, session_id), self._tables
        computing = (turn.session for turn in tables.turns.values())
        return (
            name in tables.named
            or (self._reopener is not None and name in self._reopener.interrupted)
            or any((s.tenant, s.session_id) == name for s in computing)
        )

    def requests(self) -> list[dict[str, Any]]:
        """Requests that were admitted and have neither ended nor been cancelled."""
        return reports.request_rows(self._tables)

    def stats(self) -> dict[str, Any]:
        """Numbers for /health and the status command."""
        waiting = 0 if self._reopener is None else len(self._reopener.interrupted)
        return {**reports.numbers(self._tables), "sessions_interrupted": waiting}

    def explain(self, given: str, tenant: str | None = None) -> dict[str, Any]:
        """What was decided about a request or session, why, and what came of it.

        `given` is an id or a unique prefix of one; with `tenant`, of what is that tenant's.
        Raises BatchEngineError (404, 409).
        """
        return self._dispatch.explain(given, tenant)

    def predicted(self, request_id: str) -> dict[str, Any] | None:
        """Lane, ttft_ms, tpot_ms and move_ms as they were predicted; None = nobody knows."""
        record = self._dispatch.log.of_request(request_id)
        found = None if record is None else record.decision.predicted
        return None if found is None else found._asdict()

    async def stored_sessions(self, count_max: int) -> list[dict[str, Any]]:
        """Sessions of the ledger, most recently used first; those in memory are among them."""
        store = self._tables.store
        if store is None:
            raise refusals.loading(0.0)
        infos = await asyncio.wrap_future(store.ledger.list_sessions())
        rows: list[dict[str, Any]] = []
        for info in infos[:count_max]:
            parked = info.state == PARKED
            rows.append(
                {
                    "session_id": info.id.partition("\x1f")[2],  # see reopen.durable_name
                    "tenant": info.tenant,
                    "state": "on disk",
                    "tokens": info.ledger_len,
                    "epoch": info.epoch,
                    "lane": info.owner_lane,
                    **({"state": PARKED, **parked_row(session_meta(info.meta))} if parked else {}),
                }
            )
        return rows

    async def store_op(self, op: str) -> dict[str, Any]:
        """stat: numbers. verify: read every page, condemn bad ones. gc: forget what may go."""
        store = self._tables.store
        if store is None:
            raise refusals.loading(0.0)
        if op == "stat":
            return store.stat()
        try:
            if op == "verify":
                return dataclasses.asdict(await asyncio.wrap_future(store.verify_all()))
            if op == "gc" and self._upkeep is not None:
                return dataclasses.asdict(await self._upkeep.collect())
        except StoreError as error:
            raise BatchEngineError(
                "BE1605", error.what, why=error.why, fix=error.fix, api_code="store_failed"
            ) from error
        raise ValueError(f"{op} is none of {STORE_OPS}")
