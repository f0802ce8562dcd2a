"""A dropped session leaves nothing on disk, except what other sessions share."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from batchengine.core import BatchEngineError
from batchengine.engine import Engine
from batchengine.engine.engine import OPERATIONS_MAX
from batchengine.engine.sessions import erasing
from batchengine.kv.slots import Seal
from batchengine.session import Session
from kv_store import keys
from kv_store.arenas.arena import ArenaSlot, session_name
from kv_store.fsck import fsck
from kv_store.ledger.queries import SessionRecord
from tests.support.engine_process import engine_process
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    until,
    words,
)

WINDOW = 6  # tokens: so many in a row are no accident
BUDGET = 24 << 20


def found(folder: Path, session: str, tokens: Sequence[int]) -> set[str]:
    """Files of the store, except extents, with the session's name or some of its tokens."""
    name = f"\x1f{session}".encode()
    wanted = [name, session_name(name)]
    wanted += [keys.token_bytes(tokens[at : at + WINDOW]) for at in range(0, len(tokens), 50)]
    anything = re.compile(b"|".join(map(re.escape, wanted)))
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "ext"]
    return {path.name for path in files if anything.search(path.read_bytes().strip(b"\0\xff"))}


def kv_of(engine: Engine, tokens: Sequence[int]) -> list[bytes]:
    """Some bytes of every full page that the store has of the tokens."""
    pages, samples = engine.running.store.pages, list[bytes]()
    for ref in pages.match_prefix(tokens, b""):
        info = pages.allocator.info(ref.page_id)
        with open(info.path, "rb") as file:
            file.seek(info.offset_of(ref.page_id) + 1000)
            samples.append(file.read(64))
    return samples


def stored_kv(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "ext").iterdir()))


async def test_a_dropped_session_is_nowhere_on_disk(site: Site, reference: Reference) -> None:
    """Also in the copy that a SIGKILL would leave, which opens without a loss."""
    common, folder = words(70, 300), site.folder / "kv"
    private, other = words(71, 700), [*common, *words(72, 300)]
    async with running_engine(site, store__budget_bytes=BUDGET) as engine:
        await read(engine.submit(request(other, 8, session="other")))
        one = await read(engine.submit(request([*common, *private], 20, session="secret-1")))
        timeline = [*common, *private, *one.tokens]
        two = await read(
            engine.submit(request([*timeline, *words(73, 90)], 20, session="secret-1"))
        )
        timeline += [*words(73, 90), *two.tokens]
        await engine.park("", "secret-1", "call_1")
        pages = engine.running.store.pages
        await until(lambda: len(pages.match_prefix(timeline, b"")) == 4)
        mine, kv = timeline[300:], kv_of(engine, timeline)[2:]
        assert {"meta.db-wal"} <= found(folder, "secret-1", mine)
        assert all(sample in stored_kv(folder) for sample in kv)

        await engine.drop("", "secret-1")
        assert found(folder, "secret-1", mine) == set()
        assert not any(sample in stored_kv(folder) for sample in kv)
        assert len(pages.match_prefix(timeline, b"")) == 1, "what the other session shares"
        assert engine.stats()["store"]["pages_pinned"] == 2, "those of the other session"
        shutil.copytree(folder, site.folder / "killed" / "kv")
        longer = [*other, *reference.tokens(other, 8), 9]
        again = await read(engine.submit(request(longer, 8, session="other")))
        assert again.tokens == reference.tokens(longer, 8)
        assert again.done is not None
        assert again.done.usage.cached_tokens >= 512
        assert engine.phase == "ready"
    assert found(folder, "secret-1", mine) == set()
    assert fsck(folder).ok
    async with running_engine(site.at("killed"), store__budget_bytes=BUDGET) as engine:
        assert engine.running.store.losses == []
        fresh = await read(engine.submit(request([*common, *private], 20, session="secret-1")))
        assert fresh.tokens == one.tokens


async def test_a_session_dropped_amid_its_turn_is_nowhere_on_disk(
    site: Site, reference: Reference
) -> None:
    """Its seals are under way, and another session computes meanwhile."""
    prompt, folder = words(74, 1100), site.folder / "kv"
    async with running_engine(site, store__budget_bytes=BUDGET) as engine:
        steady = asyncio.ensure_future(
            read(engine.submit(request(words(75, 30), 600, session="steady")))
        )
        _, reader = await started(engine, request(prompt, 500, session="secret-2"), 3)
        await engine.drop("", "secret-2")
        ended = await reader
        assert ended.error is not None
        assert ended.error.name == "session_not_found"
        assert found(folder, "secret-2", [*prompt, *ended.tokens]) == set()
        with pytest.raises(BatchEngineError, match="there is no session"):
            await engine.drop("", "secret-2")
        assert (await steady).tokens == reference.tokens(words(75, 30), 600)


