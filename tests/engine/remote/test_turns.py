"""Turns that a peer computes: no token changes, whichever daemon computes it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from batchengine.core import BatchEngineError, Sampling, TokenEvent
from batchengine.engine.linked import holds_taken
from batchengine.engine.linked.holds_taken import TakenHold
from batchengine.engine.linked.peer_pages import KnownPage
from batchengine.engine.remote import away, served
from batchengine.engine.remote.exchange import Exchange
from batchengine.engine.turns.stream import Generation
from batchengine.peers.link import PeerLink
from batchengine.wire.peer import TokenChoice, TurnTokens
from kv_store import keys
from kv_store.pages.index import PageRef
from tests.engine.linked.daemons import PAGE_BYTES, Daemon, daemons, slow_down
from tests.support.engines import Reference, Site, read, request, started, suspend, until, words

LONG = 6000  # tokens: more than are computed in any of these tests
PROMPT = words(3, 256 * 3 + 20)
SEEDED = Sampling(0.8, 40, seed=7, repetition_penalty=1.25, presence_penalty=0.5, logprobs=2)


@pytest.fixture(autouse=True)
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step has a least time."""
    slow_down(monkeypatch)


def lane(one: Daemon) -> str:
    """Where the only request computes, as `ps` shows it."""
    return one.engine.requests()[0]["lane"]


class Liar(Exchange):
    """The side of a served that sends tokens which it has not computed."""

    def send(
        self,
        link: PeerLink,
        tokens: Sequence[int],
        first: int,
        choices: Sequence[TokenChoice] = (),
    ) -> None:
        super().send(link, [(token + 1) % 1000 for token in tokens], first, choices)


async def more(generation: Generation, tokens: int) -> None:
    """Wait until the stream has so many tokens more."""
    until_tokens = generation.completion_tokens + tokens
    await until(lambda: generation.completion_tokens >= until_tokens)


async def test_a_turn_goes_to_a_peer_and_comes_back(site: Site, reference: Reference) -> None:
    """Several times, sampled with penalties; the next turn of the session continues it."""
    async with daemons(site, "ab", 40) as (a, b):
        asked = request(PROMPT, LONG, session="s", sampling=SEEDED)
        generation, reading = await started(a.engine, asked, 3)
        home, session = lane(a), a.state.sessions["", "s"]
        await until(lambda: len(session.kv.sealed) >= 3)
        for _ in range(2):
            assert (await a.engine.promote("", "s", "b"))["result"] == "moved"
            assert (lane(a), a.engine.sessions()[0]["lane"]) == ("peer:b", "peer:b")
            (served,) = b.engine.requests()
            assert served["owner"] == "a"
            assert served["cached_tokens"] >= 256 * 3, "its pages came by content"
            assert b.engine.sessions()[0]["tenant"] == "peer:a"
            await more(generation, 20)
            assert (await a.engine.promote("", "s", "b"))["result"] == "already there"
            await a.engine.promote("", "s", home)
            assert lane(a) == home
            await until(lambda: not b.engine.requests())
            await more(generation, 5)
        moves = a.engine.explain("s")["decisions"][0]["moves"]
        assert [move["to"] for move in moves][:2] == ["peer:b", home]
        await a.engine.promote("", "s", "b")
        await more(generation, 5)
        generation.cancel()
        answer = await reading
        tokens = [event for event in answer.events if isinstance(event, TokenEvent)]
        assert all(event.logprob and len(event.top) == 2 for event in tokens)
        assert answer.tokens == reference.tokens(PROMPT, len(answer.tokens), SEEDED)
        await until(lambda: not b.engine.requests())
        assert not b.engine.remains()["given"]
        timeline = list(a.state.sessions["", "s"].tokens)
        answer = await read(a.engine.submit(request([*timeline, 50], 5, session="s")))
        assert answer.tokens == reference.tokens([*timeline, 50], 5)


