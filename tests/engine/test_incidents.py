"""Published incidents of silently wrong KV, on the engine's side: each scene passes, and fails when
the incident's mechanism is put in.

Each test has the letter and the source of its incident; those of the store alone are in
`tests/kv_store/test_incidents.py`. The scenes run the real engine, store
and workers in the simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

import batchengine.lanes.host_memory as memory_module
import kv_store.layout as layout_module
from batchengine.core import PAGE_TOKENS, BatchEngineError, ErrorEvent
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.steps import inflight
from batchengine.engine.lane.steps.writer import StepWriter
from batchengine.engine.tasks import Tasks
from batchengine.kv.invalidation import Invalidation
from batchengine.kv.prefix import PrefixMatcher
from batchengine.kv.slots import Slots
from batchengine.lanes.host_device import Computed
from batchengine.lanes.step_input import StepInput, StepOutput
from batchengine.session import Session
from batchengine.wire import lane as wire
from kv_store.arenas.arena import ArenaShape
from tests.simulation.lanes import SimDevice
from tests.simulation.stage import Plan, Script, Stage, play, words

Mechanism = Callable[[pytest.MonkeyPatch], None]


def shown(scene: Script, mechanism: Mechanism, symptom: str, **how: Any) -> None:
    """The scene passes; with the mechanism put in it fails with the incident's error."""
    play(scene, **how)
    with pytest.MonkeyPatch.context() as patch:
        mechanism(patch)
        with pytest.raises(AssertionError, match=symptom):
            play(scene, **how)


async def restart(stage: Stage) -> None:
    """The engine is killed and started again."""
    await stage.crash()


# -- A: keys restored without the model they belong to ---------------------------------------------


async def other_model_after_a_restart(stage: Stage) -> None:
    prompt = words(1, 600)
    answer = await stage.answer(prompt, 20, "s")
    await stage.until(lambda: stage.lane(stage.home("s")).kv.sealing.sealed == 2)
    stage.records.clear()
    stage.model = "another"  # the file was replaced while no engine ran
    await restart(stage)
    await stage.answer([*prompt, *answer.tokens, 40], 20, "s")


