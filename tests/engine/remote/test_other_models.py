"""Pages that lie with daemons of other models: attention computed there gives the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from batchengine.core import BatchEngineError
from batchengine.engine.linked.holds import (
    MODELS_MAX,
    HoldName,
    HoldRefused,
    HoldsGiven,
    PageFormats,
)
from batchengine.peers.link import PeerLink
from batchengine.policy.linked import layouts
from batchengine.wire.lane import HeadShape
from batchengine.wire.peer import KvFormat
from bench.models.synthetic import Shape, write_synthetic
from kv_store.arenas.arena import POISON
from kv_store.keys import ROOT_KEY
from kv_store.layout import Descriptor, KvHeads, PageLayout
from kv_store.osio import Files
from kv_store.pages.allocator import NoRoom
from kv_store.store import Store
from tests.engine.linked.daemons import PAGE_BYTES, Daemon, daemon
from tests.engine.linked.test_daemons import OPEN_PAGES, holders, nothing_is_held
from tests.support.engines import Reference, Site, read, request, unread, until, words
from tests.support.kv_workload import SALT, descriptor, settings, tokens_of

SHAPE = Shape(n_layer=2, n_embd=128, n_ff=256, n_head=6, n_kv_head=2, head_dim=64, n_vocab=2000)
N_PAGES = 16  # of the pocket model, in each store
LENT_PAGES = 24  # in a store that keeps most of a session


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with other layers, heads and dimensions than the pocket model."""
    path = tmp_path_factory.mktemp("model") / "other.gguf"
    write_synthetic(path, replace(SHAPE, context=1 << 15))
    return path


