"""Sessions whose KV lies with several daemons: tokens are those of one, whatever a holder does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Sequence

import pytest

from batchengine.core import BatchEngineError, ContextBound
from batchengine.engine.linked import pages
from batchengine.peers import certificates
from batchengine.peers.folder import FolderContent, PeersFolder
from kv_store.errors import StoreError, StoreFull
from tests.engine.linked.daemons import PAGE_BYTES, Daemon, daemon, daemons, slow_down
from tests.support.engines import Reference, Site, read, request, started, unread, until, words

OPEN_PAGES = 8  # of one session beside those of the store: a longer one needs peers, however fast


def holders(one: Daemon, name: str) -> list[tuple[str, int]]:
    """(peer, pages) of a session's segments."""
    session = one.state.sessions["", name]
    return [(segment.peer, segment.n_pages) for segment in session.kv.held]


async def nothing_is_held(*made: Daemon) -> None:
    """Wait until no daemon has a page of a session that is gone."""
    await until(
        lambda: not any(one.linked.given.n_pages or one.linked.taken.n_pages for one in made)
    )
    for one in made:
        one.linked.given.check()
        assert not one.linked.keeper.moves


async def expected(reference: Reference, prompt: Sequence[int], n: int) -> list[int]:
    """The tokens of a reference. The daemons go on meanwhile: links that stop are given up."""
    return await asyncio.to_thread(reference.tokens, prompt, n)


async def test_a_context_larger_than_one_budget(site: Site, reference: Reference) -> None:
    """A prompt that no store could hold alone is computed and answered by two daemons, beside
    shorter ones on both; when the session is dropped, nothing is left with the peer."""
    async with daemons(site, "ab", 14, peers__hold_bytes=12 * PAGE_BYTES) as (a, b):
        ids, other = words(1, 256 * (a.pages() + OPEN_PAGES) + 300), words(2, 500)
        answers = await asyncio.gather(
            read(a.engine.submit(request(ids, 40, session="s"))),
            read(a.engine.submit(request(other, 40))),
            read(b.engine.submit(request(other, 40))),
        )
        for answer, prompt in zip(answers, (ids, other, other), strict=True):
            assert answer.error is None
            assert answer.tokens == await expected(reference, prompt, 40)
        assert {peer for peer, _ in holders(a, "s")} == {"b"}  # in one hold or more
        await until(lambda: not a.linked.keeper.moves)
        await until(lambda: a.linked.taken.n_pages == b.linked.given.n_pages)
        assert a.linked.taken.n_pages >= 8
        last = words(7, len(ids))  # needs the room with the peer, which the session at rest has
        answer = await read(a.engine.submit(request(last, 10, session="t")))
        assert answer.error is None
        assert answer.tokens == await expected(reference, last, 10)
        await a.engine.drop("", "t")
        more = [*ids, *answers[0].tokens, *words(3, 300)]
        answer = await read(a.engine.submit(request(more, 20, session="s")))
        assert answer.tokens == await expected(reference, more, 20)
        await a.engine.drop("", "s")
        await nothing_is_held(a, b)
        assert not b.engine.running.store.pages.match_prefix(more, b""), "the peer has erased it"


async def test_a_context_is_what_the_store_holds_until_there_are_peers(site: Site) -> None:
    """A request that no daemon has room for is refused before it begins, whether there is no peer,
    one, or none any more; while one is away, it may be sent again."""
    async with daemon(site, "a", 10) as a:
        info, long = a.engine.info, request(words(1, 256 * 12), 10, session="s")
        alone = 256 * a.pages()
        assert (info.context_tokens, info.context_bound) == (alone, ContextBound.STORE)
        with pytest.raises(BatchEngineError, match=f"BE1203 .* is {alone} tokens"):
            a.engine.submit(long)
        async with daemon(site, "b", 10) as b:
            a.knows(b)
            b.knows(a)
            await until(lambda: a.beyond() >= 4)
            both = 256 * (a.pages() + 4)  # b keeps half of its store, in whole super-pages
            assert (info.context_tokens, info.context_bound) == (both, ContextBound.PEERS)
            assert (await read(a.engine.submit(long))).error is None
            await a.engine.drop("", "s")
        await until(lambda: info.context_tokens == info.context_trained)
        answer = await read(a.engine.submit(long))
        assert answer.error is not None
        assert answer.error.name == "kv_full"
        (a.site.folder / "peers.d" / "b.toml").unlink()
        await until(lambda: info.context_tokens == alone)


