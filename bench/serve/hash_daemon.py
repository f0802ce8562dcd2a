"""A daemon whose lane computes HashLM: all of the service, and next to no arithmetic.

`python -m bench.serve.hash_daemon SETTINGS`, JSON of configuration overrides. After the banner it
answers each line on its standard input with one line of JSON, `Report`, about the time since the
last one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import psutil

from batchengine.config import Config
from batchengine.config.loading import load
from batchengine.engine import Engine
from bench.models.hashlm import WORKER_COMMAND
from service.daemon import run
from service.protocols.reading import READER

TICK_S = 0.005


@dataclass
class Report:
    """Lag of the event loop (a timer's delay), and resident memory of the engine process."""

    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    processor_s: float
    rss_mb: float


class Meter:
    """Measures from `start` on; `report` begins anew."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._processor_s = 0.0

    async def tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._lags.append(1000 * (time.perf_counter() - due))

    def report(self) -> Report:
        lags = np.array(self._lags or [0.0])
        self._lags = []
        used = time.process_time()
        spent, self._processor_s = used - self._processor_s, used
        gc.collect()
        rss = psutil.Process().memory_info().rss / 2**20
        p50, p99 = np.percentile(lags, [50, 99])
        figures = (p50, p99, lags.max(), spent, rss)
        return Report(*(round(float(figure), 3) for figure in figures))


class MeteredEngine(Engine):
    """The engine, which starts the meter on its event loop."""

    async def start(self, on_stage: Any) -> None:
        await super().start(on_stage)
        meter = Meter()
        self._meter_task = asyncio.create_task(meter.tick())
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), answer, meter)


def answer(meter: Meter) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        return
    print(json.dumps(asdict(meter.report())), flush=True)


def make_engine(config: Config) -> Engine:
    return MeteredEngine(config, reader=READER, worker_command=WORKER_COMMAND)


if __name__ == "__main__":
    sys.exit(run(load(None, json.loads(sys.argv[1])), make_engine))
