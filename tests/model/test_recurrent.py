"""Models with recurrent layers: a timeline has the same logits and state however it is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType as T

import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import AttentionSpec, DeltaNetSpec, plan_tensors, read_spec
from bench.models.local_runner import LocalRunner, LocalSequence, RunnerError
from bench.models.synthetic import PRESETS, write_synthetic
from tests.hostile.rewrite import edited

PRESET_NAMES = ["qwen35-tiny", "qwen35moe-tiny"]
TOKENS = np.random.default_rng(3).integers(0, 320, 300).tolist()


@pytest.fixture(params=PRESET_NAMES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS[request.param])
    return path


def state_of(runner: LocalRunner, sequence: LocalSequence) -> bytes:
    assert runner.model.states is not None
    assert sequence.state is not None
    return sequence.state[: runner.model.states.image_bytes]


@pytest.mark.parametrize("isa", kernels.isa_levels())
def test_a_timeline_may_be_split_anywhere(path: Path, cache_dir: Path, isa: str) -> None:
    before = kernels.isa()
    kernels.set_isa(isa)
    try:
        with LocalRunner(path, cache_dir=cache_dir, logits_max=300, threads=2) as runner:
            whole, found = LocalSequence(), list[tuple[bytes, bytes]]()
            logits = runner.step([(whole, TOKENS)], range(300)).copy()
            expected = state_of(runner, whole)
            for sizes in ([1] * 300, [7, 256, 37], [255, 2, 43]):
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


def test_what_a_file_says_of_its_layers(path: Path) -> None:
    with GgufFile(path) as file:
        spec = read_spec(file)
    kinds = [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers]
    assert kinds == [False, False, False, True] * (spec.n_layer // 4)
    assert spec.n_layer in (4, 8)  # without the block that predicts further tokens
    net = spec.delta_net
    assert net == DeltaNetSpec(1, 2, 128, 4)
    shape = kernels.StateShape(spec.n_layer_recurrent, 1, 2, 128, 4)
    assert spec.state_bytes == shape.image_bytes
    assert spec.attention.has_gate
    assert spec.attention.rope.n_rot == spec.attention.head_dim // 2
    if spec.experts is not None:
        assert spec.experts.n_ff_shared == 96


U32, BOOL = [T.UINT32], [T.ARRAY, T.BOOL]
KEYS: tuple[tuple[str, Any, list[Any], str, str], ...] = (
    ("full_attention_interval", 2, U32, "", ""),
    ("full_attention_interval", 1, U32, "BE1323", "some layers must be recurrent"),
    ("full_attention_interval", 99, U32, "BE1323", "some must have attention"),
    ("full_attention_interval", 0, U32, "BE1322", "out of range"),
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
            assert read_spec(file).n_layer_kv == 4
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
