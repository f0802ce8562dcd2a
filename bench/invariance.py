"""Compares sequences bit for bit across every way of computing them: all must be identical.

The reference is one sequence at a time, one thread, the best instruction set, prompts in one
chunk. Variants on the same kernels: batch of 16, chunk sizes, 2 threads, every instruction set.
Variants through the daemon's engine and a real worker process: alone and 16 at once, prefix hit,
preempted by urgent requests, worker killed half-way. Prompts are random tokens, which keeps
choices close to ties: the hardest case for equality. Half of the sequences are sampled
(temperature, top-p, seed), half are greedy.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import structs

import kernels
from batchengine import core
from batchengine.config import Config, LaneConfig, ModelConfig, StoreConfig
from batchengine.engine import Engine
from bench import report
from bench.models.local_runner import LocalRunner

ROOT = Path(__file__).resolve().parent.parent
Tokens = list[list[int]]


@dataclass(frozen=True)
class Case:
    """Prompts, how each is sampled, and how many tokens follow."""

    prompts: Tokens
    samplings: list[core.Sampling]
    steps: int


def make_case(vocab: int, sequences: int, steps: int, longest: int) -> Case:
    rng = np.random.default_rng(23)
    lengths = np.exp(rng.uniform(np.log(4), np.log(longest), sequences)).astype(int)
    lengths[:3] = (255, 256, 257)  # around a page
    prompts = [rng.integers(8, vocab, n).tolist() for n in lengths]
    sampled = core.Sampling(temperature=0.8, top_p=0.95, top_k=50)
    samplings = [
        structs.replace(sampled, seed=1000 + i) if i % 2 else core.Sampling()
        for i in range(sequences)
    ]
    return Case(prompts, samplings, steps)


class Local:
    """Variants that need no daemon."""

    def __init__(self, path: Path, case: Case, cache_dir: Path) -> None:
        self.path, self.case, self.cache_dir = path, case, cache_dir

    def run(
        self,
        *,
        threads: int = 1,
        batch: int = 1,
        chunk: int | None = None,
        isa: str | None = None,
        only: int | None = None,
    ) -> Tokens:
        """Tokens of every sequence (the first `only`, if given)."""
        best = kernels.isa()
        if isa:
            kernels.set_isa(isa)
        out: Tokens = []
        prompts = self.case.prompts[:only]
        try:
            with LocalRunner(
                self.path,
                threads=threads,
                cache_dir=self.cache_dir,
                tokens_max=2048,
                entries_max=16,
                n_pages=160,
            ) as runner:
                for start in range(0, len(prompts), batch):
                    part = slice(start, min(start + batch, len(prompts)))
                    out += runner.generate(
                        prompts[part],
                        self.case.steps,
                        sampling=self.case.samplings[part],
                        chunk=chunk,
                    )
        finally:
            kernels.set_isa(best)
        return out


class Daemon:
    """Variants through the engine and a worker process."""

    def __init__(self, path: Path, case: Case, cache_dir: Path) -> None:
        self.path, self.case, self.cache_dir = path, case, cache_dir

    def config(self, folder: str, entries_max: int) -> Config:
        return Config(
            model=ModelConfig(path=str(self.path), id="invariance"),
            lanes=(LaneConfig(name="cpu", threads=2, entries_max=entries_max),),
            store=StoreConfig(dir=folder, budget_bytes=512 << 20, allow_volatile=True),
            cache_dir=str(self.cache_dir),
        )

    def request(self, index: int, label: str, sla: core.SlaClass) -> core.GenerationRequest:
        return core.GenerationRequest(
            request_id=f"{label}-{index}",
            prompt=tuple(self.case.prompts[index]),
            tokens_max=self.case.steps,
            sampling=self.case.samplings[index],
            ignore_eos=True,
            sla=core.Sla(sla_class=sla),
        )

    async def one(self, engine: Engine, index: int, label: str, sla: core.SlaClass) -> list[int]:
        tokens: list[int] = []
        async for event in engine.submit(self.request(index, label, sla)):
            if isinstance(event, core.TokenEvent):
                tokens.append(event.token)
            elif isinstance(event, core.ErrorEvent):
                raise event.error
        return tokens

    async def every(self, engine: Engine, label: str, at_once: int) -> Tokens:
        gate = asyncio.Semaphore(at_once)

        async def guarded(index: int) -> list[int]:
            async with gate:
                return await self.one(engine, index, label, core.SlaClass.STANDARD)

        return await asyncio.gather(*(guarded(i) for i in range(len(self.case.prompts))))

    async def preempted(self, engine: Engine) -> Tokens:
        """Batch-class work on a lane with two entries, under a stream of urgent requests."""
        slow = [
            asyncio.create_task(self.one(engine, i, "slow", core.SlaClass.BATCH))
            for i in range(len(self.case.prompts))
        ]
        urgent = 0
        while not all(task.done() for task in slow) and urgent < 200:
            await self.one(engine, urgent % len(slow), f"urgent{urgent}", core.SlaClass.INTERACTIVE)
            urgent += 1
            await asyncio.sleep(0.002)
        return await asyncio.gather(*slow)

    async def killed(self, engine: Engine) -> Tokens:
        """Computes all sequences at once while the worker is killed three times."""
        task = asyncio.create_task(self.every(engine, "killed", 16))
        for _ in range(3):
            await asyncio.sleep(0.25)
            for lane in engine.lanes():
                if not task.done() and lane.get("pid"):
                    os.kill(int(lane["pid"]), signal.SIGKILL)
        return await task

    async def run(self) -> dict[str, Tokens]:
        out: dict[str, Tokens] = {}
        with tempfile.TemporaryDirectory() as folder:
            engine = Engine(self.config(folder + "/a", 64))
            await engine.start(lambda stage: None)
            out["engine, one at a time"] = await self.every(engine, "alone", 1)
            out["engine, 16 at once, prefix hit"] = await self.every(engine, "again", 16)
            out["engine, worker killed"] = await self.killed(engine)
            await engine.stop(5.0)
            engine = Engine(self.config(folder + "/b", 2))
            await engine.start(lambda stage: None)
            out["engine, preempted"] = await self.preempted(engine)
            await engine.stop(5.0)
        return out


class Tally:
    """Counts sequences, tokens, and how many sequences equal the reference to the last token."""

    def __init__(self, reference: Tokens) -> None:
        self.reference = reference
        self.sequences = self.tokens = self.identical = 0
        self.by_variant: dict[str, dict[str, int]] = {}

    def compare(self, name: str, variant: Tokens) -> None:
        same = sum(a == b for a, b in zip(self.reference, variant, strict=False))
        tokens = sum(len(s) for s in variant)
        self.sequences += len(variant)
        self.tokens += tokens
        self.identical += same
        self.by_variant[name] = {"sequences": len(variant), "tokens": tokens, "identical": same}
        note = "" if same == len(variant) else "   <-- DIFFERS"
        print(f"  {name:<34}{same:>4} of {len(variant):<4} identical, {tokens} tokens{note}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench invariance", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default=str(ROOT / "pocket" / "pocket-q4_0.gguf"))
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    path = Path(args.model)
    sequences, steps, longest = (16, 24, 400) if args.quick else (64, 96, 1500)
    with tempfile.TemporaryDirectory() as cache:
        cache_dir = Path(cache)
        with LocalRunner(path, cache_dir=cache_dir) as runner:
            case = make_case(runner.spec.n_vocab, sequences, steps, longest)
        local = Local(path, case, cache_dir)
        tally = Tally(local.run())
        few = 4 if args.quick else 12
        variants: dict[str, Callable[[], Tokens]] = {
            "batch 16": lambda: local.run(batch=16),
            "2 threads, batch 16": lambda: local.run(batch=16, threads=2),
            "chunk 7": lambda: local.run(chunk=7, only=few),
            "chunk 64": lambda: local.run(chunk=64),
            "chunk 256, 2 threads": lambda: local.run(chunk=256, threads=2),
        }
        for level in kernels.isa_levels():
            variants[f"instruction set {level}"] = lambda isa=level: local.run(
                isa=isa, batch=16, only=few if isa == "scalar" else None
            )
        for name, run in variants.items():
            tally.compare(name, run())
        for name, tokens in asyncio.run(Daemon(path, case, cache_dir).run()).items():
            tally.compare(name, tokens)
    result = {
        "sequences": tally.sequences,
        "tokens": tally.tokens,
        "identical": tally.identical,
    }
    details = {"model": path.name, "isa": kernels.isa(), "variants": tally.by_variant}
    report.finish(result, details=details, json_path=args.json)
    return 0 if tally.identical == tally.sequences else 1
