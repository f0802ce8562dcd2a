"""A scene for any seed: one lane computes wrong bits until an audit drains it (F46).

Until then its answers may be wrong. After that nothing that it computed may be used:
every answer is right, from cached pages or not.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from batchengine.core import BatchEngineError, ErrorEvent
from batchengine.engine import Generation
from tests.simulation.stage import Plan, Stage, play, words
from tests.simulation.world import Outcome

LENGTHS = [60, 255, 257, 300, 520, 700]
LOGGED = ("two contents", "differs")  # when the lane is drained
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
    while not loop.draining:
        for _ in range(rng.randrange(1, 5)):
            prompt = words(rng.randrange(TOPICS), rng.choice(LENGTHS))
            name = rng.choice([None, None, *sessions])
            generation = stage.ask(prompt, rng.choice([1, 7, 40]), name)
            asked.append(stage.loop.create_task(_read(stage, generation)))
        stage.tasks.update(asked)
        if rng.random() < 0.3:
            await _move(stage, rng.choice(sessions))
        await asyncio.sleep(rng.choice([0.0, 0.1, 2.0, 9.0]) * rng.random())
        if stage.loop.time() > begin + 300:
            raise AssertionError(f"lane {bad} is wrong and no audit finds it")
    stage.count("found out")
    await asyncio.gather(*asked)
    if any(one.draining for one in others):
        raise AssertionError(f"lane {bad} was wrong, and another one was drained")
    topics = [words(topic, max(LENGTHS)) for topic in range(TOPICS)]
    for topic in rng.sample(topics, TOPICS):
        for length in rng.sample(LENGTHS, 3):
            await stage.answer(topic[:length], 20)
    for name in sessions:
        await stage.answer([*rng.choice(topics), 9], 20, name)
    stage.count("right answers")
    stage._wrong[:] = [w for w in stage._wrong if not any(text in w for text in LOGGED)]


async def _move(stage: Stage, name: str) -> None:
    """Migrate the session to the other lane, with its open rows, if possible."""
    session = stage.up.state.sessions.get(("", name))
    if session is not None and session.key in stage.up.state.home:
        stage.count("moves asked")
        stage.tasks.add(stage.loop.create_task(_promote(stage, name)))


async def _promote(stage: Stage, name: str) -> None:
    with contextlib.suppress(BatchEngineError):
        report = await stage.up.promote("", name, to=stage.other(name))
        stage.count(f"moves {report['result']}")


async def _read(stage: Stage, generation: Generation) -> None:
    async for event in generation:
        if isinstance(event, ErrorEvent):
            stage.count(f"error {event.error.name}")
            if event.error.name != "numeric_fault":
                raise AssertionError(f"nothing explains {event.error}")


def wrong_lane(seed: int) -> Outcome:
    """Play it with this seed."""
    return play(wrong_for_a_while, seed, limits__canary_s=2.0)
