"""Starts workers: each loads the model and maps an arena.

Owns the identity (model, arithmetic) that every worker must have, and the attempts to start a
lane's next worker. Refuses a worker with another identity.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from batchengine import errors
from batchengine.config import Config, LaneConfig
from batchengine.core import BatchEngineError
from batchengine.kv import LaneKv
from batchengine.lanes.state_memory import states_at_rest, states_of_seats
from batchengine.lanes.worker_process import Lane, LaneDied
from batchengine.peers.identity import Identity, files_of, identity_of
from batchengine.policy.capacity import open_pages
from batchengine.policy.cost import CostModel, StepCost
from batchengine.wire import lane as wire
from kv_store.errors import StoreError, StoreFull, StoreGone
from kv_store.ledger.continuity import arena_number
from kv_store.store import Store

log = logging.getLogger("batchengine.lane")

SPIN_US = 60  # longer than between two kernel calls, short enough to leave cores to others
FAILED_STARTS_MAX = 3  # failed starts, after which turns fail
DOWN_MAX_S = 30.0  # earliest such failure if the worker died
OnLoading = Callable[[wire.Loading], None]
PriorCost = Callable[[LaneConfig, wire.ModelFacts | None], StepCost]  # None: it has not loaded


class ModelLoader:
    """Has workers load the model; every worker must have the identity of the first one.

    The worker of the first lane of the configuration takes part in data links to other daemons.
    """

    def __init__(self, config: Config, context_tokens: int) -> None:
        self._config = config
        self._context_tokens = context_tokens
        self.linked_as: Identity | None = None  # what the linked worker has loaded; None: no links
        self._identity: tuple[str, dict[str, str | int | float]] | None = None

    async def load(
        self, lane: Lane, config: LaneConfig, on_loading: OnLoading | None = None
    ) -> wire.ModelFacts:
        """Spawn the lane's next worker. Raises LaneDied, or BatchEngineError if it cannot load
        the model or computes other numbers than the first worker."""
        links = None
        if self._config.peers.listen and config.name == self._config.lanes[0].name:
            links = await self._read_links()
        facts = await lane.start(self._message(config, links), on_loading)
        identity = (facts.arith_id, facts.identity)
        if self._identity is None:
            self._identity = identity
        elif identity != self._identity:
            lane.kill("computes other numbers")
            if facts.identity.get("model_hash") != self._identity[1].get("model_hash"):
                raise errors.LANE_OTHER_MODEL(lane=lane.name)
            raise errors.LANE_DISAGREES(lane=lane.name)
        return facts

    async def _read_links(self) -> wire.LinkIdentity | None:
        """What the next worker of the linked lane proves to peers; None: it has no data links."""
        config, self.linked_as = self._config.peers, None
        try:
            self.linked_as = await asyncio.to_thread(identity_of, config)
        except BatchEngineError as error:
            log.warning("no data links to other daemons: %s", error)
            return None
        return files_of(self.linked_as, config)

    def _message(self, config: LaneConfig, links: wire.LinkIdentity | None) -> wire.Load:
        return wire.Load(
            model_path=str(Path(self._config.model.path).absolute()),
            cache_dir=str(Path(self._config.cache_dir or ".").absolute()),
            device=_resources(config),
            tokens_max=config.tokens_per_step,
            entries_max=config.entries_max,
            context_tokens=self._context_tokens,
            links=links,
            steps_in_flight=config.steps_in_flight,
        )


def _resources(config: LaneConfig) -> wire.Resources:
    threads = max(1, config.threads)
    if config.kind == "cuda":
        return wire.CudaResources(
            config.device,
            config.vram_bytes,
            config.multiprocessors_max,
            threads,
            config.cores,
            SPIN_US,
        )
    return wire.CpuResources(threads, config.cores, SPIN_US)


class WorkerSupervisor:
    """Starts the next worker of a lane, with an arena of the open store."""

    def __init__(
        self, loader: ModelLoader, store: Store, budget_bytes: int, prior: PriorCost
    ) -> None:
        """`prior`: what a lane's steps are assumed to cost until they were measured."""
        self._loader = loader
        self._prior = prior
        self._store = store
        self._budget_bytes = budget_bytes

    async def restart(self, lane: Lane, config: LaneConfig, kv: LaneKv, cost: CostModel) -> None:
        """Start the lane's next worker. Raises LaneDied, BatchEngineError or OSError."""
        cost.assume(self._prior(config, await self._loader.load(lane, config)))
        await self.attach(lane, config, kv)

    async def attach(self, lane: Lane, config: LaneConfig, kv: LaneKv) -> None:
        """Create an arena, have the lane's worker map it, and give it to `kv`."""
        store, layout = self._store, self._store.pages.layout
        state_bytes = lane.facts.state_bytes if lane.facts is not None else 0
        at_rest = _at_rest(config, state_bytes, self._budget_bytes)
        states = states_of_seats(config.entries_max, config.steps_in_flight) + at_rest
        slots = config.open_pages or open_pages(
            config.entries_max, self._budget_bytes, layout.page_bytes
        )
        number = arena_number(store.epoch, lane.incarnation)
        create = functools.partial(store.create_arena, lane.name, number, slots)
        try:
            try:
                arena = await asyncio.to_thread(create)
            except StoreFull:  # make room: give up open rows of earlier workers
                kv.drop_dead_arenas()
                await asyncio.to_thread(store.orphaned.sweep)
                arena = await asyncio.to_thread(create)
        except StoreGone as error:
            raise store_error(errors.STORE_GONE, error) from error
        except StoreError as error:
            raise store_error(errors.STORE_FULL, error) from error
        try:
            await lane.attach(
                wire.Attach(
                    arena.path,
                    slots,
                    layout.page_bytes,
                    f"{store.path}/ext",
                    f"{store.path}/arena",
                    states if state_bytes else 0,
                    state_bytes,
                    "" if store.states is None else store.states.folder,
                )
            )
        except BaseException:
            lane.kill("could not map its arena")
            await lane.died()
            arena.close(delete=True)
            raise
        kv.slots.attach(arena)
        kv.states.attach(states, state_bytes, at_rest)


