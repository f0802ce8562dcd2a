"""Times routing decisions: `python -m bench router [--quick] [--json FILE]`.

States of one to eight lanes under random load, sessions with and without KV, requests of every
class; each call is timed alone, and what an empty call costs is printed beside it. The result is
of states without peers; those of two lanes beside one to three peers, with a pipeline planned, are
printed below.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from msgspec.structs import replace

from batchengine.policy import router
from batchengine.policy.cost import LaneLoad, LinkSpeed, StepCost
from batchengine.policy.linked import pipeline, ring
from batchengine.policy.linked.layouts import LayoutFacts, PeerState
from batchengine.policy.linked.pipeline import PipelineModel, PromptWork, StageHost
from bench import report

LANES = (1, 2, 4, 8)
PEERS = (1, 2, 3)
KV_LAYER_BYTES = 2176  # of a token: 8 KV heads of 128, 8 bits
LAYERS = 28
LINK = LinkSpeed(1.25e6, 0.06)  # 10 Gb/s
TARGETS = ((500.0, 50.0), (2_000.0, 100.0), (30_000.0, 500.0), (300_000.0, 2_000.0))
Call = tuple[router.RouteRequest, router.RouteSession | None, router.RouteState]


def random_state(rng: random.Random, n_lanes: int) -> router.RouteState:
    """Lanes of both tiers with any load; one in ten is down."""
    lanes: list[router.LaneState] = []
    for index in range(n_lanes):
        fast = rng.random() < 0.5
        scale = 0.1 if fast else 1.0
        cost = StepCost(5 * scale, 1.4 * scale, 2 * scale, 1e-3 * scale, 1e-4 * scale)
        decodes = rng.randrange(0, 64)
        own = [rng.random() * rng.choice((0.0, 10.0, 1000.0)) for _ in range(4)]
        load = LaneLoad(
            cost,
            seats=64,
            seated=decodes,
            waiting=rng.choice((0, 0, 5, 500)),
            decodes=decodes,
            step_ms=cost.fixed_ms + cost.decode_entry_ms * decodes,
            prefill_ms=tuple(sum(own[: rank + 1]) for rank in range(4)),
            seat_ms=tuple(rng.choice((0.0, 100.0, 5000.0)) for _ in range(4)),
        )
        tier = router.FAST if fast else rng.choice((router.BULK, router.ANY))
        lanes.append(router.LaneState(f"lane{index}", load, rng.random() < 0.9, tier))
    return router.RouteState(tuple(lanes))


def random_call(rng: random.Random, n_lanes: int) -> Call:
    """The arguments of one routing decision."""
    rank = rng.randrange(4)
    prompt = rng.choice((20, 300, 2000, 16_000))
    out = rng.choice((16, 256, 1024))
    request = router.RouteRequest(rank, prompt, out, prompt + out, *TARGETS[rank])
    session = None
    if rng.random() < 0.5:
        reused = rng.randrange(prompt)
        session = router.RouteSession(
            f"lane{rng.randrange(n_lanes)}", reused, reused % 256, rng.random() * 20_000
        )
    return request, session, random_state(rng, n_lanes)


def layout_facts(n_peers: int) -> LayoutFacts:
    """A model of 28 layers, and a pipeline over this daemon and the peers."""
    names = ["here", *(f"peer{index}" for index in range(n_peers))]
    cost = (5.0 / LAYERS, 1.4 / LAYERS, 1e-4 / LAYERS)
    plan = pipeline.plan(
        [StageHost(name, *cost) for name in names],
        {(a, b): LINK for a in names for b in names if a != b},
        names[0],
        PipelineModel(LAYERS, KV_LAYER_BYTES, 4096),
        PromptWork(0, 16_000),
    )
    return LayoutFacts(ring.shape_of(LAYERS, 16, 8, 128), LAYERS * KV_LAYER_BYTES, plan)


def with_peers(rng: random.Random, call: Call, facts: LayoutFacts, n_peers: int) -> Call:
    """The same call beside peers of any load; one in ten is down."""
    request, session, state = call
    peers = tuple(
        PeerState(
            f"peer{index}",
            "up" if rng.random() < 0.9 else "down",
            random_state(rng, 1).lanes[0].load,
            rng.choice((0, 8 << 30, 64 << 30)),
            rng.choice((0.1, 1.0)),
            LINK.bytes_per_ms,
            rng.choice((0, 8 << 30, 64 << 30)),
        )
        for index in range(n_peers)
    )
    return request, session, replace(state, peers=peers, facts=facts)


def time_calls(calls: Sequence[Call]) -> list[float]:
    """Microseconds of each call."""
    route, clock = router.route, time.perf_counter_ns
    times: list[float] = []
    for request, session, state in calls:
        start = clock()
        route(request, session, state)
        times.append((clock() - start) / 1000)
    return times


def empty_call_us(count: int) -> float:
    """Median of two clock readings with nothing between them: part of every figure."""
    clock = time.perf_counter_ns
    times: list[int] = []
    for _ in range(count):
        start = clock()
        times.append(clock() - start)
    return sorted(times)[count // 2] / 1000


def quantile(values: Sequence[float], q: float) -> float:
    """The quantile `q` of sorted `values`."""
    return values[min(len(values) - 1, int(q * len(values)))]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench router", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few calls; figures mean little")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    repeats = 2 if options.quick else 100
    rng = random.Random(7)
    by_lanes = {n: [random_call(rng, n) for _ in range(500)] for n in LANES}
    times: dict[int, list[float]] = {n: [] for n in LANES}
    linked = {n: layout_facts(n) for n in PEERS}
    by_peers = {
        n: [with_peers(rng, call, facts, n) for call in by_lanes[2]] for n, facts in linked.items()
    }
    peer_times: dict[int, list[float]] = {n: [] for n in PEERS}
    for repeat in range(repeats + 1):
        for found, cases in ((times, by_lanes), (peer_times, by_peers)):
            for n, calls in cases.items():
                measured = time_calls(calls)
                if repeat:  # the first round warms caches up
                    found[n] += measured
    print(
        f"{'lanes':>5} {'median_us':>10} {'p99_us':>8} {'max_us':>8}   {repeats * 500} calls each"
    )
    for label, found in (("", times), ("peers", peer_times)):
        if label:
            print(f"{label:>5}")
        for n, values in found.items():
            values.sort()
            row = (quantile(values, 0.5), quantile(values, 0.99), values[-1])
            print(f"{n:>5} {row[0]:>10.2f} {row[1]:>8.2f} {row[2]:>8.1f}")
    everything = sorted(value for values in times.values() for value in values)
    print(f"an empty call: {empty_call_us(10_000):.2f} us")
    result = {
        "median_us": round(quantile(everything, 0.5), 2),
        "p99_us": round(quantile(everything, 0.99), 2),
    }
    details = {f"lanes_{n}": {"median_us": quantile(v, 0.5)} for n, v in times.items()}
    details |= {f"peers_{n}": {"median_us": quantile(v, 0.5)} for n, v in peer_times.items()}
    report.finish(result, details=details, json_path=options.json)
    return 0