async def test_a_slow_reader_stops_the_peer(site: Site, reference: Reference) -> None:
    """The peer computes no more than it has credit for; a reader that goes on gets all of it."""
    async with daemons(site, "ab", 40) as (a, b):
        shown: list[int] = []
        generation = a.engine.submit(request(PROMPT, LONG, session="s"))

        async def read_on(tokens: int) -> None:
            while len(shown) < tokens:
                events = await generation.events()
                shown.extend(event.token for event in events if isinstance(event, TokenEvent))

        await read_on(5)
        moving = asyncio.ensure_future(a.engine.promote("", "s", "b"))
        while not moving.done():
            await read_on(len(shown) + 1)
        await moving
        await until(lambda: [row["state"] for row in b.engine.requests()] == ["paused"])
        assert lane(a) == "peer:b"
        await read_on(len(shown) + 600)
        home = a.state.lanes[0].lane.name
        await a.engine.promote("", "s", home)
        await read_on(len(shown) + 5)
        generation.cancel()
        assert shown == reference.tokens(PROMPT, len(shown))


async def test_a_peer_that_is_far_behind_catches_up(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has room for some of the pages, computes the others again, and the owner computes many
    times its credit meanwhile."""
    for module in (away, served):
        monkeypatch.setattr(module, "CREDIT_TOKENS", 8)
    async with daemons(site, "ab", 60, peers__hold_bytes=4 * PAGE_BYTES) as (a, b):
        prompt, turns = words(9, 256 * 6 + 20), b.engine.running.remote.served
        generation, reading = await started(a.engine, request(prompt, LONG, session="s"), 3)
        session, take = a.state.sessions["", "s"], turns.take
        await until(lambda: len(session.kv.sealed) >= 6)

        def take_late(link: PeerLink, message: TurnTokens, payload: bytes) -> None:
            asyncio.get_running_loop().call_later(0.5, take, link, message, payload)

        monkeypatch.setattr(turns, "take", take_late)
        async with asyncio.timeout(60):
            moved = await a.engine.promote("", "s", "b")
        assert moved["result"] == "moved"
        (at_peer,) = b.engine.requests()
        assert at_peer["cached_tokens"] == 256 * 4
        await more(generation, 20)
        generation.cancel()
        answer = await reading
        assert answer.tokens == reference.tokens(prompt, len(answer.tokens))


async def test_turns_that_go_to_a_peer_at_the_same_time(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of the first one take longest, and the second one ends before its pages are with
    the peer: that ends neither the link nor the other turns."""
    async with daemons(site, "ab", 60) as (a, b):
        prompts = {name: words(number, 256 * 2 + 20) for number, name in enumerate("stu", 30)}
        running = {
            name: await started(a.engine, request(prompt, LONG, session=name), 3)
            for name, prompt in prompts.items()
        }
        await until(lambda: all(len(one.kv.sealed) >= 2 for one in a.state.sessions.values()))
        pages, late = a.linked.pages, {"s": asyncio.Event(), "t": asyncio.Event()}
        firsts = {keys.token_bytes(prompt[:256]): name for name, prompt in prompts.items()}
        put, waiting = pages.put, list[str]()

        async def put_late(
            taken: TakenHold, index: int, page: KnownPage, data: PageRef | bytearray
        ) -> None:
            if (name := firsts.get(page.tokens, "")) in late:
                waiting.append(name)
                await late[name].wait()
            await put(taken, index, page, data)

        monkeypatch.setattr(pages, "put", put_late)
        link = a.engine.running.peers.links["b"]
        moves = [asyncio.ensure_future(a.engine.promote("", name, "b")) for name in "st"]
        await until(lambda: len(waiting) == 2)
        assert (await a.engine.promote("", "u", "b"))["result"] == "moved"
        up_since = link._machine.since
        running["t"][0].cancel()
        late["t"].set()
        with pytest.raises(BatchEngineError, match="the turn ended before that"):
            await moves[1]
        late["s"].set()
        assert (await moves[0])["result"] == "moved"
        assert link._machine.since == up_since
        for name in "su":
            await more(running[name][0], 5)
            running[name][0].cancel()
            answer = await running[name][1]
            assert answer.tokens == reference.tokens(prompts[name], len(answer.tokens))
        await until(lambda: not b.engine.requests() and not b.linked.given.n_pages)


async def test_the_peer_decides_no_end(site: Site, reference: Reference) -> None:
    """The last token, by its number, is sent by the peer; the turn ends as it would here."""
    async with daemons(site, "ab", 40) as (a, b):
        n = 150
        generation, reading = await started(a.engine, request(PROMPT, n, session="s"), 1)
        with contextlib.suppress(BatchEngineError):  # the turn may be over before that
            await a.engine.promote("", "s", "b")
        answer = await reading
        assert (answer.reason, len(answer.tokens)) == ("length", n)
        assert answer.tokens == reference.tokens(PROMPT, n)
        assert generation.finished
        await until(lambda: not b.engine.requests())


def test_a_turn_whose_lost_pages_are_computed_again_stays() -> None:
    """No peer has pages of it any more, so none is named."""
    kv = SimpleNamespace(later=[object()], held=[], n_held=0)
    session: Any = SimpleNamespace(tenant="", kv=kv)
    turn: Any = SimpleNamespace(end=None, reported=True, shared_with="", matcher=None, scores=None)
    assert away.obstacle(session, turn, moves=False) == away.LOST_PAGES


async def test_a_peer_computes_only_a_turn_that_has_begun(site: Site) -> None:
    """The refusal says why, and when to ask again."""
    async with daemons(site, "ab", 40) as (a, _):
        await read(a.engine.submit(request(PROMPT[:20], 2, session="s")))
        with pytest.raises(BatchEngineError, match="ask while an answer streams"):
            await a.engine.promote("", "s", "b")
        loop = a.state.lanes[0]
        await loop.pause()
        generation = a.engine.submit(request(PROMPT[:20], 2, session="t"))
        await until(lambda: bool(a.state.turns))
        with pytest.raises(BatchEngineError, match="ask again when it has"):
            await a.engine.promote("", "t", "b")
        loop.unpause()
        assert (await read(generation)).error is None


async def test_a_peer_that_is_lost_stops_or_lies(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to the peer, the turn goes on here with the same tokens."""
    async with daemons(site, "ab", 40) as (a, b):
        generation, reading = await started(a.engine, request(PROMPT, LONG, session="s"), 3)
        home, link = lane(a), a.engine.running.peers.links["b"]
        await a.engine.promote("", "s", "b")
        link.abort("the test ends it")
        await until(lambda: lane(a) == home and not b.engine.requests())
        await until(lambda: a.is_linked(b) and b.is_linked(a))
        await more(generation, 5)

        await a.engine.promote("", "s", "b")
        worker = b.state.lanes[0].lane.pid
        suspend(worker)
        await until(lambda: lane(a) == home)
        await more(generation, 5)
        notes = a.engine.explain("s")["decisions"][-1]["notes"]
        assert notes == [
            "it is computed here again: the link to b is lost",
            "it is computed here again: no token came from b for 2 s",
        ]
        os.kill(worker, signal.SIGCONT)
        await until(lambda: not b.engine.requests())

        monkeypatch.setattr(holds_taken, "AVOIDED_S", 0.0)
        with monkeypatch.context() as patch:
            patch.setattr(served, "Exchange", Liar)
            with pytest.raises(BatchEngineError, match="another token"):
                await a.engine.promote("", "s", "b")
        await until(lambda: not b.engine.requests())
        await a.engine.promote("", "s", "b")
        await more(generation, 5)

        b.engine.leave()
        await until(lambda: lane(a) == home and not b.engine.requests())
        await until(lambda: link.load.leaves)
        with pytest.raises(BatchEngineError, match="b takes no turns"):
            await a.engine.promote("", "s", "b")
        b.engine.leave(undo=True)
        await until(lambda: not link.load.leaves)
        await a.engine.promote("", "s", "b")
        await more(generation, 5)
        await b.engine.stop(0.0)
        await more(generation, 5)
        generation.cancel()
        answer = await reading
        assert answer.error is None
        assert answer.tokens == reference.tokens(PROMPT, len(answer.tokens))


async def test_a_daemon_that_leaves_gives_its_turns_to_peers(
    site: Site, reference: Reference
) -> None:
    async with daemons(site, "abc", 80) as (a, b, c):
        prompts = {name: words(ord(name), 30) for name in "st"}
        read_by = [
            await started(a.engine, request(ids, LONG, session=name), 3)
            for name, ids in prompts.items()
        ]
        a.engine.leave()
        await until(lambda: {row["lane"] for row in a.engine.requests()} == {"peer:b", "peer:c"})
        assert len(b.engine.requests()) == len(c.engine.requests()) == 1
        for generation, _ in read_by:
            await more(generation, 5)
            generation.cancel()
        for (_, reading), ids in zip(read_by, prompts.values(), strict=True):
            answer = await reading
            assert answer.tokens == reference.tokens(ids, len(answer.tokens))
        await until(lambda: a.engine.remains()["over"])
