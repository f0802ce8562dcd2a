"""Prefill of prompts by two daemons of one core each, each with some layers, against one core.

Two engines with one worker each, linked over loopback, which are all one machine has to offer: the
link costs what loopback costs. A set of new prompts of class batch is sent at once to the first
daemon, once while it may use pipelines and once, as another tenant, while it may not; the time is
that from the first request to the last first token. Both answers of a prompt must be equal.

speedup_2: time of one core over that of two. bubble: the share of both cores' time that is not
needed by one core for the same, that is 1 - speedup / 2: filling and emptying the pipeline, the
layers' rounding, frames, and what sealing takes. apart_2: the same ratio when each daemon computes
half of the prompts alone, which is what the machine gives two processes that share nothing; the
engines and the reader of this bench need the same cores. cpu_2: the processor time of the one
worker over that of the busier of the two, which other load on the machine changes least, and which
does not count the time in which a stage waits.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

import kernels
from batchengine.config import (
    Config,
    LaneConfig,
    LimitsConfig,
    ModelConfig,
    PeersConfig,
    StoreConfig,
)
from batchengine.core import (
    PAGE_TOKENS,
    ErrorEvent,
    GenerationRequest,
    Sla,
    SlaClass,
    TokenEvent,
)
from batchengine.engine import Engine
from batchengine.policy.router import RouteState
from batchengine.session import Session
from bench import report
from bench.engine import DISK, synthetic_model
from service.cli.local.cluster import free_ports

NAMES = ("a", "b")
ANSWER = 4  # tokens
WARM_UP = 4  # prompts of each daemon
REPORT_S = 1.5  # until a load report says how fast a daemon was, and that it is idle again
POLLS = 100  # for a plan, before they are measured again


@contextlib.asynccontextmanager
async def linked(path: Path, folder: Path, context: int) -> AsyncGenerator[list[Engine]]:
    """Two engines with a data link and a planned pipeline; each worker has a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
    engines: list[Engine] = []
    try:
        for index, name in enumerate(NAMES):
            other = NAMES[1 - index]
            peers = folder / name / "peers.d"
            peers.mkdir(parents=True)
            (peers / f"{other}.toml").write_text(f'address = "127.0.0.1:{ports[other]}"\n')
            core = (cores[index],) if len(cores) > 1 else ()
            config = Config(
                model=ModelConfig(path=str(path), id="pipeline"),
                lanes=(LaneConfig("cpu", threads=1, cores=core, tier="any"),),
                store=StoreConfig(
                    dir=str(folder / name / "kv"), budget_bytes=4 << 30, allow_volatile=True
                ),
                limits=LimitsConfig(context_tokens=context),
                peers=PeersConfig(
                    listen=f"127.0.0.1:{ports[name]}",
                    name=name,
                    dir=str(folder / name),
                    tls=False,
                ),
                cache_dir=str(DISK if DISK.is_dir() else folder),
            )
            engine = Engine(config)
            await engine.start(lambda _: None)
            engines.append(engine)
        yield engines
    finally:
        for engine in engines:
            await engine.stop(0.0)


def alone(state: RouteState, session: Session | None = None, *, remote: bool = True) -> RouteState:
    """What a daemon without peers shows the router: in place of `PeerPlans.with_peers`."""
    return state


