"""Co-execution: what an engine serves within its promises with a GPU alone, and with GPU and CPU.

Requests of a trace (trace.json: lengths of production services) come at random times, a third of
them in each of three classes. One is good if its first token and its mean time per token are
within the targets of its class. The goodput is the highest rate, in requests a second, at which
the share ATTAINED of the requests is good: the rate doubles until it is not, and is then halved
into. Both engines get the same requests at the same times. What has not ended END_S after a round
began is ended: it is good if its first token and those so far kept the promise, which leaves
requests of class background more time than a round has. The same is measured with a part of the
GPU, which is as much faster than the host's processor as a smaller GPU than that of its host.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from batchengine.config.settings import ClassConfig, RouterConfig, SlaConfig
from batchengine.core import BatchEngineError, SlaClass
from batchengine.engine import Engine
from bench.cuda.serving.engines import (
    CPU,
    GPU,
    PART,
    Site,
    Stream,
    ask,
    prompt_of,
    running,
    scratch,
    until,
)

TRACE = Path(__file__).with_name("trace.json")
CLASSES = (SlaClass.INTERACTIVE, SlaClass.STANDARD, SlaClass.BACKGROUND)
ATTAINED = 0.95
CONTEXT_MAX, ANSWER_MAX = 4096, 128  # tokens of a request of the trace, which is cut to them
REFUSED, LATE = "refused", "late"
END_S, IDLE_S = 28.0, 60.0
LANES = {"gpu": (GPU,), "gpu and cpu": (GPU, CPU)}
PARTED = {"part of the gpu": (PART,), "part of the gpu and cpu": (PART, CPU)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Seconds in which requests come, the first rate, how often the rate is halved into, and the
    share of the lengths and the factor of the targets."""

    seconds: float
    rate: float
    halvings: int
    requests_max: int
    share: float
    patience: float


REAL = Sizes(8.0, 8.0, 4, 600, 1.0, 1.0)
FEW = Sizes(2.0, 1.0, 0, 2, 0.01, 1000.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of a round."""

    at: float  # s
    context: int
    answer: int
    sla: SlaClass


def arrivals(rate: float, sizes: Sizes) -> list[Arrival]:
    """The requests of a round; the same rate gives the same."""
    lengths = json.loads(TRACE.read_text())["requests"]
    rng = np.random.default_rng([5, int(rate * 1000)])
    count = min(sizes.requests_max, max(1, round(rate * sizes.seconds)))
    times = np.sort(rng.uniform(0, sizes.seconds, count))
    return [
        Arrival(
            float(at),
            max(4, int(min(CONTEXT_MAX, context) * sizes.share)),
            max(2, int(min(ANSWER_MAX, answer) * sizes.share)),
            CLASSES[i % len(CLASSES)],
        )
        for i, (at, (_, context, answer)) in enumerate(
            zip(times, (lengths[i % len(lengths)] for i in range(count)), strict=True)
        )
    ]


def is_good(stream: Stream, targets: ClassConfig, patience: float) -> bool:
    """Whether an answer came as its class promises."""
    return (
        bool(stream.times)
        and stream.ttft_ms <= patience * targets.ttft_ms
        and stream.tpot_ms <= patience * targets.tpot_ms
    )


async def round_at(engine: Engine, site: Site, rate: float, sizes: Sizes) -> dict[str, Any]:
    """Requests at one rate, all of them to their end."""
    asked = arrivals(rate, sizes)
    tenant = f"at {rate}"  # so that no round finds pages of another
    end = asyncio.get_running_loop().time() + END_S * sizes.patience

    async def one(index: int, arrival: Arrival) -> tuple[bool, str]:
        prompt = prompt_of(site, arrival.context, [index])
        await asyncio.sleep(arrival.at)
        stream, targets = Stream(), SlaConfig().of(arrival.sla)
        request = ask(prompt, arrival.answer, tenant=tenant, sla=arrival.sla)
        try:
            async with asyncio.timeout_at(end):
                await stream.read(engine, request)
        except BatchEngineError:  # its promise cannot be kept
            return False, REFUSED
        except TimeoutError:
            stream.cancel()
            return is_good(stream, targets, sizes.patience), LATE
        return is_good(stream, targets, sizes.patience), stream.lane

    ended = await asyncio.gather(*(one(i, arrival) for i, arrival in enumerate(asked)))
    await until(lambda: not engine.state.turns, IDLE_S)
    lanes = [lane for _, lane in ended]
    good_of = {
        c: [good for (good, _), a in zip(ended, asked, strict=True) if a.sla is c] for c in CLASSES
    }
    return {
        "rate": rate,
        "requests": len(ended),
        "attained": round(sum(good for good, _ in ended) / len(ended), 4),
        "attained_by_class": {
            sla.value: round(sum(good) / len(good), 4) for sla, good in good_of.items() if good
        },
        "on_cpu": lanes.count(CPU),
        "refused": lanes.count(REFUSED),
        "late": lanes.count(LATE),
    }


async def highest(
    attained: Callable[[float], Awaitable[float]], rate: float, halvings: int, rate_max: float
) -> float:
    """The highest rate found at which ATTAINED of the requests are good; 0 if it is none. One above
    `rate_max` is not tried."""
    good = 0.0
    while rate <= rate_max and await attained(rate) >= ATTAINED:
        good, rate = rate, 2 * rate
    bad = rate
    for _ in range(halvings if bad <= rate_max else 0):
        middle = (good + bad) / 2
        if await attained(middle) >= ATTAINED:
            good = middle
        else:
            bad = middle
    return good


async def measure(site: Site, lanes: str) -> dict[str, Any]:
    """The goodput with some lanes, and the rounds that it was found by."""
    sizes = FEW if site.tiny else REAL
    rounds: list[dict[str, Any]] = []
    with scratch(site) as (folder, model):
        async with running(site, model, folder, (LANES | PARTED)[lanes], RouterConfig()) as engine:

            async def attained(rate: float) -> float:
                rounds.append(await round_at(engine, site, rate, sizes))
                print(f"    {lanes}: {rounds[-1]}", flush=True)
                return float(rounds[-1]["attained"])

            await round_at(engine, site, sizes.rate / 2, sizes)  # lanes learn what a step takes
            rate_max = sizes.requests_max / sizes.seconds
            goodput = await highest(attained, sizes.rate, sizes.halvings, rate_max)
    return {
        "goodput": goodput,
        "attained": ATTAINED,
        "is_bound_found": any(one["attained"] < ATTAINED for one in rounds),
        "rounds": rounds,
    }
