"""A model whose queries see a window, and which has sinks: pages of its sessions at peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchengine.core import BatchEngineError
from batchengine.peers.link import PeerLink
from batchengine.policy.linked.layouts import Rejected
from bench.models.synthetic import PRESETS, write_synthetic
from tests.engine.linked.daemons import Daemon, daemon
from tests.engine.linked.test_daemons import holders, nothing_is_held
from tests.engine.remote.test_other_models import N_PAGES, pair
from tests.support.engines import Reference, Site, read, request, unread, until, words


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss in small: of four layers two have a window of 40 positions."""
    path = tmp_path_factory.mktemp("model") / "windowed.gguf"
    write_synthetic(path, replace(PRESETS["gpt-oss-tiny"], n_vocab=2000))
    return path


@pytest.fixture(scope="module")
def windowed_reference(windowed: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers of that model when it computes one timeline alone."""
    made = Reference(windowed, cache_dir)
    yield made
    made.close()


async def test_a_peer_attends_for_the_layers_that_see_its_pages(
    site: Site, windowed: Path, windowed_reference: Reference
) -> None:
    """The peer serves another model, so it knows of windows and sinks what a query says."""
    async with pair(site, windowed) as (a, b):
        prompt = words(5, 256 * 12)
        answer = await read(b.engine.submit(request(prompt, 5, session="s")))
        assert answer.tokens == windowed_reference.tokens(prompt, 5)
        session, keeper = b.state.sessions["", "s"], b.linked.keeper
        more = [*prompt, *answer.tokens, 7]
        generation = await unread(b.engine, request(more, 520, session="s"), 5)
        keeper.want(session, 8)
        await until(lambda: session.kv.n_held >= 8 and not keeper.moves)
        answer = await read(generation)
        assert answer.tokens == windowed_reference.tokens(more, 520)
        assert {peer for peer, _ in holders(b, "s")} == {"a"}
        assert b.linked.taken.n_pages >= 8
        longer = [*more, *answer.tokens, *words(6, 700)]
        answer = await read(b.engine.submit(request(longer, 40, session="s")))
        assert answer.tokens == windowed_reference.tokens(longer, 40)
        await b.engine.drop("", "s")
        await nothing_is_held(a, b)


def links_of(*daemons: Daemon) -> list[PeerLink]:
    """All links: turns and prompts of peers need their speed."""
    return [link for one in daemons for link in one.engine.running.peers.links.values()]


async def test_pages_whose_layers_differ_stay_where_they_are(
    site: Site, tmp_path: Path, cache_dir: Path
) -> None:
    """Those of Gemma 4, whose layers with a window have other heads. Its daemon keeps pages of the
    other model's sessions."""
    path = tmp_path / "gemma4.gguf"
    write_synthetic(path, replace(PRESETS["gemma4-tiny"], n_vocab=2000))
    alone = Reference(path, cache_dir)
    try:
        other = Site(path, site.folder, site.cache_dir)
        async with daemon(site, "a", N_PAGES) as a, daemon(other, "b", N_PAGES) as b:
            a.knows(b)
            b.knows(a)
            await until(lambda: a.beyond() >= 8)
            await until(lambda: all(one.bandwidth is not None for one in links_of(a, b)))
            prompt, keeper = words(5, 256 * 9), b.linked.keeper
            link = b.engine.running.peers.links["a"]
            generation = await unread(b.engine, request(prompt, 520, session="s"), 5)
            keeper.want(b.state.sessions["", "s"], 4)
            answer = await read(generation)
            assert answer.tokens == alone.tokens(prompt, 520)
            keeper.look()
            assert not keeper.is_usable(link)
            assert (keeper.bytes_free("a"), b.state.lanes[0].seats.pages_beyond_max) == (0, 0)
            assert b.state.sessions["", "s"].kv.n_held == 0
            assert not keeper.moves
            ids = words(6, 256 * 9)
            generation = await unread(a.engine, request(ids, 520, session="t"), 5)
            a.linked.keeper.want(a.state.sessions["", "t"], 4)
            await until(lambda: a.state.sessions["", "t"].kv.n_held >= 4)
            generation.cancel()
            await a.engine.drop("", "t")
            await nothing_is_held(a, b)
    finally:
        alone.close()


async def test_a_context_that_peers_cannot_keep_is_refused_with_the_reason(
    site: Site, tmp_path: Path
) -> None:
    """The layers of Step 3.5 with a window have other numbers of query heads."""
    path = tmp_path / "step35.gguf"
    write_synthetic(path, replace(PRESETS["step35-tiny"], n_vocab=2000, context=1 << 15))
    other = Site(path, site.folder, site.cache_dir)
    async with daemon(site, "a", N_PAGES) as a, daemon(other, "b", 6) as b:
        a.knows(b)
        b.knows(a)
        await until(lambda: all(one.bandwidth is not None for one in links_of(a, b)))
        seats = b.state.lanes[0].seats
        await until(lambda: seats.why_none_beyond == Rejected.OWN_HEADS)
        fits = 256 * seats.pages_budget
        assert (b.engine.info.context_tokens, a.engine.info.context_tokens > fits) == (fits, True)
        assert b.engine.info.notes[-1].endswith(f" no longer session, and {Rejected.OWN_HEADS}")
        with pytest.raises(BatchEngineError) as caught:
            b.engine.submit(request(words(5, fits), 1, session="s"))
        assert caught.value.code == "BE1203"
        assert caught.value.fix.endswith("and linked daemons keep no pages of this model")
        generation = b.engine.submit(request(words(5, 300), 5, session="s"))
        assert (await read(generation)).error is None
        shown = b.engine.explain(generation.request_id)
        rings = [one["rejected"] for one in shown["outlooks"] if one["decode"] == "ring"]
        assert rings == [Rejected.OWN_HEADS]