def keys_without_identity(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(layout_module.Descriptor, "repr_id", property(lambda self: bytes(range(32))))


def test_incident_a_pages_of_another_model_are_not_found() -> None:
    """LMCache #4492: 38 of 38 answers wrong after a restart, HTTP 200, no log."""
    shown(other_model_after_a_restart, keys_without_identity, "wrong token")


# -- E: a reference without a generation -----------------------------------------------------------


async def a_source_slot_is_reused(stage: Stage) -> None:
    """While a migration is about to copy an open page, its slot is given to other rows."""
    mine, other = words(2, 200), words(3, 200)
    generation = stage.ask(mine, 60, "s")
    reader = stage.start(generation)
    await stage.computed(generation, 5)
    source = stage.home("s")
    thief = stage.ask(other, 60, "t")
    loop = stage.lane(source)
    await stage.until(lambda: "t" in [s.session_id for s in loop.sessions.values()] or
                      thief.completion_tokens > 0)  # fmt: skip
    if stage.home("t") != source:
        await stage.now.wait(stage.up.promote("", "t", to=source))
    thief_reader = stage.start(thief)
    await stage.computed(thief, 5)

    async def on_point(point: str) -> None:
        if point == "P2":
            copy_slot(loop, "t", "s")
            stage.process(source).end(-9)
            await stage.until(lambda: not loop.lane.alive)

    stage.plant(on_point)
    with contextlib.suppress(BatchEngineError):  # or it stays, and recomputes the lost rows
        await stage.up.promote("", "s", to=stage.other("s"))
    assert len((await reader).tokens) == 60
    assert len((await thief_reader).tokens) == 60


def copy_slot(loop: LaneLoop, of: str, over: str) -> None:
    """Write another session's page and records into a slot, as a lane that reuses it does."""
    sessions = {session.session_id: session for session in loop.sessions.values()}
    arena = loop.kv.slots.arena
    assert arena is not None
    source, target = sessions[of].kv.open[0].slot, sessions[over].kv.open[0].slot
    shape: ArenaShape = arena.shape
    for offset, size in (
        (shape.page_offset, shape.layout.page_bytes),
        (shape.rows_offset, memory_module.SIDECAR_BYTES),
    ):
        os.pwrite(arena.fd, os.pread(arena.fd, size, offset(source)), offset(target))


def rows_without_generation(patch: pytest.MonkeyPatch) -> None:
    def take(files: Any, file: Any, slot: int, owner: Any, ids: Any, page: Any, _: Any) -> int:
        files.read_all(file.fd, page, file.shape.page_offset(slot))
        return len(ids)

    patch.setattr(memory_module, "proven_rows", take)


def test_incident_e_a_reused_slot_gives_no_rows() -> None:
    """vLLM #52234: the previous prompt's answer, failed_transfers=0."""
    shown(a_source_slot_is_reused, rows_without_generation, "wrong token")


# -- F: pages freed under a writer -----------------------------------------------------------------


async def dropped_while_it_is_sealed(stage: Stage) -> None:
    """A session ends while the store copies its page, and another one takes its slot."""
    slow = stage.now.threads
    normal, slow.delay = slow.delay, lambda name: 0.5 if name == "kv-pages" else 0.0005
    generation = stage.ask(words(4, 256), 3)
    lane = await where(stage, generation)
    await stage.start(generation)
    await stage.until(lambda: not stage.up.state.turns)
    for i in range(stage.slots):
        await stage.read(stage.ask(words(50 + i, 20), 2))
    slow.delay = normal
    await stage.until(lambda: not any(loop.kv.sealing.in_flight for loop in stage.now.loops))
    pages = stage.lane(lane).kv
    assert pages.sealing.seal_failures == 0, "a page was given away under its writer"
    assert sum(loop.kv.sealing.sealed for loop in stage.now.loops) == 1
    assert len(stage.now.seam.opened.pages.match_prefix(words(4, 256), b"")) == 1  # type: ignore[union-attr]


async def where(stage: Stage, generation: Any) -> str:
    await stage.until(lambda: bool(generation.lane))
    return generation.lane


def one_lifetime(patch: pytest.MonkeyPatch) -> None:
    def drop(self: Slots, slot: Any) -> None:
        seal = self.seals.get(slot)
        if seal is not None:
            seal.session = None
        self.free(slot)

    patch.setattr(Slots, "drop", drop)


def test_incident_f_a_slot_being_written_is_kept() -> None:
    """SGLang #24527: an abort frees pages while a writer is in flight."""
    shown(dropped_while_it_is_sealed, one_lifetime, "under its writer", slots=6)


# -- H: a rejected restore leaves its bytes -------------------------------------------------------


async def a_damaged_page_between_valid_ones(stage: Stage) -> None:
    prompt = words(5, 800)
    answer = await stage.answer(prompt, 5, "s")
    await stage.until(lambda: sum(loop.kv.sealing.sealed for loop in stage.now.loops) == 3)
    store = stage.now.seam.opened
    assert store is not None
    ref = store.pages.match_prefix(prompt, b"")[1]
    info = store.pages.allocator.info(ref.page_id)
    await restart(stage)
    flip_byte(info.path, info.offset_of(ref.page_id) + 100)
    await stage.answer([*prompt, *answer.tokens, 41], 20, "s")
    await stage.answer([*prompt[:700], 42], 20)  # and of the next request


def flip_byte(path: str, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def keep_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    def loaded(self: PrefixMatcher, session: Session, good: list[bool]) -> None:
        session.frontier = len(good) * PAGE_TOKENS

    patch.setattr(PrefixMatcher, "loaded", loaded)


def test_incident_h_a_rejected_restore_leaves_nothing() -> None:
    """llama.cpp #27068: K/V of a restore that was refused answers later requests."""
    shown(a_damaged_page_between_valid_ones, keep_what_was_rejected, "wrong token")


# -- J: a NaN replaced by a number -----------------------------------------------------------------


async def a_row_of_nan(stage: Stage) -> None:
    """The step that fills a page computes NaN in one row."""
    prompt = words(6, 250)
    struck: list[int] = []

    def plan(lane: Any, step: Any) -> Plan | None:
        if not struck and any(entry.start + entry.n_tokens == 254 for entry in step.entries):
            struck.append(1)
            return Plan(0.004, nan=True, flip=True)
        return None

    stage.plans.append(plan)
    answer = await stage.read(stage.ask(prompt, 20))
    assert answer.error == "numeric_fault", f"it was not reported: {answer}"
    assert struck
    await stage.answer(prompt, 20)
    await stage.answer([*prompt, *answer.tokens], 20)


def sanitise(patch: pytest.MonkeyPatch) -> None:
    real = SimDevice.compute

    def run(self: SimDevice, batch: StepInput, addresses: Any, seeds: Any) -> Computed:
        output, digests = real(self, batch, addresses, seeds)
        rows = {row.session: row for row in output.rows}
        for index in output.nonfinite:
            key = batch.entries[index].session
            rows[key] = wire.SampledRow(key, 20, 0.0, ())
        wanting = [e.session for e in batch.entries if e.sampling is not None]
        return StepOutput(tuple(rows[key] for key in wanting), ()), digests

    patch.setattr(SimDevice, "compute", run)


def test_incident_j_a_nan_ends_its_turn() -> None:
    """SGLang #33187: sanitised to a constant, random tokens."""
    shown(a_row_of_nan, sanitise, "wrong token")


async def a_nan_after_a_page_was_published(stage: Stage) -> None:
    """A fault damages the rows of a full page, and shows as NaN only some tokens later."""
    prompt = words(6, 280)
    steps: list[str] = []

    def plan(lane: Any, step: Any) -> Plan | None:
        for entry in step.entries:
            if not steps and entry.start == 0:
                steps.append("damaged")
                return Plan(0.004, flip=True, spread=True)
            if steps == ["damaged"] and entry.start + entry.n_tokens == 300:
                steps.append("nan")
                return Plan(0.004, nan=True)
        return None

    stage.plans.append(plan)
    ends = [
        event.error.name
        async for event in stage.ask(prompt, 40)  # its first tokens are of damaged rows
        if isinstance(event, ErrorEvent)
    ]
    assert (ends, steps) == (["numeric_fault"], ["damaged", "nan"])
    assert sum(loop.kv.sealing.sealed for loop in stage.now.loops) == 1, "no page was published"
    await stage.answer(prompt, 20)


def keep_the_pages_of_a_failed_turn(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Invalidation, "invalidate_turn", lambda *_: None)


def test_incident_j_a_turn_with_a_nan_leaves_no_page_in_the_cache() -> None:
    """SGLang #33187: NaN KV in the prefix cache."""
    shown(a_nan_after_a_page_was_published, keep_the_pages_of_a_failed_turn, "wrong token")


# -- K: a slot of a batch used as an identity ------------------------------------------------------


async def answers_in_other_slots(stage: Stage) -> None:
    """A worker answers the entries of a step of two sessions in another order."""
    swapped: list[int] = []
    real = SimDevice.compute

    def run(self: SimDevice, batch: StepInput, addresses: Any, seeds: Any) -> Computed:
        output, digests = real(self, batch, addresses, seeds)
        if len(output.rows) == 2 and len(swapped) == 0 and batch.entries[0].start > 30:
            swapped.append(1)
            return dataclasses.replace(output, rows=(output.rows[1], output.rows[0])), digests
        return output, digests

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimDevice, "compute", run)
        asked = [stage.ask(words(i, 25), 40, f"s{i}") for i in range(4)]
        answers = await asyncio.gather(*[stage.start(generation) for generation in asked])
    assert swapped
    assert [len(t.tokens) for t in answers] == [40] * 4


def slots_are_identities(patch: pytest.MonkeyPatch) -> None:
    """Rows are those of the turns of a step in its order, whatever session they name."""
    real = StepWriter.commit

    def by_place(self: StepWriter, step: inflight.InFlightStep, done: wire.StepDone) -> bool:
        keys = [part.turn.session.key for part in step.parts if part.wants]
        rows = [replace(row, session=key) for row, key in zip(done.rows, keys, strict=True)]
        return real(self, step, replace(done, rows=tuple(rows)))

    patch.setattr(inflight, "check_answer", lambda in_flight, done: None)
    patch.setattr(StepWriter, "commit", by_place)


def test_incident_k_a_slot_is_no_identity() -> None:
    """GHSA-v97p-wpxp-px84: tokens of a batch slot fed into another user's request."""
    shown(answers_in_other_slots, slots_are_identities, "wrong token")


# -- L: a task that is not watched -----------------------------------------------------------------


async def a_loop_that_raises(stage: Stage) -> None:
    """A defect ends the step loop of a lane; requests that wait there end with the reason."""
    generation = stage.ask(words(7, 30), 200)
    reader = stage.start(generation)
    await stage.computed(generation, 5)
    lane = stage.lane(generation.lane)
    lane.kv.poll = bad_intent  # type: ignore[method-assign]
    await asyncio.wait([reader], timeout=60)
    assert reader.done(), "the reader waits for ever"
    answer = reader.result()
    assert answer.error == "engine_failed"
    assert stage.up.fatal is not None
    stage._wrong.clear()  # it was logged
    await restart(stage)


def bad_intent() -> None:
    raise RuntimeError("one bad intent")


def unwatched(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tasks, "spawn_vital", Tasks.spawn)


def test_incident_l_a_task_that_ends_is_reported() -> None:
    """pegaflow 0.24.2: the save thread died of one bad intent, requests waited for ever."""
    shown(a_loop_that_raises, unwatched, "waits for ever")


# -- N: a restore that reports success and is not used ---------------------------------------------


async def a_session_that_is_restored(stage: Stage) -> None:
    prompt = words(8, 700)
    answer = await stage.answer(prompt, 30, "s")
    await stage.until(lambda: sum(loop.kv.sealing.sealed for loop in stage.now.loops) == 2)
    await restart(stage)
    again = await stage.answer([*prompt, *answer.tokens, 43], 10, "s")
    assert again.done is not None
    cached = again.done.usage.cached_tokens
    metric = stage.up.metrics.kv_restored_tokens_used_total
    used = next(s.value for s in metric.collect()[0].samples if s.name.endswith("_total"))
    computed = sum(loop.meter.tokens for loop in stage.now.loops)
    assert cached >= 729, f"only {cached} of 730 tokens came back"
    assert used == cached
    assert computed == 731 - cached + 9, f"{computed} tokens computed, {cached} said to be reused"


def restored_but_not_used(patch: pytest.MonkeyPatch) -> None:
    real = StepWriter._report

    def report(self: StepWriter, turn: Any) -> None:
        real(self, turn)
        self._kv.slots.truncate(turn.session, 0)

    patch.setattr(StepWriter, "_report", report)


def test_incident_n_tokens_reported_as_restored_are_used() -> None:
    """llama.cpp #26676: the restore reports success, the next request recomputes everything."""
    shown(a_session_that_is_restored, restored_but_not_used, "said to be reused")


def test_a_flipped_bit_changes_a_token() -> None:
    """This proves that the oracle of these scenes can fail."""

    async def scene(stage: Stage) -> None:
        stage.plans.append(lambda lane, step: Plan(0.004, flip=bool(step.entries)))
        await stage.answer(words(9, 20), 3)

    with pytest.raises(AssertionError, match="wrong token"):
        play(scene)
