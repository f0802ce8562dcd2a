"""Looking after the pages: scrub, verify everything, doubt, collect garbage, numbers for people.

Owns no thread: each piece of work is one short intent of the page thread, so a seal never waits
for more than one page of it. Refuses to recompute: who asked decides what a bad page costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from kv_store import keys, osio, sessions
from kv_store.errors import StaleRef, StoreCorrupt
from kv_store.layout import PAGE_TOKENS
from kv_store.pages import EVICTABLE, SUPERSEDED, PageRef, PageState
from kv_store.places import EVICT_TO_PERCENT, Parts
from kv_store.pool import PagePool
from kv_store.threads import new_future, settle

SESSIONS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class ScrubResult:
    """One page read again. `good` False: it is condemned; `key` and `parent` say what it held,
    `digest` is that of its payload when it was sealed."""

    ref: PageRef
    good: bool
    key: bytes
    parent: bytes
    n_tokens: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Pages of `total` read so far: `good`, `bad` (condemned), `gone` (evicted meanwhile)."""

    total: int
    good: int = 0
    bad: int = 0
    gone: int = 0
    read_bytes: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.good + self.bad + self.gone


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was forgotten. `places_other_reprs` are page places of other models' extents."""

    pages_evicted: int
    tails_superseded: int
    extents_other_reprs: int
    places_other_reprs: int
    sessions: int
    turns: int


Progress = Callable[[VerifyReport], None]