async def test_a_peer_that_is_away_is_known_from_the_start(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that needs it may be sent again, however soon it comes after the start."""
    changed = PeersFolder.changed

    def look_slowly(folder: PeersFolder) -> FolderContent | None:
        time.sleep(0.5)
        return changed(folder)

    monkeypatch.setattr(PeersFolder, "changed", look_slowly)
    (site.folder / "a").mkdir()
    certificates.write_peer(site.folder / "a", "b", "127.0.0.1:1")
    async with daemon(site, "a", 16) as a:
        answer = await read(a.engine.submit(request(words(1, 256 * 20), 10, session="s")))
        assert answer.error is not None
        assert answer.error.name == "kv_full"
        assert answer.error.what.endswith("now")


async def test_holders_that_end_cost_no_token(site: Site, reference: Reference) -> None:
    """Three daemons: a holder's worker is killed, then another holder stops for good."""
    async with daemons(site, "abc", 16, peers__hold_bytes=12 * PAGE_BYTES) as (a, b, c):
        ids = words(4, 256 * 25 - 20)  # one of them has no room for what this one has not
        generation = await unread(a.engine, request(ids, 520, session="s"), 0)
        await until(lambda: {peer for peer, _ in holders(a, "s")} == {"b", "c"})
        with pytest.raises(BatchEngineError, match=r"peers keep \d+ of its pages: b, c"):
            await a.engine.promote("", "s", "b")
        os.kill(b.state.lanes[0].lane.pid, signal.SIGKILL)
        before = generation.completion_tokens
        reader = asyncio.ensure_future(read(generation))
        await until(lambda: generation.completion_tokens > before + 5 or reader.done())
        await c.engine.stop(0.0)
        answer = await reader
        assert answer.error is None
        assert answer.tokens == reference.tokens(ids, 520)
        assert "c" not in {peer for peer, _ in holders(a, "s")}
        await a.engine.drop("", "s")
        await nothing_is_held(a, b)


async def test_a_holder_that_leaves_gives_its_pages_to_another(
    site: Site, reference: Reference
) -> None:
    """Without a pause in the stream, and without computing anything again."""
    async with daemons(site, "abc", 12, peers__hold_bytes=8 * PAGE_BYTES) as (a, b, c):
        ids = words(30, 256 * 14)
        generation = await unread(a.engine, request(ids, 520, session="s"), 0)
        await until(lambda: a.linked.taken.n_pages >= 4 and not a.linked.keeper.moves)
        first, second = (b, c) if holders(a, "s")[0][0] == "b" else (c, b)
        before = a.engine.stats()["tokens_recomputed"]
        first.engine.leave()
        await until(lambda: not first.linked.given.n_pages)
        assert not generation.finished, "it moved while the session computed"
        answer = await read(generation)
        assert answer.tokens == reference.tokens(ids, 520)
        assert {peer for peer, _ in holders(a, "s")} == {second.name}
        assert a.engine.stats()["tokens_recomputed"] == before
        first.engine.leave(undo=True)
        second.engine.leave()  # and now the session is at rest
        await until(lambda: not second.linked.given.n_pages)
        more = [*ids, *answer.tokens, 77]
        answer = await read(a.engine.submit(request(more, 5, session="s")))
        assert answer.tokens == reference.tokens(more, 5)


async def test_a_holder_has_room_for_its_own_turns(site: Site, reference: Reference) -> None:
    """A turn that fits its store is not refused for pages that it keeps for a peer's session, which
    computes them again. So it does when one of them becomes invalid with the holder."""
    async with (
        daemon(site, "a", 14, peers__hold_bytes=PAGE_BYTES) as a,
        daemon(site, "b", 14, peers__hold_bytes=12 * PAGE_BYTES) as b,
    ):
        a.knows(b)
        b.knows(a)
        await until(lambda: a.is_linked(b) and a.beyond() >= 10)
        ids = words(40, 256 * (a.pages() + OPEN_PAGES) + 300)
        own = words(41, 256 * (b.pages() - 1))
        answer = await read(a.engine.submit(request(ids, 10, session="s")))
        assert answer.tokens == reference.tokens(ids, 10)
        await until(lambda: not a.linked.keeper.moves)
        assert b.linked.given.n_pages >= 4
        answer = await read(b.engine.submit(request(own, 10)))
        assert answer.error is None
        assert answer.tokens == reference.tokens(own, 10)
        with pytest.raises(BatchEngineError, match="BE1203") as caught:
            b.engine.submit(request(words(42, 256 * 60), 10))
        assert caught.value.fix.endswith(ContextBound.STORE), "a keeps no whole super-page for b"
        seats = a.state.lanes[0].seats
        await until(lambda: not a.linked.taken.n_pages and seats.pages_beyond_free >= 10)
        more = [*ids, 77]
        answer = await read(a.engine.submit(request(more, 10, session="s")))
        assert answer.error is None
        assert answer.tokens == reference.tokens(more, 10)
        hold = next(iter(b.linked.given))
        wrong = b.linked.given.pages(hold)[0]
        b.engine.running.store.pages.invalidate(wrong, slot_failed=True)
        await until(lambda: hold not in b.linked.given)
        answer = await read(a.engine.submit(request(more, 10, session="s")))
        assert answer.tokens == reference.tokens(more, 10)


def fill_disk(patch: pytest.MonkeyPatch, one: Daemon) -> None:
    """No page is added to a store any more."""

    def refuse(info: object) -> None:
        raise StoreFull("the disk is full")

    patch.setattr(one.engine.running.store.pages.allocator.core.extents, "create", refuse)


async def test_a_holder_with_a_full_disk_has_room_for_its_own_turns(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It promises peers no page that its disk has no room for, and a turn of its own that fits what
    there is is not refused for pages of peers, which are computed again."""
    async with (
        daemon(site, "a", 14, peers__hold_bytes=PAGE_BYTES) as a,
        daemon(site, "b", 40, peers__hold_bytes=24 * PAGE_BYTES) as b,
    ):
        a.knows(b)
        b.knows(a)
        await until(lambda: a.is_linked(b) and a.beyond() >= 20)
        allocator = b.engine.running.store.pages.allocator
        ids = words(50, 256 * (a.pages() + OPEN_PAGES) + 300)
        answer = await read(a.engine.submit(request(ids, 10, session="s")))
        assert answer.tokens == reference.tokens(ids, 10)
        fill_disk(monkeypatch, b)
        answer = await read(b.engine.submit(request(words(51, 256 * 6), 10)))
        assert answer.tokens == reference.tokens(words(51, 256 * 6), 10)
        await until(lambda: not a.linked.keeper.moves and allocator.slots_now < allocator.slots_max)
        assert b.linked.given.n_pages >= 8
        room = allocator.slots_now - b.linked.given.n_pages
        await until(
            lambda: a.engine.running.peers.links["b"].load.hold_bytes_free <= room * PAGE_BYTES
        )
        own = words(52, 256 * (allocator.slots_now - 3))
        answer = await read(b.engine.submit(request(own, 10)))
        assert answer.error is None
        assert answer.tokens == reference.tokens(own, 10)


async def test_an_owner_with_a_full_disk_gives_pages_to_peers(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that the budget has room for, and the disk has not, is kept by both."""
    async with daemons(site, "ab", 32) as (a, _):
        fill_disk(monkeypatch, a)  # it has an eighth of its pages
        ids = words(60, 256 * 18 + 100)
        answer = await read(a.engine.submit(request(ids, 10, session="s")))
        assert answer.error is None
        assert answer.tokens == reference.tokens(ids, 10)
        assert {peer for peer, _ in holders(a, "s")} == {"b"}


async def test_a_peer_that_has_not_erased_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that cannot write says so at once; one that is away is named, too."""

    def fail(*given: object) -> object:
        raise StoreError("its disk cannot be written")

    async with daemons(site, "ab", 16) as (a, b):
        for name in ("s", "t"):
            await read(a.engine.submit(request(words(70, 300), 5, session=name)))
        monkeypatch.setattr(b.engine.running.store.pages, "erase", fail)
        async with asyncio.timeout(pages.ERASE_S / 2):
            await a.engine.drop("", "s")
        assert "may be with peer b: its disk cannot be written" in caplog.text
        await b.engine.stop(0.0)
        await until(lambda: not a.engine.running.peers.links["b"].state.is_open)
        caplog.clear()
        await a.engine.drop("", "t")
        assert "may be with peer b" in caplog.text


async def test_sessions_that_end_or_change_while_their_pages_move(
    site: Site, reference: Reference
) -> None:
    """Several sessions at once on two daemons that hold for each other; some are cancelled,
    dropped or cut in the middle of moves, one would be promoted."""
    async with daemons(site, "ab", 14) as (a, b):
        prompts = [words(10 + n, 256 * 6 + 31 * n) for n in range(4)]
        running = [
            await started(one.engine, request(prompt, 120, session=f"s{n}"), 0)
            for n, (one, prompt) in enumerate(zip((a, a, a, b), prompts, strict=True))
        ]
        ends = [reader for _, reader in running]
        await until(lambda: a.linked.taken.n_pages > 0 or all(end.done() for end in ends))
        running[0][0].cancel()
        await a.engine.drop("", "s1")
        for n in (2, 3):
            answer = await running[n][1]
            assert answer.error is None
            assert answer.tokens == reference.tokens(prompts[n], 120)
        cut = [*prompts[2][:1000], *words(20, 1300)]
        answer = await read(a.engine.submit(request(cut, 30, session="s2")))
        assert answer.tokens == reference.tokens(cut, 30)
        fork = await a.engine.fork("", "s2", "f")
        more = [*cut, *answer.tokens, 77]
        assert fork["tokens"] == len(more) - 1
        both = await asyncio.gather(
            *[read(a.engine.submit(request(more, 30, session=name))) for name in ("s2", "f")]
        )
        assert [answer.tokens for answer in both] == [reference.tokens(more, 30)] * 2
        for one, name in ((a, "s0"), (a, "s2"), (a, "f"), (b, "s3")):
            await one.engine.drop("", name)
        await nothing_is_held(a, b)
        assert not a.engine.running.store.stat()["pages_pinned"]


async def test_an_owner_that_restarts(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder releases what it had, and its next run computes that again. A session with pages
    at peers cannot be promoted to another lane."""
    slow_down(monkeypatch)
    async with daemon(site, "b", 24) as b:
        ids = words(40, 256 * 18)  # more than its share of the pages: b has some before it ends
        for is_restarted in (False, True):
            async with daemon(site, "a", 16, n_lanes=2) as a:
                a.knows(b)
                b.knows(a)
                await until(lambda: a.beyond() >= 12)
                answer = await read(a.engine.submit(request(ids, 300, session="s")))
                assert answer.error is None
                assert answer.tokens == reference.tokens(ids, 300)
                assert holders(a, "s")[0][0] == "b"
                with pytest.raises(BatchEngineError, match="peers hold"):
                    await a.engine.promote("", "s", to="a1")
                ids = [*ids, *answer.tokens, 77]
                if is_restarted:
                    await a.engine.drop("", "s")
                    assert not b.linked.given.n_pages
            await until(lambda: not b.linked.given.n_pages)
            assert not b.engine.running.store.stat()["pages_pinned"]
