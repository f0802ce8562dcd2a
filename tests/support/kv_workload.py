"""A small store with pages whose every byte follows from their tokens, and ways to break it.

Shared by the kv_store tests. Run as a program it is the crash sweep: a workload is killed at its
n-th system call or SQL statement, for every n, and what is left must be a prefix.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sqlite3
import struct
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

import kv_store.osio as osio
from bench.processes.store_check import check_integrity
from kv_store import keys
from kv_store.arenas.arena import Arena, ArenaMapping, SlotOwner
from kv_store.keys import ROOT_KEY, content_key
from kv_store.layout import PAGE_TOKENS, Descriptor, PageLayout
from kv_store.ledger import writes
from kv_store.ledger.ledger import Ledger, lenient_text
from kv_store.pages.index import PageRef, PageState
from kv_store.pages.pool import Ticket
from kv_store.store import Store, StoreSettings

LAYOUT = PageLayout.uniform(1, 1, 32)  # 17 KiB of payload in one 64 KiB page
SALT = b"tenant"
SAMPLING, SEED = '{"temperature":0.5}', (1 << 64) - 1  # of every turn


def descriptor(layout: PageLayout = LAYOUT, **changes: Any) -> Descriptor:
    fields: dict[str, Any] = {"model_hash": "aa" * 32, "arith_id": "bb" * 32, "arch": "qwen3"}
    return Descriptor(**(fields | {"layout": layout} | changes))


def settings(pages: int = 16, extent_pages: int = 4, **changes: Any) -> StoreSettings:
    size = LAYOUT.page_bytes
    fields: dict[str, Any] = {
        "budget_bytes": pages * size,
        "extent_bytes": extent_pages * size,
        "ballast_bytes": size,
        "free_floor_bytes": 0,
        "allow_any_fs": True,
    }
    return StoreSettings(**(fields | changes))


def tokens_of(name: int, pages: int) -> np.ndarray:
    """A timeline of `pages` full pages."""
    return np.random.default_rng(name).integers(0, 50_000, pages * PAGE_TOKENS, np.uint32)


def payload_of(key: bytes, layout: PageLayout = LAYOUT) -> np.ndarray:
    """The bytes that recomputing the page of `key` must give."""
    seed = int.from_bytes(hashlib.sha256(b"kv" + key).digest()[:8], "little")
    page = np.zeros(layout.page_bytes, np.uint8)
    page[: layout.payload_bytes] = np.random.default_rng(seed).integers(
        0, 256, layout.payload_bytes, np.uint8
    )
    return page


def scratch() -> Generator[Path, None, None]:
    """A temporary folder, in memory where there is room, because fsync is cheap there."""
    shm = "/dev/shm"
    roomy = os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 64 << 20
    with tempfile.TemporaryDirectory(prefix="kv-", dir=shm if roomy else None) as folder:
        yield Path(folder)


class Lane:
    """Writes pages as a worker does, in this process."""

    def __init__(self, store: Store, slots: int = 4, incarnation: int = 1) -> None:
        self.store = store
        self.arena: Arena = store.create_arena("cpu", incarnation, slots)
        self.mapping = ArenaMapping(self.arena.path, store.pages.layout)

    def seal(self, parent: bytes, ids: np.ndarray, priority: int = 0, flip: int = 0) -> Ticket:
        """Compute one page and copy it into the store; `flip` changes one of its bytes."""
        ticket = self.store.pages.reserve(parent, ids, SALT, priority)
        assert isinstance(ticket, Ticket), ticket
        at = self.arena.reserve()
        assert at is not None
        self.mapping.reserve(at.slot, SlotOwner(b"s", 1, at.gen, 0))
        page = np.frombuffer(self.mapping.page(at.slot), np.uint8)
        page[:] = payload_of(ticket.key)
        page[0] ^= flip
        try:
            self.store.pages.seal(ticket, self.arena, at, self.mapping.digest(at.slot)).result(20)
        finally:
            self.mapping.poison(at.slot)
            self.arena.release(at)
        return ticket

    def add(self, parent: bytes, ids: np.ndarray, priority: int = 0) -> tuple[PageRef, bytes]:
        """Seal, publish and commit one page; returns its pinned reference and its key."""
        ticket = self.seal(parent, ids, priority)
        future = self.store.pages.publish(ticket)
        self.store.ledger.commit()
        return future.result(20), ticket.key

    def add_chain(self, ids: np.ndarray, priority: int = 0, unpin: bool = True) -> list[PageRef]:
        parent, refs = ROOT_KEY, list[PageRef]()
        for start in range(0, len(ids), PAGE_TOKENS):
            ref, parent = self.add(parent, ids[start : start + PAGE_TOKENS], priority)
            refs.append(ref)
        if unpin:
            for ref in refs:
                self.store.pages.unpin(ref)
        return refs

    def close(self) -> None:
        self.mapping.close()
        self.arena.close(delete=True)


def add_chain(store: Store, ids: np.ndarray) -> list[PageRef]:
    """Publish these pages from a new lane."""
    lane = Lane(store)
    try:
        return lane.add_chain(ids)
    finally:
        lane.close()


def read_page(store: Store, ref: PageRef) -> bytes:
    """The page's bytes as a lane would map them."""
    code = store.pages.slot_code(ref)
    info = next(i for i in store.pages.allocator.infos if i.index == code >> 32)
    with open(info.path, "rb") as f:
        return os.pread(f.fileno(), info.page_bytes, (code & 0xFFFFFFFF) * info.page_bytes)