class UpkeepPool(PagePool):
    """`PagePool` plus its upkeep."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.sessions_max = SESSIONS_MAX
        self._verifying: Future[VerifyReport] | None = None

    # -- doubt --------------------------------------------------------------------------------

    def scrub_next(self) -> Future[ScrubResult | None]:
        """Read the page that was verified longest ago, never verified ones first.

        A bad one is condemned. None = no page to read. Bytes come through the kernel's page
        cache, as the lanes see them.
        """
        result: Future[ScrubResult | None] = new_future()
        with self._lock:
            page = self._table.least_verified()
            if page is None:
                result.set_result(None)
                return result
            ref, key, parent, n = page.ref, page.key, page.parent, page.n_tokens
            digest = page.digest
            checked = self._check(ref)

        def done(future: Future[bool]) -> None:
            error = future.exception()
            if error is not None:
                result.set_exception(error)
                return
            self.counters["pages_scrubbed"] += 1
            result.set_result(ScrubResult(ref, future.result(), key, parent, n, digest))

        checked.add_done_callback(done)
        return result

    def verify_all(self, progress: Progress | None = None) -> Future[VerifyReport]:
        """Read every page; condemn those that fail. Serving goes on in between.

        `progress` is called on the page thread after each page. One run at a time: a second call
        gets the first one's future.
        """
        with self._lock:
            if self._verifying is not None and not self._verifying.done():
                return self._verifying
            refs = [page.ref for page in self._table if page.state in EVICTABLE]
            result: Future[VerifyReport] = new_future()
            self._verifying = result
        self._verify_from(refs, VerifyReport(len(refs)), time.monotonic(), progress, result)
        return result

    def _verify_from(
        self,
        left: list[PageRef],
        report: VerifyReport,
        start: float,
        progress: Progress | None,
        result: Future[VerifyReport],
    ) -> None:
        """Check one page, then the rest; `left` is consumed from its end."""

        def done(future: Future[bool]) -> None:
            error = future.exception()
            if error is not None and not isinstance(error, StaleRef):
                result.set_exception(error)  # the store is closed
                return
            left.pop()
            told = _counted(report, future, self.layout.page_bytes, time.monotonic() - start)
            try:
                if progress is not None:
                    progress(told)
            except Exception as told_badly:  # nobody would ever resolve the caller's future
                result.set_exception(told_badly)
                return
            # through the queue: others' work goes in between, and the stack stays flat
            again = self._pages_io.submit(
                lambda: self._verify_from(left, told, start, progress, result)
            )
            if again.done() and (closed := again.exception()) and not result.done():
                result.set_exception(closed)

        if not left:
            result.set_result(report)
            return
        self._check(left[-1]).add_done_callback(done)

    def _check(self, ref: PageRef) -> Future[bool]:
        """Verify or load, whichever the page needs; StaleRef in the future if it is gone."""
        with self._lock:
            try:
                if self._table.get(ref).state is PageState.PUBLISHED:
                    return self.verify(ref)
                return self._load_one(ref)
            except StaleRef as error:
                gone: Future[bool] = new_future()
                gone.set_exception(error)
                return gone

    def note_recomputed(self, ref: PageRef, payload_digest: bytes) -> bool:
        """The page's tokens were computed again: are the bytes those it was sealed with?

        True = equal, the doubt is over. False = a numerics fault: one of two computations was
        wrong, nobody knows which, and the page is condemned. Raises StaleRef.
        """
        with self._lock:
            page = self._table.get(ref)
            if not page.digest:
                raise StaleRef(f"{page!r} is not sealed")
            if page.digest == payload_digest:
                self.counters["recomputes_equal"] += 1
                return True
            self.counters["numerics_faults"] += 1
            self.condemn(ref)
            return False

    def _self_test(self) -> None:
        """Write and read back a free place while nobody else knows the store (opener's thread).

        What a file system allows shows in doing it, not in asking; and the rates get a first value.
        """
        page = self._table.peek_free()
        if page is None:
            return
        info, data = self._info(page.page_id), self._buffer
        place = info.place_of(page.page_id)
        data[:] = bytes([osio.TEST_BYTE]) * len(data)
        try:
            start = time.perf_counter()
            expected = keys.payload_digest(data)
            self._extents.write_page(info, place, data)
            written = time.perf_counter()
            data[:] = bytes(len(data))
            read = time.perf_counter()
            self._extents.read_page(info, place, data)
            good = keys.payload_digest(data) == expected
            now = time.perf_counter()
        except (OSError, StoreCorrupt) as error:
            self._write_failure = str(error)
            return
        finally:
            self._poison_queue.append(page.ref)
            self._pages_io.wake()
        if not good:
            self._write_failure = "a test page read back differs from what was written"
            return
        self.rates.note_read(info.page_bytes, now - read)
        self.rates.note_seal(info.page_bytes, written - start + now - read)

    @property
    def tier(self) -> str:
        """ "ok", or what is wrong with caching: for health."""
        if not self.places_max:
            return "off: the budget is smaller than one page"
        if not self._pages_io.alive:
            return "off: the page thread has ended"
        if not len(self._table):
            return f"off: {self._growth_blocked or 'there is no extent yet'}"
        if self._write_failure:
            return f"failing: {self._write_failure}"
        return f"not growing: {self._not_growing}" if self._not_growing else "ok"

    # -- garbage ------------------------------------------------------------------------------

    def gc(self, keep: Collection[str] = ()) -> Future[GcReport]:
        """Evict to the target, drop superseded tails, other models' extents that crowd the
        budget, and ledger rows beyond `sessions_max`; never sessions named in `keep`.
        """
        result: Future[GcReport] = new_future()
        with self._lock:
            self._table.supersede_tails()
            tails = [
                page
                for page in self._table
                if page.priority == SUPERSEDED and page.state in EVICTABLE and not page.pins
            ]
            for page in tails:
                self._release(page)
            low = self.places_max * EVICT_TO_PERCENT // 100
            evicted = self.evict(max(0, self._table.used - low))
        report = GcReport(evicted, len(tails), 0, 0, 0, 0)

        def pages_done(dropped: Future[tuple[int, int]]) -> None:
            if (error := dropped.exception()) is not None:
                result.set_exception(error)
                return
            extents, places = dropped.result()
            half = replace(report, extents_other_reprs=extents, places_other_reprs=places)
            self.ledger.prune(self.sessions_max, keep).add_done_callback(
                lambda pruned: ledger_done(half, pruned)
            )

        def ledger_done(half: GcReport, pruned: Future[tuple[int, int]]) -> None:
            if (error := pruned.exception()) is not None:
                result.set_exception(error)
                return
            sessions, turns = pruned.result()
            self.ledger.commit()
            result.set_result(replace(half, sessions=sessions, turns=turns))

        self._pages_io.submit(self._drop_crowding_reprs).add_done_callback(pages_done)
        return result

    def drop_tails(self, tokens: keys.Tokens | bytes, tenant: str, salt: bytes) -> Future[int]:
        """Free the parked tails of a timeline whose session was dropped; gives how many.

        Not those in use, and none up to which another session of `tenant` has the same tokens: a
        fork resumes from it. Never fails; what stays is evicted in time as any page is.
        """
        ids = keys.token_bytes(tokens)
        parents = [keys.ROOT_KEY, *keys.chain_keys(ids, self.repr_id, salt)]
        with self._lock:
            tails = self._tails_of(ids, parents, salt)
        result: Future[int] = new_future()
        if not tails:
            result.set_result(0)
            return result
        ends = [end for end, _ in tails]

        def free(done: Future[int]) -> int:
            shared = ends[-1] if done.exception() is not None else done.result()
            freed = 0
            with self._lock:
                for end, ref in tails:
                    if end > shared and self._is_idle(ref):
                        self._release(self._table.get(ref))
                        freed += 1
                self.counters["tails_dropped"] += freed
            self.ledger.commit()
            return freed

        asked = self.ledger.read(lambda db: sessions.longest_shared(db, tenant, ids, ends))
        asked.add_done_callback(lambda done: settle(result, lambda: free(done)))
        return result

    def _is_idle(self, ref: PageRef) -> bool:
        """The page is there, and nobody reads it."""
        page = self._table.find(ref.page_id)
        return page is not None and page.ref == ref and page.state in EVICTABLE and not page.pins

    def _tails_of(
        self, ids: bytes, parents: Sequence[bytes], salt: bytes
    ) -> list[tuple[int, PageRef]]:
        """(tokens before its end, tail) of every resident tail of a timeline, in that order."""
        found: list[tuple[int, PageRef]] = []
        for index, parent in enumerate(parents):
            rest = ids[index * PAGE_TOKENS * 4 : (index + 1) * PAGE_TOKENS * 4]
            for n in reversed(self._table.tail_lengths(parent, len(rest) // 4)):
                part = rest[: n * 4]
                page = self._table.resident(keys.content_key(parent, part, self.repr_id, salt))
                if page is not None and page.tokens == part:
                    found.append((index * PAGE_TOKENS + n, page.ref))
        return found

    def _drop_crowding_reprs(self) -> tuple[int, int]:
        """Extents and places of other representations dropped (page thread)."""
        limit, extents, places = self._budget.budget_bytes * EVICT_TO_PERCENT // 100, 0, 0
        while self._foreign and self._extent_bytes() > limit:
            places += self._drop_oldest_foreign()
            extents += 1
        return extents, places

    # -- numbers ------------------------------------------------------------------------------

    def stat(self) -> dict[str, int | float | str]:
        """Numbers for health, metrics and the status command. A rate is 0 until measured."""
        with self._lock:
            table, page_bytes = self._table, self.layout.page_bytes
            states = {state: table.count(state) for state in PageState}
            numbers: dict[str, int | float | str] = {
                "epoch": self.epoch,
                "page_bytes": page_bytes,
                "budget_bytes": self._budget.budget_bytes,
                "extent_bytes": self._extent_bytes(),
                "extent_bytes_other_reprs": sum(info.file_bytes for info in self._foreign),
                "used_bytes": table.used * page_bytes,
                "disk_free_floor_bytes": self._budget.free_floor_bytes,
                "pages_total": len(table),
                "pages_max": self.places_max,
                "pages_pinned": sum(page.pins > 0 for page in table),
                "tails": table.tails,
                "tails_superseded": sum(page.priority == SUPERSEDED for page in table),
                "page_tier": self.tier,
                "growth_blocked": self._growth_blocked,
                "page_backlog": self._pages_io.backlog(),
            }
        times = sorted(self.ledger.stats.commit_us)
        numbers |= {
            "read_bytes_per_s": self.rates.read_bytes_per_s or 0.0,
            "seal_bytes_per_s": self.rates.seal_bytes_per_s or 0.0,
            "sessions": self.ledger.stats.sessions,
            "sessions_max": self.sessions_max,
            "commits": self.ledger.stats.commits,
            "commit_us_p50": times[len(times) // 2] if times else 0.0,
            "commit_us_p99": times[len(times) * 99 // 100] if times else 0.0,
            "ledger_failed": str(self.ledger.failure or ""),
        }
        numbers |= {f"pages_{state.value}": n for state, n in states.items()}
        numbers |= {f"bytes_{state.value}": n * page_bytes for state, n in states.items()}
        return numbers | {f"{name}_total": n for name, n in self.counters.items()}


def _counted(
    report: VerifyReport, future: Future[bool], page_bytes: int, seconds: float
) -> VerifyReport:
    if future.exception() is not None:
        return replace(report, gone=report.gone + 1, seconds=seconds)
    good = future.result()
    return replace(
        report,
        good=report.good + good,
        bad=report.bad + (not good),
        read_bytes=report.read_bytes + page_bytes,
        seconds=seconds,
    )
