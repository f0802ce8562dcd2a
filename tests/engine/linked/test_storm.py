"""Random turns, edits, deaths of workers, lost links and drops on three daemons with tiny budgets.

A seed repeats the choices, not the interleaving.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter

import pytest

from batchengine.core import BatchEngineError
from tests.engine.linked.daemons import PAGE_BYTES, Daemon, daemons
from tests.support.engines import Reference, Site, read, request, until

PAGES = 12
CONTEXT = 256 * 20  # tokens: more than the pages of a daemon
ERRORS = ("kv_full", "kv_too_small", "session_not_found")
Answers = list[tuple[list[int], list[int]]]  # prompt, tokens


async def client(
    one: Daemon, name: str, rng: random.Random, tally: Counter[str], answers: Answers
) -> None:
    """One conversation: continued, cut, cancelled, dropped."""
    history = [rng.randrange(20, 1800) for _ in range(rng.choice([600, 3000, 4600]))]
    while not tally["over"]:
        n = rng.choice([1, 8, 40])
        history = history[: rng.randrange(300, 900)] if len(history) + n > CONTEXT else history
        try:
            generation = one.engine.submit(request(history, n, session=name))
        except BatchEngineError as error:
            tally[error.name] += 1
            await asyncio.sleep(0.2)
            history = history[:600]
            continue
        reader = asyncio.ensure_future(read(generation))
        if rng.random() < 0.1:
            await asyncio.sleep(rng.random() * 0.5)
            generation.cancel()
        answer = await reader
        if answer.error is not None:
            assert answer.error.name in ERRORS, answer
            tally[answer.error.name] += 1
            history = history[:600]
            continue
        tally["turns"] += 1
        answers.append((history, answer.tokens))
        history = [*history, *answer.tokens]
        if rng.random() < 0.3:
            history = history[: rng.randrange(1, len(history) + 1)]
        history += [rng.randrange(20, 1800) for _ in range(rng.choice([3, 300, 900]))]
        if rng.random() < 0.1:
            await one.engine.drop("", name)
            tally["drops"] += 1


async def disturb(made: list[Daemon], rng: random.Random, tally: Counter[str]) -> None:
    """Deaths of workers, lost control links, and daemons that would leave."""
    while not tally["over"]:
        await asyncio.sleep(rng.random() * 3)
        one, chance = rng.choice(made), rng.random()
        if not any(other.linked.taken.n_pages for other in made):
            continue
        if chance < 0.3 and one.state.lanes[0].lane.alive:
            tally["kills"] += 1
            os.kill(one.state.lanes[0].lane.pid, signal.SIGKILL)
        elif chance < 0.6:
            tally["cuts"] += 1
            rng.choice([*one.engine.running.peers.links.values()]).abort("of the test")
        elif chance < 0.8:
            one.engine.leave(undo=one.state.leaving)
        elif chance < 0.9:
            with contextlib.suppress(BatchEngineError):
                await one.engine.park("", f"{one.name}0")


async def storm(site: Site, seed: int, seconds: float) -> tuple[Counter[str], Answers]:
    """Run for so long; check the invariants then."""
    rng, tally, answers = random.Random(seed), Counter[str](), Answers()
    async with daemons(site, "abc", PAGES, peers__hold_bytes=8 * PAGE_BYTES) as made:
        tasks = [
            asyncio.ensure_future(
                client(one, f"{one.name}{n}", random.Random(rng.random()), tally, answers)
            )
            for one in made
            for n in range(2)
        ]
        disturbance = asyncio.ensure_future(disturb(made, rng, tally))
        ends = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.2)
            for one in made:
                tally["held"] = max(tally["held"], one.linked.taken.n_pages)
                one.linked.given.check()
                for session in one.state.lanes[0].sessions.values():
                    session.check()
            for task in (*tasks, disturbance):
                if task.done():
                    task.result()
        tally["over"] = 1
        async with asyncio.timeout(120):
            await asyncio.gather(disturbance, *tasks)
        for one in made:
            one.engine.leave(undo=True)
            for name in [name for _, name in one.state.sessions]:
                await one.engine.drop("", name)
        for one in made:
            await until(lambda one=one: not one.linked.taken.n_pages)
            await until(lambda one=one: not one.linked.given.n_pages)
            assert not one.linked.taken._own
            await until(lambda one=one: not one.engine.running.store.stat()["pages_pinned"])
    return tally, answers


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(8))
async def test_a_storm_changes_no_token(site: Site, reference: Reference, seed: int) -> None:
    tally, answers = await storm(site, seed, 40.0)
    print(seed, dict(tally))
    assert tally["held"] >= 8
    for prompt, tokens in answers:
        assert tokens == reference.tokens(prompt, max(1, len(tokens)))[: len(tokens)]