@pytest.fixture(scope="module")
def other_reference(other_model: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers of that model when it computes one timeline alone."""
    made = Reference(other_model, cache_dir)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def pair(
    site: Site,
    other_model: Path,
    *,
    n_pages: int = N_PAGES,
    n_other: int = N_PAGES,
    **overrides: object,
) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Daemon a with the pocket model, and b with another one; each knows the other."""
    other = Site(other_model, site.folder, site.cache_dir)
    overrides = {"peers__hold_bytes": 12 * PAGE_BYTES} | overrides
    async with (
        daemon(site, "a", n_pages, **overrides) as a,
        daemon(other, "b", n_other, **overrides) as b,
    ):
        a.knows(b)
        b.knows(a)
        await until(lambda: a.is_linked(b) and b.is_linked(a))
        await until(lambda: a.beyond() >= 8 and b.beyond() >= 8)
        yield a, b


async def test_a_context_larger_than_a_store_lies_with_a_daemon_of_another_model(
    site: Site, reference: Reference, other_model: Path, other_reference: Reference
) -> None:
    """Both daemons answer meanwhile. Once its session is dropped, nothing of it is left there."""
    async with pair(site, other_model, n_pages=12, n_other=LENT_PAGES) as (a, b):
        ids, own = words(1, 256 * (a.pages() + OPEN_PAGES) + 300), words(2, 900)
        answers = await asyncio.gather(
            read(a.engine.submit(request(ids, 40, session="s"))),
            read(b.engine.submit(request(own, 40))),
        )
        for answer, prompt, right in zip(
            answers, (ids, own), (reference, other_reference), strict=True
        ):
            assert answer.error is None
            assert answer.tokens == right.tokens(prompt, 40)
        assert {peer for peer, _ in holders(a, "s")} == {"b"}
        await until(lambda: a.linked.taken.n_pages == b.linked.given.n_pages >= 8)
        b.linked.given.check()
        row = a.engine.running.peers.links["b"].row()
        assert row["differs"] == ["model", "repr_id"]
        assert not row["why"]
        more = [*ids, *answers[0].tokens, *words(3, 300)]
        answer = await read(a.engine.submit(request(more, 20, session="s")))
        assert answer.tokens == reference.tokens(more, 20)
        await a.engine.drop("", "s")
        await nothing_is_held(a, b)
        others = b.linked.formats
        await until(lambda: others.other_bytes == 0)
        await until(lambda: not b.state.lanes[0].seats.pages_lent)  # the room is b's own again


async def test_both_keep_pages_for_each_other(
    site: Site, reference: Reference, other_model: Path, other_reference: Reference
) -> None:
    """A session of each has pages with the other, whose page is of another size."""
    async with pair(site, other_model) as (a, b):
        assert a.page_bytes() != b.page_bytes()
        scenes = (a, b, reference, words(4, 256 * 8)), (b, a, other_reference, words(5, 256 * 8))
        for one, other, right, prompt in scenes:
            answer = await read(one.engine.submit(request(prompt, 5, session="s")))
            assert answer.tokens == right.tokens(prompt, 5)
            session, keeper = one.state.sessions["", "s"], one.linked.keeper
            more = [*prompt, *answer.tokens, 7]
            generation = await unread(one.engine, request(more, 520, session="s"), 5)
            keeper.want(session, 4)
            await until(lambda: session.kv.n_held >= 4 and not keeper.moves)  # noqa: B023
            answer = await read(generation)
            assert answer.tokens == right.tokens(more, 520)
            assert {peer for peer, _ in holders(one, "s")} == {other.name}
        for one in (a, b):
            one.linked.given.check()
            assert one.linked.given.n_pages
            assert one.linked.taken.n_pages
        for one in (a, b):
            await one.engine.drop("", "s")
        await nothing_is_held(a, b)


async def test_a_holder_of_another_model_that_ends_costs_no_token(
    site: Site, reference: Reference, other_model: Path
) -> None:
    """Its worker is killed in the middle of an answer, then the daemon stops."""
    async with pair(site, other_model) as (a, b):
        ids = words(7, 256 * 12)
        generation = await unread(a.engine, request(ids, 520, session="s"), 0)
        a.linked.keeper.want(a.state.sessions["", "s"], 8)
        await until(lambda: {peer for peer, _ in holders(a, "s")} == {"b"})
        os.kill(b.state.lanes[0].lane.pid, signal.SIGKILL)
        before = generation.completion_tokens
        reader = asyncio.ensure_future(read(generation))
        await until(lambda: generation.completion_tokens > before + 5 or reader.done())
        await b.engine.stop(0.0)
        answer = await reader
        assert answer.error is None
        assert answer.tokens == reference.tokens(ids, 520)


async def test_a_holder_has_room_for_turns_of_its_own_model(
    site: Site, reference: Reference, other_model: Path, other_reference: Reference
) -> None:
    """A turn that fits its store is not refused for pages of another model."""
    held = N_PAGES * PAGE_BYTES
    async with pair(site, other_model, n_pages=10, peers__hold_bytes=held) as (a, b):
        ids = words(8, 256 * (a.pages() + 7))
        answer = await read(a.engine.submit(request(ids, 10, session="s")))
        assert answer.tokens == reference.tokens(ids, 10)
        await until(lambda: b.linked.given.n_pages >= 4 and not a.linked.keeper.moves)
        own = words(9, 256 * (b.state.lanes[0].seats.pages_budget - 1))
        answer = await read(b.engine.submit(request(own, 10)))
        assert answer.error is None
        assert answer.tokens == other_reference.tokens(own, 10)
        seats = a.state.lanes[0].seats
        await until(lambda: not a.linked.taken.n_pages and seats.pages_beyond_free >= 8)
        more = [*ids, 77]
        answer = await read(a.engine.submit(request(more, 10, session="s")))
        assert answer.error is None
        assert answer.tokens == reference.tokens(more, 10)


async def test_turns_stay_with_daemons_of_their_model(site: Site, other_model: Path) -> None:
    async with pair(site, other_model) as (a, b):
        generation = await unread(a.engine, request(words(3, 40), 2000, session="s"), 5)
        with pytest.raises(BatchEngineError, match="b serves another model, and only keeps pages"):
            await a.engine.promote("", "s", "b")
        generation.cancel()
        assert not b.linked.given.n_pages


async def test_what_is_kept_here_is_found_after_a_restart_by_a_drop(
    site: Site, other_model: Path
) -> None:
    """The pages of a session are overwritten, though no pool of their model is open there."""
    other = Site(other_model, site.folder, site.cache_dir)
    async with pair(site, other_model, n_pages=12, n_other=LENT_PAGES) as (a, b):
        ids = words(1, 256 * (a.pages() + OPEN_PAGES) + 300)
        await read(a.engine.submit(request(ids, 4, session="s")))
        await until(lambda: a.linked.taken.n_pages == b.linked.given.n_pages >= 8)
        await b.engine.stop(0.0)
        async with daemon(other, "b", LENT_PAGES) as again:
            a.knows(again)
            again.knows(a)
            await until(lambda: a.is_linked(again) and again.is_linked(a))
            core = again.engine.running.store.core
            files = [Path(info.path) for info in core.foreign]
            assert any(any(file.read_bytes()) for file in files)
            await a.engine.drop("", "s")
            left = [set(file.read_bytes()) for file in files if file.exists()]
            assert all(bytes_left <= {0, POISON} for bytes_left in left)


async def test_sessions_at_rest_keep_their_pages(
    site: Site, reference: Reference, other_model: Path, other_reference: Reference
) -> None:
    """A daemon of another model gets the room that they leave, and no more."""
    async with pair(site, other_model, peers__hold_bytes=N_PAGES * PAGE_BYTES) as (a, b):
        rested = [words(20 + i, 256 * 4 + 10) for i in range(4)]
        for i, prompt in enumerate(rested):
            answer = await read(b.engine.submit(request(prompt, 5, session=f"r{i}")))
            assert answer.error is None
        seats = a.state.lanes[0].seats
        await until(lambda: seats.pages_beyond_free < N_PAGES // 2)
        ids = words(8, 256 * (a.pages() - 1))
        answer = await read(a.engine.submit(request(ids, 10, session="s")))
        assert answer.error is None
        assert answer.tokens == reference.tokens(ids, 10)
        await until(lambda: not a.linked.keeper.moves)
        assert [len(b.state.sessions["", f"r{i}"].kv.sealed) for i in range(4)] == [4] * 4
        more = [*rested[0], *answer.tokens[:1], 7]
        again = await read(b.engine.submit(request(more, 5, session="r0")))
        assert again.tokens == other_reference.tokens(more, 5)


async def test_the_link_to_a_daemon_of_another_model_is_measured(
    site: Site, other_model: Path
) -> None:
    """So the router may choose a ring over it."""
    async with pair(site, other_model) as (a, b):
        plans = a.engine.running.plans
        link = a.engine.running.peers.links["b"]
        await until(lambda: link.bandwidth is not None)
        assert not layouts.not_usable(plans._peer(link))
        assert not a.engine.running.pipelines.can_use("b")
        assert b.linked.given.bytes_free > 0


MIXED = PageLayout((KvHeads(1, 32), KvHeads(2, 32)))
SAID = Descriptor("aa" * 32, "bb" * 32, "llama", PageLayout.uniform(3, 3, 32))


def link_of(descriptor: Descriptor | str, n_head: int = 3, **ids: str) -> PeerLink:
    """A link whose Hello has said this."""
    made = SAID if isinstance(descriptor, str) else descriptor
    text = descriptor if isinstance(descriptor, str) else descriptor.to_json()
    known = {
        "model_hash": made.model_hash, "arith_id": made.arith_id, "repr_id": made.repr_id.hex(),
        "model_id": "m", "kv": KvFormat(text, n_head),
    }  # fmt: skip
    facts = SimpleNamespace(**(known | ids))
    return cast(PeerLink, SimpleNamespace(name="p", is_of_other_model=True, facts=facts))


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (link_of("{}"), "cannot be used"),
        (link_of("[" * 8000), "cannot be used"),
        (link_of(SAID, model_hash="cc" * 32), "not that of its ids"),
        (link_of(SAID, repr_id="no hex"), "not that of its ids"),
        (link_of(SAID, n_head=4), "not computed here"),
        (link_of(replace(SAID, layout=PageLayout.uniform(1, 256, 32)), 256), "not computed here"),
        (link_of(replace(SAID, layout=PageLayout.uniform(5000, 1, 32)), 1), "cannot be used"),
        (link_of(replace(SAID, layout=PageLayout.uniform(1, 1, 608)), 1), "not computed here"),
        (link_of(replace(SAID, layout=PageLayout.uniform(1, 1, 256)), 1000), "not computed here"),
        (link_of(replace(SAID, layout=MIXED), 6), "not computed here"),
        (link_of(SAID.to_json().replace('"n_layer":"3"', f'"n_layer":"{1 << 40}"')), "no '10995"),
    ],
)
async def test_a_format_that_cannot_be_is_refused(tmp_path: Path, link: PeerLink, why: str) -> None:
    store = Store.open(tmp_path / "s", descriptor(), settings(pages=8))
    formats, holds = PageFormats(store), HoldsGiven(1 << 20)
    with pytest.raises(HoldRefused, match=why):
        await formats.of(link, holds)
    assert formats.known(link) is formats.own
    assert (await formats.of(link_of(SAID), holds)).shape == HeadShape(3, 3, 32, 3)
    with pytest.raises(HoldRefused, match="other heads"):
        await formats.of(link_of(SAID, 6), holds)
    for number in range(MODELS_MAX + 2):  # those without pages make room
        await formats.of(link_of(replace(SAID, arch=f"m{number}")), holds)
    assert len(formats.others) == MODELS_MAX
    store.close()