def _at_rest(config: LaneConfig, state_bytes: int, budget_bytes: int) -> int:
    """How many states of sessions at rest a lane's worker keeps: in a part of the store's budget,
    or of what the lane may take of a GPU."""
    memory_bytes = config.vram_bytes if config.kind == "cuda" else budget_bytes
    return states_at_rest(config.entries_max, memory_bytes, state_bytes)


def store_error(row: errors.Problem, error: StoreError) -> BatchEngineError:
    """Return the engine's error `row` with the texts of a store's error."""
    return row(what=error.what, why=error.why, fix=error.fix)


def cannot_start(lane: str, error: BaseException) -> BatchEngineError:
    """Return LANE_DOWN for a lane whose worker repeatedly failed to start."""
    why, fix = str(error), "look into the daemon's log"
    if isinstance(error, BatchEngineError):  # without its code: the text goes into another error
        why = f"{error.what}: {error.why}" if error.why else error.what
        fix = error.fix or fix
    return errors.LANE_DOWN(lane=lane, why=why, fix=fix)


class Outage:
    """What is known of the missing worker of one lane. Use: set `why`, then `end`.

    `news` is set when turns should go to other lanes: the worker of a GPU has ended, or none could
    start. `failure` is the error of the turns that no other lane takes; None = they wait.
    """

    def __init__(
        self,
        lane: Lane,
        config: LaneConfig,
        kv: LaneKv,
        cost: CostModel,
        supervisor: WorkerSupervisor,
    ) -> None:
        self.why = ""  # the last worker ended or did not start; "" once one has started
        self.failed_starts = 0  # in a row
        self.failure: BatchEngineError | None = None
        self.news = asyncio.Event()
        self._lane, self._config, self._kv = lane, config, kv
        self._cost, self._supervisor = cost, supervisor

    def __repr__(self) -> str:
        return f"<Outage {self._lane!r} failed_starts={self.failed_starts} {self.why!r}>"

    @property
    def is_down(self) -> bool:
        """Whether turns fail, unless other lanes take them."""
        return self.failure is not None

    @property
    def may_be_the_lane(self) -> bool:
        """Whether a lane, rather than a session, may have ended its worker: a GPU, or one on which
        no worker starts. Suspects then prove themselves on another lane."""
        return self._config.kind == "cuda" or self.failed_starts > 0

    async def end(self, stops_within: Callable[[float], Awaitable[bool]]) -> None:
        """Start the next worker; retry until it is up, or `stops_within` a time returns True.

        Turns of a GPU do not wait for its weights, nor those of a lane that cannot start: other
        lanes take them. They end with the reason if no other lane is up.
        """
        lane, down_since = self._lane, time.monotonic()
        if self._config.kind == "cuda":
            self.news.set()
        while not await stops_within(lane.backoff_s()):
            started = time.monotonic()
            self._kv.poll()  # the dead worker's arena goes once its last seals have ended
            try:
                await self._supervisor.restart(lane, self._config, self._kv, self._cost)
            except (LaneDied, BatchEngineError, OSError) as error:
                log.error("lane %s cannot start: %s", lane.name, error)
                lane.kill("could not start")
                await lane.died()
                self.failed_starts, self.why = self.failed_starts + 1, str(error)
                is_stuck = not isinstance(error, LaneDied) or started - down_since > DOWN_MAX_S
                if self.failed_starts >= FAILED_STARTS_MAX and is_stuck:  # and at later failures
                    self.failure = cannot_start(lane.name, error)
                self.news.set()
            else:
                self.why, self.failed_starts, self.failure = "", 0, None
                log.warning("%r is back after %.2f s", lane, time.monotonic() - started)
                return
