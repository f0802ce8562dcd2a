"""What the engine does for its store while nobody asks: scrub, recompute, collect garbage, watch.

Owns the rhythm: scrubbing takes at most SCRUB_SHARE of what the disk can read, and only while
nothing is computed. A page that fails its checksum is computed again from the tokens of a session
that holds it; equal bytes are published again, different ones are a matter for the jury. The
model's files are looked at once a minute: what is on disk must be what was loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batchengine.core import PAGE_TOKENS, BatchEngineError
from batchengine.engine import refusals
from batchengine.engine.canary import Canary
from batchengine.engine.doubt import Jury, PageOf
from batchengine.engine.loop import LaneLoop
from batchengine.engine.reopen import Reopener
from batchengine.engine.tables import Tables
from batchengine.engine.trial import Trial, TrialFailed
from batchengine.gguf import Identity, file_identity
from batchengine.pages.seals import Wrote
from batchengine.weights import read_fingerprint
from batchengine.weights.cache import CacheMismatch, cache_path, open_cache
from kv_store import keys
from kv_store.errors import StoreError
from kv_store.store import Store
from kv_store.upkeep import GcReport, ScrubResult

log = logging.getLogger("batchengine.engine")

IDLE_S = 5.0  # without a turn: the machine is not needed
SCRUB_SHARE = 0.05  # of the disk's reading
SCRUB_S_MIN = 0.25  # between two pages
REST_S = 3600.0  # after every page was read once
FAILED_S = 60.0  # after a round that failed
GC_S = 300.0
WATCH_S = 60.0
UNREADABLE = "BE1301"  # of gguf: the file cannot be opened
LEDGER_LOOK_MAX = 64  # sessions on disk whose tokens are compared with a bad page


class Timeline(NamedTuple):
    """Tokens of a session, and what its pages are called by."""

    tokens: Sequence[int]
    salt: bytes
    priority: int


class Upkeep:
    """Background work of one engine on its store. Use: `start` once."""

    def __init__(
        self, tables: Tables, store: Store, reopener: Reopener, jury: Jury, n_vocab: int
    ) -> None:
        self._tables = tables
        self._store = store
        self._reopener = reopener
        self._jury = jury
        self._idle_since = time.monotonic()
        self._files = ModelFiles(tables, store.descriptor.model_hash)
        self._canary = Canary(tables, jury, n_vocab)

    def start(self, spawn: Callable[[Coroutine[Any, Any, None], str], None]) -> None:
        """Begin; `spawn` keeps the tasks."""
        works = [(self._scrub, "scrub"), (self._collect, "gc"), (self._watch, "watch")]
        works.append((self._files.decide, "model"))
        if self._tables.config.limits.canary_s > 0:
            works.append((self._canary.look, "canary"))
        for work, name in works:
            spawn(_for_ever(work, name), name)

    # --------------------------------------------------------------------------------- scrub

    @property
    def is_idle(self) -> bool:
        """Nobody computes, nor did a moment ago."""
        now = time.monotonic()
        if self._tables.turns or self._tables.waiting:
            self._idle_since = now
        return now - self._idle_since >= IDLE_S

    async def _scrub(self) -> None:
        """Every page once, then rest."""
        stat = self._store.stat()
        left = int(stat["pages_published"]) + int(stat["pages_listed"])
        while left > 0:
            await asyncio.sleep(self._pause_s())
            if not self.is_idle:
                continue
            found = await asyncio.wrap_future(self._store.scrub_next())
            if found is None:
                break
            left -= 1
            await self.scrubbed(found)
        await asyncio.sleep(REST_S if self.is_idle else IDLE_S)

    def _pause_s(self) -> float:
        rate = self._store.rates.read_bytes_per_s or 1e8
        return max(SCRUB_S_MIN, self._store.layout.page_bytes / rate / SCRUB_SHARE)

    async def scrubbed(self, found: ScrubResult) -> None:
        """Count it; a bad page is given up by whoever holds it, and computed again."""
        result = "good" if found.good else "bad"
        self._tables.metrics.kv_scrubbed_pages_total.labels(result).inc()
        if found.good:
            return
        log.error("scrub: page %r of %d tokens does not verify", found.ref, found.n_tokens)
        page = await self._page_of(found)
        if page is None:
            log.warning("no session known here has the tokens of page %r", found.ref)
            self._count("unknown")
            return
        await self.recompute(page, found.digest)

    def _count(self, result: str) -> None:
        self._tables.metrics.kv_pages_recomputed_total.labels(result).inc()

    async def recompute(self, page: PageOf, digest: bytes) -> None:
        """Compute a page that is gone; publish it again if it is what it was."""
        able = [loop for loop in self._tables.loops if loop.up]
        loop = min(able, key=lambda loop: loop.assigned, default=None)
        if loop is None:
            return
        got = b""
        try:
            async with self._jury.computed(loop, page, urgent=False) as (trial, got):
                if got == digest:
                    await self._publish(loop, page, trial, got)
        except TrialFailed as error:
            log.info("page %d is not computed again now: %s", page.page, error)
            self._count("failed")
            return
        except StoreError as error:
            log.warning("page %d was not published again: %s", page.page, error)
        if not got:
            self._count("failed")
            return
        self._count("equal" if got == digest else "different")
        if got != digest:
            await self._jury.judge(loop, page, got, digest)

    async def _publish(self, loop: LaneLoop, page: PageOf, trial: Trial, digest: bytes) -> None:
        """From its place in the arena into the store, as a seal does it."""
        adoption, store = trial.adoption, self._store
        parent, key = page.link(store.repr_id)
        if adoption is None or loop.pages.muted or store.find(key) is not None:
            return
        ids = page.tokens[page.page * PAGE_TOKENS :]
        ticket = store.reserve(parent, ids, page.salt, page.priority)
        if ticket is None:
            raise StoreError(f"there is no room: {store.refusal}")
        release = loop.pages.hold(adoption.arena)
        try:
            sealing = store.seal(ticket, adoption.arena, adoption.places[-1], digest)
            await asyncio.shield(asyncio.wrap_future(sealing))
            publishing = store.publish(ticket)
            store.ledger.commit()
            ref = await asyncio.shield(asyncio.wrap_future(publishing))
        except BaseException:
            store.abort(ticket)
            raise
        finally:
            release()
        if ticket.page is not None and ticket.page.ref == ref:  # not an older, equal page
            loop.pages.wrote[ref] = Wrote(key, parent, frozenset((loop.lane.name,)))
        store.unpin(ref)

    async def _page_of(self, found: ScrubResult) -> PageOf | None:
        """Whose tokens the page held: a session of this life, or one of the ledger's latest."""
        async for timeline in self._timelines():
            n = len(timeline.tokens) // PAGE_TOKENS * PAGE_TOKENS
            chain = await asyncio.to_thread(self._chain, timeline, n)
            if found.key in chain:
                end = (chain.index(found.key) + 1) * PAGE_TOKENS
            elif found.n_tokens < PAGE_TOKENS and found.parent in (keys.ROOT_KEY, *chain):
                at = 0 if found.parent == keys.ROOT_KEY else chain.index(found.parent) + 1
                end = at * PAGE_TOKENS + found.n_tokens
            else:
                continue
            page = PageOf(array("i", timeline.tokens[:end]), timeline.salt, timeline.priority)
            if end <= len(timeline.tokens) and page.key(self._store.repr_id) == found.key:
                return page
        return None

    def _chain(self, timeline: Timeline, n: int) -> list[bytes]:
        tokens = array("i", timeline.tokens[:n])
        return keys.chain_keys(tokens, self._store.repr_id, timeline.salt) if n else []

    async def _timelines(self) -> AsyncGenerator[Timeline]:
        """Of sessions in memory, newest use first, then of others."""
        live = list(self._tables.named.values())
        live += [turn.session for turn in self._tables.turns.values()]
        for session in reversed(live):
            yield Timeline(list(session.tokens), session.salt, session.priority)
        names = {session.name.decode() for session in live}
        infos = await asyncio.wrap_future(self._store.ledger.list_sessions())
        others = [info for info in infos if info.id not in names]
        for info in others[:LEDGER_LOOK_MAX]:
            with contextlib.suppress(StoreError):
                record = await asyncio.wrap_future(self._store.ledger.load_session(info.id))
                if record is not None:
                    yield Timeline(record.tokens, info.tenant.encode(), 0)

    # -------------------------------------------------------------------------------- garbage

    async def _collect(self) -> None:
        await asyncio.sleep(GC_S)
        if self._is_crowded():
            log.info("gc: %s", await self.collect())

    async def collect(self) -> GcReport:
        """Forget what may go; never a session that is in memory, or that was cut off."""
        return await asyncio.wrap_future(self._store.gc(self.keep()))

    def _is_crowded(self) -> bool:
        """More sessions than are kept, or extents of other models beside a full store."""
        stat = self._store.stat()
        used, pages_max = int(stat["pages_total"]) - int(stat["pages_free"]), int(stat["pages_max"])
        foreign, budget = int(stat["extent_bytes_other_reprs"]), int(stat["budget_bytes"])
        return (
            int(stat["sessions"]) > int(stat["sessions_max"])
            or used * 10 > pages_max * 9
            or (foreign > 0 and int(stat["extent_bytes"]) * 10 > budget * 9)
        )

    def keep(self) -> list[str]:
        """Sessions that garbage collection must not forget: those in memory or cut off."""
        names = [session.name.decode() for session in self._tables.named.values()]
        return names + [info.id for info in self._reopener.interrupted.values()]

    # ---------------------------------------------------------------------------------- model

    async def _watch(self) -> None:
        await asyncio.sleep(WATCH_S)
        await self._files.look()
        if await asyncio.to_thread(self._store.is_in_place):
            self._tables.troubles.pop("store", None)
        else:
            why = f"the folder of the KV store {self._store.path} was moved, removed or replaced"
            self._tables.troubles["store"] = f"{why}: no worker can start again"

    async def check_model(self) -> None:
        """Is the model still what was loaded (F11)? Raises BatchEngineError 503 if it is not."""
        await self._files.look()
        if self._tables.model_changed:
            raise refusals.model_changed(self._tables.model_changed)


