"""How long a GPU waits for its host between steps of decodes, on a modelled GPU.

The GPU computes nothing: a step takes as long as the model of a GPU says. Everything else is the
engine, its worker and the pages of an 8B shape, on this machine; what the driver takes of the host
is left out. `idle` is the share of the time, between the first and the last step of all sessions,
in which the GPU had no step: the median over runs, which take turns between the depths (steps in
flight). Pages of sessions begin together, which is the worst case for rows that the host stores;
`spread`: they begin and end at different steps, so that pages are digested, written and read back
all the time. Other sessions have decoded before: the first use of memory is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from batchengine.child.command import python_command
from batchengine.config import Config, LaneConfig, LimitsConfig, ModelConfig, StoreConfig
from batchengine.core import PAGE_TOKENS
from batchengine.engine import Engine
from bench import report
from bench.cuda.serving.engines import START_S, Stream, ask, until
from bench.cuda.serving.modelled_worker import ModelledStep, read_steps
from bench.models.synthetic import PRESETS, write_synthetic

# KV of an 8B model; the rest is small, as nothing reads it.
SHAPE = replace(PRESETS["tiny"], n_layer=32, n_kv_head=8, n_head=32, head_dim=128, context=4096)
GPUS = {"0.6b": (0.5, 0.008), "8b": (1.45, 0.045)}  # ms of a step and of each token: an H200, about
BATCHES, DEPTHS, TOKENS, QUICK_TOKENS = (1, 16, 64), (1, 2, 3), 200, 40
PROMPT, TOKEN_IDS = 8, 300  # tokens at least, and ids that they have
SPREAD_TIMES = 3  # as many tokens, so that the first answers last until all prompts are computed
ROUNDS = 2  # of sessions with prompts of their own, of which the last counts
BUDGET_BYTES, VRAM_BYTES = 6 << 30, 64 << 30
PLACES = 3 * max(BATCHES) + 16  # open pages: as many as a lane has if the budget is no limit
SKIPPED = 8  # steps of all sessions, before the first that counts

Row = dict[str, float]


class Scene:
    """A model, and engines with a lane on a modelled GPU."""

    def __init__(self, folder: Path, tokens: int) -> None:
        """tokens: of each answer, of those that begin together."""
        self._folder, self._tokens = folder, tokens
        self._model = folder / "model.gguf"
        write_synthetic(self._model, SHAPE)

    def measure(self, gpu: tuple[float, float], batch: int, depth: int, spread: bool) -> Row:
        """Decode `batch` sessions together. gpu: ms of a step, and of each of its tokens."""
        steps = self._folder / "steps"
        lengths = [PROMPT + (PAGE_TOKENS * i // batch if spread else 0) for i in range(batch)]
        tokens = self._tokens * (SPREAD_TIMES if spread else 1)
        begin, tpot_ms = asyncio.run(self._decode(gpu, lengths, tokens, depth, steps))
        counted = [step for step in read_steps(steps) if step.begin >= begin]
        return idle_row(counted, batch) | {"tpot_ms": round(tpot_ms, 3)}

    async def _decode(
        self, gpu: tuple[float, float], lengths: list[int], tokens: int, depth: int, steps: Path
    ) -> tuple[float, float]:
        """When the last round began (s), and its sessions' time per token (ms)."""
        lane = LaneConfig(
            "gpu",
            kind="cuda",
            threads=1,
            open_pages=PLACES,
            vram_bytes=VRAM_BYTES,
            steps_in_flight=depth,
        )
        store = StoreConfig(
            dir=str(self._folder / "kv"), budget_bytes=BUDGET_BYTES, allow_volatile=True
        )
        config = Config(
            model=ModelConfig(path=str(self._model), id="idle"),
            lanes=(lane,),
            store=store,
            limits=LimitsConfig(context_tokens=1024),
            cache_dir=str(self._folder / "cache"),
        )
        module, model = "bench.cuda.serving.modelled_worker", ",".join(map(str, gpu))
        engine = Engine(config, worker_command=python_command(module, model, str(steps)))
        await engine.start(lambda _: None)
        try:
            await until(lambda: all(of["state"] == "ready" for of in engine.lanes()), START_S)
            begin, streams = 0.0, list[Stream]()
            for round_ in range(ROUNDS):
                begin, streams = time.perf_counter(), [Stream() for _ in lengths]
                firsts = range(len(lengths) * round_, len(lengths) * (round_ + 1))
                readers = [
                    stream.read(engine, ask(prompt_of(first, n), tokens))
                    for stream, first, n in zip(streams, firsts, lengths, strict=True)
                ]
                await asyncio.gather(*readers)
        finally:
            await engine.stop(0.0)
        return begin, statistics.median(stream.tpot_ms for stream in streams)


def prompt_of(first: int, n: int) -> tuple[int, ...]:
    """`n` token ids, other ones for each `first` below TOKEN_IDS."""
    return tuple([10 + (first + at) % TOKEN_IDS for at in range(n)])


def idle_row(steps: Sequence[ModelledStep], batch: int) -> Row:
    """From the first to the last step of `batch` tokens: the share without a step, and the times
    between steps."""
    whole = [i for i, step in enumerate(steps) if step.tokens == batch][SKIPPED:]
    if len(whole) < 2:
        raise SystemExit(f"bench idle: answers ended before {SKIPPED + 2} steps had {batch} tokens")
    part = steps[whole[0] : whole[-1] + 1]
    gaps = [after.begin - before.end for before, after in itertools.pairwise(part)]
    return {
        "idle": round(sum(gaps) / (part[-1].begin - part[0].begin), 4),
        "gap_ms": round(1000 * statistics.median(gaps), 3),
        "gap_ms_max": round(1000 * max(gaps), 3),
        "step_ms": round(1000 * (part[0].end - part[0].begin), 3),
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench idle", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one batch, once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="steps in flight")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    batches, repeats = ((4,), 1) if options.quick else (BATCHES, options.repeats)
    models = {"8b": GPUS["8b"]} if options.quick else GPUS
    spreads = (False,) if options.quick else (False, True)
    found: dict[str, Any] = {}
    rows: dict[str, list[Row]] = {}
    with report.memory_folder("idle-", 2 * BUDGET_BYTES) as folder:
        scene = Scene(folder, QUICK_TOKENS if options.quick else TOKENS)
        for model, gpu in models.items():
            for batch, spread in itertools.product(batches, spreads):
                name = f"{model} b{batch}" + " spread" * spread
                keys = {f"{name} depth {depth}": depth for depth in options.depths}
                for _ in range(repeats):
                    for key, depth in keys.items():
                        rows.setdefault(key, []).append(scene.measure(gpu, batch, depth, spread))
                for key in keys:
                    idle, tpot = ([row[name] for row in rows[key]] for name in ("idle", "tpot_ms"))
                    found[key] = statistics.median(idle)
                    spread = f"{found[key]:.3f} [{min(idle):.3f} … {max(idle):.3f}]"
                    step, token = rows[key][0]["step_ms"], statistics.median(tpot)
                    times = f"a step {step} ms, a token in {token:.2f} ms"
                    print(f"{key:<26} idle {spread}, {times}", flush=True)
    report.finish({"idle": found}, details=rows, json_path=options.json)
    return 0
