"""The base class of devices whose pages are in host memory, and what their steps share.

Translates slot codes to addresses before the arithmetic, and records the new rows after it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import kernels
from batchengine import errors
from batchengine.core import Sampling
from batchengine.gguf import GgufFile
from batchengine.lanes.device import LaneMemory, Report, StartedStep
from batchengine.lanes.host_memory import BatchRows, HostMemory
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.ring import Ring
from batchengine.lanes.step_input import (
    I32Array,
    Mask,
    MaskKey,
    StepInput,
    StepOutput,
    U64Array,
)
from batchengine.model import Model, Stepper, sample_spec
from batchengine.weights import open_weights
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT, HELD_BIT
from kv_store.layout import PageLayout

Computed = tuple[StepOutput, U64Array]  # the output of a step, and the digests of its rows
# A forward pass over pages at these addresses, with a digest seed per token of the batch.
Compute = Callable[[StepInput, U64Array, U64Array], Computed]


class HostStep:
    """A step that is computed when its tokens are asked for."""

    may_be_followed, is_computed = False, True

    def __init__(self, run: Callable[[], StepOutput]) -> None:
        self._run = run
        self._output: StepOutput | None = None

    def sample(self) -> None:
        """See StartedStep."""

    def tokens(self) -> dict[int, int]:
        """Compute the step; see StartedStep."""
        self._output = self._run()
        return {row.session: row.token for row in self._output.rows}

    def finish(self) -> StepOutput:
        """What was computed."""
        if self._output is None:
            raise RuntimeError("finish before tokens")
        return self._output


class HostDevice(ABC):
    """A `Device` whose arithmetic, `compute`, reads and writes pages at host addresses."""

    overlaps = False

    def __init__(self) -> None:
        self.memory: HostMemory | None = None

    @abstractmethod
    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts: ...

    @abstractmethod
    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        """Run one forward pass; an address per slot code, a digest seed per token of the batch.
        Returns the digests of the rows, too.

        The address of a page that a peer holds is 0.
        """

    @abstractmethod
    def do_deferred(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        """Map the arena of this worker."""
        self.memory = HostMemory(attach, layout)
        return self.memory

    def connect(self, links: DataLinks) -> Ring:
        """Attend to pages over data links; a device that cannot is given none."""
        raise RuntimeError("this device attends to no page of a peer")

    def start(self, batch: StepInput, after: StartedStep | None = None) -> StartedStep:
        """A step to be computed by `run`."""
        return HostStep(lambda: self.run(batch))

    def run(self, batch: StepInput) -> StepOutput:
        """Compute a step, and record its rows."""
        if self.memory is None:
            raise RuntimeError("run before attach")
        return run_on_host(self.memory, batch, self.compute)


def run_on_host(memory: HostMemory, batch: StepInput, compute: Compute) -> StepOutput:
    """Compute a step, then record which token each finite row holds."""
    addresses, rows = addresses_of(memory, batch), memory.rows_of(batch)
    output, digests = compute(batch, addresses, rows.seeds)
    return recorded(memory, batch, rows, output, digests)


def recorded(
    memory: HostMemory, batch: StepInput, rows: BatchRows, output: StepOutput, digests: U64Array
) -> StepOutput:
    """The output of a step whose rows are in place, once they are recorded."""
    memory.record_rows(batch, rows, digests, output.unusable + batch.untaken, output.rejected)
    return output


def load_model(load: wire.Load, pool: kernels.Pool, report: Report, share: float) -> Model:
    """Map (or pack) the weights and test the arithmetic of the CPU; `share` of the load's progress.

    Raises BatchEngineError.
    """
    started = time.perf_counter()

    def progress(fraction: float) -> None:
        report(wire.MAP_WEIGHTS, "", share * fraction, time.perf_counter() - started)

    with GgufFile(load.model_path) as gguf:
        weights = open_weights(gguf, pool, cache_dir=Path(load.cache_dir), progress=progress)
    mapped = time.perf_counter()
    size = f"{weights.packed_bytes / 2**20:,.1f} MiB packed in {weights.cache_path}"
    report(wire.MAP_WEIGHTS, size, share, mapped - started)
    head_dim = max(of.head_dim for of in weights.spec.attentions)
    if faults := kernels.arithmetic_faults(pool, head_dim):
        raise errors.ARITHMETIC_WRONG(why="; ".join(faults))
    return Model(weights)


def facts_of(model: Model, pool: kernels.Pool, isa: str) -> wire.ModelFacts:
    """Facts of a loaded model, with the golden hash of the CPU's kernels."""
    spec, attention = model.spec, model.spec.attention
    identity: dict[str, str | int | float] = {
        "model_hash": model.weights.fingerprint.hex(),
        "arch": spec.arch,
        "rope_digest": model.rope_digest(),
        "rope_style": attention.rope.style,
        "n_rot": attention.rope.n_rot,
        "eps": spec.eps,
        "attention_scale": attention.scale,
    }
    states = model.states
    if states is not None:
        kind = "" if states.kind == "delta" else f"{states.kind} {states.state_dim} "
        identity["state_shape"] = (
            f"{kind}{states.n_layer}x{states.n_k_head}/{states.n_v_head}x{states.head_dim}"
            f" conv {states.conv_kernel}"
        )
    return wire.ModelFacts(
        arith_id=kernels.arith_id(pool),
        isa=isa,
        threads=pool.threads,
        layers=spec.page_layout.layers,
        payload_bytes=model.shape.payload_bytes,
        vocab_size=spec.n_vocab,
        identity=identity,
        state_bytes=0 if states is None else states.image_bytes,
        is_whole=spec.is_whole,
        has_rows=spec.has_rows,
    )


