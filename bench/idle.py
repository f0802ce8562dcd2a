"""How long a GPU waits for its host between the steps of decodes, on a modelled GPU.

The GPU computes nothing: a step takes as long as the model of a GPU says. Everything else is the
engine, its worker and the pages of an 8B shape, on this machine. `idle` is the share of the time in
which the GPU had no step, between the first and the last step of all sessions together; pages of
sessions begin together, which is the worst case for what the host stores.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchengine.child.command import python_command
from batchengine.config import Config, LaneConfig, LimitsConfig, ModelConfig, StoreConfig
from batchengine.config.settings import RouterConfig
from batchengine.engine import Engine
from bench import report
from bench.cuda.serving.engines import START_S, Stream, ask, until
from bench.cuda.serving.modelled_worker import ModelledStep, read_steps
from bench.models.synthetic import PRESETS, write_synthetic

# KV of an 8B model; the rest is small, as nothing reads it.
SHAPE = replace(PRESETS["tiny"], n_layer=32, n_kv_head=8, n_head=32, head_dim=128, context=4096)
GPUS = {"0.6b": (0.5, 0.008), "8b": (1.45, 0.045)}  # ms of a step, and of each token (an H200)
BATCHES, TOKENS = (1, 16, 64), 200
PROMPT = 8  # tokens
LANE, BUDGET_BYTES = "gpu", 6 << 30
SKIPPED = 8  # steps of all sessions, before the first that counts


async def run(folder: Path, model: Path, gpu: tuple[float, float], batch: int, depth: int) -> float:
    """Decode `TOKENS` of `batch` sessions; returns seconds of one token of all."""
    steps = folder / "steps"
    lane = LaneConfig(
        LANE, kind="cuda", threads=1, tier="fast", vram_bytes=64 << 30, steps_in_flight=depth
    )
    config = Config(
        model=ModelConfig(path=str(model), id="idle"),
        lanes=(lane,),
        store=StoreConfig(dir=str(folder / "kv"), budget_bytes=BUDGET_BYTES, allow_volatile=True),
        limits=LimitsConfig(context_tokens=1024),
        router=RouterConfig(),
        cache_dir=str(folder / "cache"),
    )
    given = ",".join(map(str, gpu))
    command = python_command("bench.cuda.serving.modelled_worker", given, str(steps))
    engine = Engine(config, worker_command=command)
    await engine.start(lambda _: None)
    try:
        await until(lambda: all(of["state"] == "ready" for of in engine.lanes()), START_S)
        streams = [Stream() for _ in range(batch)]
        asked = [ask(tuple(range(10 + i, 10 + i + PROMPT)), TOKENS) for i in range(batch)]
        await asyncio.gather(
            *(one.read(engine, request) for one, request in zip(streams, asked, strict=True))
        )
    finally:
        await engine.stop(0.0)
    return statistics.median(one.tpot_ms for one in streams)


def idle_share(steps: Sequence[ModelledStep], batch: int) -> dict[str, float]:
    """Of the time from the first to the last step of all sessions: the share without a step."""
    most = max(step.tokens for step in steps if step.tokens <= batch)
    whole = [i for i, step in enumerate(steps) if step.tokens == most][SKIPPED:]
    first, last = steps[whole[0]], steps[whole[-1]]
    busy = sum(step.end - step.begin for step in steps[whole[0] : whole[-1]])
    gaps = [
        after.begin - before.end
        for before, after in zip(
            steps[whole[0] : whole[-1]], steps[whole[0] + 1 : whole[-1] + 1], strict=True
        )
    ]
    return {
        "idle": round(1 - busy / (last.begin - first.begin), 4),
        "gap_ms": round(1000 * statistics.median(gaps), 3),
        "gap_ms_max": round(1000 * max(gaps), 3),
        "step_ms": round(1000 * (first.end - first.begin), 3),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench idle", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one batch, once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", default=[2], help="steps in flight")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    batches, repeats = ((4,), 1) if options.quick else (BATCHES, options.repeats)
    found: dict[str, Any] = {}
    with report.memory_folder("idle-", 2 * BUDGET_BYTES) as folder:
        model = folder / "model.gguf"
        write_synthetic(model, SHAPE)
        for name, gpu in GPUS.items():
            for batch in batches:
                for depth in options.depths:
                    rows: list[dict[str, float]] = []
                    for _ in range(repeats):
                        tpot_ms = asyncio.run(run(folder, model, gpu, batch, depth))
                        steps = read_steps(folder / "steps")
                        rows.append(idle_share(steps, batch) | {"tpot_ms": round(tpot_ms, 3)})
                    middle = sorted(rows, key=lambda row: row["idle"])[len(rows) // 2]
                    key = f"{name} b{batch}" + (f" depth {depth}" if depth else "")
                    found[key] = middle["idle"]
                    low, high = min(r["idle"] for r in rows), max(r["idle"] for r in rows)
                    print(f"{key:<18} {middle}  [{low:.3f} … {high:.3f}]", flush=True)
    report.finish({"idle": found}, details={}, json_path=options.json)
    return 0
