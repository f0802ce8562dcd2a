"""Measuring and reporting of every bench: interleaved repeats, median and range, one RESULT line.

Machines are noisy, so a figure is never a single run: the contenders take turns inside one
process (A B A B …), each row keeps all its samples, and ratios are taken of medians of the same
run. The JSON file holds everything needed to assess the figure later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil


@dataclasses.dataclass
class Samples:
    """All measurements of one contender in one row, in the row's unit."""

    values: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        low, high = min(self.values), max(self.values)
        return f"{self.median:10.1f}  [{low:.1f} … {high:.1f}]"


@contextlib.contextmanager
def memory_folder(prefix: str, room_bytes: int) -> Iterator[Path]:
    """A temporary folder, in memory if `room_bytes` are free there."""
    shm = "/dev/shm"
    roomy = os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > room_bytes
    with tempfile.TemporaryDirectory(prefix=prefix, dir=shm if roomy else None) as folder:
        yield Path(folder)


def machine() -> dict[str, Any]:
    """The machine of the figures."""
    model = platform.processor() or "?"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
    }


def interleave(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Samples]:
    """Run the contenders in turn `repeats` times; each call returns one figure."""
    samples = {name: Samples() for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            samples[name].values.append(run())
    return samples


def seconds(run: Callable[[], object]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ratio_row(samples: Mapping[str, Samples], ours: str, theirs: str) -> dict[str, float]:
    """The RESULT entry of one row: medians and their ratio."""
    a, b = samples[ours].median, samples[theirs].median
    return {ours: round(a, 2), theirs: round(b, 2), "ratio": round(a / b, 3) if b else 0.0}


def finish(
    result: Mapping[str, Any],
    *,
    details: Mapping[str, Any],
    json_path: str | None,
) -> None:
    """Write the JSON file if asked, and print the RESULT line last."""
    if json_path:
        document = {"machine": machine(), "result": dict(result), "details": dict(details)}
        Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        Path(json_path).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {json_path}")
    print("RESULT " + json.dumps(dict(result)), flush=True)


def values(samples: Mapping[str, Samples]) -> dict[str, Sequence[float]]:
    """Plain lists for the JSON file."""
    return {name: [round(v, 3) for v in s.values] for name, s in samples.items()}