class WantedRows(NamedTuple):
    """The rows of a step behind which tokens are sampled, in order. entries: of each the index of
    its entry; rows: its number in the step; masks: which mask its token has, if any."""

    entries: list[int]
    rows: I32Array
    masks: list[MaskKey | None]


def wanted_rows(batch: StepInput) -> WantedRows:
    """The last row of each entry that wants a token, after those before the tokens of its draft."""
    ends = np.cumsum(batch.shape[:, 0], dtype=np.int32)
    of = [
        (index, entry, end, before)
        for index, (entry, end) in enumerate(zip(batch.entries, ends.tolist(), strict=True))
        if entry.sampling is not None
        for before in range(entry.drafts, -1, -1)
    ]
    return WantedRows(
        [index for index, *_ in of],
        np.array([end - 1 - before for _, _, end, before in of], np.int32),
        [
            (entry.session, entry.start + entry.n_tokens - before) if entry.masked else None
            for _, entry, _, before in of
        ],
    )


def choose(
    stepper: Stepper, batch: StepInput, wanted: WantedRows
) -> tuple[list[kernels.Sampled], frozenset[int]]:
    """A token for each wanted row, from the logits that were computed last; and the rows, by index
    in `wanted`, whose mask is late: their token is not to be used."""
    masks = batch.masks(wanted.masks)
    specs = sample_specs(batch, masks, wanted, stepper.model.spec.suppressed)
    return stepper.ops.sample(stepper.logits_rows, specs), late_rows(wanted, masks)


def sample_specs(
    batch: StepInput,
    masks: Sequence[Mask | None],
    wanted: WantedRows,
    suppressed: tuple[int, ...] = (),
) -> list[kernels.SampleSpec]:
    """What is sampled with, for each wanted row; `suppressed`: tokens that no row samples."""
    ends = np.cumsum(batch.shape[:, 0]).tolist()
    specs: list[kernels.SampleSpec] = []
    for index, row, mask in zip(wanted.entries, wanted.rows.tolist(), masks, strict=True):
        entry, history = batch.entries[index], batch.histories[index]
        if entry.sampling is None:
            raise RuntimeError("a row is wanted of an entry that samples nothing")
        behind = ends[index] - 1 - row  # tokens of the draft that this row does not see
        if history is not None and entry.drafts:
            drafted = batch.tokens[ends[index] - entry.drafts : ends[index] - behind]
            history = np.append(history, drafted)[-entry.sampling.history_tokens :]
        specs.append(
            sample_spec(
                entry.sampling,
                position=entry.start + entry.n_tokens - behind,
                history=history,
                mask=mask,
                banned=(*entry.banned, *suppressed),
            )
        )
    return specs


def late_rows(wanted: WantedRows, masks: Sequence[Mask | None]) -> frozenset[int]:
    """The rows, by index in `wanted`, whose mask has not come."""
    pairs = enumerate(zip(wanted.masks, masks, strict=True))
    return frozenset([row for row, (key, mask) in pairs if key is not None and mask is None])


def without(
    rows: Sequence[wire.SampledRow], batch: StepInput, entries: Sequence[int]
) -> Sequence[wire.SampledRow]:
    """What was sampled, but for these entries."""
    sessions = {batch.entries[index].session for index in entries}
    return [row for row in rows if row.session not in sessions] if sessions else rows


class SampledRows(NamedTuple):
    """What was sampled. nonfinite: the entries with a row that is not finite; unmasked: other ones
    without a token, as its mask is late. `rows` has none of these; rejected: see StepOutput."""

    rows: list[wire.SampledRow]
    nonfinite: list[int]
    unmasked: list[int]
    rejected: tuple[tuple[int, int], ...]


