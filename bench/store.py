"""Times calls on a large store: `python -m bench store [--quick] [--pages N] [--json FILE]`.

Builds a store whose index holds N pages in timelines of 512 and measures how long each kind of call
takes, and how long it holds the store's lock at most. The index, allocator, eviction order, extent
files and their ledger rows are real; the files are sparse, and the pages have no manifest rows and
no bytes of their own until something writes them. Python's collector is frozen once the index is
built, as it would otherwise walk all pages in the middle of some call. A hold is the CPU time of
the thread that holds the lock; wall time, which a busy machine lengthens, is printed too.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from bench import report
from kv_store import keys, osio
from kv_store.keys import ROOT_KEY
from kv_store.layout import PAGE_TOKENS, Descriptor, PageLayout
from kv_store.pages.allocator import FILL_MAX_PERCENT
from kv_store.pages.index import PageEvent, PageRef
from kv_store.pages.pool import Ticket
from kv_store.store import Store, StoreSettings

LAYOUT = PageLayout.uniform(1, 1, 32)  # the smallest page: the figures do not depend on its size
DESCRIPTOR = Descriptor("aa" * 32, "bb" * 32, "bench", LAYOUT)
TIMELINE_PAGES = 512  # 128K tokens
SALT = b"bench"


class SparseFiles(osio.Files):
    """Extents that take no room until they are written."""

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length)


class TimedLock:
    """A lock that notes its longest hold, by whatever thread; re-entrant like the store's own."""

    def __init__(self) -> None:
        self.longest_s = 0.0  # CPU time of the holder
        self.longest_wall_s = 0.0
        self._lock = threading.RLock()
        self._depth = 0
        self._since = self._since_wall = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._since, self._since_wall = time.thread_time(), time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self.longest_s = max(self.longest_s, time.thread_time() - self._since)
            wall = time.perf_counter() - self._since_wall
            self.longest_wall_s = max(self.longest_wall_s, wall)
        self._lock.release()


def build(folder: str, pages: int) -> tuple[Store, list[bytes], list[PageRef]]:
    """A store full to its limit, the timelines in it, and one reference per timeline."""
    slots = -(-pages * 100 // FILL_MAX_PERCENT) + 1
    settings = StoreSettings(
        slots * LAYOUT.page_bytes, ballast_bytes=0, free_floor_bytes=1, allow_any_fs=True
    )
    store = Store.open(folder, DESCRIPTOR, settings, files=SparseFiles())
    pool, rng = store.pages, np.random.default_rng(1)
    while len(pool.index) < pages:
        store.core.thread.submit(pool.allocator.grow).result()
    timelines, refs = list[bytes](), list[PageRef]()
    for first in range(0, pages, TIMELINE_PAGES):
        count = min(TIMELINE_PAGES, pages - first)
        tokens, parent = rng.bytes(count * PAGE_TOKENS * 4), ROOT_KEY
        timelines.append(tokens)
        for index in range(count):
            page = pool.index.take_free()
            assert page is not None
            page.tokens = tokens[index * PAGE_TOKENS * 4 : (index + 1) * PAGE_TOKENS * 4]
            page.parent, page.listed = parent, True
            page.key = parent = keys.content_key(parent, page.tokens, pool.repr_id, SALT)
            page.digest, page.checksum = page.key[:16], page.key[16:]
            for event in (PageEvent.SEAL, PageEvent.SEALED, PageEvent.PUBLISH):
                pool.index.apply(page, event)
        refs.append(page.ref)
    store.ledger.commit().result()
    return store, timelines, refs


class Meter:
    """Times of one store's calls, by name."""

    def __init__(self, lock: TimedLock) -> None:
        self._lock = lock
        self.rows: dict[str, dict[str, float]] = {}

    def measure(self, name: str, call: Callable[[int], Any], count: int) -> float:
        """Call `count` times; returns the median in microseconds."""
        times = list[float]()
        self._lock.longest_s = self._lock.longest_wall_s = 0.0
        for index in range(count):
            start = time.perf_counter()
            call(index)
            times.append(time.perf_counter() - start)
        median = statistics.median(times) * 1e6
        self.rows[name] = {
            "median_us": round(median, 2),
            "longest_call_ms": round(max(times) * 1e3, 3),
            "longest_hold_ms": round(self._lock.longest_s * 1e3, 3),
            "longest_hold_wall_ms": round(self._lock.longest_wall_s * 1e3, 3),
        }
        print(f"{name:<24}" + "".join(f"{k} {v:<12}" for k, v in self.rows[name].items()))
        return median


def run(folder: str, pages: int, calls: int) -> tuple[dict[str, float], dict[str, Any]]:
    start = time.perf_counter()
    store, timelines, refs = build(folder, pages)
    build_s = time.perf_counter() - start
    lock = TimedLock()
    store.core.lock = lock  # type: ignore[assignment]  # as an RLock
    gc.collect()
    gc.freeze()
    pool, meter, rng = store.pages, Meter(lock), np.random.default_rng(2)
    some = [timelines[int(i)] for i in rng.integers(0, len(timelines), 64)]

    def reserve(index: int) -> None:
        ticket = pool.reserve(ROOT_KEY, rng.bytes(PAGE_TOKENS * 4), SALT)
        assert isinstance(ticket, Ticket), ticket
        pool.abort(ticket)

    def match(index: int, tokens_max: int) -> None:
        pool.match_prefix(some[index % 64], SALT, tokens_max=tokens_max)

    def invalidate_timeline(index: int) -> None:
        head = keys.content_key(ROOT_KEY, timelines[index][: PAGE_TOKENS * 4], pool.repr_id, SALT)
        pool.invalidate(head, descendants=True)

    try:
        lookup = meter.measure("lookup", lambda i: pool.slot_code(refs[i % len(refs)]), calls)
        part = 128 * PAGE_TOKENS
        meter.measure("match_prefix_128", lambda i: match(i, part), max(8, calls // 50))
        meter.measure("match_prefix_512", lambda i: match(i, 4 * part), max(8, calls // 50))
        stat = meter.measure("stat", lambda i: store.stat(), calls // 10)
        meter.measure("reserve_and_evict", reserve, calls // 2)
        meter.measure("scrub", lambda i: pool.scrub_next().result(), max(8, calls // 50))
        meter.measure("maintain", lambda i: store.maintain(), 2)
        meter.measure("invalidate", lambda i: pool.invalidate(refs[-1 - i]), min(8, len(refs)))
        meter.measure("invalidate_timeline", invalidate_timeline, min(8, len(timelines)))
        meter.measure("gc", lambda i: store.gc().result(), 1)
    finally:
        gc.unfreeze()
        store.close()
    longest = max(row["longest_hold_ms"] for row in meter.rows.values())
    result = {
        "lookup_us": round(lookup, 2),
        "stat_us": round(stat, 1),
        "longest_hold_ms": longest,
    }
    return result, {"pages": pages, "build_s": round(build_s, 1), "calls": meter.rows}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench store", description=__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="a few thousand pages")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    pages, calls = (4_000, 400) if args.quick else (args.pages, 20_000)
    with tempfile.TemporaryDirectory(prefix="bench-store-") as folder:
        result, details = run(folder, pages, calls)
    report.finish(result, details=details, json_path=args.json)
    return 0
