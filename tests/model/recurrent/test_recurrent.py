"""Models with recurrent layers: a timeline has the same logits and state however it is split."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as T
from numpy.typing import NDArray

import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import (
    AttentionSpec,
    DeltaNetSpec,
    open_weights,
    plan_tensors,
    read_spec,
)
from bench.models.local_runner import LocalRunner, LocalSequence, RunnerError
from bench.models.synthetic import PRESETS, write_synthetic
from bench.models.tensors import aligned
from tests.hostile.rewrite import edited

F32 = Kind.F32

DELTA_NETS = ["qwen35-tiny", "qwen35moe-tiny", "qwen3next-tiny"]
PRESET_NAMES = [*DELTA_NETS, "granitehybrid-tiny", "nemotron_h_moe-tiny", "lfm2moe-tiny"]
# All levels of kernels with the smallest model; kernels have their own tests.
LEVELS = [
    (name, isa)
    for name in PRESET_NAMES
    for isa in kernels.isa_levels()[0 if name == "lfm2moe-tiny" else -1 :]
]
TOKENS = np.random.default_rng(3).integers(0, 320, 300).tolist()
# Tokens one by one from the first one on, and past the end of a page.
SINGLE = [1] * 40 + [200] + [1] * 60


@pytest.fixture(params=PRESET_NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS[request.param])
    return path


def state_of(runner: LocalRunner, sequence: LocalSequence) -> bytes:
    assert runner.model.states is not None
    assert sequence.state is not None
    return sequence.state[: runner.model.states.image_bytes]


@pytest.mark.parametrize(("path", "isa"), LEVELS, indirect=["path"])
def test_the_last_tokens_of_a_step_may_be_taken_back(path: Path, cache_dir: Path, isa: str) -> None:
    """Of some entries, at once: their states are those of steps without these tokens. Other ones
    are not concerned, and neither is the next step."""
    before = kernels.isa()
    kernels.set_isa(isa)
    try:
        with LocalRunner(path, cache_dir=cache_dir, logits_max=40, threads=2) as runner:
            starts, counts, drafts = [290, 0, 7, 100, 31], [10, 4, 9, 20, 1], [9, 3, 8, 0, 0]
            for rejected in ([(0, 9)], [(2, 3), (1, 1)], [(0, 4), (1, 3), (2, 8)], []):
                sequences = [LocalSequence() for _ in starts]
                expected: list[bytes] = []
                for index, (start, n) in enumerate(zip(starts, counts, strict=True)):
                    kept = start + n - dict(rejected).get(index, 0)
                    alone = LocalSequence()
                    runner.prefill(alone, TOKENS[index : index + kept])
                    expected.append(state_of(runner, alone))
                    runner.release(alone)
                    if start:
                        runner.prefill(sequences[index], TOKENS[index : index + start])
                entries = [
                    (sequence, TOKENS[index + start : index + start + n])
                    for index, (sequence, start, n) in enumerate(
                        zip(sequences, starts, counts, strict=True)
                    )
                ]
                last = runner.set_step(entries, drafts)
                assert not runner.stepper.run(np.array(last, np.int32))
                runner.stepper.rewind(rejected)
                runner.commit(entries)
                assert [state_of(runner, sequence) for sequence in sequences] == expected
                for sequence in sequences:
                    runner.release(sequence)
    finally:
        kernels.set_isa(before)


@pytest.mark.parametrize(("path", "isa"), LEVELS, indirect=["path"])
def test_a_timeline_may_be_split_anywhere(path: Path, cache_dir: Path, isa: str) -> None:
    before = kernels.isa()
    kernels.set_isa(isa)
    try:
        with LocalRunner(path, cache_dir=cache_dir, logits_max=300, threads=2) as runner:
            whole, found = LocalSequence(), list[tuple[bytes, bytes]]()
            logits = runner.step([(whole, TOKENS)], range(300)).copy()
            expected = state_of(runner, whole)
            for sizes in (SINGLE, [7, 256, 37], [255, 2, 43]):
                split, at, rows = LocalSequence(), 0, list[Any]()
                for size in sizes:
                    part = TOKENS[at : at + size]
                    rows.append(runner.step([(split, part)], range(size)).copy())
                    at += size
                found.append((np.concatenate(rows).tobytes(), state_of(runner, split)))
                runner.release(split)
        assert found == [(logits.tobytes(), expected)] * 3
    finally:
        kernels.set_isa(before)


def test_timelines_of_one_step_do_not_meet(path: Path, cache_dir: Path) -> None:
    prompts = [TOKENS[:90], TOKENS[40:41], TOKENS[100:290], TOKENS[5:70]]
    with LocalRunner(path, cache_dir=cache_dir, entries_max=4) as runner:
        alone = [LocalSequence() for _ in prompts]
        logits = [runner.step([(a, p)])[0].copy() for a, p in zip(alone, prompts, strict=True)]
        together = [LocalSequence() for _ in prompts]
        both = runner.step(list(zip(together, prompts, strict=True))).copy()
        assert both.tobytes() == np.stack(logits).tobytes()
        for one, other in zip(alone, together, strict=True):
            assert state_of(runner, one) == state_of(runner, other)


def test_a_fork_changes_no_state(path: Path, cache_dir: Path) -> None:
    with LocalRunner(path, cache_dir=cache_dir) as runner:
        first = LocalSequence()
        runner.step([(first, TOKENS[:50])])
        fork = runner.fork(first)
        here = runner.step([(first, TOKENS[50:60])])[0].copy()
        there = runner.step([(fork, TOKENS[50:60])])[0].copy()
        assert here.tobytes() == there.tobytes()
        with pytest.raises(RunnerError):
            runner.fork(first, 10)


@pytest.mark.parametrize("path", DELTA_NETS, indirect=True)
def test_what_a_file_says_of_its_layers(path: Path) -> None:
    with GgufFile(path) as file:
        spec = read_spec(file)
    kinds = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    every = 4 if spec.arch == "qwen35" else 2
    assert kinds == [(i + 1) % every == 0 for i in range(spec.n_layer)]
    assert spec.n_layer in (5, 8)  # without the block that predicts further tokens
    assert f"layers={spec.n_layer} recurrent={spec.n_layer_recurrent} " in repr(spec)
    sizes = (2, 4, 64, 4, 2) if spec.arch == "qwen3next" else (1, 2, 128, 4, 1)
    assert spec.recurrent == DeltaNetSpec(*sizes)
    shape = kernels.StateShape(spec.n_layer_recurrent, *sizes)
    assert spec.state_bytes == shape.image_bytes
    assert spec.attention.has_gate
    assert spec.attention.rope.n_rot == spec.attention.head_dim // 2
    if spec.experts is not None:
        assert spec.experts.n_ff_shared == 96


U32, BOOL, COUNTS = [T.UINT32], [T.ARRAY, T.BOOL], [T.ARRAY, T.INT32]
PATTERN = [True, False, False, True, True, False, True, False, True]
KEYS: tuple[tuple[str, Any, list[Any], str, str], ...] = (
    ("full_attention_interval", 2, U32, "", ""),
    ("full_attention_interval", 1, U32, "BE1323", "some layers must be recurrent"),
    ("full_attention_interval", 99, U32, "BE1323", "some must have attention"),
    ("full_attention_interval", 0, U32, "BE1322", "out of range"),
    ("full_attention_interval", 8, U32, "", ""),
    ("attention.recurrent_layers", PATTERN, BOOL, "", ""),
    ("attention.recurrent_layers", PATTERN[:8], BOOL, "", ""),
    ("attention.recurrent_layers", True, [T.BOOL], "BE1322", "an array of flags"),
    ("attention.recurrent_layers", [0.5] * 9, [T.ARRAY, T.FLOAT32], "BE1322", "an array of flags"),
    ("rope.dimension_sections", [6, 5, 5], COUNTS, "", ""),
    ("rope.dimension_sections", [8, 4, 4, 0], COUNTS, "BE1323", "pair 13 turns with an axis"),
    ("rope.dimension_sections", [4, 4, 4, 4], COUNTS, "BE1323", "pair 12 turns with an axis"),
    ("rope.dimension_sections", [0, 0, 0, 0], COUNTS, "BE1322", "numbers of pairs"),
    ("rope.dimension_sections", [16, 0], COUNTS, "BE1322", "numbers of pairs"),
    ("rope.dimension_sections", 16, U32, "BE1322", "numbers of pairs"),
    ("attention.recurrent_layers", [True] * 3, BOOL, "BE1322", "3 flags"),
    ("attention.recurrent_layers", [False] * 9, BOOL, "BE1323", "some layers must be recurrent"),
    ("ssm.state_size", 48, U32, "BE1323", "a multiple of 32"),
    ("ssm.state_size", 288, U32, "BE1323", "up to 256"),
    ("ssm.inner_size", 384, U32, "BE1323", "2 heads of 128"),
    ("ssm.inner_size", 300, U32, "BE1323", "2 heads of 128"),
    ("ssm.conv_kernel", 5, U32, "BE1323", "2 to 4"),
    ("ssm.conv_kernel", 1, U32, "BE1323", "2 to 4"),
    ("rope.dimension_count", 31, U32, "BE1323", "head_dim"),
    ("rope.dimension_count", 96, U32, "BE1323", "head_dim"),
    ("nextn_predict_layers", 9, U32, "BE1322", "blocks"),
)


@pytest.mark.parametrize(("key", "value", "types", "code", "words"), KEYS)
def test_keys_of_recurrent_layers(
    tmp_path: Path, key: str, value: Any, types: list[Any], code: str, words: str
) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["qwen35-tiny"])
    name = f"qwen35.{key}"
    changed = edited(path, lambda values, _: values.__setitem__(name, (value, types)))
    with GgufFile(changed) as file:
        if not code:
            spec = read_spec(file)
            every = {2: 4, 8: 1}.get(value if isinstance(value, int) else 0)
            expected = PATTERN[:8].count(False) if "layers" in key else every or 2
            assert spec.n_layer_kv == expected
            return
        with pytest.raises(BatchEngineError) as error:
            read_spec(file)
    assert error.value.code == code
    assert name in str(error.value)
    assert words in str(error.value)


def test_blocks_that_no_key_counts_are_refused(tmp_path: Path) -> None:
    """Those that predict further tokens are counted."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["qwen35-tiny"])
    with GgufFile(path) as file:
        plan_tensors(file, read_spec(file))
    name = "qwen35.nextn_predict_layers"
    n_layer = PRESETS["qwen35-tiny"].n_layer

    def uncounted(values: Any, _: object) -> None:
        values["qwen35.block_count"] = (n_layer, U32)
        del values[name]

    with GgufFile(edited(path, uncounted)) as file, pytest.raises(BatchEngineError) as error:
        plan_tensors(file, read_spec(file))
    assert f"blk.{n_layer}." in str(error.value)