# -- pages, by the pool's parts ------------------------------------------------------------------


def evict(store: Store, count: int) -> int:
    """Evict up to `count` pages, least valuable first; returns how many."""
    with store.core.lock:
        return store.pages.allocator.evict(count)


def pin(store: Store, ref: PageRef) -> None:
    """Forbid eviction of a resident page. Raises StaleRef."""
    with store.core.lock:
        store.pages.index.pin(store.pages.index.get(ref))


def page_state(store: Store, ref: PageRef) -> PageState:
    with store.core.lock:
        return store.pages.index.get(ref).state


# -- sessions, as the engine's journal writes them ----------------------------------------------


def open_session(
    ledger: Ledger, session: str, tenant: str, epoch: int = 1, meta: str = "{}"
) -> Future[int]:
    return ledger.append(writes.OpenSession(session, tenant, ledger.repr_id, epoch, meta))


def append_tokens(
    ledger: Ledger, session: str, epoch: int, start: int, ids: keys.Tokens
) -> Future[int]:
    """Token ids from position `start`, which must be the session's length."""
    record = writes.AppendTokens(session, epoch, start, keys.token_bytes(ids))
    return ledger.append(record)


def append_turn(
    ledger: Ledger, session: str, turn: str, start: int, end: int, key: str | None = None
) -> Future[int]:
    """A turn at epoch 1 whose prompt is [start, end) of the timeline."""
    return ledger.append(writes.AppendTurn(session, 1, turn, start, end, SAMPLING, SEED, key))


def finish_turn(ledger: Ledger, session: str, turn: str) -> Future[int]:
    return ledger.append(writes.FinishTurn(session, 1, turn, "done", "stop"))


def fork_session(
    ledger: Ledger, source: str, session: str, length: int, tenant: str = "t"
) -> Future[int]:
    """A session with the source's first `length` tokens."""
    return ledger.append(
        writes.CopySession(source, session, tenant, 1), writes.TruncateTokens(session, 1, length)
    )


def cut_session(ledger: Ledger, session: str, length: int) -> Future[int]:
    """Epoch 2 of a session begins with its first `length` tokens."""
    return ledger.append(
        writes.SetOwner(session, 2, 3, "cpu"), writes.TruncateTokens(session, 2, length)
    )


def wait_for_growth(store: Store) -> None:
    store.core.thread.submit(lambda: None).result(20)


# -- fault injection --------------------------------------------------------------------------


