"""Strategies over peers between engines: what the router decides happens, and is explained."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest
from msgspec.structs import replace

from batchengine.core import PAGE_TOKENS, BatchEngineError
from batchengine.engine.linked import holds_server, routes
from batchengine.engine.linked.holds_taken import TakenHold
from batchengine.engine.linked.page_move import PageMover
from batchengine.engine.remote import served
from batchengine.peers.transitions import LinkState
from batchengine.policy.cost import StepCost
from batchengine.policy.linked.routes import SlowPeers
from tests.engine.linked.daemons import PAGE_BYTES, Daemon, daemons, fix_speeds, slow_down
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    started,
    suspend,
    unread,
    until,
    words,
)

NO_PROMISE = StepCost(1.0, 1.0, 1000.0, 1e-3, 1e-6)  # a lane where each token is late
IN_TIME = StepCost(1.0, 0.01, 1.0, 1e-5, 1e-8)
SLOW_KV = StepCost(1.0, 0.1, 1.0, 0.01, 1e-6)  # attention to KV is most of a step


@pytest.fixture(autouse=True)
def same_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_speeds(monkeypatch)


async def measured(one: Daemon) -> None:
    """Wait until the bandwidth of every link of a daemon is known."""
    links = one.engine.running.peers.links.values()
    await until(lambda: all(link.bandwidth for link in links))


def explained(one: Daemon, given: str) -> dict[str, Any]:
    return one.engine.running.dispatcher.explain(given)


def outlook(found: dict[str, Any], decode: str) -> dict[str, Any]:
    return next(row for row in found["outlooks"] if row["decode"] == decode)


def held(one: Daemon, name: str) -> int:
    """Pages of a session with peers."""
    return one.state.sessions["", name].kv.n_held


async def test_a_context_larger_than_this_daemon_goes_on_a_ring(
    site: Site, reference: Reference
) -> None:
    async with daemons(site, "ab", 16) as (a, _):
        await measured(a)
        ids = words(1, PAGE_TOKENS * a.pages() + 600)
        asked = request(ids, 20, session="s")
        answer = await read(a.engine.submit(asked))
        assert answer.tokens == reference.tokens(ids, 20)
        found = explained(a, asked.request_id)
        assert found["reason_id"] == "ring_context"
        assert found["strategy"] == {"prefill": "local", "decode": "ring", "peers": ["b"]}
        assert found["candidates"][0]["excluded"] == "the context does not fit"
        ring = outlook(found, "ring")
        assert ring["tpot_ms"] > 0
        assert ring["tokens_here"] <= PAGE_TOKENS * a.pages()
        assert outlook(found, "remote")["rejected"] == "it is not available now"
        more = request([*ids, *answer.tokens, 7], 5, session="s")
        await read(a.engine.submit(more))
        found = explained(a, more.request_id)
        assert found["reason_id"] == "ring_context"
        assert found["session"]["reused_tokens"] == len(ids) + len(answer.tokens) - 1


async def test_a_deep_batch_puts_pages_with_peers_and_an_urgent_turn_brings_them_back(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemons(site, "ab", 64) as (a, _):
        await measured(a)
        a.state.lanes[0].cost.cost = SLOW_KV
        dispatcher = a.engine.running.dispatcher
        dispatcher._policy = replace(dispatcher._policy, ring_depth_min=0)
        ids = words(5, 12 * PAGE_TOKENS)
        asked = request(ids, 520, session="s", sla="batch")
        generation = await unread(a.engine, asked, 0)
        await until(lambda: held(a, "s") >= 4)
        found = explained(a, asked.request_id)
        assert found["reason_id"] == "ring_depth"
        assert found["strategy"]["decode"] == "ring"
        with monkeypatch.context() as patch:
            patch.setattr(a.state.lanes[0].meter, "take_waits", lambda: {"b": 5000.0})
            await until(lambda: "slow" in explained(a, "s"))
            assert explained(a, "s")["slow"]["b"].startswith("steps wait 5000 ms for it, ")
            state = dispatcher.state()
            assert [peer.state for peer in state.peers] == ["slow"]
            await until(lambda: not held(a, "s"))
        a.linked.keeper._slow = SlowPeers()
        await until(lambda: held(a, "s") >= 4)
        generation.cancel()
        answer = await read(generation)
        assert answer.tokens == reference.tokens(ids, len(answer.tokens))
        ids = [*ids, *answer.tokens, 7]
        asked = request(ids, 30, session="s", sla="interactive")
        answer = await read(a.engine.submit(asked))
        assert answer.tokens == reference.tokens(ids, 30)
        assert explained(a, asked.request_id)["reason_id"] == "from_ring"
        await until(lambda: not held(a, "s"))


async def test_a_running_turn_goes_on_growing_with_a_slow_peer_if_there_is_no_other(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with daemons(site, "ab", 16, peers__hold_bytes=12 * PAGE_BYTES) as (a, _):
        await measured(a)
        ids = words(11, 14 * PAGE_TOKENS)
        generation = await unread(a.engine, request(ids, 1400, session="s"), 3)
        with monkeypatch.context() as patch:
            patch.setattr(a.state.lanes[0].meter, "take_waits", lambda: {"b": 5000.0})
            await until(lambda: bool(a.linked.keeper.why_slow("b")))
        answer = await read(generation)
        assert answer.tokens == reference.tokens(ids, 1400)


@pytest.mark.alone
@pytest.mark.parametrize("broken", ["worker", "way"])
async def test_one_holder_that_does_not_serve_costs_no_other_one_its_pages(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """A worker stands still while its engine answers; or every worker says that it serves."""
    monkeypatch.setattr(routes.RouteKeeper, "why_slow", lambda *_: "")
    async with daemons(site, "abc", 16, peers__hold_bytes=8 * PAGE_BYTES) as (a, b, c):
        await measured(a)
        ids, taken = words(12, 20 * PAGE_TOKENS), a.linked.taken
        generation = await unread(a.engine, request(ids, 520, session="s"), 3)
        a.linked.keeper.want(a.state.sessions["", "s"], 10)  # so that the others need both peers
        await until(lambda: all(map(taken.pages_with, "bc")) and not a.linked.keeper.moves)
        a.linked.keeper.want(a.state.sessions["", "s"], None)
        last = a.state.sessions["", "s"].kv.held[-1].peer
        first, worker = "bc".replace(last, ""), (b if last == "b" else c).state.lanes[0].lane.pid
        reading = asyncio.ensure_future(read(generation))
        monkeypatch.setattr(routes, "UNSERVED_S", 0.5)
        monkeypatch.setattr(holds_server, "SERVE_S", 0.5)
        suspend(worker)
        if broken == "way":
            monkeypatch.setattr(PageMover, "is_served", is_served)
        await until(lambda: taken.is_avoided(last))
        assert not taken.is_avoided(first)
        assert taken.pages_with(first)
        os.kill(worker, signal.SIGCONT)
        answer = await reading
        assert answer.tokens == reference.tokens(ids, 520)


async def is_served(mover: PageMover, taken: TakenHold) -> bool:
    return True


async def test_the_silence_of_one_holder_makes_no_other_one_slow(site: Site) -> None:
    """A step's wait is reported for every holder on its route."""
    async with daemons(site, "abc", 16) as (a, b, c):
        links = a.engine.running.peers.links
        keeper, now = a.linked.keeper, time.monotonic()
        await until(lambda: a.state.lanes[0].lane.facts is not None)
        for at in range(12):
            a.state.lanes[0].meter._waits = dict.fromkeys("bc", (1, 5000.0))
            links["b"]._machine.state = LinkState.SUSPECT
            keeper._look_at_waits(now + 100.0 + at * 0.25)
        assert not keeper.why_slow("c")
        links["b"]._machine.state = LinkState.UP
        assert b.is_linked(c)


