"""Files of Gemma 4: what their keys and tensors say, and those that are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import (
    ModelSpec,
    PairedSpec,
    open_weights,
    plan_tensors,
    read_spec,
)
from batchengine.weights.roles import PairedRoles
from batchengine.weights.tensors import TensorPlan
from bench.models.local_runner import LocalRunner, LocalSequence
from bench.models.synthetic import PRESETS, Shape, write_synthetic
from kernels import Pool
from kv_store.layout import KvHeads
from tests.hostile.rewrite import edited

TINY = PRESETS["gemma4-tiny"]
DENSE = replace(TINY, n_expert=0, n_used=0, n_embd_layer=0, n_shared=0)
U32 = [gguf.GGUFValueType.UINT32]
F32 = [gguf.GGUFValueType.FLOAT32]
FLOATS = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32]
COUNTS = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]


def read(path: Path) -> tuple[ModelSpec, TensorPlan]:
    with GgufFile(path) as file:
        spec = read_spec(file)
        return spec, plan_tensors(file, spec)


def written(path: Path, shape: Shape) -> Path:
    write_synthetic(path, shape)
    return path


def heads_of(spec: ModelSpec) -> list[tuple[int, int, int, int]]:
    """KV heads, head_dim, window and kv_from of each layer."""
    return [(of.n_kv_head, of.head_dim, of.window, of.kv_from) for of in spec.attentions]


def test_layers_have_heads_windows_and_kv_of_their_own(tmp_path: Path) -> None:
    """Of eight layers each third one sees all positions; the last two read the KV of others."""
    spec, plan = read(written(tmp_path / "m.gguf", TINY))
    windowed, whole = (2, 32, 40, -1), (1, 64, 0, -1)
    owned = [windowed, windowed, whole] * 2
    assert heads_of(spec) == [*owned, (2, 32, 40, 4), (2, 32, 40, 4)]
    assert spec.page_layout.layers == tuple(KvHeads(*heads[:2]) for heads in owned)
    assert (spec.n_layer_kv, spec.n_layer_whole, spec.is_whole) == (6, 2, True)
    assert spec.whole_query_dims == 2 * 4 * 64
    ropes = {
        (of.window > 0, of.rope.base, of.rope.n_rot, of.rope.has_factors) for of in spec.attentions
    }
    assert ropes == {(True, 10000.0, 32, False), (False, 1e6, 64, True)}
    assert {(of.scale, of.has_v_norm, of.has_qk_norm) for of in spec.attentions} == {
        (1.0, True, True)
    }
    assert (spec.logit_cap, spec.n_embd_layer, spec.embed_scale) == (30.0, 32, np.float32(128**0.5))
    assert plan.rope_factors is not None
    assert plan.rope_factors.size == 32
    for index, layer in enumerate(plan.layers):
        matrices = [matrix.name.split(".")[2] for matrix in layer.mixer.readers]
        expected = ["attn_q"] if index >= 6 else ["attn_q", "attn_k", "attn_v"]
        assert matrices == (["attn_q", "attn_k", "attn_k"] if index in (2, 5) else expected)
        assert layer.scale is not None
        assert isinstance(layer.ffn, PairedRoles)
        assert layer.ffn.experts.scales is not None


def test_matrices_that_are_used_twice_are_packed_once(tmp_path: Path, cache_dir: Path) -> None:
    path = written(tmp_path / "m.gguf", TINY)
    with GgufFile(path) as file:
        weights = open_weights(file, Pool(1), cache_dir=cache_dir)
    _, k, v = weights.layer[2].mixer.readers
    assert k is v
    names = [matrix.name for matrix in read(path)[1].matrices]
    assert len(names) == len(set(names))
    ffn = weights.layer[0].ffn
    assert isinstance(ffn, PairedRoles)
    selector_norm = ffn.experts.selector_norm
    assert selector_norm is not None
    tensors = {t.name: t.data for t in gguf.GGUFReader(path).tensors}
    scale = tensors["blk.0.ffn_gate_inp.scale"] * np.float32(128**-0.5)
    assert np.array_equal(selector_norm.view(), scale)


@pytest.mark.parametrize("shape", [DENSE, replace(DENSE, logit_cap=0.0, layer_scale=False)])
def test_a_dense_model_has_less(tmp_path: Path, shape: Shape) -> None:
    spec, plan = read(written(tmp_path / "m.gguf", shape))
    assert not spec.is_whole
    assert spec.experts is None
    assert spec.logit_cap == shape.logit_cap
    assert plan.layer_embeddings is None
    assert {layer.scale is not None for layer in plan.layers} == {shape.layer_scale}


def test_feed_forward_parts_may_have_a_width_each(tmp_path: Path) -> None:
    """As those of E2B, which are twice as wide in the layers that read the KV of others."""
    path = written(tmp_path / "m.gguf", replace(TINY, n_expert=0, n_used=0))

    def widen(values: dict[str, Any], tensors: dict[str, Any]) -> None:
        values["gemma4.feed_forward_length"] = ([96] * 7 + [64], COUNTS)
        for role in ("gate", "up", "down"):
            data, kind = tensors[f"blk.7.ffn_{role}.weight"]
            data = data[:, : data.shape[1] * 2 // 3] if role == "down" else data[:64]
            tensors[f"blk.7.ffn_{role}.weight"] = np.ascontiguousarray(data), kind

    changed = edited(path, widen)
    assert [layer.ffn.n_ff for layer in read(changed)[0].layers] == [96] * 7 + [64]
    with LocalRunner(changed, cache_dir=tmp_path, n_pages=2) as runner:
        assert np.isfinite(runner.prefill(LocalSequence(), [1, 2, 3], 3)).all()


def test_experts_beside_a_dense_part(tmp_path: Path) -> None:
    spec, _ = read(written(tmp_path / "m.gguf", TINY))
    ffn = spec.layers[0].ffn
    assert isinstance(ffn, PairedSpec)
    assert (ffn.n_ff, ffn.experts.n_ff, ffn.experts.n_expert, ffn.experts.n_used) == (96, 64, 10, 3)
    assert spec.experts == ffn.experts


# name: key, value, its type, code and words of the error
REFUSED: dict[str, tuple[str, Any, list[Any], str, str]] = {
    "all layers share": ("attention.shared_kv_layers", 8, U32, "BE1322", "must share"),
    "one owns": ("attention.shared_kv_layers", 7, U32, "BE1322", "must share"),
    "source of another kind": (
        "attention.shared_kv_layers", 3, U32, "BE1323", "layer 4 has other heads",
    ),
    "heads that do not divide": (
        "attention.head_count_kv", [3] * 8, COUNTS, "BE1323", "does not divide 4 heads",
    ),
    "too few counts": ("attention.head_count_kv", [1] * 7, COUNTS, "BE1322", "7 numbers"),
    "no counts": ("attention.head_count_kv", [1.0] * 8, FLOATS, "BE1322", "array of integers"),
    "a count of zero": ("attention.head_count_kv", [2] * 7 + [0], COUNTS, "BE1322", "range"),
    "odd heads": ("attention.key_length_swa", 48, U32, "BE1323", "multiple of 32"),
    "wide heads": ("attention.key_length", 608, U32, "BE1323", "576 at most"),
    "other values": ("attention.value_length_swa", 64, U32, "BE1323", "key_length is 32"),
    "a part rotates": ("rope.dimension_count", 32, U32, "BE1323", "head_dim is 64"),
    "odd embeddings": ("embedding_length_per_layer_input", 33, U32, "BE1323", "multiple of 32"),
    "a bound below zero": ("final_logit_softcapping", -1.0, F32, "BE1322", "outside"),
    "a bound in attention": ("attn_logit_softcapping", 50.0, F32, "BE1323", "soft bound"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_are_refused(tmp_path: Path, name: str) -> None:
    key, value, types, code, words = REFUSED[name]
    path = written(tmp_path / "m.gguf", TINY)
    changed = edited(path, lambda values, _: values.__setitem__(f"gemma4.{key}", (value, types)))
    with pytest.raises(BatchEngineError) as error:
        read(changed)
    assert error.value.code == code
    assert f"gemma4.{key}" in str(error.value)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "name",
    [
        "rope_freqs.weight", "per_layer_token_embd.weight", "per_layer_proj_norm.weight",
        "blk.0.attn_k.weight", "blk.0.inp_gate.weight", "blk.3.ffn_gate_inp.scale",
        "blk.1.post_ffw_norm_1.weight", "blk.7.post_norm.weight",
    ],
)  # fmt: skip
def test_tensors_that_must_be_there(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "m.gguf", TINY)
    changed = edited(path, lambda _, tensors: tensors.pop(name))
    with pytest.raises(BatchEngineError) as error:
        read(changed)
    assert error.value.code == "BE1324"
    assert name in str(error.value)


def test_tokens_that_the_file_suppresses_are_in_no_answer(tmp_path: Path) -> None:
    """Of a greedy answer the others are chosen then."""
    path = written(tmp_path / "m.gguf", TINY)
    with LocalRunner(path, cache_dir=tmp_path, n_pages=2) as runner:
        first = runner.generate([[1, 2, 3]], 12)[0]
    key, tokens = "tokenizer.ggml.suppress_tokens", sorted({*first})
    changed = edited(path, lambda values, _: values.__setitem__(key, (tokens, COUNTS)))
    assert read(changed)[0].suppressed == tuple(tokens)
    with LocalRunner(changed, cache_dir=tmp_path, n_pages=2) as runner:
        assert not {*runner.generate([[1, 2, 3]], 12)[0]} & {*tokens}
    for wrong, words in (([320], "of the vocabulary"), ([-1], "of the vocabulary")):
        bad = edited(path, lambda values, _, wrong=wrong: values.__setitem__(key, (wrong, COUNTS)))
        with pytest.raises(BatchEngineError, match=words):
            read(bad)


def test_matrices_that_no_layer_reads_are_left_out(tmp_path: Path) -> None:
    """Checkpoints may have those of K and V in layers that read the KV of others, too."""
    path = written(tmp_path / "m.gguf", TINY)
    names = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")

    def add(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        for layer in (6, 7):
            for name in names:
                tensors[f"blk.{layer}.{name}"] = tensors[f"blk.0.{name}"]

    with LocalRunner(path, cache_dir=tmp_path, n_pages=2) as runner:
        want = runner.generate([[1, 2, 3]], 8)[0]
    changed = edited(path, add)
    assert not {
        name for name in names for m in read(changed)[1].matrices if m.name == f"blk.7.{name}"
    }
    with LocalRunner(changed, cache_dir=tmp_path, n_pages=2) as runner:
        assert runner.generate([[1, 2, 3]], 8)[0] == want

    def widen(_: dict[str, Any], tensors: dict[str, Any]) -> None:
        tensors["blk.7.attn_k.weight"] = tensors["blk.2.attn_q.weight"]

    with pytest.raises(BatchEngineError, match=r"blk\.7\.attn_k\.weight"):
        read(edited(path, widen))
