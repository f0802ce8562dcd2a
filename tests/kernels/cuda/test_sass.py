"""Nothing is merged, flushed or rounded otherwise on the way from PTX to SASS."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from bench.cuda.assembly.compiled import compiled
from bench.cuda.assembly.sass import (
    disassembler,
    early,
    foreign,
    listings,
    loads_at_once,
)
from kernels.cuda.compile import TARGETS, CompileUnit, compile_unit, units

pytestmark = pytest.mark.skipif(disassembler() is None, reason="no nvdisasm")
HEAD = 'extern "C" __global__ void planted(float* x, int n) '
PLANTED = {
    "merged": ("x[0] = x[1] * x[2] + x[3];", {"fmad": True}, "FFMA"),
    "merged_by_the_assembler": (
        'float y; asm("mul.f32 %0, %1, %2;" : "=f"(y) : "f"(x[1]), "f"(x[2])); x[0] = y + x[3];',
        {"fmad": True},
        "FFMA",
    ),
    "flushed": ("x[0] = x[1] * x[2];", {"ftz": True}, "FMUL.FTZ"),
    "toward_zero": ("x[0] = __fadd_rz(x[1], x[2]);", {}, "FADD.RZ"),
    "product_toward_zero": ("x[0] = __fmul_rz(x[1], x[2]);", {}, "FMUL.RZ"),
    "approximate": ("x[0] = __sinf(x[1]);", {}, "MUFU.SIN"),
    "double": ("x[0] = float(double(x[1]) * x[2] + x[3]);", {}, "DMUL"),
}
UNITS = {unit.name: unit for unit in units()}
QUICK = ("kv", "rows", "experts", "floats", "recurrent", "segments", "linear-q4_0")


@functools.cache
def listed(name: str) -> dict[str, list[str]]:
    """The instructions of each kernel of a unit for sm_90."""
    return listings(compiled(UNITS[name], "sm_90").cubin)


@pytest.mark.parametrize("name", QUICK)
def test_sass_has_no_operation_of_its_own(name: str) -> None:
    assert foreign(UNITS[name], "sm_90") == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if unit.kind and name not in QUICK else ())
        for name, unit in UNITS.items()
    ],
)
def test_no_access_stands_before_the_wait(name: str) -> None:
    made = listed(name)
    assert {kernel: found for kernel, listing in made.items() if (found := early(listing))} == {}


def test_an_access_before_the_wait_is_found() -> None:
    assert early(["LDC", "LDG.E", "ACQBULK", "STG.E"]) == ["LDG.E"]
    assert early(["UBLKPF.L2", "PREEXIT", "ACQBULK", "LDG.E"]) == []
    assert early(["PREEXIT", "EXIT"]) == ["no wait"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", UNITS)
def test_sass_of_every_target_has_no_operation_of_its_own(name: str, target: str) -> None:
    assert foreign(UNITS[name], target) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_operation_is_found(tmp_path: Path, name: str) -> None:
    body, options, instruction = PLANTED[name]
    source = tmp_path / "planted.cu"
    source.write_text(HEAD + "{" + body + "}")
    assert f"planted: {instruction}" in foreign(CompileUnit(source), "sm_90", **options)


def test_operations_that_are_written_are_none_of_those(tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    body = (
        "x[0] = __fmaf_rn(x[1], x[2], x[3]); x[4] = __fdiv_rn(x[5], x[6]); x[7] = x[n / (n - 1)];"
    )
    source.write_text(HEAD + "{" + body + "}")
    assert "FFMA" in listings(compile_unit(CompileUnit(source), "sm_90").cubin)["planted"]
    assert foreign(CompileUnit(source), "sm_90") == []


def test_a_division_of_short_integers_is_none_of_those(tmp_path: Path) -> None:
    """It has a product that is rounded toward zero there."""
    source = tmp_path / "planted.cu"
    body = "unsigned short a = n, b = n >> 16; x[a / b] = 1.0f;"
    source.write_text(HEAD + "{" + body + "}")
    assert "FMUL.RZ" in listings(compile_unit(CompileUnit(source), "sm_100").cubin)["planted"]
    assert foreign(CompileUnit(source), "sm_100") == []


def test_weights_are_loaded_ahead() -> None:
    made = listed("linear-q4_0")
    assert loads_at_once(made["linear_few_q4_0"]) >= 16  # of eight blocks, weights and scales
    assert "LDGSTS" in {name.split(".")[0] for name in made["linear_many_q4_0"]}


@pytest.mark.parametrize(("kernel", "products"), [("linear_f32", 32), ("linear_many_f32", 128)])
def test_no_load_of_global_memory_stands_in_a_chain_of_floats(kernel: str, products: int) -> None:
    listing = listed("floats")[kernel]
    places = [i for i, name in enumerate(listing) if name == "FFMA"]
    assert loads_at_once(listing[places[0] : places[products - 1]]) == 0
    assert "LDGSTS" in {name.split(".")[0] for name in listing[: places[0]]}


def test_accumulators_of_a_fold_are_loaded_at_once() -> None:
    made = listed("attention")
    assert loads_at_once(made["fold_attention"]) >= 24  # of eight: m, l and a value of o


def test_a_state_is_loaded_at_once() -> None:
    made = listed("recurrent")
    for kernel in ("recur_heads", "recur_mamba2"):
        assert loads_at_once(made[kernel]) >= 32  # the rows of a chain


def test_a_branch_ends_what_is_loaded_at_once() -> None:
    assert loads_at_once(["LDG.E", "FADD", "LDG.E.64", "BRA", "LDG.E", "IMMA.16832", "LDS"]) == 2
