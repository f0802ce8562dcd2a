"""Files of step35: heads, windows, rotations and bounds of each layer, by their keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as T

from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import AttentionRoles, DenseSpec, MoeSpec
from batchengine.weights.spec import read_spec
from batchengine.weights.tensors import plan_tensors
from bench.models.synthetic import PRESETS, write_synthetic
from tests.hostile.rewrite import edited

SHAPE = PRESETS["step35-tiny"]
U32, F32, BOOL = [T.UINT32], [T.FLOAT32], [T.ARRAY, T.BOOL]
FLOATS, INTS = [T.ARRAY, T.FLOAT32], [T.ARRAY, T.UINT32]
HEADS, PATTERN = "attention.head_count", "attention.sliding_window_pattern"
EXPERTS, OTHERS = "swiglu_clamp_exp", "swiglu_clamp_shexp"


def changed(folder: Path, key: str, value: Any, types: list[Any]) -> Path:
    """A file of step35 of five layers and a block behind them, with another value of a key."""
    path = folder / "m.gguf"
    write_synthetic(path, SHAPE)

    def edit(values: dict[str, Any], _: Any) -> None:
        values.pop(f"step35.{key}", None)
        if types:
            values[f"step35.{key}"] = value, types

    return edited(path, edit)


def test_layers_of_step35_have_heads_windows_rotations_and_gates_of_their_own(
    tmp_path: Path,
) -> None:
    """Of five layers the first and the last see everything, and rotate half of their heads."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, SHAPE)
    with GgufFile(path) as file:
        spec = read_spec(file)
        plan = plan_tensors(file, spec)
    found = [(of.window, of.n_head, of.n_kv_head, of.rope.n_rot) for of in spec.attentions]
    assert found == [(0, 2, 1, 16), *[(40, 6, 2, 32)] * 3, (0, 2, 1, 16)]
    assert [of.gate_rows for of in spec.attentions] == [2, 6, 6, 6, 2]
    assert [of.rope.base for of in spec.attentions] == [5e6, 1e4, 1e4, 1e4, 5e6]
    assert [of.rope.has_factors for of in spec.attentions] == [True, False, False, False, True]
    assert not spec.has_equal_heads
    assert plan.rope_factors is not None
    assert plan.rope_factors.size == 16  # of the windowed layers, which have none
    gates = [layer.mixer.gate for layer in plan.layers if isinstance(layer.mixer, AttentionRoles)]
    assert [gate and (gate.rows, gate.cols) for gate in gates] == [
        (n, 128) for n in (2, 6, 6, 6, 2)
    ]


# key, value, its type, code and words of the error; "" = it is read. Without types the key is left
# out.
KEYS: tuple[tuple[str, Any, list[Any], str, str], ...] = (
    (HEADS, 6, U32, "BE1325", "attn_gate"),
    (HEADS, [2, 6, 6, 6], INTS, "BE1322", "4 numbers for 5 layers"),
    (HEADS, [2, 6, 6, 6, 0], INTS, "BE1322", "out of range"),
    (HEADS, [2, 5, 6, 6, 2], INTS, "BE1323", "does not divide 5 heads"),
    (f"{HEADS}_kv", [1, 2, 2, 2, 1], INTS, "", ""),
    (f"{HEADS}_kv", [1, 4, 2, 2, 1], INTS, "BE1323", "does not divide 6 heads"),
    (PATTERN, None, [], "BE1321", "array of flags"),
    (PATTERN, 4, U32, "BE1322", "array of flags"),
    (PATTERN, [False, True, True, True], BOOL, "BE1322", "4 flags for 5 layers"),
    ("attention.sliding_window", None, [], "BE1321", "an integer"),
    ("rope.freq_base_swa", None, [], "", ""),
    ("rope.freq_base_swa", 0.0, F32, "BE1322", "outside"),
    ("rope.dimension_count", 30, U32, "BE1323", "half of it"),
    ("rope.dimension_count", 64, U32, "BE1323", "head_dim is 32"),
    ("rope.dimension_count_swa", 16, U32, "", ""),
    ("rope.dimension_count_swa", 31, U32, "BE1323", "head_dim is 32"),
    ("attention.key_length_swa", 64, U32, "BE1323", "head_dim is 32"),
    (EXPERTS, -7.0, F32, "BE1322", "neither 0 nor from 0.001"),
    (EXPERTS, 1e-7, F32, "BE1322", "neither 0 nor from 0.001"),
    (EXPERTS, float("nan"), F32, "BE1322", "finite"),
    (EXPERTS, [0.0, 7.0, 7.0, 7.0], FLOATS, "BE1322", "4 numbers for 5 layers"),
    (EXPERTS, [0.0, 7.0, 7.0, float("nan"), 7.0], FLOATS, "BE1322", "neither 0 nor from 0.001"),
    (OTHERS, [0.0, 7.0, 7.0, 7.0, float("inf")], FLOATS, "BE1322", "neither 0 nor from 0.001"),
    (OTHERS, 1e9, F32, "BE1322", "neither 0 nor from 0.001"),
)


