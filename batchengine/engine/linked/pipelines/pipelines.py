"""Pipelines of this daemon: each computes pages of a prompt for one of its sessions.

A pipeline fills the store with full pages of a prompt and ends; the session then finds them by
their content, and computes the rest itself. So whatever happens to a peer costs time and nothing
else. The owner's pages come as tiles into arena slots of a session of its own, from where they are
digested and sealed like computed ones; recurrent states come as parts, which its worker writes to
files.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchengine.core import PAGE_TOKENS, BatchEngineError
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.stage_queue import StageOwner
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.engine.linked.pipelines.stages import (
    OPEN_S,
    RUN_S_MAX,
    ServedStages,
    compute_stage,
)
from batchengine.engine.linked.pipelines.states import GatheredStates
from batchengine.peers.features import STAGES
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import Peers
from batchengine.peers.transitions import LinkState
from batchengine.session import Session
from batchengine.session_kv import page_start
from batchengine.wire import lane as wire
from batchengine.wire.data import WINDOW_PAGES
from batchengine.wire.peer import (
    TEXT_CHARS_MAX,
    OpenPipeline,
    PeerFrame,
    PipelineEnded,
    PipelineGo,
    PipelineOpened,
)

log = logging.getLogger("batchengine.linked")

LOOK_S = 0.25  # between two looks while there is no news
RUNS_MAX = 4  # of this daemon's sessions at a time: others wait
FIRST_KEY = 1 << 48  # above the keys of sessions with requests


class PipelineFailed(Exception):
    """Why a pipeline ended before its last page."""


@dataclass(eq=False, slots=True)
class OwnedRun:
    """One pipeline for a prompt of this daemon. `session` has its pages; `given`, `accepted`,
    `complete` and `taken` count leading pages: named to the worker, accepted by it, gathered, and
    part of the session. `states`: of a model with recurrent state; `n_states` are done."""

    number: int
    parts: tuple[wire.Part, ...]
    chunk_tokens: int
    session: Session
    n_pages: int
    states: GatheredStates | None
    n_states: int = 0
    state: str = "opening"
    opened: set[str] = field(default_factory=set[str])
    is_gathering: bool = False
    given: int = 0
    accepted: int = 0
    allowed: int = 0  # tokens
    complete: int = 0
    taken: int = 0
    why: str = ""
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def fail(self, why: str) -> None:
        self.why = self.why or why
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises PipelineFailed when the pipeline has ended."""
        while not condition():
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self.news.wait()
            if self.why:
                raise PipelineFailed(self.why)


