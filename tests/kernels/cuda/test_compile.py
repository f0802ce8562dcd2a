"""Every kernel compiles for every target, with the float operations that its source writes.

The default suite has two of the targets, of attention one. Of products, which take three times as
long as all others, it has two kinds for one target, and the PTX of each kind, which is half of the
work.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import kernels
import kernels.cuda.compile as module
from bench.cuda.assembly import compiled as kept
from bench.cuda.assembly.ptx import contracted, faults, float_operations, kernels_of
from bench.cuda.ceilings import SOURCE as CEILINGS
from kernels.cuda.compile import (
    INCLUDES,
    TARGETS,
    Compiled,
    CompileError,
    CompileUnit,
    compile_unit,
    cubins,
    sources,
    texts,
    units,
)
from kernels.cuda.products import FLOATS, kernel_of

PTX = "compute_90"  # a target that is no device's


def quick(unit: CompileUnit) -> tuple[str, ...]:
    """Targets of the default suite."""
    if not unit.kind:
        return ("sm_90",) if unit.name == "attention" else ("sm_80", "sm_90")
    return ("sm_90",) if unit.kind in ("q4_0", "q2_k") else (PTX,)


CASES = [
    pytest.param(
        unit,
        target,
        id=f"{unit.name}-{target}",
        marks=() if target in quick(unit) else pytest.mark.slow,
    )
    for unit in units()
    for target in dict.fromkeys((*quick(unit), *TARGETS))
]
HEAD = 'extern "C" __global__ void planted(float* x, int i) '
PLANTED = {
    "approx": ("x[0] = __fdividef(x[1], x[2]);", "div.approx"),
    "sine": ("x[0] = __sinf(x[1]);", "sin.approx"),
    "toward_zero": ("x[0] = __fadd_rz(x[1], x[2]);", "add.rz.f32"),
    "double": ("x[0] = float(double(x[1]) * x[2] + x[3]);", "mul.rn.f64"),
    "half": (
        'unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x[1])); x[0] = h;',
        "cvt.rn.f16.f32",
    ),
    "local": (
        "float y[64]; for (int k = 0; k < 64; k++) y[k] = x[k];"
        "x[0] = y[i]; y[i] = 1; x[1] = y[i / 2];",
        "256 bytes of stack",
    ),
}


@pytest.fixture(scope="module")
def compiled(
    request: pytest.FixtureRequest,
) -> Iterator[dict[tuple[CompileUnit, str], Future[Compiled]]]:
    """What the tests of this run need, compiled beside each other."""
    wanted = {
        (item.callspec.params["unit"], item.callspec.params["target"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_compiles.__name__
    }
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield {case: pool.submit(kept.compiled, *case) for case in sorted(wanted)}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("unit", "target"), CASES)
def test_compiles(
    compiled: dict[tuple[CompileUnit, str], Future[Compiled]], unit: CompileUnit, target: str
) -> None:
    made = compiled[unit, target].result()
    assert not faults(made.ptx, made.report)
    assert kernels_of(made.ptx)
    if target == PTX:
        return
    assert made.cubin[:4] == b"\x7fELF"
    assert made.report.count("bytes stack frame") == len(kernels_of(made.ptx))


@pytest.mark.parametrize(
    "unit",
    [
        pytest.param(
            u, id=u.name, marks=() if u.name in ("kv", "rows", "experts") else pytest.mark.slow
        )
        for u in units()
    ],
)
def test_there_is_nothing_to_contract(unit: CompileUnit) -> None:
    assert not contracted(unit, "sm_80")


def test_what_no_test_has_wanted_for_long_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When something new is made; what is wanted again is kept for as long again."""
    source, folder = tmp_path / "planted.cu", tmp_path / "kept"
    source.write_text("")
    monkeypatch.setattr(kept, "FOLDER", folder)
    monkeypatch.setattr(kept, "compile_unit", lambda *_, **__: Compiled(b"made", "ptx", "report"))
    for target in ("sm_80", "sm_90"):
        kept.compiled(CompileUnit(source), target)
    assert len(list(folder.iterdir())) == 4  # with locks
    (folder / "planted-sm_70.part").write_text("")  # of a process that was killed
    for path in folder.iterdir():
        os.utime(path, (0, 0))
    assert kept.compiled(CompileUnit(source), "sm_80").cubin == b"made"
    kept.compiled(CompileUnit(source), "sm_89")
    names = {"-".join(path.name.split("-")[:2]) for path in folder.iterdir()}
    assert names == {"planted-sm_80", "planted-sm_89"}
    assert len(list(folder.iterdir())) == 4


