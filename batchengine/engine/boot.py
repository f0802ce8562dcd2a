"""Starts an engine: model facts, then tokenizer and workers at once, then the store, then lanes.

Owns that order, and the set of parts (`Running`) that results. The store opens after the workers
have loaded, since its descriptor has their identity. Refuses lanes that compute other numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import secrets
import time
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchengine import errors
from batchengine.config import Config, LaneConfig
from batchengine.core import (
    PAGE_TOKENS,
    BatchEngineError,
    ContextBound,
    ModelInfo,
    ModelShape,
    Stage,
)
from batchengine.engine.audit.audit import Audit
from batchengine.engine.audit.model_files import identity_of
from batchengine.engine.audit.scrub import Maintenance
from batchengine.engine.context import ContextLimit
from batchengine.engine.housekeeping import Housekeeping
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.supervisor import (
    ModelLoader,
    WorkerSupervisor,
    cannot_start,
    store_error,
)
from batchengine.engine.lane.suspects import Suspects
from batchengine.engine.linked.lane_links import LaneLinks
from batchengine.engine.linked.pages import LinkedPages
from batchengine.engine.linked.pipelines import Pipelines, ServedStages
from batchengine.engine.linked.pipelines.queue import PipelineQueue
from batchengine.engine.linked.routes import why_unheld
from batchengine.engine.linked.rows import LinkedRows
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
from batchengine.gguf import GgufFile
from batchengine.grammar.matchers import Grammars
from batchengine.kv import Disputes
from batchengine.lanes.worker_process import Lane, LaneDied
from batchengine.peers.peers import LocalFacts, Peers
from batchengine.policy import capacity
from batchengine.policy.cost import StepCost
from batchengine.session import Session
from batchengine.text.frontend import TextFrontend
from batchengine.weights import read_spec
from batchengine.wire import lane as wire
from batchengine.wire.peer import KvFormat
from kv_store.errors import StoreError, StoreLocked
from kv_store.layout import KV_DTYPE, Descriptor, PageLayout
from kv_store.pages.extents import EXTENT_BYTES
from kv_store.store import Store, StoreSettings

log = logging.getLogger("batchengine.engine")

LOADING_STAGES = 4
STAGES_SHARE = 4  # stages for peers may take as much memory as a quarter of the KV budget
STATES_SHARE = 4  # recurrent states may take a quarter of the KV budget on disk
NO_TEMPLATE = "the model file has no chat template: ChatML is used, which it may not understand"
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
            lambda: self.linked.load(state.peer_load),
            secrets.randbits(64),
        )
        state.trouble_of += [lambda: made.text.trouble, lambda: self.peers.trouble]
        linked, loader = state.lanes[0].lane, made.loader
        self.lane_links = LaneLinks(
            linked, self.peers, lambda: loader.linked_as, self.peers.incarnation
        )
        self.linked = LinkedPages(
            state, store, self.peers, self.lane_links, self.tasks.spawn, _equal_heads(made.info)
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

    def _linked_facts(self, session: Session) -> dict[str, Any]:
        return {**self.linked_rows.of_session(session), **self.remote.facts(session)}

    def begin(self) -> None:
        """Start the lanes' tasks and all background tasks."""
        self.audit.watch_store()
        tasks = self.tasks
        for loop in self.state.lanes:
            loop.outage.evacuate = functools.partial(self.dispatcher.evacuation.begin, loop)
            tasks.spawn_vital(loop.run(), f"lane {loop.lane.name}")
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
        await asyncio.to_thread(self.store.close)
        for loop in lanes:
            loop.kv.close()  # after the store, whose page thread may still read an arena
        await self.grammars.close()
        await self.text.close()


