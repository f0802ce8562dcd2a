"""How much linked daemons say that they hold together, and that it is there when it is needed."""

from __future__ import annotations

import pytest

from batchengine.core import BatchEngineError
from tests.engine.linked.daemons import PAGE_BYTES, daemons
from tests.engine.linked.test_daemons import expected, holders
from tests.support.engines import Reference, Site, read, request, until, words

N_PAGES = 26  # of each store, of which half is kept for peers, in whole super-pages: 12


async def test_the_context_is_what_peers_keep_and_can_be_used(
    site: Site, reference: Reference
) -> None:
    """A request that takes all of it is answered; one token more is refused for good."""
    async with daemons(site, "ab", N_PAGES) as (a, _):
        limit = 256 * (N_PAGES + 12)
        await until(lambda: a.engine.info.context_tokens == limit)
        ids = words(1, limit - 10)
        answer = await read(a.engine.submit(request(ids, 10, session="s")))
        assert answer.error is None
        assert answer.tokens == await expected(reference, ids, 10)
        with pytest.raises(BatchEngineError, match=f"BE1203 .* is {limit} tokens"):
            a.engine.submit(request(ids, 11))


async def test_a_peer_that_keeps_little_adds_little(site: Site) -> None:
    async with daemons(site, "ab", 10, peers__hold_bytes=7 * PAGE_BYTES) as (a, _):
        await until(lambda: a.engine.info.context_tokens == 256 * (10 + 4))


async def test_idle_sessions_of_a_peer_give_way_to_a_turn_that_needs_peers(
    site: Site, reference: Reference
) -> None:
    """The turn needs all of its store and room with that peer, which has room by what it says."""
    async with daemons(site, "ab", N_PAGES) as (a, b):
        idle = await read(b.engine.submit(request(words(1, 256 * 35), 40, session="idle")))
        assert idle.error is None
        await until(lambda: not b.linked.keeper.moves)
        assert a.linked.given.n_pages >= 8, "the scene"
        ids = words(20, 256 * 35)
        answer = await read(a.engine.submit(request(ids, 40, session="s")))
        assert answer.error is None
        assert answer.tokens == await expected(reference, ids, 40)
        assert {peer for peer, _ in holders(a, "s")} == {"b"}