async def test_pages_on_their_way_ask_no_peer_for_room(site: Site) -> None:
    """Until its load shows them, they count as taken; once it does, they do not count twice."""
    async with daemons(site, "ab", 16) as (a, _):
        link, keeper = a.engine.running.peers.links["b"], a.linked.keeper
        page_bytes = a.page_bytes()
        for free, moving, room in ((16, 8, 8), (4, 8, 0), (0, 8, 0), (-4, 8, -4), (-4, -4, 0)):
            link.load = replace(link.load, hold_bytes_free=free * page_bytes)
            assert keeper._room(link, moving).free_pages == room


async def busy_beside_idle(a: Daemon, b: Daemon) -> None:
    """Make `a` predict that it breaks every promise alone, and `b` is a hundred times as fast."""
    for one, cost in ((a, NO_PROMISE), (b, IN_TIME)):
        one.state.lanes[0].cost.cost = cost
        await read(one.engine.submit(request(words(9, 20), 2)))
    await measured(a)
    link = a.engine.running.peers.links["b"]
    await until(lambda: link.load.prefill_tokens_per_s == 100_000)


async def test_a_turn_goes_to_an_idle_peer_once_it_has_begun(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the router's own decision; once brought back, also when it is promoted without a
    destination, and when an urgent request waits behind it."""
    slow_down(monkeypatch)
    async with daemons(site, "ab", 64, promote_auto=True) as (a, b):
        await busy_beside_idle(a, b)
        ids = words(6, PAGE_TOKENS + 30)
        asked = request(ids, 8000, session="s", sla="interactive")
        generation, reader = await started(a.engine, asked, 0)
        await until(lambda: a.engine.requests()[0]["lane"] == "peer:b")
        found = explained(a, asked.request_id)
        assert (found["lane"], found["reason_id"]) == ("a0", "peer_spill")
        assert found["strategy"] == {"prefill": "remote", "decode": "remote", "peers": ["b"]}
        chosen = outlook(found, "remote")
        assert (chosen["peers"], chosen["rejected"]) == (["b"], "")
        assert chosen["sla_ratio"] < found["candidates"][0]["sla_ratio"]
        await until(lambda: bool(explained(a, asked.request_id)["moves"]))
        assert explained(a, asked.request_id)["moves"][0]["to"] == "peer:b"
        before = generation.completion_tokens
        await until(lambda: generation.completion_tokens > before + 5)
        await a.engine.demote("", "s")
        assert a.engine.requests()[0]["lane"] == "a0"
        moved = await a.engine.promote("", "s")
        assert (moved["result"], moved["target"]) == ("moved", "peer:b")
        assert moved["reason"] == "lanes here would break the promise: a peer's lane"
        assert (await a.engine.promote("", "s"))["result"] == "already there"
        await a.engine.demote("", "s")
        behind = a.engine.submit(request(ids, 5, session="s", sla="interactive"))
        await until(lambda: a.engine.sessions()[0]["lane"] == "peer:b")  # so that it waits less
        behind.cancel()
        generation.cancel()
        answer = await reader
        assert answer.tokens == reference.tokens(ids, len(answer.tokens))
        await until(lambda: not b.engine.requests())


async def test_no_turn_goes_to_a_peer_that_leaves(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it leaves before the decision, another is made; if after it, `explain` has the reason."""
    slow_down(monkeypatch)
    async with daemons(site, "ab", 64, promote_auto=True) as (a, b):
        await busy_beside_idle(a, b)
        link = a.engine.running.peers.links["b"]
        b.engine.leave()
        await until(lambda: link.load.leaves)
        asked = request(words(6, 30), 8000, session="s", sla="interactive")
        generation, reader = await started(a.engine, asked, 5)
        found = explained(a, asked.request_id)
        assert found["strategy"]["decode"] == "local"
        assert outlook(found, "remote")["rejected"] == "a peer is leaving"
        (turn,) = a.state.turns.values()
        refused = asyncio.Event()
        a.engine.running.plans.send_away(turn, "b", refused.set)
        await until(refused.is_set)
        notes = explained(a, asked.request_id)["notes"]
        assert notes == ["it does not go to b: b takes no turns"]
        assert a.engine.requests()[0]["lane"] == "a0"
        generation.cancel()
        await reader


async def test_a_refusal_of_the_chosen_peer_leads_to_the_best_lane_here(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the turn is promoted without a destination, and when an urgent request waits behind it;
    the session stays if there is no other lane. The answer says why."""
    slow_down(monkeypatch)
    monkeypatch.setattr(served, "SERVED_MAX", 0)
    why = "b: it computes 0 turns of this daemon already"
    async with daemons(site, "ab", 64, n_lanes=2, promote_auto=True) as (a, b):
        lanes = {loop.lane.name: loop for loop in a.state.lanes}
        lanes["a1"].cost.cost = NO_PROMISE
        await busy_beside_idle(a, b)
        ids = words(6, 30)
        asked = request(ids, 8000, session="s")
        generation, reader = await started(a.engine, asked, 0)
        await until(lambda: bool(explained(a, asked.request_id)["notes"]))
        assert explained(a, asked.request_id)["notes"] == [f"it does not go to b: {why}"]
        with pytest.raises(BatchEngineError, match="computes 0 turns"):
            await a.engine.promote("", "s", "b")
        home = a.engine.sessions()[0]["lane"]
        (other,) = lanes.keys() - {home}
        moved = await a.engine.promote("", "s")
        assert (moved["result"], moved["target"]) == ("moved", other)
        assert moved["reason"] == f"not to peer b: {why}"
        assert a.engine.sessions()[0]["lane"] == other
        lanes[other].cost.cost = StepCost(*(2 * ms for ms in NO_PROMISE))
        behind = a.engine.submit(request(ids, 5, session="s", sla="interactive"))
        await until(lambda: a.engine.sessions()[0]["lane"] == home)
        behind.cancel()
        lanes[other].draining = "the test has it so"
        moved = await a.engine.promote("", "s")
        assert moved["result"].startswith(f"aborted: not to peer b: {why}; no other lane is up")
        assert a.engine.sessions()[0]["lane"] == moved["target"] == home
        generation.cancel()
        answer = await reader
        assert answer.tokens == reference.tokens(ids, len(answer.tokens))
