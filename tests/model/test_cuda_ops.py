"""The forward pass over an emulated GPU: the bits of the CPU, for logits, rows and pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import kernels
from batchengine.lanes.gpu.device import upload_weights
from batchengine.lanes.gpu.states import DeviceStates
from batchengine.lanes.gpu.step import GpuSteps
from batchengine.lanes.state_memory import StateMemory
from batchengine.lanes.step_input import StepInput
from batchengine.model import CpuOps, Ops, Stepper
from batchengine.model.layers.moe import MoeBuffers, MoeFfn
from batchengine.weights import MoeSpec, MoeWeights
from batchengine.weights.roles import SharedRoles
from batchengine.wire import lane as wire
from bench.cuda.cases import packed_with_bytes, random_page, rows_of
from bench.cuda.cases.experts import cpu_part
from bench.cuda.weights import random_model
from bench.models.local_runner import LocalRunner, LocalSequence
from bench.models.synthetic import PRESETS, write_synthetic
from bench.models.tensors import aligned
from bench.simt.emulator import COMPILER, ROOT, Emulator, EmulatorFault, compile_kernels
from kernels.cuda import driver, memory
from kernels.cuda.driver import CudaGpu
from kernels.cuda.experts import GATINGS
from kernels.cuda.gpu import Gpu, GpuFault, Graph
from kernels.cuda.graphs import Graphs
from kernels.cuda.memory import BadRows, Scratch
from kernels.cuda.ops import CudaOps
from kernels.cuda.page_parts import PageParts
from kv_store.states import state_name, state_seed
from tests.kernels.cuda.fake_driver import FakeDriver
from tests.model.test_model import EXPERTS, LLAMA_EXPERTS, MIXED, SUPERBLOCKS

PRODUCTS = [("q8_0", 48), ("q8_0", 16), ("q4_0", 32), ("q4_0", 5), ("q4_0", 8)]
SHAPE = replace(MIXED, n_layer=2, bias=0.3)
SHAPES = {
    "mixed": SHAPE,
    "experts": EXPERTS,
    "llama experts": LLAMA_EXPERTS,
    "superblocks": SUPERBLOCKS,
    "gpt-oss": PRESETS["gpt-oss-tiny"],
    "gemma3": PRESETS["gemma3-tiny"],
    "gemma4": PRESETS["gemma4-tiny"],
    "qwen35": PRESETS["qwen35-tiny"],
    "qwen35moe": PRESETS["qwen35moe-tiny"],
    "glm4moe": PRESETS["glm4moe-tiny"],
    "deepseek2": PRESETS["deepseek2-tiny"],
    "olmo2": PRESETS["olmo2-tiny"],
    "afmoe": PRESETS["afmoe-tiny"],
    "step35": PRESETS["step35-tiny"],
    "bailingmoe2": PRESETS["bailingmoe2-tiny"],
    "qwen3next": PRESETS["qwen3next-tiny"],
    "minimax-m2": PRESETS["minimax-m2-tiny"],
    "glm4": PRESETS["glm4-tiny"],
    "phi3": PRESETS["phi3-tiny"],
    "granite": PRESETS["granitehybrid-tiny"],
    "granite_swa": replace(
        PRESETS["granitemoe-tiny"], arch="granite_swa", n_layer=4, window=40, fused_up=True
    ),
    "nemotron": replace(PRESETS["nemotron_h_moe-tiny"], n_latent=64),
    "nemotron dense": PRESETS["nemotron_h-tiny"],
    "lfm2": PRESETS["lfm2moe-tiny"],
}
DIRECT = ("experts", "gpt-oss", "gemma4", "qwen35", "phi3", "nemotron")  # also without the driver


@pytest.fixture(scope="module")
def gpu() -> Emulator:
    if COMPILER is None:
        pytest.skip("no g++")
    return Emulator(compile_kernels(ROOT / "build/simt", is_checked=False))


class OnDevice:
    """The model of a runner on an emulated GPU, with pages there and a copy of them on the host."""

    def __init__(self, gpu: Gpu, runner: LocalRunner) -> None:
        self.gpu, self.model = gpu, runner.model
        self.pool = runner.pool
        self.parts = PageParts(self.model.shape, self.model.windows)
        self.ops = CudaOps(gpu, self.pool, self.parts)
        upload_weights(self.ops, self.model.weights)
        for table in self.model.ropes.values():
            self.ops.upload_rope(table, 2048)
        ops = cast(Ops, self.ops)
        stepper = Stepper(ops, self.model, tokens_max=80, entries_max=4, pages_max=64)
        self.steps = GpuSteps(gpu, self.ops, stepper)
        self.host_batch = kernels.Batch(80, 4, 64)

    def states(self, lanes: int) -> list[list[int]]:
        """Two states of the GPU for each of so many sequences: none of a model without."""
        shape = self.model.states
        both = [] if shape is None else [shape.image_bytes] * 2
        return [[self.gpu.allocate(n_bytes) for n_bytes in both] for _ in range(lanes)]

    def page(self, value: int) -> tuple[list[int], np.ndarray[Any, np.dtype[np.uint8]]]:
        """The parts of a page of the GPU, and a page of the host."""
        addresses = [self.gpu.allocate(part.n_bytes) for part in self.parts.parts]
        for address, part in zip(addresses, self.parts.parts, strict=True):
            self.gpu.copy_in(address, np.full(part.n_bytes, value, np.uint8))
        own = aligned(self.model.shape.payload_bytes)
        own[:] = 0
        return addresses, own


def through_the_driver(gpu: Emulator, monkeypatch: pytest.MonkeyPatch) -> CudaGpu:
    """The same GPU behind a driver that begins nothing before it is waited for."""
    monkeypatch.setattr(driver, "STAGING_BYTES", 1 << 16)
    monkeypatch.setattr(driver, "CHUNK_BYTES", 1 << 14)
    modules = {"cuda.bindings.driver": FakeDriver(gpu)}
    monkeypatch.setattr(driver.importlib, "import_module", modules.get)
    return CudaGpu(0, lambda target: {"all": target.encode()})


@pytest.mark.parametrize(
    ("name", "is_driven"), [*((n, False) for n in DIRECT), *((n, True) for n in SHAPES)]
)
def test_a_step_gives_the_bits_of_the_cpu(
    gpu: Emulator,
    tmp_path: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    is_driven: bool,
) -> None:
    path, shape = tmp_path / "model.gguf", SHAPES[name]
    if is_driven:
        own: Gpu = through_the_driver(gpu, monkeypatch)
    else:
        own = gpu
        monkeypatch.setattr(memory, "ACCUMULATOR_BYTES", 1)  # a launch a tile
    write_synthetic(path, shape)
    rng = np.random.default_rng(5)
    with LocalRunner(path, cache_dir=cache_dir, tokens_max=80, entries_max=4) as runner:
        device = OnDevice(own, runner)
        lanes = [LocalSequence(), LocalSequence()]
        pages = [[device.page(255), device.page(255)] for _ in lanes]
        states = device.states(len(lanes))
        for counts in ((60, 3), (19, 1), *[(1, 1)] * 4, (3, 1), (1, 1)):
            new = [rng.integers(0, shape.n_vocab, n).tolist() for n in counts]
            starts = [lane.frontier for lane in lanes]
            want = runner.step(list(zip(lanes, new, strict=True))).copy()
            table = np.array(
                [(n, start, 2) for n, start in zip(counts, starts, strict=True)], np.int32
            )
            tokens = np.concatenate(new).astype(np.int32)
            on_gpu = np.array([parts for mine in pages for parts, _ in mine], np.uint64).T
            ends = np.cumsum(table[:, 0], dtype=np.int32) - np.int32(1)
            used = [
                (of[0] if start else 0, of[1])
                for of, start in zip(states, starts, strict=True)
                if of
            ]
            of_step = np.array(used, np.uint64) if used else None
            bad_rows, rows_on_host = device.steps.begin(tokens, table, on_gpu, ends, states=of_step)
            own.synchronize()
            stepper = device.steps.stepper
            assert stepper.nonfinite(ends, bad_rows) == []
            rows: Any = stepper.logits_rows
            got = np.empty((2, shape.n_vocab), np.float32)
            own.copy_out(rows.address, got)
            assert got.tobytes() == want.tobytes()
            for lane, of_lane in zip(lanes, states, strict=True):
                if of_lane:
                    state = np.empty(len(lane.state or b""), np.uint8)
                    own.copy_out(of_lane[1], state)
                    assert state.tobytes() == (lane.state or b"")[:]
                    of_lane.reverse()
            seeds = np.arange(len(tokens), dtype=np.uint64)
            assert np.array_equal(stepper.row_digests(seeds), runner.stepper.row_digests(seeds))
            host = [kernels.address_of(page) for mine in pages for _, page in mine]
            device.host_batch.set(tokens, table, np.array(host, np.uint64))
            kernels.store_rows(device.pool, rows_on_host, device.host_batch)
        assert len(device.steps.graphs) == 1  # of the steps of one token each
        for lane, mine in zip(lanes, pages, strict=True):
            assert mine[0][1].tobytes() == runner.page(lane, 0)


def test_a_state_goes_to_the_gpu_and_back_in_files(
    gpu: Emulator, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of which the GPU computes a part in the middle has the logits and the state of one
    on the CPU."""
    path, shape, rng = tmp_path / "model.gguf", SHAPES["qwen35"], np.random.default_rng(6)
    write_synthetic(path, shape)
    there, back = (
        wire.StateFile(slot, state_name(bytes([slot]) * 32, bytes(32)), state_seed(bytes([slot])))
        for slot in range(2)
    )
    with LocalRunner(path, cache_dir=cache_dir, tokens_max=80, entries_max=4) as runner:
        device, lane = OnDevice(through_the_driver(gpu, monkeypatch), runner), LocalSequence()
        n_bytes = runner.model.states.image_bytes if runner.model.states is not None else 0
        on_cpu = StateMemory(2, n_bytes, str(tmp_path))
        on_gpu = DeviceStates(device.gpu, 2, n_bytes, str(tmp_path), lambda: False)
        prompt, middle = (rng.integers(0, shape.n_vocab, n).tolist() for n in (40, 5))
        runner.step([(lane, prompt)])
        on_cpu.slot(0)[:] = (lane.state or b"")[:]
        assert on_cpu.move(wire.Step((), save_states=(there,))) == (True,)
        assert on_gpu.move(wire.Step((), load_states=(there,))) == (True,)
        (page,), _ = device.page(0)
        device.gpu.copy_in(page, np.frombuffer(runner.page(lane, 0), np.uint8))
        entry = wire.Entry(1, 1, 40, 5, 1, None, state_read=0, state_written=1)
        table, tokens = np.array([[5, 40, 1]], np.int32), np.array(middle, np.int32)
        batch = StepInput((entry,), table, tokens, np.zeros(1, np.uint64), [None], [])
        at, last = np.array([page], np.uint64), np.array([4], np.int32)
        device.steps.begin(tokens, table, at, last, states=on_gpu.addresses(batch))
        assert on_gpu.move(wire.Step((), save_states=(back,))) == (True,)
        want, rows = runner.step([(lane, middle)]), cast(Any, device.steps.stepper.logits_rows)
        assert device.ops.read_rows(rows, 1).tobytes() == want.tobytes()
        assert on_cpu.move(wire.Step((), load_states=(back,))) == (True,)
        assert bytes(on_cpu.slot(1)) == (lane.state or b"")[:]


