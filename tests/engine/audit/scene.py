"""Helpers of audit scenes in the simulation: a lane that computes wrong rows on demand.

One bit of one row, or every row, is wrong in the frames that `make_wrong` selects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from batchengine import errors
from batchengine.core import ErrorEvent
from batchengine.engine import Generation
from batchengine.engine.audit.audit import Audit
from batchengine.engine.lane.recompute import KEY
from batchengine.kv import Seal
from kv_store.pages.pool import PagePool
from kv_store.store import Store
from tests.simulation.stage import Plan, Stage, words

LANES = ("left", "right")


def store_of(stage: Stage) -> Store:
    store = stage.now.seam.opened
    assert store is not None
    return store


def audit_of(stage: Stage) -> Audit:
    return stage.up.running.audit


def pages_of(stage: Stage, tokens: Sequence[int]) -> int:
    """How many pages of these tokens the store would serve."""
    return len(store_of(stage).pages.match_prefix(tokens, b""))


@contextlib.contextmanager
def no_prefix() -> Iterator[None]:
    """The store matches no page, so every token is computed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagePool, "match_prefix", lambda *a, **k: [])
        yield


def is_recompute(step: Any) -> bool:
    return any(entry.session == KEY for entry in step.entries)


def make_wrong(
    stage: Stage, lane: str, is_selected: Callable[[Any], bool], times: int = 1, **how: bool
) -> list[int]:
    """Make the lane wrong in the first `times` frames of turns that `is_selected` selects."""
    selected: list[int] = []

    def plan(of: Any, step: Any) -> Plan | None:
        mine = [e for e in step.entries if e.session != KEY]
        if of.name != lane or not mine or len(selected) >= times or not is_selected(mine[0]):
            return None
        selected.append(mine[0].start)
        return Plan(0.004, **(how or {"flip": True}))  # type: ignore[arg-type]

    stage.plans.append(plan)
    return selected


@contextlib.contextmanager
def only(stage: Stage, lane: str) -> Iterator[None]:
    """Requests go to this lane."""
    others = [loop for loop in stage.now.loops if loop.lane.name != lane and not loop.draining]
    for loop in others:
        loop.draining = "for a moment"
    try:
        yield
    finally:
        for loop in others:
            loop.draining = ""
            loop.wake()


async def ask(stage: Stage, lane: str, prompt: Sequence[int], n: int, session: str) -> Generation:
    """A request that computes on this lane."""
    with only(stage, lane):
        asked = stage.ask(prompt, n, session)
        await stage.until(lambda: bool(asked.lane) or asked.finished)
    assert asked.lane == lane
    return asked


async def read_wrong(generation: Generation) -> tuple[int, str]:
    """The number of tokens, correct or not, and the error at the end."""
    tokens, error = 0, ""
    async for event in generation:
        if isinstance(event, ErrorEvent):
            error = event.error.name
        tokens += type(event).__name__ == "TokenEvent"
    return tokens, error


async def publish(stage: Stage, lane: str, prompt: Sequence[int]) -> None:
    """Publish the pages of a prompt, computed by this lane."""
    await stage.read(await ask(stage, lane, prompt, 1, f"first {prompt[0]} {len(prompt)}"))
    await stage.until(lambda: pages_of(stage, prompt) == len(prompt) // 256)
    await settled(stage)


async def settled(stage: Stage) -> None:
    """Wait until no page is being sealed."""
    await stage.until(lambda: not any(loop.kv.is_sealing for loop in stage.now.loops))


async def expose(stage: Stage, lane: str) -> None:
    """Make the lane compute a published page wrong, and wait for the audit."""
    prompt = words(7000 + len(stage.plans), 300)
    loop, audits = stage.lane(lane), audits_of(stage)
    await publish(stage, LANES[lane == LANES[0]], prompt)
    make_wrong(stage, lane, lambda e: e.start == 0)
    with no_prefix():
        asked = await ask(stage, lane, prompt, 1, f"exposes {lane}")
        await stage.until(lambda: audits_of(stage) > audits)
        await stage.until(lambda: not loop.is_paused)
    await read_wrong(asked)
    logged(stage, f"lane {lane} was wrong")
    assert loop.draining


def audits_of(stage: Stage) -> int:
    return stage.up.running.disputes.audits


def seals_of(stage: Stage) -> set[Seal]:
    """The seals of all lanes that are with the store."""
    return stage.up.running.disputes.seals


def logged(stage: Stage, *texts: str) -> None:
    """Check that these were logged as critical, and remove them: the stage fails at such lines."""
    for text in texts:
        assert any(text in line for line in stage._wrong), stage._wrong
    stage._wrong.clear()


def refuse() -> Any:
    raise errors.WORKER_FAILED(defect="no memory for another worker")


def no_fresh_worker(stage: Stage) -> None:
    audit: Any = audit_of(stage)
    audit._fresh_worker = refuse