class CountedFiles(osio.Files):
    """Calls `on_call(name, number)` before each system call; the callback may raise or kill."""

    def __init__(self, on_call: Callable[[str, int], None]) -> None:
        self.calls = 0
        self.on_call = on_call

    def _count(self, name: str) -> None:
        self.calls += 1
        self.on_call(name, self.calls)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._count("pread")
        return super().pread(fd, into, offset)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count("pwrite")
        half = super().pwrite(fd, data[: (len(data) + 1) // 2], offset)
        self._count("pwrite second half")  # every write is short once, and may be torn
        return half

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self._count("fallocate")
        super().fallocate(fd, offset, length)

    def fsync(self, fd: int) -> None:
        self._count("fsync")
        super().fsync(fd)


def failing_files(calls: dict[str, int], error: int) -> CountedFiles:
    """Files whose call of a name fails from its n-th use on, for `calls[name] = n`."""
    seen: dict[str, int] = {}

    def on_call(name: str, _: int) -> None:
        seen[name] = seen.get(name, 0) + 1
        if name in calls and seen[name] >= calls[name]:
            raise OSError(error, os.strerror(error))

    return CountedFiles(on_call)


class CountedDb(sqlite3.Connection):
    """A connection that calls `on_statement`, set on the class, before each statement."""

    on_statement: Callable[[str], None] = staticmethod(lambda sql: None)

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        type(self).on_statement(sql)
        return super().execute(sql, *args)

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:
        type(self).on_statement(sql)
        return super().executemany(sql, *args)


def counted_connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, factory=CountedDb, timeout=0
    )
    db.text_factory = lenient_text
    return db


def sqlite_error(name: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(f"injected {name}")
    error.sqlite_errorname = name
    return error


# -- the crash sweep --------------------------------------------------------------------------

TIMELINE = tokens_of(1, 3)
TURNS = (40, 256, 300, 172)  # tokens per append: page boundaries are inside and between them
assert sum(TURNS) == len(TIMELINE)
FORKED, CUT = 300, 7
GONE = tokens_of(2, 1)[:80]  # of a session that is dropped; its parked tail is kept
ACK = struct.Struct("<HH")  # tokens durable, pages published


def crash_workload(path: str, ack: int, number: int) -> int:
    """Append a timeline and seal its pages with evictions; dies at the n-th point."""
    points = [0]

    def point(*_: Any) -> None:
        points[0] += 1
        if points[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    CountedDb.on_statement = staticmethod(point)
    store = Store.open(
        path, descriptor(), settings(3, 1), files=CountedFiles(point), connect=counted_connect
    )
    lane, parent, done, published = Lane(store, 2), ROOT_KEY, 0, 0
    open_session(store.ledger, "s", "t")
    append_turn(store.ledger, "s", "turn", 0, TURNS[0])
    for count in TURNS:
        append_tokens(store.ledger, "s", 1, done, TIMELINE[done : done + count])
        done += count
        store.ledger.commit().result(20)
        os.write(ack, ACK.pack(done, published))
        while (published + 1) * PAGE_TOKENS <= done:
            ids = TIMELINE[published * PAGE_TOKENS : (published + 1) * PAGE_TOKENS]
            wait_for_growth(store)
            _, parent = lane.add(parent, ids)
            published += 1
            os.write(ack, ACK.pack(done, published))
    for page_index in range(published):
        store.pages.unpin(store.pages.match_prefix(TIMELINE, SALT)[page_index])
    evict(store, 1)
    finish_turn(store.ledger, "s", "turn")
    store.ledger.commit().result(20)
    wait_for_growth(store)
    lane.close()
    store.close()
    store = Store.open(
        path, descriptor(), settings(3, 1), files=CountedFiles(point), connect=counted_connect
    )
    os.write(ack, ACK.pack(done, 0))  # from here on pages may be evicted
    second_run(store)
    store.close()
    return points[0]


def second_run(store: Store) -> None:
    """Restore, park, fork, cut, scrub, collect garbage, drop, as a restarted engine does."""
    refs = store.pages.match_prefix(TIMELINE, SALT, pin=True)
    store.pages.load(refs).result(20)
    for ref in refs:
        store.pages.unpin(ref)
    lane = Lane(store, 2, 2)
    for n in (10, 99):  # the longer one supersedes the shorter one
        store.pages.unpin(lane.add(ROOT_KEY, TIMELINE[:n])[0])
    fork_session(store.ledger, "s", "fork", FORKED)
    store.ledger.commit().result(20)
    cut_session(store.ledger, "fork", CUT)
    store.ledger.commit().result(20)
    store.pages.scrub_next().result(20)
    store.gc(keep=["s", "fork"]).result(20)
    open_session(store.ledger, "gone", "t")
    append_tokens(store.ledger, "gone", 1, 0, GONE)
    wait_for_growth(store)
    store.pages.unpin(lane.add(ROOT_KEY, GONE)[0])
    store.ledger.append(writes.DropSession("gone"))
    store.ledger.commit().result(20)
    lane.close()


def crash_check(path: str, acks: bytes) -> None:
    """Reopen the store of a killed workload: a prefix, no gap, no wrong page, still usable."""
    tokens = pages = 0
    if acks:
        tokens, pages = ACK.unpack(acks[-ACK.size :])
    evicting = tokens == len(TIMELINE) and not pages
    store = Store.open(path, descriptor(), settings(3, 1))
    try:
        assert not [w for w in store.warnings if "tmpfs" not in w], store.warnings
        record = store.ledger.load_session("s").result(20)
        kept = record.tokens if record else []
        assert len(kept) >= tokens, f"{tokens} tokens were acknowledged, {len(kept)} are left"
        assert kept == TIMELINE[: len(kept)].tolist(), "the timeline is not a prefix"
        fork = store.ledger.load_session("fork").result(20)
        if fork is not None:
            cut = fork.info.epoch == 2
            assert fork.tokens == TIMELINE[: CUT if cut else FORKED].tolist(), "half a fork, or cut"
            assert len(kept) == len(TIMELINE)
        for ids in (TIMELINE, GONE):
            tail = store.pages.find_tail(ROOT_KEY, ids, SALT)
            if tail is not None and store.pages.load([tail]).result(20) == [True]:
                key = store.pages.key_of(ROOT_KEY, ids[: store.pages.page_tokens(tail)], SALT)
                assert read_page(store, tail) == payload_of(key).tobytes(), "wrong KV in a tail"
        found = store.pages.match_prefix(TIMELINE, SALT, pin=True)
        assert len(found) >= min(pages, 2), f"{pages} pages were published, {len(found)} are left"
        good = store.pages.load(found).result(20)
        # the third page is evicted at the end: its slot may be poisoned before its row is gone
        assert evicting or all(good[:2]), "a published page was lost, though the machine stayed up"
        assert evicting or len(found) < 3 or good[2] or pages == 3
        for ref in [ref for ref, is_good in zip(found, good, strict=True) if not is_good]:
            found.remove(ref)
            store.pages.unpin(ref)
        parent = ROOT_KEY
        for index, ref in enumerate(found):
            ids = TIMELINE[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
            parent = content_key(parent, ids, store.pages.repr_id, SALT)
            assert read_page(store, ref) == payload_of(parent).tobytes(), "wrong KV"
            store.pages.unpin(ref)
        check_integrity(store)
        lane = Lane(store, 2, incarnation=2)
        wait_for_growth(store)
        lane.add_chain(TIMELINE)
        assert len(store.pages.match_prefix(TIMELINE, SALT)) == 3
        check_integrity(store)
        lane.close()
    finally:
        store.close()


def crash_sweep(first: int, step: int) -> Iterator[tuple[int, bool]]:
    """Kill at points first, first+step, ... until a run completes; yields (point, was killed)."""
    number = first
    while True:
        folder = tempfile.mkdtemp(prefix="kv-crash-", dir=os.environ.get("KV_CRASH_DIR"))
        path = os.path.join(folder, "store")
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read_end)
            try:
                crash_workload(path, write_end, number)
            except BaseException as error:
                print(f"point {number}: {error!r}", flush=True)
                os._exit(1)
            os._exit(0)
        os.close(write_end)
        with open(read_end, "rb") as pipe:
            acks = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"point {number}: the workload failed"
        crash_check(path, acks)
        shutil.rmtree(folder)
        yield number, status != 0
        if status == 0:
            return
        number += step


if __name__ == "__main__":
    points = list(crash_sweep(int(sys.argv[1]), int(sys.argv[2])))
    print(f"killed {sum(was for _, was in points)} last {points[-1][0]}")
