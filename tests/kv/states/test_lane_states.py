"""Sessions of a model with recurrent state: where they go on, in scenes of a whole engine.

HashLM computes other rows with a state that is not the one behind the row before, so each answer
that `Stage.answer` compares proves its states.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from batchengine.core import BatchEngineError
from batchengine.kv.states import LaneStates, StatePool, save_interval
from batchengine.session_kv import LiveState, SessionKv
from kv_store import states
from tests.simulation.stage import Stage, play, words

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
