"""Stages that this daemon computes for pipelines of peers.

Owns the memory that they may take. A stage ends by its owner's word, with the link to its owner, by
its worker, or by its deadline.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from batchengine.core import PAGE_TOKENS
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.stage_queue import StageOwner, StageWork
from batchengine.engine.tasks import Spawn
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import Peers
from batchengine.wire import lane as wire
from batchengine.wire.peer import (
    REQUEST,
    TEXT_CHARS_MAX,
    OpenPipeline,
    PeerFrame,
    PipelineEnded,
    PipelineGo,
    PipelineOpened,
)

OPEN_S = 5.0  # for every stage to open
RUN_S_MAX = 600.0
SERVED_MAX = 16  # stages for peers


@dataclass(eq=False, slots=True)
class ServedStage:
    """One stage for a pipeline of `peer`."""

    peer: str
    n_bytes: int
    opened: asyncio.Future[str]
    timer: asyncio.TimerHandle | None = None


class ServedStages:
    """The stages of one lane for pipelines of peers. `rows` are for operators."""

    def __init__(
        self,
        loop: LaneLoop,
        peers: Peers,
        spawn: Spawn,
        is_leaving: Callable[[], bool],
        *,
        bytes_max: int,
        context_max: int,
    ) -> None:
        """Stages take at most `bytes_max` bytes together, and `context_max` tokens each.

        None is opened while `is_leaving`.
        """
        self.bytes_max = bytes_max
        self._loop, self._peers, self._spawn = loop, peers, spawn
        self._is_leaving, self._context_max = is_leaving, context_max
        self._served: dict[int, ServedStage] = {}

    def __repr__(self) -> str:
        return f"<ServedStages {len(self._served)}>"

    def __len__(self) -> int:
        return len(self._served)

    def rows(self) -> list[dict[str, Any]]:
        """Facts about every stage."""
        found: list[dict[str, Any]] = []
        for number, served in self._served.items():
            work = self._loop.stages.get(number)
            found.append(
                {
                    "role": "stage",
                    "owner": served.peer,
                    "bytes": served.n_bytes,
                    "tokens": 0 if work is None else work.n_tokens,
                    "tokens_computed": 0 if work is None else work.frontier,
                }
            )
        return found

    # ---------------------------------------------------------------------------- of the owner

    def open(self, link: PeerLink, frame: PeerFrame, message: OpenPipeline) -> None:
        """Answer a request for a stage, at once or when the worker has opened it."""
        if frame.attempt != REQUEST:
            link.abort("it sent OpenPipeline, which is a request")
            return
        tokens = array("i")
        tokens.frombytes(frame.payload[: len(frame.payload) // 4 * 4])
        if why := self._admit(link, message, tokens):
            link.reply(frame, PipelineOpened(why[:TEXT_CHARS_MAX]))
        else:
            self._spawn(self._serve(link, frame, message, tokens), "stage for a peer")

    def allow(self, link: PeerLink, go: PipelineGo) -> None:
        """Let a first stage compute as far as its owner says."""
        served, work = self._served.get(go.run), self._loop.stages.get(go.run)
        if served is not None and served.peer == link.name and work is not None:
            work.allowed = max(work.allowed, min(go.until, work.n_tokens))
            self._loop.wake()

    def end(self, link: PeerLink, number: int) -> None:
        """End a stage by the word of its owner."""
        served = self._served.get(number)
        if served is not None and served.peer == link.name:
            self._end_served(number, "")

    def lost(self, peer: str) -> None:
        """End the stages for a peer whose control link was lost."""
        for number, served in list(self._served.items()):
            if served.peer == peer:
                self._end_served(number, "")

    # --------------------------------------------------------------------------- of the worker

    def opened(self, number: int) -> None:
        """The worker has opened a stage."""
        served = self._served.get(number)
        if served is not None and not served.opened.done():
            served.opened.set_result("")

    def ended(self, number: int, why: str) -> None:
        """A stage has ended by itself, or could not be opened."""
        served = self._served.get(number)
        if served is not None and not served.opened.done():
            served.opened.set_result(why)
        else:
            self._end_served(number, why)

    # -------------------------------------------------------------------------------- helpers

    def _admit(self, link: PeerLink, message: OpenPipeline, tokens: array[int]) -> str:
        """Have the worker open a stage for a peer; returns why that cannot be, or ""."""
        number, loop, facts = message.run, self._loop, self._loop.lane.facts
        if facts is None or not loop.up:
            return "its worker is down"
        if link.is_of_other_model:
            return "it serves another model"
        if self._is_leaving():
            return "it is leaving"
        if message.n_tokens > self._context_max:
            return f"it computes at most {self._context_max} tokens"
        if len(tokens) != (0 if message.first else message.n_tokens):
            return "tokens are for the first stage"
        ids = np.frombuffer(tokens, np.uint32)  # one below 0 is above every vocabulary
        if len(ids) and int(ids.max()) >= facts.vocab_size:
            return "a token is outside the vocabulary"
        if facts.is_whole:
            return "its model is computed as a whole"
        if message.end > len(facts.has_rows) or message.first >= message.end:
            return f"it has {len(facts.has_rows)} layers"
        if bool(message.state_interval) != bool(facts.state_bytes):
            return "its model has recurrent state, or none, unlike yours"
        n_bytes = _stage_bytes(facts, message)
        taken = sum(served.n_bytes for served in self._served.values())
        if len(self._served) >= SERVED_MAX or taken + n_bytes > self.bytes_max:
            return "it has no room for another stage"
        if number in self._served:
            return "it has a pipeline of this number"
        opened: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._served[number] = ServedStage(link.name, n_bytes, opened)
        loop.lane.note(
            wire.OpenStage(
                number, message.first, message.end, message.n_tokens,
                message.previous, message.following, link.name, message.state_interval,
            )
        )  # fmt: skip
        return ""

    async def _serve(
        self, link: PeerLink, frame: PeerFrame, message: OpenPipeline, tokens: array[int]
    ) -> None:
        """Compute a stage for a peer once the worker has opened it, and say so."""
        number = message.run
        served = self._served[number]
        try:
            async with asyncio.timeout(OPEN_S):
                why = await served.opened
        except TimeoutError:
            why = "its worker does not answer"
        if self._served.get(number) is not served:
            why = why or "it ended at once"
        elif why:
            self._end_served(number, "")
        else:
            served.timer = asyncio.get_running_loop().call_later(
                RUN_S_MAX, self._end_served, number, "it took too long"
            )
            layers, n_tokens = (message.first, message.end), message.n_tokens
            pieces = message.chunk_tokens, message.state_interval
            owner = StageOwner(link.name)
            compute_stage(self._loop, number, owner, layers, tokens, n_tokens, *pieces)
        link.reply(frame, PipelineOpened(why[:TEXT_CHARS_MAX]))

    def _end_served(self, number: int, why: str) -> None:
        """Forget a stage for a peer; the peer hears `why`, unless that is ""."""
        served = self._served.pop(number, None)
        if served is None:
            return
        if served.timer is not None:
            served.timer.cancel()
        if not served.opened.done():
            served.opened.set_result(why or "it was ended")
        self._loop.stages.remove(number)
        self._loop.lane.note(wire.CloseStage(number))
        link = self._peers.links.get(served.peer)
        if why and link is not None and link.state.is_open:
            link.send(PipelineEnded(number, why[:TEXT_CHARS_MAX]))


def compute_stage(
    loop: LaneLoop,
    number: int,
    owner: StageOwner,
    layers: tuple[int, int],
    tokens: array[int],
    n_tokens: int,
    chunk_tokens: int,
    state_interval: int,
) -> None:
    """Compute layers [first, end) for a pipeline from now on, which the lane's worker has opened.

    `tokens` are for the first stage, which waits for its owner's word; the others get none. For
    `owner`, `chunk_tokens` and `state_interval` see `StageWork`.
    """
    first, end = layers
    facts = loop.lane.facts
    share = (end - first) / len(facts.has_rows) if facts is not None else 1.0
    work = StageWork(number, share, n_tokens, chunk_tokens, tokens, state_interval, owner)
    work.arrived, work.allowed = (0, n_tokens) if first else (n_tokens, 0)
    loop.stages.add(work)
    loop.wake()


def _stage_bytes(facts: wire.ModelFacts, message: OpenPipeline) -> int:
    """The memory of a stage: its pages, and its states at the positions that are sent and two more
    (`StageStates`)."""
    page_bytes, state_bytes = facts.bytes_of(message.first, message.end)
    n_bytes = message.n_tokens // PAGE_TOKENS * page_bytes
    if message.state_interval:
        n_bytes += (-(-message.n_tokens // message.state_interval) + 2) * state_bytes
    return n_bytes
