"""Maintenance: scrub, verification of all pages, recomputed pages, garbage, rates, counters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.processes.store_check import check_integrity
from kv_store.errors import StoreError
from kv_store.keys import ROOT_KEY
from kv_store.pages.index import RESIDENT, Page, PageState
from kv_store.pages.load import PageLoader
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    Lane,
    append_turn,
    descriptor,
    evict,
    open_session,
    page_state,
    settings,
    tokens_of,
    wait_for_growth,
)

SIZE = LAYOUT.page_bytes
IDS = tokens_of(1, 4)
tmp_path = kv_scene.tmp_path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """One chain of four pages in slots 0..3 of extent 1, none pinned."""
    opened = Store.open(tmp_path / "store", descriptor(), settings())
    lane = Lane(opened)
    lane.add_chain(IDS)
    lane.close()
    yield opened
    check_integrity(opened)
    opened.close()


def flip(store: Store, slot: int) -> None:
    with open(store.pages.allocator.infos[0].path, "r+b") as extent:
        extent.seek(slot * SIZE + 77)
        byte = extent.read(1)[0]
        extent.seek(slot * SIZE + 77)
        extent.write(bytes([byte ^ 1]))


def scrubbed(store: Store, count: int) -> list[tuple[int, bool]]:
    results = [store.pages.scrub_next().result(20) for _ in range(count)]
    return [(found.ref.page_id, found.good) for found in results if found is not None]


# -- scrub ------------------------------------------------------------------------------------


def test_scrub_reads_the_page_that_was_read_longest_ago(store: Store) -> None:
    assert scrubbed(store, 6) == [(n % 4, True) for n in range(6)]
    refs = store.pages.match_prefix(IDS, SALT)
    assert store.pages.verify(refs[2]).result(20)  # it would have been next
    assert scrubbed(store, 4) == [(3, True), (0, True), (1, True), (2, True)]
    assert store.stat()["pages_scrubbed_total"] == 10


def test_checks_do_not_change_the_eviction_order(store: Store) -> None:
    """Neither scrub nor `verify` changes which page is evicted next, or writes an age."""
    path = store.path
    store.close()
    again = Store.open(path, descriptor(), settings())
    index = again.pages.index
    before = {page.page_id: page.lru_seq for page in index if page.state in RESIDENT}
    victim = index.next_victim()
    assert scrubbed(again, 2) == [(0, True), (1, True)]
    assert again.pages.verify_all().result(20).good == 4
    assert {page.page_id: page.lru_seq for page in index if page.state in RESIDENT} == before
    assert index.next_victim() is victim
    assert not index.dirty_lru
    check_integrity(again)
    again.close()


def test_scrub_of_an_empty_store_returns_nothing(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    assert store.pages.scrub_next().result(20) is None
    store.close()


def test_scrub_starts_with_pages_not_read_in_this_run(store: Store) -> None:
    path = store.path
    store.close()
    again = Store.open(path, descriptor(), settings())
    refs = again.pages.match_prefix(IDS, SALT)
    assert again.pages.load(refs[:2]).result(20) == [True, True]
    assert scrubbed(again, 2) == [(2, True), (3, True)]
    assert {page_state(again, ref) for ref in refs} == {PageState.PUBLISHED}
    again.close()


def test_scrub_invalidates_a_page_whose_checksum_fails(store: Store) -> None:
    refs = store.pages.match_prefix(IDS, SALT, pin=True)
    flip(store, 1)
    assert scrubbed(store, 1) == [(0, True)]
    found = store.pages.scrub_next().result(20)
    assert found is not None
    assert (found.ref, found.good) == (refs[1], False)
    assert store.pages.match_prefix(IDS, SALT) == refs[:1]
    assert page_state(store, refs[1]) is PageState.QUARANTINE, "its reader holds the place"
    assert page_state(store, refs[2]) is PageState.PUBLISHED, "later pages stay valid"
    assert scrubbed(store, 3) == [(2, True), (3, True), (0, True)]
    for ref in refs:
        store.pages.unpin(ref)
    lane = Lane(store, incarnation=2)
    lane.add_chain(IDS)  # recomputed in its slot: the chain is complete again
    assert len(store.pages.match_prefix(IDS, SALT)) == 4
    lane.close()


def test_one_scrub_round_finds_every_random_bit_flip(store: Store) -> None:
    rng = np.random.default_rng(5)
    path = Path(store.pages.allocator.infos[0].path)
    clean = path.read_bytes()
    for _ in range(25):
        at = int(rng.integers(4 * SIZE))
        with open(path, "r+b") as extent:
            extent.seek(at)
            extent.write(bytes([clean[at] ^ 1 << int(rng.integers(8))]))
        bad = [slot for slot, good in scrubbed(store, 4) if not good]
        assert bad == [at // SIZE]
        lane = Lane(store, incarnation=3)
        lane.add_chain(IDS)
        lane.close()
        slots = [ref.page_id for ref in store.pages.match_prefix(IDS, SALT)]
        if sorted(slots) != [0, 1, 2, 3]:
            break  # the slot failed twice and is retired
        clean = path.read_bytes()


# -- verify everything ------------------------------------------------------------------------


def test_verify_reads_every_page(store: Store) -> None:
    path = store.path
    store.close()
    again = Store.open(path, descriptor(), settings())
    again.pages.load(again.pages.match_prefix(IDS, SALT)[:1]).result(20)
    flip(again, 0)  # read since start
    flip(again, 3)  # not read since start
    report = again.pages.verify_all().result(20)
    assert (report.total, report.good, report.bad, report.gone) == (4, 2, 2, 0)
    assert report.read_bytes == 4 * SIZE
    assert again.pages.match_prefix(IDS, SALT) == []
    assert again.pages.verify_all().result(20).good == 2
    check_integrity(again)
    again.close()


def test_verify_skips_pages_evicted_meanwhile_and_runs_once_at_a_time(store: Store) -> None:
    gate = threading.Event()
    store.core.thread.submit(gate.wait)
    running = store.pages.verify_all()
    assert store.pages.verify_all() is running
    store.core.thread.submit(lambda: evict(store, 4))  # after the first page
    gate.set()
    report = running.result(20)
    assert (report.good, report.gone, report.total) == (1, 3, 4)


def test_a_seal_does_not_wait_for_the_whole_verification(store: Store) -> None:
    gate = threading.Event()
    store.core.thread.submit(gate.wait)
    running = store.pages.verify_all()
    before = store.core.counters["pages_verified"]
    other = store.core.thread.submit(lambda: store.core.counters["pages_verified"] - before)
    gate.set()
    assert other.result(20) == 1
    assert running.result(20).good == 4


def test_a_failed_verification_raises_its_error(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(loader: PageLoader, page: Page) -> bool:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(PageLoader, "read_again", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            store.pages.verify_all().result(20)
    closing = Store.open(tmp_path / "other", descriptor(), settings())
    lane = Lane(closing)
    lane.add_chain(IDS)
    lane.close()
    future = closing.pages.verify_all()
    closing.close()
    assert future.exception(20) is None or isinstance(future.exception(), StoreError)


# -- garbage ----------------------------------------------------------------------------------


def test_garbage_collection_reaches_its_target_and_keeps_used_pages(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings(20, 20, sessions_max=2))
    lane = Lane(store)
    for name in range(17):  # 85 % of 20 slots
        wait_for_growth(store)
        lane.add_chain(tokens_of(name, 1))
    tail, _ = lane.add(ROOT_KEY, tokens_of(99, 1)[:9])
    store.pages.unpin(tail)
    lane.store.pages.unpin(lane.add(ROOT_KEY, tokens_of(99, 1)[:10])[0])
    held = store.pages.match_prefix(tokens_of(3, 1), SALT, pin=True)
    for name in "abcd":
        open_session(store.ledger, name, "t")
        append_turn(store.ledger, name, "turn", 0, 0)
        store.ledger.commit().result(20)
    assert store.stat()["tails"] == 2
    assert store.stat()["tails_superseded"] == 1
    assert store.stat()["sessions"] == 4
    report = store.gc(keep=["a"]).result(20)
    assert (report.tails_superseded, report.pages_evicted) == (1, 0)
    assert report.sessions == 2
    assert store.stat()["used_bytes"] == 17 * SIZE
    assert {info.id for info in store.ledger.list_sessions().result(20)} == {"a", "d"}
    assert store.stat()["sessions"] == 2
    assert store.pages.match_prefix(tokens_of(3, 1), SALT) == held, "a pinned page is kept"
    assert store.gc(keep=["a"]).result(20) == type(report)(0, 0, 0, 0, 0)
    lane.add_chain(tokens_of(50, 1))  # 90 %: no more, but still above the target
    assert store.gc().result(20).pages_evicted == 1
    assert store.pages.match_prefix(tokens_of(50, 1), SALT)
    store.pages.unpin(held[0])
    lane.close()
    check_integrity(store)
    store.close()


def test_pages_of_another_model_are_dropped_when_they_fill_the_budget(store: Store) -> None:
    path = store.path
    store.close()
    other = descriptor(model_hash="dd" * 32)
    for pages, dropped in ((24, 0), (16, 1)):  # 16 slots: two thirds of the budget, or all
        again = Store.open(path, other, settings(pages))
        report = again.gc().result(20)
        assert (report.extents_other_reprs, report.slots_other_reprs) == (dropped, 4 * dropped)
        assert again.stat()["extent_bytes_other_reprs"] == (3 - dropped) * 4 * SIZE
        check_integrity(again)
        again.close()
    again = Store.open(path, descriptor(), settings())
    assert len(again.pages.match_prefix(IDS, SALT)) == 4, "an extent without pages went first"
    again.close()


def test_a_page_that_two_sessions_share_takes_one_slot(store: Store) -> None:
    used = store.stat()["used_bytes"]
    lane = Lane(store, incarnation=2)
    fork = np.concatenate([IDS[:512], tokens_of(8, 1)])
    lane.add_chain(fork)
    assert store.stat()["used_bytes"] == int(used) + SIZE
    assert evict(store, 1) == 1, "the end of the older chain"
    assert len(store.pages.match_prefix(IDS, SALT)) == 3
    assert evict(store, 2) == 2
    assert len(store.pages.match_prefix(IDS, SALT)) == 2, "the shared part is the last to go"
    lane.close()


# -- counters ---------------------------------------------------------------------------------


def test_rates_are_measured_at_opening_and_as_pages_move(store: Store) -> None:
    for rate in (store.rates.seal_bytes_per_s, store.rates.read_bytes_per_s):
        assert rate is not None
        assert rate > 0
    before = store.rates.read_bytes_per_s
    store.pages.scrub_next().result(20)
    assert store.stat()["read_bytes_per_s"] == store.rates.read_bytes_per_s != before
    before = store.rates.read_bytes_per_s
    store.rates.note_read(0, 1.0)
    assert before is not None
    assert store.rates.read_bytes_per_s == pytest.approx(before * 0.8)


def test_bytes_by_state_add_up(store: Store) -> None:
    stat = store.stat()
    states = sum(int(stat[f"bytes_{state.value}"]) for state in PageState)
    assert states == int(stat["pages_total"]) * SIZE == stat["extent_bytes"]
    assert stat["bytes_published"] == 4 * SIZE
    assert stat["sessions"] == 0


def test_a_store_without_its_page_thread_is_not_healthy(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    assert store.stat()["page_tier"] == "ok"
    store.core.thread.close()
    assert store.stat()["page_tier"] == "off: the page thread has ended"
    store.close()
