"""Recurrent states of one worker's sequences: slots in memory of its own, saved to and loaded from
files.

A step reads one slot and writes another one, so a step that comes to nothing costs no state. Slots
are the engine's: it alone knows whose state is in which.
"""

from __future__ import annotations

import logging
import mmap
import os
from abc import abstractmethod
from typing import Protocol

import numpy as np

import kernels
from batchengine.lanes.step_input import BadStep, StepInput, U64Array
from batchengine.wire import lane as wire
from kv_store import states

log = logging.getLogger("batchengine.worker")

MAP_NORESERVE = 0x4000  # of Linux; the module has no name for it before Python 3.13
U64_MAX = (1 << 64) - 1
REST_SHARE = 16  # of the memory that is counted on: for states of sessions at rest


def states_of_seats(entries_max: int, steps_in_flight: int) -> int:
    """States that a worker keeps: of each seat the one at the frontier, and one per step."""
    return entries_max * (1 + steps_in_flight)


def states_at_rest(entries_max: int, memory_bytes: int, state_bytes: int) -> int:
    """States of sessions at rest that a worker keeps beside those, in a part of `memory_bytes`."""
    return min(entries_max, memory_bytes // REST_SHARE // max(1, state_bytes))


def check_states(step: wire.Step, n_slots: int) -> None:
    """Raise BadStep unless every state that the step names has a slot, and no slot is written
    twice, or written while it is read."""
    written, read = list[int](), list[int]()
    for entry in step.entries:
        if not n_slots:
            if (entry.state_read, entry.state_written) != (-1, -1):
                raise BadStep(f"session {entry.session}: a state, and this model has none")
            continue
        if (entry.state_read == -1) != (entry.start == 0):
            raise BadStep(f"session {entry.session}: state {entry.state_read} at {entry.start}")
        written.append(entry.state_written)
        read += [entry.state_read] if entry.start else []
    files = (*step.save_states, *step.load_states)
    for slot in (*written, *read, *(file.slot for file in files)):
        if not 0 <= slot < n_slots:
            raise BadStep(f"state {slot} of {n_slots}")
    if len(set(written)) != len(written) or not set(written).isdisjoint(read):
        raise BadStep("two entries for one state")
    for file in files:
        if not (states.is_state_name(file.name) and 0 <= file.seed <= U64_MAX):
            raise BadStep("a file that is not named like a state")


class StateMemory:
    """States in host memory, `n_slots` of `state_bytes` each."""

    def __init__(self, n_slots: int, state_bytes: int, folder: str) -> None:
        self._n_slots = n_slots
        self.state_bytes = state_bytes
        self._folder = folder
        self._stride = -(-state_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._map = mmap.mmap(-1, max(1, n_slots) * self._stride, flags)  # filled as it is used
        self._memory = memoryview(self._map)
        self._base = kernels.address_of(self._memory)

    @property
    def n_slots(self) -> int:
        return self._n_slots

    def slot(self, index: int) -> memoryview:
        """The state in a slot."""
        return self._memory[index * self._stride : index * self._stride + self.state_bytes]

    def addresses(self, batch: StepInput) -> U64Array:
        """Per entry the addresses of the state that it reads, 0 at position 0, and of the one that
        it writes (n_entries, 2)."""
        pairs = [(entry.state_read, entry.state_written) for entry in batch.entries]
        slots = np.array(pairs, np.int64).reshape(-1, 2)
        found = np.uint64(self._base) + slots.astype(np.uint64) * np.uint64(self._stride)
        found[slots < 0] = 0
        return found

    def move(self, step: wire.Step) -> tuple[bool, ...]:
        """Save and load what the step says; see StepDone.states."""
        return (
            *[save_to_file(self._folder, file, self.slot(file.slot)) for file in step.save_states],
            *[
                load_from_file(self._folder, file, self.slot(file.slot))
                for file in step.load_states
            ],
        )


def save_to_file(folder: str, file: wire.StateFile, state: memoryview) -> bool:
    """Save a state; False if the disk does not take it."""
    try:
        states.save_state(os.path.join(folder, file.name), state, file.seed)
    except OSError as error:
        log.warning("a state was not saved: %s", error)
        return False
    return True


def save_named(folder: str, name: str, seed: int, state: memoryview) -> bool:
    """As `save_to_file`, for a state that no slot has."""
    return save_to_file(folder, wire.StateFile(-1, name, seed), state)


def load_from_file(folder: str, file: wire.StateFile, state: memoryview) -> bool:
    """Load a state; False if its file is missing or damaged."""
    try:
        is_good = states.load_state(os.path.join(folder, file.name), state, file.seed)
    except OSError as error:
        log.warning("a state was not loaded: %s", error)
        return False
    if not is_good:
        log.warning("the state %s is damaged: it is computed again", file.name)
    return is_good


class NoStates:
    """The states of a model without any."""

    @property
    def n_slots(self) -> int:
        return 0

    def addresses(self, batch: StepInput) -> U64Array | None:
        """None: steps of such a model have no states."""
        return None

    def move(self, step: wire.Step) -> tuple[bool, ...]:
        """None are saved or loaded."""
        return ()


class StateSlots(Protocol):
    """The states of a lane's sequences."""

    @property
    @abstractmethod
    def n_slots(self) -> int: ...

    @abstractmethod
    def addresses(self, batch: StepInput) -> U64Array | None:
        """Per entry the addresses of the states that it reads and writes; None without states."""

    @abstractmethod
    def move(self, step: wire.Step) -> tuple[bool, ...]:
        """Save and load what the step says; see StepDone.states."""


def make_states(attach: wire.Attach) -> StateSlots:
    """The states of a worker in host memory, as its Attach says."""
    if not attach.state_bytes:
        return NoStates()
    return StateMemory(attach.state_slots, attach.state_bytes, attach.states_dir)