def test_what_is_compiled_is_kept_by_its_texts_options_and_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, header, made = tmp_path / "planted.cu", tmp_path / "planted.h", list[CompileUnit]()

    def counting(unit: CompileUnit, target: str, **changes: str | bool) -> Compiled:
        made.append(unit)
        return Compiled(bytes([len(made)]), f"{len(made)}", "")

    monkeypatch.setattr(kept, "compile_unit", counting)
    monkeypatch.setattr(kept, "FOLDER", tmp_path / "kept")
    monkeypatch.setattr(module, "INCLUDES", (tmp_path,))
    source.write_text('#include "planted.h"\n')
    header.write_text("// 1\n")

    def number(target: str = "sm_90", kind: str = "", **changes: str | bool) -> int:
        one = kept.compiled(CompileUnit(source, kind), target, **changes)
        assert (one.cubin, one.report) == (bytes([int(one.ptx)]), "")
        return int(one.ptx)

    assert [number(), number("sm_80"), number(fmad=True), number(), number("sm_80")] == [
        *(1, 2, 3),
        *(1, 2),
    ]
    header.write_text("// 2\n")
    assert [number(), number(), number(kind="q4_0"), number()] == [4, 4, 5, 4]
    monkeypatch.setattr(kept, "_version", lambda: "another compiler")
    assert number() == 6


