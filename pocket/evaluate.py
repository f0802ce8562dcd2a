"""Measures a pocket model: exact answers per task, and recall against distance.

`score` takes any runtime as a callable from turns to an answer. As a program it measures a GGUF
file through llama.cpp at temperature 0 and prints JSON:

    python -m pocket.evaluate [MODEL.gguf] [--per-task 25] [--per-distance 20] [--seed 1]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pocket import generate
from pocket.generate import Exchange, Item, Turn, render

SHIPPED = Path(__file__).parent / "pocket-q4_0.gguf"
TASKS = ("copy", "reverse", "count", "arithmetic", "story_qa", "small_talk", "tool_call")
TASKS += ("tool_result",)
DISTANCES = (64, 256, 1024, 2048, 4096, 8192)


def build_set(
    seed: int,
    per_task: int,
    per_distance: int,
    measure: Callable[[Exchange], int],
    distances: Sequence[int] = DISTANCES,
) -> list[Item]:
    """Items with one right answer each; every second recall item asks for a code."""
    rng = random.Random(f"pocket evaluation {seed}")
    items = [generate.task_item(rng, task) for task in TASKS for _ in range(per_task)]
    for distance in distances:
        for index in range(per_distance):
            kind = "code" if index % 2 == 0 else None
            items.append(generate.recall_item(rng, distance, measure, kind))
    return items


def row_name(item: Item) -> str:
    """The row of the report an item counts for."""
    return f"recall@{item.distance}" if item.distance else item.task


def score(
    items: Iterable[Item], answer: Callable[[tuple[Turn, ...]], str]
) -> dict[str, dict[str, float]]:
    """{row: {"n": …, "right": …, "percent": …}}; right = the whole answer is equal."""
    report: dict[str, dict[str, float]] = {}
    for item in items:
        row = report.setdefault(row_name(item), {"n": 0, "right": 0, "percent": 0.0})
        row["n"] += 1
        row["right"] += answer(item.turns).strip() == item.answer.strip()
    for row in report.values():
        row["percent"] = round(100 * row["right"] / row["n"], 1)
    return report


def main() -> None:
    """Measure one file."""
    from pocket.reference import Reference

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("model", type=Path, nargs="?", default=SHIPPED)
    parser.add_argument("--per-task", type=int, default=25)
    parser.add_argument("--per-distance", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    reference = Reference(options.model, threads=options.threads)

    items = build_set(options.seed, options.per_task, options.per_distance, reference.measure)
    gaps: list[float] = []

    def answer(turns: tuple[Turn, ...]) -> str:
        greedy = reference.greedy(reference.encode(render(turns)))
        gaps.append(greedy.gap_min)
        return greedy.text

    report = score(items, answer)
    gaps.sort()
    result = {
        "model": options.model.name,
        "rows": report,
        "gap_min": {"median": gaps[len(gaps) // 2], "p5": gaps[len(gaps) // 20]},
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
