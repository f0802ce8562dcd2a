"""Models with experts: what their keys and tensors mean, and every form that is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import (
    DenseSpec,
    ModelSpec,
    MoeSpec,
    Weights,
    open_weights,
    plan_tensors,
    read_spec,
)
from batchengine.weights.ffn import BANK_ROWS_MAX, EXPERTS_MAX
from batchengine.weights.roles import MoeRoles
from bench.models.synthetic import PRESETS, Shape, write_synthetic
from service.cli.plan import read_model
from tests.hostile.rewrite import edited

Edit = Callable[[dict[str, Any], dict[str, Any]], Any]
TYPES = reference.GGMLQuantizationType
U32 = [reference.GGUFValueType.UINT32]
F32 = [reference.GGUFValueType.FLOAT32]
BOOL = [reference.GGUFValueType.BOOL]
COUNTS = [reference.GGUFValueType.ARRAY, reference.GGUFValueType.INT32]

QWEN3MOE = replace(PRESETS["moe-tiny"], n_layer=2, n_vocab=288)
LLAMA = replace(QWEN3MOE, arch="llama", n_expert=8, n_used=2)
OLMOE = replace(QWEN3MOE, arch="olmoe")
QWEN2MOE = replace(QWEN3MOE, arch="qwen2moe", n_ff_shared=32)
GLM = PRESETS["glm4moe-tiny"]
N, N_FF, N_EXPERT = QWEN3MOE.n_embd, QWEN3MOE.n_ff, QWEN3MOE.n_expert


@pytest.fixture(scope="module")
def pool() -> kernels.Pool:
    return kernels.Pool(1)


def written(shape: Shape, folder: Path, *edits: Edit) -> Path:
    """A model file of this shape, edited in order."""
    path = folder / "m.gguf"
    write_synthetic(path, shape)
    return edited(path, lambda values, tensors: [edit(values, tensors) for edit in edits])


def read(path: Path) -> ModelSpec:
    with GgufFile(path) as file:
        return read_spec(file)


def put(key: str, value: Any, types: list[Any] = U32) -> Edit:
    return lambda values, _: values.__setitem__(key, (value, types))


def drop(*names: str) -> Edit:
    return lambda values, tensors: [(values.pop(n, None), tensors.pop(n, None)) for n in names]


def added(name: str, *dims: int) -> Edit:
    """A tensor of ones; dims as numpy has them."""
    ones = np.ones(dims, np.float32)
    return lambda _, tensors: tensors.__setitem__(name, (ones, TYPES.F32))


# -- what is read


def test_a_file_of_qwen3moe_has_experts_and_the_attention_of_qwen3(tmp_path: Path) -> None:
    spec = read(written(QWEN3MOE, tmp_path))
    assert spec.experts == MoeSpec(n_expert=10, n_used=3, n_ff=64, scale=1.0)
    assert [layer.ffn for layer in spec.layers] == [spec.experts] * 2
    attention = spec.attention
    assert attention.has_qk_norm
    assert attention.rope.style == "neox"
    assert repr(spec) == (
        "<ModelSpec qwen3moe layers=2 embd=96 ff=64 experts=3/10 heads=4/2x32 vocab=288 Q4_0>"
    )


def test_a_file_of_llama_may_have_experts(tmp_path: Path) -> None:
    spec = read(written(LLAMA, tmp_path))
    assert spec.experts == MoeSpec(n_expert=8, n_used=2, n_ff=64, scale=1.0)
    assert not spec.attention.has_qk_norm
    assert spec.attention.rope.style == "norm"
    dense = read(written(replace(LLAMA, n_expert=0), tmp_path))
    assert dense.experts is None
    assert dense.layers[0].ffn == DenseSpec(64)
    assert "experts" not in repr(dense)


def test_the_width_of_an_expert_has_the_defaults_of_each_architecture(tmp_path: Path) -> None:
    """Without the key: of qwen3moe the part of each used expert, of llama the whole."""
    path = written(QWEN3MOE, tmp_path, drop("qwen3moe.expert_feed_forward_length"))
    assert read(path).layers[0].ffn.n_ff == 192 // 3
    path = written(QWEN3MOE, tmp_path, put("qwen3moe.expert_feed_forward_length", 0))
    assert read(path).layers[0].ffn.n_ff == 64
    path = written(QWEN3MOE, tmp_path, drop("qwen3moe.feed_forward_length"))
    assert read(path).layers[0].ffn.n_ff == 64
    path = written(LLAMA, tmp_path, put("llama.feed_forward_length", 256))
    assert read(path).layers[0].ffn.n_ff == 256
    key = put("llama.expert_feed_forward_length", 32)
    assert read(written(LLAMA, tmp_path, key)).layers[0].ffn.n_ff == 32


@pytest.mark.parametrize(("value", "scale"), [(0.0, 1.0), (1.0, 1.0), (2.5, 2.5)])
def test_the_scale_of_the_weights_is_one_unless_given(
    value: float, scale: float, tmp_path: Path
) -> None:
    path = written(QWEN3MOE, tmp_path, put("qwen3moe.expert_weights_scale", value, F32))
    assert read(path).experts == MoeSpec(10, 3, 64, scale)


def test_keys_that_say_what_is_so_anyway_are_accepted(tmp_path: Path) -> None:
    edits = [
        put("qwen3moe.expert_used_count", [3, 3], COUNTS),
        put("qwen3moe.expert_feed_forward_length", [64, 64], COUNTS),
        put("qwen3moe.expert_weights_norm", value=True, types=BOOL),
        put("qwen3moe.expert_gating_func", 1),
        put("qwen3moe.expert_gating_func", 3),
        put("qwen3moe.expert_group_count", 1),
        put("qwen3moe.expert_group_used_count", 1),
        put("qwen3moe.interleave_moe_layer_step", 1),
        put("qwen3moe.expert_shared_count", 0),
        put("qwen3moe.expert_shared_feed_forward_length", 0),  # as Qwen3-Coder-30B-A3B has it
        put("qwen3moe.leading_dense_block_count", 0),
    ]
    path = written(QWEN3MOE, tmp_path, *edits)
    assert read(path).experts == MoeSpec(10, 3, 64, 1.0)


def test_a_bank_is_one_matrix_of_all_experts(tmp_path: Path) -> None:
    with GgufFile(written(QWEN3MOE, tmp_path)) as file:
        plan = plan_tensors(file, read_spec(file))
    ffn = plan.layers[1].ffn
    assert isinstance(ffn, MoeRoles)
    assert [(m.name.split(".")[2], m.kind, m.rows, m.cols) for m in _matrices(ffn)] == [
        ("ffn_gate_inp", "f32", 10, 96),
        ("ffn_gate_exps", "q4_0", 640, 96),
        ("ffn_up_exps", "q4_0", 640, 96),
        ("ffn_down_exps", "q4_0", 960, 64),
    ]
    assert ffn.readers == [ffn.selector]
    assert len(plan.matrices) == 2 + 2 * 8


def _matrices(ffn: MoeRoles[Any, Any]) -> list[Any]:
    return [ffn.selector, ffn.gate, ffn.up, ffn.down]


def opened(path: Path, pool: kernels.Pool, folder: Path) -> Weights:
    with GgufFile(path) as file:
        return open_weights(file, pool, cache_dir=folder)


def test_the_packed_rows_of_a_bank_are_those_of_its_experts(
    tmp_path: Path, pool: kernels.Pool
) -> None:
    """Expert e of a bank has the bytes of the same matrix packed alone."""
    path = written(QWEN3MOE, tmp_path)
    weights = opened(path, pool, tmp_path / "c")
    ffn = weights.layer[1].ffn
    assert isinstance(ffn, MoeRoles)
    assert sum(t is ffn.down for t in weights.tensors()) == 1
    file = {str(t.name): t for t in reference.GGUFReader(path).tensors}
    for name, rows, cols, matrix in (
        ("ffn_up_exps", N_FF, N, ffn.up),
        ("ffn_down_exps", N, N_FF, ffn.down),
    ):
        whole = matrix.view().reshape(N_EXPERT, -1)
        source = file[f"blk.1.{name}.weight"].data
        assert source.shape[:2] == (N_EXPERT, rows)
        for expert in range(N_EXPERT):
            alone = np.zeros(kernels.packed_bytes("q4_0", rows, cols) + 64, np.uint8)
            alone = alone[-alone.ctypes.data % 64 :][: kernels.packed_bytes("q4_0", rows, cols)]
            kernels.pack(pool, "q4_0", rows, cols, np.array(source[expert]), alone)
            assert alone.tobytes() == whole[expert].tobytes()


def test_gate_and_up_may_be_one_tensor(tmp_path: Path, pool: kernels.Pool) -> None:
    """Their banks have the same packed bytes then."""
    separate = opened(written(QWEN3MOE, tmp_path), pool, tmp_path / "c").layer
    fused = opened(written(QWEN3MOE, tmp_path, as_fused_banks), pool, tmp_path / "d").layer
    for layer in (0, 1):
        for one, other in zip(separate[layer].ffn.banks, fused[layer].ffn.banks, strict=True):
            assert (one.rows, one.cols) == (other.rows, other.cols)
            assert one.view().tobytes() == other.view().tobytes()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_selector_may_have_any_float_type(kind: str, tmp_path: Path, pool: kernels.Pool) -> None:
    path = written(replace(QWEN3MOE, kinds={"ffn_gate_inp": kind}), tmp_path)
    ffn = opened(path, pool, tmp_path / "c").layer[0].ffn
    assert isinstance(ffn, MoeRoles)
    assert ffn.selector.kind == kind


# -- glm4moe: dense layers in front, sigmoids, a shared expert without a weight


def test_a_file_of_glm4moe_has_dense_layers_and_experts_by_sigmoids(tmp_path: Path) -> None:
    spec = read(written(GLM, tmp_path))
    experts = MoeSpec(10, 3, 64, 2.5, n_ff_shared=64, gating="normed_sigmoid")
    assert [layer.ffn for layer in spec.layers] == [DenseSpec(96), experts, experts, experts]
    assert spec.experts == experts
    attention = spec.attention
    assert attention.has_qk_norm
    assert (attention.rope.style, attention.rope.n_rot) == ("neox", 16)
    assert "ff=64 experts=3/10" in repr(spec)


@pytest.mark.parametrize(
    ("edits", "gating", "scale", "n_ff_shared"),
    [
        ([put("glm4moe.expert_weights_norm", value=False, types=BOOL)], "sigmoid", 2.5, 64),
        ([drop("glm4moe.expert_weights_norm")], "sigmoid", 2.5, 64),
        ([drop("glm4moe.expert_gating_func")], "normed_sigmoid", 2.5, 64),
        ([put("glm4moe.expert_gating_func", 0)], "normed_sigmoid", 2.5, 64),
        ([drop("glm4moe.expert_weights_scale")], "normed_sigmoid", 1.0, 64),
        ([put("glm4moe.expert_shared_count", 3)], "normed_sigmoid", 2.5, 192),
        ([drop("glm4moe.expert_shared_count")], "normed_sigmoid", 2.5, 0),
    ],
)
def test_the_keys_of_glm4moe_have_the_defaults_of_llama_cpp(
    edits: list[Edit], gating: str, scale: float, n_ff_shared: int, tmp_path: Path
) -> None:
    experts = read(written(GLM, tmp_path, *edits)).experts
    assert experts is not None
    assert (experts.gating, experts.scale, experts.n_ff_shared) == (gating, scale, n_ff_shared)


@pytest.mark.parametrize("n_dense", [0, 1, 3])
def test_any_number_of_first_layers_may_be_dense(n_dense: int, tmp_path: Path) -> None:
    shape = replace(GLM, n_dense=n_dense, n_mtp=0)
    with GgufFile(written(shape, tmp_path)) as file:
        spec = read_spec(file)
        plan = plan_tensors(file, spec)
    kinds = [isinstance(layer.ffn, MoeRoles) for layer in plan.layers]
    assert kinds == [False] * n_dense + [True] * (GLM.n_layer - n_dense)
    assert plan.layers[-1].ffn.banks[0].rows == 640


def test_a_count_of_no_dense_layers_is_none(tmp_path: Path) -> None:
    """Layers in front without a selector of experts are dense all the same."""
    spec = read(written(GLM, tmp_path, put("glm4moe.leading_dense_block_count", 0)))
    assert [isinstance(layer.ffn, DenseSpec) for layer in spec.layers] == [True, *[False] * 3]


def test_older_files_have_another_name_for_the_bias_of_the_choice(
    tmp_path: Path, pool: kernels.Pool
) -> None:
    def renamed(_: Any, tensors: dict[str, Any]) -> None:
        for i in range(GLM.n_dense, GLM.n_layer):
            tensors[f"blk.{i}.exp_probs_b"] = tensors.pop(f"blk.{i}.exp_probs_b.bias")

    with_ending = opened(written(GLM, tmp_path), pool, tmp_path / "c").layer
    without = opened(written(GLM, tmp_path, renamed), pool, tmp_path / "d").layer
    for layer in range(GLM.n_dense, GLM.n_layer):
        one, other = with_ending[layer].ffn, without[layer].ffn
        assert isinstance(one, MoeRoles)
        assert isinstance(other, MoeRoles)
        assert one.choice_bias is not None
        assert other.choice_bias is not None
        assert one.choice_bias.view().tobytes() == other.choice_bias.view().tobytes()


def test_norms_of_heads_and_biases_are_there_if_the_file_has_them(tmp_path: Path) -> None:
    """GLM-4.5-Air has no norms; a file without bias of the choice has none."""
    shape = replace(GLM, qk_norm=False, bias=0.0, k_bias=0.0, choice_bias=0.0)
    with GgufFile(written(shape, tmp_path)) as file:
        spec = read_spec(file)
        plan = plan_tensors(file, spec)
    assert not spec.attention.has_qk_norm
    ffn = plan.layers[1].ffn
    assert isinstance(ffn, MoeRoles)
    assert ffn.choice_bias is None
    assert ffn.shared is not None
    assert ffn.shared.selector is None
    assert ffn.readers == [ffn.selector, ffn.shared.gate, ffn.shared.up]


def test_a_step_of_glm4moe_counts_dense_layers_and_the_shared_expert_whole(tmp_path: Path) -> None:
    """A token computes with all weights but those of the experts that it does not choose; those of
    the block that predicts further tokens are none of the model."""
    facts, size = read_model(written(GLM, tmp_path), 0)
    assert (facts["experts"], facts["experts_used"], facts["layers"]) == (10, 3, 4)
    one_expert, heads = 3 * GLM.n_ff * N, GLM.n_head * GLM.head_dim
    kv = GLM.n_kv_head * GLM.head_dim
    attention = N * (2 * heads + 2 * kv)
    dense = 3 * GLM.n_ff_dense * N
    ends = 2 * GLM.n_vocab * N
    outside = 4 * attention + dense + ends + 3 * (N * 10 + one_expert)
    assert facts["parameters"] == outside + 3 * 10 * one_expert
    assert facts["parameters_used"] == outside + 3 * 3 * one_expert
    shapes = ((640, N), (640, N), (10 * N, GLM.n_ff))
    assert size.experts.n_bytes == 3 * sum(kernels.packed_bytes("q4_0", *of) for of in shapes)


# name -> (code, words of the message, edit of a glm4moe file)
WRONG_GLM: dict[str, tuple[str, tuple[str, ...], Edit]] = {
    "groups": (
        "BE1322",
        ("glm4moe.expert_group_used_count", "of 2 groups"),
        put("glm4moe.expert_group_count", 2),
    ),
    "softmax": (
        "BE1323",
        ("glm4moe.expert_gating_func = 1", "a sigmoid (2)"),
        put("glm4moe.expert_gating_func", 1),
    ),
    "norm": (
        "BE1322",
        ("glm4moe.expert_weights_norm", "true or false"),
        put("glm4moe.expert_weights_norm", 1),
    ),
    "all_dense": (
        "BE1322",
        ("glm4moe.leading_dense_block_count", "some of the 4 layers must have experts"),
        put("glm4moe.leading_dense_block_count", 4),
    ),
    "more_dense": (
        "BE1324",
        ("blk.1.ffn_gate.weight",),
        put("glm4moe.leading_dense_block_count", 2),
    ),
    "width": (
        "BE1321",
        ("glm4moe.expert_feed_forward_length",),
        drop("glm4moe.expert_feed_forward_length"),
    ),
    "shared_width": (
        "BE1323",
        ("glm4moe.expert_shared_feed_forward_length = 64", "the width of the others"),
        put("glm4moe.expert_shared_feed_forward_length", 64),
    ),
    "more_shared": (
        "BE1325",
        ("blk.1.ffn_gate_shexp.weight", "[96, 64]", "[96, 128]"),
        put("glm4moe.expert_shared_count", 2),
    ),
    "bias_of_other_experts": (
        "BE1325",
        ("blk.2.exp_probs_b.bias", "[9]", "[10]"),
        added("blk.2.exp_probs_b.bias", 9),
    ),
    "two_biases": (
        "BE1328",
        ("blk.2.exp_probs_b", "no role"),
        added("blk.2.exp_probs_b", 10),
    ),
    "bias_of_a_dense_layer": (
        "BE1328",
        ("blk.0.exp_probs_b.bias", "no role"),
        added("blk.0.exp_probs_b.bias", 10),
    ),
    "weight_of_the_shared_expert": (
        "BE1328",
        ("blk.1.ffn_gate_inp_shexp.weight", "no role"),
        added("blk.1.ffn_gate_inp_shexp.weight", N),
    ),
    "a_norm_of_one_layer": (
        "BE1324",
        ("blk.2.attn_q_norm.weight",),
        drop("blk.2.attn_q_norm.weight"),
    ),
    "part_of_a_head": (
        "BE1323",
        ("glm4moe.rope.dimension_count = 17",),
        put("glm4moe.rope.dimension_count", 17),
    ),
}


@pytest.mark.parametrize("name", WRONG_GLM)
def test_a_wrong_file_of_glm4moe_is_refused_with_the_key_or_tensor(
    name: str, tmp_path: Path
) -> None:
    code, words, edit = WRONG_GLM[name]
    path = written(GLM, tmp_path, edit)
    with GgufFile(path) as file, pytest.raises(BatchEngineError) as caught:
        plan_tensors(file, read_spec(file))
    assert caught.value.code == code, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_a_bias_of_the_choice_that_is_no_number_is_refused(
    tmp_path: Path, pool: kernels.Pool
) -> None:
    def edit(_: Any, tensors: dict[str, Any]) -> None:
        tensors["blk.2.exp_probs_b.bias"][0][3] = np.inf

    with pytest.raises(BatchEngineError) as caught:
        opened(written(GLM, tmp_path, edit), pool, tmp_path / "c")
    assert caught.value.code == "BE1327"
    assert "blk.2.exp_probs_b.bias" in str(caught.value)


# -- olmoe and qwen2moe: weights by a softmax over all


def test_the_weights_of_olmoe_and_qwen2moe_are_those_of_a_softmax_over_all(tmp_path: Path) -> None:
    """A file may say so; feed_forward_length is the width of one expert of olmoe."""
    path = written(OLMOE, tmp_path, put("olmoe.feed_forward_length", 64))
    assert read(path).experts == MoeSpec(10, 3, 64, 1.0, gating="softmax_all")
    norm = put("qwen2moe.expert_weights_norm", value=False, types=BOOL)
    experts = read(written(QWEN2MOE, tmp_path, norm)).experts
    shared = {"n_ff_shared": 32, "has_shared_weight": True}
    assert experts == MoeSpec(10, 3, 64, 1.0, gating="softmax_all", **shared)


@pytest.mark.parametrize("arch", ["qwen2moe", "hunyuan-moe"])
def test_a_shared_expert_without_a_width_has_that_of_a_dense_part(
    arch: str, tmp_path: Path
) -> None:
    """As older files of qwen2moe, which have the tensors and not the key."""
    shape = replace(QWEN2MOE, arch=arch, n_ff_shared=96, n_ff_dense=96)
    key = f"{arch}.expert_shared_feed_forward_length"
    for edit in (drop(key), put(key, 0)):
        with GgufFile(written(shape, tmp_path, edit)) as file:
            spec = read_spec(file)
            plan_tensors(file, spec)
        assert spec.experts is not None
        assert spec.experts.n_ff_shared == 96


@pytest.mark.parametrize(
    ("words", "edit"),
    [
        ("a softmax over all", put("qwen2moe.expert_weights_norm", value=True, types=BOOL)),
        ("from a softmax (1)", put("qwen2moe.expert_gating_func", 3)),
        ("from a softmax (1)", put("qwen2moe.expert_gating_func", 2)),
    ],
)
def test_other_weights_of_qwen2moe_are_refused(words: str, edit: Edit, tmp_path: Path) -> None:
    with pytest.raises(BatchEngineError) as caught:
        read(written(QWEN2MOE, tmp_path, edit))
    assert caught.value.code == "BE1323"
    assert words in str(caught.value)


# -- what is refused


def quantised_selector(_: Any, tensors: dict[str, Any]) -> None:
    tensors["blk.1.ffn_gate_inp.weight"] = np.zeros((N_EXPERT, N // 32 * 34), np.uint8), TYPES.Q8_0


def unknown_bank_type(_: Any, tensors: dict[str, Any]) -> None:
    tensors["blk.0.ffn_up_exps.weight"] = np.zeros((N_EXPERT, N_FF, N * 2), np.uint8), TYPES.I16


def as_separate_experts(_: Any, tensors: dict[str, Any]) -> None:
    for role in ("gate", "up", "down"):
        data, kind = tensors.pop(f"blk.0.ffn_{role}_exps.weight")
        for expert in range(N_EXPERT):
            tensors[f"blk.0.ffn_{role}.{expert}.weight"] = data[expert], kind


def as_fused_banks(_: Any, tensors: dict[str, Any]) -> None:
    for i in range(QWEN3MOE.n_layer):
        (gate, kind), (up, _kind) = (
            tensors.pop(f"blk.{i}.ffn_{r}_exps.weight") for r in ("gate", "up")
        )
        tensors[f"blk.{i}.ffn_gate_up_exps.weight"] = np.concatenate([gate, up], axis=1), kind


# name -> (code, words of the message, edit of a qwen3moe file)
WRONG: dict[str, tuple[str, tuple[str, ...], Edit]] = {
    "no_count": ("BE1321", ("qwen3moe.expert_count",), drop("qwen3moe.expert_count")),
    "none": (
        "BE1323",
        ("qwen3moe.expert_count = 0", "2 to 1024 experts"),
        put("qwen3moe.expert_count", 0),
    ),
    "one": ("BE1323", ("expert_count = 1", "2 to 1024"), put("qwen3moe.expert_count", 1)),
    "too_many": (
        "BE1323",
        ("expert_count = 1025", "2 to 1024"),
        put("qwen3moe.expert_count", EXPERTS_MAX + 1),
    ),
    "count_of_another_type": (
        "BE1322",
        ("qwen3moe.expert_count", "not an integer"),
        put("qwen3moe.expert_count", 8.0, F32),
    ),
    "no_used": ("BE1321", ("expert_used_count",), drop("qwen3moe.expert_used_count")),
    "none_used": (
        "BE1322",
        ("qwen3moe.expert_used_count", "out of range"),
        put("qwen3moe.expert_used_count", 0),
    ),
    "more_used_than_there_are": (
        "BE1322",
        ("qwen3moe.expert_used_count", "is 11", "10 experts at most"),
        put("qwen3moe.expert_used_count", 11),
    ),
    "used_per_layer": (
        "BE1323",
        ("expert_used_count", "[2, 3]", "every layer"),
        put("qwen3moe.expert_used_count", [3, 2], COUNTS),
    ),
    "width": (
        "BE1323",
        ("qwen3moe.expert_feed_forward_length = 80", "a multiple of 32 is needed"),
        put("qwen3moe.expert_feed_forward_length", 80),
    ),
    "width_of_a_part": (
        "BE1323",
        ("qwen3moe.feed_forward_length = 160", "a multiple of 32 for each of 3 experts"),
        lambda values, tensors: (
            drop("qwen3moe.expert_feed_forward_length")(values, tensors),
            put("qwen3moe.feed_forward_length", 160)(values, tensors),
        ),
    ),
    "width_of_a_part_is_none": (
        "BE1323",
        ("qwen3moe.feed_forward_length = 2",),
        lambda values, tensors: (
            drop("qwen3moe.expert_feed_forward_length")(values, tensors),
            put("qwen3moe.feed_forward_length", 2)(values, tensors),
        ),
    ),
    "no_width": (
        "BE1321",
        ("qwen3moe.feed_forward_length",),
        drop("qwen3moe.expert_feed_forward_length", "qwen3moe.feed_forward_length"),
    ),
    "more_rows_than_a_matrix_has": (
        "BE1323",
        ("qwen3moe.expert_count = 1024", f"{BANK_ROWS_MAX:,} at most"),
        lambda values, tensors: (
            put("qwen3moe.expert_count", EXPERTS_MAX)(values, tensors),
            put("qwen3moe.expert_feed_forward_length", 1 << 22)(values, tensors),
        ),
    ),
    "scale": (
        "BE1322",
        ("expert_weights_scale", "outside"),
        put("qwen3moe.expert_weights_scale", -2.0, F32),
    ),
    "scale_infinite": (
        "BE1322",
        ("expert_weights_scale", "finite"),
        put("qwen3moe.expert_weights_scale", float("inf"), F32),
    ),
    "shared": (
        "BE1323",
        ("qwen3moe.expert_shared_count = 1", "every token uses"),
        put("qwen3moe.expert_shared_count", 1),
    ),
    "shared_width": (
        "BE1323",
        ("qwen3moe.expert_shared_feed_forward_length = 512", "every token uses"),
        put("qwen3moe.expert_shared_feed_forward_length", 512),
    ),
    "groups": (
        "BE1323",
        ("qwen3moe.expert_group_count = 2", "chosen by sigmoids"),
        put("qwen3moe.expert_group_count", 2),
    ),
    "sigmoid": (
        "BE1323",
        ("qwen3moe.expert_gating_func = 2", "softmax"),
        put("qwen3moe.expert_gating_func", 2),
    ),
    "weights_without_norm": (
        "BE1323",
        ("qwen3moe.expert_weights_norm = false", "the sum 1"),
        put("qwen3moe.expert_weights_norm", value=False, types=BOOL),
    ),
    "dense_layers_first": (
        "BE1323",
        ("qwen3moe.leading_dense_block_count = 1", "every layer"),
        put("qwen3moe.leading_dense_block_count", 1),
    ),
    "dense_layers_between": (
        "BE1323",
        ("qwen3moe.interleave_moe_layer_step = 2", "every layer"),
        put("qwen3moe.interleave_moe_layer_step", 2),
    ),
    "bias_on_the_choice": (
        "BE1323",
        ("blk.1.exp_probs_b.bias", "[10]", "choice of experts"),
        added("blk.1.exp_probs_b.bias", N_EXPERT),
    ),
    "bias_on_the_choice_of_old_files": (
        "BE1323",
        ("blk.0.exp_probs_b", "[10]", "choice of experts"),
        added("blk.0.exp_probs_b", N_EXPERT),
    ),
    "fused_banks_of_another_width": (
        "BE1325",
        ("blk.1.ffn_gate_up_exps.weight", "[96, 128, 9]", "[96, 128, 10]"),
        lambda values, tensors: (
            as_fused_banks(values, tensors),
            added("blk.1.ffn_gate_up_exps.weight", 9, 2 * N_FF, N)(values, tensors),
        ),
    ),
    "fused_banks_and_separate_ones": (
        "BE1328",
        ("blk.0.ffn_up_exps.weight", "no role"),
        lambda values, tensors: (
            as_fused_banks(values, tensors),
            added("blk.0.ffn_up_exps.weight", N_EXPERT, N_FF, N)(values, tensors),
        ),
    ),
    "a_tensor_per_expert": (
        "BE1323",
        ("blk.0.ffn_gate.0.weight", "[96, 64]", "one expert's", "convert the model again"),
        as_separate_experts,
    ),
    "scale_tensor": (
        "BE1328",
        ("blk.0.ffn_down_exps.scale", "no role"),
        added("blk.0.ffn_down_exps.scale", N_EXPERT),
    ),
    "shared_tensor": (
        "BE1328",
        ("blk.0.ffn_up_shexp.weight", "no role"),
        added("blk.0.ffn_up_shexp.weight", N_FF, N),
    ),
    "no_selector": (
        "BE1324",
        ("blk.1.ffn_gate_inp.weight", "[96, 10]"),
        drop("blk.1.ffn_gate_inp.weight"),
    ),
    "no_bank": (
        "BE1324",
        ("blk.1.ffn_down_exps.weight", "[64, 96, 10]"),
        drop("blk.1.ffn_down_exps.weight"),
    ),
    "bank_of_fewer_experts": (
        "BE1325",
        ("blk.0.ffn_up_exps.weight", "[96, 64, 9]", "[96, 64, 10]"),
        added("blk.0.ffn_up_exps.weight", 9, N_FF, N),
    ),
    "bank_of_two_dimensions": (
        "BE1325",
        ("blk.0.ffn_up_exps.weight", "[96, 640]", "[96, 64, 10]"),
        added("blk.0.ffn_up_exps.weight", N_EXPERT * N_FF, N),
    ),
    "selector_of_fewer_experts": (
        "BE1325",
        ("blk.0.ffn_gate_inp.weight", "[96, 8]", "[96, 10]"),
        added("blk.0.ffn_gate_inp.weight", 8, N),
    ),
    "quantised_selector": (
        "BE1326",
        ("blk.1.ffn_gate_inp.weight", "the type Q8_0", "F32, F16, BF16"),
        quantised_selector,
    ),
    "bank_of_another_type": (
        "BE1326",
        ("blk.0.ffn_up_exps.weight", "the type I16", "Q4_0"),
        unknown_bank_type,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_mixture_is_refused_with_the_key_or_tensor(name: str, tmp_path: Path) -> None:
    code, words, edit = WRONG[name]
    path = written(QWEN3MOE, tmp_path, edit)
    with GgufFile(path) as file, pytest.raises(BatchEngineError) as caught:
        plan_tensors(file, read_spec(file))
    assert caught.value.code == code, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_the_error_of_a_nonfinite_scale_names_the_bank(tmp_path: Path, pool: kernels.Pool) -> None:
    """The row is counted over all experts."""

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        tensors["blk.1.ffn_down_exps.weight"][0][2, 5, :2] = (0x00, 0x7C)

    with pytest.raises(BatchEngineError) as caught:
        opened(written(QWEN3MOE, tmp_path, edit), pool, tmp_path / "c")
    assert caught.value.code == "BE1327"
    assert "blk.1.ffn_down_exps.weight" in str(caught.value)
    assert f"row {2 * N + 5}" in str(caught.value)


# -- any value

KEYS = [
    "expert_count", "expert_used_count", "expert_feed_forward_length", "feed_forward_length",
    "expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_count",
    "expert_shared_count", "leading_dense_block_count", "embedding_length", "rope.dimension_count",
]  # fmt: skip
VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(-3, 300),
    st.sampled_from((1 << 10, 1 << 22, 1 << 24)),
    st.floats(),
    st.booleans(),
    st.text(max_size=5),
    st.lists(st.integers(-5, 300), max_size=4).map(lambda v: np.array(v, np.int32)),
)


@pytest.fixture(scope="module", params=[QWEN3MOE, GLM], ids=["qwen3moe", "glm4moe"])
def any_model(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[GgufFile]:
    path = tmp_path_factory.mktemp("any") / "m.gguf"
    write_synthetic(path, request.param)
    with GgufFile(path) as file:
        yield file


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_key_of_experts_is_accepted_or_refused(
    any_model: GgufFile, changes: dict[str, Any]
) -> None:
    """The result is a spec whose tensors all exist, or one named error."""
    original = dict(any_model.values)
    arch = any_model.text("general.architecture")
    any_model.values |= {f"{arch}.{key}": value for key, value in changes.items()}
    try:
        spec = read_spec(any_model)
        plan = plan_tensors(any_model, spec)
    except BatchEngineError as error:
        assert error.code.startswith("BE13")  # noqa: PT017
        assert error.fix  # noqa: PT017
        return
    finally:
        any_model.values = original
    assert spec.experts is not None
    assert 1 <= spec.experts.n_used <= spec.experts.n_expert
    assert 1e-3 <= spec.experts.scale <= 1e3
    kinds = [isinstance(layer.ffn, MoeRoles) for layer in plan.layers]
    assert kinds == sorted(kinds)
    assert kinds[-1]
