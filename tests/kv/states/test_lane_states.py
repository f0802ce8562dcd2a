"""Sessions of a model with recurrent state: where they go on, in scenes of a whole engine.

HashLM computes other rows with a state that is not the one behind the row before, so each answer
that `Stage.answer` compares proves its states.
"""

from __future__ import annotations

import asyncio
import shutil
from array import array
from pathlib import Path

import pytest

from batchengine.core import BatchEngineError
from batchengine.engine.audit.majority import PageContent, Statement
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.recompute import PageRecompute
from batchengine.kv.states import LaneStates, StatePool, save_interval
from batchengine.session import Session
from batchengine.session_kv import LiveState, SessionKv
from kv_store import states
from tests.simulation.stage import Stage, play, words
from tests.simulation.world import PAGE_BYTES

STATE_BYTES = 4096


def files(stage: Stage) -> list[Path]:
    return sorted(Path(stage.folder, "kv", "state").iterdir())


def cached(reading: object) -> int:
    done = getattr(reading, "done", None)
    assert done is not None
    return int(done.usage.cached_tokens)


def test_a_prompt_goes_on_where_another_one_with_the_same_beginning_was_saved() -> None:
    async def scene(stage: Stage) -> None:
        shared = words(1, 2300)
        await stage.answer([*shared, *words(2, 40)], 5)
        await stage.until(lambda: len(files(stage)) == 2)  # at 1024 and 2048
        other = await stage.answer([*shared, *words(3, 40)], 5)
        assert cached(other) == 2048
        shorter = await stage.answer([*shared[:1500], 7, 8], 5)
        assert cached(shorter) == 1024

    play(scene, recurrent=STATE_BYTES)


def test_a_session_goes_on_with_the_state_that_is_with_the_worker() -> None:
    async def scene(stage: Stage) -> None:
        prompt = words(1, 300)
        first = await stage.answer(prompt, 20, "s")
        second = await stage.answer([*prompt, *first.tokens, *words(2, 9)], 20, "s")
        assert cached(second) == 300 + 19  # all but the last token, which was only sampled
        assert not files(stage)

    play(scene, recurrent=STATE_BYTES)


def test_an_edited_history_goes_on_from_a_saved_state() -> None:
    async def scene(stage: Stage) -> None:
        prompt = words(1, 2600)
        await stage.answer(prompt, 20, "s")
        edited = await stage.answer([*prompt[:2200], *words(5, 30)], 20, "s")
        assert cached(edited) == 2048
        early = await stage.answer([*prompt[:1000], *words(6, 30)], 20, "s")
        assert cached(early) == 0

    play(scene, recurrent=STATE_BYTES)


def test_a_session_that_rests_is_saved_and_found_by_the_next_engine() -> None:
    async def scene(stage: Stage) -> None:
        prompt = words(1, 700)
        first = await stage.answer(prompt, 20, "s")
        history = [*prompt, *first.tokens]
        found = stage.up.state.sessions["", "s"]
        await stage.until(lambda: bool(files(stage)))
        await stage.until(lambda: found.kv.parked is not None)
        await stage.crash()
        again = await stage.answer([*history, 9], 20, "s")
        assert cached(again) == len(history) - 1

    play(scene, recurrent=STATE_BYTES)


@pytest.mark.parametrize("harm", ["flip", "cut", "missing", "other"])
def test_a_file_that_is_not_as_it_was_written_costs_a_recompute(harm: str) -> None:
    async def scene(stage: Stage) -> None:
        prompt = words(1, 1100)
        await stage.answer(prompt, 5)
        await stage.answer(words(4, 1100), 5)
        await stage.until(lambda: len(files(stage)) == 2)
        path, other = files(stage)
        for at, instead in ((path, other), (other, path)):
            data = bytearray(at.read_bytes())
            if harm == "flip":
                data[99] ^= 1
            elif harm == "cut":
                del data[-1:]
            elif harm == "other":
                data = bytearray(instead.read_bytes())
            at.unlink() if harm == "missing" else at.write_bytes(data)
        again = await stage.answer(prompt, 5)
        assert cached(again) == 0

    play(scene, recurrent=STATE_BYTES)


