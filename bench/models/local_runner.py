"""A whole model in this process: pages in anonymous memory, no daemon, no files but the weights.

Owns `LocalRunner`, which orders the same calls as a lane worker, so that tests of arithmetic and
benches of kernels need no engine. KV lasts as long as the runner; prefixes are not shared, and
nothing is scheduled: the caller sets every step.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine.core import PAGE_TOKENS, Sampling
from batchengine.gguf import GgufFile
from batchengine.model import CpuOps, Model, Stepper, sample_spec
from batchengine.model.forward import F32
from batchengine.model.ops import U64
from batchengine.weights import open_weights

Mask = NDArray[np.uint32]
MaskOf = Callable[[int, list[int]], Mask | None]


def no_mask(_index: int, _tokens: list[int]) -> Mask | None:
    """Any token may follow."""
    return None


@dataclass(eq=False, slots=True)
class LocalSequence:
    """A token timeline: tokens whose KV is in `pages` (indexes into the runner's memory).

    state: the recurrent state behind them, of a model that has one; next_state: of the step that is
    set.
    """

    tokens: list[int] = field(default_factory=list[int])
    pages: list[int] = field(default_factory=list[int])
    state: mmap.mmap | None = None
    next_state: mmap.mmap | None = None

    @property
    def frontier(self) -> int:
        """First position without KV."""
        return len(self.tokens)


class RunnerError(Exception):
    """The runner has no page left, or a row of a step is not finite."""


class LocalRunner:
    """Evaluates and generates with one model on one thread pool.

    tokens_max: rows of one step; entries_max: timelines in one step; n_pages: KV memory in
    pages of 256 tokens for all timelines together; logits_max: rows with logits in one step.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cache_dir: Path,
        threads: int = 1,
        tokens_max: int = 512,
        entries_max: int = 16,
        n_pages: int = 64,
        logits_max: int | None = None,
    ) -> None:
        self.pool = kernels.Pool(threads)
        with GgufFile(path) as gguf:
            self.model = Model(open_weights(gguf, self.pool, cache_dir=cache_dir))
        self.spec = self.model.spec
        self.stepper = Stepper(
            CpuOps(self.pool),
            self.model,
            tokens_max=tokens_max,
            entries_max=entries_max,
            pages_max=n_pages,
            logits_max=logits_max,
        )
        self.tokens_max = tokens_max
        self.entries_max = entries_max
        self.page_bytes = -(-self.model.shape.payload_bytes // 64) * 64
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory would have no huge pages
        self._memory = mmap.mmap(-1, n_pages * self.page_bytes, flags)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._base = kernels.address_of(self._memory)
        self._free = list(range(n_pages - 1, -1, -1))
        self._free_images: list[mmap.mmap] = []  # of recurrent state, which timelines had before
        self._step_images: list[mmap.mmap] = []  # that the step which is set writes

    def __enter__(self) -> LocalRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the threads of the pool."""
        self.pool.close()

    # -- timelines

    def reserve(self, sequence: LocalSequence, n_tokens: int) -> None:
        """Gives the timeline zeroed pages for `n_tokens` tokens in all."""
        while len(sequence.pages) * PAGE_TOKENS < n_tokens:
            if not self._free:
                raise RunnerError("no free KV page: n_pages is too small")
            page = self._free.pop()
            start = page * self.page_bytes
            self._memory[start : start + self.page_bytes] = bytes(self.page_bytes)
            sequence.pages.append(page)

    def release(self, sequence: LocalSequence) -> None:
        """Takes the pages of a timeline back; the timeline is empty afterwards."""
        self._free.extend(reversed(sequence.pages))
        sequence.pages.clear()
        sequence.tokens.clear()
        self._free_images += [i for i in (sequence.state, sequence.next_state) if i is not None]
        sequence.state = sequence.next_state = None

    def fork(self, sequence: LocalSequence, n_tokens: int | None = None) -> LocalSequence:
        """A timeline with the first `n_tokens` tokens (default: all) and pages of its own. Raises
        RunnerError for fewer tokens of a model with recurrent state."""
        copy = LocalSequence(sequence.tokens[:n_tokens])
        if self.model.states is not None:
            if copy.frontier not in (0, sequence.frontier):
                raise RunnerError("there is no state inside a timeline")
            if copy.frontier and sequence.state is not None:
                copy.state = self._image(self.model.states)
                copy.state[:] = sequence.state[:]
        self.reserve(copy, copy.frontier)
        for source, target in zip(sequence.pages, copy.pages, strict=False):
            a, b = source * self.page_bytes, target * self.page_bytes
            self._memory[b : b + self.page_bytes] = self._memory[a : a + self.page_bytes]
        return copy

    def page(self, sequence: LocalSequence, index: int) -> bytes:
        """The bytes of one KV page."""
        start = sequence.pages[index] * self.page_bytes
        return self._memory[start : start + self.model.shape.payload_bytes]

    # -- one step

    def set_step(
        self,
        entries: Sequence[tuple[LocalSequence, Sequence[int]]],
        drafts: Sequence[int] = (),
    ) -> list[int]:
        """Sets a step that appends tokens to timelines; returns the last row of each entry.
        drafts: see Stepper.set."""
        tokens: list[int] = []
        table: list[tuple[int, int, int]] = []
        addresses: list[int] = []
        last_rows: list[int] = []
        for sequence, new in entries:
            self.reserve(sequence, sequence.frontier + len(new))
            # Pages that hold [0, frontier + new), no more: page p is [256 p, 256 p + 256).
            n_pages = -(-(sequence.frontier + len(new)) // PAGE_TOKENS)
            table.append((len(new), sequence.frontier, n_pages))
            tokens += new
            addresses += [self._base + page * self.page_bytes for page in sequence.pages[:n_pages]]
            last_rows.append(len(tokens) - 1)
        self.stepper.set(
            np.array(tokens, np.int32),
            np.array(table, np.int32).reshape(-1, 3),
            np.array(addresses, np.uint64),
            states=self._states([sequence for sequence, _ in entries]),
            drafts=drafts,
        )
        return last_rows

    def _states(self, sequences: Sequence[LocalSequence]) -> U64 | None:
        """Where the states of a step's timelines are read and written, if the model has some."""
        if (shape := self.model.states) is None:
            return None
        addresses: list[tuple[int, int]] = []
        self._step_images.clear()
        for sequence in sequences:
            sequence.next_state = sequence.next_state or self._image(shape)
            self._step_images.append(sequence.next_state)
            before = 0 if sequence.state is None else kernels.address_of(sequence.state)
            addresses.append((before, kernels.address_of(sequence.next_state)))
        return np.array(addresses, np.uint64)

    def _image(self, shape: kernels.StateShape) -> mmap.mmap:
        """Memory for one state image, with any bytes."""
        return self._free_images.pop() if self._free_images else mmap.mmap(-1, shape.image_bytes)

    def commit(self, entries: Sequence[tuple[LocalSequence, Sequence[int]]]) -> None:
        """Counts the tokens of the step that was set, once its layers have run, to timelines."""
        for sequence, new in entries:
            sequence.tokens.extend(new)
            if sequence.next_state is not None:
                if sequence.state is not None:
                    self._free_images.append(sequence.state)
                sequence.state, sequence.next_state = sequence.next_state, None

    def step(
        self,
        entries: Sequence[tuple[LocalSequence, Sequence[int]]],
        rows: Sequence[int] | None = None,
    ) -> F32:
        """Appends tokens to timelines; logits of `rows` (default: the last row of each entry).

        The result aliases the step's buffer. Raises RunnerError for a nonfinite entry.
        """
        last_rows = self.set_step(entries)
        wanted = np.array(last_rows if rows is None else rows, np.int32)
        nonfinite = self.stepper.run(wanted)
        if nonfinite:
            raise RunnerError(f"entries {nonfinite} are nonfinite: a row has a NaN or an infinity")
        self.commit(entries)
        return self.stepper.logits(len(wanted)).view(len(wanted))

    # -- whole prompts

    def prefill(
        self, sequence: LocalSequence, tokens: Sequence[int], chunk: int | None = None
    ) -> F32:
        """Appends a prompt in chunks; logits (n_vocab,) after its last token, copied."""
        size = min(chunk or self.tokens_max, self.tokens_max)
        for start in range(0, len(tokens) - size, size):
            self.step([(sequence, tokens[start : start + size])], rows=())
        rest = (len(tokens) - 1) % size + 1
        return self.step([(sequence, tokens[-rest:])])[0].copy()

    def all_logits(self, tokens: Sequence[int], chunk: int | None = None) -> F32:
        """Logits (n_tokens, n_vocab) after every token of a fresh timeline."""
        size = min(chunk or self.tokens_max, self.tokens_max, self.stepper.logits_max)
        sequence = LocalSequence()
        out = np.empty((len(tokens), self.spec.n_vocab), np.float32)
        try:
            for start in range(0, len(tokens), size):
                part = tokens[start : start + size]
                out[start : start + len(part)] = self.step([(sequence, part)], range(len(part)))
        finally:
            self.release(sequence)
        return out

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n_tokens: int,
        *,
        sampling: Sequence[Sampling] | Sampling | None = None,
        chunk: int | None = None,
        eos: Iterable[int] = (),
        mask_of: MaskOf = no_mask,
        begun: Sequence[LocalSequence] = (),
    ) -> list[list[int]]:
        """Continues every prompt by up to `n_tokens`, all of them decoded in one batch.

        Stops a timeline at a token of `eos` (which is part of the result). `mask_of` says which
        tokens may follow a timeline's answer: by its index and its tokens so far. begun: one
        timeline for each prompt, with tokens that it begins with; they are the caller's afterwards.
        """
        if isinstance(sampling, Sampling) or sampling is None:
            sampling = [sampling or Sampling()] * len(prompts)
        stop = frozenset(eos)
        timelines = begun or [LocalSequence() for _ in prompts]
        results: list[list[int]] = [[] for _ in prompts]
        try:
            for index, prompt in enumerate(prompts):
                self.prefill(timelines[index], prompt[timelines[index].frontier :], chunk)
                self._choose([index], timelines, sampling, results, mask_of)
            live = self._live(results, n_tokens, stop)
            while live:
                for start in range(0, len(live), self.entries_max):
                    part = live[start : start + self.entries_max]
                    self.step([(timelines[i], results[i][-1:]) for i in part])
                    self._choose(part, timelines, sampling, results, mask_of)
                live = self._live(results, n_tokens, stop)
        finally:
            for timeline in () if begun else timelines:
                self.release(timeline)
        return results

    def _live(self, results: list[list[int]], n_tokens: int, stop: frozenset[int]) -> list[int]:
        return [i for i, r in enumerate(results) if len(r) < n_tokens and not (r and r[-1] in stop)]

    def _choose(
        self,
        indexes: list[int],
        timelines: Sequence[LocalSequence],
        sampling: Sequence[Sampling],
        results: list[list[int]],
        mask_of: MaskOf,
    ) -> None:
        """Samples one token for each of `indexes`, whose logits are rows 0, 1, ... of the step."""
        specs = [
            next_spec(
                sampling[i], timelines[i].tokens, mask_of(i, results[i]), self.spec.suppressed
            )
            for i in indexes
        ]
        for index, choice in zip(
            indexes, self.stepper.ops.sample(self.stepper.logits_rows, specs), strict=True
        ):
            if choice.nonfinite:
                raise RunnerError(f"timeline {index} has logits with a NaN or an infinity")
            results[index].append(choice.token)


def next_spec(
    sampling: Sampling,
    tokens: list[int],
    mask: Mask | None = None,
    suppressed: tuple[int, ...] = (),
) -> kernels.SampleSpec:
    """The kernel's sampling parameters for the token at position len(tokens)."""
    window = tokens[-sampling.penalty_tokens :] if sampling.penalty_tokens else []
    history = np.array(window, np.int32)
    at = len(tokens)
    return sample_spec(sampling, position=at, history=history, mask=mask, banned=suppressed)
