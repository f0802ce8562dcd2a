"""An engine with the lanes `cpu` and `gpu`, or one of them, on a random model."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from batchengine.child.command import python_command
from batchengine.config import Config, LaneConfig, LimitsConfig, ModelConfig, StoreConfig
from batchengine.config.loading import STEPS_IN_FLIGHT
from batchengine.config.settings import RouterConfig
from batchengine.core import DoneEvent, ErrorEvent, GenerationRequest, Sla, SlaClass, TokenEvent
from batchengine.engine import Engine, Generation
from batchengine.lanes.gpu.device import CUBINS_DIR
from batchengine.lanes.worker_process import WORKER
from bench import report
from bench.cuda.gpus import CUBINS
from bench.models.synthetic import PRESETS, Shape, write_synthetic
from bench.simt.emulator import ROOT, compile_kernels

CPU, GPU, PART = "cpu", "gpu", "part"
EMULATED = python_command("tests.lanes.emulated_worker")
CACHE = "cache"
START_S, POLL_S = 120.0, 0.002
# An EPYC 7R13 reads a fifth as fast as the L40S beside it, 16 cores of a GPU host about a fifth as
# fast as so many multiprocessors of an H100 (`ceilings of a part` measures them).
PART_MULTIPROCESSORS = 16
GPU_THREADS = 2  # of the worker of the GPU, for what the CPU does there
ALONE_THREADS = 8  # the same, without a lane of the CPU
SPARE_CORES = 2 + GPU_THREADS  # that the lane of the CPU leaves to others


@dataclass(frozen=True, slots=True)
class Site:
    """What engines run on. vram_bytes: of the lane of the GPU."""

    emulated: bool
    tiny: bool
    context_tokens: int
    vram_bytes: int
    budget_bytes: int

    @property
    def shape(self) -> Shape:
        return PRESETS["tiny" if self.tiny else "0.6b"]

    def write_model(self, folder: Path) -> Path:
        """The model's file in a folder."""
        path = folder / "model.gguf"
        write_synthetic(path, replace(self.shape, context=max(self.context_tokens, 1024)))
        return path


def make_site(emulated: bool, tiny: bool) -> Site:
    """Sizes of a GPU of 80 GB and a host with 128 GiB, or tiny ones."""
    if tiny:
        return Site(emulated, tiny, 4096, 64 << 20, 192 << 20)
    return Site(emulated, tiny, 16384, 48 << 30, 32 << 30)


@contextlib.asynccontextmanager
async def running(
    site: Site, model: Path, folder: Path, lanes: Sequence[str], router: RouterConfig
) -> AsyncIterator[Engine]:
    """A started engine whose lanes are all ready."""
    cores = len(os.sched_getaffinity(0))
    beside = GPU_THREADS if CPU in lanes else max(1, min(ALONE_THREADS, cores - SPARE_CORES))
    made = {
        CPU: LaneConfig(name=CPU, threads=max(1, cores - SPARE_CORES), tier="bulk"),
        GPU: LaneConfig(
            name=GPU,
            kind="cuda",
            threads=beside,
            tier="fast",
            vram_bytes=site.vram_bytes,
            steps_in_flight=STEPS_IN_FLIGHT["cuda"],
        ),
    }
    made[PART] = replace(made[GPU], name=PART, multiprocessors_max=PART_MULTIPROCESSORS)
    config = Config(
        model=ModelConfig(path=str(model), id="gpu"),
        lanes=tuple(made[name] for name in lanes),
        store=StoreConfig(
            dir=str(folder / "kv"), budget_bytes=site.budget_bytes, allow_volatile=True
        ),
        limits=LimitsConfig(context_tokens=site.context_tokens),
        router=router,
        cache_dir=str(folder / CACHE),
    )
    if site.emulated:  # before a worker has a deadline
        await asyncio.to_thread(compile_kernels, ROOT / "build/simt", is_checked=False)
    engine = Engine(config, worker_command=EMULATED if site.emulated else WORKER)
    await engine.start(lambda _: None)
    try:
        await until(lambda: all(lane["state"] == "ready" for lane in engine.lanes()), START_S)
        yield engine
    finally:
        await engine.stop(0.0)


async def until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for a condition. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  the engine has no event for every fact
            await asyncio.sleep(POLL_S)


@contextlib.contextmanager
def scratch(site: Site) -> Iterator[tuple[Path, Path]]:
    """A folder for engines, in memory if there is room, and the model in it."""
    with report.memory_folder("gpu-", site.budget_bytes) as folder:
        compiled = folder / CACHE / CUBINS_DIR
        compiled.parent.mkdir(mode=0o700)
        compiled.symlink_to(CUBINS)  # so that no worker compiles them again
        yield folder, site.write_model(folder)


@dataclass(slots=True)
class Stream:
    """One answer as its reader saw it: tokens, and when each came (s)."""

    tokens: list[int] = field(default_factory=list[int])
    times: list[float] = field(default_factory=list[float])
    asked: float = 0.0
    lane: str = ""
    generation: Generation | None = None

    async def read(self, engine: Engine, request: GenerationRequest) -> None:
        """The answer to its end. Raises BatchEngineError."""
        self.asked = time.perf_counter()
        self.generation = engine.submit(request)
        async for event in self.generation:
            if isinstance(event, TokenEvent):
                self.tokens.append(event.token)
                self.times.append(time.perf_counter())
            elif isinstance(event, ErrorEvent):
                raise event.error
            elif isinstance(event, DoneEvent):
                self.lane = event.usage.lane

    def cancel(self) -> None:
        """End the answer where it is."""
        if self.generation is not None:
            self.generation.cancel()

    @property
    def ttft_ms(self) -> float:
        return (self.times[0] - self.asked) * 1000

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first."""
        n = len(self.times) - 1
        return (self.times[-1] - self.times[0]) * 1000 / n if n else 0.0


def prompt_of(site: Site, length: int, seed: Sequence[int]) -> tuple[int, ...]:
    """Random token ids; the same seed gives the same."""
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(3, site.shape.n_vocab, length).tolist())


_count = 0


def ask(
    prompt: tuple[int, ...],
    tokens: int,
    *,
    session: str | None = None,
    tenant: str = "",
    sla: SlaClass = SlaClass.STANDARD,
) -> GenerationRequest:
    """A request with a fresh id."""
    global _count
    _count += 1
    return GenerationRequest(
        f"r{_count}",
        prompt,
        tokens,
        ignore_eos=True,
        session_id=session,
        tenant=tenant,
        sla=Sla(sla),
    )
