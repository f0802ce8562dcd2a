"""Slots for recurrent states of a worker: which steps are refused, and where states lie."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from batchengine.lanes.state_memory import NoStates, StateMemory, check_states, make_states
from batchengine.lanes.step_input import BadStep, StepInput
from batchengine.wire import lane as wire
from kv_store import keys, states

NAME = states.state_name(bytes(32), keys.ROOT_KEY)
SLOTS = 4


def entry(session: int, start: int, read: int, written: int) -> wire.Entry:
    return wire.Entry(session, 1, start, 1, 1, None, state_read=read, state_written=written)


GOOD = wire.Step(
    (entry(1, 0, -1, 0), entry(2, 5, 1, 2)),
    save_states=(wire.StateFile(1, NAME, 0),),
    load_states=(wire.StateFile(3, NAME, (1 << 64) - 1),),
)


def test_a_step_whose_states_have_slots_of_their_own_is_taken() -> None:
    check_states(GOOD, SLOTS)
    check_states(wire.Step((entry(1, 7, -1, -1),)), 0)
    # Two entries may read one state: nothing changes it.
    check_states(wire.Step((entry(1, 7, 0, 1), entry(2, 7, 0, 2))), SLOTS)


@pytest.mark.parametrize(
    "changed",
    [
        {"entries": (entry(1, 0, 1, 0),)},  # a state before the first token
        {"entries": (entry(1, 5, -1, 0),)},  # none behind some
        {"entries": (entry(1, 5, 0, -1),)},
        {"entries": (entry(1, 5, 0, 4),)},
        {"entries": (entry(1, 5, 4, 0),)},
        {"entries": (entry(1, 5, -2, 0),)},
        {"entries": (entry(1, 5, 2, 2),)},  # read and written
        {"entries": (entry(1, 5, 0, 2), entry(2, 5, 1, 2))},
        {"entries": (entry(1, 5, 0, 1), entry(2, 5, 1, 2))},
        {"save_states": (wire.StateFile(4, NAME, 0),)},
        {"load_states": (wire.StateFile(-1, NAME, 0),)},
        {"load_states": (wire.StateFile(1, "../../etc/passwd", 0),)},
        {"save_states": (wire.StateFile(1, NAME + "x", 0),)},
        {"save_states": (wire.StateFile(1, NAME, 1 << 64),)},
    ],
)
def test_a_step_with_impossible_states_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(BadStep):
        check_states(msgspec.structs.replace(GOOD, **changed), SLOTS)


def test_a_model_without_states_has_none() -> None:
    with pytest.raises(BadStep):
        check_states(GOOD, 0)
    with pytest.raises(BadStep):
        check_states(wire.Step((), save_states=GOOD.save_states), 0)
    assert isinstance(make_states(wire.Attach("", 1, 1, "")), NoStates)


def test_states_lie_apart_and_come_back_from_their_files(tmp_path: Path) -> None:
    attach = wire.Attach("", 1, 1, "", state_slots=3, state_bytes=5000, states_dir=str(tmp_path))
    memory = make_states(attach)
    assert isinstance(memory, StateMemory)
    for slot in range(3):
        memory.slot(slot)[:] = bytes([slot + 1]) * 5000
    batch = StepInput(
        (entry(1, 0, -1, 0), entry(2, 5, 1, 2)), np.zeros((2, 3), np.int32),
        np.zeros(2, np.int32), np.zeros(2, np.uint64), [None, None], [],
    )  # fmt: skip
    addresses = memory.addresses(batch)
    assert addresses[0, 0] == 0
    apart = np.diff(np.sort(addresses[addresses > 0].astype(np.int64)))
    assert (apart >= 5000).all()
    assert not (addresses % 64).any()
    saved = memory.move(wire.Step((), save_states=(wire.StateFile(1, NAME, 9),)))
    memory.slot(1)[:] = bytes(5000)
    loads = (wire.StateFile(2, NAME, 9), wire.StateFile(0, NAME, 8))
    found = memory.move(wire.Step((), load_states=loads))
    assert (saved, found) == ((True,), (True, False))
    assert bytes(memory.slot(2)) == b"\2" * 5000
    missing = wire.StateFile(1, states.state_name(bytes([1]) * 32, keys.ROOT_KEY), 0)
    assert memory.move(wire.Step((), load_states=(missing,))) == (False,)
    gone = wire.Attach("", 1, 1, "", state_slots=3, state_bytes=64, states_dir=f"{tmp_path}/no")
    assert make_states(gone).move(wire.Step((), save_states=(missing,))) == (False,)