async def start(launch: Launch) -> Running:
    """Create every part of the engine, without starting its tasks; on an error, close them all."""
    async with contextlib.AsyncExitStack() as undo:
        config, state = launch.config, launch.state
        model = Path(config.model.path)
        state.model_identity = await asyncio.to_thread(identity_of, model)
        info = await asyncio.to_thread(inspect_model, config)
        vocabulary = await asyncio.to_thread(tokenizer_hash, config.model.path)
        loader = ModelLoader(config, info.context_tokens)
        lanes = [Lane(lane_config.name, command=launch.command) for lane_config in config.lanes]
        text, facts = await _load(launch, lanes, loader, undo)
        if launch.reader:
            await _check_text(text)
        info.chat_template = text.tokenizer.chat_template or ""
        info.tool_template = text.tokenizer.tool_template or ""
        info.arith_id, info.model_hash = facts.arith_id, str(facts.identity["model_hash"])
        kv_format = PageLayout(facts.layers).kv_dtype
        info.kv_format = "" if kv_format == KV_DTYPE else kv_format  # all were KV_DTYPE once
        if text.tokenizer.chat_template is None:
            info.notes.append(NO_TEMPLATE)
        elif launch.reader and (why := await text.template_fault()):  # its processes are warm
            state.troubles["template"] = f"{why}; plain completions work"
            info.notes.append(state.troubles["template"])
        started = time.monotonic()
        store = await asyncio.to_thread(_open_store, config, facts, vocabulary)
        undo.push_async_callback(asyncio.to_thread, store.close)
        for lane in lanes:
            undo.push_async_callback(lane.close)  # runs before the store closes, which workers map
        for warning in store.warnings:
            log.warning("store: %s", warning)
        layout, budget = store.pages.layout, config.store.budget_bytes
        unheld = why_unheld(layout, _equal_heads(info), config.lanes[0].tokens_per_step)
        is_linked = bool(config.peers.listen)
        limit = ContextLimit(
            info, budget, store.pages.allocator.slots_max, (unheld or "") if is_linked else ""
        )
        if not is_linked or unheld is not None:  # else peers may hold what the store cannot
            limit.check(layout.page_bytes)
            info.notes += filter(None, [limit.fit(0)])
        journal = Journal(
            store,
            level=config.store.durability,
            finish_when_full=config.store.full_disk == "finish",
        )
        factory = LaneFactory(launch, info, text, store, journal, loader)
        loops: list[LaneLoop] = []
        for lane, lane_config in zip(lanes, config.lanes, strict=True):
            try:
                loops.append(await factory.lane(lane, lane_config))
            except OSError as error:  # of its arena, such as a limit of file sizes
                why = f"lane {lane.name}: {error.strerror or error}"
                raise errors.STORE_UNOPENED(folder=store.path, why=why) from error
            undo.callback(loops[-1].kv.close)
        detail = f"{store.path}, {store.pages.allocator.slots_max} pages"
        launch.on_stage(Stage(4, LOADING_STAGES, "kv store", detail, time.monotonic() - started))
        state.store, state.lanes[:] = store, loops
        running = Running(factory)
        await running.recovery.start(running.crash_marker)
        if running.peers.is_on:
            await running.peers.look()
            running.linked.keeper.on_room(limit.fit)
        running.peers.bind()
        undo.pop_all()
        return running


async def _load(
    launch: Launch,
    lanes: list[Lane],
    loader: ModelLoader,
    undo: contextlib.AsyncExitStack,
) -> tuple[TextFrontend, wire.ModelFacts]:
    """Load the tokenizer while the workers load one by one; report the first worker's stages.

    Beside CPU lanes, lanes on GPUs load later, as restarts: the daemon serves before. If the
    configuration requires a GPU, they load here, and GPU_REQUIRED is raised if none of them can.
    """
    config, started = launch.config, time.monotonic()
    opening = asyncio.ensure_future(TextFrontend.open(config.model.path, reader=launch.reader))
    facts: list[wire.ModelFacts] = []
    try:
        has_cpu = any(lane_config.kind == "cpu" for lane_config in config.lanes)
        for lane, lane_config in zip(lanes, config.lanes, strict=True):
            undo.push_async_callback(lane.close)
            if has_cpu and lane_config.kind == "cuda":
                continue
            report = functools.partial(_report_loading, launch, len(facts))
            try:
                facts.append(await loader.load(lane, lane_config, report))
            except LaneDied as death:
                raise cannot_start(lane.name, death) from death
        if config.require == "gpu":
            await _load_gpus(launch, lanes, loader)
    except BaseException:
        opening.cancel()
        with contextlib.suppress(BaseException):
            await (await opening).close()
        raise
    text = await opening
    undo.push_async_callback(text.close)
    detail = f"{text.tokenizer.vocab_size:,} tokens"
    launch.on_stage(Stage(3, LOADING_STAGES, "tokenizer", detail, time.monotonic() - started))
    return text, facts[0]


