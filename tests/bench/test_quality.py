"""The reference of `bench quality` agrees with llama.cpp on floats; its models are as stated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from bench.models.float_model import (
    FloatModel,
    half_scales,
    ratio_scales,
    short_scales,
)
from bench.models.llama import LlamaContext, LlamaModel
from bench.models.synthetic import Shape, random_tensors, write_synthetic
from bench.quality import Divergence, Outliers, drawn_weights, plant
from pocket.evaluate import SHIPPED
from pocket.export import quantise_q4_0

SHAPES = {
    "qwen3": Shape(rope_base=1e6),
    "llama": Shape(arch="llama", tied=False),
    "qwen2": Shape(arch="qwen2", bias=0.3, k_bias=0.3),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_is_the_model(name: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(SHAPES[name], base="f32"))
    tokens = np.random.default_rng(5).integers(3, 320, 100).tolist()
    with LlamaModel(path) as model, LlamaContext(model, kv_type="f32", threads=1) as context:
        theirs = context.all_logits(tokens)
    divergence = Divergence()
    divergence.add(FloatModel.from_file(path).logits(tokens), theirs)
    assert 0 <= divergence.mean < 1e-9
    assert divergence.percent == 100.0


def test_drawn_weights_quantise_to_the_file() -> None:
    drawn = drawn_weights(SHIPPED)
    stored = {str(t.name): t for t in gguf.GGUFReader(SHIPPED).tensors}
    exact = FloatModel.from_file(SHIPPED).weights
    assert len(drawn) == sum(len(t.shape) == 2 for t in stored.values())
    for name, weights in drawn.items():
        ours = quantise_q4_0(weights.astype(np.float32)).reshape(-1)
        assert np.array_equal(ours, stored[name].data.reshape(-1)), name
        assert np.abs(weights - exact[name]).max() > 0


def test_planted_outliers_leave_the_function(tmp_path: Path) -> None:
    shape = replace(SHAPES["qwen3"], base="f32")
    path = tmp_path / "m.gguf"
    write_synthetic(path, shape)
    plain = FloatModel.from_file(path)
    tensors = random_tensors(shape)
    plant(tensors, shape, Outliers(50.0, 1 / 50.0, 20.0))
    planted = plain.with_weights({k: v.astype(np.float64) for k, (v, _) in tensors.items()})
    tokens = list(range(3, 60))
    assert np.allclose(plain.logits(tokens), planted.logits(tokens), atol=1e-3)
    largest = np.abs(planted.weights["blk.0.attn_norm.weight"]).max()
    assert largest > 20 * np.abs(plain.weights["blk.0.attn_norm.weight"]).max()


def test_the_roundings() -> None:
    x = np.random.default_rng(1).normal(size=(3, 64)) * [[1.0], [0.0], [1e-3]]
    for rounded in (ratio_scales(x), short_scales(x, 1), short_scales(x, 3), half_scales(x, 32)):
        error = np.abs(rounded - x).reshape(-1, 32).max(1)
        largest = np.abs(x).reshape(-1, 32).max(1)
        assert (error <= largest / 127 * 1.01).all()
        assert (error > 0).sum() == 4  # all groups but the zeros
    values = np.arange(1, 33) * 4.0  # 128 / 127.5 = 1.004: above it are 1.25 and 2
    assert set(values - short_scales(values, 3)) == {-0.5, -0.25, 0.0, 0.25, 0.5}
    assert set(values - short_scales(values, 1)) == {0.0}
