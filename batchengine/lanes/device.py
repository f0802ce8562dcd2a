"""The interface of a worker's device: it loads a model, maps pages and computes steps.

A step names pages by slot codes. Only the device translates a code to an address, so that it may
keep copies in a memory of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.ring import Ring
from batchengine.lanes.state_memory import StateSlots
from batchengine.lanes.step_input import I32Array, StepInput, StepOutput
from batchengine.wire import lane as wire
from kv_store.layout import PageLayout

Report = Callable[[str, str, float, float], None]  # stage, detail, progress 0..1, seconds


class LaneMemory(Protocol):
    """The pages of one lane: its arena, and sealed pages read-only; and its recurrent states."""

    states: StateSlots

    @abstractmethod
    def check(self, step: wire.Step) -> None:
        """Raise BadStep for a chore with an impossible slot, row or epoch, before any is done."""

    @abstractmethod
    def prepare(self, step: wire.Step, imported: Sequence[I32Array]) -> tuple[int, ...]:
        """Do the chores before the computation: poison, reserve, relabel, import, touch, in order.

        `imported`: per ImportRows the tokens that its rows must hold. Returns the number of rows
        that were proven and copied, per ImportRows.
        """

    @abstractmethod
    def finish(self, step: wire.Step) -> tuple[tuple[bytes, ...], tuple[bool, ...]]:
        """Do the chores after the computation: a digest per Digest, an answer per Verify."""


class StartedStep(Protocol):
    """A step that a device has been given.

    may_be_followed: whether the next step may be started before `tokens`, once `sample` was called.
    """

    @property
    @abstractmethod
    def may_be_followed(self) -> bool: ...

    @property
    @abstractmethod
    def is_computed(self) -> bool:
        """Whether `tokens` does not wait for the device."""

    @abstractmethod
    def sample(self) -> None:
        """Give the device what it lacks to sample: this waits for masks."""

    @abstractmethod
    def tokens(self) -> Mapping[int, int]:
        """The token that was sampled for each session, once the device has computed the step."""

    @abstractmethod
    def finish(self) -> StepOutput:
        """Do what is left to do on the host, after `tokens`."""


class Device(Protocol):
    """Computes the steps of a model. A step carries everything that is kept of a session, but for
    rows that are stored late (`do_deferred`).

    overlaps: it computes a step that is started while the host finishes the one before.
    """

    overlaps: bool

    @abstractmethod
    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts:
        """Map or pack the weights and test the arithmetic. Raises BatchEngineError."""

    @abstractmethod
    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        """Map the arena; steps may run afterwards. Raises BadStep or StoreError."""

    @abstractmethod
    def connect(self, links: DataLinks) -> Ring:
        """Attend to pages over data links, for peers and through them; after attach."""

    @abstractmethod
    def start(self, batch: StepInput, after: StartedStep | None = None) -> StartedStep:
        """Start one forward pass: it writes the rows of every entry, and samples for those with
        `sampling`. after: the step before, which `may_be_followed`, if its tokens are not known
        yet; then `take_samples` gives `batch` those that it takes before its own are asked for."""

    @abstractmethod
    def do_deferred(self) -> bool:
        """Do one part of the deferred work; return whether more is left. Called while no step has
        come."""

    @abstractmethod
    def close(self) -> None:
        """Do what was put off, and end the device's threads."""