async def _check_text(text: TextFrontend) -> None:
    """Raises TEXT_UNAVAILABLE if no text process works: without one no request can be read."""
    try:
        await text.encode("a")
    except BatchEngineError as error:  # another one is of this tokenizer, and says so again
        if error.code == errors.TEXT_UNAVAILABLE.code:
            error.fix = "look for limits of memory and processes: ulimit -v, ulimit -u, a cgroup"
            raise


async def _load_gpus(launch: Launch, lanes: list[Lane], loader: ModelLoader) -> None:
    """Load the lanes on GPUs that have not loaded. Raises GPU_REQUIRED if none is up then."""
    failures: list[str] = []
    pairs = zip(lanes, launch.config.lanes, strict=True)
    on_gpus = [(lane, lane_config) for lane, lane_config in pairs if lane_config.kind == "cuda"]
    loaded = sum(lane.alive for lane in lanes)
    for number, (lane, lane_config) in enumerate(on_gpus, loaded):
        if lane.alive:
            continue
        try:
            await loader.load(lane, lane_config, functools.partial(_report_loading, launch, number))
        except (LaneDied, BatchEngineError, OSError) as error:
            log.error("lane %s cannot start: %s", lane.name, error)
            lane.kill("could not start")
            await lane.died()
            failures.append(f"lane {lane.name}: {cannot_start(lane.name, error).why}")
    if not any(lane.alive for lane, _ in on_gpus):
        raise errors.GPU_REQUIRED(why="; ".join(failures))


def _report_loading(launch: Launch, lane: int, message: wire.Loading) -> None:
    launch.on_progress((lane + message.progress) / len(launch.config.lanes))
    if message.detail and lane == 0:
        index = 1 if message.stage == wire.MAP_WEIGHTS else 2
        launch.on_stage(
            Stage(index, LOADING_STAGES, message.stage, message.detail, message.seconds)
        )


