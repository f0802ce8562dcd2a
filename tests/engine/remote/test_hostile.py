"""Peers that do not keep to the rules of remote turns lose their link, and no token changes."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Sequence

import pytest

from batchengine.core import BatchEngineError, Sampling, SlaClass, TokenEvent
from batchengine.engine.remote.served import CREDIT_TOKENS, SERVED_MAX
from batchengine.peers.identity import Identity
from batchengine.wire.peer import (
    ONE_WAY,
    REQUEST,
    Heartbeat,
    PeerLoad,
    PeerMessage,
    RunTurn,
    TokenChoice,
    TurnAccepted,
    TurnEnded,
    TurnGo,
    TurnTokens,
)
from tests.engine.linked.daemons import Daemon, daemon
from tests.peers.scene import Scripted, ScriptedListener, dial
from tests.support.engines import Reference, Site, request, unread, until, words

PROMPT = words(4, 40)
Lie = tuple[PeerMessage, bytes, int]  # message, payload, `attempt` of the header


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@contextlib.asynccontextmanager
async def alive(scripted: Scripted) -> AsyncIterator[Scripted]:
    """A scripted daemon that sends heartbeats, until its end."""

    async def beat() -> None:
        with contextlib.suppress(OSError):
            while True:
                await scripted.send(Heartbeat(1, 0, 0, PeerLoad()))
                await asyncio.sleep(0.2)

    with contextlib.closing(scripted):
        beating = asyncio.ensure_future(beat())
        try:
            yield scripted
        finally:
            beating.cancel()
            await asyncio.wait([beating])


async def is_cut(scripted: Scripted) -> bool:
    """Whether the other side ends the link."""
    async with asyncio.timeout(60):
        while await scripted.receive() is not None:
            pass
    return True


def lies_of_a_server(run: int, n: int, n_vocab: int) -> dict[str, Lie]:
    """What a peer may send about turn `run`, whose timeline it has got up to token `n`."""
    choice = TokenChoice(-1.0, ((5, -1.0),))
    return {
        "a gap": (TurnTokens(run, False, n + 1), ids(5), ONE_WAY),
        "tokens of the owner": (TurnTokens(run, False, n - 1), ids(5), ONE_WAY),
        "a flood": (TurnTokens(run, False, n), ids(*[5] * (CREDIT_TOKENS + 1)), ONE_WAY),
        "no tokens": (TurnTokens(run, False, n), b"", ONE_WAY),
        "half a token": (TurnTokens(run, False, n), b"123", ONE_WAY),
        "no word": (TurnTokens(run, False, n), ids(n_vocab), ONE_WAY),
        "below all words": (TurnTokens(run, False, n), ids(-1), ONE_WAY),
        "logprobs": (TurnTokens(run, False, n, (choice,)), ids(5), ONE_WAY),
        "a request": (TurnTokens(run, False, n), ids(5), REQUEST),
        "no such turn": (TurnTokens(run + 9, False, n), ids(5), ONE_WAY),
        "the end of none": (TurnEnded(run + 9, False), b"", ONE_WAY),
        "an answer": (TurnAccepted(), b"", ONE_WAY),
        "credit for none": (TurnGo(1, 5), b"", ONE_WAY),
    }


async def test_a_server_that_lies(site: Site, reference: Reference) -> None:
    async with daemon(site, "a", 40) as a:
        listener = ScriptedListener(Identity("b", None, None))
        with contextlib.closing(listener):
            a.knows_at("b", listener.port)
            generation = await unread(a.engine, request(PROMPT, 2000, session="s"), 20)
            await until(lambda: generation.paused_since_ms is not None)
            n, n_vocab = len(a.state.sessions["", "s"].tokens), a.engine.info.vocab_size
            for run, what in enumerate(lies_of_a_server(0, n, n_vocab), 1):
                message, payload, attempt = lies_of_a_server(run, n, n_vocab)[what]
                made = await listener.accept()
                while await made.greet("b", a.engine.running.peers._facts, ("turns",)) is None:
                    made = await listener.accept()  # it had given the connection up meanwhile
                async with alive(made) as scripted:
                    await until(lambda: a.engine.running.peers.links["b"].state.is_open)
                    moving = asyncio.ensure_future(a.engine.promote("", "s", "b"))
                    asked = await scripted.receive()
                    assert asked is not None
                    assert isinstance(asked.message, RunTurn)
                    assert (asked.message.run, asked.message.n_tokens) == (run, n)
                    await scripted.send(TurnAccepted(), step=asked.step, attempt=2)
                    tokens = await scripted.receive()
                    assert tokens is not None
                    assert tokens.payload == ids(*a.state.sessions["", "s"].tokens)
                    await scripted.send(message, payload, step=3, attempt=attempt)
                    assert await is_cut(scripted), what
                    with pytest.raises(BatchEngineError, match="link to b is lost"):
                        await moving
            events = await generation.events()
            generation.cancel()
            shown = [event.token for event in events if isinstance(event, TokenEvent)]
            assert shown == reference.tokens(PROMPT, len(shown))


class Owner:
    """The scripted daemon `a`, which has turns computed by a real one."""

    def __init__(self, scripted: Scripted) -> None:
        self.scripted = scripted

    async def ask(self, run: int, prompt: Sequence[int], tokens_max: int = 1000) -> str:
        """Have a turn computed; returns why not."""
        asked = RunTurn(run, len(prompt), tokens_max, Sampling(), SlaClass.STANDARD, b"")
        await self.scripted.send(asked, step=7, attempt=REQUEST)
        return await self.answer()

    async def answer(self) -> str:
        frame = await self.scripted.receive()
        assert frame is not None
        assert isinstance(frame.message, TurnAccepted)
        return frame.message.why

    async def tokens(self, run: int, first: int, n: int) -> list[int]:
        """At least `n` tokens that are computed for a turn, from position `first` on."""
        found: list[int] = []
        while len(found) < n:
            frame = await self.scripted.receive()
            assert frame is not None
            assert frame.message == TurnTokens(run, False, first + len(found))
            found += array("i", bytes(frame.payload))
        return found


@contextlib.asynccontextmanager
async def owner_of(b: Daemon) -> AsyncIterator[Owner]:
    peers = b.engine.running.peers
    await until(lambda: not peers.links["a"].state.is_open)
    scripted = await dial(Identity("a", None, None), "b", peers.port)
    await scripted.greet("a", peers._facts, ("turns",))
    async with alive(scripted):
        await until(lambda: peers.links["a"].state.is_open)
        yield Owner(scripted)


def lies_of_an_owner(run: int, n_vocab: int) -> dict[str, Lie]:
    """What a peer may send after it asked for turn `run` with a prompt of 40 tokens."""
    good, biased = Sampling(), Sampling(logit_bias=((n_vocab, 1.0),))
    return {
        "the same turn": (RunTurn(run, 40, 5, good, SlaClass.BATCH, b""), b"", REQUEST),
        "no request": (RunTurn(run + 1, 40, 5, good, SlaClass.BATCH, b""), b"", ONE_WAY),
        "a bias": (RunTurn(run + 1, 40, 5, biased, SlaClass.BATCH, b""), b"", REQUEST),
        "a gap": (TurnTokens(run, True, 1), ids(5), ONE_WAY),
        "too many": (TurnTokens(run, True, 0), ids(*[5] * 41), ONE_WAY),
        "no word": (TurnTokens(run, True, 0), ids(n_vocab), ONE_WAY),
        "no such turn": (TurnTokens(run + 1, True, 0), ids(5), ONE_WAY),
        "the end of none": (TurnEnded(run + 1, True), b"", ONE_WAY),
        "credit for none": (TurnGo(run + 1, 5), b"", ONE_WAY),
    }


async def test_an_owner_that_lies(site: Site, reference: Reference) -> None:
    async with daemon(site, "b", 40) as b:
        b.knows_at("a", 1)
        await until(lambda: "a" in b.engine.running.peers.links)
        served = b.engine.running.remote.served
        expected = reference.tokens(PROMPT, 2 * CREDIT_TOKENS)
        async with owner_of(b) as a:
            assert "at most" in await a.ask(1, PROMPT, 1 << 24)
            for run in range(2, SERVED_MAX + 2):
                assert not await a.ask(run, PROMPT)
            assert "already" in await a.ask(SERVED_MAX + 2, PROMPT)
            await a.scripted.send(TurnTokens(2, True, 0), ids(*PROMPT))
            found = await a.tokens(2, len(PROMPT), CREDIT_TOKENS)
            assert found == expected[:CREDIT_TOKENS], "no more than was allowed"
            await a.scripted.send(TurnGo(2, len(PROMPT) + 2 * CREDIT_TOKENS))
            found = await a.tokens(2, len(PROMPT) + CREDIT_TOKENS, CREDIT_TOKENS)
            assert found == expected[CREDIT_TOKENS:]
            assert len(b.engine.requests()) == 1
            await a.scripted.send(TurnEnded(2, True))
            await until(lambda: not b.engine.requests())
            assert len(served) == SERVED_MAX - 1
        n_vocab = b.engine.info.vocab_size
        for run, what in enumerate(lies_of_an_owner(0, n_vocab), 100):
            message, payload, attempt = lies_of_an_owner(2 * run, n_vocab)[what]
            async with owner_of(b) as a:
                assert not served
                assert not await a.ask(2 * run, PROMPT)
                await a.scripted.send(message, payload, step=8, attempt=attempt)
                assert await is_cut(a.scripted), what
        await until(lambda: not served)
