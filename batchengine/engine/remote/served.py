"""Turns of peers that this daemon computes.

Each is a turn of an anonymous session with a tenant of its own per peer, so that it has a share
like any other tenant's. It ends by its owner's word, with the link to its owner, or by itself.
Which token is the last one, and text, are the owner's affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from batchengine.core import (
    BatchEngineError,
    ErrorEvent,
    GenerationEvent,
    GenerationRequest,
    ModelInfo,
    Sla,
    TokenEvent,
)
from batchengine.engine.linked.holds import Misfit
from batchengine.engine.remote.exchange import Exchange, tokens_of
from batchengine.engine.state import EngineState
from batchengine.engine.tasks import Spawn
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import PEER_TENANT
from batchengine.session import Session
from batchengine.wire.peer import (
    TEXT_CHARS_MAX,
    RunTurn,
    TokenChoice,
    TurnEnded,
    TurnGo,
    TurnTokens,
)

log = logging.getLogger("batchengine.remote")

SERVED_MAX = 4  # of one peer
CREDIT_TOKENS = 256  # that may be sent before the owner allows more
READ_S = 30.0  # for the tokens of a timeline to come
DIFFERS = "its tokens are others here"

Submit = Callable[[GenerationRequest], Generation]


class ServedTurn:
    """One turn of a peer. It begins when its `tokens` are complete."""

    def __init__(self, link: PeerLink, asked: RunTurn, n_vocab: int) -> None:
        self.link = link
        self.incarnation = link.incarnation
        self.asked = asked
        self.tokens = array("i")
        self.exchange = Exchange(asked.run, asked.n_tokens, n_vocab, is_owner=False)
        self.allowed = asked.n_tokens + CREDIT_TOKENS
        self.generation: Generation | None = None
        self.is_over = False
        self.news = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<ServedTurn {self.asked.run} of {self.link.name}>"

    @property
    def tokens_max(self) -> int:
        """Length that the timeline may reach."""
        return self.asked.n_tokens + self.asked.tokens_max


class ServedTurns:
    """Every turn that is computed for a peer. Methods raise Misfit to end the peer's link."""

    def __init__(self, state: EngineState, submit: Submit, info: ModelInfo, spawn: Spawn) -> None:
        self._state = state
        self._submit = submit
        self._info = info
        self._spawn = spawn
        self._served: dict[tuple[str, int], ServedTurn] = {}
        self._newest: dict[tuple[str, int], int] = {}  # number, by peer and its incarnation

    def __repr__(self) -> str:
        return f"<ServedTurns {list(self._served.values())}>"

    def __len__(self) -> int:
        return len(self._served)

    def facts(self, session: Session) -> dict[str, Any]:
        """For operators: whose turn the session computes; {} for one of this daemon."""
        if not session.tenant.startswith(PEER_TENANT):
            return {}
        return {"owner": session.tenant.removeprefix(PEER_TENANT)}

    # ---------------------------------------------------------------------------- of the owner

    def ask(self, link: PeerLink, asked: RunTurn) -> str:
        """Expect the tokens of a turn; returns why it is not computed here, or ""."""
        run = link.name, link.incarnation
        if link.is_of_other_model:
            raise Misfit("it asks for turns of another model")
        if asked.run <= self._newest.get(run, -1):
            raise Misfit(f"turn {asked.run} is not a new one")
        self._newest = {key: n for key, n in self._newest.items() if key[0] != link.name}
        self._newest[run] = asked.run
        if self._state.leaving:
            return "it takes no new turns"
        if sum(served.link is link for served in self._served.values()) >= SERVED_MAX:
            return f"it computes {SERVED_MAX} turns of this daemon already"
        if asked.n_tokens + asked.tokens_max > self._info.context_tokens:
            return f"it computes at most {self._info.context_tokens} tokens"
        if any(token >= self._info.vocab_size for token, _ in asked.sampling.logit_bias):
            raise Misfit("logit_bias outside the vocabulary")
        served = self._served[link.name, asked.run] = ServedTurn(link, asked, self._info.vocab_size)
        served.timer = asyncio.get_running_loop().call_later(
            READ_S, self._end, served, "its tokens did not come"
        )
        return ""

    def take(self, link: PeerLink, message: TurnTokens, payload: bytes) -> None:
        """Take tokens of a turn's timeline; the turn begins when they are complete."""
        served = self._served.get((link.name, message.run))
        if served is None:
            self._check_late(link, message.run)
            return
        asked = served.asked
        if served.generation is None:
            tokens = tokens_of(payload, self._info.vocab_size)
            end = message.first + len(tokens)
            if message.first != len(served.tokens) or end > asked.n_tokens or message.choices:
                raise Misfit(f"tokens {message.first} .. {end} of {asked.n_tokens}")
            served.tokens += tokens
            if end == asked.n_tokens:
                self._begin(served)
            return
        rows = served.exchange.take(message, payload, served.tokens_max, with_choices=False)
        served.news.set()  # its tokens need not be sent to it
        turn = self._state.turns.get(served.generation)
        if turn is not None:
            lane = self._state.home[turn.session.key]
            lane.take_tokens(turn, message.first, rows)
            if turn.differs:
                self._end(served, DIFFERS)

    def allow(self, link: PeerLink, go: TurnGo) -> None:
        """Let tokens before a position be sent."""
        served = self._served.get((link.name, go.run))
        if served is None:
            self._check_late(link, go.run)
            return
        served.allowed = max(served.allowed, go.until)
        served.news.set()

    def end(self, link: PeerLink, number: int) -> None:
        """End a turn by its owner's word."""
        served = self._served.get((link.name, number))
        if served is None:
            self._check_late(link, number)
        else:
            self._end(served)

    def lost(self, link: PeerLink) -> None:
        """End the turns of a peer whose control link was lost."""
        for served in [one for one in self._served.values() if one.link.name == link.name]:
            self._end(served)

    # -------------------------------------------------------------------------------- helpers

    def _check_late(self, link: PeerLink, number: int) -> None:
        """Raise Misfit about a turn that was never asked for; of one that is over, all is late."""
        if number > self._newest.get((link.name, link.incarnation), -1):
            raise Misfit(f"turn {number} was not asked for")

    def _begin(self, served: ServedTurn) -> None:
        """Submit the turn. Its end tokens do not end it: its owner says when it is over."""
        asked, peer = served.asked, served.link.name
        if served.timer is not None:
            served.timer.cancel()
        request = GenerationRequest(
            request_id=f"of_{peer}_{asked.run}_{served.incarnation:x}",
            prompt=tuple(served.tokens),
            tokens_max=asked.tokens_max,
            sampling=asked.sampling,
            ignore_eos=True,
            sla=Sla(asked.sla_class),
            tenant=PEER_TENANT + peer,
        )
        served.tokens = array("i")
        try:
            served.generation = self._submit(request)
        except BatchEngineError as error:
            self._end(served, str(error))
            return
        turn = self._state.turns[served.generation]
        turn.shared_with, turn.session.salt = peer, asked.salt  # before it looks for its pages
        self._spawn(self._relay(served, served.generation, turn), "turn of a peer")

    async def _relay(self, served: ServedTurn, generation: Generation, turn: Turn) -> None:
        """Send what is computed to the owner of the turn, until its end, or until a token of the
        owner is another one."""
        why, position = "", served.asked.n_tokens
        try:
            while not why and (events := await generation.events()):
                if turn.differs:
                    why = DIFFERS
                    break
                rows = [event for event in events if isinstance(event, TokenEvent)]
                await self._send(served, position, rows)
                position += len(rows)
                why = _failure(events)
        except BatchEngineError as error:
            log.info("%r ends: %s", served, error)
        finally:
            self._end(served, why)

    async def _send(self, served: ServedTurn, first: int, rows: Sequence[TokenEvent]) -> None:
        """Send those of the tokens that the owner has not sent itself, as far as it allows."""
        start, end = first, first + len(rows)
        while not served.is_over and (at := max(first, served.exchange.came)) < end:
            stop = min(end, served.allowed)
            if stop <= at:
                served.news.clear()
                await served.news.wait()
                continue
            part = rows[at - start : stop - start]
            choices = [_choice(event) for event in part if event.logprob is not None]
            tokens = [event.token for event in part]
            served.exchange.send(served.link, tokens, at, choices)
            first = stop

    def _end(self, served: ServedTurn, why: str = "") -> None:
        """Cancel a turn, and say so to its owner if there is one."""
        link, number = served.link, served.asked.run
        if self._served.pop((link.name, number), None) is None:
            return
        if served.timer is not None:
            served.timer.cancel()
        if served.generation is not None:
            served.generation.cancel()
        served.is_over = True
        served.news.set()
        if link.incarnation == served.incarnation:
            with contextlib.suppress(BatchEngineError):  # the link is lost
                link.send(TurnEnded(number, False, why[:TEXT_CHARS_MAX]))


def _choice(event: TokenEvent) -> TokenChoice:
    logprob = 0.0 if event.logprob is None else event.logprob.logprob
    return TokenChoice(logprob, tuple([(one.token, one.logprob) for one in event.top]))


def _failure(events: Sequence[GenerationEvent]) -> str:
    return next((str(event.error) for event in events if isinstance(event, ErrorEvent)), "")
