"""The parts of an engine that has started, each with what it needs of the others.

Owns their wiring (`Running`), and how lanes are made on the open store (`LaneFactory`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from batchengine.config import Config, LaneConfig
from batchengine.core import (
    ModelInfo,
    Stage,
)
from batchengine.engine.audit.audit import Audit
from batchengine.engine.audit.scrub import Maintenance
from batchengine.engine.housekeeping import Housekeeping
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.supervisor import (
    ModelLoader,
    WorkerSupervisor,
)
from batchengine.engine.lane.suspects import Suspects
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.engine.linked.pages import LinkedPages
from batchengine.engine.linked.pipelines import Pipelines, ServedStages
from batchengine.engine.linked.pipelines.queue import PipelineQueue
from batchengine.engine.linked.rows import LinkedRows
from batchengine.engine.model_facts import prior_cost
from batchengine.engine.placement.decision_log import DecisionLog
from batchengine.engine.placement.dispatcher import Dispatcher
from batchengine.engine.placement.migration import Migrator, OnPoint
from batchengine.engine.placement.plans import PeerPlans
from batchengine.engine.remote.away import AwayTurns
from batchengine.engine.remote.served import ServedTurns
from batchengine.engine.remote.turns import RemoteTurns
from batchengine.engine.sessions.crash_marker import CrashMarker
from batchengine.engine.sessions.erasing import LedgerCleaning
from batchengine.engine.sessions.grammar import TurnGrammars
from batchengine.engine.sessions.operations import SessionOperations
from batchengine.engine.sessions.parking import Parking
from batchengine.engine.sessions.past.turns import PastTurns
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.sessions.requests import Requests
from batchengine.engine.sessions.timelines.appending import Appending
from batchengine.engine.sessions.timelines.families import Families
from batchengine.engine.sessions.timelines.outline import Outlines
from batchengine.engine.state import EngineState
from batchengine.engine.tasks import Tasks
from batchengine.engine.turns.journal import Journal
from batchengine.grammar.matchers import Grammars
from batchengine.kv import Disputes
from batchengine.lanes.worker_process import Lane
from batchengine.peers.peers import LocalFacts, Peers
from batchengine.session import Session
from batchengine.text.frontend import TextFrontend
from batchengine.wire.peer import KvFormat, PeerLoad
from kv_store.store import Store

STAGES_SHARE = 4  # stages for peers may take as much memory as a quarter of the KV budget
FRESH, FRESH_SLOTS = "fresh", 10  # slots for one page and the pages that may be missing before it


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments of `start`."""

    config: Config
    state: EngineState
    command: tuple[str, ...]  # the worker program
    reader: str  # of the text processes
    on_stage: Callable[[Stage], None]
    on_progress: Callable[[float], None]
    on_point: OnPoint


@dataclass(eq=False)
class LaneFactory:
    """Creates lanes on the open store: those of the configuration, and fresh workers for audits."""

    launch: Launch
    info: ModelInfo
    text: TextFrontend
    store: Store
    journal: Journal
    loader: ModelLoader

    def __post_init__(self) -> None:
        self.disputes = Disputes(self.store)
        self.suspects = Suspects(self.store, self.journal)
        budget_bytes = self.launch.config.store.budget_bytes
        self.prior = functools.partial(prior_cost, self.info)
        self.supervisor = WorkerSupervisor(self.loader, self.store, budget_bytes, self.prior)

    async def lane(
        self, lane: Lane, config: LaneConfig, disputes: Disputes | None = None
    ) -> LaneLoop:
        """Return the loop of a lane, with a new arena attached if its worker has loaded."""
        loop = LaneLoop(
            lane,
            self.store,
            config,
            disputes=disputes or self.disputes,
            text=self.text,
            journal=self.journal,
            suspects=self.suspects,
            supervisor=self.supervisor,
            metrics=self.launch.state.metrics,
            cost=self.prior(config, lane.facts),
            weights={key.name: key.weight for key in self.launch.config.auth},
        )
        if lane.alive:
            await self.supervisor.attach(lane, config, loop.kv)
        return loop

    @contextlib.asynccontextmanager
    async def fresh_worker(self) -> AsyncGenerator[LaneLoop]:
        """Start a lane with a new worker that serves no request: one more vote in an audit."""
        config = dataclasses.replace(
            self.launch.config.lanes[0], name=FRESH, kind="cpu", open_pages=FRESH_SLOTS
        )
        lane = Lane(FRESH, command=self.launch.command)
        try:
            await self.loader.load(lane, config)
            loop = await self.lane(lane, config, Disputes(self.store))
            running = asyncio.create_task(loop.run())
            try:
                yield loop
            finally:
                loop.stop()
                await asyncio.wait([running])
                loop.kv.close()
        finally:
            await lane.close()


