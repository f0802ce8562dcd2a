"""How everything comes up, comes back after a worker's death, and goes down again.

Owns the order of start: model facts, then tokenizer and workers side by side, then the store
(whose identity the workers know), then one arena per worker. Refuses to serve with lanes that
disagree about numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import logging
import math
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from batchengine import cost, wire
from batchengine.config import Config, LaneConfig
from batchengine.core import BatchEngineError, ModelInfo, Stage
from batchengine.engine.journal import INCARNATIONS, Journal
from batchengine.engine.last_words import LastWords
from batchengine.engine.loop import LaneLoop, Owner
from batchengine.gguf import GgufFile
from batchengine.lanes.lane import WORKER, Lane, LaneDied
from batchengine.pages import LanePages
from batchengine.template import ChatTemplate
from batchengine.tokenizer import TextFrontend
from batchengine.weights import read_spec
from kv_store import Descriptor, PageLayout, Store, StoreError, StoreLocked, StoreSettings
from kv_store.errors import StoreFull, StoreGone
from kv_store.extent import EXTENT_BYTES

log = logging.getLogger("batchengine.engine")

T = TypeVar("T")
STAGES = 4
SPIN_US = 60  # long enough to meet the next kernel call, short enough to leave cores to others
ARENA_SHARE = 8  # open pages may take an eighth of the KV budget
PLACES_MIN = 8
REFEREE, REFEREE_PLACES = "referee", 10  # enough for one page and what may be missing before it
FAILED_STARTS_MAX = 3  # then waiting readers hear why instead of waiting on;
DOWN_MAX_S = 30.0  # a worker that was killed may come back: they wait so long at least


class OwnerOfAll(Owner, Protocol):
    """The loops' owner, which also hears of fatal errors."""

    def fail_everything(self, error: BaseException) -> None: ...