def test_wrong_states_give_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """This proves that the scenes can fail."""

    async def scene(stage: Stage) -> None:
        prompt = words(1, 1100)
        await stage.answer(prompt, 5)
        await stage.until(lambda: len(files(stage)) == 1)
        await stage.answer(prompt, 5)

    monkeypatch.setattr(states, "load_state", lambda *_: True)
    with pytest.raises(AssertionError, match=r"two contents|wrong token"):
        play(scene, recurrent=STATE_BYTES)


def test_a_killed_worker_costs_what_was_computed_since_the_last_saved_state() -> None:
    async def scene(stage: Stage) -> None:
        asked = stage.ask(words(1, 1200), 300, "s")
        reading = stage.start(asked)
        await stage.computed(asked, 40)
        stage.process(stage.home("s")).end(-9)
        await reading
        session = stage.up.state.sessions["", "s"]
        assert session.frontier == 1200 + 299

    play(scene, recurrent=STATE_BYTES)


def test_a_session_moves_with_its_state() -> None:
    async def scene(stage: Stage) -> None:
        asked = stage.ask(words(1, 700), 400, "s")
        reading = stage.start(asked)
        for n in (10, 60, 110):
            await stage.computed(asked, n)
            report = await stage.up.promote("", "s", to=stage.other("s"))
            assert report["result"] == "moved", report
            assert report["rows_recomputed"] == 0
        await reading
        computed = stage.counts["states loaded"]
        assert computed == 3

    play(scene, recurrent=STATE_BYTES, router__dwell_s=0.0)


def test_a_session_stays_where_its_state_cannot_be_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def scene(stage: Stage) -> None:
        prompt = words(1, 1100)
        asked = stage.ask(prompt, 200, "s")
        reading = stage.start(asked)
        await stage.computed(asked, 10)
        home = stage.home("s")
        with pytest.raises(BatchEngineError, match="BE3005") as refusal:
            await stage.up.promote("", "s", to=stage.other("s"))
        assert "recurrent state" in str(refusal.value)
        assert stage.home("s") == home
        await reading
        again = await stage.answer([*prompt, 5], 5)
        assert cached(again) == 0

    monkeypatch.setattr(states, "save_state", full)
    play(scene, recurrent=STATE_BYTES)


def test_more_sessions_than_slots_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots: of one session that computes, and of one that rests."""
    attach = LaneStates.attach

    def few(self: LaneStates, n_slots: int, state_bytes: int, rest_max: int) -> None:
        attach(self, min(n_slots, 3), state_bytes, rest_max)

    async def scene(stage: Stage) -> None:
        readings = [stage.start(stage.ask(words(n, 300 + n), 60, f"s{n}")) for n in range(6)]
        for reading in readings:
            assert len((await reading).tokens) == 60

    monkeypatch.setattr(LaneStates, "attach", few)
    play(scene, recurrent=STATE_BYTES)


@pytest.mark.parametrize("rest_max", [0, 8])
def test_sessions_at_rest_keep_few_slots(monkeypatch: pytest.MonkeyPatch, rest_max: int) -> None:
    """What is released is loaded by the next turn."""
    attach = LaneStates.attach

    def few(self: LaneStates, n_slots: int, state_bytes: int, _: int) -> None:
        attach(self, n_slots, state_bytes, rest_max)

    async def scene(stage: Stage) -> None:
        prompt = words(1, 300)
        first = await stage.answer(prompt, 20, "s")
        await stage.until(lambda: len(files(stage)) == 1)
        await asyncio.sleep(1.0)
        session = stage.up.state.sessions["", "s"]
        assert (session.kv.state is None) == (rest_max == 0)
        again = await stage.answer([*prompt, *first.tokens, 5], 20, "s")
        assert cached(again) == 300 + 19

    monkeypatch.setattr(LaneStates, "attach", few)
    play(scene, recurrent=STATE_BYTES)


def test_a_session_that_gives_up_its_slot_is_saved_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has rested for less than the time after which sessions are parked."""
    attach = LaneStates.attach

    def few(self: LaneStates, n_slots: int, state_bytes: int, _: int) -> None:
        attach(self, 3, state_bytes, 8)

    async def scene(stage: Stage) -> None:
        prompt = words(1, 300)
        first = await stage.answer(prompt, 20, "s")
        assert not files(stage)
        home = stage.home("s")
        others = [stage.start(stage.ask(words(n, 40 + n), 60, f"t{n}")) for n in range(2, 12)]
        session = stage.up.state.sessions["", "s"]
        await stage.until(lambda: session.kv.state is None)
        for other in others:
            await other
        assert stage.home("s") == home
        again = await stage.answer([*prompt, *first.tokens, 5], 20, "s")
        assert cached(again) >= 256 + 19

    monkeypatch.setattr(LaneStates, "attach", few)
    play(scene, recurrent=STATE_BYTES)