class Pipelines:
    """Every pipeline that this daemon has a part in. Use: `fill`; `rows` for operators."""

    def __init__(
        self,
        loop: LaneLoop,
        links: LaneLinks,
        peers: Peers,
        served: ServedStages,
    ) -> None:
        """`loop` is the lane that `links` belong to; `served` are its stages for peers."""
        self.served = served
        self._loop, self._links, self._peers = loop, links, peers
        self._owned: dict[int, OwnedRun] = {}
        self._keys = itertools.count(FIRST_KEY)
        self._seats = asyncio.Semaphore(RUNS_MAX)
        self._closing: dict[int, list[bytes]] = {}  # states that the worker may still be writing
        links.on_stage = self._on_event
        loop.stages.on_ended = self._on_stage_ended
        loop.stages.on_step = self._on_step
        peers.subscribe(self._on_message, lambda link, before: self._on_state(link))

    def __repr__(self) -> str:
        return f"<Pipelines {len(self._owned)} {self.served!r}>"

    def rows(self) -> list[dict[str, Any]]:
        """Facts about every pipeline that is under way, for operators."""
        found: list[dict[str, Any]] = [
            {
                "role": "owner",
                "state": run.state,
                "stages": [[part.peer, part.first, part.end] for part in run.parts],
                "pages": run.n_pages,
                "pages_gathered": run.complete,
            }
            for run in self._owned.values()
        ]
        return found + self.served.rows()

    def can_use(self, peer: str) -> bool:
        """Whether a peer could be a stage now."""
        link = self._peers.links.get(peer)
        return (
            link is not None
            and link.state is LinkState.UP
            and link.offers(STAGES)
            and not link.load.leaves
            and self._links.number(peer) is not None
        )

    # ------------------------------------------------------------------------------- the owner

    async def fill(
        self,
        stages: Sequence[tuple[str, int, int]],
        chunk_tokens: int,
        tokens: Sequence[int],
        session: Session,
        deadline_s: float,
        is_over: Callable[[], bool],
        on_pages: Callable[[int], None] = lambda n_pages: None,
    ) -> tuple[int, str]:
        """Have stages (peer, first layer, end) compute the full pages of `tokens` for a session,
        in chunks of at most `chunk_tokens`.

        The pages are published with the salt and priority of the session; `on_pages` hears how many
        have come. Returns how many of the leading ones are in the store by it, and why the others
        are not ("" = all are). The deadline does not include waiting for a seat.
        """
        n_pages = len(tokens) // PAGE_TOKENS
        async with self._seats:
            if is_over():
                return 0, "its request has ended"
            run = self._begin(stages, chunk_tokens, tokens[: page_start(n_pages)], session)
            try:
                async with asyncio.timeout(min(RUN_S_MAX, deadline_s)):
                    await self._open(run)
                    run.state = "computing"
                    await self._follow(run, is_over, on_pages)
            except TimeoutError:
                run.why = run.why or "it took too long"
            except (PipelineFailed, BatchEngineError, OSError) as error:
                run.why = run.why or str(error)
            finally:
                self._end(run)
        if run.why:
            log.warning("pipeline of %s: %s", session.session_id, run.why)
        return run.taken, run.why

    def _begin(
        self,
        stages: Sequence[tuple[str, int, int]],
        chunk_tokens: int,
        tokens: Sequence[int],
        session: Session,
    ) -> OwnedRun:
        own = self._own_name
        filling = Session(next(self._keys), f"pipeline of {session.session_id}", session.tenant)
        filling.tokens, filling.salt = list(tokens), session.salt
        filling.priority = session.priority
        parts = tuple(wire.Part(name or own, first, end) for name, first, end in stages)
        kv = self._loop.kv
        states = GatheredStates(kv.states, filling) if kv.states.is_used else None
        run = OwnedRun(
            secrets.randbits(63), parts, chunk_tokens, filling, len(tokens) // PAGE_TOKENS, states
        )
        self._owned[run.number] = run
        self._loop.kv.slots.enter(filling)
        return run

    @property
    def _own_name(self) -> str:
        identity = self._peers.identity
        return "" if identity is None else identity.name

    async def _open(self, run: OwnedRun) -> None:
        """Have the worker gather, and every stage open. Raises PipelineFailed or PEER_DOWN."""
        async with asyncio.timeout(OPEN_S):
            self._loop.lane.note(wire.Gather(run.number, run.parts))
            await run.until(lambda: run.is_gathering)
            names = ["", *(part.peer for part in run.parts), ""]
            opening = [
                self._open_stage(run, part, names[index], names[index + 2])
                for index, part in enumerate(run.parts)
            ]
            for error in await asyncio.gather(*opening, return_exceptions=True):
                if error is not None:
                    raise error

    async def _open_stage(
        self, run: OwnedRun, part: wire.Part, previous: str, following: str
    ) -> None:
        n_tokens = len(run.session.tokens)
        tokens = array("i", () if part.first else run.session.tokens)  # only the first stage's
        interval = 0 if run.states is None else run.states.interval
        if part.peer == self._own_name:
            names = previous, following, part.peer
            self._loop.lane.note(
                wire.OpenStage(run.number, part.first, part.end, n_tokens, *names, interval)
            )
            await run.until(lambda: part.peer in run.opened)
            layers, pieces = (part.first, part.end), (run.chunk_tokens, interval)
            owner = StageOwner(tenant=run.session.tenant)
            compute_stage(self._loop, run.number, owner, layers, tokens, n_tokens, *pieces)
            return
        link = self._peers.links.get(part.peer)
        if link is None or not self.can_use(part.peer):
            raise PipelineFailed(f"{part.peer} cannot be a stage now")
        message = OpenPipeline(
            run.number,
            part.first,
            part.end,
            n_tokens,
            run.chunk_tokens,
            previous,
            following,
            interval,
        )
        answer = (await link.request(message, tokens.tobytes(), timeout_s=OPEN_S)).message
        if not isinstance(answer, PipelineOpened):
            link.abort(f"it answered OpenPipeline with {type(answer).__name__}")
            raise PipelineFailed(f"{part.peer} gave a wrong answer")
        if answer.why:
            raise PipelineFailed(f"{part.peer} refuses: {answer.why}")

    async def _follow(
        self, run: OwnedRun, is_over: Callable[[], bool], on_pages: Callable[[int], None]
    ) -> None:
        """Give slots and take pages until all are sealed. Raises PipelineFailed."""

        def is_done() -> bool:
            if is_over():
                raise PipelineFailed("its request has ended")
            self._advance(run)
            on_pages(run.taken)
            has_states = run.states is None or run.states.is_complete
            return has_states and run.session.kv.first_open == run.n_pages

        await run.until(is_done)

    def _advance(self, run: OwnedRun) -> None:
        """Bring slots, credit and the session's pages in step with what has come."""
        kv, session, loop = self._loop.kv, run.session, self._loop
        if session.frontier != page_start(run.taken):
            raise PipelineFailed("pages of it became invalid")
        arena = kv.slots.arena
        if arena is None:
            raise PipelineFailed("the worker of this daemon has ended")
        if run.complete > run.taken:
            own = self._own_name
            writers = frozenset(
                loop.lane.name if part.peer == own else f"peer {part.peer}" for part in run.parts
            )
            for page in range(run.taken, run.complete):
                session.advance(PAGE_TOKENS, loop.lane.name)
                session.kv.writers[page] = writers
                kv.sealing.digests.add(session, page, session.kv.open[page - session.kv.first_open])
            run.taken = run.complete
            loop.wake()
        window = max(1, min(WINDOW_PAGES, arena.shape.slots // 4))
        wanted = min(run.n_pages, session.kv.first_open + window)
        while len(session.kv.codes) < wanted:
            if not kv.slots.ensure(session, page_start(len(session.kv.codes) + 1)):
                break
            loop.wake()
        first_open = session.kv.first_open
        slots = [slot for page, slot in enumerate(session.kv.open, first_open) if page >= run.given]
        ready = list(itertools.takewhile(kv.slots.is_reserved, slots))
        if ready:
            loop.lane.note(wire.GatherPages(run.number, tuple([slot.slot for slot in ready])))
            run.given += len(ready)
        until = page_start(run.accepted)
        if run.states is not None:
            run.states.completed(run.n_states)
            for note in run.states.name(run.number):
                loop.lane.note(note)
            until = min(until, run.states.limit)
        if until > run.allowed:
            run.allowed = until
            self._allow(run, until)

    def _allow(self, run: OwnedRun, until: int) -> None:
        """Let the first stage compute tokens before `until`. Raises PEER_DOWN."""
        first = run.parts[0].peer
        if first != self._own_name:
            if (link := self._peers.links.get(first)) is None:
                raise PipelineFailed(f"{first} is gone")
            link.send(PipelineGo(run.number, until))
        elif (work := self._loop.stages.get(run.number)) is not None:
            work.allowed = until
            self._loop.wake()

    def _end(self, run: OwnedRun) -> None:
        """Forget a pipeline here and at every stage. Sealed pages stay in the store."""
        run.state = "ended"
        del self._owned[run.number]
        if run.states is not None:
            self._give_up(run, run.states)
        self._loop.stages.remove(run.number)
        self._loop.lane.note(wire.CloseStage(run.number))  # before a frame that reuses its slots
        for part in run.parts:
            link = self._peers.links.get(part.peer)
            if link is not None and link.state.is_open:
                link.send(PipelineEnded(run.number, run.why[:TEXT_CHARS_MAX]))
        run.taken = len(run.session.kv.sealed)
        self._loop.close_session(run.session)

    def _give_up(self, run: OwnedRun, states: GatheredStates) -> None:
        """Gather no more states: what the worker may be writing is known once it has closed the
        pipeline."""
        states.completed(run.n_states)
        left = states.give_up()
        if not run.is_gathering:
            self._loop.kv.states.abandoned(left)
        elif left:
            self._closing[run.number] = left

    # --------------------------------------------------------------------------------- events

    def _on_event(self, event: wire.StageEvent) -> None:
        """Take the news of a stage or a gathering from the worker."""
        run = self._owned.get(event.run)
        if isinstance(event, wire.StageChanged):
            if event.why:
                self._on_stage_ended(event.run, event.why)
            elif (work := self._loop.stages.get(event.run)) is not None:
                work.arrived = event.arrived
                self._loop.wake()
            elif run is not None:
                run.opened.add(self._own_name)
                run.news.set()
            else:
                self.served.opened(event.run)
        elif run is not None:
            run.is_gathering = not event.why
            run.accepted, run.complete = event.accepted, event.complete
            run.n_states = event.states
            if event.why:
                run.fail(event.why)
            run.news.set()
        elif event.why:
            self._loop.kv.states.abandoned(self._closing.pop(event.run, ()))

    def _on_stage_ended(self, number: int, why: str) -> None:
        """A stage of this lane has ended by itself."""
        if (run := self._owned.get(number)) is not None:
            run.fail(why)
        else:
            self.served.ended(number, why)

    def _on_step(self) -> None:
        for run in self._owned.values():
            run.news.set()
        if not self._loop.lane.alive:
            self._closing = {}  # as the worker's death has ended what it was writing

    def _on_state(self, link: PeerLink) -> None:
        """End what needs a control link that was lost."""
        if link.state.is_open:
            return
        self.served.lost(link.name)
        for run in self._owned.values():
            if any(part.peer == link.name for part in run.parts):
                run.fail(f"{link.name} is gone")

    def _on_message(self, link: PeerLink, frame: PeerFrame) -> None:
        """Take a message of a peer; one that does not fit ends the link."""
        match frame.message:
            case OpenPipeline() as message:
                if message.run in self._owned:
                    link.reply(frame, PipelineOpened("it has a pipeline of this number"))
                else:
                    self.served.open(link, frame, message)
            case PipelineOpened():
                link.abort("it sent PipelineOpened, which was not asked for")
            case PipelineGo() as go:
                self.served.allow(link, go)
            case PipelineEnded() as ended:
                run = self._owned.get(ended.run)
                if run is None:
                    self.served.end(link, ended.run)
                elif any(part.peer == link.name for part in run.parts):
                    run.fail(f"{link.name}: {ended.why}")
            case _:
                return  # it is about pages or data links, whose subscribers take it
