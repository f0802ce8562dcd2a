"""Starts an engine: model facts, then tokenizer and workers at once, then the store, then lanes.

Owns that order; `parts.py` has the parts that result. The store opens after the workers
have loaded, since its descriptor has their identity. Refuses lanes that compute other numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from pathlib import Path

from batchengine import errors
from batchengine.config import Config
from batchengine.core import BatchEngineError, Stage
from batchengine.engine.audit.model_files import identity_of
from batchengine.engine.context import ContextLimit
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.supervisor import (
    ModelLoader,
    cannot_start,
    store_error,
)
from batchengine.engine.linked.routes import why_unheld
from batchengine.engine.model_facts import inspect_model, tokenizer_hash
from batchengine.engine.parts import LaneFactory, Launch, Running
from batchengine.engine.turns.journal import Journal
from batchengine.lanes.worker_process import Lane, LaneDied
from batchengine.text.frontend import TextFrontend
from batchengine.wire import lane as wire
from kv_store.errors import StoreError, StoreLocked
from kv_store.layout import KV_DTYPE, Descriptor, PageLayout
from kv_store.pages.extents import EXTENT_BYTES
from kv_store.store import Store, StoreSettings

log = logging.getLogger("batchengine.engine")

LOADING_STAGES = 4
STATES_SHARE = 4  # recurrent states may take a quarter of the KV budget on disk
NO_TEMPLATE = "the model file has no chat template: ChatML is used, which it may not understand"


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
        unheld = why_unheld(layout, info.shape.equal_heads, config.lanes[0].tokens_per_step)
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
