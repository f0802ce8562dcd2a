"""Work on the store while no request computes: scrub, garbage collection, checks.

Owns the intervals: scrubbing takes at most SCRUB_SHARE of what the disk can read, and only while
nothing is computed. The model's files are compared once a minute.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from batchengine import errors
from batchengine.engine.audit.audit import Audit
from batchengine.engine.audit.canary import Canary
from batchengine.engine.audit.model_files import ModelFiles
from batchengine.engine.lane.recompute import RecomputeFailed
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.state import EngineState
from kv_store.errors import StoreError, StoreFull
from kv_store.ledger.ledger import COMPACT_BYTES_MAX
from kv_store.pages.maintenance import GcReport
from kv_store.store import Store

log = logging.getLogger("batchengine.audit")

IDLE_S = 5.0  # an engine without a turn for so long is idle
SCRUB_SHARE = 0.05  # of the disk's read rate
SCRUB_S_MIN = 0.25  # between two pages
REST_S = 3600.0  # after every page was read once
FAILED_S = 60.0  # after a round that failed
GC_S = 300.0
LEDGER_S = 5.0  # between two looks at the ledger's size: clients may fill it quickly
WATCH_S = 60.0
UNMAP_S = 0.2
UNMAPS_MAX = 10  # tries to rewrite the ledger after extents were deleted for it


class Maintenance:
    """Background tasks on store and model files. Use: `start` once."""

    def __init__(
        self,
        state: EngineState,
        store: Store,
        recovery: SessionRecovery,
        audit: Audit,
        n_vocab: int,
    ) -> None:
        self._state = state
        self._store = store
        self._recovery = recovery
        self._idle_since = time.monotonic()
        self._collected = 0, 0  # sessions and their bytes after the last garbage collection
        self._files = ModelFiles(state, store.pages.descriptor.model_hash)
        self._canary = Canary(state, audit, n_vocab)

    def start(self, spawn: Callable[[Coroutine[Any, Any, None], str], object]) -> None:
        """Start every task by `spawn(coroutine, name)`."""
        rounds = [(self._scrub, "scrub"), (self._collect, "gc"), (self._watch, "watch")]
        rounds.append((self._files.decide, "model"))
        if self._state.config.limits.canary_s > 0:
            rounds.append((self._canary.look, "canary"))
        for work, name in rounds:
            spawn(_for_ever(work, name), name)

    # --------------------------------------------------------------------------------- scrub

    @property
    def is_idle(self) -> bool:
        """Whether no turn has computed for IDLE_S."""
        now = time.monotonic()
        if self._state.turns or self._state.waiting:
            self._idle_since = now
        return now - self._idle_since >= IDLE_S

    async def _scrub(self) -> None:
        """Read every page once, then sleep for REST_S. A bad one, which the store has invalidated,
        is computed again when it is needed."""
        for pool in self._store.pools:  # those of other models have pages of peers
            left = pool.index.used
            while left > 0:
                rate = self._store.rates.read_bytes_per_s or 1e8
                page_s = pool.layout.page_bytes / rate
                await asyncio.sleep(max(SCRUB_S_MIN, page_s / SCRUB_SHARE))
                if not self.is_idle:
                    continue
                found = await asyncio.wrap_future(pool.scrub_next())
                if found is None:
                    break
                left -= 1
                result = "good" if found.good else "bad"
                self._state.metrics.kv_scrubbed_pages_total.labels(result).inc()
                if not found.good:
                    log.error("scrub: page %r does not verify", found.ref)
        await asyncio.sleep(REST_S if self.is_idle else IDLE_S)

    # -------------------------------------------------------------------------------- garbage

    async def _collect(self) -> None:
        for _ in range(max(1, round(GC_S / LEDGER_S))):
            await asyncio.sleep(min(GC_S, LEDGER_S))
            if self._is_ledger_crowded():
                break
        if self._is_ledger_crowded() or self._is_crowded():
            log.info("gc: %s", await self.collect())

    async def collect(self) -> GcReport:
        """Run the store's garbage collection, which keeps the sessions of `keep`."""
        report = await asyncio.wrap_future(self._store.gc(self.keep()))
        stat = self._store.ledger.stats
        self._collected = stat.sessions, stat.session_bytes
        return report

    async def collect_all(self) -> dict[str, Any]:
        """Collect garbage and rewrite the ledger. If the disk has no room for that, extents are
        deleted for it: their number is `extents_given`. `left`: why the ledger was not rewritten,
        "" = it was."""
        collected, given = await self.collect(), 0
        left = await self._rewrite()
        if left:
            given = await asyncio.wrap_future(self._store.give_disk_space())
            for _ in range(UNMAPS_MAX if given else 0):  # a worker may still map what was deleted
                left = await self._rewrite()
                if not left:
                    break
                await asyncio.sleep(UNMAP_S)
        return {**dataclasses.asdict(collected), "extents_given": given, "left": left}

    async def _rewrite(self) -> str:
        """Rewrite the ledger; why the disk has no room for it, "" = it was done."""
        try:
            await asyncio.wrap_future(self._store.ledger.clean(COMPACT_BYTES_MAX))
        except StoreFull as error:
            return f"{error.what}: {error.why}"
        return ""

    def _is_ledger_crowded(self) -> bool:
        """Whether the ledger is larger than a limit, and garbage collection may help by now."""
        stat = self._store.stat()
        sessions, size = int(stat["sessions"]), int(stat["ledger_bytes"])
        is_over = sessions > int(stat["sessions_max"]) or size > int(stat["ledger_bytes_max"])
        return is_over and (sessions, size) != self._collected

    def _is_crowded(self) -> bool:
        """Whether the store has too many sessions or pages, or extents of other models fill it."""
        stat = self._store.stat()
        used, pages_max = int(stat["pages_total"]) - int(stat["pages_free"]), int(stat["pages_max"])
        foreign, budget = int(stat["extent_bytes_other_reprs"]), int(stat["budget_bytes"])
        return (
            int(stat["sessions"]) > int(stat["sessions_max"])
            or used * 10 > pages_max * 9
            or (foreign > 0 and int(stat["extent_bytes"]) * 10 > budget * 9)
        )

    def keep(self) -> list[str]:
        """Sessions that garbage collection must keep: those in memory, and interrupted ones."""
        names = [session.name.decode() for session in self._state.sessions.values()]
        return names + [info.id for info in self._recovery.interrupted.values()]

    # ---------------------------------------------------------------------------------- model

    async def _watch(self) -> None:
        await asyncio.sleep(WATCH_S)
        await self._files.look()
        if await asyncio.to_thread(self._store.is_in_place):
            self._state.troubles.pop("store", None)
        else:
            why = f"the folder of the KV store {self._store.path} was moved, removed or replaced"
            self._state.troubles["store"] = f"{why}: no worker can start again"

    async def check_model(self) -> None:
        """Raise BatchEngineError (503) if the model file is not what was loaded any more."""
        await self._files.look()
        if self._state.model_changed:
            raise errors.MODEL_CHANGED(why=self._state.model_changed)


async def _for_ever(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Call `work` repeatedly; after an error, which is logged, wait for FAILED_S."""
    while True:
        try:
            await work()
        except (StoreError, OSError, RecomputeFailed) as error:
            log.error("maintenance: %s: %r", name, error)
            await asyncio.sleep(FAILED_S)