def test_bad_rows_that_were_fetched_are_those_of_their_step(gpu: Emulator) -> None:
    """The next step, which the GPU may compute already, writes to the same memory."""
    flags, fetched = gpu.allocate(3), list[BadRows]()
    of_step = BadRows(gpu, flags, 3)  # of a captured step, whose replays share it
    for written in ([0, 1, 1], [0, 0, 0]):
        gpu.copy_in(flags, np.array(written, np.uint8))
        fetched.append(of_step.fetch())
    assert [list(rows) for rows in fetched] == [[1, 2], []]


def launches_of_a_layer(gpu: Emulator, preset: str) -> list[str]:
    """The kernels of a layer of a model for one token."""
    pool = kernels.Pool(1)
    model, ops = random_model(PRESETS[preset], pool), CudaOps(gpu, pool)
    upload_weights(ops, model.weights)
    for table in model.ropes.values():
        ops.upload_rope(table, 2)
    limits = {"tokens_max": 1, "entries_max": 1, "pages_max": 1}
    stepper = Stepper(cast(Ops, ops), model, **limits)
    page = gpu.allocate(model.shape.payload_bytes)
    entry = np.array([[1, 0, 1]], np.int32)
    stepper.set(np.zeros(1, np.int32), entry, np.array([page], np.uint64))
    stepper.embed()
    stepper.forward([0])  # what it allocates and copies
    return [launch.kernel for launch in gpu.capture(lambda: stepper.forward([0])).captured]


