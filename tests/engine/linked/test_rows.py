"""What operators see of pages with peers, and a holder that leaves while they are used."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from tests.engine.linked.daemons import PAGE_BYTES, Daemon, daemons, slow_down
from tests.support.engines import Reference, Site, read, request, suspend, unread, until, words


def row(one: Daemon) -> dict[str, Any]:
    """The row of the session that computes."""
    return one.engine.requests()[0]


async def test_a_holder_leaves_and_all_rows_say_what_lies_where(
    site: Site, reference: Reference
) -> None:
    """The holder gives its pages back while a session attends to them, and no token changes; of
    another holder that stops answering, the row says who waits for it."""
    async with daemons(site, "abc", 12, peers__hold_bytes=8 * PAGE_BYTES) as (a, b, c):
        ids = words(7, 256 * 14)
        generation = await unread(a.engine, request(ids, 520, session="s"), 3)
        await until(lambda: bool(a.linked.taken.n_pages) and not a.linked.keeper.moves)
        holders = {one["peer"] for one in row(a)["route"]} - {""}
        first = b if "b" in holders else c
        other = c if first is b else b
        held = a.linked.taken.pages_with(first.name)
        assert held > 0
        detail = await a.engine.session_detail("", "s")
        explained = a.engine.explain("s")
        for found in (row(a), a.engine.sessions()[0], detail, explained):
            assert {"peer": first.name, "pages": held} in found["route"]
        assert sum(one["pages"] for one in row(a)["route"]) >= 14
        peers = {found["name"]: found for found in (await a.engine.peers())["peers"]}
        assert peers[first.name]["pages_taken"] == held
        assert peers[first.name]["data"] == "up"
        assert a.engine.stats()["pages_taken"] == a.linked.taken.n_pages
        assert first.engine.stats()["pages_given"] == held
        given = first.engine.remains()["given"]
        assert [(one["peer"], one["pages"], one["state"]) for one in given] == [("a", held, "up")]

        first.engine.leave()
        assert not first.engine.remains()["over"]
        await until(lambda: first.engine.remains()["over"])
        assert row(a)["request_id"] == generation.request_id, "it computes all the time"
        assert {one["peer"] for one in row(a)["route"]} == {"", other.name}

        worker = other.state.lanes[0].lane.pid
        suspend(worker)
        reading = asyncio.ensure_future(read(generation))
        await until(lambda: "waits_for" in row(a))
        assert row(a)["waits_for"] == {other.name: "it does not answer in time"}
        os.kill(worker, signal.SIGCONT)
        answer = await reading
        assert answer.tokens == reference.tokens(ids, 520)
        metric = f'batchengine_peer_pages_taken{{peer="{other.name}"}}'
        pages = f"{metric} {a.linked.taken.pages_with(other.name):.1f}"
        await until(lambda: pages in a.engine.metrics.render()[0].decode())


async def test_a_holder_that_stops_gives_back_the_pages_of_a_session_at_rest(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions push pages out; when one is gone, there is room for those of the other."""
    slow_down(monkeypatch)
    async with daemons(site, "ab", 14, peers__hold_bytes=12 * PAGE_BYTES) as (a, b):
        prompts = {"s": words(8, 256 * 8), "t": words(9, 256 * 8)}
        made = [
            await unread(a.engine, request(ids, 520, session=name), 1)
            for name, ids in prompts.items()
        ]
        # With fewer there, the store has no room for the others, and evicts some.
        await until(lambda: a.linked.taken.n_pages >= 8 and not a.linked.keeper.moves)
        for generation in made:
            generation.cancel()
        answers = [await read(generation) for generation in made]
        rests = [name for name in prompts if a.state.sessions["", name].kv.held]
        await a.engine.drop("", "t" if rests[0] == "s" else "s")
        await b.engine.stop(20.0)
        assert "route" not in a.engine.sessions()[0]
        ids, before = prompts[rests[0]], answers[list(prompts).index(rests[0])].tokens
        more = [*ids, *before, *words(10, 5)]
        again = await read(a.engine.submit(request(more, 8, session=rests[0])))
        assert again.tokens == reference.tokens(more, 8)
        assert again.done is not None
        assert again.done.usage.cached_tokens >= len(ids), "nothing was computed again"
