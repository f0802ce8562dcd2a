"""Files with multi-head latent attention: what their keys and tensors mean, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import MlaRoles, MlaSpec, ModelSpec, MoeSpec, plan_tensors
from bench.models.shapes import PRESETS
from bench.models.synthetic_mla import LOG_MULTIPLIER
from tests.model.test_expert_files import BOOL, F32, U32, Edit, drop, put, read, written

SHAPE = replace(PRESETS["deepseek2-tiny"], n_vocab=288)
FLASH = replace(
    PRESETS["glm47-flash"], n_layer=2, n_embd=64, n_ff=32, n_expert=4, n_used=2, n_vocab=288
)
DENSE = replace(SHAPE, n_expert=0, n_used=0, n_ff_shared=0, n_dense=0)


def mla_of(spec: ModelSpec) -> MlaSpec:
    assert spec.attention.mla is not None
    return spec.attention.mla


def test_a_file_of_deepseek2_has_latent_rows_and_experts(tmp_path: Path) -> None:
    spec = read(written(SHAPE, tmp_path))
    attention = spec.attention
    assert mla_of(spec) == MlaSpec(q_rank=64, kv_rank=128, nope_dim=64, value_dim=32)
    assert (attention.n_head, attention.n_kv_head, attention.head_dim) == (3, 1, 160)
    assert (attention.rope.style, attention.rope.n_rot) == ("norm", 32)
    assert spec.experts == MoeSpec(
        10, 3, 64, float(np.float32(1.8)), n_ff_shared=64, gating="normed_sigmoid"
    )
    assert [layer.ffn is spec.experts for layer in spec.layers] == [False, True, True, True]
    assert spec.page_layout.layers == ((1, 160, 32),) * 4
    assert not spec.is_whole


def test_the_parts_of_tensors_are_those_of_their_rows(tmp_path: Path) -> None:
    path = written(SHAPE, tmp_path)
    with GgufFile(path) as file:
        spec = read(path)
        mixer = plan_tensors(file, spec).layers[0].mixer
    assert isinstance(mixer, MlaRoles)
    nope, rotated = mixer.queries
    assert (nope.rows, rotated.rows, nope.cols) == (3 * 64, 3 * 32, 64)
    assert nope.part is not None
    assert rotated.part is not None
    assert (tuple(nope.part), tuple(rotated.part)) == ((0, 64, 96), (64, 32, 96))
    k_rotated, latent = mixer.kv
    assert (k_rotated.rows, latent.rows) == (32, 128)
    assert k_rotated.part is not None
    assert tuple(k_rotated.part) == (128, 32, 160)
    assert (mixer.key_bank.rows, mixer.key_bank.cols) == (3 * 128, 64)
    assert (mixer.value_bank.rows, mixer.value_bank.cols) == (3 * 32, 128)
    assert mixer.readers[0] is mixer.q_down


def test_queries_may_be_made_of_the_row_itself(tmp_path: Path) -> None:
    path = written(replace(SHAPE, q_rank=0), tmp_path)
    spec = read(path)
    assert mla_of(spec).q_rank == 0
    with GgufFile(path) as file:
        mixer = plan_tensors(file, spec).layers[0].mixer
    assert isinstance(mixer, MlaRoles)
    assert mixer.q_down is None
    assert mixer.readers == [*mixer.queries, *mixer.kv]


def test_pages_of_glm_4_7_flash_have_the_widest_heads(tmp_path: Path) -> None:
    spec = read(written(FLASH, tmp_path))
    assert spec.attention.head_dim == 576
    assert spec.attention.scale == 1 / 16
    assert spec.page_layout.payload_bytes == 256 * 2 * (576 + 4 + 2)


def test_yarn_scales_scores_and_not_positions(tmp_path: Path) -> None:
    """With a multiplier cos and sin have no factor; without, they have that of YaRN, and so have
    scores."""
    plain = read(written(replace(SHAPE, yarn_factor=0.0), tmp_path)).attention
    assert plain.scale == pytest.approx(1 / math.sqrt(96), rel=1e-12)
    with_log = read(written(SHAPE, tmp_path)).attention
    grown = 1 + float(np.float32(LOG_MULTIPLIER)) * math.log(4)
    assert with_log.rope.attn_factor == 1.0
    assert with_log.scale == pytest.approx(grown**2 / math.sqrt(96), rel=1e-12)
    key = "deepseek2.rope.scaling.yarn_log_multiplier"
    without = read(written(SHAPE, tmp_path, drop(key))).attention
    factor = 1 + math.log(4) / 10
    assert without.rope.attn_factor == pytest.approx(factor, rel=1e-12)
    assert without.scale == pytest.approx(factor**2 / math.sqrt(96), rel=1e-12)


def test_mistral_4_has_another_factor_of_positions(tmp_path: Path) -> None:
    """Cos and sin grow with the factor less than they do without a multiplier."""
    attention = read(written(replace(SHAPE, arch="mistral4"), tmp_path)).attention
    ten = 10 * float(np.float32(LOG_MULTIPLIER))
    factor = (1 + math.log(4) / 10) / (1 + ten * math.log(4) / 10)
    assert attention.rope.attn_factor == pytest.approx(factor, rel=1e-12)
    grown = factor * (1 + ten / 10 * math.log(4))
    assert attention.scale == pytest.approx(grown**2 / math.sqrt(96), rel=1e-12)


@pytest.mark.parametrize(
    ("edits", "gating"),
    [
        ([], "normed_sigmoid"),
        ([drop("deepseek2.expert_weights_norm")], "sigmoid"),
        ([put("deepseek2.expert_gating_func", 1)], "softmax"),
        (
            [put("deepseek2.expert_gating_func", 1), drop("deepseek2.expert_weights_norm")],
            "softmax_all",
        ),
        ([drop("deepseek2.expert_gating_func", "deepseek2.expert_weights_norm")], "softmax_all"),
        (
            [
                drop("deepseek2.expert_gating_func", "deepseek2.expert_weights_norm"),
                put("deepseek2.vocab_size", 154880),
            ],
            "softmax_all",  # GLM-4.7-Flash has other layers
        ),
    ],
)
def test_the_gating_is_that_of_the_keys(edits: list[Edit], gating: str, tmp_path: Path) -> None:
    experts = read(written(replace(SHAPE, choice_bias=0.0), tmp_path, *edits)).experts
    assert experts is not None
    assert experts.gating == gating


@pytest.mark.parametrize(("n_layer", "n_mtp"), [(47, 0), (47, 1), (48, 0)])
def test_older_files_of_glm_4_7_flash_are_known_by_their_sizes(
    n_layer: int, n_mtp: int, tmp_path: Path
) -> None:
    shape = replace(SHAPE, n_layer=n_layer, n_mtp=n_mtp, n_embd=32, n_ff=32, n_ff_shared=32)
    edits = [drop("deepseek2.expert_gating_func"), put("deepseek2.vocab_size", 154880)]
    experts = read(written(shape, tmp_path, *edits)).experts
    assert experts is not None
    assert experts.gating == "normed_sigmoid"


def test_experts_may_be_in_groups(tmp_path: Path) -> None:
    shape = replace(SHAPE, n_expert=12, n_group=4, n_group_used=2)
    experts = read(written(shape, tmp_path)).experts
    assert experts is not None
    assert (experts.n_group, experts.n_group_used) == (4, 2)


def test_a_model_may_have_no_experts(tmp_path: Path) -> None:
    path = written(DENSE, tmp_path)
    assert read(path).experts is None


KEY, GROUPS = "deepseek2.", "deepseek2.expert_group_count"
REFUSED: dict[str, tuple[list[Edit], str, str]] = {
    "joined K and V": (
        [drop(KEY + "attention.key_length_mla", KEY + "attention.value_length_mla")],
        "BE1323",
        "attn_kv_b",
    ),
    "a bias of a softmax over all": (
        [put(KEY + "expert_gating_func", 1), drop(KEY + "expert_weights_norm")],
        "BE1323",
        "bias on the choice",
    ),
    "many heads": ([put(KEY + "attention.head_count", 1040)], "BE1323", "1,024 heads at most"),
    "an older linear factor": (
        [
            drop(KEY + "rope.scaling.type", KEY + "rope.scaling.factor"),
            put(KEY + "rope.scale_linear", 4.0, F32),
        ],
        "BE1323",
        "scale_linear",
    ),
    "no rank": ([drop(KEY + "attention.kv_lora_rank")], "BE1321", "kv_lora_rank"),
    "an odd rank": ([put(KEY + "attention.kv_lora_rank", 100)], "BE1323", "multiple of 32"),
    "a wide rank": ([put(KEY + "attention.kv_lora_rank", 576)], "BE1323", "608, 576 at most"),
    "no rank of queries": ([drop(KEY + "attention.q_lora_rank")], "BE1321", "q_lora_rank"),
    "all rotated": ([put(KEY + "attention.key_length_mla", 32)], "BE1323", "some others"),
    "several KV heads": ([put(KEY + "attention.head_count_kv", 3)], "BE1323", "must be 1"),
    "other keys": ([put(KEY + "attention.key_length", 128)], "BE1323", "must be 160"),
    "other values": ([put(KEY + "attention.value_length", 160)], "BE1323", "must be 128"),
    "a linear factor": (
        [drop(KEY + "rope.scaling.type"), put(KEY + "rope.scaling.factor", 4.0, F32)],
        "BE1323",
        "only yarn",
    ),
    "a temperature without a length": (
        [put(KEY + "attention.temperature_scale", 0.1, F32)],
        "BE1321",
        "temperature_length",
    ),
    "another gating": ([put(KEY + "expert_gating_func", 3)], "BE1323", "sigmoid (2) or a softmax"),
    "a bias of softmaxes": ([put(KEY + "expert_gating_func", 1)], "BE1323", "bias on the choice"),
    "unequal groups": ([put(GROUPS, 3)], "BE1322", "equal groups"),
    "groups of one": ([put(GROUPS, 10)], "BE1322", "two at least"),
    "no groups kept": ([put(GROUPS, 5)], "BE1322", "as many as have 3 experts"),
    "groups of softmaxes": (
        [put(GROUPS, 5), put(KEY + "expert_gating_func", 1)],
        "BE1323",
        "chosen by sigmoids",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_refused_by_key(name: str, tmp_path: Path) -> None:
    edits, code, said = REFUSED[name]
    path = written(SHAPE, tmp_path, *edits)
    with pytest.raises(BatchEngineError) as refused, GgufFile(path) as file:
        plan_tensors(file, read(path))
    assert refused.value.code == code
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "name", ["attn_q_a", "attn_q_a_norm", "attn_q_b", "attn_kv_a_mqa", "attn_k_b", "attn_v_b"]
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = written(SHAPE, tmp_path, drop(f"blk.2.{name}.weight"))
    with pytest.raises(BatchEngineError, match=rf"blk\.2\.{name}"), GgufFile(path) as file:
        plan_tensors(file, read(path))


def test_a_bank_of_another_shape_is_named(tmp_path: Path) -> None:
    def edit(_: Any, tensors: dict[str, Any]) -> None:
        data, kind = tensors["blk.1.attn_k_b.weight"]
        tensors["blk.1.attn_k_b.weight"] = (data[:2], kind)

    path = written(SHAPE, tmp_path, edit)
    with pytest.raises(BatchEngineError, match=r"blk\.1\.attn_k_b"), GgufFile(path) as file:
        plan_tensors(file, read(path))


def test_flags_of_experts_are_flags(tmp_path: Path) -> None:
    path = written(SHAPE, tmp_path, put(KEY + "expert_weights_norm", 1, U32))
    with pytest.raises(BatchEngineError, match="true or false"):
        read(path)
    assert read(written(SHAPE, tmp_path, put(KEY + "expert_weights_norm", value=True, types=BOOL)))