def test_a_layer_of_a_decode_is_ten_launches(gpu: Emulator) -> None:
    product = f"linear_few_{PRESETS['tiny'].base}"
    attention = ["norm_quantise", product, "place_kv", "attend_pages", "fold_attention", product]
    wanted = [*attention, "norm_quantise", product, "quantise", product]
    assert launches_of_a_layer(gpu, "tiny") == wanted


def test_a_layer_of_experts_has_three_launches_more(gpu: Emulator) -> None:
    product = f"linear_few_{PRESETS['moe-tiny'].base}"
    attention = ["norm_quantise", product, "place_kv", "attend_pages", "fold_attention", product]
    chosen = ["norm_quantise", "linear_f32", "select_experts"]
    wanted = [*attention, *chosen, product, "quantise", product, "add_pairs"]
    assert launches_of_a_layer(gpu, "moe-tiny") == wanted


def test_a_layer_with_biases_of_selector_and_experts_has_the_bits_of_the_cpu(gpu: Emulator) -> None:
    """Every bias and the activation reach the kernels: without one of them the bits are others."""
    pool, rng, tokens, n_expert, width, n_ff = (
        kernels.Pool(1),
        np.random.default_rng(8),
        5,
        6,
        64,
        96,
    )
    spec = MoeSpec(n_expert, 3, n_ff, 1.0, "oai", has_bias=True)
    shapes = (n_expert * n_ff, width), (n_expert * n_ff, width), (n_expert * width, n_ff)
    banks = [packed_with_bytes(pool, "q4_0", *shape, rng)[0] for shape in shapes]
    sizes = width, n_expert, n_expert * n_ff, n_expert * n_ff, n_expert * width
    norm, *biases = (kernels.Vector(rng.standard_normal(n, np.float32)) for n in sizes)
    selector = packed_with_bytes(pool, "f32", n_expert, width, rng)[0]
    weights = MoeWeights(norm, selector, *banks, *biases)
    x = rng.standard_normal((tokens, width), np.float32)
    on_cpu = partial(_moe_on_cpu, pool, x)
    ops = CudaOps(gpu, pool)
    ops.upload(*banks, selector, norm, *biases)
    hidden = ops.make_rows(tokens, width)
    gpu.copy_in(hidden.address, x)
    _add_moe(cast(Ops, ops), cast(kernels.Rows, hidden), tokens, spec, weights)
    assert ops.read_rows(hidden, tokens).tobytes() == on_cpu(spec, weights)
    others = [on_cpu(replace(spec, activation="silu"), weights)]
    for name in ("selector_bias", "gate_bias", "up_bias", "down_bias"):
        others.append(on_cpu(spec, replace(weights, **{name: None})))
    assert len({on_cpu(spec, weights), *others}) == 6


