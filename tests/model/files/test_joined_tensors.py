"""Matrices that a file has as one tensor: the rows of each are found, and the bits are the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValueType as T

from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import plan_tensors, read_spec
from bench.models.local_runner import LocalRunner
from bench.models.synthetic import PRESETS, Shape, write_synthetic
from tests.hostile.rewrite import edited

Tensors = dict[str, Any]
TOKENS = np.random.default_rng(4).integers(0, 320, 70).tolist()
NEXT = PRESETS["qwen3next-tiny"]
GLM4, PHI3 = PRESETS["glm4-tiny"], PRESETS["phi3-tiny"]


def logits_of(path: Path, cache_dir: Path) -> bytes:
    with LocalRunner(path, cache_dir=cache_dir, logits_max=70) as runner:
        return bytes(runner.all_logits(TOKENS).tobytes())


def apart(shape_layers: int, tensors: Tensors) -> None:
    """Gate and up as two tensors."""
    for layer in range(shape_layers):
        up = f"blk.{layer}.ffn_up.weight"
        data, kind = tensors[up]
        half = len(data) // 2
        tensors[f"blk.{layer}.ffn_gate.weight"] = (data[:half].copy(), kind)
        tensors[up] = (data[half:].copy(), kind)


@pytest.mark.parametrize("shape", [GLM4, PHI3], ids=["glm4", "phi3"])
def test_gate_and_up_may_be_one_tensor(shape: Any, tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, shape)
    other = edited(path, lambda _, tensors: apart(shape.n_layer, tensors))
    assert logits_of(other, cache_dir) == logits_of(path, cache_dir)


def older(shape: Shape, tensors: Tensors) -> None:
    """q, k, v and the gate of recurrent layers as one tensor, key head by key head."""
    n_k, d, values = shape.n_k_head, shape.state_dim, shape.n_v_head // shape.n_k_head
    values *= d
    for name in [name for name in tensors if name.endswith("attn_gate.weight")]:
        prefix = name.removesuffix("attn_gate.weight")
        qkv, kind = tensors.pop(prefix + "attn_qkv.weight")
        gate, _ = tensors.pop(name)
        q, k, v = np.split(qkv, [n_k * d, 2 * n_k * d])
        rows = [
            part[head * n : (head + 1) * n]
            for head in range(n_k)
            for part, n in ((q, d), (k, d), (v, values), (gate, values))
        ]
        tensors[prefix + "ssm_in.weight"] = (np.concatenate(rows), kind)


@pytest.mark.parametrize("n_v_head", [2, 4])
def test_older_files_of_qwen3next_have_the_same_bits(
    tmp_path: Path, cache_dir: Path, n_v_head: int
) -> None:
    path, shape = tmp_path / "m.gguf", replace(NEXT, n_v_head=n_v_head)
    write_synthetic(path, shape)
    other = edited(path, lambda _, tensors: older(shape, tensors))
    assert logits_of(other, cache_dir) == logits_of(path, cache_dir)


def test_value_heads_of_qwen3next_share_keys_with_their_neighbours(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, NEXT)
    with GgufFile(path) as file:
        net = read_spec(file).recurrent
    assert net is not None
    assert (net.n_k_head, net.n_v_head, net.key_run) == (2, 4, 2)


def test_factors_of_short_contexts_are_not_read(tmp_path: Path, cache_dir: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, PHI3)
    with GgufFile(path) as file:
        assert read_spec(file).attention.rope.has_factors
        assert read_spec(file).attention.rope.attn_factor == pytest.approx(1.19)

    def without_short(_: Any, tensors: Tensors) -> None:
        del tensors["rope_factors_short.weight"]

    def without_long(_: Any, tensors: Tensors) -> None:
        long = tensors["rope_factors_long.weight"][0]
        long[:] = 1.0

    expected = logits_of(path, cache_dir)
    assert logits_of(edited(path, without_short), cache_dir) == expected
    assert logits_of(edited(path, without_long), cache_dir) != expected


@pytest.mark.parametrize(
    ("sections", "style"),
    [((), "norm"), ((2, 3, 3, 0), "neox"), ((2, 3, 3), "neox"), ((8, 0, 0, 0), "norm")],
)
def test_files_of_glm4_for_images_have_other_pairs(
    tmp_path: Path, sections: tuple[int, ...], style: str
) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(GLM4, sections=sections))
    with GgufFile(path) as file:
        assert read_spec(file).attention.rope.style == style


REFUSED: dict[str, tuple[Any, tuple[str, ...], Callable[[dict[str, Any], Tensors], Any]]] = {
    "rows": (
        GLM4,
        ("blk.1.ffn_up.weight", "shape"),
        lambda _, t: t.__setitem__(
            "blk.1.ffn_up.weight",
            (t["blk.1.ffn_up.weight"][0][:-32].copy(), t["blk.1.ffn_up.weight"][1]),
        ),
    ),
    "no gate": (
        PRESETS["tiny"],
        ("no tensor blk.0.ffn_gate.weight",),
        lambda _, t: t.pop("blk.0.ffn_gate.weight"),
    ),
    "neither gate nor up": (
        PHI3,
        ("no tensor blk.0.ffn_gate.weight",),
        lambda _, t: t.pop("blk.0.ffn_up.weight"),
    ),
    "kind of scaling": (
        GLM4,
        ("glm4.rope.scaling.type = longrope",),
        lambda v, _: v.__setitem__("glm4.rope.scaling.type", ("longrope", [T.STRING])),
    ),
    "an axis without positions in text": (
        replace(GLM4, sections=(2, 2, 2, 2)),
        ("glm4.rope.dimension_sections = [2, 2, 2, 2]", "pair 6 turns with an axis"),
        lambda *_: None,
    ),
    "tiny factor": (
        PHI3,
        ("rope_factors_long.weight", "0.0078125 at least"),
        lambda _, t: t["rope_factors_long.weight"][0].__setitem__(0, 1e-30),
    ),
    "short factors of another size": (
        PHI3,
        ("rope_factors_short.weight", "shape"),
        lambda _, t: t.__setitem__(
            "rope_factors_short.weight",
            (np.ones(7, np.float32), t["rope_factors_short.weight"][1]),
        ),
    ),
    "joined inputs of too few rows": (
        replace(NEXT, fused_inputs=True),
        ("blk.0.ssm_in.weight", "shape"),
        lambda _, t: t.__setitem__(
            "blk.0.ssm_in.weight",
            (t["blk.0.ssm_in.weight"][0][:-32].copy(), t["blk.0.ssm_in.weight"][1]),
        ),
    ),
    "a norm of one head": (
        PRESETS["minimax-m2-tiny"],
        ("blk.0.attn_q_norm.weight", "shape"),
        lambda _, t: t.__setitem__(
            "blk.0.attn_q_norm.weight",
            (np.ones(32, np.float32), t["blk.0.attn_q_norm.weight"][1]),
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused_with_the_key_or_tensor(
    name: str, tmp_path: Path, cache_dir: Path
) -> None:
    shape, words, edit = REFUSED[name]
    path = tmp_path / "m.gguf"
    write_synthetic(path, shape)
    changed = edited(path, edit)
    with pytest.raises(BatchEngineError) as caught:
        logits_of(changed, cache_dir)
    for word in words:
        assert word in str(caught.value)


def test_each_row_of_a_joined_tensor_is_in_one_matrix(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(NEXT, fused_inputs=True))
    with GgufFile(path) as file:
        plan = plan_tensors(file, read_spec(file))
        for tensor in ("blk.0.ssm_in.weight", "blk.0.ssm_ba.weight"):
            rows = list[int]()
            for matrix in plan.matrices:
                if matrix.tensor == tensor:
                    assert matrix.part is not None
                    first, n, every = matrix.part
                    runs = range(first, file.tensors[tensor].shape[1], every)
                    found = [row for run in runs for row in range(run, run + n)]
                    assert len(found) == matrix.rows
                    rows += found
            assert sorted(rows) == list(range(file.tensors[tensor].shape[1]))
