"""A store on a small file system that other programs fill: pages are evicted, turns continue,
and tokens stay the same."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchengine.core import Kind
from bench.processes.store_check import check_integrity
from kv_store import keys
from kv_store.errors import StoreFull
from kv_store.pages.core import derived_floor_bytes
from kv_store.store import Store, StoreSettings
from tests.support import kv_scene
from tests.support.engines import Reference, Site, read, request, running_engine, until, words
from tests.support.kv_workload import (
    LAYOUT,
    SALT,
    Lane,
    descriptor,
    payload_of,
    settings,
    tokens_of,
    wait_for_growth,
)

SIZE = LAYOUT.page_bytes
MIB, GIB = 1 << 20, 1 << 30
MakeDisk = Callable[[int], Path]


@pytest.fixture
def make_disk() -> Iterator[MakeDisk]:
    """A file system of so many MiB."""
    with contextlib.ExitStack() as disks:
        yield lambda size_mib: disks.enter_context(kv_scene.small_disk(f"size={size_mib}m"))


def fill(disk: Path) -> None:
    """Another program takes every byte that is left."""
    with open(disk / "filler", "ab", buffering=0) as filler:
        for step in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while filler.write(bytes(step)) == step:
                    pass


@pytest.mark.parametrize(
    ("total_bytes", "floor_bytes"),
    [
        (16 * MIB, 4 * MIB),
        (GIB, GIB // 4),
        (8 * GIB, 2 * GIB),
        (20 * GIB, 2 * GIB),
        (40 * GIB, 2 * GIB),
        (100 * GIB, 5 * GIB),
        (4096 * GIB, 8 * GIB),
    ],
)
def test_the_derived_floor_leaves_a_small_disk_usable(total_bytes: int, floor_bytes: int) -> None:
    assert derived_floor_bytes(total_bytes) == floor_bytes


def derived(pages: int) -> StoreSettings:
    return settings(pages, 4, ballast_bytes=8 * SIZE, free_floor_bytes=None)


def mapped(store: Store, name: int) -> bool:
    """Whether the page of a timeline, read through a mapping as a lane does, is right."""
    (ref,) = store.pages.match_prefix(tokens_of(name, 1), SALT)
    (key,) = keys.chain_keys(tokens_of(name, 1), store.pages.repr_id, SALT)
    code = store.pages.slot_code(ref)
    info = next(info for info in store.pages.allocator.infos if info.index == code >> 32)
    with open(info.path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as pages:
        start = (code & 0xFFFFFFFF) * SIZE
        return pages[start : start + SIZE] == payload_of(key).tobytes()


def test_a_small_disk_is_used_down_to_its_floor_and_then_evicts(make_disk: MakeDisk) -> None:
    disk = make_disk(8)
    store = Store.open(disk / "s", descriptor(), derived(256))  # a budget of twice the disk
    assert store.stat()["disk_free_floor_bytes"] == 2 * MIB
    lane, name = Lane(store), 0
    while not store.stat()["growth_blocked"]:
        lane.add_chain(tokens_of(name, 1))
        wait_for_growth(store)
        name += 1
    assert name > 40, "three quarters of the disk are for pages"
    assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize >= 2 * MIB
    fill(disk)
    evicted, done = int(store.stat().get("pages_evicted_total", 0)), list[int]()
    for again in range(200, 260):
        with contextlib.suppress(StoreFull):  # the ledger's log is full for a time, or permanently
            lane.add_chain(tokens_of(again, 1))
            done.append(again)
        store.maintain()
        wait_for_growth(store)
    assert len(done) > 10, "places that exist go on being used"
    assert int(store.stat()["pages_evicted_total"]) > evicted
    assert all(mapped(store, again) for again in done[-10:])
    assert str(store.stat()["page_tier"]).startswith("not growing: the disk has")
    assert "free_floor_bytes" in str(store.stat()["growth_blocked"]), "what to do about it"
    lane.close()
    with contextlib.suppress(StoreFull):
        store.ledger.commit().result(20)
    store.close()
    store = Store.open(disk / "s", descriptor(), derived(256))  # still as full as before
    listed = store.stat()["pages_listed"]
    refs = [r for n in range(400) for r in store.pages.match_prefix(tokens_of(n, 1), SALT)]
    assert listed == len(refs) > 0
    good = store.pages.load(refs).result(20)
    assert sum(good) > 20
    check_integrity(store)
    store.close()


def test_a_disk_that_was_full_before_reports_why_nothing_is_cached(make_disk: MakeDisk) -> None:
    disk = make_disk(8)
    (disk / "others").write_bytes(bytes(7 * MIB))
    store = Store.open(disk / "s", descriptor(), derived(16))
    assert any("caching is off: the disk has" in text for text in store.warnings)
    tier = str(store.stat()["page_tier"])
    assert "2 MiB stay free for others" in tier
    assert "free_floor_bytes" in tier
    store.close()
    low = settings(16, 4, free_floor_bytes=4096)
    store = Store.open(disk / "s", descriptor(), low)
    assert store.stat()["page_tier"] == "ok", "the setting reaches the store"
    store.close()


async def test_a_daemon_on_a_full_small_disk_continues_to_answer(
    site: Site, make_disk: MakeDisk
) -> None:
    """Existing pages are used, reused and evicted; tokens are those of the reference; a named turn
    is refused with a reason while the ledger has no room, and served when it has."""
    disk = make_disk(96)
    reference = Reference(site.model, site.cache_dir)
    prompts = {f"s{i}": words(60 + i, 600) for i in range(4)}
    whole = {name: reference.tokens(prompt, 12) for name, prompt in prompts.items()}
    filling = words(1, 4000)
    right = reference.tokens(filling, 5)
    reference.close()

    settings_of = {"store__budget_bytes": 48 << 20, "store__free_floor_bytes": 0}  # 0 = derived
    async with running_engine(site.at(disk), **settings_of) as engine:
        store = engine.running.store
        assert store is not None
        assert store.stat()["disk_free_floor_bytes"] == 24 * MIB
        for name, prompt in prompts.items():
            assert (await read(engine.submit(request(prompt, 12)))).tokens == whole[name]
        await until(lambda: int(store.stat()["pages_published"]) > 0)
        fill(disk)
        for name, prompt in prompts.items():
            assert (await read(engine.submit(request(prompt, 12)))).tokens == whole[name]
        refused, reported = 0, False
        for number in range(200):
            named = await read(engine.submit(request(filling, 5, session=f"n{number}")))
            if named.error is not None:
                assert named.error.kind is Kind.UNAVAILABLE, named.error
                assert named.error.fix
                assert named.tokens == right[: len(named.tokens)], "told, but never durable"
                refused += 1
                # A smaller record may fit right after, and ends the trouble until the next turn.
                reported |= any("ledger full" in text for text in engine.stats()["troubles"])
            if refused >= 3 and reported:
                break
        assert refused >= 3
        assert reported
        assert (await read(engine.submit(request(prompts["s0"], 12)))).tokens == whole["s0"]
        os.unlink(disk / "filler")
        for name, prompt in prompts.items():
            answer = await read(engine.submit(request(prompt, 12, session=name)))
            assert (answer.tokens, answer.error) == (whole[name], None)
        assert not any("ledger" in text for text in engine.stats()["troubles"])
        assert [lane["state"] for lane in engine.lanes()] == ["ready"]


async def test_the_settings_of_a_daemon_reach_its_store(site: Site) -> None:
    async with running_engine(
        site, store__free_floor_bytes=12_345, store__sessions_max=7
    ) as engine:
        stat = await engine.store_op("stat")
        assert (stat["disk_free_floor_bytes"], stat["sessions_max"]) == (12_345, 7)
    async with running_engine(site.at("b"), store__free_floor_bytes=1 << 50) as engine:
        (trouble,) = engine.stats()["troubles"]
        assert trouble.startswith("KV cache off: the disk has")
        assert "free_floor_bytes" in trouble
        answer = await asyncio.wait_for(read(engine.submit(request(words(1, 300), 5))), 30)
        assert (answer.error, len(answer.tokens)) == (None, 5)