def test_a_layer_of_sigmoids_and_a_shared_expert_has_the_bits_of_the_cpu(gpu: Emulator) -> None:
    """Gating, bias and shared expert reach the kernels: without one of them the bits are others."""
    pool, rng, tokens, n_expert, width, n_ff = (
        kernels.Pool(1), np.random.default_rng(9), 21, 6, 64, 96,
    )  # fmt: skip
    spec = MoeSpec(n_expert, 3, n_ff, 2.5, n_ff_shared=n_ff, gating="normed_sigmoid")
    shapes = (n_expert * n_ff, width), (n_expert * n_ff, width), (n_expert * width, n_ff)
    of_one = (n_ff, width), (n_ff, width), (width, n_ff)
    banks = [packed_with_bytes(pool, "q4_0", *shape, rng)[0] for shape in shapes]
    shared = SharedRoles(None, *[packed_with_bytes(pool, "q8_0", *s, rng)[0] for s in of_one])
    norm, bias = (kernels.Vector(rng.standard_normal(n, np.float32)) for n in (width, n_expert))
    selector = packed_with_bytes(pool, "f32", n_expert, width, rng)[0]
    weights = MoeWeights(norm, selector, *banks, shared=shared, choice_bias=bias)
    x = rng.standard_normal((tokens, width), np.float32)
    on_cpu = partial(_moe_on_cpu, pool, x)
    ops = CudaOps(gpu, pool)
    ops.upload(*banks, selector, norm, bias, shared.gate, shared.up, shared.down)
    hidden = ops.make_rows(tokens, width)
    gpu.copy_in(hidden.address, x)
    _add_moe(cast(Ops, ops), cast(kernels.Rows, hidden), tokens, spec, weights)
    found = ops.read_rows(hidden, tokens).tobytes()
    assert found == on_cpu(spec, weights)
    others = [on_cpu(replace(spec, gating=gating), weights) for gating in GATINGS[1:2]]
    others.append(on_cpu(replace(spec, gating="softmax"), replace(weights, choice_bias=None)))
    for name in ("choice_bias", "shared"):
        others.append(on_cpu(spec, replace(weights, **{name: None})))
    assert len({found, *others}) == 5


def _add_moe(
    ops: Ops, hidden: kernels.Rows, tokens: int, spec: MoeSpec, weights: MoeWeights
) -> None:
    width = weights.norm.size
    buffers = MoeBuffers(ops, spec, [weights], tokens, width)
    normed = ops.make_activations(tokens, width, True)
    MoeFfn(ops, spec, weights, 1e-5, buffers).add(hidden, tokens, normed)


def _moe_on_cpu(pool: kernels.Pool, x: Any, spec: MoeSpec, weights: MoeWeights) -> bytes:
    hidden = rows_of(x)
    _add_moe(CpuOps(pool), hidden, len(x), spec, weights)
    return hidden.view(len(x)).tobytes()


def test_a_graph_of_a_decode_serves_other_experts(gpu: Emulator) -> None:
    """Launches that were captured give the bits of the CPU for tokens with other choices."""
    pool, rng, tokens, n_expert, n_used = kernels.Pool(1), np.random.default_rng(3), 3, 9, 2
    ops, width = CudaOps(gpu, pool), 64
    banks = [packed_with_bytes(pool, "q4_0", n_expert * 64, width, rng)[0] for _ in range(3)]
    ops.upload(*banks)
    logits, x = ops.make_rows(tokens, n_expert), ops.make_rows(tokens, width)
    pairs = ops.make_expert_pairs(tokens, n_expert, n_used)
    of_tokens, out = ops.make_activations(tokens, width, False), ops.make_rows(tokens, width)
    gathered = ops.make_activations(pairs.rows_max, width, False)
    gated, gated_q8 = (
        ops.make_rows(pairs.rows_max, width),
        ops.make_activations(pairs.rows_max, width, False),
    )

    def run() -> None:
        ops.quantise(x, tokens, of_tokens)
        ops.select_experts(logits, tokens, 1.0, pairs)
        ops.gather_pairs(of_tokens, pairs, gathered)
        ops.pairs_gated(gathered, banks[0], banks[1], pairs, gated)
        ops.quantise_pairs(gated, pairs, gated_q8)
        ops.pairs_add(gated_q8, banks[2], pairs, out)

    def given(seed: int) -> tuple[np.ndarray[Any, Any], ...]:
        of = np.random.default_rng(seed)
        values = [of.standard_normal(shape) for shape in ((tokens, n_expert), (tokens, width))]
        scores, inputs = (one.astype(np.float32) for one in values)
        for rows, of_rows in ((logits, scores), (x, inputs), (out, np.zeros_like(inputs))):
            gpu.copy_in(rows.address, of_rows)
        return scores, inputs

    given(0)
    run()
    graph, found = gpu.capture(run), set[bytes]()
    for seed in range(1, 6):
        scores, inputs = given(seed)
        graph.replay()
        on_cpu = kernels.ExpertPairs(tokens, n_expert, n_used)
        kernels.select_experts(pool, rows_of(scores), tokens, 1.0, on_cpu)
        _, want = cpu_part(pool, inputs, np.zeros_like(inputs), banks, on_cpu)
        assert ops.read_rows(out, tokens).tobytes() == want.view(tokens).tobytes()
        found.add(pairs.unpack()[0].tobytes())
    assert len(found) == 5


