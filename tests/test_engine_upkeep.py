"""What the engine does with its store beside serving: budgets, scrub, doubt, garbage, health."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchengine.config import LaneConfig
from batchengine.engine import Engine
from tests.fakes import Reference, read, request, run, running_engine, until, words

PAGE = 256


@pytest.fixture(scope="module")
def reference(pocket_path: Path, cache_dir: Path) -> Iterator[Reference]:
    made = Reference(pocket_path, cache_dir)
    yield made
    made.close()


def number(engine: Engine, name: str) -> int:
    """One number of the store's."""
    return int(engine.stats()["store"][name])


async def sealed(engine: Engine, pages: int) -> None:
    """Wait until that many pages were published and verified."""
    await until(lambda: int(engine.stats()["pages_sealed"]) >= pages)


def lane(name: str = "cpu", **settings: object) -> LaneConfig:
    return LaneConfig(name=name, threads=1, **settings)  # type: ignore[arg-type]


# --------------------------------------------------------------------------- the page budget


def test_a_fleet_with_one_prefix_is_not_held_back_by_it(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference
) -> None:
    """12 sessions share 8 pages of prefix in a store of 60: all are seated at once."""
    fleet, prefix = 12, words(1, 8 * PAGE)
    prompts = [[*prefix, *words(100 + i, 20)] for i in range(fleet)]

    async def work() -> None:
        async with running_engine(
            pocket_path, tmp_path, cache_dir,
            lanes=(lane(entries_max=fleet, places=48),), store__budget_bytes=60 * page_bytes,
        ) as engine:  # fmt: skip
            await read(engine.submit(request(prefix, 1)))
            await sealed(engine, 8)
            running = [engine.submit(request(p, 120)) for p in prompts]
            tasks = [asyncio.ensure_future(read(g)) for g in running]
            await until(lambda: engine.stats()["requests_running"] == fleet)
            answers = await asyncio.gather(*tasks)
            assert [a.tokens for a in answers[:2]] == [
                reference.tokens(p, 120) for p in prompts[:2]
            ]

    page_bytes = run(page_bytes_of(pocket_path, tmp_path / "probe", cache_dir))
    run(work())


async def page_bytes_of(model: Path, folder: Path, cache_dir: Path) -> int:
    async with running_engine(model, folder, cache_dir) as engine:
        return number(engine, "page_bytes")
