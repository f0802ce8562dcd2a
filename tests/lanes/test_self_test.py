"""A lane whose arithmetic is not CA-3 refuses to load."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import kernels
from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.worker_process import WORKER, Lane
from batchengine.wire import lane as wire

# An fmaf that rounds to binary64 first, as C libraries without the real one had it.
WRONG_FMAF = 'extern "C" float fmaf(float a, float b, float c) { return float(double(a) * b + c); }'


def load_message(model: Path, cache_dir: Path) -> wire.Load:
    return wire.Load(str(model), str(cache_dir), wire.CpuResources(1, (), 60), 600, 4, 2048)


def ignore_progress(stage: str, detail: str, progress: float, seconds: float) -> None:
    pass


@pytest.mark.parametrize("level", kernels.isa_levels())
def test_this_build_has_no_fault(level: str) -> None:
    best = kernels.isa()
    kernels.set_isa(level)
    pool = kernels.Pool(2)
    assert kernels.arithmetic_faults(pool) == []
    pool.close()
    kernels.set_isa(best)


@pytest.mark.parametrize("wrong", kernels.LATER_PARTS)
def test_other_bits_of_a_part_that_arith_id_does_not_cover_are_a_fault(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, right = kernels.Pool(1), kernels.golden_records_of

    def changed(pool: kernels.Pool, part: str) -> list[tuple[str, bytes]]:
        *records, (name, output) = right(pool, part)
        return [*records, (name, output[:-1] + bytes([output[-1] ^ (part == wrong)]))]

    monkeypatch.setattr(kernels, "golden_records_of", changed)
    fault = f"{kernels.isa()}: golden vectors of {wrong} have other bits"
    assert kernels.arithmetic_faults(pool) == [fault]
    of_narrow_heads = [] if wrong == "wide_heads" else [fault]
    assert kernels.arithmetic_faults(pool, 256) == of_narrow_heads
    assert kernels.arithmetic_faults(pool, 257) == [fault]
    pool.close()


def test_code_that_fuses_operations_is_refused(
    pocket_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "multiply_then_add", lambda a, b, c: a * b + c)  # in binary64
    device = CpuDevice()
    with pytest.raises(BatchEngineError, match="fused") as caught:
        device.load(load_message(pocket_path, cache_dir), ignore_progress)
    device.close()
    assert caught.value.code == errors.ARITHMETIC_WRONG.code


@pytest.fixture
def wrong_library(tmp_path: Path) -> Path:
    """A library with WRONG_FMAF."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, library = tmp_path / "wrong.cpp", tmp_path / "wrong.so"
    source.write_text(WRONG_FMAF)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


async def test_a_worker_with_a_wrong_c_library_is_refused(
    pocket_path: Path, cache_dir: Path, wrong_library: Path
) -> None:
    lane = Lane("cpu", command=("/usr/bin/env", f"LD_PRELOAD={wrong_library}", *WORKER))
    with pytest.raises(BatchEngineError, match="fmaf of the C library") as caught:
        await lane.start(load_message(pocket_path, cache_dir))
    assert caught.value.code == errors.ARITHMETIC_WRONG.code
    await lane.close()
