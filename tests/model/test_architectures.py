"""What the name of an architecture says of a model, as the spec has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchengine.gguf import GgufFile
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.spec import ModelSpec, read_spec
from batchengine.weights.tensors import plan_tensors
from bench.models.synthetic import Shape, write_synthetic

TINY = Shape(n_layer=5, n_embd=64, n_ff=96, n_head=2, n_kv_head=1, head_dim=32, n_vocab=288)


def spec_of(path: Path, shape: Shape) -> ModelSpec:
    write_synthetic(path, shape)
    with GgufFile(path) as file:
        spec = read_spec(file)
        plan_tensors(file, spec)
        return spec


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_is_read(arch: str, tmp_path: Path) -> None:
    row = ARCHITECTURES[arch]
    mixture = {"n_expert": 4, "n_used": 2} if row.experts == "all" else {}
    window = 40 if row.window_every else 0
    shape = replace(TINY, arch=arch, window=window, **mixture)
    spec = spec_of(tmp_path / "m.gguf", shape)
    assert spec.arch == arch
    assert (spec.experts is not None) == (row.experts == "all")
    assert spec.attention.has_qk_norm == row.has_qk_norm
    assert spec.attention.rope.style == row.pairs
    without = [i for i, layer in enumerate(spec.layers) if not layer.mixer.has_rope]
    assert without == ([3] if arch == "smollm3" else [])
    windows = [layer.mixer.window for layer in spec.layers]
    expected = {"gpt-oss": [40, 0, 40, 0, 40], "gemma3": [40] * 5}
    assert windows == expected.get(arch, [0] * 5)
    assert spec.attention.has_sinks == (arch == "gpt-oss")
    assert (spec.embed_scale == 8.0) == (arch == "gemma3")
    assert spec.attention.has_post_norm == (arch == "gemma3")


def test_layers_with_a_window_may_have_another_rope(tmp_path: Path) -> None:
    """Of seven layers of gemma3 the sixth sees all positions, which are scaled."""
    shape = replace(TINY, arch="gemma3", n_layer=7, window=40, rope_base=1e6, linear_factor=8.0)
    spec = spec_of(tmp_path / "m.gguf", shape)
    assert [layer.mixer.window for layer in spec.layers] == [40, 40, 40, 40, 40, 0, 40]
    ropes = [(layer.mixer.rope.base, layer.mixer.rope.position_scale) for layer in spec.layers]
    assert ropes == [(10000.0, 1.0)] * 5 + [(1e6, 0.125), (10000.0, 1.0)]
    assert spec.n_layer_whole == 1


def test_queries_are_scaled_by_the_first_context(tmp_path: Path) -> None:
    shape = replace(TINY, arch="mistral3", yarn_factor=16.0, yarn_trained=512, temperature=0.1)
    spec = spec_of(tmp_path / "m.gguf", shape)
    rope = spec.attention.rope
    assert (rope.query_log, rope.query_span) == (pytest.approx(0.1), 512)
    assert spec.context_trained == shape.context
    others = replace(shape, arch="llama")
    assert spec_of(tmp_path / "l.gguf", others).attention.rope.query_log == 0.0
