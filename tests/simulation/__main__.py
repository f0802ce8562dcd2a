"""Run many seeds, each twice: `python -m tests.simulation --seeds N --start S [--jobs J]`.

`--linked`: seeds of several daemons.

Exits 1 after the first seeds that failed, and prints how to run each alone with its trace.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.linked.world import LinkedWorld
from tests.simulation.world import Outcome, Seed, World, simulate
from tests.simulation.wrong import wrong_lane

FAILURES_MAX = 5


def twice(seed: int, world: Callable[[int, str], Seed] = World) -> Outcome:
    """Run one seed twice; both runs must make the same decisions."""
    first = simulate(seed, world=world)
    if first.error:
        return first
    again = simulate(seed, world=world)
    if again.hash != first.hash:
        raise AssertionError(f"seed {seed} is not deterministic: {first.hash} and {again.hash}")
    return first


def attempt(run: Callable[[int], Outcome], seed: int) -> tuple[int, str, Counter[str]]:
    """(seed, error, trace)."""
    try:
        found = run(seed)
    except Exception:
        return seed, traceback.format_exc(limit=-3), Counter()
    return seed, found.error, found.counts


def many(seeds: range, jobs: int, run: Callable[[int], Outcome], how: str = "") -> int:
    total, failed, started = Counter[str](), 0, time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        todo = [pool.submit(attempt, run, seed) for seed in seeds]
        for done in todo:
            seed, error, counts = done.result()
            total += counts
            if error:
                failed += 1
                print(f"seed {seed}: {error}\n  again: {again(seed, how)}", flush=True)
            if failed >= FAILURES_MAX:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.monotonic() - started
    for what, count in sorted(total.items()):
        print(f"{count:9} {what}")
    print(f"{len(seeds)} seeds in {seconds:.0f} s, {failed} failed")
    return 1 if failed else 0


def again(seed: int, how: str = "") -> str:
    """The command that runs one seed alone."""
    return f"python -m tests.simulation {how}--trace {seed}"


def show(seed: int, lines: int, world: type[World] | type[LinkedWorld]) -> int:
    """Run one seed and print the end of its trace."""
    made: list[World | LinkedWorld] = []

    def make(seed: int, folder: str) -> World | LinkedWorld:
        made.append(world(seed, folder))
        return made[0]

    world.lines_kept = lines
    error = ""
    try:
        error = simulate(seed, world=make).error
    except Exception:
        traceback.print_exc()
        error = "failed"
    print("\n".join(made[0].ground.lines))
    print(made[0].ground.hash, dict(made[0].counts), error)
    return 1 if error else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--once", action="store_true", help="do not compare with a second run")
    parser.add_argument("--wrong", action="store_true", help="one lane computes wrong bits (F46)")
    parser.add_argument("--linked", action="store_true", help="several daemons in each seed")
    parser.add_argument("--trace", type=int, metavar="SEED", help="one seed, with its trace")
    parser.add_argument("--lines", type=int, default=200)
    given = parser.parse_args()
    if given.trace is not None:
        return show(given.trace, given.lines, LinkedWorld if given.linked else World)
    seeds = range(given.start, given.start + given.seeds)
    if given.wrong:
        return many(seeds, given.jobs, wrong_lane)
    if given.linked:
        run = functools.partial(simulate if given.once else twice, world=LinkedWorld)
        return many(seeds, given.jobs, run, "--linked ")
    return many(seeds, given.jobs, simulate if given.once else twice)


if __name__ == "__main__":
    sys.exit(main())