def test_what_experts_need_is_allocated_by_the_first_step(gpu: Emulator) -> None:
    """A lane counts the pages that fit after a small step; and rows that are gathered take none."""
    pool, rng, most, width = kernels.Pool(1), np.random.default_rng(1), 40, 64
    ops, before = CudaOps(gpu, pool), gpu.used
    gathered = ops.make_activations(3 * most, width, True)
    assert gpu.used == before
    pairs = ops.make_expert_pairs(most, 7, 3)
    assert pairs.rows_max == 3 * most
    down, _ = packed_with_bytes(pool, "q4_0", 7 * width, width, rng)
    ops.upload(down)
    logits, x, out = (ops.make_rows(most, n) for n in (7, width, width))
    gated, gated_q8 = (
        ops.make_rows(pairs.rows_max, width),
        ops.make_activations(pairs.rows_max, width, False),
    )
    of_tokens, used = ops.make_activations(most, width, False), list[int]()
    for rows, n in ((logits, 7), (x, width), (out, width)):
        gpu.copy_in(rows.address, rng.standard_normal((most, n)).astype(np.float32))
    for tokens in (1, most):
        ops.quantise(x, tokens, of_tokens)
        ops.select_experts(logits, tokens, 1.0, pairs)
        ops.gather_pairs(of_tokens, pairs, gathered)
        ops.pairs_gated(gathered, down, down, pairs, gated)
        ops.quantise_pairs(gated, pairs, gated_q8)
        ops.pairs_add(gated_q8, down, pairs, out)
        used.append(gpu.used)
    assert used[0] == used[1]
    with pytest.raises(ValueError, match="4 of 3 experts"):
        ops.make_expert_pairs(1, 3, 4)


