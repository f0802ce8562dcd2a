"""The page pool and the store directory: seal, publish, match, dedupe, budget, lock, reopen."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import kv_store.osio as osio
from bench.processes.store_check import check_integrity
from kv_store.errors import (
    NumericsFault,
    StaleRef,
    StoreCorrupt,
    StoreLocked,
    StoreUnsupported,
    StoreVersion,
)
from kv_store.keys import ROOT_KEY, content_key, payload_digest, sealed_checksum
from kv_store.layout import PAGE_TOKENS, PageLayout, differing_fields
from kv_store.pages.allocator import RETRACT_SLICE, NoRoom
from kv_store.pages.index import PageRef, PageState
from kv_store.pages.seal import Ticket
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    Lane,
    add_chain,
    append_tokens,
    descriptor,
    evict,
    open_session,
    page_state,
    payload_of,
    pin,
    read_page,
    settings,
    tokens_of,
    wait_for_growth,
)

ROOT = Path(__file__).resolve().parents[3]
tmp_path, store, lane = kv_scene.tmp_path, kv_scene.store, kv_scene.lane


def reopen(store: Store, **changes: int) -> Store:
    path = store.path
    store.close()
    return Store.open(path, descriptor(), settings(**changes))


# -- one page ---------------------------------------------------------------------------------


def test_a_sealed_page_holds_the_bytes_that_the_lane_wrote(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    ref, key = lane.add(ROOT_KEY, ids)
    assert key == content_key(ROOT_KEY, ids, store.pages.repr_id, SALT)
    page = read_page(store, ref)
    assert page == payload_of(key).tobytes()
    proof = store.pages.proof(ref)
    assert sealed_checksum(page, proof.seed) == proof.checksum
    assert proof.slot_code == store.pages.slot_code(ref) == 1 << 32
    assert store.pages.digest(ref) == payload_digest(page)
    assert store.pages.match_prefix(ids, SALT) == [ref]


def test_prefix_stops_at_the_first_difference_and_at_the_tenant(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 3)
    refs = lane.add_chain(ids)
    assert store.pages.match_prefix(ids, SALT) == refs
    assert store.pages.match_prefix([*ids.tolist(), 1, 2, 3], SALT) == refs
    assert store.pages.match_prefix(ids[:-1], SALT) == refs[:2]
    assert store.pages.match_prefix(ids, SALT, tokens_max=2 * PAGE_TOKENS) == refs[:2]
    assert store.pages.match_prefix(ids, SALT, tokens_max=-5) == []
    assert store.pages.match_prefix(ids, b"other tenant") == []
    changed = ids.copy()
    changed[PAGE_TOKENS] ^= 1
    assert store.pages.match_prefix(changed, SALT) == refs[:1]


def test_token_ids_are_compared_on_a_hit_not_only_their_hash(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    ref, key = lane.add(ROOT_KEY, ids)
    page = store.pages.index.get(ref)
    page.tokens = page.tokens[:-4] + b"\0\0\0\0"  # as if two token runs had one key
    assert store.pages.match_prefix(ids, SALT) == []
    again = lane.seal(ROOT_KEY, ids)
    assert again.key == key
    assert again.page is not None, "the doubtful page must not be handed out as a twin"
    store.pages.abort(again)
    store.pages.unpin(ref)


def test_a_page_is_found_only_once_its_row_is_durable(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    ticket = lane.seal(ROOT_KEY, ids)
    future = store.pages.publish(ticket)
    assert not future.done()
    assert store.pages.match_prefix(ids, SALT) == []
    store.ledger.commit().result(20)
    assert store.pages.match_prefix(ids, SALT) == [future.result(20)]


def test_bytes_that_change_after_the_lane_hashed_them_are_refused(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    ticket = store.pages.reserve(ROOT_KEY, ids, SALT)
    at = lane.arena.reserve()
    assert ticket is not None
    assert at is not None
    page = np.frombuffer(lane.mapping.page(at.slot), np.uint8)
    page[:] = 1
    digest = lane.mapping.digest(at.slot)
    page[77] ^= 4
    with pytest.raises(StoreCorrupt, match="changed after its lane"):
        store.pages.seal(ticket, lane.arena, at, digest).result(20)
    with pytest.raises(StaleRef):
        store.pages.publish(ticket)
    store.pages.abort(ticket)  # harmless afterwards
    assert store.stat()["pages_reserved"] == store.stat()["pages_quarantine"] == 0


def test_a_ticket_abandoned_at_any_moment_frees_its_slot(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    first = store.pages.reserve(ROOT_KEY, ids, SALT)
    assert first is not None
    store.pages.abort(first)
    sealed = lane.seal(ROOT_KEY, ids)
    store.pages.abort(sealed)
    running = store.pages.reserve(ROOT_KEY, ids, SALT)
    at = lane.arena.reserve()
    assert running is not None
    assert at is not None
    future = store.pages.seal(running, lane.arena, at, lane.mapping.digest(at.slot))
    store.pages.abort(running)
    error = future.exception(20)  # the copy was over already, or stopped
    assert error is None or "given up" in str(error)
    store.core.thread.submit(lambda: None).result(20)
    assert store.stat()["used_bytes"] == 0


# -- two pages of one key ---------------------------------------------------------------------


def test_the_first_of_two_equal_pages_is_kept(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 1)
    one, two = lane.seal(ROOT_KEY, ids), lane.seal(ROOT_KEY, ids)
    first, second = store.pages.publish(one), store.pages.publish(two)
    store.ledger.commit()
    assert first.result(20) == second.result(20)
    third = lane.add(ROOT_KEY, ids)[0]  # the key is resident already when it is reserved
    assert third == first.result()
    assert store.stat()["pages_published"] == 1
    for _ in range(3):
        store.pages.unpin(third)
    with pytest.raises(StaleRef, match="not pinned"):
        store.pages.unpin(third)


@pytest.mark.parametrize("when", ["resident", "publishing"])
def test_equal_keys_with_other_bytes_are_a_numerics_fault(
    store: Store, lane: Lane, when: str
) -> None:
    ids = tokens_of(1, 1)
    if when == "resident":
        ref, key = lane.add(ROOT_KEY, ids)
        with pytest.raises(NumericsFault, match="two contents"):
            lane.seal(ROOT_KEY, ids, flip=1)
    else:
        good, bad = lane.seal(ROOT_KEY, ids), lane.seal(ROOT_KEY, ids, flip=1)
        first, second = store.pages.publish(good), store.pages.publish(bad)
        store.ledger.commit()
        ref, key = first.result(20), good.key
        with pytest.raises(NumericsFault):
            second.result(20)
    assert read_page(store, ref) == payload_of(key).tobytes()
    store.pages.unpin(ref)
    assert store.stat()["numerics_faults_total"] == 1
    assert store.stat()["pages_published"] == store.stat()["pages_pinned"] + 1 == 1


def test_a_duplicate_of_a_page_not_read_since_start_replaces_or_verifies_it(store: Store) -> None:
    lane = Lane(store)
    ids = tokens_of(1, 1)
    lane.add_chain(ids)
    lane.close()
    store = reopen(store)
    lane = Lane(store, incarnation=2)
    (cold,) = store.pages.match_prefix(ids, SALT, pin=True)
    assert page_state(store, cold) is PageState.LISTED
    again = lane.add(ROOT_KEY, ids)[0]  # pinned elsewhere: verified, then shared
    assert again == cold
    assert page_state(store, cold) is PageState.PUBLISHED
    lane.close()
    store.close()


# -- budget and eviction ----------------------------------------------------------------------


def test_budget_is_hard_and_eviction_takes_the_lowest_then_oldest(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings(pages=10, extent_pages=3))
    lane = Lane(store)
    names = list(range(100, 108))
    for name in names:
        wait_for_growth(store)
        lane.add_chain(tokens_of(name, 1), priority=1 if name == 100 else 0)
    store.pages.match_prefix(tokens_of(101, 1), SALT)  # used again: the oldest is 102 now
    for name in range(200, 230):
        wait_for_growth(store)
        lane.add_chain(tokens_of(name, 1))
        check_integrity(store)
        if name == 201:
            assert store.pages.match_prefix(tokens_of(102, 1), SALT) == []
            assert store.pages.match_prefix(tokens_of(101, 1), SALT)
    assert store.pages.match_prefix(tokens_of(100, 1), SALT), "a higher class outlives a lower one"
    assert store.pages.match_prefix(tokens_of(101, 1), SALT) == []
    sizes = [f.stat().st_size for f in (tmp_path / "s" / "ext").iterdir()]
    assert sum(sizes) <= 10 * LAYOUT.page_bytes
    assert sorted(sizes) == sorted(n * LAYOUT.page_bytes for n in (3, 3, 3, 1))
    lane.close()
    store.close()


def test_a_chain_is_evicted_from_its_end(store: Store, lane: Lane) -> None:
    ids = tokens_of(1, 4)
    refs = lane.add_chain(ids)
    pin(store, refs[0])
    assert evict(store, 1) == 1
    assert store.pages.match_prefix(ids, SALT) == refs[:3]
    assert evict(store, 10) == 2
    assert store.pages.match_prefix(ids, SALT) == refs[:1], "a pinned page stays"
    store.pages.unpin(refs[0])
    assert evict(store, 10) == 1
    with pytest.raises(StaleRef):
        pin(store, refs[0])


def test_reserve_refuses_when_everything_is_pinned(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings(pages=2, extent_pages=2))
    lane = Lane(store)
    refs = [lane.add(ROOT_KEY, tokens_of(name, 1))[0] for name in (1, 2)]
    refused = store.pages.reserve(ROOT_KEY, tokens_of(3, 1), SALT)
    assert refused is NoRoom.FULL
    store.pages.unpin(refs[0])
    lane.add(ROOT_KEY, tokens_of(3, 1))
    assert store.pages.match_prefix(tokens_of(1, 1), SALT) == []
    lane.close()
    store.close()


def test_reserve_waits_for_slots_of_invalid_pages_and_evicts_no_valid_page(tmp_path: Path) -> None:
    """While the page thread has yet to free them, a reservation evicts nothing."""
    store = Store.open(tmp_path / "s", descriptor(), settings(pages=50, extent_pages=50))
    lane, wrong = Lane(store), tokens_of(1, 40)
    (good,) = lane.add_chain(tokens_of(2, 1))
    chain = lane.add_chain(wrong)
    wait_for_growth(store)
    free, busy = len(store.pages.index) - store.pages.index.used, threading.Event()
    store.core.thread.submit(busy.wait)
    store.pages.invalidate(chain[0], descendants=True)
    evicted, tickets = store.core.counters["pages_evicted"], list[Ticket]()
    answers = [
        store.pages.reserve(ROOT_KEY, tokens_of(1000 + n, 1), SALT)
        for n in range(free + RETRACT_SLICE + 1)
    ]
    tickets += [answer for answer in answers if isinstance(answer, Ticket)]
    assert len(tickets) == free + RETRACT_SLICE
    assert answers[-1] is NoRoom.GROWING
    assert store.core.counters["pages_evicted"] == evicted
    assert store.pages.is_resident(good)
    busy.set()
    wait_for_growth(store)
    last = store.pages.reserve(ROOT_KEY, tokens_of(1, 1), SALT)
    assert isinstance(last, Ticket)
    for ticket in [*tickets, last]:
        store.pages.abort(ticket)
    check_integrity(store)
    lane.close()
    store.close()


def test_a_budget_below_one_page_serves_uncached(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings(pages=0))
    assert any("smaller than one page" in text for text in store.warnings)
    refused = store.pages.reserve(ROOT_KEY, tokens_of(1, 1), SALT)
    assert refused is NoRoom.FULL
    assert store.tier == "off: the budget is smaller than one page"
    store.close()


def test_a_freed_slot_is_poisoned_and_its_generation_rises(store: Store, lane: Lane) -> None:
    (ref,) = lane.add_chain(tokens_of(1, 1))
    code = store.pages.slot_code(ref)
    assert evict(store, 1) == 1
    for _ in range(50):
        store.core.thread.submit(lambda: None).result(20)
    path = next(i for i in store.pages.allocator.infos if i.index == code >> 32).path
    data = Path(path).read_bytes()
    assert data[: LAYOUT.page_bytes] == b"\xff" * LAYOUT.page_bytes
    (again,) = lane.add_chain(tokens_of(2, 1))
    assert again == PageRef(ref.page_id, ref.gen + 1)
    with pytest.raises(StaleRef, match="gone"):
        store.pages.slot_code(ref)
    assert store.pages.load([ref, again]).result(20) == [False, True]


def test_generations_rise_across_restarts(store: Store) -> None:
    lane = Lane(store)
    (ref,) = lane.add_chain(tokens_of(1, 1))
    evict(store, 1)
    lane.close()
    store = reopen(store)
    lane = Lane(store, incarnation=2)
    (again,) = lane.add_chain(tokens_of(1, 1))
    assert again.page_id == ref.page_id
    assert again.gen > ref.gen
    lane.close()
    store.close()


# -- the directory ----------------------------------------------------------------------------


def test_pages_and_sessions_survive_a_restart(store: Store) -> None:
    lane = Lane(store)
    ids = tokens_of(1, 3)
    refs = lane.add_chain(ids, priority=3)
    open_session(store.ledger, "s", "t")
    append_tokens(store.ledger, "s", 1, 0, ids)
    uuid, epoch = store.core.uuid, store.epoch
    lane.close()
    store = reopen(store)
    assert (store.core.uuid, store.epoch) == (uuid, epoch + 1)
    assert store.ledger.replay.clean
    assert (store.stat()["sessions"], store.stat()["pages_listed"]) == (1, 3)
    record = store.ledger.load_session("s").result(20)
    assert record is not None
    assert record.tokens == ids.tolist()
    assert refs == store.pages.match_prefix(ids, SALT)
    assert {page_state(store, ref) for ref in refs} == {PageState.LISTED}
    assert store.pages.load(refs).result(20) == [True] * 3
    assert {page_state(store, ref) for ref in refs} == {PageState.PUBLISHED}
    assert store.pages.load(refs).done(), "warm pages are readable at once"
    store.close()


def test_ages_survive_a_restart(store: Store) -> None:
    lane = Lane(store)
    for name in (1, 2, 3):
        lane.add_chain(tokens_of(name, 1))
    store.pages.match_prefix(tokens_of(1, 1), SALT)
    lane.close()
    store = reopen(store)
    assert evict(store, 1) == 1
    assert not store.pages.match_prefix(tokens_of(2, 1), SALT), "2 was the least recently used"
    store.close()


def test_a_smaller_budget_drops_extents_and_a_larger_one_grows(store: Store) -> None:
    lane = Lane(store)
    for name in range(6):
        wait_for_growth(store)
        lane.add_chain(tokens_of(name, 1))
    lane.close()
    store = reopen(store, pages=4)
    assert store.stat()["pages_total"] == 4
    assert store.dropped == {"over budget": 2}
    assert "2 pages were dropped: over budget" in store.warnings
    assert store.stat()["pages_listed"] == 4
    check_integrity(store)
    store = reopen(store, pages=20)
    store.maintain()
    wait_for_growth(store)
    assert store.stat()["pages_total"] > 4
    check_integrity(store)
    store.close()


def test_another_model_shares_the_budget_and_reclaims_old_extents(store: Store) -> None:
    lane = Lane(store)
    ids = tokens_of(1, 4)
    lane.add_chain(ids)
    lane.close()
    path = store.path
    store.close()
    other = descriptor(model_hash="dd" * 32)
    store = Store.open(path, other, settings())
    assert store.pages.match_prefix(ids, SALT) == [], "pages of another model are never found"
    assert [differing_fields(other, text) for text in store.ledger.replay.reprs.values()] == [
        ["model_hash"]
    ]
    store.close()
    store = Store.open(path, descriptor(), settings())
    assert len(store.pages.match_prefix(ids, SALT)) == 4, "the first model's pages were kept"
    store.close()
    store = Store.open(path, other, settings())
    lane = Lane(store, incarnation=2)
    for name in range(40):
        wait_for_growth(store)
        lane.add_chain(tokens_of(name, 1))
        check_integrity(store)
    lane.close()
    store.close()
    store = Store.open(path, descriptor(), settings())
    assert store.pages.match_prefix(ids, SALT) == [], "their space was needed"
    store.close()


def test_the_directory_is_private_and_links_are_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o755)
    store = Store.open(path, descriptor(), settings())
    for name in (path, path / "ext", path / "arena"):
        assert stat.S_IMODE(name.stat().st_mode) == 0o700
    for name in ("LOCK", "meta.db", "BALLAST", "ext/000001.kv"):
        assert stat.S_IMODE((path / name).stat().st_mode) & 0o077 == 0, name
    assert not (path / "meta.db-shm").exists(), "no shared-memory mapping of the ledger"
    store.close()
    (path / "LOCK").rename(tmp_path / "elsewhere")
    (path / "LOCK").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreUnsupported, match="cannot be locked"):
        Store.open(path, descriptor(), settings())


def test_a_second_opener_is_refused_with_the_pid_of_the_holder(store: Store) -> None:
    with pytest.raises(StoreLocked) as caught:
        Store.open(store.path, descriptor(), settings())
    assert caught.value.pid == os.getpid()
    assert f"pid {os.getpid()}" in str(caught.value)
    code = (
        "import sys\nfrom kv_store.errors import *\nfrom tests.support.kv_workload import *\n"
        f"try: Store.open({store.path!r}, descriptor(), settings())\n"
        "except StoreLocked as error: sys.exit(3 if error.pid == "
        f"{os.getpid()} else 4)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert done.returncode == 3


def test_a_store_with_a_stale_lock_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    (path / "LOCK").write_text(json.dumps({"pid": 1, "store_uuid": "00"}))
    store = Store.open(path, descriptor(), settings())
    assert json.loads((path / "LOCK").read_text())["pid"] == os.getpid()
    assert (path / "BALLAST").stat().st_size == LAYOUT.page_bytes
    store.close()


def test_a_newer_store_is_refused_untouched(store: Store) -> None:
    path = Path(store.path)
    store.close()
    data = bytearray((path / "meta.db").read_bytes())
    data[60:64] = (99).to_bytes(4, "big")  # user_version of the SQLite header
    (path / "meta.db").write_bytes(data)
    before = {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in path.rglob("*.*") if f.is_file()}
    with pytest.raises(StoreVersion, match="schema 99"):
        Store.open(path, descriptor(), settings())
    after = {f: (f.read_bytes(), f.stat().st_mtime_ns) for f in path.rglob("*.*") if f.is_file()}
    assert before == after


@pytest.mark.parametrize(
    ("kind", "support"),
    [(0xEF53, "ok"), (0x6969, "refuse"), (0x794C7630, "refuse"), (0x9123683E, "refuse"),
     (0x65735546, "refuse"), (0x01021994, "volatile"), (0x12345, "refuse")],
)  # fmt: skip
def test_file_systems_are_accepted_warned_about_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int, support: str
) -> None:
    fs = osio.classify(kind)
    assert fs.support == support
    monkeypatch.setattr(osio, "file_system", lambda path: fs)
    strict = settings(allow_any_fs=False)
    if support == "refuse":
        with pytest.raises(StoreUnsupported) as caught:
            Store.open(tmp_path / "s", descriptor(), strict)
        assert caught.value.what.endswith(f" is on {fs.name}")
        assert caught.value.fix
    store = Store.open(tmp_path / "s", descriptor(), settings(allow_any_fs=True))
    assert len(store.warnings) == (support != "ok")
    store.close()


def test_the_file_system_of_a_real_folder_is_recognised(tmp_path: Path) -> None:
    assert osio.file_system(str(tmp_path)).name
    assert osio.file_system("/proc").support == "refuse"


def test_a_folder_of_another_user_is_refused_or_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    path.mkdir(mode=0o700)
    owner = os.stat(path).st_uid or 4242
    os.chown(path, owner, -1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(StoreUnsupported, match=f"belongs to user {owner}"):
            Store.open(path, descriptor(), settings())
    if os.geteuid() == 0:
        store = Store.open(path, descriptor(), settings())
        assert any(f"belongs to user {owner}" in warning for warning in store.warnings)
        store.close()


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnsupported, match="cannot be used"):
        Store.open(tmp_path / "file", descriptor(), settings())


def test_dead_arenas_are_deleted_and_live_ones_are_left(store: Store) -> None:
    dead, alive = Lane(store, 1, 1), Lane(store, 1, 2)
    dead.mapping.close()
    (Path(store.path) / "arena" / "not ours").write_text("x")
    store = reopen(store)
    assert sorted(os.listdir(f"{store.path}/arena")) == ["cpu.2", "not ours"]
    alive.mapping.close()
    store.close()


def test_files_of_the_wrong_type_are_reported_and_left(store: Store) -> None:
    path = Path(store.path)
    (path / "arena" / "cpu.98").mkdir()
    (path / "arena" / "cpu.97").symlink_to("/etc/hostname")
    (path / "ext" / "000009.kv").mkdir()
    again = reopen(store)
    for name in ("cpu.98", "cpu.97", "000009.kv"):
        assert sum(name in warning for warning in again.warnings) == 1, again.warnings
    again.close()
    assert Path("/etc/hostname").exists()


def test_an_opening_that_fails_closes_its_lock_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original error is raised, and the store can be opened again."""
    store.close()

    def fails(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "_recover", fails)
        with pytest.raises(RuntimeError, match="planted"):
            Store.open(store.path, descriptor(), settings())
    Store.open(store.path, descriptor(), settings()).close()