async def test_two_drops_of_a_session_amid_its_turn_erase_it_once(site: Site) -> None:
    """The second finds none, and a request that comes in between begins the session anew."""
    prompt = words(78, 100)
    async with running_engine(site) as engine:
        _, reader = await started(engine, request(prompt, 500, session="s"), 3)
        first = asyncio.ensure_future(engine.drop("", "s"))
        second = asyncio.ensure_future(engine.drop("", "s"))
        assert (await first)["state"] == "dropped"
        fresh = engine.submit(request(prompt, 4, session="s"))
        with pytest.raises(BatchEngineError, match="there is no session"):
            await second
        answer = await read(fresh)
        assert (answer.error, len(answer.tokens)) == (None, 4)
        assert (await reader).error is not None


async def test_rows_of_a_killed_engine_are_erased_with_their_session(site: Site) -> None:
    """They lie in the arena of the dead engine, and the session was not used since."""
    prompt, folder = words(76, 200), site.folder / "kv"
    name = session_name(b"\x1fsecret-3")
    async with engine_process(site, store__budget_bytes=BUDGET) as engine:
        stream = engine.ask("submit", prompt=prompt, n=300, session="secret-3")
        await engine.tokens(stream, 40)
    arenas = folder / "arena"
    assert any(name in path.read_bytes() for path in arenas.iterdir())
    async with running_engine(site, store__budget_bytes=BUDGET) as engine:
        assert engine.running.store.orphaned.names
        await engine.drop("", "secret-3")
        assert not any(name in path.read_bytes() for path in arenas.iterdir())
        assert found(folder, "secret-3", prompt) == set()


async def test_a_drop_that_the_disk_refuses_can_be_asked_for_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session stays in the ledger until its pages are overwritten."""
    prompt, folder = words(77, 600), site.folder / "kv"

    def full(*_: object) -> int:
        raise OSError(5, "Input/output error")

    async with running_engine(site, store__budget_bytes=BUDGET) as engine:
        await read(engine.submit(request(prompt, 4, session="secret-4")))
        pages = engine.running.store.pages
        await until(lambda: len(pages.match_prefix(prompt, b"")) == 2)
        with monkeypatch.context() as patch:
            patch.setattr(pages.allocator.core.extents, "write_page", full)
            with pytest.raises(BatchEngineError) as caught:
                await engine.drop("", "secret-4")
        assert caught.value.name == "not_erased"
        await engine.drop("", "secret-4")
        assert found(folder, "secret-4", prompt) == set()


async def test_a_drop_does_not_wait_for_ever_for_a_seal(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seal of a page that another session has, too, and that the store has no room for."""
    prompt = words(78, 300)
    monkeypatch.setattr(erasing, "LANES_WAIT_S", 0.2)
    async with running_engine(site, store__budget_bytes=BUDGET) as engine:
        await read(engine.submit(request(prompt, 4, session="secret-5")))
        loop = engine.state.lanes[0]
        await until(lambda: not loop.kv.disputes.seals)
        other, arena = Session(9, "other", ""), loop.kv.slots.arena
        other.tokens = prompt
        assert arena is not None
        loop.kv.disputes.seals.add(Seal(other, 0, ArenaSlot(0, 1), arena, b"", b""))
        with pytest.raises(BatchEngineError, match="a lane still writes pages") as caught:
            await engine.drop("", "secret-5")
        assert caught.value.name == "not_erased"
        loop.kv.disputes.seals.clear()
        await engine.drop("", "secret-5")
        assert found(site.folder / "kv", "secret-5", prompt) == set()


async def test_drops_at_once_share_the_cleaning_of_the_ledger(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every commit waits for one: a storm of drops must not keep other tenants' tokens waiting."""
    count, folder = 16, site.folder / "kv"
    timelines = [words(200 + number, 60) for number in range(count)]
    async with running_engine(site) as engine:
        for number, tokens in enumerate(timelines):
            await read(engine.submit(request(tokens, 2, session=f"secret-{number}")))
        ledger, cleanings, at_once = engine.running.store.ledger, 0, list[int]()
        clean, load = ledger.clean, ledger.load_session
        dropping = engine.state.dropping

        def counted() -> Future[None]:
            nonlocal cleanings
            cleanings += 1
            return clean()

        def watched(name: str) -> Future[SessionRecord | None]:
            at_once.append(len(dropping))
            return load(name)

        monkeypatch.setattr(ledger, "clean", counted)
        monkeypatch.setattr(ledger, "load_session", watched)
        await asyncio.gather(*(engine.drop("", f"secret-{number}") for number in range(count)))
        assert cleanings <= count // 2
        assert max(at_once) <= OPERATIONS_MAX
        for number, tokens in enumerate(timelines):
            assert found(folder, f"secret-{number}", tokens) == set()