def test_contraction_is_found(tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(HEAD + "{ x[0] = x[1] * x[2] + x[3]; }")
    assert contracted(CompileUnit(source), "sm_80") == ["planted"]
    merged = compile_unit(CompileUnit(source), "sm_80", fmad=True)
    assert float_operations(merged.ptx)["fma.rn.f32"] == 1


@pytest.mark.parametrize("name", PLANTED)
def test_other_arithmetic_is_found(tmp_path: Path, name: str) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(HEAD + "{" + PLANTED[name][0] + "}")
    made = compile_unit(CompileUnit(source), "sm_90")
    assert any(PLANTED[name][1] in fault for fault in faults(made.ptx, made.report))


def test_reads_that_may_be_stale_are_found(tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(
        'extern "C" __global__ void planted(const float* __restrict__ a, float* __restrict__ x,'
        " int i) { x[i] = a[i + 1]; }"
    )
    made = compile_unit(CompileUnit(source), "sm_80")
    assert faults(made.ptx, made.report) == ["planted: ld.global.nc"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("x[0] = 1;", None),
        ("float y = x[1]; {} x[0] = y;", ["ld.global.f32"]),
        ("x[1] = x[0] > 1; {} x[0] = 3;", ["ld.global.f32", "st.global.f32"]),
        ("if (i > 3) atomicAdd((int*)x, 1); {}", ["atom.global.add.u32"]),
        ("{} x[0] = x[1];", []),
    ],
)
def test_accesses_before_the_wait_are_found(
    tmp_path: Path, body: str, found: list[str] | None
) -> None:
    source, wait = tmp_path / "planted.cu", 'asm volatile("griddepcontrol.wait;" ::: "memory");'
    source.write_text(HEAD + "{" + body.replace("{}", wait) + "}")
    made = compile_unit(CompileUnit(source), "sm_90")
    wanted = ["no wait"] if found is None else [f"{name} before its wait" for name in found]
    assert faults(made.ptx, made.report) == [f"planted: {fault}" for fault in wanted]


def test_flushed_subnormals_are_found(tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(HEAD + "{ x[0] = x[1] * x[2]; }")
    made = compile_unit(CompileUnit(source), "sm_80", ftz=True)
    assert faults(made.ptx, made.report) == ["planted: mul.rn.ftz.f32"]


def test_cubins_are_kept_and_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, folder, count = tmp_path / "planted.cu", tmp_path / "cubins", []
    source.write_text(HEAD + "{ x[0] = x[1] * x[2]; }")

    def counting(unit: CompileUnit, target: str) -> Compiled:
        count.append(target)
        return compile_unit(unit, target)

    monkeypatch.setattr(module, "compile_unit", counting)
    first = cubins("sm_90", folder, [CompileUnit(source)])
    assert cubins("sm_90", folder, [CompileUnit(source)]) == first
    assert count == ["sm_90"]
    (kept,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, kept.stat().st_mode & 0o777) == (0o700, 0o600)
    assert kept.read_bytes()[32:] == first["planted"]
    for damaged in (b"", kept.read_bytes()[:-1], b"x" + kept.read_bytes()[1:]):
        kept.write_bytes(damaged)
        assert cubins("sm_90", folder, [CompileUnit(source)]) == first
    assert len(count) == 4
    source.write_text(HEAD + "{ x[0] = x[1] + x[2]; }")
    assert cubins("sm_90", folder, [CompileUnit(source)]) != first
    cubins("sm_80", folder, [CompileUnit(source)])
    assert len(list(folder.iterdir())) == 3


def test_a_long_compilation_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, source = threading.Event(), tmp_path / "planted.cu"
    source.write_text(HEAD + "{ }")

    def long(unit: CompileUnit, target: str) -> Compiled:
        assert called.wait(30)
        return Compiled(b"made", "", "")

    monkeypatch.setattr(module, "compile_unit", long)
    monkeypatch.setattr(module, "WAITING_S", 0.01)
    made = cubins("sm_90", tmp_path / "cubins", [CompileUnit(source)], called.set)
    assert made == {"planted": b"made"}


def test_no_lambda_has_a_parameter_of_type_auto() -> None:
    """NVRTC 13.0 and 13.1 take such a one in a template for a function of the host."""
    generic = re.compile(r"\[&?\]\([^)]*\bauto\b")
    assert [path.stem for path in (*sources(), CEILINGS) if generic.search(path.read_text())] == []


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(
    "source", [path for path in sources() if path.stem in ("attention", "recurrent")]
)
def test_the_compiler_of_cuda_itself_ends(tmp_path: Path, source: Path) -> None:
    """It is often an older one than NVRTC here; that of 13.0 did not end with `attention`."""
    command = ["nvcc", "-std=c++20", "-fmad=false", "-arch=sm_90", "-ptx", str(source)]
    command += [f"-I{folder}" for folder in INCLUDES]
    subprocess.run([*command, "-o", str(tmp_path / "made.ptx")], check=True, timeout=250)
    assert kernels_of((tmp_path / "made.ptx").read_text())


def test_units_are_those_of_the_kinds_of_a_model() -> None:
    kinds = {unit.kind for unit in units()} - {""}
    assert kinds == {kernel_of(kind) for kind in set(kernels.KINDS) - set(FLOATS)}
    assert [unit.name for unit in units({"iq2_xxs"}) if unit.kind] == ["linear-iq2_s"]
    names = [unit.name for unit in units({"q6_k", "f32", "q4_k"})]
    assert [name for name in names if "-" in name] == ["linear-q4_k", "linear-q6_k"]
    assert len(names) == len(sources()) + 1


def test_every_included_file_is_part_of_the_key() -> None:
    names = {path.name for path in texts(module.SOURCES / "linear.cu")}
    headers = {"products.h", "activations.h", "blocks.h", "gpu.h", "tiles.h", "ca.h"}
    assert names == {"linear.cu", *headers}


def test_the_error_of_a_refused_source_has_the_log(tmp_path: Path) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(HEAD + "{ x[0] = y; }")
    with pytest.raises(CompileError, match=r"(?s)^planted for sm_90 by NVRTC .*y. is undefined"):
        compile_unit(CompileUnit(source), "sm_90")
