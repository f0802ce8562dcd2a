"""The program `print_golden` prints what the module computes, so machines compare by its lines."""

from __future__ import annotations

from pathlib import Path

import pytest

import kernels
from tools import check_arm

NATIVE = Path(check_arm.ROOT, "build/native/build.ninja")


@pytest.mark.skipif(not NATIVE.exists(), reason="the program is built where `make native` ran")
def test_the_program_prints_the_golden_records_of_the_module(pool: kernels.Pool) -> None:
    """On every level; with AVX-512 also the sources of the level amx-int8 with tiles in plain
    memory, which any machine has. A use of a tile that does not fit its shape ends the program."""
    has_tiles = "avx512-vnni" in kernels.isa_levels()
    program = str(check_arm.build_here("print_golden_emulated" if has_tiles else "print_golden"))
    levels = check_arm.output_of([program]).split()
    assert levels == list(dict.fromkeys([*kernels.isa_levels(), *["amx-int8"] * has_tiles]))
    printed = check_arm.sections(check_arm.output_of([program, *levels]))
    assert list(printed) == levels
    records = kernels.golden_records(pool)
    for part in kernels.LATER_PARTS:
        records += kernels.golden_records_of(pool, part)
    expected = [f"{kernels.xxh3_64(output, 0):016x} {name}" for name, output in records]
    for lines in printed.values():
        assert lines[: len(expected)] == expected
        assert check_arm.differences(printed["scalar"], lines) == []
    assert len(printed["scalar"]) > 1000


@pytest.mark.slow  # the module has these tiles, too
@pytest.mark.skipif("amx-int8" not in kernels.isa_levels(), reason="a processor without tiles")
@pytest.mark.skipif(not NATIVE.exists(), reason="the program is built where `make native` ran")
def test_tiles_of_the_processor_itself_give_the_same() -> None:
    program = str(check_arm.build_here())
    levels = "scalar", "amx-int8"
    printed = check_arm.sections(check_arm.output_of([program, *levels]))
    assert check_arm.differences(*(printed[level] for level in levels)) == []


def test_differences_and_missing_packages_are_named() -> None:
    assert check_arm.differences(["1 a", "2 b c"], ["1 a", "3 b c"]) == ["b c"]
    assert check_arm.differences(["1 a", "2 b"], ["1 a"]) == ["(1 records instead of 2)"]
    assert check_arm.missing_packages(lambda name: None) == ["g++-aarch64-linux-gnu", "qemu-user"]
    assert not check_arm.missing_packages(lambda name: name)
