"""Models in several files: read as one, and refused as what they lack."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile, model_identity
from batchengine.weights import open_weights, plan_tensors, read_spec
from batchengine.weights.packed import read_fingerprint
from bench.models.local_runner import LocalRunner
from bench.models.synthetic import Shape, write_synthetic
from tests.hostile.rewrite import edited, split

TINY = Shape(n_layer=2, n_embd=64, n_ff=96, n_head=2, n_kv_head=1, head_dim=32, n_vocab=288)
PER_FILE = 8  # of 24 tensors


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole.gguf"
    write_synthetic(path, TINY)
    return path


@pytest.fixture
def parts(whole: Path) -> list[Path]:
    return split(whole, PER_FILE)


def test_parts_are_read_as_one_model(whole: Path, parts: list[Path]) -> None:
    assert [part.name for part in parts] == [
        f"split-0000{number}-of-0000{len(parts)}.gguf" for number in range(1, len(parts) + 1)
    ]
    assert len(parts) == 3
    with GgufFile(whole) as one, GgufFile(parts[0]) as several:
        assert list(several.tensors) == list(one.tensors)
        assert {info.part for info in several.tensors.values()} == {0, 1, 2}
        assert read_spec(several) == read_spec(one)
        plan_tensors(several, read_spec(several))
        for name, info in one.tensors.items():
            assert bytes(several.data(name)) == bytes(one.data(name))
            assert several.read(name, 5, 30) == bytes(one.data(name)[5:35])
            assert several.tensors[name].shape == info.shape
        assert several.size_bytes == sum(part.stat().st_size for part in parts)


def test_parts_give_the_logits_of_the_whole(whole: Path, parts: list[Path], tmp_path: Path) -> None:
    tokens = list(range(3, 40))
    found: list[Any] = []
    for path in (whole, parts[0]):
        with LocalRunner(path, cache_dir=tmp_path / "c", n_pages=2, logits_max=64) as runner:
            found.append(runner.all_logits(tokens).view(np.uint32))
    assert (found[0] == found[1]).all()


def test_the_fingerprint_is_that_of_all_parts(parts: list[Path], tmp_path: Path) -> None:
    pool = kernels.Pool(1)
    with GgufFile(parts[0]) as file:
        weights = open_weights(file, pool, cache_dir=tmp_path / "c")
    identity, fingerprint = read_fingerprint(parts[0], lambda: False) or (None, b"")
    assert (identity, fingerprint) == (model_identity(parts[0]), weights.fingerprint)
    with parts[2].open("r+b") as last:  # one bit of a tensor
        last.seek(-40, os.SEEK_END)
        byte = last.read(1)[0]
        last.seek(-40, os.SEEK_END)
        last.write(bytes([byte ^ 1]))
    changed, other = read_fingerprint(parts[0], lambda: False) or (None, b"")
    assert changed not in (None, identity)
    assert other not in (b"", fingerprint)
    with GgufFile(parts[0]) as file:  # the packed weights are not those of these files any more
        assert open_weights(file, pool, cache_dir=tmp_path / "c").fingerprint == other
    pool.close()


def test_a_part_that_is_written_meanwhile_ends_the_reading(parts: list[Path]) -> None:
    def touch() -> bool:
        os.utime(parts[1])
        return False

    assert read_fingerprint(parts[0], touch) is None


@pytest.mark.parametrize("change", ["touched", "replaced", "cut", "gone"])
def test_the_identity_changes_with_every_part(change: str, parts: list[Path]) -> None:
    before = model_identity(parts[0])
    part = parts[1]
    if change == "touched":
        os.utime(part, ns=(1, 2))
    elif change == "replaced":
        times = part.stat()
        shutil.copy2(part, part.with_suffix(".new"))
        os.replace(part.with_suffix(".new"), part)
        os.utime(part, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "cut":
        os.truncate(part, part.stat().st_size - 1)
    else:
        part.unlink()
        with pytest.raises(FileNotFoundError):
            model_identity(parts[0])
        return
    assert model_identity(parts[0]) != before


def renamed(parts: list[Path]) -> Path:
    return parts[0].rename(parts[0].with_name("model.gguf"))


def without_one(parts: list[Path]) -> Path:
    parts[1].unlink()
    return parts[0]


def in_another_order(parts: list[Path]) -> Path:
    other = parts[1].rename(parts[1].with_suffix(".x"))
    parts[2].rename(parts[1])
    other.rename(parts[2])
    return parts[0]


def with_a_tensor_twice(parts: list[Path]) -> Path:
    def edit(_: Any, tensors: dict[str, Any]) -> None:
        kind = gguf.GGMLQuantizationType.F32
        tensors["token_embd.weight"] = np.ones((8, 64), np.float32), kind

    return with_edited_part(parts, edit)


def with_a_tensor_less(parts: list[Path]) -> Path:
    return with_edited_part(parts, lambda _, tensors: tensors.popitem())


def with_edited_part(parts: list[Path], edit: Callable[..., Any]) -> Path:
    def with_architecture(values: dict[str, Any], tensors: dict[str, Any]) -> None:
        values["general.architecture"] = ("qwen3", [gguf.GGUFValueType.STRING])
        edit(values, tensors)

    edited(parts[1], with_architecture).rename(parts[1])
    return parts[0]


def a_whole_one_named_as_a_part(parts: list[Path]) -> Path:
    shutil.copy(parts[0].with_name("whole.gguf"), parts[0])
    return parts[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts[1], ("a later part of 3", "name the first part")),
        (renamed, ("one of 3 files", "keep the names")),
        (without_one, ("split-00002-of-00003.gguf is missing", "download all parts")),
        (in_another_order, ("split-00002-of-00003.gguf is not part 2 of 3", "again")),
        (with_a_tensor_twice, ("tensor token_embd.weight is in two", "again")),
        (with_a_tensor_less, ("tensors, not", "again")),
        (a_whole_one_named_as_a_part, ("its keys do not", "another name")),
    ],
)
def test_what_is_no_whole_model_is_refused(
    change: Callable[[list[Path]], Path], words: tuple[str, ...], parts: list[Path]
) -> None:
    with pytest.raises(BatchEngineError) as caught, GgufFile(change(parts)):
        pass
    assert caught.value.code == "BE1316", str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("count", [-1, 2.5, "3", 1 << 31])
def test_a_senseless_number_of_parts_is_refused(count: object, whole: Path) -> None:
    types = {int: "INT64", float: "FLOAT32", str: "STRING"}
    kind = [gguf.GGUFValueType[types[type(count)]]]

    def edit(values: dict[str, Any], _: Any) -> None:
        values["split.count"] = (count, kind)

    with pytest.raises(BatchEngineError) as caught, GgufFile(edited(whole, edit)):
        pass
    assert caught.value.code in ("BE1316", "BE1322")