def sampled(
    batch: StepInput,
    wanted: WantedRows,
    choices: Sequence[kernels.Sampled],
    nonfinite: Sequence[int],
    late: Collection[int] = (),
) -> SampledRows:
    """What was chosen for the wanted rows of finite entries, of each up to the first token that
    its draft has not, or whose mask is late. nonfinite: entries with a row that is not, before the
    logits; late: see `late_rows`."""
    found: dict[int, list[kernels.Sampled]] = {}
    unmasked, cut = list[int](), set[int]()
    for row, (index, choice) in enumerate(zip(wanted.entries, choices, strict=True)):
        if row in late and index not in found:
            unmasked.append(index)
        elif row in late:
            cut.add(index)
        if index not in cut:
            found.setdefault(index, []).append(choice)
    if any(batch.drafts):
        ends = np.cumsum(batch.shape[:, 0]).tolist()
        for index, of in found.items():
            draft = batch.tokens[ends[index] - batch.entries[index].drafts : ends[index]].tolist()
            del of[1 + n_accepted(draft, [choice.token for choice in of]) :]
    bad = {*nonfinite, *[i for i, of in found.items() if any(one.nonfinite for one in of)]}
    unmasked = [index for index in unmasked if index not in bad]
    without_token = bad.union(unmasked)
    kept = {index: of for index, of in found.items() if index not in without_token}
    rows = [
        wire.SampledRow(batch.entries[i].session, one.token, one.logprob, tuple(one.top))
        for i, of in kept.items()
        for one in of
    ]
    wrong = [(index, batch.entries[index].drafts + 1 - len(of)) for index, of in kept.items()]
    return SampledRows(rows, sorted(bad), unmasked, tuple([one for one in wrong if one[1]]))


def n_accepted(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many leading tokens of a draft are what was sampled."""
    for n, (drafted, token) in enumerate(zip(draft, tokens, strict=False)):
        if drafted != token:
            return n
    return len(draft)


def scored(
    stepper: Stepper, batch: StepInput, unusable: Sequence[int]
) -> tuple[tuple[wire.ScoredRows, ...], list[int]]:
    """Scores of the entries that ask for some, but for the `unusable` ones, once their step has
    run; and which of these entries have logits that are not finite.

    The numbers come from the kernel that samples, with a mask of one token.
    """
    if not any(len(tokens) for tokens in batch.scored):
        return (), []
    firsts = np.cumsum(batch.shape[:, 0]) - batch.shape[:, 0]
    asked = [
        (index, int(firsts[index]) + offset, token)
        for index, tokens in enumerate(batch.scored)
        if index not in unusable
        for offset, token in enumerate(tokens.tolist())
    ]
    found: dict[int, list[kernels.Sampled]] = {}
    bad = set[int]()
    for begin in range(0, len(asked), stepper.logits_max):
        part = asked[begin : begin + stepper.logits_max]
        bad_rows = stepper.finish(np.array([row for _, row, _ in part], np.int32))
        stepper.logits(len(part))
        best = [batch.entries[index].scored_best for index, _, _ in part]
        specs = [
            _spec(token, n, stepper.model.spec.n_vocab)
            for (_, _, token), n in zip(part, best, strict=True)
        ]
        choices = stepper.ops.sample(stepper.logits_rows, specs)
        bad.update(part[row][0] for row in bad_rows)
        for (index, _, _), choice in zip(part, choices, strict=True):
            found.setdefault(index, []).append(choice)
            if choice.nonfinite:
                bad.add(index)
    rows = [_rows(batch.entries[i].session, of) for i, of in found.items() if i not in bad]
    return tuple(rows), sorted(bad)


def _spec(token: int, best: int, vocab: int) -> kernels.SampleSpec:
    """Parameters with which the kernel can only sample `token`."""
    mask = np.zeros(-(-vocab // 32), np.uint32)
    mask[token // 32] = 1 << token % 32
    return sample_spec(Sampling(logprobs=best), position=0, history=None, mask=mask)


def _rows(session: int, choices: Sequence[kernels.Sampled]) -> wire.ScoredRows:
    best = [one for choice in choices for one in choice.top]
    return wire.ScoredRows(
        session,
        np.array([choice.logprob for choice in choices], np.float32).tobytes(),
        np.array([token for token, _ in best], np.int32).tobytes(),
        np.array([logprob for _, logprob in best], np.float32).tobytes(),
    )


def addresses_of(memory: HostMemory, batch: StepInput) -> U64Array:
    """The address of each page of a step; 0 of one that a peer holds."""
    if not batch.is_routed:
        return memory.addresses(batch.codes)
    is_here = batch.codes & np.uint64(HELD_BIT | ARENA_BIT) != np.uint64(HELD_BIT)
    addresses = np.zeros(len(batch.codes), np.uint64)
    addresses[is_here] = memory.addresses(batch.codes[is_here])
    return addresses
