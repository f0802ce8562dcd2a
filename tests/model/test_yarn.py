"""YaRN: which pairs of a head are interpolated, and that every machine makes the same table."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest

from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights.spec import read_spec
from batchengine.weights.yarn import frequency_divisors, magnitude
from bench.models.synthetic import Shape, write_synthetic
from tests.hostile.rewrite import edited


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
