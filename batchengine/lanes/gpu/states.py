"""Recurrent states of a GPU lane: slots in memory of the GPU, saved to and loaded from files.

The GPU alone has them. Copies and steps take effect in the order of their calls: a state is saved
as the steps before have left it, and a state is loaded when no step before reads its slot any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from batchengine.lanes.state_memory import load_from_file, save_to_file
from batchengine.lanes.step_input import BadStep, StepInput, U64Array
from batchengine.wire import lane as wire
from kernels.cuda.gpu import Gpu

log = logging.getLogger("batchengine.worker")


class DeviceStates:
    """A `StateSlots` of `n_slots` states of `state_bytes` each. A slot takes memory from its first
    use on."""

    def __init__(
        self, gpu: Gpu, n_slots: int, state_bytes: int, folder: str, make_room: Callable[[], bool]
    ) -> None:
        """make_room: gives up memory of the GPU; False if there is none to give up."""
        self.state_bytes = state_bytes
        self._n_slots = n_slots
        self._gpu, self._make_room = gpu, make_room
        self._folder = folder
        self._held: dict[int, int] = {}  # addresses by slot
        self._on_host: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None

    def __len__(self) -> int:
        return len(self._held)

    @property
    def n_slots(self) -> int:
        return self._n_slots

    def addresses(self, batch: StepInput) -> U64Array:
        """Per entry the addresses of the state that it reads, 0 at position 0, and of the one that
        it writes (n_entries, 2). Raises MemoryError, and BadStep for a state that is not there."""
        pairs = list[tuple[int, int]]()
        for entry in batch.entries:
            if entry.state_read >= 0 and entry.state_read not in self._held:
                raise BadStep(f"session {entry.session}: no state was written to its slot")
            pairs.append((self._held.get(entry.state_read, 0), self._slot(entry.state_written)))
        return np.array(pairs, np.uint64).reshape(-1, 2)

    def move(self, step: wire.Step) -> tuple[bool, ...]:
        """Save and load what the step says; see StepDone.states."""
        return (
            *[self._save(file) for file in step.save_states],
            *[self._load(file) for file in step.load_states],
        )

    def _save(self, file: wire.StateFile) -> bool:
        address = self._held.get(file.slot)
        if address is None:
            log.warning("a state was not saved: no step has written it")
            return False
        state = self._state_on_host()
        self._gpu.copy_out(address, state)
        return save_to_file(self._folder, file, state.data)

    def _load(self, file: wire.StateFile) -> bool:
        state = self._state_on_host()
        if not load_from_file(self._folder, file, state.data):
            return False
        while True:
            try:
                self._gpu.copy_in(self._slot(file.slot), state)
            except MemoryError:
                if not self._make_room():
                    log.warning("a state was not loaded: no memory is left on the GPU")
                    return False
            else:
                return True

    def _slot(self, index: int) -> int:
        """The address of a slot. Raises MemoryError."""
        if index not in self._held:
            self._held[index] = self._gpu.allocate(self.state_bytes)
        return self._held[index]

    def _state_on_host(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Host memory for one state on its way."""
        if self._on_host is None:
            self._on_host = np.zeros(self.state_bytes, np.uint8)
            self._gpu.pin(self._on_host)
        return self._on_host