def test_status_lines_and_statistics_count_pages_and_slots(store: Store, lane: Lane) -> None:
    lane.add_chain(tokens_of(1, 2))
    assert repr(store).startswith(f"<Store epoch={store.epoch} pages=2/16 published=2 listed=0")
    numbers = store.stat()
    assert numbers["pages_published"] == 2
    assert numbers["pages_published_total"] == 2
    assert numbers["used_bytes"] == 2 * LAYOUT.page_bytes
    assert repr(lane.arena) == "<Arena cpu.1 free=4 open=0>"
    assert numbers["ledger_failed"] == ""


def test_maintain_checks_the_index_and_reports_an_inconsistency(store: Store, lane: Lane) -> None:
    (ref,) = lane.add_chain(tokens_of(1, 1))
    store.maintain()
    store.pages.index.get(ref).state = PageState.BAD
    with pytest.raises(AssertionError):
        store.maintain()
    store.pages.index.get(ref).state = PageState.PUBLISHED


def test_closing_a_store_fails_its_pending_futures(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings())
    add_chain(store, tokens_of(1, 1))
    store = reopen(store)
    refs = store.pages.match_prefix(tokens_of(1, 1), SALT)
    store.close()
    assert store.pages.load(refs).result(20) == [False]
    with pytest.raises(Exception, match="closed"):
        store.ledger.commit().result(20)
    with pytest.raises(Exception, match="closed"):
        store.ledger.list_sessions().result(20)


def test_big_pages_take_one_extent_each(tmp_path: Path) -> None:
    layout = PageLayout.uniform(2, 2, 64)
    sized = settings(budget_bytes=3 * layout.page_bytes, extent_bytes=65536)
    store = Store.open(tmp_path / "s", descriptor(layout), sized)
    store.maintain()
    wait_for_growth(store)
    assert next(info.slots for info in store.pages.allocator.infos) == 1
    store.close()
