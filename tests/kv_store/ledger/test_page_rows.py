"""Manifest rows follow the page index: an invalid page is absent in every later run, and no page
is published in an extent without a row. Also with pins, and on a full disk."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bench.processes.store_check import check_integrity
from kv_store.errors import LedgerRefused, NumericsFault, StaleRef, StoreFull
from kv_store.fsck import fsck
from kv_store.keys import ROOT_KEY
from kv_store.layout import PAGE_TOKENS
from kv_store.ledger import writes
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import FAILURES_MAX, PageRef, PageState
from kv_store.pages.pool import Ticket
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import (
    SALT,
    CountedDb,
    Lane,
    add_chain,
    counted_connect,
    descriptor,
    evict,
    page_state,
    pin,
    settings,
    sqlite_error,
    tokens_of,
)

tmp_path = kv_scene.tmp_path
lane = kv_scene.lane
IDS = tokens_of(1, 1)


@pytest.fixture
def room() -> Iterator[list[bool]]:
    """Whether the ledger of these stores has room for a commit."""
    found = [True]

    def commit(sql: str) -> None:
        if sql == "COMMIT" and not found[0]:
            raise sqlite_error("SQLITE_FULL")

    CountedDb.on_statement = staticmethod(commit)
    yield found
    CountedDb.on_statement = staticmethod(lambda sql: None)


@pytest.fixture
def store(tmp_path: Path, room: list[bool]) -> Iterator[Store]:
    changes = settings(32, 4, ballast_bytes=0)
    opened = Store.open(tmp_path / "s", descriptor(), changes, connect=counted_connect)
    yield opened
    opened.close()


def left_behind(store: Store, folder: Path) -> Path:
    """A copy of what a power cut would leave now: only what is durable."""
    store.ledger.read(lambda _: None).result(20)
    return Path(shutil.copytree(store.path, folder))


def rows(store: Store, sql: str) -> list[tuple[int, ...]]:
    return store.ledger.read(lambda db: db.execute(sql).fetchall()).result(20)


def next_run(path: Path) -> closing[Store]:
    return closing(Store.open(path, descriptor(), settings(32, 4, ballast_bytes=0)))


def check_gone(path: Path, ref: PageRef) -> None:
    """A next run neither finds the page nor gives its slot a generation it had before."""
    report = fsck(path)
    assert report.ok, report.findings
    with next_run(path) as store:
        assert store.pages.match_prefix(IDS, SALT) == []
        assert store.dropped == {}
        lane = Lane(store, incarnation=9)
        (again,) = lane.add_chain(IDS)
        lane.close()
        assert again.page_id == ref.page_id
        assert again.gen > ref.gen


# -- invalid pages --------------------------------------------------------------------------------


def test_a_pinned_invalid_page_stays_absent(store: Store, lane: Lane, tmp_path: Path) -> None:
    ref, _ = lane.add(ROOT_KEY, IDS)  # pinned
    store.pages.invalidate(ref)
    assert page_state(store, ref) is PageState.QUARANTINE
    check_gone(left_behind(store, tmp_path / "crashed"), ref)
    # the slot is not reused before its pin has gone, and then a generation it never had
    other = lane.add_chain(tokens_of(2, 2))
    assert ref.page_id not in [page.page_id for page in other]
    store.pages.unpin(ref)
    store.core.thread.submit(lambda: None).result(20)
    (again,) = lane.add_chain(IDS)
    assert again == PageRef(ref.page_id, ref.gen + 1)
    check_integrity(store)


def test_an_invalid_page_is_freed_once(
    store: Store, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, append = list[tuple[PageRef, bool]](), store.ledger.append

    def noted(*ops: writes.Op) -> object:
        freed.extend(
            (ref, isinstance(op, writes.RetirePages))
            for op in ops
            if isinstance(op, (writes.FreePages, writes.RetirePages))
            for ref in op.refs
        )
        return append(*ops)

    monkeypatch.setattr(store.ledger, "append", noted)
    ref, _ = lane.add(ROOT_KEY, IDS)
    store.pages.invalidate(ref)
    store.pages.invalidate(ref)
    store.pages.unpin(ref)
    assert freed == [(PageRef(ref.page_id, ref.gen + 1), False)]
    (again,) = lane.add_chain(IDS)
    store.pages.invalidate(again, slot_failed=True)
    (again,) = lane.add_chain(IDS)
    store.pages.invalidate(again, slot_failed=True)  # the second failure of this slot
    assert freed[-1] == (again, True)
    store.ledger.commit().result(20)
    bad = rows(store, f"SELECT page_id FROM page WHERE state = 'bad' AND page_id = {ref.page_id}")
    assert bad == [(ref.page_id,)]


def test_a_pinned_invalid_page_stays_absent_after_closing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with next_run(path) as store:
        lane = Lane(store)
        ref, _ = lane.add(ROOT_KEY, IDS)
        store.pages.invalidate(ref)
        lane.close()
    check_gone(path, ref)


def test_a_page_invalidated_on_a_full_disk_is_freed_when_its_pin_goes(
    store: Store, lane: Lane, room: list[bool], tmp_path: Path
) -> None:
    ref, _ = lane.add(ROOT_KEY, IDS)
    room[0] = False
    store.pages.invalidate(ref)
    store.ledger.read(lambda _: None).result(20)
    room[0] = True
    store.pages.unpin(ref)
    store.ledger.commit().result(20)
    check_gone(left_behind(store, tmp_path / "crashed"), ref)


def test_pages_invalidated_on_a_full_disk_are_freed_once_there_is_room(
    store: Store, lane: Lane, room: list[bool], tmp_path: Path
) -> None:
    refs, gate = lane.add_chain(tokens_of(1, 3)), threading.Event()
    room[0] = False
    blocked = store.ledger.read(lambda _: gate.wait(20))
    store.pages.invalidate(*refs)
    assert store.pages.index.count(PageState.FREE) == len(store.pages.index)
    gate.set()
    assert blocked.result(20)
    with pytest.raises(StoreFull):
        store.ledger.commit().result(20)
    room[0] = True
    store.ledger.commit().result(20)
    assert rows(store, "SELECT count(*) FROM page WHERE state = 'published'") == [(0,)]
    check_gone(left_behind(store, tmp_path / "crashed"), refs[0])


def test_pages_evicted_on_a_full_disk_are_freed_once_there_is_room(
    store: Store, lane: Lane, room: list[bool]
) -> None:
    lane.add_chain(tokens_of(1, 3))
    room[0] = False
    assert evict(store, 3) == 3
    with pytest.raises(StoreFull):
        store.ledger.commit().result(20)
    assert rows(store, "SELECT count(*) FROM page WHERE state = 'published'") == [(3,)]
    room[0] = True
    store.ledger.commit().result(20)
    assert rows(store, "SELECT count(*) FROM page WHERE state = 'published'") == [(0,)]


def test_a_row_freed_late_leaves_the_next_page_of_its_slot(
    store: Store, lane: Lane, room: list[bool]
) -> None:
    (ref,), gate = lane.add_chain(IDS), threading.Event()
    room[0] = False
    blocked = store.ledger.read(lambda _: gate.wait(20))
    store.pages.invalidate(ref)
    published = store.pages.publish(lane.seal(ROOT_KEY, IDS))  # pending before the second try
    gate.set()
    assert blocked.result(20)
    store.ledger.read(lambda _: None).result(20)
    room[0] = True
    store.ledger.commit().result(20)
    again = PageRef(ref.page_id, ref.gen + 1)
    assert published.result(20) == again
    assert rows(store, "SELECT page_id, gen FROM page WHERE state = 'published'") == [again]
    check_integrity(store)


def test_a_page_invalidated_while_it_is_read_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with next_run(path) as store:
        (ref,) = add_chain(store, IDS)
    with next_run(path) as store:
        gate = threading.Event()
        store.core.thread.submit(gate.wait)  # a busy page thread
        loaded = store.pages.load([ref])
        assert page_state(store, ref) is PageState.LOADING
        store.pages.invalidate(ref)
        gate.set()
        assert loaded.result(20) == [False]
        assert store.pages.match_prefix(IDS, SALT) == []
        check_integrity(store)
    check_gone(path, ref)


def test_wrong_content_retires_no_slot_and_its_key_is_reported(store: Store, lane: Lane) -> None:
    """Free slots are used again lowest first: a lane that computes nonsense would use them up."""
    for _ in range(FAILURES_MAX + 1):
        ref, key = lane.add(ROOT_KEY, IDS)
        store.pages.unpin(ref)
        store.pages.invalidate(ref)
        assert store.events.drain() == [key]
    assert store.stat()["pages_bad"] == 0
    for _ in range(FAILURES_MAX):
        (ref,) = lane.add_chain(IDS)
        store.pages.invalidate(ref, slot_failed=True)
    assert store.stat()["pages_bad"] == 1


def test_descendants_of_every_run_are_invalidated_in_one_commit(tmp_path: Path) -> None:
    path, ids = tmp_path / "s", tokens_of(7, 3)
    with next_run(path) as store:
        lane = Lane(store)
        lane.add_chain(ids)
        lane.add_chain(np.concatenate([ids[:PAGE_TOKENS], tokens_of(8, 1)]))
        lane.add_chain(IDS)
        lane.close()
    with next_run(path) as store:
        lane = Lane(store, incarnation=2)
        commits, refs = store.ledger.stats.commits, store.pages.match_prefix(ids, SALT)
        pin(store, refs[0])
        key = store.pages.key_of(ROOT_KEY, ids[:PAGE_TOKENS], SALT)
        found = store.pages.invalidate(key, descendants=True)
        left = left_behind(store, tmp_path / "crashed")
        assert store.ledger.stats.commits == commits + 1
        assert len(found) == 4
        assert set(store.events.drain()) == found
        assert not any(store.pages.is_resident(ref) for ref in refs)
        store.pages.unpin(refs[0])
        lane.add_chain(ids[:PAGE_TOKENS])
        assert len(store.pages.match_prefix(ids, SALT)) == 1
        assert len(store.pages.match_prefix(IDS, SALT)) == 1
        assert store.stat()["pages_bad"] == 0
        lane.close()
        check_integrity(store)
    with next_run(left) as store:
        assert store.stat()["pages_listed"] == 1


def test_a_page_without_its_parent_is_invalidated_only_on_request(store: Store, lane: Lane) -> None:
    ids = tokens_of(9, 3)
    refs = lane.add_chain(ids)
    other = lane.add_chain(IDS)
    store.pages.invalidate(refs[1])  # as after bit rot: its descendants stay
    key = store.pages.key_of(ROOT_KEY, ids[:PAGE_TOKENS], SALT)
    assert store.pages.invalidate(bytes(31) + b"x", descendants=True) == {bytes(31) + b"x"}
    store.pages.invalidate(key, descendants=True)
    assert [store.pages.is_resident(ref) for ref in refs] == [False, False, True]
    store.pages.invalidate(key, descendants=True, rootless=True)
    assert [store.pages.is_resident(ref) for ref in refs] == [False, False, False]
    assert store.pages.is_resident(other[0])


# -- a page of an earlier run that is computed again ------------------------------------------


def again(store: Store, flip: int) -> PageRef:
    """Seal the same page from a lane of this run."""
    lane = Lane(store, incarnation=3)
    try:
        published = store.pages.publish(lane.seal(ROOT_KEY, IDS, flip=flip))
        store.ledger.commit()
        ref = published.result(20)
        store.pages.unpin(ref)
        return ref
    finally:
        lane.close()


def test_an_older_page_with_other_bytes_is_a_fault_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with next_run(path) as store:
        (ref,) = add_chain(store, IDS)
    with next_run(path) as store:
        with pytest.raises(NumericsFault):
            again(store, flip=1)
        assert store.counters["numerics_faults"] == 1
        assert page_state(store, ref) is PageState.LISTED
        assert again(store, flip=0) == ref
        assert page_state(store, ref) is PageState.PUBLISHED
        check_integrity(store)


def test_a_corrupt_older_page_is_detected_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with next_run(path) as store:
        (ref,) = add_chain(store, IDS)
        info = store.pages.allocator.infos[0]
    with open(info.path, "r+b") as file:
        file.seek(info.offset_of(ref.page_id) + 100)
        file.write(b"rot")
    with next_run(path) as store:
        with pytest.raises(StaleRef):
            again(store, flip=0)
        assert store.pages.match_prefix(IDS, SALT) == []
        new = again(store, flip=0)
        assert new != ref
        assert store.pages.load([new]).result(20) == [True]
        check_integrity(store)


# -- extents whose row was refused ------------------------------------------------------------


def publish(store: Store, lane: Lane, name: int) -> BaseException | None:
    """Why a page of this timeline is not published, if it is not."""
    future = store.pages.publish(lane.seal(ROOT_KEY, tokens_of(name, 1)))
    store.ledger.commit()
    error = future.exception(20)
    if error is None:
        store.pages.unpin(future.result())
    return error


def grown_without_room(store: Store, lane: Lane, room: list[bool]) -> None:
    """Another extent exists, and the ledger had no room for its row."""
    room[0] = False
    assert isinstance(publish(store, lane, 100), StoreFull)  # and an extent is added ahead
    store.core.thread.submit(lambda: None).result(20)
    with pytest.raises(StoreFull):
        store.ledger.commit().result(20)
    room[0] = True
    assert len(store.pages.allocator.infos) == 2
    assert rows(store, "SELECT extent_index FROM extent") == [(1,)]


def fill(store: Store, lane: Lane, count: int) -> list[int]:
    for name in range(count):
        store.core.thread.submit(lambda: None).result(20)
        assert publish(store, lane, name) is None
    return list(range(count))


def check_whole(path: Path, names: list[int]) -> None:
    """Every page is present in a next run, and fsck finds nothing."""
    report = fsck(path)
    assert report.ok, report.findings
    with next_run(path) as store:
        assert store.dropped == {}
        for name in names:
            (ref,) = store.pages.match_prefix(tokens_of(name, 1), SALT)
            assert store.pages.load([ref]).result(20) == [True]


def test_pages_are_committed_with_the_row_of_their_extent(
    store: Store, lane: Lane, room: list[bool], tmp_path: Path
) -> None:
    grown_without_room(store, lane, room)
    names = fill(store, lane, 7)  # the second extent's first pages
    extents = rows(store, "SELECT extent_index, first_page_id FROM extent")
    assert (
        extents == [(i.index, i.first_page_id) for i in store.pages.allocator.infos][: len(extents)]
    )
    assert len(extents) > 1
    store.ledger.commit().result(20)
    check_whole(left_behind(store, tmp_path / "crashed"), names)


def test_maintenance_writes_the_row_that_a_full_disk_refused(
    store: Store, lane: Lane, room: list[bool], tmp_path: Path
) -> None:
    grown_without_room(store, lane, room)
    store.maintain()
    store.ledger.commit().result(20)
    assert (2, 4) in rows(store, "SELECT extent_index, first_page_id FROM extent")
    assert 2 not in store.core.unrecorded
    names = fill(store, lane, 7)
    check_whole(left_behind(store, tmp_path / "crashed"), names)


def test_an_extent_recorded_late_reuses_no_number(tmp_path: Path, store: Store) -> None:
    """Its row comes after that of a younger one, and twice; another with its number is refused."""
    late = writes.AddExtent(7, 70, 4, 4096, bytes(32))
    for row in (writes.AddExtent(8, 74, 4, 4096, bytes(32)), late, late):
        store.ledger.append(row)
    store.ledger.commit().result(20)
    assert rows(store, "SELECT next_extent, next_page_id FROM store") == [(9, 78)]
    refused = store.ledger.append(writes.AddExtent(7, 71, 4, 4096, bytes(32)))
    store.ledger.commit()
    with pytest.raises(LedgerRefused, match="another"):
        refused.result(20)


def test_a_full_ledger_evicts_no_pages_for_some_that_it_cannot_publish(
    store: Store, lane: Lane, room: list[bool]
) -> None:
    for name in range(28):
        lane.add_chain(tokens_of(10 + name, 1))
    evicted = store.counters["pages_evicted"]
    room[0] = False
    with pytest.raises(StoreFull):
        store.ledger.commit().result(20)
    for name in range(8):
        with pytest.raises(StoreFull):
            lane.add_chain(tokens_of(50 + name, 1))
    found = [store.pages.reserve(ROOT_KEY, tokens_of(60 + name, 1), SALT) for name in range(5)]
    assert found.pop() is NoRoom.GROWING, "a slot is freed once a ticket of another has failed"
    for ticket in found:
        assert isinstance(ticket, Ticket)
        store.pages.abort(ticket)
    assert store.counters["pages_evicted"] == evicted
    room[0] = True


def test_pages_evicted_on_a_full_disk_are_never_served_and_no_error(
    store: Store, lane: Lane, room: list[bool], tmp_path: Path
) -> None:
    """Their slots are overwritten, or have other pages, while their rows stay."""
    lane.add_chain(tokens_of(1, 3))
    room[0] = False
    evict(store, 3)
    with pytest.raises(StoreFull):
        lane.add_chain(tokens_of(2, 1))  # into one of the slots, and freed again
    while store.core.thread.submit(store.pages.allocator.poison_one).result(20):
        pass
    path = left_behind(store, tmp_path / "crashed")
    report = fsck(path)
    assert report.ok, report.findings
    assert (report.counts["pages_evicted"], report.counts["pages_bad"]) == (3, 0)
    with next_run(path) as again:
        listed = again.pages.match_prefix(tokens_of(1, 3), SALT)
        assert again.pages.load(listed).result(20) == [False] * 3
        assert again.pages.match_prefix(tokens_of(1, 3), SALT) == []
    assert fsck(path, repair=True).ok
    assert not fsck(path).counts["pages_evicted"]
    room[0] = True


def test_slots_with_other_pages_behind_their_rows_are_never_served(
    store: Store, lane: Lane, room: list[bool], tmp_path: Path
) -> None:
    (ref,) = lane.add_chain(IDS)
    room[0] = False
    evict(store, 1)
    ticket = lane.seal(ROOT_KEY, tokens_of(2, 1))
    assert ticket.page is not None
    assert ticket.page.page_id == ref.page_id
    with next_run(left_behind(store, tmp_path / "crashed")) as again:
        listed = again.pages.match_prefix(IDS, SALT)
        assert listed == [ref]
        assert again.pages.load(listed).result(20) == [False]
        assert again.pages.match_prefix(IDS, SALT) == []
    room[0] = True
    store.pages.abort(ticket)


def test_extents_are_deleted_to_make_room_on_a_full_disk(
    tmp_path: Path, store: Store, lane: Lane, room: list[bool]
) -> None:
    lane.add_chain(IDS)
    count = len(store.pages.allocator.infos)
    room[0] = False
    assert store.give_disk_space().result(20) == 1
    assert len(os.listdir(tmp_path / "s" / "ext")) == count - 1
    with pytest.raises(StoreFull):
        store.ledger.commit().result(20)
    room[0] = True
    store.ledger.commit().result(20)
    assert rows(store, "SELECT count(*) FROM extent") == [(count - 1,)]


def test_an_owner_that_could_not_write_its_end_is_not_called_killed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with next_run(path):
        pass
    with closing(sqlite3.connect(path / "meta.db")) as db, db:
        db.execute("UPDATE store SET clean = 0")
    (finding,) = fsck(path).findings
    assert "full disk" in finding.why