def _open_store(config: Config, facts: wire.ModelFacts, vocabulary: str) -> Store:
    """Open the KV store with a descriptor from the workers' facts. Raises BatchEngineError."""
    settings_of, identity = config.store, facts.identity
    layout = PageLayout(facts.layers)
    named = ("model_hash", "arch", "rope_digest")
    descriptor = Descriptor(
        model_hash=str(identity["model_hash"]),
        arith_id=facts.arith_id,
        arch=str(identity["arch"]),
        layout=layout,
        rope_digest=str(identity["rope_digest"]),
        tokenizer_hash=vocabulary,
        extra=tuple((k, str(v)) for k, v in sorted(identity.items()) if k not in named),
    )
    states_bytes = settings_of.budget_bytes // STATES_SHARE if facts.state_bytes else 0
    settings = StoreSettings(
        budget_bytes=settings_of.budget_bytes - states_bytes,
        states_bytes=states_bytes,
        extent_bytes=max(layout.page_bytes, min(EXTENT_BYTES, settings_of.budget_bytes // 8)),
        allow_any_fs=settings_of.allow_volatile,
        free_floor_bytes=settings_of.free_floor_bytes or None,
        keep_arenas=True,  # sessions of the last run import what they left open
        sessions_max=settings_of.sessions_max,
        ledger_bytes_max=settings_of.ledger_bytes_max,
    )
    try:
        return Store.open(settings_of.dir, descriptor, settings)
    except StoreLocked as error:
        raise store_error(errors.STORE_LOCKED, error) from error
    except StoreError as error:
        raise store_error(errors.STORE_UNUSABLE, error) from error
    except OSError as error:
        why = error.strerror or str(error)
        raise errors.STORE_UNOPENED(folder=settings_of.dir, why=why) from error


def _equal_heads(info: ModelInfo) -> int:
    """Query heads of each layer; 0 = layers differ."""
    return info.shape.n_head if info.shape.has_equal_heads else 0


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


def inspect_model(config: Config) -> ModelInfo:
    """Read ModelInfo from the header of the model file. Raises BatchEngineError."""
    with GgufFile(config.model.path) as gguf:
        spec = read_spec(gguf)
        n_params = sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
        banks = [tensor for name, tensor in gguf.tensors.items() if "_exps." in name]
        tables = [gguf.tensors[name] for name in spec.tables if name in gguf.tensors]
        n_bytes, found = gguf.size_bytes, Path(config.model.path).stat()
    limit = config.limits.context_tokens or spec.context_trained
    bound = ContextBound.SETTING if limit < spec.context_trained else ContextBound.MODEL
    notes: list[str] = []
    if limit > spec.context_trained:
        notes.append(
            f"ctx is {spec.context_trained:,} instead of {limit:,}: the model was trained for no"
            " longer context"
        )
    return ModelInfo(
        model_id=config.model.id or Path(config.model.path).stem,
        path=config.model.path,
        arch=spec.arch,
        n_layer=spec.n_layer,
        n_params=n_params,
        file_bytes=n_bytes,
        context_tokens=min(limit, spec.context_trained),
        context_trained=spec.context_trained,
        context_bound=bound,
        vocab_size=spec.n_vocab,
        quantisation=spec.quantisation,
        shape=ModelShape(
            n_embd=spec.n_embd,
            n_head=spec.attention.n_head,
            n_kv_head=spec.attention.n_kv_head,
            head_dim=spec.attention.head_dim,
            v_first=spec.page_layout.layers[0].v_first,
            has_equal_heads=spec.has_equal_heads,
            is_whole=spec.is_whole,
            n_layer_whole=spec.n_layer_whole,
            whole_query_dims=spec.whole_query_dims,
            whole_kv_share=spec.whole_kv_share,
            page_payload_bytes=spec.page_layout.payload_bytes,
            state_bytes=spec.state_bytes,
            n_expert=spec.experts.n_expert if spec.experts else 0,
            n_expert_used=spec.experts.n_used if spec.experts else 0,
            expert_params=sum(math.prod(tensor.shape) for tensor in banks),
            expert_bytes=sum(tensor.n_bytes for tensor in banks),
            table_params=sum(math.prod(tensor.shape) for tensor in tables),
            table_bytes=sum(tensor.n_bytes for tensor in tables),
        ),
        created=int(found.st_mtime),
        notes=notes,
    )


def prior_cost(info: ModelInfo, config: LaneConfig, facts: wire.ModelFacts | None) -> StepCost:
    """What steps of a lane are assumed to cost; `facts` are its worker's, if it has loaded."""
    shape = info.shape
    n_unused = shape.n_expert - shape.n_expert_used
    unused_params = shape.expert_params * n_unused // max(1, shape.n_expert) + shape.table_params
    experts = capacity.Experts(shape.n_expert, shape.n_expert_used, shape.expert_bytes)
    size = capacity.ModelSize(
        info.file_bytes,
        info.file_bytes - shape.expert_bytes - shape.table_bytes,
        info.n_params - unused_params,
        shape.whole_query_dims,
        shape.page_payload_bytes,
        PAGE_TOKENS,
        info.context_tokens,
        experts if shape.n_expert else None,
        shape.whole_kv_share,
        shape.state_bytes,
    )
    gpu = None if facts is None else facts.gpu
    if gpu is None:
        return capacity.prior_cost(size, capacity.unmeasured_cpu(config.threads))
    found = capacity.found_gpu(gpu.name, gpu.multiprocessors, gpu.memory_bytes)
    return capacity.prior_cost(size, found)


def tokenizer_hash(path: str) -> str:
    """Hex SHA-256 of the vocabulary; if equal, each token id has the same bytes. "" = none."""
    digest = hashlib.sha256(b"batchengine vocabulary v1")
    with GgufFile(path) as gguf:
        if "tokenizer.ggml.tokens" not in gguf.values:
            return ""
        tokens = list(gguf.strings("tokenizer.ggml.tokens"))
    digest.update(array("I", map(len, tokens)).tobytes())
    digest.update(b"".join(tokens))
    return digest.hexdigest()
