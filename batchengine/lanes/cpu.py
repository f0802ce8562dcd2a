"""The CPU lane's arithmetic: packed weights mapped read-only, one pinned pool, one Stepper.

Owns the order of calls of one step; every number comes from the kernels.
"""

from __future__ import annotations

import time

import kernels
from batchengine.core import PAGE_TOKENS
from batchengine.lanes.device import Report
from batchengine.lanes.host_device import (
    Computed,
    HostDevice,
    choose,
    facts_of,
    load_model,
    sampled,
    scored,
    wanted_rows,
    without,
)
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.ring import Ring
from batchengine.lanes.ring.spans import SpanAttention
from batchengine.lanes.step_input import StepInput, StepOutput, U64Array
from batchengine.model import CpuOps, Stepper
from batchengine.wire import lane as wire


class CpuDevice(HostDevice):
    """A whole model on the cores of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._pool: kernels.Pool | None = None
        self._ops: CpuOps | None = None
        self._stepper: Stepper | None = None
        self._ring: Ring | None = None
        self._tokens_max = 0

    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts:
        """Map (or pack) the weights and run the golden self-test."""
        cpu = load.device
        self._tokens_max = load.tokens_max
        pool = self._pool = kernels.Pool(cpu.threads, cpu.cores, cpu.spin_us)
        model = load_model(load, pool, report, 0.9)
        started = time.perf_counter()
        facts = facts_of(model, pool, kernels.isa())
        report("cpu kernels", f"self-test ok, {kernels.isa()}", 0.95, time.perf_counter() - started)
        pages = load.entries_max + -(-load.context_tokens // PAGE_TOKENS) * load.entries_max
        ops = self._ops = CpuOps(pool)
        self._stepper = Stepper(
            ops,
            model,
            tokens_max=load.tokens_max,
            entries_max=load.entries_max,
            pages_max=pages,
            logits_max=wire.logits_rows_max(load.entries_max),
        )
        return facts

    def connect(self, links: DataLinks) -> Ring:
        """Attend to pages over data links; they are served between the kernels of a step too."""
        stepper, memory, ops = self._stepper, self.memory, self._ops
        if stepper is None or memory is None or ops is None:
            raise RuntimeError("connect before attach")
        n_head = stepper.model.spec.attention.n_head
        attention = SpanAttention(ops.pool, stepper.model.shape, n_head, self._tokens_max)
        ring = self._ring = Ring(links, attention, memory, stepper)
        ops.call_between(ring.look)
        return ring

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        """Run one forward pass, and sample for each entry that wants a token and is finite."""
        stepper, memory = self._stepper, self.memory
        if stepper is None or memory is None:
            raise RuntimeError("compute before attach")
        wanted = wanted_rows(batch)
        routed = None
        if batch.is_routed and self._ring is not None:
            routed = self._ring.route(batch, addresses)
        attend, states = routed.attend if routed else None, memory.states.addresses(batch)
        stepper.set(batch.tokens, batch.shape, addresses, attend, states, batch.drafts)
        nonfinite = stepper.run(wanted.rows)
        unreachable = routed.end() if routed else []
        if wanted.entries:
            stepper.logits(len(wanted.entries))
        choices, late = choose(stepper, batch, wanted)
        rows, nonfinite, unmasked, rejected = sampled(batch, wanted, choices, nonfinite, late)
        digests = stepper.row_digests(seeds)
        if unreachable:
            nonfinite = [index for index in nonfinite if index not in unreachable]
            unmasked = [index for index in unmasked if index not in unreachable]
        scores, bad = scored(stepper, batch, [*nonfinite, *unreachable, *unmasked])
        rows, nonfinite = without(rows, batch, bad), sorted([*nonfinite, *bad])
        stepper.rewind(rejected)
        output = StepOutput(
            tuple(without(rows, batch, unreachable)),
            tuple(nonfinite),
            tuple(unreachable),
            routed.waited_us if routed else 0,
            tuple(unmasked),
            scores,
            rejected,
        )
        return output, digests

    def do_deferred(self) -> bool:
        """Nothing was put off."""
        return False

    def close(self) -> None:
        """End the pool's threads."""
        if self._pool is not None:
            self._pool.close()
