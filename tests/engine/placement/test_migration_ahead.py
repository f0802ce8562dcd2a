"""The open rows of a session that decodes are copied before it stops; what is left is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement.migration import RECOMPUTE_MAX
from batchengine.kv import RowImport
from batchengine.session_kv import PendingRows
from tests.engine.placement.test_migration import other, two_lanes
from tests.engine.placement.test_migration_faults import (
    all_up,
    kill,
    lanes_of,
    plant,
    try_to_move,
)
from tests.support.engines import Reference, Site, read, request, started, until, words


async def test_no_frame_delays_a_session_after_it_has_stopped(
    site: Site, reference: Reference
) -> None:
    prompt = words(1, 400)
    async with two_lanes(site) as engine:
        _, reader = await started(engine, request(prompt, 600, session="s"), 3)
        _, target = lanes_of(engine, "s")
        frames: dict[str, int] = {}

        def at(point: str) -> None:
            frames[point] = target.kv.slots.frames

        engine.plant(at)
        report = await engine.promote("", "s", to=target.lane.name)
        assert report["result"] == "moved"
        assert frames["P2"] == frames["P5"]
        assert report["rows_copied"] > 100
        assert report["rows_recomputed"] <= RECOMPUTE_MAX
        assert (await reader).tokens == reference.tokens(prompt, 600)


async def test_an_idle_session_has_no_row_computed_again(site: Site, reference: Reference) -> None:
    prompt = words(2, 400)
    async with two_lanes(site) as engine:
        first = await read(engine.submit(request(prompt, 10, session="s")))
        report = await engine.promote("", "s", to=other(engine, "s"))
        assert (report["rows_copied"], report["rows_recomputed"]) == (409 - 256, 0)
        longer = [*prompt, *first.tokens, 5]
        again = await read(engine.submit(request(longer, 20, session="s")))
        assert again.tokens == reference.tokens(longer, 20)


async def test_a_page_fills_up_during_the_move(site: Site, reference: Reference) -> None:
    prompt = words(3, 300)
    async with two_lanes(site) as engine:
        _, reader = await started(engine, request(prompt, 1200, session="s"), 3)
        session = engine.state.sessions["", "s"]
        for page in range(1, 5):
            await until(lambda page=page: session.frontier >= 256 * page + 246)
            assert await try_to_move(engine, "s") == "moved"
        assert (await reader).tokens == reference.tokens(prompt, 1200)


@pytest.mark.parametrize("which", ["source", "target"])
async def test_a_worker_that_dies_during_the_copy_loses_nothing(
    site: Site, reference: Reference, which: str
) -> None:
    prompt = words(4, 400)
    async with two_lanes(site) as engine:
        _, reader = await started(engine, request(prompt, 400, session="s"), 3)
        source, target = lanes_of(engine, "s")
        victim = source if which == "source" else target
        copies = after_import(target, lambda: victim.lane.kill("a test"))
        result = await try_to_move(engine, "s")
        assert copies
        if which == "target":
            assert "died" in result
            assert lanes_of(engine, "s")[0] is source
        assert (await reader).tokens == reference.tokens(prompt, 400)
        assert engine.stats()["tokens_recomputed"] <= 2 * RECOMPUTE_MAX
        await all_up(engine)


async def test_a_source_that_dies_after_the_copy_loses_the_step_in_flight(
    site: Site, reference: Reference
) -> None:
    """Its last rows are in its arena, which the destination reads."""
    prompt = words(5, 400)
    async with two_lanes(site) as engine:
        generation, reader = await started(engine, request(prompt, 900, session="s"), 3)
        source, _ = lanes_of(engine, "s")

        async def fault() -> None:
            behind = generation.completion_tokens + 4 * RECOMPUTE_MAX
            await until(lambda: generation.completion_tokens > behind)
            await kill(source)

        plant(engine, "P1", fault)
        assert await try_to_move(engine, "s") == "moved"
        assert (await reader).tokens == reference.tokens(prompt, 900)
        assert engine.stats()["tokens_recomputed"] <= RECOMPUTE_MAX
        await all_up(engine)


async def test_rows_after_a_page_that_became_invalid_are_not_used(
    site: Site, reference: Reference
) -> None:
    """They were copied before, and computed after a page that is no longer believed."""
    prompt = words(6, 700)
    async with two_lanes(site) as engine:
        _, reader = await started(engine, request(prompt, 300, session="s"), 30)
        session = engine.state.sessions["", "s"]
        await until(lambda: len(session.kv.sealed) >= 2)

        async def fault() -> None:
            engine.running.store.pages.invalidate(session.kv.sealed[1])

        plant(engine, "P1", fault)
        report = await engine.promote("", "s", to=other(engine, "s"))
        assert (report["result"], report["rows_copied"]) == ("moved", 0)
        assert (await reader).tokens == reference.tokens(prompt, 300)


def after_import(loop: LaneLoop, act: Callable[[], object]) -> list[int]:
    """Call `act` once, after the first import of a lane was queued; its pages are appended."""
    importing, copies = loop.kv.importing, list[int]()
    queue = importing.import_rows

    def import_rows(row_import: RowImport, pending_rows: Sequence[PendingRows]) -> bool:
        queued = queue(row_import, pending_rows)
        if not copies:
            act()
        copies.append(len(pending_rows))
        return queued

    importing.import_rows = import_rows  # type: ignore[method-assign]
    return copies
