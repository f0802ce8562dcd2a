"""An engine under random requests, edits, cancels and kills answers as an undisturbed run does.

The seed determines the requests; the times of events depend on the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

from batchengine.core import Sampling
from batchengine.engine import Engine
from batchengine.engine.lane.loop import LaneLoop
from bench.processes.store_check import check_integrity
from tests.support.engines import Reference, Site, read, request, running_engine, until, words

CLASSES = ["interactive", "standard", "background", "batch"]
PAGE_BYTES = 327_680


class Chaos:
    """Users of one engine, each with its own session, and the tokens they received."""

    def __init__(self, engine: Engine, rng: random.Random) -> None:
        self.engine = engine
        self.rng = rng
        self.received: list[tuple[list[int], int, Sampling, list[int]]] = []
        self.cancelled = 0

    def prompt(self, history: list[int]) -> list[int]:
        """A continuation, an edit in the middle, or one of few fresh prompts that share pages."""
        rng, kind = self.rng, self.rng.random()
        if history and len(history) < 900 and kind < 0.5:
            return history + words(rng.randrange(99), rng.randrange(1, 40))
        if history and kind < 0.7:
            return history[: rng.randrange(1, len(history))] + words(rng.randrange(9), 7)
        return words(rng.randrange(4), rng.choice([20, 255, 256, 300, 530]))

    async def user(self, session: str | None, turns: int) -> None:
        history: list[int] = []
        for _ in range(turns):
            rng = self.rng
            prompt = self.prompt(history)
            n = rng.choice([1, 5, 40])
            sampling = Sampling(temperature=rng.choice([0.0, 0.9]), seed=rng.randrange(3))
            generation = self.engine.submit(
                request(prompt, n, session=session, sampling=sampling, sla=rng.choice(CLASSES))
            )
            if rng.random() < 0.2:
                await asyncio.sleep(rng.random() * 0.05)
                generation.cancel()
                self.cancelled += 1
                continue
            answer = await read(generation)
            assert answer.error is None, answer.error
            self.received.append((prompt, n, sampling, answer.tokens))
            history = prompt + answer.tokens

    async def killer(self, kills: int) -> None:
        for _ in range(kills):
            await asyncio.sleep(self.rng.random() * 0.6)
            pid = int(self.engine.lanes()[0]["pid"])
            if pid:
                os.kill(pid, signal.SIGKILL)


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize(
    "seed", [0, 1, *[pytest.param(s, marks=pytest.mark.slow) for s in range(2, 12)]]
)
async def test_answers_under_random_load_and_kills_are_right(
    site: Site, reference: Reference, seed: int
) -> None:
    rng = random.Random(seed)
    async with running_engine(
        site,
        store__budget_bytes=rng.choice([18, 40, 400]) * PAGE_BYTES,
        lane__open_pages=rng.choice([6, 12]),
        lane__entries_max=rng.choice([2, 4]),
        lane__chunk_tokens_max=rng.choice([32, 256]),
        lane__tokens_per_step=288,
        lane__steps_in_flight=1 + seed % 3,
    ) as engine:
        chaos = Chaos(engine, rng)
        names = ["a", "b", "c", None, None, None]
        async with asyncio.timeout(100):
            await asyncio.gather(*(chaos.user(s, 5) for s in names), chaos.killer(3))
            await until(lambda: not engine.state.turns and engine.phase == "ready")
            # rows of idle sessions may still be imported into the last worker's arena
            await until(
                lambda: all(
                    _available(loop) == loop.config.open_pages for loop in engine.state.lanes
                )
            )
        check_integrity(engine.running.store)
    assert chaos.cancelled + len(chaos.received) == 30
    for prompt, n, sampling, tokens in chaos.received:
        assert tokens == reference.tokens(prompt, n, sampling), (len(prompt), n, sampling)


def _available(loop: LaneLoop) -> int:
    """Available slots: free, reclaimable from idle sessions, or freed when a seal ends."""
    return loop.kv.slots.available + len(loop.kv.slots.seals)