class ModelFiles:
    """The model's file and its packed form, as they were when they were loaded.

    Lanes map the packed form only. If it is replaced, they keep what they mapped; if it is written
    in place, they compute with the new bytes at once, so its checksums decide.
    Nobody computes from the model's file itself, and a worker that starts proves its fingerprint:
    so when only its times differ (a link, chmod, touch, or a write in place), requests go on while
    the file is read again in a thread, and its fingerprint decides.
    """

    def __init__(self, tables: Tables, model_hash: str) -> None:
        self._tables = tables
        self._model_hash = model_hash
        self._touched = asyncio.Event()
        self._foreign: Identity | None = None  # packed form that is not of the loaded model
        config = tables.config
        self._model = Path(config.model.path)
        self._packed = cache_path(Path(config.cache_dir or ".").absolute(), self._model.absolute())
        self._identity = tables.model_identity or identity_of(self._model)
        self._mapped = identity_of(self._packed)

    async def look(self) -> None:
        """Say in the tables what changed."""
        tables = self._tables
        if tables.model_changed:
            return
        model, packed = await asyncio.to_thread(
            lambda: (identity_of(self._model), identity_of(self._packed))
        )
        if model is None:
            tables.troubles["model"] = f"{self._model.name} is gone: no worker can start again"
        elif self._identity is None or model[:3] != self._identity[:3]:
            self._change(f"{self._model.name} was written or replaced since it was loaded")
        elif model != self._identity:
            self._touched.set()
        else:
            tables.troubles.pop("model", None)
        if packed == self._mapped or self._mapped is None:
            return
        if packed is None or packed[:2] != self._mapped[:2]:
            await self._replaced(packed)
            return
        try:
            await asyncio.to_thread(_verify, self._packed)
        except CacheMismatch as error:
            why = f"the packed weights were overwritten while lanes compute with them: {error}"
            self._change(why)
            for loop in tables.loops:  # not one token more from these weights
                loop.drain(why)
            for generation in list(tables.turns):
                generation.abort(refusals.model_changed(why))
        else:
            self._mapped = packed  # touched, not changed

    async def _replaced(self, packed: Identity | None) -> None:
        """A worker that starts after the model was touched packs it again: then all is well."""
        if packed is not None and packed != self._foreign:
            with contextlib.suppress(CacheMismatch):
                if await asyncio.to_thread(_verify, self._packed) == self._model_hash:
                    log.info("the packed weights were made again from the same model")
                    self._mapped = packed
                    self._tables.troubles.pop("weights", None)
                    return
            self._foreign = packed
        text = "the packed weights were replaced: lanes keep the old ones"
        self._tables.troubles["weights"] = text

    async def decide(self) -> None:
        """Wait for a model file whose times alone differ; read whether it is still the model."""
        await self._touched.wait()
        self._touched.clear()
        cancelled, name = threading.Event(), self._model.name
        try:
            found = await asyncio.to_thread(read_fingerprint, self._model, cancelled.is_set)
        except BatchEngineError as error:
            if error.code == UNREADABLE:  # as when its rights were taken away
                why = f"{name} cannot be read again: no worker can start"
                self._tables.troubles["model"] = why
                return
            self._change(f"{name} was overwritten since it was loaded: {error.what}")
            return
        finally:
            cancelled.set()  # a daemon that stops does not wait for a whole model to be read
        if found is None:
            return  # it changes right now: the next look asks again
        identity, fingerprint = found
        if fingerprint.hex() == self._model_hash:
            log.info("%s was touched; it is still the model that was loaded: serving on", name)
            self._identity = identity
            self._tables.troubles.pop("model", None)
        else:
            self._change(f"{name} was overwritten since it was loaded")

    def _change(self, why: str) -> None:
        self._tables.model_changed = why
        self._tables.troubles["model"] = why
        log.critical("model changed: %s; new requests are refused until the daemon restarts", why)


def identity_of(path: Path) -> Identity | None:
    """What changes when the file is replaced or written; None = it is not there."""
    try:
        return file_identity(os.stat(path))
    except OSError:
        return None


def _verify(path: Path) -> str:
    """Fingerprint (hex) of the model a sound packed file was made of; else CacheMismatch."""
    return open_cache(path, lambda _: None, lambda _: None).table.fingerprint.hex()


async def _for_ever(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Round after round; one that fails is no reason to stop serving."""
    while True:
        try:
            await work()
        except (StoreError, OSError, TrialFailed) as error:
            log.error("upkeep: %s: %r", name, error)
            await asyncio.sleep(FAILED_S)
