"""A worker's death costs the step in flight: open rows are imported by the next worker."""

from __future__ import annotations

import asyncio
import os
import signal

from batchengine.engine import Engine
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    started,
    until,
    words,
)


def kill(engine: Engine, lane: int = 0) -> None:
    os.kill(int(engine.lanes()[lane]["pid"]), signal.SIGKILL)


async def back(engine: Engine, incarnation: int) -> None:
    lane = engine.state.lanes[0]
    await until(lambda: lane.lane.incarnation == incarnation and lane.lane.alive)


async def test_a_killed_worker_costs_the_step_in_flight(site: Site, reference: Reference) -> None:
    """Sessions with hundreds of tokens in their open pages compute one token each again."""
    prompts = [words(i, 100 + 90 * i) for i in range(6)]
    async with running_engine(site, lane__draft_tokens_max=0) as engine:  # all get on alike
        running = [engine.submit(request(p, 200)) for p in prompts]
        readers = [asyncio.ensure_future(read(g)) for g in running]
        for kills in (1, 2, 3):
            await until(lambda n=kills: min(g.completion_tokens for g in running) > 40 * n)
            kill(engine)
            await back(engine, kills + 1)
        answers = await asyncio.gather(*readers)
        assert [a.tokens for a in answers] == [reference.tokens(p, 200) for p in prompts]
        assert engine.stats()["tokens_recomputed"] <= 3 * len(prompts)
        assert engine.stats()["rows_imported"] >= 3 * sum(len(p) % 256 for p in prompts) // 2
        await until(lambda: len(list((site.folder / "kv" / "arena").iterdir())) == 1)


async def test_a_prompt_that_is_being_prefilled_keeps_its_chunks(
    site: Site, reference: Reference
) -> None:
    prompt = words(3, 1900)
    async with running_engine(site, lane__chunk_tokens_max=128) as engine:
        generation = engine.submit(request(prompt, 20))
        reader = asyncio.ensure_future(read(generation))
        await until(lambda: engine.stats()["tokens_computed"] > 900)
        kill(engine)
        answer = await reader
        assert answer.tokens == reference.tokens(prompt, 20)
        assert engine.stats()["tokens_recomputed"] <= 128


async def test_an_idle_session_keeps_its_open_page(site: Site, reference: Reference) -> None:
    """A session that continues after the death computes new tokens only."""
    prompt = words(4, 700)
    async with running_engine(site) as engine:
        first = await read(engine.submit(request(prompt, 30, session="s")))
        kill(engine)
        await back(engine, 2)
        longer = [*prompt, *first.tokens, *words(5, 10)]
        again = await read(engine.submit(request(longer, 30, session="s")))
        assert again.tokens == reference.tokens(longer, 30)
        assert engine.stats()["tokens_recomputed"] == 0


async def test_an_edited_history_imports_no_row_of_the_old_one(
    site: Site, reference: Reference
) -> None:
    prompt = words(6, 400)
    async with running_engine(site) as engine:
        await read(engine.submit(request(prompt, 30, session="s")))
        edited = [*prompt[:300], *words(7, 60)]
        _, reader = await started(engine, request(edited, 100, session="s"), 10)
        kill(engine)
        answer = await reader
        assert answer.tokens == reference.tokens(edited, 100)
        assert engine.stats()["tokens_recomputed"] <= 1
        again = await read(engine.submit(request(prompt, 30, session="s")))
        assert again.tokens == reference.tokens(prompt, 30)
