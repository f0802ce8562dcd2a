"""The CPU lane's arithmetic: packed weights mapped read-only, one pinned pool, one Stepper.

Owns the order of calls of one step; every number comes from the kernels.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import kernels
from batchengine import errors
from batchengine.core import PAGE_TOKENS
from batchengine.gguf import GgufFile
from batchengine.lanes.device import Report
from batchengine.lanes.host_device import HostDevice, HostOutput
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.ring.ring import Ring
from batchengine.lanes.ring.spans import SpanAttention
from batchengine.lanes.step_input import StepInput, U64Array
from batchengine.model import CpuOps, Model, Stepper, sample_spec
from batchengine.weights import open_weights
from batchengine.wire import lane as wire


class CpuDevice(HostDevice):
    """A whole model on the cores of this process."""

    def __init__(self) -> None:
        super().__init__()
        self._pool: kernels.Pool | None = None
        self._stepper: Stepper | None = None
        self._ring: Ring | None = None
        self._tokens_max = 0

    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts:
        """Map (or pack) the weights and run the golden self-test."""
        started = time.perf_counter()
        cpu = load.device
        self._tokens_max = load.tokens_max
        pool = self._pool = kernels.Pool(cpu.threads, cpu.cores, cpu.spin_us)

        def progress(fraction: float) -> None:
            report("map weights", "", 0.9 * fraction, time.perf_counter() - started)

        with GgufFile(load.model_path) as gguf:
            weights = open_weights(gguf, pool, cache_dir=Path(load.cache_dir), progress=progress)
        mapped = time.perf_counter()
        size = f"{weights.packed_bytes / 2**20:.1f} MiB"
        report("map weights", size, 0.9, mapped - started)
        if faults := kernels.arithmetic_faults(pool):
            raise errors.ARITHMETIC_WRONG(why="; ".join(faults))
        arith_id = kernels.arith_id(pool)
        report("cpu kernels", f"self-test ok, {kernels.isa()}", 0.95, time.perf_counter() - mapped)
        model = Model(weights)
        pages = load.entries_max + -(-load.context_tokens // PAGE_TOKENS) * load.entries_max
        self._stepper = Stepper(
            CpuOps(pool),
            model,
            tokens_max=load.tokens_max,
            entries_max=load.entries_max,
            pages_max=pages,
        )
        spec, attention = model.spec, model.spec.attention
        identity: dict[str, str | int | float] = {
            "model_hash": weights.fingerprint.hex(),
            "arch": spec.arch,
            "rope_digest": str(model.rope.digest()),
            "rope_style": attention.rope.style,
            "n_rot": attention.rope.n_rot,
            "eps": spec.eps,
            "attention_scale": attention.scale,
        }
        return wire.ModelFacts(
            arith_id=arith_id,
            isa=kernels.isa(),
            threads=pool.threads,
            n_layer=len(model.layers),
            n_kv_head=attention.n_kv_head,
            head_dim=attention.head_dim,
            payload_bytes=model.shape.payload_bytes,
            vocab_size=spec.n_vocab,
            identity=identity,
        )

    def connect(self, links: DataLinks) -> Ring:
        """Attend to pages over data links; they are served between the kernels of a step too."""
        stepper, memory, pool = self._stepper, self.memory, self._pool
        if stepper is None or memory is None or pool is None:
            raise RuntimeError("connect before attach")
        n_head = stepper.model.spec.attention.n_head
        attention = SpanAttention(pool, stepper.model.shape, n_head, self._tokens_max)
        ring = self._ring = Ring(links, attention, memory.addresses, stepper, memory.tile)
        stepper.ops.call_between(ring.look)
        return ring

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> HostOutput:
        """Run one forward pass; one token for each entry that wants one and is finite."""
        stepper = self._stepper
        if stepper is None:
            raise RuntimeError("compute before load")
        ends = np.cumsum(batch.shape[:, 0], dtype=np.int32) - np.int32(1)
        wanting = [i for i, entry in enumerate(batch.entries) if entry.sampling is not None]
        routed = None
        if batch.is_routed and self._ring is not None:
            routed = self._ring.route(batch, addresses)
        stepper.set(batch.tokens, batch.shape, addresses, routed.attend if routed else None)
        wanted = ends[wanting]
        nonfinite = stepper.run(wanted)
        unreachable = routed.end() if routed else []
        rows: tuple[wire.SampledRow, ...] = ()
        if wanting:
            logits = stepper.logits(len(wanting))
            specs = [
                sample_spec(e.sampling, position=e.start + e.n_tokens, history=history)
                for e, history in zip(batch.entries, batch.histories, strict=True)
                if e.sampling is not None
            ]
            choices = stepper.ops.sample(logits, specs)
            bad = set(nonfinite)
            bad.update(i for i, choice in zip(wanting, choices, strict=True) if choice.nonfinite)
            nonfinite = sorted(bad)
            bad.update(unreachable)
            rows = tuple(
                wire.SampledRow(
                    batch.entries[i].session,
                    choice.token,
                    choice.logprob,
                    tuple(choice.top),
                )
                for i, choice in zip(wanting, choices, strict=True)
                if i not in bad
            )
        digests = stepper.row_digests(seeds)
        if unreachable:
            nonfinite = [index for index in nonfinite if index not in unreachable]
        waited_us = routed.waited_us if routed else 0
        return HostOutput(rows, tuple(nonfinite), digests, tuple(unreachable), waited_us)

    def close(self) -> None:
        """End the pool's threads."""
        if self._pool is not None:
            self._pool.close()
