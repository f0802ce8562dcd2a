"""Files that look like models and are none, or that ask for more than is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import plan_tensors, read_spec
from bench.models.synthetic import Shape, write_synthetic
from tests.hostile.rewrite import edited

TINY = Shape(n_layer=2, n_embd=64, n_ff=96, n_head=2, n_kv_head=1, head_dim=32, n_vocab=288)
U32 = [gguf.GGUFValueType.UINT32]
TEXT = [gguf.GGUFValueType.STRING]
COUNTS = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32]
Edit = Callable[[dict[str, Any], dict[str, Any]], None]


def without_keys(**keys: tuple[object, list[Any]]) -> Edit:
    """A file with these keys alone, the architecture and one tensor of no model."""

    def edit(values: dict[str, Any], tensors: dict[str, Any]) -> None:
        arch = values["general.architecture"]
        values.clear()
        values["general.architecture"] = arch
        values.update({key.replace("__", "."): value for key, value in keys.items()})
        tensors.clear()
        kind = gguf.GGMLQuantizationType.F32
        tensors["blk.0.attn_q.weight.lora_a"] = np.ones((8, 64), np.float32), kind

    return edit


def put(key: str, value: Any, types: list[Any]) -> Edit:
    return lambda values, _: values.__setitem__(key, (value, types))


WRONG: dict[str, tuple[str, tuple[str, ...], Edit]] = {
    "adapter": (
        "BE1323",
        ("general.type = adapter", "the model itself"),
        without_keys(general__type=("adapter", TEXT)),
    ),
    "projector": (
        "BE1323",
        ("general.type = mmproj", "the model itself"),
        without_keys(general__architecture=("clip", TEXT), general__type=("mmproj", TEXT)),
    ),
    "predicting_layers": (
        "BE1323",
        ("qwen3.nextn_predict_layers = 1", "further tokens"),
        put("qwen3.nextn_predict_layers", 1, U32),
    ),
    "counts_of_other_layers": (
        "BE1322",
        ("qwen3.attention.head_count", "3 numbers for 2 layers"),
        put("qwen3.attention.head_count", [2, 2, 2], COUNTS),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_refusal_says_what_the_file_is(name: str, tmp_path: Path) -> None:
    code, words, edit = WRONG[name]
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, TINY)
    with GgufFile(edited(path, edit)) as file, pytest.raises(BatchEngineError) as caught:
        plan_tensors(file, read_spec(file))
    assert caught.value.code == code, str(caught.value)
    for word in words:
        assert word in str(caught.value)
