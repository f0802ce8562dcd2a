"""Files of Granite 4, Nemotron-H and LFM2: their layers, their keys, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as T

import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import (
    AttentionSpec,
    DenseRoles,
    DenseSpec,
    Mamba2Spec,
    ModelSpec,
    MoeRoles,
    MoeSpec,
    ShortConvSpec,
    open_weights,
    plan_tensors,
    read_spec,
)
from bench.models.local_runner import LocalRunner, LocalSequence
from bench.models.synthetic import PRESETS, Shape, write_synthetic
from tests.hostile.rewrite import edited
from tests.kernels.binary32 import fma

F32 = Kind.F32
GRANITE, NEMOTRON, LFM2 = "granitehybrid-tiny", "nemotron_h_moe-tiny", "lfm2moe-tiny"
TOKENS = np.random.default_rng(3).integers(0, 320, 60).tolist()


def written(shape: Shape | str, folder: Path) -> Path:
    path = folder / "m.gguf"
    write_synthetic(path, PRESETS[shape] if isinstance(shape, str) else shape)
    return path


def spec_of(path: Path) -> ModelSpec:
    with GgufFile(path) as file:
        spec = read_spec(file)
        plan_tensors(file, spec)
        return spec


def logits_of(path: Path, cache_dir: Path) -> bytes:
    with LocalRunner(path, cache_dir=cache_dir) as runner:
        return runner.prefill(LocalSequence(), TOKENS).tobytes()


def test_blocks_of_nemotron_are_layers_of_two_parts(tmp_path: Path) -> None:
    """Of seven blocks, three are feed-forward parts of the mixers before them."""
    path = written(NEMOTRON, tmp_path)
    spec = spec_of(path)
    kinds = [type(layer.mixer) for layer in spec.layers]
    assert kinds == [Mamba2Spec, Mamba2Spec, AttentionSpec, Mamba2Spec]
    assert [(layer.block, layer.ffn_block) for layer in spec.layers] == [
        (0, 1), (2, -1), (3, 4), (5, 6),
    ]  # fmt: skip
    assert [layer.ffn for layer in spec.layers] == [spec.experts, None, spec.experts, spec.experts]
    experts = spec.experts
    assert isinstance(experts, MoeSpec)
    assert (experts.activation, experts.gating, experts.n_ff_shared, experts.scale) == (
        "relu2", "normed_sigmoid", 96, 2.5,
    )  # fmt: skip
    assert spec.recurrent == Mamba2Spec(2, 6, 80, 96, 4)
    shape = kernels.StateShape.mamba2(spec.n_layer_recurrent, 2, 6, 80, 96, 4)
    assert spec.state_bytes == shape.image_bytes
    assert not any(mixer.has_rope for mixer in spec.attentions)
    assert "layers=4 recurrent=3 " in repr(spec)
    with GgufFile(path) as file:
        ffns = [layer.ffn for layer in plan_tensors(file, spec).layers]
    assert all(ffn is None or (isinstance(ffn, MoeRoles) and ffn.gate is None) for ffn in ffns)


def test_dense_parts_of_nemotron_have_no_gate(tmp_path: Path) -> None:
    path = written("nemotron_h-tiny", tmp_path)
    spec = spec_of(path)
    assert [layer.ffn for layer in spec.layers if layer.ffn] == [DenseSpec(96, "relu2")] * 3
    with GgufFile(path) as file:
        ffn = plan_tensors(file, spec).layers[0].ffn
    assert isinstance(ffn, DenseRoles)
    assert ffn.gate is None
    assert [matrix.name for matrix in ffn.readers] == ["blk.1.ffn_up.weight"]


def test_layers_of_lfm2_without_kv_heads_are_convolutions(tmp_path: Path) -> None:
    spec = spec_of(written(LFM2, tmp_path))
    assert spec.recurrent == ShortConvSpec(96, 3)
    assert spec.state_bytes == kernels.StateShape.short_conv(3, 96, 3).image_bytes
    assert [isinstance(layer.mixer, AttentionSpec) for layer in spec.layers] == [
        False, True, False, False,
    ]  # fmt: skip
    assert [type(layer.ffn) for layer in spec.layers] == [DenseSpec, MoeSpec, MoeSpec, MoeSpec]
    assert spec.attention.has_qk_norm
    assert spec.attention.has_rope


def test_scales_of_granite(tmp_path: Path) -> None:
    spec = spec_of(written(GRANITE, tmp_path))
    scales = spec.embed_scale, spec.residual_scale, spec.logit_scale, spec.attention.scale
    assert scales == (12.0, np.float32(0.22), np.float32(1 / 6), 0.0625)
    without = spec_of(written(replace(PRESETS["granite-tiny"], scales=()), tmp_path))
    scales = without.embed_scale, without.residual_scale, without.logit_scale
    assert scales == (1.0, 1.0, 1.0)
    assert without.attention.scale == pytest.approx(32**-0.5)


def test_what_parts_add_is_scaled_and_added_by_one_operation(
    tmp_path: Path, cache_dir: Path
) -> None:
    """Rule 8, with the shared expert in what the second part adds: h = fma(+0 + y, c, h)."""
    shape = replace(PRESETS["granitemoe-tiny"], n_ff_shared=64)
    n, scale, entries = 5, np.float32(0.22), [(LocalSequence(), TOKENS[:5])]
    with LocalRunner(written(shape, tmp_path), cache_dir=cache_dir) as runner:
        stepper, ops = runner.stepper, runner.stepper.ops
        runner.set_step(entries, ())
        stepper.embed()
        layer, hidden, normed = stepper._layers[0], stepper.hidden, stepper._normed
        layer.mixer.mix(stepper.batch, hidden, normed, None, is_quantised=True)
        own, branch = ops.make_rows(n, 96), ops.make_rows(n, 96)
        ops.take_rows(hidden, np.arange(n, dtype=np.int32), own)
        layer.finish(n, hidden, normed, None)
        ops.zero_rows(n, branch)
        layer.mixer.add_output(n, branch)
        middle = fma(branch.view(n), np.full((n, 96), scale), own.view(n))
        ops.scaled_add(branch, float(scale), n, own)
        assert np.array_equal(own.view(n), middle)
        ops.zero_rows(n, branch)
        assert layer.ffn is not None
        layer.ffn.add(own, n, normed, branch)
        assert np.abs(branch.view(n)).min(1).max() > 0
        assert np.array_equal(hidden.view(n), fma(branch.view(n), np.full((n, 96), scale), middle))


def test_logits_are_scaled(tmp_path: Path, cache_dir: Path) -> None:
    logits = list[np.ndarray[Any, np.dtype[np.float32]]]()
    for scale in (1.0, 8.0, 6.0):
        shape = replace(PRESETS["granite-tiny"], scales=(12.0, 0.22, scale, 0.0625))
        with LocalRunner(written(shape, tmp_path), cache_dir=cache_dir) as runner:
            logits.append(runner.prefill(LocalSequence(), TOKENS).copy())
    assert np.array_equal(logits[1], logits[0] * np.float32(0.125))
    assert np.array_equal(logits[2], logits[0] * (np.float32(1) / np.float32(6)))


@pytest.mark.parametrize("is_rotated", [True, False, None])
def test_a_key_says_whether_heads_of_granite_are_rotated(
    is_rotated: bool | None, tmp_path: Path
) -> None:
    def edit(values: dict[str, Any], _: object) -> None:
        name = "granitehybrid.rope.scaling.finetuned"
        values[name] = is_rotated, [T.BOOL]
        if is_rotated is None:
            del values[name]

    spec = spec_of(edited(written(GRANITE, tmp_path), edit))
    assert [mixer.has_rope for mixer in spec.attentions] == [is_rotated is not False]


def test_the_norm_of_the_head_has_two_names(tmp_path: Path, cache_dir: Path) -> None:
    path = written(LFM2, tmp_path)

    def rename(_: object, tensors: dict[str, Any]) -> None:
        tensors["output_norm.weight"] = tensors.pop("token_embd_norm.weight")

    assert logits_of(edited(path, rename), cache_dir) == logits_of(path, cache_dir)


def test_nemotron_may_have_the_other_key_of_eps(tmp_path: Path) -> None:
    def edit(values: dict[str, Any], _: object) -> None:
        del values["nemotron_h_moe.attention.layer_norm_rms_epsilon"]
        values["nemotron_h_moe.attention.layer_norm_epsilon"] = 1e-5, [T.FLOAT32]

    assert spec_of(edited(written(NEMOTRON, tmp_path), edit)).eps == pytest.approx(1e-5)


def test_the_width_of_experts_may_be_that_of_all_that_a_token_uses(tmp_path: Path) -> None:
    """In files of Nemotron without a key for experts."""

    def edit(values: dict[str, Any], _: object) -> None:
        del values["nemotron_h_moe.expert_feed_forward_length"]
        widths = [0, 192, 0, 0, 192, 0, 192]
        values["nemotron_h_moe.feed_forward_length"] = widths, [T.ARRAY, T.INT32]

    path = written(NEMOTRON, tmp_path)
    assert spec_of(edited(path, edit)).experts == spec_of(path).experts


def test_dimensions_of_one_may_be_left_out(tmp_path: Path, cache_dir: Path) -> None:
    """As in files of llama-quantize: the norm of one group is a vector there."""
    path = written(replace(PRESETS[GRANITE], n_k_head=1), tmp_path)

    def flatten(_: object, tensors: dict[str, Any]) -> None:
        for name, (data, kind) in tensors.items():
            if name.endswith("ssm_norm.weight"):
                assert data.shape == (1, 192)
                tensors[name] = data[0], kind

    assert logits_of(edited(path, flatten), cache_dir) == logits_of(path, cache_dir)


def test_blocks_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    """The last block of a file of Nemotron has attention and experts, which no key tells apart."""

    def edit(values: dict[str, Any], tensors: dict[str, Any]) -> None:
        prefix = "nemotron_h_moe."
        values[prefix + "block_count"] = 8, [T.UINT32]
        values[prefix + "nextn_predict_layers"] = 1, [T.UINT32]
        for key, count in (("attention.head_count_kv", 2), ("feed_forward_length", 64)):
            counts, types = values[prefix + key]
            values[prefix + key] = [*counts, count], types
        tensors["blk.7.attn_q.weight"] = np.ones((128, 96), np.float32), F32
        tensors["blk.7.nextn.eh_proj.weight"] = np.ones((96, 192), np.float32), F32

    path = written(NEMOTRON, tmp_path)
    assert spec_of(edited(path, edit)).layers == spec_of(path).layers


U32, COUNTS = [T.UINT32], [T.ARRAY, T.INT32]
# The model, its key, a value, and words of the error.
KEYS: tuple[tuple[str, str, Any, list[Any], str, str], ...] = (
    (NEMOTRON, "ssm.group_count", 4, U32, "BE1323", "no multiple of 4 groups"),
    (NEMOTRON, "ssm.inner_size", 478, U32, "BE1323", "6 heads of a multiple of 16"),
    (NEMOTRON, "ssm.inner_size", 6 * 272, U32, "BE1323", "up to 256"),
    (NEMOTRON, "ssm.inner_size", 3, U32, "BE1323", "6 heads"),
    (NEMOTRON, "ssm.time_step_rank", 0, U32, "BE1322", "out of range"),
    (NEMOTRON, "ssm.state_size", 80, U32, "BE1323", "a multiple of 32"),
    (NEMOTRON, "ssm.state_size", 512, U32, "BE1323", "up to 256"),
    (NEMOTRON, "ssm.conv_kernel", 1, U32, "BE1323", "2 to 4"),
    (NEMOTRON, "attention.head_count_kv", [0] * 7, COUNTS, "BE1323", "some must have attention"),
    (NEMOTRON, "attention.head_count_kv", [2] * 7, COUNTS, "BE1323", "some layers must be"),
    (NEMOTRON, "attention.head_count_kv", [0, 0, 2], COUNTS, "BE1322", "3 numbers for 7 layers"),
    (NEMOTRON, "attention.head_count_kv", [0, 0, 0, 3, 0, 0, 0], COUNTS, "BE1323", "divide"),
    (NEMOTRON, "attention.head_count_kv", [0, 0, 0, -2, 0, 0, 0], COUNTS, "BE1322", "range"),
    (NEMOTRON, "attention.head_count_kv", [0, 2, 0, 0, 0, 0, 0], COUNTS, "BE1323", "attention"),
    (NEMOTRON, "feed_forward_length", [64, 0, 0, 0, 0, 0, 0], COUNTS, "BE1323", "block 0"),
    (NEMOTRON, "feed_forward_length", [0, 64, 64, 0, 0, 0, 0], COUNTS, "BE1323", "block 2"),
    (NEMOTRON, "feed_forward_length", [0, 48, 0, 0, 0, 0, 0], COUNTS, "BE1323", "of 32"),
    (NEMOTRON, "moe_latent_size", -32, [T.INT32], "BE1323", "of 32"),
    (NEMOTRON, "moe_latent_size", 40, U32, "BE1323", "of 32"),
    (LFM2, "moe_latent_size", 32, U32, "BE1323", "are not supported here"),
    (GRANITE, "residual_scale", 1e9, [T.FLOAT32], "BE1322", "outside"),
    (GRANITE, "logit_scale", -1.0, [T.FLOAT32], "BE1322", "outside"),
    (GRANITE, "embedding_scale", float("nan"), [T.FLOAT32], "BE1322", "finite"),
    (GRANITE, "rope.scaling.finetuned", 3, U32, "BE1322", "true or false"),
    (LFM2, "shortconv.l_cache", 5, U32, "BE1323", "2 to 4"),
    (LFM2, "attention.sliding_window", 64, U32, "BE1323", "windows are not supported"),
    (LFM2, "leading_dense_block_count", 4, U32, "BE1322", "some of the 4 layers"),
)


# Where an error names another key than the one that is changed.
OTHER_KEYS = {
    "no multiple of 4 groups": "ssm.time_step_rank",
    "some must have attention": "",
    "attention": "feed_forward_length",
}


@pytest.mark.parametrize(("preset", "key", "value", "types", "code", "words"), KEYS)
def test_wrong_keys_are_refused_by_name(
    preset: str, key: str, value: Any, types: list[Any], code: str, words: str, tmp_path: Path
) -> None:
    name = f"{PRESETS[preset].arch}.{key}"
    path = written(preset, tmp_path)
    changed = edited(path, lambda values, _: values.__setitem__(name, (value, types)))
    with GgufFile(changed) as file, pytest.raises(BatchEngineError) as error:
        read_spec(file)
    assert error.value.code == code
    assert words in str(error.value)
    assert f"{PRESETS[preset].arch}.{OTHER_KEYS.get(words, key)}" in str(error.value)


def ones(*dims: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.ones(dims, np.float32)


# The model, words of the error, and the edit of its tensors.
Edit = Callable[[dict[str, Any]], Any]
TENSORS: dict[str, tuple[str, str, tuple[str, ...], Edit]] = {
    "no_inputs": (
        NEMOTRON, "BE1324", ("blk.0.ssm_in.weight",), lambda t: t.pop("blk.0.ssm_in.weight"),
    ),
    "other_inputs": (
        NEMOTRON, "BE1325", ("blk.2.ssm_in.weight", "[96, 1350]"),
        lambda t: t.update({"blk.2.ssm_in.weight": (ones(1349, 96), F32)}),
    ),
    "groups_of_another_width": (
        NEMOTRON, "BE1325", ("blk.5.ssm_norm.weight", "[240, 2]"),
        lambda t: t.update({"blk.5.ssm_norm.weight": (ones(480), F32)}),
    ),
    "no_direct_part": (NEMOTRON, "BE1324", ("blk.0.ssm_d",), lambda t: t.pop("blk.0.ssm_d")),
    "growing_state": (
        GRANITE, "BE1327", ("blk.1.ssm_a", "would grow"),
        lambda t: t.update({"blk.1.ssm_a": (ones(4, 1), F32)}),
    ),
    "infinite_bias_of_a_convolution": (
        GRANITE, "BE1327", ("blk.3.ssm_conv1d.bias", "not finite"),
        lambda t: t["blk.3.ssm_conv1d.bias"][0].__setitem__(5, np.inf),
    ),
    "a_gate_of_experts_without_one": (
        NEMOTRON, "BE1328", ("blk.1.ffn_gate_exps.weight", "no role"),
        lambda t: t.update({"blk.1.ffn_gate_exps.weight": (ones(10, 64, 96), F32)}),
    ),
    "a_mixer_in_a_feed_forward_block": (
        NEMOTRON, "BE1328", ("blk.4.attn_q.weight", "no role"),
        lambda t: t.update({"blk.4.attn_q.weight": (ones(128, 96), F32)}),
    ),
    "another_convolution": (
        LFM2, "BE1325", ("blk.0.shortconv.conv.weight", "[3, 96]"),
        lambda t: t.update({"blk.0.shortconv.conv.weight": (ones(96, 4), F32)}),
    ),
    "no_norm_of_the_head": (
        LFM2, "BE1324", ("token_embd_norm.weight",), lambda t: t.pop("token_embd_norm.weight"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_wrong_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    preset, code, words, edit = TENSORS[name]
    changed = edited(written(preset, tmp_path), lambda _, tensors: edit(tensors))
    with GgufFile(changed) as file, pytest.raises(BatchEngineError) as error:
        open_weights(file, kernels.Pool(1), cache_dir=tmp_path)
    assert error.value.code == code
    for word in words:
        assert word in str(error.value)
