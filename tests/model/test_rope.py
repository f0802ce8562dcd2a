"""The RoPE table, the scale of queries, and YaRN: which pairs of a head are interpolated."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import kernels as K
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights.spec import read_spec
from batchengine.weights.yarn import frequency_divisors, magnitude
from bench.models.synthetic import Shape, write_synthetic
from tests.hostile.rewrite import edited
from tests.kernels.timelines import Timeline, step


def test_fast_pairs_are_left_alone_and_slow_ones_are_interpolated() -> None:
    """Qwen3 from 32,768 positions to four times as many. A pair i turns once in
    2π · base^(2i/n) positions."""
    n, base, trained, factor = 128, 1e6, 32768, 4.0
    divisors = frequency_divisors(n, base, factor, trained, 32.0, 1.0)
    assert len(divisors) == n // 2
    turns = [trained / (2 * math.pi * base ** (2 * i / n)) for i in range(n // 2)]
    for turned, divisor in zip(turns, divisors, strict=True):
        if turned > 33:
            assert divisor == 1.0
        elif turned < 0.9:
            assert divisor == factor
    between = [d for d in divisors if 1.0 < d < factor]
    assert len(between) > 10
    assert sorted(divisors) == list(divisors)
    # The blend is of frequencies, not of lengths: equal steps from 1 to 1/4.
    steps = {round(1 / a - 1 / b, 9) for a, b in pairwise(between)}
    assert len(steps) == 1


@pytest.mark.parametrize("factor", [1.0, 4.0, 40.0])
def test_the_magnitude_grows_with_the_logarithm(factor: float) -> None:
    assert magnitude(factor) == pytest.approx(1 + math.log(factor) / 10, rel=1e-15)
    assert magnitude(factor, 1.0) == 1.0


def test_a_factor_of_one_changes_nothing() -> None:
    assert set(frequency_divisors(64, 1e4, 1.0, 4096, 32.0, 1.0)) == {1.0}
    assert magnitude(1.0) == 1.0


def test_borders_that_meet_are_a_step() -> None:
    divisors = frequency_divisors(64, 1e4, 8.0, 10, 32.0, 1e-3)
    assert all(1.0 <= d <= 8.0 for d in divisors)
    same = frequency_divisors(64, 1e4, 8.0, 4096, 1.0, 1.0)
    assert set(same) == {1.0, 8.0}


@pytest.mark.parametrize(
    ("key", "value", "code", "words"),
    [
        ("factor", None, "BE1321", ("qwen3.rope.scaling.factor",)),
        ("factor", 0.5, "BE1322", ("qwen3.rope.scaling.factor", "is 0.5", "outside 1 to")),
        ("yarn_ext_factor", 0.5, "BE1323", ("yarn_ext_factor = 0.5", "1 is supported")),
        ("yarn_log_multiplier", 1.0, "BE1323", ("yarn_log_multiplier = 1", "0 is supported")),
        ("yarn_beta_fast", 0.0, "BE1322", ("yarn_beta_fast", "outside")),
        ("original_context_length", 0, "BE1322", ("original_context_length", "out of range")),
    ],
)
def test_a_file_with_other_keys_is_refused(
    key: str, value: float | None, code: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, Shape(n_layer=1, n_embd=64, n_ff=96, head_dim=32, yarn_factor=4.0))

    def edit(values: dict[str, Any], _: Any) -> None:
        name = f"qwen3.rope.scaling.{key}"
        whole = gguf.GGUFValueType.UINT32 if value == 0 and "length" in key else None
        values.pop(name, None)
        if value is not None:
            values[name] = (value, [whole or gguf.GGUFValueType.FLOAT32])

    with GgufFile(edited(path, edit)) as file, pytest.raises(BatchEngineError) as caught:
        read_spec(file)
    assert caught.value.code == code, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_rope_table_is_exact_within_one_unit_of_binary32() -> None:
    table = K.RopeTable("neox", 128, 128, 1e6)
    frequency = 1e6 ** (-2 * np.arange(64) / 128)
    for position in [0, 1, 255, 256, 4095, 131071, 1_000_000]:
        row = np.array(table.row(position), np.float32)
        exact = np.concatenate([np.cos(position * frequency), np.sin(position * frequency)])
        # One unit of binary32, and the binary64 rounding of an angle of 1e6.
        assert (np.abs(row - exact) <= np.spacing(np.abs(exact).astype(np.float32)) + 5e-10).all()
    with pytest.raises(ValueError, match="4194304"):
        table.row(1 << 22)


def test_queries_are_scaled_by_the_logarithm_of_their_span() -> None:
    table = K.RopeTable("norm", 64, 64, 1e6, None, 1.0, 1.0, 0.1, 300)
    for position in [0, 299, 300, 5999, 6000, 1_000_000]:
        wanted = 1 + 0.1 * math.log(1 + position // 300)
        assert table.query_scale(position) == np.float32(wanted)
    assert table.query_scale(299) == 1.0
    plain = K.RopeTable("norm", 64, 64, 1e6)
    assert plain.query_scale(1_000_000) == 1.0
    assert (table.scales_queries, plain.scales_queries) == (True, False)
    pool = K.Pool(1)
    # A query with a scale is the query of an attention scale as much larger, up to rounding.
    d, length = 64, 9
    qkv = np.random.default_rng(3).standard_normal((length, 3 * d)).astype(np.float32)
    shape = K.PageShape(1, 1, d)
    late = K.RopeTable("norm", d, d, 1e6, None, 1.0, 1.0, 0.5, 4)
    scaled = step(pool, [Timeline(shape, 1, 1, rope=late)], [qkv])[0]
    for span, rows in ((0, slice(0, 4)), (1, slice(4, 8)), (2, slice(8, 9))):
        larger = Timeline(shape, 1, 1, rope=K.RopeTable("norm", d, d, 1e6))
        larger.scale *= 1 + 0.5 * math.log(1 + span)
        out = step(pool, [larger], [qkv])[0]
        assert np.abs(scaled[rows] - out[rows]).max() < 1e-3
    unscaled = Timeline(shape, 1, 1, rope=K.RopeTable("norm", d, d, 1e6))
    assert np.abs(scaled - step(pool, [unscaled], [qkv])[0])[[4, 8]].max(axis=1).min() > 0.01
    pool.close()


def test_rope_digest_depends_on_every_parameter_of_the_table() -> None:
    factors = K.Vector(np.linspace(1, 2, 32, dtype=np.float32))
    variants = [
        K.RopeTable("neox", 64, 64, 1e6),
        K.RopeTable("norm", 64, 64, 1e6),
        K.RopeTable("neox", 64, 32, 1e6),
        K.RopeTable("neox", 96, 64, 1e6),
        K.RopeTable("neox", 64, 64, 1e4),
        K.RopeTable("neox", 64, 64, 1e6, factors),
        K.RopeTable("neox", 64, 64, 1e6, None, 0.5),
        K.RopeTable("neox", 64, 64, 1e6, None, 1.0, 1.1),
        K.RopeTable("neox", 64, 64, 1e6, None, 1.0, 1.0, 0.1, 8),
        K.RopeTable("neox", 64, 64, 1e6, None, 1.0, 1.0, 0.1, 9),
        K.RopeTable("neox", 64, 64, 1e6, None, 1.0, 1.0, 0.2, 9),
    ]
    assert len({v.digest() for v in variants}) == len(variants)
    again = K.RopeTable("neox", 64, 64, 1e6)
    again.row(3000)
    assert again.digest() == variants[0].digest()
