"""What a constrained answer costs: microseconds of a mask, and steps against those of free answers.

Masks: random walks through grammars of several kinds, over the pocket model's vocabulary and one
of 151,936 tokens, in processor time, which other programs change little. Steps, in time by the
clock, need a machine without other work: one engine with one lane; batches of constrained and of
free answers, of the same number of tokens, take turns. Both have steps of one token of each entry;
the prompt's time is not counted. `--model` is computed in place of the pocket model, whose steps
are the shortest and so show the cost best.

Drafts: the time of whole answers under a grammar whose text repeats itself, a list of records, on
an engine without drafts over that on one with them; the two take turns, and their tokens are equal.
What drafts gain is the larger the longer a step takes: the pocket model shows least of it.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import string
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np

from batchengine.config import load
from batchengine.core import Constraint, DoneEvent, GenerationRequest, Sampling, TokenEvent
from batchengine.engine import Engine
from batchengine.text.grammar import GrammarCompiler
from batchengine.text.vocab import Tokenizer
from bench import report
from bench.engine import DISK

POCKET = Path(__file__).parents[2] / "pocket" / "pocket-q4_0.gguf"
VOCAB = 151_936
CALL = {
    "type": "object",
    "properties": {
        "name": {"enum": ["read_file", "write_file", "run"]},
        "arguments": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "lines": {"type": "array", "items": {"type": "integer"}, "maxItems": 8},
                "mode": {"anyOf": [{"const": "r"}, {"const": "w"}, {"type": "null"}]},
            },
            "required": ["path", "lines", "mode"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
RECORD = {
    "type": "object",
    "properties": {
        "path": {"enum": ["src/engine/lane.py", "src/engine/step.py", "tests/test_lane.py"]},
        "line": {"type": "integer", "minimum": 1, "maximum": 400},
        "severity": {"enum": ["error", "warning"]},
        "rule": {"enum": ["unused-import", "line-too-long", "undefined-name"]},
    },
    "required": ["path", "line", "severity", "rule"],
    "additionalProperties": False,
}
GRAMMARS = {
    "call": Constraint("json_schema", json.dumps(CALL)),
    "any JSON": Constraint("json_schema", "{}"),
    "regex": Constraint("regex", r"([a-z]+ ){20}[a-z]+\."),
    "lark": Constraint("lark", 'start: pair+\npair: "(" (WORD | pair)* ")"\nWORD: /[a-z]{1,9} /'),
}
LONG = Constraint("regex", "[a-z ]{4000}")  # longer than the answers of the steps


class Words:
    """A large vocabulary: every byte, then words in several spellings."""

    def __init__(self) -> None:
        rng, letters = random.Random(5), string.ascii_lowercase
        pieces = {bytes([byte]): None for byte in range(256)}
        while len(pieces) < VOCAB - 2:
            word = "".join(rng.choices(letters, k=rng.randint(2, 9)))
            word = rng.choice(["", " ", " ", '"']) + rng.choice([word, word.title(), word + '":'])
            pieces[word.encode()] = None
        self._pieces = [*pieces, b"<|end|>", b"<|start|>"]
        self.vocab_size, self.bos = VOCAB, None
        self.eog = frozenset({VOCAB - 2})
        self.control = frozenset({VOCAB - 2, VOCAB - 1})

    def piece(self, token: int) -> bytes:
        return self._pieces[token]

    def is_byte(self, token: int) -> bool:
        return False


def walk(
    compiler: GrammarCompiler, constraint: Constraint, ends: frozenset[int]
) -> Iterator[float]:
    """Microseconds of each token: accepted, and the mask after it; over and over again."""
    rng = np.random.default_rng(3)
    while True:
        matcher = compiler.matcher(constraint)
        mask = matcher.mask()
        for _ in range(200):
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            if token in ends:
                break
            start = time.thread_time_ns()
            matcher.accept([token])
            mask = matcher.mask()
            yield (time.thread_time_ns() - start) / 1000


def measure_masks(tokenizer: Any, count: int) -> dict[str, dict[str, float]]:
    """Median, p99 and maximum of each grammar, and the time of its compilation."""
    compiler = GrammarCompiler(cast(Tokenizer, tokenizer))
    compiler.prepare()
    found: dict[str, dict[str, float]] = {}
    for name, constraint in GRAMMARS.items():
        start = time.thread_time()
        compiler.matcher(constraint)
        compile_ms = (time.thread_time() - start) * 1000
        times = sorted(itertools.islice(walk(compiler, constraint, tokenizer.eog), count))
        found[name] = {
            "compile_ms": compile_ms,
            "median_us": times[count // 2],
            "p99_us": times[count * 99 // 100],
            "max_us": times[-1],
        }
    return found


@asynccontextmanager
async def engine_of(model: Path, folder: Path, draft_tokens_max: int) -> AsyncIterator[Engine]:
    config = load(
        None,
        {
            "model.path": str(model),
            "store.dir": str(folder / "kv"),
            "store.allow_volatile": True,
            "store.budget_bytes": 512 << 20,
            "limits.context_tokens": 1024,
            "server.admin_socket": str(folder / "admin.sock"),
        },
    )
    cache_dir = DISK if DISK.is_dir() else folder
    lanes = [dataclasses.replace(lane, draft_tokens_max=draft_tokens_max) for lane in config.lanes]
    engine = Engine(dataclasses.replace(config, cache_dir=str(cache_dir), lanes=tuple(lanes)))
    await engine.start(lambda _: None)
    try:
        yield engine
    finally:
        await engine.stop(0.0)


async def us_per_step(engine: Engine, n: int, tokens: int, constraint: Constraint | None) -> float:
    """Microseconds between two tokens of an answer, of `n` at once: the median of the answers."""
    numbers = itertools.count()

    async def one(index: int) -> float:
        prompt = [30 + (7 * index + i) % 200 for i in range(16)]
        asked = GenerationRequest(
            f"{id(numbers)}-{index}-{time.monotonic_ns()}",
            tuple(prompt),
            tokens,
            Sampling(temperature=1.0, seed=index),
            ignore_eos=True,
            constraint=constraint,
        )
        times: list[float] = []
        async for event in engine.submit(asked):
            if isinstance(event, TokenEvent):
                times.append(time.perf_counter())
            elif isinstance(event, DoneEvent) and event.finish_reason != "length":
                raise RuntimeError(f"an answer of {len(times)} tokens: {event.finish_reason}")
        return 1e6 * (times[-1] - times[0]) / (tokens - 1)

    return statistics.median(await asyncio.gather(*map(one, range(n))))


async def measure_steps(
    model: Path, folder: Path, sizes: list[int], rounds: int, tokens: int
) -> dict[str, report.Samples]:
    """Microseconds of a step by batch and kind; the kinds take turns."""
    found: dict[str, report.Samples] = {}
    async with engine_of(model, folder, 0) as engine:
        for n in sizes:
            for turn in range(rounds + 1):
                for kind, constraint in (("free", None), ("constrained", LONG)):
                    us = await us_per_step(engine, n, tokens, constraint)
                    if turn:  # the first round warms up
                        found.setdefault(f"{kind}_b{n}", report.Samples()).values.append(us)
    return found


async def answered(engine: Engine, n: int, records: Constraint) -> tuple[float, list[list[int]]]:
    """Seconds of `n` answers at once, and their tokens."""

    async def one(index: int) -> list[int]:
        prompt = tuple([30 + (7 * index + i) % 200 for i in range(16)])
        sampling = Sampling(temperature=0.7, seed=index)
        name, constraint = f"{index}-{time.monotonic_ns()}", records
        asked = GenerationRequest(name, prompt, 900, sampling, constraint=constraint)
        return [one.token async for one in engine.submit(asked) if isinstance(one, TokenEvent)]

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, range(n)))
    return time.perf_counter() - began, answers


async def measure_drafts(
    model: Path, folder: Path, sizes: list[int], rounds: int, n_records: int
) -> dict[str, report.Samples]:
    """Times of answers without drafts over times with them, by batch."""
    found: dict[str, report.Samples] = {}
    schema = {"type": "array", "items": RECORD, "minItems": n_records, "maxItems": n_records}
    records = Constraint("json_schema", json.dumps(schema))
    without, drafting = folder / "without", folder / "drafting"
    without.mkdir()
    drafting.mkdir()
    async with engine_of(model, without, 0) as plain, engine_of(model, drafting, -1) as other:
        for n in sizes:
            for turn in range(rounds + 1):
                seconds, answers = await answered(plain, n, records)
                drafted_s, drafted = await answered(other, n, records)
                if answers != drafted:
                    raise RuntimeError("drafts have changed an answer")
                if turn:
                    ratio = seconds / drafted_s
                    found.setdefault(f"drafts_b{n}", report.Samples()).values.append(ratio)
    return found


def gained(options: argparse.Namespace) -> dict[str, report.Samples]:
    """How many times as fast whole answers are with drafts, by batch."""
    sizes, rounds, n_records = ([1], 1, 3) if options.quick else ([1, 4], 3, 8)
    with report.memory_folder("grammar-", 2 << 30) as folder:
        gains = asyncio.run(measure_drafts(options.model, folder, sizes, rounds, n_records))
    for name, samples in gains.items():
        print(f"{name:>16} times as fast {samples}")
    return gains


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench grammar", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens; figures mean little")
    parser.add_argument("--model", type=Path, default=POCKET)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--drafts", action="store_true", help="only what drafts gain")
    options = parser.parse_args(argv)
    if options.drafts:
        gains = gained(options)
        details = {"model": options.model.name, "samples": {n: s.values for n, s in gains.items()}}
        result = {f"{name}_gain": round(samples.median, 3) for name, samples in gains.items()}
        report.finish(result, details=details, json_path=options.json)
        return 0
    count, rounds, tokens = (50, 1, 12) if options.quick else (1000, 15, 60)
    details: dict[str, Any] = {}
    vocabularies: dict[str, Callable[[], Any]] = {
        "2048": lambda: Tokenizer(POCKET),
        f"{VOCAB}": Words,
    }
    columns = "compile_ms", "median_us", "p99_us", "max_us"
    print(f"{'vocabulary':>10} {'grammar':>10}", *[f"{name:>10}" for name in columns])
    masks: dict[str, dict[str, dict[str, float]]] = {}
    for name, make in vocabularies.items():
        masks[name] = measure_masks(make(), count)
        for grammar, row in masks[name].items():
            print(f"{name:>10} {grammar:>10}", *[f"{row[column]:>10.1f}" for column in columns])
    details["masks"] = masks
    sizes = [1, 2] if options.quick else [1, 16]
    with report.memory_folder("grammar-", 1 << 30) as folder:
        steps = asyncio.run(measure_steps(options.model, folder, sizes, rounds, tokens))
    for name, samples in steps.items():
        print(f"{name:>16} us a step {samples}")
    details["steps_us"] = {name: samples.values for name, samples in steps.items()}
    gains = gained(options)
    details["drafts_gain"] = {name: samples.values for name, samples in gains.items()}
    large = masks[f"{VOCAB}"]["call"]
    result = {
        "mask_us": round(large["median_us"], 1),
        "mask_p99_us": round(large["p99_us"], 1),
        **{
            f"ratio_b{n}": round(steps[f"constrained_b{n}"].median / steps[f"free_b{n}"].median, 3)
            for n in sizes
        },
        **{
            f"us_per_token_b{n}": round(
                (steps[f"constrained_b{n}"].median - steps[f"free_b{n}"].median) / n, 1
            )
            for n in sizes
        },
        **{f"{name}_gain": round(samples.median, 3) for name, samples in gains.items()},
    }
    report.finish(result, details=details, json_path=options.json)
    return 0