@pytest.mark.parametrize("rows", [32, 96])
async def test_a_load_says_how_many_pages_of_another_model_fit(tmp_path: Path, rows: int) -> None:
    """Whole extents of the store have room for fewer of them than their bytes say."""
    store = Store.open(tmp_path / "s", descriptor(), settings(pages=32, extent_pages=4))
    formats, link = (
        PageFormats(store),
        link_of(replace(SAID, layout=PageLayout.uniform(3, 3, rows))),
    )
    budget = store.core.budget
    for bound in (budget.budget_bytes // 2, budget.budget_bytes * 2):
        holds = HoldsGiven(min(bound, budget.budget_bytes))
        holds.peer_up("p", 7)
        made = await formats.of(link, holds)
        n_pages = formats.bytes_max(link, bound) // made.page_bytes
        assert holds.reserve(HoldName("p", 7, 1), n_pages, made) == 0
        assert n_pages > 0
        with pytest.raises(HoldRefused, match="there is room for"):
            holds.reserve(HoldName("p", 7, 1), 1, made)
    assert formats.bytes_max(link_of("{}"), budget.budget_bytes) == 0
    assert formats.bytes_max(None, 1000) == 1000
    store.close()


async def test_an_extent_that_comes_late_is_not_taken_back(tmp_path: Path) -> None:
    """The disk is slow, and the pages for which it is made are on their way."""

    class SlowFiles(Files):
        def fallocate(self, fd: int, offset: int, size: int) -> None:
            time.sleep(0.6)
            super().fallocate(fd, offset, size)

    store = Store.open(
        tmp_path / "s", descriptor(), settings(pages=32, extent_pages=4), files=SlowFiles()
    )
    formats, holds = PageFormats(store), HoldsGiven(1 << 30)
    holds.peer_up("p", 7)
    made = await formats.of(link_of(SAID), holds)
    holds.reserve(HoldName("p", 7, 1), 5, made)
    parent = ROOT_KEY
    for number in range(5):
        ids = tokens_of(number, 1)
        async with asyncio.timeout(30):
            while isinstance(ticket := made.pool.reserve(parent, ids, SALT), NoRoom):
                formats.return_room(time.monotonic(), holds)
                made.pool.allocator.try_again()
                await asyncio.sleep(0.01)
        parent = ticket.key
    assert "extents_reclaimed" not in store.counters
    store.close()