class Starter:
    """Builds lanes, store, journal and text of one engine, and takes them down."""

    def __init__(self, config: Config, owner: OwnerOfAll, command: Sequence[str] = ()) -> None:
        self._config = config
        self._owner = owner
        self._command = tuple(command) or WORKER
        self._info: ModelInfo | None = None
        self._text: TextFrontend | None = None
        self._store: Store | None = None
        self.last_words: LastWords | None = None
        self._journal: Journal | None = None
        self._identity: tuple[str, dict[str, str | int | float]] | None = None
        self._layout: PageLayout | None = None
        self._tokenizer_hash: str | None = None
        self.lanes: list[Lane] = []
        self.loops: list[LaneLoop] = []
        self._closing = False

    @property
    def info(self) -> ModelInfo:
        return _there(self._info)

    @property
    def text(self) -> TextFrontend:
        return _there(self._text)

    @property
    def store(self) -> Store:
        return _there(self._store)

    @property
    def journal(self) -> Journal:
        return _there(self._journal)

    async def start(
        self, on_stage: Callable[[Stage], None], progress: Callable[[float], None]
    ) -> None:
        """Everything up, or an error with nothing left behind (call `abandon`)."""
        config = self._config
        info = self._info = await asyncio.to_thread(inspect_model, config)
        self._tokenizer_hash = await asyncio.to_thread(tokenizer_hash, config.model.path)
        text = asyncio.ensure_future(TextFrontend.open(config.model.path, ChatTemplate))
        started = time.monotonic()
        try:
            for lane_config in config.lanes:
                lane = Lane(lane_config.name, command=self._command)
                self.lanes.append(lane)
                await self._load_lane(lane, lane_config, on_stage, progress)
            self._text = await text
        except BaseException:
            text.cancel()
            with contextlib.suppress(BaseException):
                self._text = await text
            raise
        info.has_chat_template = self._text.tokenizer.chat_template is not None
        detail = f"{self._text.tokenizer.vocab_size:,} tokens"
        on_stage(Stage(3, STAGES, "tokenizer", detail, time.monotonic() - started))
        started = time.monotonic()
        store = self._store = await asyncio.to_thread(self._open_store)
        self.last_words = LastWords(store.path)
        for warning in store.warnings:
            log.warning("store: %s", warning)
        self._journal = Journal(
            store,
            self._owner.fail_everything,
            level=config.store.durability,
            finish_when_full=config.store.full_disk == "finish",
        )
        info.context_tokens = min(info.context_tokens, store.places_max * 256)
        for lane, lane_config in zip(self.lanes, config.lanes, strict=True):
            self.loops.append(self._make_loop(lane, lane_config))
            await self._attach(self.loops[-1])
        detail = f"{store.path}, {store.places_max} pages"
        on_stage(Stage(4, STAGES, "kv store", detail, time.monotonic() - started))

    async def _load_lane(
        self,
        lane: Lane,
        config: LaneConfig,
        on_stage: Callable[[Stage], None] | None,
        progress: Callable[[float], None] | None,
    ) -> wire.Ready:
        """Spawn a worker that loads the model; report its two stages of the first lane."""

        def on_loading(message: wire.Loading) -> None:
            if progress is not None:
                progress(message.progress)
            if on_stage is not None and message.detail and lane is self.lanes[0]:
                index = 1 if message.stage == "map weights" else 2
                on_stage(Stage(index, STAGES, message.stage, message.detail, message.seconds))

        ready = await lane.start(self._load_message(config), on_loading)
        identity = (ready.arith_id, ready.identity)
        if self._identity is None:
            self._identity = identity
            self._layout = PageLayout(ready.n_layer, ready.n_kv_head, ready.head_dim)
        elif identity != self._identity:
            lane.kill("computes other numbers")
            is_file = ready.identity.get("model_hash") != self._identity[1].get("model_hash")
            raise _disagrees(lane.name, is_file=is_file)
        return ready

    def _load_message(self, config: LaneConfig) -> wire.Load:
        return wire.Load(
            model_path=str(Path(self._config.model.path).absolute()),
            cache_dir=str(Path(self._config.cache_dir or ".").absolute()),
            threads=max(1, config.threads),
            cores=config.cores,
            spin_us=SPIN_US,
            tokens_max=config.tokens_per_step,
            entries_max=config.entries_max,
            context_tokens=self.info.context_tokens,
        )

    def _open_store(self) -> Store:
        arith_id, identity = _there(self._identity)
        layout, config = _there(self._layout), self._config.store
        named = ("model_hash", "arch", "rope_digest")
        extra = tuple((k, str(v)) for k, v in sorted(identity.items()) if k not in named)
        descriptor = Descriptor(
            model_hash=str(identity["model_hash"]),
            arith_id=arith_id,
            arch=str(identity["arch"]),
            layout=layout,
            rope_digest=str(identity["rope_digest"]),
            tokenizer_hash=_there(self._tokenizer_hash),
            extra=extra,
        )
        settings = StoreSettings(
            budget_bytes=config.budget_bytes,
            extent_bytes=max(layout.page_bytes, min(EXTENT_BYTES, config.budget_bytes // 8)),
            allow_any_fs=config.allow_volatile,
            free_floor_bytes=config.free_floor_bytes or None,
            keep_arenas=True,  # sessions of the last life adopt what they left open
            sessions_max=config.sessions_max,
        )
        try:
            return Store.open(config.dir, descriptor, settings)
        except StoreLocked as error:
            raise _store_error("BE1601", error, "store_locked") from error
        except StoreError as error:
            raise _store_error("BE1602", error, "store_unusable") from error
        except OSError as error:
            raise BatchEngineError(
                "BE1603",
                f"the KV store {config.dir} cannot be opened",
                why=error.strerror or str(error),
                fix="choose another directory with --store, or fix its permissions",
                api_code="store_unusable",
            ) from error

    def _make_loop(self, lane: Lane, config: LaneConfig) -> LaneLoop:
        """The loop of a lane, and the threads' way to wake it."""
        event_loop = asyncio.get_running_loop()
        made: list[LaneLoop] = []

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                event_loop.call_soon_threadsafe(made[0].wake)

        pages = LanePages(
            self.store,
            self.store.repr_id,
            wake,
            self.journal.note,
            lambda session: made[0].session_cut(session),
        )
        loop = LaneLoop(lane, pages, config, self._owner, self.store.places_max)
        prior = cost.prior_cost(self.info.file_bytes, self.info.n_params, config.threads)
        loop.cost = cost.CostModel(prior)
        made.append(loop)
        return loop

    async def _attach(self, loop: LaneLoop) -> None:
        """A new arena for the worker that is up, mapped by it."""
        lane, layout = loop.lane, _there(self._layout)
        places = loop.config.places or min(
            3 * loop.config.entries_max + 16,
            max(PLACES_MIN, self._config.store.budget_bytes // ARENA_SHARE // layout.page_bytes),
        )
        number = self.store.epoch * INCARNATIONS + lane.incarnation
        create = functools.partial(self.store.create_arena, lane.name, number, places)
        try:
            try:
                arena = await asyncio.to_thread(create)
            except StoreFull:  # rows of earlier lives are worth less than a worker
                loop.pages.forsake_dead_arenas()
                await asyncio.to_thread(self.store.attic.sweep, everything=True)
                arena = await asyncio.to_thread(create)
        except StoreGone as error:
            raise _store_error("BE1607", error, "store_gone") from error
        except StoreError as error:
            raise _store_error("BE1604", error, "store_full") from error
        try:
            await lane.attach(
                wire.Attach(
                    arena.path,
                    places,
                    layout.page_bytes,
                    f"{self.store.path}/ext",
                    f"{self.store.path}/arena",
                )
            )
        except BaseException:
            lane.kill("could not map its arena")
            await lane.died()
            arena.close(delete=True)
            raise
        loop.pages.attach(arena)

    async def revive(self, loop: LaneLoop) -> None:
        """Start the next worker of a lane; tries until it works or the engine stops."""
        lane, failures, down_since = loop.lane, 0, time.monotonic()
        while not loop.stopping and not self._closing:
            await asyncio.sleep(lane.backoff_s())
            started = time.monotonic()
            loop.pages.poll()  # the dead worker's arena goes once its last seals have ended
            try:
                await self._load_lane(lane, loop.config, None, None)
                await self._attach(loop)
            except (LaneDied, BatchEngineError, OSError) as error:
                failures += 1
                log.error("lane %s cannot start: %s", lane.name, error)
                lane.kill("could not start")
                await lane.died()
                is_stuck = not isinstance(error, LaneDied) or started - down_since > DOWN_MAX_S
                if failures >= FAILED_STARTS_MAX and is_stuck:  # now, and at every later failure
                    loop.down = str(error)
                    loop.fail_turns(_cannot_start(lane.name, error))
            else:
                loop.down = ""
                seconds = time.monotonic() - started
                log.warning("%r is back after %.2f s", lane, seconds)
                return

    @contextlib.asynccontextmanager
    async def referee(self) -> AsyncGenerator[LaneLoop]:
        """A lane of a fresh worker that serves nobody: a third opinion on one page."""
        config = dataclasses.replace(self._config.lanes[0], name=REFEREE, places=REFEREE_PLACES)
        lane = Lane(REFEREE, command=self._command)
        try:
            await self._load_lane(lane, config, None, None)
            loop = self._make_loop(lane, config)
            await self._attach(loop)
            running = asyncio.create_task(loop.run())
            try:
                yield loop
            finally:
                loop.stopping = True
                loop.wake()
                await asyncio.wait([running])
                loop.pages.close()
        finally:
            await lane.close()

    async def close(self) -> None:
        """Workers first (they map the store), then the store, then the text."""
        self._closing = True
        await asyncio.gather(*(lane.close() for lane in self.lanes))
        if self.last_words is not None:
            self.last_words.close()
        if self._store is not None:
            await asyncio.to_thread(self._store.close)
        for loop in self.loops:
            loop.pages.close()  # after the store, whose page thread may still read an arena
        if self._text is not None:
            await self._text.close()

    async def abandon(self) -> None:
        """Take down whatever a failed start left."""
        with contextlib.suppress(Exception):
            await self.close()


def inspect_model(config: Config) -> ModelInfo:
    """Facts from the header of the model file; BatchEngineError if it cannot be served."""
    with GgufFile(config.model.path) as gguf:
        spec = read_spec(gguf)
        n_params = sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
        file_bytes = Path(config.model.path).stat().st_size
    limit = config.limits.context_tokens or spec.context_trained
    return ModelInfo(
        model_id=config.model.id or Path(config.model.path).stem,
        path=config.model.path,
        arch=spec.arch,
        n_layer=spec.n_layer,
        n_params=n_params,
        file_bytes=file_bytes,
        context_tokens=min(limit, spec.context_trained),
        context_trained=spec.context_trained,
        vocab_size=spec.n_vocab,
        quantisation=spec.quantisation,
        has_chat_template=False,
        details={
            "name": spec.name,
            "n_embd": spec.n_embd,
            "n_head": spec.n_head,
            "n_kv_head": spec.n_kv_head,
            "head_dim": spec.head_dim,
        },
    )


def tokenizer_hash(path: str) -> str:
    """Hex SHA-256 of the vocabulary: equal = a token id means the same bytes. "" = none."""
    digest = hashlib.sha256(b"batchengine vocabulary v1")
    with GgufFile(path) as gguf:
        if "tokenizer.ggml.tokens" not in gguf.values:
            return ""
        tokens = gguf.strings("tokenizer.ggml.tokens")[:]
    digest.update(array("I", map(len, tokens)).tobytes())
    digest.update(b"".join(tokens))
    return digest.hexdigest()


def _there(value: T | None) -> T:
    if value is None:
        raise RuntimeError("used before the engine started")
    return value


def _store_error(code: str, error: StoreError, api_code: str) -> BatchEngineError:
    return BatchEngineError(
        code, error.what, why=error.why, fix=error.fix, http_status=503, api_code=api_code
    )


def _disagrees(lane: str, *, is_file: bool) -> BatchEngineError:
    """A worker whose KV would not be this daemon's."""
    if is_file:
        return BatchEngineError(
            "BE1210",
            f"lane {lane} loaded another model than this daemon serves",
            why="the model file was written or replaced since the daemon started",
            fix="restart the daemon to serve what is in the file now, or put the old file back",
        )
    return BatchEngineError(
        "BE1210",
        f"lane {lane} does not agree with this daemon about the model's numbers",
        why="its self-test differs from what the KV was computed with",
        fix="restart the daemon; if it repeats, check the processor",
    )


def _plainly(error: BaseException) -> str:
    """What happened and why, without the code and the fix of an error inside another."""
    if not isinstance(error, BatchEngineError):
        return str(error)
    return f"{error.what}: {error.why}" if error.why else error.what


def _cannot_start(lane: str, error: BaseException) -> BatchEngineError:
    return BatchEngineError(
        "BE1211",
        f"the worker of lane {lane} cannot be started again",
        why=_plainly(error),
        fix=(isinstance(error, BatchEngineError) and error.fix) or "look into the daemon's log",
        http_status=503,
        api_code="lane_down",
    )