def test_a_dropped_session_leaves_no_state() -> None:
    async def scene(stage: Stage) -> None:
        await stage.answer(words(1, 1300), 5, "s")
        await stage.answer(words(2, 1300), 5, "t")
        await stage.until(lambda: len(files(stage)) >= 2)
        before = files(stage)
        await stage.up.drop("", "s")
        left = files(stage)
        assert 0 < len(left) < len(before)
        assert cached(await stage.answer(words(2, 1300), 5, "u")) == 1024
        assert cached(await stage.answer(words(1, 1300), 5, "v")) == 0

    play(scene, recurrent=STATE_BYTES)


async def at_rest(stage: Stage) -> tuple[list[int], Session, LaneLoop]:
    """A session that has just answered, whose state is not saved: its history and its lane."""
    prompt = words(1, 300)
    first = await stage.answer(prompt, 20, "s")
    session = stage.up.state.sessions["", "s"]
    loop = stage.lane(stage.home("s"))
    assert not files(stage)
    assert session.kv.state is not None
    return [*prompt, *first.tokens], session, loop


def test_a_state_is_kept_when_its_session_is_forgotten_before_it_is_written() -> None:
    async def scene(stage: Stage) -> None:
        _, session, loop = await at_rest(stage)
        loop.kv.states.save(session)
        stage.up.state.forget(session)
        await stage.until(lambda: not loop.kv.states.saving)
        await asyncio.sleep(0.1)
        assert len(files(stage)) == 1

    play(scene, recurrent=STATE_BYTES)


def test_a_recompute_does_not_change_a_state_that_waits_to_be_saved() -> None:
    """It takes the slot of a session that was forgotten, before any other frame."""

    async def scene(stage: Stage) -> None:
        history, session, loop = await at_rest(stage)
        assert session.kv.state is not None
        slot = session.kv.state.slot.index
        await loop.pause()
        loop.kv.park(session)
        assert loop.kv.states.saving
        stage.up.state.forget(session)
        recompute = PageRecompute(words(7, 256), [], urgent=True)
        loop.ask_recompute(recompute)
        await recompute.digest
        assert recompute.state is not None
        assert recompute.state.index == slot
        loop.recomputes.close(recompute)
        loop.unpause()
        await stage.until(lambda: not loop.kv.has_chores)
        await asyncio.sleep(0.1)
        await stage.answer([*history, 9], 5, "s")
        assert not files(stage)

    play(scene, recurrent=STATE_BYTES)


def test_a_state_that_is_being_saved_is_erased_with_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wiped = list[str]()
    real = states._wipe

    def wipe(path: str) -> None:
        wiped.append(path)
        real(path)

    async def scene(stage: Stage) -> None:
        _, session, loop = await at_rest(stage)
        loop.kv.states.save(session)
        assert loop.kv.states.saving
        await stage.up.drop("", "s")
        assert not loop.kv.states.saving
        assert not files(stage)
        assert len(wiped) == 1

    monkeypatch.setattr(states, "_wipe", wipe)
    play(scene, recurrent=STATE_BYTES)


def test_a_state_whose_writer_dies_after_the_write_is_counted() -> None:
    async def scene(stage: Stage) -> None:
        _, session, loop = await at_rest(stage)
        assert loop.kv.slots.owns(session)
        loop.kv.states.save(session)
        key, parent = loop.kv.states.key_at(session, session.frontier)
        saved = loop.kv.states._store.states
        assert saved is not None
        states.save_state(saved.path(key, parent), memoryview(bytes(STATE_BYTES)), 1)
        shutil.copy(saved.path(key, parent), saved.path(key, parent) + ".77.tmp")
        stage.process(loop.lane.name).end(-9)
        await stage.until(lambda: key in saved)
        await stage.until(lambda: len(files(stage)) == 1)

    play(scene, recurrent=STATE_BYTES)