class Arms:
    """The same prompts with and without pipelines."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.plans = engine.running.plans
        self.with_peers = self.plans.with_peers
        self.count = 0

    async def planned(self, warm: Callable[[], Awaitable[None]]) -> None:
        """Wait for a plan. `warm` computes on each daemon alone: again, as long as speeds that were
        measured beside other programs make one daemon the best plan."""
        async with asyncio.timeout(60):
            while not await self._is_planned():
                await warm()

    async def _is_planned(self) -> bool:
        for _ in range(POLLS):
            if self.plans.facts.pipeline is not None:
                return True
            await asyncio.sleep(0.05)
        return False

    async def run(
        self, prompts: list[tuple[int, ...]], tenant: str, helper: Engine | None = None
    ) -> tuple[float, list[Any]]:
        """Seconds until all prompts are computed, and the answers; a pipeline is for tenant `two`.

        `helper` gets every second prompt, if it is given.
        """
        self.plans.with_peers = self.with_peers if tenant == "two" else alone
        engines = [self.engine, helper or self.engine]
        began = time.perf_counter()
        found = await asyncio.gather(
            *(
                self._read(engines[index % 2], prompt, tenant)
                for index, prompt in enumerate(prompts)
            )
        )
        return max(first for first, _ in found) - began, [tokens for _, tokens in found]

    async def _read(
        self, engine: Engine, prompt: tuple[int, ...], tenant: str
    ) -> tuple[float, list[int]]:
        self.count += 1
        asked = GenerationRequest(
            f"{tenant}-{self.count}",
            prompt,
            ANSWER,
            ignore_eos=True,
            sla=Sla(SlaClass.BATCH),
            tenant=tenant,
        )
        tokens, first = list[int](), 0.0
        async for event in engine.submit(asked):
            if isinstance(event, TokenEvent):
                first = first or time.perf_counter()
                tokens.append(event.token)
            elif isinstance(event, ErrorEvent):
                raise event.error
        return first, tokens


async def measure(
    path: Path, folder: Path, tokens: int, n_prompts: int, repeats: int
) -> dict[str, Any]:
    """Interleaved runs of both arms, the first of each left out."""
    rng = np.random.default_rng(12)
    async with linked(path, folder, tokens + 512) as engines:
        arms, n_vocab = Arms(engines[0]), engines[0].info.vocab_size

        async def warm() -> None:
            for _ in range(WARM_UP):  # so that both know how fast they are
                for engine in engines:
                    await Arms(engine).run([tuple(rng.integers(3, n_vocab, 1024).tolist())], "one")
            await asyncio.sleep(REPORT_S)

        await warm()
        await arms.planned(warm)
        workers = [psutil.Process(engine.state.lanes[0].lane.pid) for engine in engines]
        cpu: dict[str, list[list[float]]] = {"one": [], "two": [], "apart": []}
        times: dict[str, list[float]] = {"one": [], "two": [], "apart": []}
        identical, notes = True, list[str]()
        for repeat in range(repeats + 1):
            prompts = [tuple(rng.integers(3, n_vocab, tokens).tolist()) for _ in range(n_prompts)]
            answers: list[list[Any]] = []
            for tenant in list(times)[:: 1 if repeat % 2 else -1]:
                helper = engines[1] if tenant == "apart" else None
                if helper is not None:
                    helper.running.plans.with_peers = alone
                await asyncio.sleep(REPORT_S)
                before = [sum(worker.cpu_times()[:2]) for worker in workers]
                seconds, found = await arms.run(prompts, tenant, helper)
                used = [sum(worker.cpu_times()[:2]) for worker in workers]
                answers.append(found)
                if repeat:
                    times[tenant].append(seconds)
                    cpu[tenant].append([b - a for a, b in zip(before, used, strict=True)])
            identical &= answers[0] == answers[1] == answers[2]
        for record in engines[0].running.dispatcher.log:
            notes += record.notes
        facts = arms.plans.facts
    stages = [] if facts is None or facts.pipeline is None else facts.pipeline.stages
    return {
        "times_s": {name: [round(t, 3) for t in found] for name, found in times.items()},
        "cpu_s": cpu,
        "identical": identical,
        "notes": notes,
        "stages": [(stage.name or "a", stage.first, stage.end) for stage in stages],
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench pipeline", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, under 40 s")
    parser.add_argument("--model", help="GGUF to serve (default: a synthetic 0.1B shape)")
    parser.add_argument("--tokens", type=int, default=0, help="of a prompt")
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    path = Path(args.model) if args.model else synthetic_model("0.1b")
    tokens = args.tokens or (4 if args.quick else 8) * PAGE_TOKENS + 1
    n_prompts, repeats = args.prompts or 2, args.repeats or (1 if args.quick else 4)
    print(f"{path.name}, {n_prompts} prompts of {tokens} tokens, {kernels.isa()}")
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        work = measure(path, Path(folder), tokens, n_prompts, repeats)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found = runner.run(work)
    one, two, apart = (found["times_s"][name] for name in ("one", "two", "apart"))
    ratios = [a / b for a, b in zip(one, two, strict=True)]
    speedup = statistics.median(ratios)
    for name, seconds in found["times_s"].items():
        print(f"  {name}: {seconds} s")
    print(f"  stages {found['stages']}; speedups {[round(r, 2) for r in ratios]}")
    for note in found["notes"]:
        print(f"  {note}")
    if shutil.which("rpc-server") is None:
        print("  llama.cpp's RPC back-end is left out: there is no rpc-server on the PATH")
    cpu_2 = [
        one_core[0] / max(two_cores)
        for one_core, two_cores in zip(found["cpu_s"]["one"], found["cpu_s"]["two"], strict=True)
    ]
    result = {
        "speedup_2": round(speedup, 3),
        "bubble": round(max(0.0, 1.0 - speedup / 2), 3),
        "apart_2": round(statistics.median(a / b for a, b in zip(one, apart, strict=True)), 3),
        "cpu_2": round(statistics.median(cpu_2), 3),
        "identical": found["identical"],
    }
    report.finish(result, details={"gguf": path.name, **found}, json_path=args.json)
    return 0 if found["identical"] else 1