def test_steps_without_states_are_refused(path: Path, cache_dir: Path, tmp_path: Path) -> None:
    tokens, entry = np.zeros(1, np.int32), np.array([[1, 0, 1]], np.int32)
    page, states = np.array([64], np.uint64), np.array([[0, 64]], np.uint64)
    refused = pytest.raises(ValueError, match="states")
    with LocalRunner(path, cache_dir=cache_dir) as runner, refused:
        runner.stepper.set(tokens, entry, page)
    other = tmp_path / "other.gguf"
    write_synthetic(other, PRESETS["tiny"])
    refused = pytest.raises(ValueError, match="states")
    with LocalRunner(other, cache_dir=cache_dir) as runner, refused:
        runner.stepper.set(tokens, entry, page, states=states)


def ones(*dims: int) -> NDArray[np.float32]:
    return np.ones(dims, np.float32)


def changed_tensors(path: Path, edit: Callable[[dict[str, Any]], Any]) -> Path:
    return edited(path, lambda _, tensors: edit(tensors))


# Words of the error, and the edit of a qwen35moe file
WRONG_TENSORS: dict[str, tuple[str, tuple[str, ...], Callable[[dict[str, Any]], Any]]] = {
    "no_beta": (
        "BE1324", ("blk.0.ssm_beta.weight", "[96, 2]"), lambda t: t.pop("blk.0.ssm_beta.weight"),
    ),
    "no_bias_of_time_steps": (
        "BE1324", ("blk.2.ssm_dt", "[2]"), lambda t: t.pop("blk.2.ssm_dt.bias"),
    ),
    "query_without_gate": (
        "BE1325",
        ("blk.1.attn_q.weight", "[96, 128]", "[96, 256]"),
        lambda t: t.update({"blk.1.attn_q.weight": (ones(128, 96), F32)}),
    ),
    "convolution_of_other_channels": (
        "BE1325",
        ("blk.0.ssm_conv1d.weight", "[4, 511]", "[4, 512]"),
        lambda t: t.update({"blk.0.ssm_conv1d.weight": (ones(511, 4), F32)}),
    ),
    "quantised_row_of_the_shared_expert": (
        "BE1326",
        ("blk.4.ffn_gate_inp_shexp.weight", "Q8_0", "F32, F16, BF16"),
        lambda t: t.update(
            {"blk.4.ffn_gate_inp_shexp.weight": (np.zeros(102, np.uint8), Kind.Q8_0)}
        ),
    ),
    "no_shared_expert": (
        "BE1324",
        ("blk.3.ffn_up_shexp.weight", "[96, 96]"),
        lambda t: t.pop("blk.3.ffn_up_shexp.weight"),
    ),
    "a_recurrent_tensor_of_an_attention_layer": (
        "BE1328",
        ("blk.1.ssm_a", "no role"),
        lambda t: t.update({"blk.1.ssm_a": (ones(2), F32)}),
    ),
    "a_block_that_no_key_counts": (
        "BE1328",
        ("blk.5.attn_norm.weight", "no role"),
        lambda t: t.update({"blk.5.attn_norm.weight": (ones(96), F32)}),
    ),
    "growing_state": (
        "BE1327",
        ("blk.2.ssm_a", "would grow"),
        lambda t: t.update({"blk.2.ssm_a": (np.array([-1.0, 0.1], np.float32), F32)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_wrong_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    code, words, edit = WRONG_TENSORS[name]
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["qwen35moe-tiny"])
    with (
        GgufFile(changed_tensors(path, edit)) as file,
        pytest.raises(BatchEngineError) as error,
    ):
        open_weights(file, kernels.Pool(1), cache_dir=tmp_path)
    assert error.value.code == code
    for word in words:
        assert word in str(error.value)


def test_a_broken_scale_of_a_gate_is_named(tmp_path: Path) -> None:
    """Head 1 of attn_q has rows 64 to 127: 32 of the query, then 32 of the gate."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["qwen35moe-tiny"])

    def edit(tensors: dict[str, Any]) -> None:
        tensors["blk.1.attn_q.weight"][0][64 + 32 + 5, :2] = (0x00, 0x7C)

    with (
        GgufFile(changed_tensors(path, edit)) as file,
        pytest.raises(BatchEngineError) as error,
    ):
        open_weights(file, kernels.Pool(1), cache_dir=tmp_path)
    assert error.value.code == "BE1327"
    for word in ("blk.1.attn_q.weight", "of rows 32 to 63 in each 64: ", "row 37"):
        assert word in str(error.value)


def test_the_gate_of_attention_has_every_second_run_of_rows(
    tmp_path: Path, cache_dir: Path
) -> None:
    """With gates of zero the output of attention is halved, as half of its matrix would do."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(PRESETS["qwen35moe-tiny"], base="f32"))

    def no_gate(tensors: dict[str, Any]) -> None:
        for layer in (1, 3):
            heads = tensors[f"blk.{layer}.attn_q.weight"][0].reshape(4, 2, 32, 96)
            heads[:, 1] = 0.0

    def open_gate_and_half_output(tensors: dict[str, Any]) -> None:
        no_gate(tensors)
        for layer in (1, 3):
            tensors[f"blk.{layer}.attn_output.weight"][0][:] *= 0.5

    logits = list[bytes]()
    for edit in (no_gate, open_gate_and_half_output):
        with LocalRunner(changed_tensors(path, edit), cache_dir=cache_dir) as runner:
            if edit is open_gate_and_half_output:  # gates are 1 instead of sigmoid(0)
                runner.stepper.ops.gate_rows = lambda *_: None  # type: ignore[method-assign]
            logits.append(runner.prefill(LocalSequence(), TOKENS[:40]).tobytes())
    assert logits[0] == logits[1]


def test_blocks_that_predict_further_tokens_change_no_logits(
    tmp_path: Path, cache_dir: Path
) -> None:
    shape = PRESETS["qwen35-tiny"]
    logits = list[bytes]()
    for n_mtp in (0, 1):
        path = tmp_path / f"{n_mtp}.gguf"
        write_synthetic(path, replace(shape, n_mtp=n_mtp))
        with LocalRunner(path, cache_dir=cache_dir) as runner:
            assert runner.spec.n_layer == shape.n_layer
            logits.append(runner.prefill(LocalSequence(), TOKENS[:40]).tobytes())
    assert logits[0] == logits[1]


def test_the_bias_of_time_steps_has_two_names(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["qwen35moe-tiny"])

    def rename(tensors: dict[str, Any]) -> None:
        for layer in (0, 2, 4):
            tensors[f"blk.{layer}.ssm_dt"] = tensors.pop(f"blk.{layer}.ssm_dt.bias")

    logits = list[bytes]()
    for file in (path, changed_tensors(path, rename)):
        with LocalRunner(file, cache_dir=cache_dir) as runner:
            logits.append(runner.prefill(LocalSequence(), TOKENS[:40]).tobytes())
    assert logits[0] == logits[1]


# Roles of the layers, and their shapes: a matrix of huge numbers is reported in every one.
OVERFLOWS = (
    ("blk.0.attn_qkv.weight", (512, 96)),
    ("blk.4.attn_qkv.weight", (512, 96)),  # the last layer
    ("blk.0.attn_gate.weight", (256, 96)),
    ("blk.4.attn_gate.weight", (256, 96)),
    ("blk.2.ssm_beta.weight", (2, 96)),
    ("blk.2.ssm_alpha.weight", (2, 96)),
    ("blk.4.ssm_out.weight", (96, 256)),
    ("blk.3.attn_q.weight", (256, 96)),
    ("blk.2.ffn_gate_shexp.weight", (96, 96)),
    ("blk.4.ffn_down_shexp.weight", (96, 96)),
    ("blk.2.ffn_gate_inp_shexp.weight", (96,)),
)


@pytest.mark.parametrize(("name", "dims"), OVERFLOWS)
def test_an_overflow_stays_in_its_entry(
    name: str, dims: tuple[int, ...], tmp_path: Path, cache_dir: Path
) -> None:
    """For token 7 alone a product is infinite: its entry is reported, and the others keep their
    bits and their states."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["qwen35moe-tiny"])

    def edit(tensors: dict[str, Any]) -> None:
        rng = np.random.default_rng(4)
        embedding = rng.normal(size=(320, 96)).astype(np.float32)
        embedding[:, 0] = 0.0
        embedding[7] = 0.0
        embedding[7, 0] = 1e4
        tensors["token_embd.weight"] = embedding, F32
        for tensor, (data, _) in list(tensors.items()):  # no layer writes to dimension 0
            written = re.search(r"(attn_output|ssm_out|ffn_down_(shexp|exps))\.weight$", tensor)
            if written and tensor != name:
                shape = (*data.shape[:-1], data.shape[-1] // 18 * 32)
                values = rng.normal(0.0, 0.1, shape).astype(np.float32)
                values[..., 0, :] = 0.0
                tensors[tensor] = values, F32
        huge = rng.normal(size=dims).astype(np.float32)
        if re.search("ssm_out|ffn_down", name):
            huge = np.full(dims, 3e38, np.float32)
        elif len(dims) == 1:
            huge[0] = 3e38
        else:
            huge[:, 0] = 3e38
        tensors[name] = huge, F32

    with LocalRunner(changed_tensors(path, edit), cache_dir=cache_dir, n_pages=9) as runner:
        good, bad = [[1, 2, 3], [4, 5, 6, 8]], [9, 7, 9]
        if re.search("ssm_out|ffn_down", name):  # infinite for every token
            last = runner.set_step([(LocalSequence(), good[0]), (LocalSequence(), good[1])])
            assert runner.stepper.run(np.array(last, np.int32)) == [0, 1]
            return
        alone = list[tuple[bytes, bytes]]()
        for tokens in good:
            sequence = LocalSequence()
            alone.append((runner.prefill(sequence, tokens).tobytes(), state_of(runner, sequence)))
        entries = [(LocalSequence(), part) for part in (good[0], bad, good[1])]
        last = runner.set_step(entries)
        assert runner.stepper.run(np.array(last, np.int32)) == [1]
        runner.commit(entries)
        rows = runner.stepper.logits(3).view(3)
        found = [(rows[i].tobytes(), state_of(runner, entries[i][0])) for i in (0, 2)]
        assert found == alone


class StateImages:
    """`count` images side by side, each 64-byte aligned; a fresh one has bytes of no float."""

    def __init__(self, shape: kernels.StateShape, count: int) -> None:
        self._bytes = shape.image_bytes  # whole cache lines
        self._memory = aligned(count * self._bytes)
        self._memory[:] = 0xFF

    def address(self, index: int) -> int:
        """Where an image begins."""
        return kernels.address_of(self._memory) + index * self._bytes

    def image(self, index: int) -> bytes:
        """A copy of an image."""
        return self._memory[index * self._bytes : (index + 1) * self._bytes].tobytes()


def test_a_step_changes_no_image_that_it_reads(path: Path, cache_dir: Path) -> None:
    """The caller of a Stepper owns the images: two steps from one of them give the same bits."""
    with LocalRunner(path, cache_dir=cache_dir) as runner:
        shape, stepper = runner.model.states, runner.stepper
        assert shape is not None
        images = StateImages(shape, 3)
        page = aligned(runner.page_bytes)

        def step(tokens: list[int], start: int, read: int, write: int) -> bytes:
            states = np.array([[read and images.address(read - 1), images.address(write - 1)]])
            stepper.set(
                np.array(tokens, np.int32),
                np.array([[len(tokens), start, 1]], np.int32),
                np.array([kernels.address_of(page)], np.uint64),
                states=states.astype(np.uint64),
            )
            assert stepper.run(np.array([len(tokens) - 1], np.int32)) == []
            return stepper.logits(1).view(1).tobytes()

        step(TOKENS[:20], 0, 0, 1)
        before = images.image(0)
        first = step(TOKENS[20:30], 20, 1, 2)
        assert images.image(0) == before != images.image(1)
        assert step(TOKENS[20:30], 20, 1, 3) == first
        assert images.image(2) == images.image(1)
        with pytest.raises(ValueError, match="reads an address that is written"):
            step(TOKENS[20:21], 20, 1, 1)