def test_an_invalid_page_takes_the_states_behind_it_along() -> None:
    async def scene(stage: Stage) -> None:
        prompt = words(1, 2300)
        await stage.answer(prompt, 5, "s")
        await stage.until(lambda: len(files(stage)) == 2)
        session = stage.up.state.sessions["", "s"]
        loop = stage.lane(stage.home("s"))
        loop.kv.disputes.invalidate([loop.kv.states.key_at(session, 1280)[0]])
        saved = loop.kv.states._store.states
        assert saved is not None
        assert loop.kv.states.key_at(session, 1024)[0] in saved
        assert loop.kv.states.key_at(session, 2048)[0] not in saved
        loop.recheck()
        await stage.answer(words(4, 20), 2)

    play(scene, recurrent=STATE_BYTES)


def test_an_audit_that_finds_a_difference_drops_all_states() -> None:
    """They may be of the lane that was wrong, and no digest shows it."""

    ended = list[bool]()

    async def scene(stage: Stage) -> None:
        prompt = words(1, 1300)
        first = await stage.answer(prompt, 5, "s")
        await stage.until(lambda: len(files(stage)) == 1)
        session = stage.up.state.sessions["", "s"]
        stage.lane(stage.home("s")).kv.states.save(session)
        page = PageContent(array("i", prompt[:256]), b"")
        assert stage.up.running is not None
        wrong = Statement(stage.other("s"), bytes(16))  # no page of the session is of this lane
        found = await stage.up.running.audit.disputed(page, wrong)
        assert found is not None
        await asyncio.sleep(0.1)
        assert not files(stage)
        assert session.kv.state is None
        again = await stage.answer([*prompt, *first.tokens, 9], 5, "s")
        assert cached(again) == 0
        ended.append(True)

    with pytest.raises(AssertionError, match="logged: numerics fault"):
        play(scene, recurrent=STATE_BYTES)
    assert ended


def test_readers_that_are_slow_hold_up_no_other_turn() -> None:
    """Their turns are paused, and keep their seats and their states while there are slots."""

    async def scene(stage: Stage) -> None:
        slow = [stage.ask(words(n, 40), 6000) for n in range(40)]
        await asyncio.sleep(30)
        assert all(one.paused_since_ms is not None for one in slow)
        clock = asyncio.get_running_loop()
        began = clock.time()
        await stage.answer(words(99, 300), 50)
        assert clock.time() - began < 0.4
        for one in slow:
            one.cancel()

    play(scene, recurrent=STATE_BYTES, slots=400, store__budget_bytes=1000 * PAGE_BYTES)


def test_no_state_is_written_that_is_larger_than_the_budget() -> None:
    async def scene(stage: Stage) -> None:
        await stage.answer(words(1, 300), 5)
        saved = stage.lane("left").kv.states._store.states
        assert saved is not None
        saved.budget_bytes = STATE_BYTES
        await stage.answer(words(1, 1300), 5, "s")
        await asyncio.sleep(3)
        assert not files(stage)

    play(scene, recurrent=STATE_BYTES)


def test_slots_are_released_once() -> None:
    pool = StatePool(2)
    one, two = pool.take(), pool.take()
    assert one is not None
    assert two is not None
    assert pool.take() is None
    one.release()
    one.release()
    assert pool.n_free == 1
    three = pool.take()
    assert three is not None
    assert three.index == one.index
    one.release()  # it is another's now
    assert pool.n_free == 0


def test_states_are_saved_as_far_apart_as_pages_are_large() -> None:
    assert save_interval(4096, 1088) == 1024
    assert save_interval(157 << 20, 34816) == 2560  # Qwen3.5 27B
    assert save_interval(66 << 20, 10608) == 3328  # 35B-A3B


def test_a_table_keeps_no_state_of_tokens_that_it_lost() -> None:
    pool, kv = StatePool(1), SessionKv()
    slot = pool.take()
    assert slot is not None
    kv.set_state(LiveState(slot, 300))
    kv.cut_timeline(300)
    assert kv.state is not None
    kv.cut_timeline(299)
    assert kv.state is None
    assert pool.n_free == 1
