"""A scene for any seed: one lane computes wrong bits for a while, until it is found out (F46).

While it is trusted, whoever computes there may be told anything. Once it is drained nothing that
it computed may be used any more: every answer is right again, from the cache or not.
"""

from __future__ import annotations

import asyncio
from typing import Any

from batchengine.core import ErrorEvent
from batchengine.engine import Generation
from tests.simulation.stage import Plan, Stage, play, words
from tests.simulation.world import Outcome

LENGTHS = [60, 255, 257, 300, 520, 700]
SAID = ("two contents", "differs")  # of a lane that is found out
TOPICS = 3  # few prompts that share pages


async def wrong_for_a_while(stage: Stage) -> None:
    """The script."""
    rng = stage.tape("wrong")
    bad, share = rng.choice(("left", "right")), rng.choice([0.2, 0.6, 1.0])
    spread = rng.random() < 0.5
    begin = stage.loop.time() + rng.choice([0.0, 0.0, 0.05, 3.0])

    def plan(lane: Any, step: Any) -> Plan | None:
        wrong = lane.name == bad and step.entries and stage.loop.time() >= begin
        if not wrong or rng.random() >= share:
            return None
        stage.count("wrong steps")
        return Plan(0.004, flip=True, spread=spread)

    stage.plans.append(plan)
    loop = stage.lane(bad)
    others = [one for one in stage.now.loops if one is not loop]
    sessions = [f"s{i}" for i in range(rng.randrange(2, 6))]
    asked: list[asyncio.Task[None]] = []
    while not loop.drained:
        for _ in range(rng.randrange(1, 5)):
            prompt = words(rng.randrange(TOPICS), rng.choice(LENGTHS))
            name = rng.choice([None, None, *sessions])
            generation = stage.ask(prompt, rng.choice([1, 7, 40]), name)
            asked.append(stage.loop.create_task(_read(stage, generation)))
        stage.tasks.update(asked)
        await asyncio.sleep(rng.choice([0.0, 0.1, 2.0, 9.0]) * rng.random())
        if stage.loop.time() > begin + 300:
            raise AssertionError(f"lane {bad} is wrong and nobody notices")
    stage.count("found out")
    await asyncio.gather(*asked)
    if any(one.drained for one in others):
        raise AssertionError(f"lane {bad} was wrong, and another one was drained")
    topics = [words(topic, max(LENGTHS)) for topic in range(TOPICS)]
    for topic in rng.sample(topics, TOPICS):
        for length in rng.sample(LENGTHS, 3):
            await stage.answer(topic[:length], 20)
    for name in sessions:
        await stage.answer([*rng.choice(topics), 9], 20, name)
    stage.count("right answers")
    stage._wrong[:] = [w for w in stage._wrong if not any(text in w for text in SAID)]


async def _read(stage: Stage, generation: Generation) -> None:
    async for event in generation:
        if isinstance(event, ErrorEvent):
            stage.count(f"error {event.error.api_code}")
            if event.error.api_code != "numeric_fault":
                raise AssertionError(f"nothing explains {event.error}")


def wrong_lane(seed: int) -> Outcome:
    """Play it with this seed."""
    return play(wrong_for_a_while, seed, limits__canary_s=2.0)