@pytest.mark.parametrize(("few_blocks", "head_dim"), [(0, 64), (256, 64), (0, 288), (256, 512)])
def test_attention_with_windows_and_sinks(
    gpu: Emulator, monkeypatch: pytest.MonkeyPatch, few_blocks: int, head_dim: int
) -> None:
    """Decode and chunks through the tables of a batch, of layers with other windows in turn."""
    monkeypatch.setattr(memory, "FEW_BLOCKS", few_blocks)
    pool, rng, n_head, n_kv = kernels.Pool(1), np.random.default_rng(2), 6, 2
    shape, ops = kernels.PageShape(1, n_kv, head_dim), CudaOps(gpu, pool)
    counts, starts = np.array([1, 20, 3]), np.array([2200, 1010, 0])
    table = np.stack([counts, starts, -(-(starts + counts) // 256)], 1).astype(np.int32)
    n_tokens, n_pages = int(counts.sum()), int(table[:, 2].sum())
    tokens = np.zeros(n_tokens, np.int32)
    pages = [aligned(shape.payload_bytes) for _ in range(n_pages)]
    on_gpu = [gpu.allocate(shape.payload_bytes) for _ in pages]
    for page, address in zip(pages, on_gpu, strict=True):
        page[:] = random_page(shape, rng)
        gpu.copy_in(address, page)
    qkv = rng.standard_normal((n_tokens, (n_head + 2 * n_kv) * head_dim)).astype(np.float32)
    made: list[Any] = []
    for target, of_pages in (
        (CpuOps(pool), [kernels.address_of(page) for page in pages]),
        (ops, on_gpu),
    ):
        batch = target.make_batch(n_tokens, len(table), n_pages)
        batch.set(tokens, table, np.array(of_pages, np.uint64))
        rows = rows_of(qkv) if target is not ops else ops.make_rows(n_tokens, qkv.shape[1])
        if target is ops:
            gpu.copy_in(rows.address, qkv)
        queries = target.make_queries(n_tokens, n_head, head_dim)
        kv_rows = target.make_kv_rows(n_tokens, shape)
        norms = None, None, 1e-6, None, 0.125
        target.place_kv(rows, batch, shape, 0, n_head, *norms, queries, kv_rows)
        out = target.make_rows(n_tokens, n_head * head_dim)
        made.append((target, queries, batch, out))
    sinks = kernels.Sinks(rng.standard_normal(n_head).astype(np.float32))
    ops.upload(sinks)
    got = np.empty((n_tokens, n_head * head_dim), np.float32)
    for window, own in itertools.product((0, 1, 128, 1000, 1 << 40), (None, sinks)):
        for target, queries, batch, out in made:
            target.attend(queries, batch, shape, 0, out, None, window, own)
        gpu.copy_out(made[1][3].address, got)
        assert got.tobytes() == made[0][3].view(n_tokens).tobytes(), window
    deepest = [max(run.superpages for run in runs) for runs in made[1][2].launches]
    assert deepest == [4, 2, 2, 2, 4]  # a power of two; a tile of the chunk crosses a border


@pytest.mark.parametrize("kinds", [("q4_0", "q4_0"), ("q4_0", "q8_0"), ("f16", "f16")])
@pytest.mark.parametrize("tokens", [3, 12, 20])
def test_a_gated_product_has_the_bits_of_the_cpu(
    gpu: Emulator, kinds: tuple[str, str], tokens: int
) -> None:
    pool, rng, rows, cols = kernels.Pool(1), np.random.default_rng(7), 40, 1056
    ops = CudaOps(gpu, pool)
    made = [packed_with_bytes(pool, kind, rows, cols, rng)[0] for kind in kinds]
    for biases in ([None, None], [rng.standard_normal(rows).astype(np.float32) for _ in made]):
        vectors = [None if bias is None else kernels.Vector(bias) for bias in biases]
        ops.upload(*made, *[vector for vector in vectors if vector is not None])
        values = rng.standard_normal((tokens, cols)).astype(np.float32)
        x, on_cpu = ops.make_rows(tokens, cols), rows_of(values)
        gpu.copy_in(x.address, values)
        activations = ops.make_activations(tokens, cols, True)
        wanted = kernels.Activations(tokens, cols, keep_float=True)
        ops.quantise(x, tokens, activations)
        kernels.quantise(pool, on_cpu, tokens, wanted)
        out, want = ops.make_rows(tokens, rows), kernels.Rows(tokens, rows)
        gate, up = made
        found = set[bytes]()
        for name in ("silu", "oai", "gelu"):
            ops.linear_gated(activations, gate, up, *vectors, tokens, out, name)
            kernels.linear_gated(pool, wanted, gate, up, *vectors, tokens, want, name)
            assert ops.read_rows(out, tokens).tobytes() == want.view(tokens).tobytes()
            found.add(want.view(tokens).tobytes())
        assert len(found) == 3
        for limit in (0.25, 1e6):
            ops.linear_gated(activations, gate, up, *vectors, tokens, out, limit=limit)
            kernels.linear_gated(pool, wanted, gate, up, *vectors, tokens, want, limit=limit)
            assert ops.read_rows(out, tokens).tobytes() == want.view(tokens).tobytes()
            assert (want.view(tokens).tobytes() in found) == (limit > 1.0)
        ops.linear_gated(activations, gate, up, *vectors, tokens, out)
        assert ops.read_rows(out, tokens).tobytes() in found
        plain = None, vectors[1], tokens
        ops.linear_gated(activations, None, up, *plain, out, "relu2")
        kernels.linear_gated(pool, wanted, None, up, *plain, want, "relu2")
        assert ops.read_rows(out, tokens).tobytes() == want.view(tokens).tobytes()
        for name, first, said in (
            ("relu", gate, "no activation is named relu"),
            ("relu2", gate, "relu2 has no gate"),
            ("silu", None, "silu needs a gate"),
        ):
            with pytest.raises(ValueError, match=f"linear_gated: {said}"):
                ops.linear_gated(activations, first, up, *vectors, tokens, out, name)
        with pytest.raises(ValueError, match="linear_gated: gelu has no limit"):
            ops.linear_gated(activations, gate, up, *vectors, tokens, out, "gelu", 1.0)


@pytest.mark.parametrize("width", [640, 5376])
def test_scaled_embeddings_and_norms_of_branches_have_the_bits_of_the_cpu(
    gpu: Emulator, width: int
) -> None:
    pool, rng, n = kernels.Pool(1), np.random.default_rng(2), 3
    ops, cpu = CudaOps(gpu, pool), CpuOps(pool)
    table = packed_with_bytes(pool, "q8_0", 20, width, rng)[0]
    w = kernels.Vector(rng.standard_normal(width).astype(np.float32))
    ops.upload(table, w)
    ids = np.array([3, 19, 0], np.int32)
    branch = rng.standard_normal((n, width)).astype(np.float32)
    x, hidden, want = ops.make_rows(n, width), ops.make_rows(n, width), kernels.Rows(n, width)
    gpu.copy_in(x.address, branch)
    seen = set[bytes]()
    for scale in (1.0, width**0.5):
        ops.embed(table, ids, hidden, scale)
        cpu.embed(table, ids, want, scale)
        assert ops.read_rows(hidden, n).tobytes() == want.view(n).tobytes()
        for _ in range(2):
            ops.norm_add(x, w, 1e-6, n, hidden)
            cpu.norm_add(rows_of(branch), w, 1e-6, n, want)
            assert ops.read_rows(hidden, n).tobytes() == want.view(n).tobytes()
            seen.add(want.view(n).tobytes())
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("tokens", "rows", "multiprocessors", "grid"),
    [
        (8, 70, 132, None),
        (16, 70, 132, None),
        (17, 70, 132, (1, 2, 3)),
        (32, 70, 2, (1, 2, 3)),
        (33, 70, 2, (1, 2, 3)),
        (65, 40, 1, (2, 1, 1)),
        (65, 40, 2, (2, 1, 3)),
        (33, 150, 2, (1, 3, 2)),
    ],
)
def test_segments_are_parted_where_blocks_are_few(
    gpu: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    rows: int,
    multiprocessors: int,
    grid: tuple[int, int, int] | None,
) -> None:
    pool, rng, cols = kernels.Pool(1), np.random.default_rng(9), 2112
    monkeypatch.setattr(gpu, "facts", replace(gpu.facts, multiprocessors=multiprocessors))
    ops = CudaOps(gpu, pool)
    matrix, bias = (
        packed_with_bytes(pool, "q4_0", rows, cols, rng)[0],
        kernels.Vector(rng.standard_normal(rows).astype(np.float32)),
    )
    ops.upload(matrix)
    ops.upload(bias)
    values = rng.standard_normal((tokens, cols)).astype(np.float32)
    x, on_cpu = ops.make_rows(tokens, cols), rows_of(values)
    gpu.copy_in(x.address, values)
    activations, wanted = (
        ops.make_activations(tokens, cols, False),
        kernels.Activations(tokens, cols),
    )
    ops.quantise(x, tokens, activations)
    kernels.quantise(pool, on_cpu, tokens, wanted)
    out, want = ops.make_rows(tokens, rows), kernels.Rows(tokens, rows)
    want.view(tokens)[:] = before = rng.standard_normal((tokens, rows)).astype(np.float32)
    gpu.copy_in(out.address, before)
    run = partial(ops.linear_add, activations, matrix, bias, tokens, out)
    run()
    kernels.linear_add(pool, wanted, matrix, bias, tokens, want)
    assert ops.read_rows(out, tokens).tobytes() == want.view(tokens).tobytes()
    names = [(launch.kernel, launch.blocks) for launch in gpu.capture(run).captured]
    if grid is None:
        name = "linear_few_q4_0" if tokens <= 8 else "linear_few2_q4_0"
        assert [launched for launched, _ in names] == [name]
    else:
        size = "some" if tokens <= 32 else "many"
        added = [("add_segments", (tokens, 1, 1))] if grid[2] > 1 else []
        assert names == [(f"linear_{size}_q4_0", grid), *added]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_matrices_that_are_uploaded_together_are_one_launch(
    gpu: Emulator, monkeypatch: pytest.MonkeyPatch, together: bool, has_bias: bool
) -> None:
    pool, rng, tokens = kernels.Pool(1), np.random.default_rng(2), 3
    ops, launched = CudaOps(gpu, pool), list[str]()
    made = [packed_with_bytes(pool, kind, rows, 64, rng)[0] for kind, rows in PRODUCTS]
    vectors = [kernels.Vector(rng.standard_normal(n).astype(np.float32)) for _, n in PRODUCTS]
    biases = [vectors[0], None, *vectors[2:]] if has_bias else [None] * len(made)
    for group in (made, vectors) if together else [[one] for one in (*made, *vectors)]:
        ops.upload(*group)
    values = rng.standard_normal((tokens, 64)).astype(np.float32)
    x, on_cpu = ops.make_rows(tokens, 64), rows_of(values)
    gpu.copy_in(x.address, values)
    activations, wanted = ops.make_activations(tokens, 64, False), kernels.Activations(tokens, 64)
    ops.quantise(x, tokens, activations)
    kernels.quantise(pool, on_cpu, tokens, wanted)
    width = sum(rows for _, rows in PRODUCTS)
    out, want = ops.make_rows(tokens, width), kernels.Rows(tokens, width)
    launch = gpu.launch

    def counted(kernel: str, *arguments: Any) -> None:
        launched.append(kernel)
        launch(kernel, *arguments)

    monkeypatch.setattr(gpu, "launch", counted)
    ops.linear(activations, made, biases, tokens, out)
    kernels.linear(pool, wanted, made, biases, tokens, want)
    assert ops.read_rows(out, tokens).tobytes() == want.view(tokens).tobytes()
    # 5 rows leave a part of a tile; one bias is none.
    assert len(launched) == ((4 if has_bias else 3) if together else len(made))


def test_steps_of_a_shape_are_replayed_until_memory_is_freed(
    gpu: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, graphs = list[int](), Graphs[int](gpu, 2)
    x, y = gpu.allocate(4), gpu.allocate(4)
    at, values = gpu.allocate(4), np.zeros(1, np.float32)
    gpu.copy_in(at, np.zeros(1, np.int32))

    def step(key: int) -> int:
        """What `run` returns of a launch that copies a value, which is another one every time."""

        def launch() -> int:
            calls.append(key)
            gpu.launch("take_rows", (1, 1, 1), 32, [x, 1, at, 1, y, 1])
            return len(calls)

        gpu.copy_in(x, rng.standard_normal(1).astype(np.float32))
        gpu.copy_out(x, values)
        given = float(values[0])
        result = graphs.run(key, launch)
        gpu.copy_out(y, values)
        assert float(values[0]) == given
        return result

    rng = np.random.default_rng(1)
    assert [step(1) for _ in range(4)] == [1, 2, 2, 2]
    assert [step(2), step(2), step(3), step(3), step(2), step(1)] == [3, 4, 5, 6, 4, 7]
    assert len(graphs) == 2  # 1 is captured again, for 3
    gpu.free(gpu.allocate(1))
    assert [step(2) for _ in range(3)] == [8, 9, 9]
    with pytest.raises(EmulatorFault, match="captured"):
        gpu.capture(lambda: gpu.copy_in(x, values))
    assert step(2) == 9

    def cannot(run: Callable[[], None]) -> Graph:
        raise GpuFault("no graph")

    monkeypatch.setattr(gpu, "capture", cannot)
    assert [step(4), step(4), step(4), step(2)] == [10, 11, 12, 9]


def test_a_first_launch_without_memory_is_tried_plainly_again(gpu: Emulator) -> None:
    graphs, scratch, calls = Graphs[int](gpu, 2), Scratch(gpu), list[int]()
    x, at, refused = gpu.allocate(4), gpu.allocate(4), [True]
    gpu.copy_in(x, np.ones(1, np.float32))
    gpu.copy_in(at, np.zeros(1, np.int32))

    def launch() -> int:
        if refused:
            refused.pop()
            raise MemoryError
        gpu.launch("take_rows", (1, 1, 1), 32, [x, 1, at, 1, scratch.reserve(4), 1])
        calls.append(1)
        return len(calls)

    with pytest.raises(MemoryError):
        graphs.run("key", launch)
    assert [graphs.run("key", launch) for _ in range(4)] == [1, 2, 2, 2]


def some_spec(rng: np.random.Generator, vocab: int) -> kernels.SampleSpec:
    """Any mixture of what a request may ask for."""
    n_history, n_bias = int(rng.choice([0, 0, 3, 50])), int(rng.choice([0, 0, 1, 5]))
    values = rng.choice([-np.inf, -1.5, 2.0], n_bias).tolist()
    mask = rng.integers(0, 1 << 32, -(-vocab // 32), np.uint32)
    mask[0] |= 1  # it allows a token
    return kernels.SampleSpec(
        temperature=float(rng.choice([0.0, 0.7, 3.0])),
        top_k=int(rng.choice([0, 5])),
        top_p=float(rng.choice([1.0, 0.8])),
        min_p=float(rng.choice([0.0, 0.1])),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        presence_penalty=float(rng.choice([0.0, 0.5])),
        frequency_penalty=float(rng.choice([0.0, 0.2])),
        seed=int(rng.integers(1 << 62)),
        position=int(rng.integers(1000)),
        draw=int(rng.integers(3)),
        history=rng.integers(0, vocab, n_history).astype(np.int32),
        bias=list(zip(rng.integers(0, vocab, n_bias).tolist(), values, strict=True)),
        logprobs=int(rng.choice([-1, 0, 3, 20])),
        mask=mask if rng.random() < 0.4 else None,
    )


def contents(rows: list[kernels.Sampled]) -> list[tuple[Any, ...]]:
    return [(row.token, row.nonfinite, row.logprob, row.top) for row in rows]


def test_an_infinite_logit_means_no_token_though_a_mask_excludes_it(gpu: Emulator) -> None:
    pool, vocab = kernels.Pool(1), 40
    mask = np.array([1 << 3, 0], np.uint32)
    biases = [(10, 3e38), (10, 3e38)], [(10, 3e38), (3, 1.0)], [(10, -3e38), (10, -3e38)]
    specs = [kernels.SampleSpec(temperature=0.0, bias=list(bias), mask=mask) for bias in biases]
    ops, n = CudaOps(gpu, pool), len(specs)
    logits, rows = ops.make_rows(n, vocab), kernels.Rows(n, vocab)
    values = np.random.default_rng(1).standard_normal((n, vocab)).astype(np.float32)
    gpu.copy_in(logits.address, values)
    rows.view(n)[:] = values
    got = ops.sample(logits, specs)
    assert contents(got) == contents(kernels.sample(pool, rows, specs))
    assert [sample.nonfinite for sample in got] == [True, False, False]


@pytest.mark.parametrize("vocab", [7, 900])
def test_sampling_gives_the_tokens_of_the_cpu(gpu: Emulator, vocab: int) -> None:
    pool, rng = kernels.Pool(1), np.random.default_rng(vocab)
    ops = CudaOps(gpu, pool)
    for n in (5, 24, 1):  # with buffers that grow, and that are used again
        specs = [some_spec(rng, vocab) for _ in range(n)]
        logits, rows = ops.make_rows(n, vocab), kernels.Rows(n, vocab)
        values = (4 * rng.standard_normal((n, vocab))).astype(np.float32)
        if n > 5:
            values[3, 2] = np.nan
        gpu.copy_in(logits.address, values)
        rows.view(n)[:] = values
        assert contents(ops.sample(logits, specs)) == contents(kernels.sample(pool, rows, specs))
    assert ops.sample(logits, []) == []
    for asked in ({"history": np.array([vocab], np.int32)}, {"bias": [(-1, 1.0)]}):
        with pytest.raises(ValueError, match="not in the vocabulary"):
            ops.sample(logits, [kernels.SampleSpec(**cast(Any, asked))])
