"""Steps as a GPU computes them: launches that are captured and replayed, and steps in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

import kernels
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.step_input import I32Array, StepInput, U64Array
from batchengine.model import Stepper
from kernels.cuda.gpu import Gpu
from kernels.cuda.graphs import Graphs
from kernels.cuda.memory import BadRows, Batch, KvRows, Rows
from kernels.cuda.ops import NOTHING_TAKEN, BegunSample, CudaOps, Taken
from kernels.cuda.page_parts import BoolArray, page_indices, seen

GRAPHS_MAX = 64  # shapes of steps


class GpuSteps:
    """Steps of one model on one GPU. Steps with one token per entry are captured the second time a
    shape occurs, and replayed from then on."""

    def __init__(self, gpu: Gpu, ops: CudaOps, stepper: Stepper) -> None:
        self.gpu, self.stepper = gpu, stepper
        self._rows = cast(KvRows, stepper.rows)
        self._ops = ops
        self._batch = cast(Batch, stepper.batch)
        self.graphs = Graphs[list[BadRows]](gpu, GRAPHS_MAX)

    def begin(
        self,
        tokens: I32Array,
        entries: I32Array,
        pages: U64Array,
        wanted: I32Array,
        taken: Taken = NOTHING_TAKEN,
        states: U64Array | None = None,
        drafts: Sequence[int] = (),
    ) -> tuple[list[BadRows], kernels.KvRows]:
        """Set a step, and begin it, the logits of `wanted` and the copies of what goes back;
        returns what Stepper.start does, and the page rows, which are there after the next wait for
        the GPU and stay until the step after the next one begins. taken: tokens that were sampled
        last. states, drafts: see Stepper.set."""
        stepper = self.stepper

        def launch() -> list[BadRows]:
            bad_rows = stepper.start(wanted)
            if len(wanted):
                stepper.logits(len(wanted))
            return cast(list[BadRows], bad_rows)

        stepper.set(tokens, entries, pages, None, states, drafts)
        self._ops.stage(self._batch, tokens, wanted, taken)
        if len(tokens) > len(entries):
            bad_rows = launch()
        else:
            key = len(tokens), len(wanted), self._batch.launches
            bad_rows = self.graphs.run(key, launch)
        fetched = self._rows.fetch(len(tokens))
        return [rows.fetch() for rows in bad_rows], fetched

    def sample(self, specs: Sequence[kernels.SampleSpec], taken: Taken) -> BegunSample:
        """Begin to sample from the logits of `wanted`. taken: see CudaOps.begin_sample."""
        return self._ops.begin_sample(cast(Rows, self.stepper.logits_rows), specs, taken)


def unwritten(shape: I32Array) -> BoolArray:
    """Whether each page of a step has no row before those that the step writes."""
    starts, pages = shape[:, 1], shape[:, 2]
    return page_indices(pages) * PAGE_TOKENS >= np.repeat(starts, pages)


class Room(NamedTuple):
    """Pages of a part that fit in the memory of a GPU: of layers with this window, 0 for none."""

    window: int
    pages_max: int


def fits(batch: StepInput, rooms: Sequence[Room]) -> bool:
    """Whether there is room for all different pages that a step sees."""
    for window, pages_max in rooms:
        codes = batch.codes[seen(batch.shape, window)]
        if len(codes) > pages_max and len(np.unique(codes)) > pages_max:
            return False
    return True


def parts_of(batch: StepInput, rooms: Sequence[Room]) -> Iterator[tuple[int, StepInput]]:
    """The step as steps for whose pages there is room, or of one entry; and where each begins."""
    counts, pages = batch.shape[:, 0], batch.shape[:, 2]
    if fits(batch, rooms):
        yield 0, batch
        return
    sees = [seen(batch.shape, room.window) for room in rooms]
    first_token, first_page = np.cumsum(counts) - counts, np.cumsum(pages) - pages
    first, held = 0, [set[int]() for _ in rooms]
    for index in range(len(batch.entries) + 1):
        own = [set[int]() for _ in rooms]
        if index < len(batch.entries):
            at = slice(first_page[index], first_page[index] + pages[index])
            own = [set(batch.codes[at][of[at]].tolist()) for of in sees]
            both = [codes | more for codes, more in zip(held, own, strict=True)]
            sizes = zip(both, rooms, strict=True)
            if index == first or all(len(codes) <= room.pages_max for codes, room in sizes):
                held = both
                continue
        token, page = first_token[first], first_page[first]
        end_token, end_page = token + counts[first:index].sum(), page + pages[first:index].sum()
        yield (
            first,
            replace(
                batch,
                entries=batch.entries[first:index],
                shape=batch.shape[first:index],
                tokens=batch.tokens[token:end_token],
                codes=batch.codes[page:end_page],
                histories=batch.histories[first:index],
                scored=batch.scored[first:index],
                untaken=tuple([i - first for i in batch.untaken if first <= i < index]),
            ),
        )
        first, held = index, own