@pytest.mark.parametrize(("key", "value", "types", "code", "words"), KEYS)
def test_keys_of_step35(
    tmp_path: Path, key: str, value: Any, types: list[Any], code: str, words: str
) -> None:
    with GgufFile(changed(tmp_path, key, value, types)) as file:
        if not code:
            spec = read_spec(file)
            windowed = spec.attentions[1].rope
            assert windowed.base == 1e4
            assert windowed.n_rot == (16 if key.endswith("count_swa") else 32)
            return
        with pytest.raises(BatchEngineError) as error:
            plan_tensors(file, read_spec(file))
    assert error.value.code == code
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "types", "limits"),
    [
        (EXPERTS, [0.0, 0.0, 0.0, 7.0, 1.5, 3.0], FLOATS, [0.0, 7.0, 1.5]),
        (EXPERTS, 7.0, F32, [7.0, 7.0, 7.0]),
        (EXPERTS, None, [], [0.0, 0.0, 0.0]),
        (OTHERS, [2.5, 0.0, 0.25, 16.0, 0.0], FLOATS, [0.25, 16.0, 0.0]),
        (OTHERS, None, [], [0.0, 0.0, 0.0]),
    ],
)
def test_each_layer_has_bounds_of_gates_and_ups(
    tmp_path: Path, key: str, value: Any, types: list[Any], limits: list[float]
) -> None:
    """Those of experts, and those of the shared expert, which dense layers have, too."""
    with GgufFile(changed(tmp_path, key, value, types)) as file:
        ffns = [layer.ffn for layer in read_spec(file).layers]
    dense, experts = ffns[:2], [ffn for ffn in ffns[2:] if isinstance(ffn, MoeSpec)]
    is_experts = key == EXPERTS
    found = [ffn.limit if is_experts else ffn.shared_limit for ffn in experts]
    assert found == limits
    others = [0.0, pytest.approx(0.3)]
    if not is_experts:
        others = [2.5, 0.0] if types else [0.0, 0.0]
    assert [ffn.limit for ffn in dense if isinstance(ffn, DenseSpec)] == others
    assert len({ffn.unlimited for ffn in experts}) == 1


def test_without_a_shared_expert_there_is_no_bound_of_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(SHAPE, n_ff_shared=0))
    with GgufFile(path) as file:
        spec = read_spec(file)
        plan_tensors(file, spec)
    limits = [ffn.shared_limit for layer in spec.layers if isinstance(ffn := layer.ffn, MoeSpec)]
    assert limits == [0.0, 0.0, 0.0]


def test_the_gate_of_attention_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, SHAPE)

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        tensors.pop("blk.1.attn_gate.weight")

    with GgufFile(edited(path, edit)) as file, pytest.raises(BatchEngineError) as error:
        plan_tensors(file, read_spec(file))
    assert error.value.code == "BE1324"
    assert "blk.1.attn_gate.weight" in str(error.value)


def test_a_rotation_of_part_of_a_head_is_halved_where_there_is_no_window(tmp_path: Path) -> None:
    """Windows rotate as many dimensions as the others would, unless a key says so."""
    with GgufFile(changed(tmp_path, "rope.dimension_count", 24, U32)) as file:
        assert [of.rope.n_rot for of in read_spec(file).attentions] == [12, 24, 24, 24, 12]