class Running:
    """The parts of an engine that has started."""

    def __init__(self, made: LaneFactory) -> None:
        launch, store, journal = made.launch, made.store, made.journal
        state = launch.state
        self.info, self.text, self.state = made.info, made.text, state
        self.store, self.journal = store, journal
        self.disputes, self.supervisor = made.disputes, made.supervisor
        self.tasks = Tasks()
        self.crash_marker = CrashMarker(store.path)
        self.recovery = SessionRecovery(state, store, journal, made.suspects)
        self.migrator = Migrator(state, journal, launch.on_point)
        self.peers = Peers(
            launch.config.peers,
            _local_facts(made.info, store),
            self._load_for,
            secrets.randbits(64),
        )
        state.trouble_of += [lambda: made.text.trouble, lambda: self.peers.trouble]
        linked, loader = state.lanes[0].lane, made.loader
        self.lane_links = LaneLinks(
            linked, self.peers, lambda: loader.linked_as, self.peers.incarnation
        )
        self.linked = LinkedPages(
            state, store, self.peers, self.lane_links, self.tasks.spawn, made.info.shape.equal_heads
        )
        served = ServedStages(
            state.lanes[0],
            self.peers,
            self.tasks.spawn,
            lambda: state.leaving,
            bytes_max=launch.config.store.budget_bytes // STAGES_SHARE,
            context_max=made.info.context_tokens,
        )
        self.pipelines = Pipelines(state.lanes[0], self.lane_links, self.peers, served)
        self.linked_rows = LinkedRows(self.linked, self.lane_links, self.peers, self.pipelines)
        decisions, queue, spawn = DecisionLog(), PipelineQueue(), self.tasks.spawn
        away = AwayTurns(state, store, self.peers, self.linked, decisions, made.info, spawn)
        self.plans = PeerPlans(
            state.lanes[0],
            self.peers,
            self.pipelines,
            self.linked.keeper,
            queue,
            made.info,
            away.expect,
        )
        self.dispatcher = Dispatcher(state, self.migrator, self.plans, decisions, queue, spawn)
        self.audit = Audit(state, store, made.disputes, made.fresh_worker)
        n_vocab = made.text.tokenizer.vocab_size
        self.maintenance = Maintenance(state, store, self.recovery, self.audit, n_vocab)
        self.parking = Parking(state)
        self.grammars = Grammars(str(made.text.tokenizer.path.absolute()))
        self.requests = Requests(
            state,
            made.info,
            made.text,
            TurnGrammars(state, self.grammars),
            journal,
            self.recovery,
            self.dispatcher,
            self.parking,
            self.tasks,
            self.maintenance.check_model,
        )
        cleaning = LedgerCleaning(store.ledger)
        self.operations = SessionOperations(
            state, store, journal, self.recovery, self.requests, self.parking, made.text, cleaning
        )
        self.past_turns = PastTurns(state, store, self.recovery, made.text, cleaning)
        self.appending = Appending(
            state,
            self.recovery,
            self.past_turns,
            made.text.tokenizer.eog,
            made.info,
        )
        outlines = Outlines(made.text.tokenizer)
        self.families = Families(
            state, self.recovery, self.requests, self.appending, self.parking, outlines
        )
        served_turns = ServedTurns(state, self.requests.submit, made.info, spawn)
        self.remote = RemoteTurns(away, served_turns, self.peers)
        state.held_facts = self._linked_facts
        self.housekeeping = Housekeeping(
            state, store, self.dispatcher, self.peers, self.linked_rows
        )

    def _load_for(self, peer: str) -> PeerLoad:
        """The load that a peer learns."""
        lane = self.dispatcher.load_of(self.state.lanes[0])
        return self.linked.load(self.state.peer_load, lane, peer)

    def _linked_facts(self, session: Session) -> dict[str, Any]:
        return {**self.linked_rows.of_session(session), **self.remote.facts(session)}

    def begin(self) -> None:
        """Start the lanes' tasks and all background tasks."""
        self.audit.watch_store()
        tasks = self.tasks
        for loop in self.state.lanes:
            tasks.spawn_vital(loop.run(), f"lane {loop.lane.name}")
            tasks.spawn_vital(self.dispatcher.evacuation.follow(loop), "evacuations")
        tasks.spawn_vital(self.journal.run(), "journal")
        tasks.spawn_vital(self.housekeeping.run(), "housekeeping")
        tasks.spawn(self.recovery.tidy(), "tidy")
        tasks.spawn_vital(self.audit.run(), "audit")
        self.maintenance.start(tasks.spawn)
        tasks.spawn(self.peers.run(), "peers")
        if self.peers.is_on:
            tasks.spawn_vital(self.lane_links.run(), "data links")
            tasks.spawn_vital(self.linked.keeper.run(), "routes of pages")
            tasks.spawn_vital(self.plans.run(), "pipeline plans")

    async def close(self) -> None:
        """Close the workers first (they map the store), then the store, then the text frontend."""
        lanes = self.state.lanes
        await asyncio.gather(*(loop.lane.close() for loop in lanes))
        self.crash_marker.close()
        await asyncio.to_thread(self.store.end_reading)
        try:
            for loop in lanes:  # first: a full disk has room for the last commit then
                loop.kv.close()
        finally:
            await asyncio.to_thread(self.store.close)
        await self.grammars.close()
        await self.text.close()


def _local_facts(info: ModelInfo, store: Store) -> LocalFacts:
    """What peers compare: two daemons with these ids equal compute the same pages."""
    descriptor = store.pages.descriptor
    return LocalFacts(
        info.model_id,
        descriptor.model_hash,
        descriptor.arith_id,
        store.pages.repr_id.hex(),
        KvFormat(descriptor.to_json(), info.shape.n_head),
    )
