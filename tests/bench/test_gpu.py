"""The measurements of a GPU go through on an emulated one, and a run goes on where one ended."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
import kernels.cuda.driver as module
from batchengine.config.settings import SlaConfig
from bench.cuda import ceilings, first, gpu, steps
from bench.cuda.gpu import BEGIN, DONE, LATE, Run, State, summary
from bench.cuda.gpus import seconds
from bench.cuda.passes import TINY, Passes
from bench.cuda.serving.engines import Stream
from bench.cuda.serving.goodput import CLASSES, CONTEXT_MAX, REAL, arrivals, highest, is_good
from bench.cuda.speed import TINY_EXPERTS, TINY_LINEAR, Speeds
from bench.cuda.steps import MAIN_MODEL, MOE_MODEL, TINY_MODEL, TINY_MODELS, Part, Step
from bench.cuda.weights import expert_bytes, random_model, streamed_bytes, token_parameters
from bench.models.synthetic import PRESETS
from bench.simt.emulator import COMPILER, ROOT, Emulator, compile_kernels
from kernels.cuda.compile import sources
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import GpuFault, KernelLaunch
from tests.kernels.cuda.fake_driver import FakeDriver, Status

KERNELS = "some kernels"
FIGURES = {
    "identical",
    "decode_b1_of_copy",
    "prefill_of_ceiling",
    "experts_decode_b1_of_copy",
    "experts_prefill_of_ceiling",
    "promote_vs_prefill_8k",
    "coexec_goodput",
    "coexec_goodput_of_part",
    "decode_b64_vs_llama",
}
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture(scope="module")
def pool() -> Iterator[kernels.Pool]:
    made = kernels.Pool(1)
    yield made
    made.close()


class StrictDriver(FakeDriver):
    """A driver that refuses what cannot be captured in a graph."""

    is_capturing = False

    def _cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[()]:
        self.is_capturing = True
        return super()._cuStreamBeginCapture(stream, mode)

    def _cuStreamEndCapture(self, stream: int) -> tuple[list[Any]]:
        self.is_capturing = False
        return super()._cuStreamEndCapture(stream)

    def _cuStreamSynchronize(self, stream: int) -> Any:
        assert not self.is_capturing
        return super()._cuStreamSynchronize(stream)

    def _cuMemAlloc(self, n_bytes: int) -> int | Status:
        assert not self.is_capturing
        return super()._cuMemAlloc(n_bytes)

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40


def driven(
    monkeypatch: pytest.MonkeyPatch, sources: list[Path], *, is_checked: bool = False
) -> CudaGpu:
    """A GPU through the driver, which an emulated one stands for."""
    library = compile_kernels(ROOT / "build/simt", sources, is_checked=is_checked)
    driver = StrictDriver(Emulator(library))
    monkeypatch.setattr(module.importlib, "import_module", {"cuda.bindings.driver": driver}.get)
    return CudaGpu(0, lambda target: {"all": target.encode()})


@needs_compiler
def test_ceilings_through_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ceilings.measure(driven(monkeypatch, [ceilings.SOURCE]), 1, tiny=True)
    # The driver says 6 ms for 5 replays of a copy of 64 KiB, which is read and written.
    assert found["copy_gbps"] == pytest.approx(2 * (1 << 16) / 0.0012 / 1e9, abs=1e-3)
    assert found["epilogue_gops"] == found["steps_added_gops"] > 0


@needs_compiler
def test_ceilings_of_many_blocks_stay_in_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "TINY_COPY_BYTES", 1 << 12)  # less than 5 blocks write
    device = driven(monkeypatch, [ceilings.SOURCE], is_checked=True)
    assert ceilings.measure(device, 5, tiny=True)["read_gbps"] > 0


@needs_compiler
def test_speeds_through_the_driver(monkeypatch: pytest.MonkeyPatch, pool: kernels.Pool) -> None:
    names = ("copy_gbps", "epilogue_gops", "floats_gops", "products_gops")
    speeds = Speeds(driven(monkeypatch, sources()), pool, dict.fromkeys(names, 1.0), tiny=True)
    rows, cols = TINY_LINEAR
    for kind in ("q4_0", "f16"):
        row = speeds.linear(kind)["20"]
        operations = 2.0 * rows * cols * 20
        assert row["gops"] == pytest.approx(operations / 0.0012 / 1e9, abs=0.01)
        assert row["of_ceiling"] == pytest.approx(operations / 0.0012 / 1e9, rel=1e-3)
    assert len(speeds.attend()) == 2


@needs_compiler
def test_speeds_of_experts_through_the_driver(
    monkeypatch: pytest.MonkeyPatch, pool: kernels.Pool
) -> None:
    names = ("copy_gbps", "epilogue_gops", "floats_gops")
    speeds = Speeds(driven(monkeypatch, sources()), pool, dict.fromkeys(names, 1.0), tiny=True)
    n_expert, n_used, n_embd, n_ff = TINY_EXPERTS
    rows = speeds.experts("q4_0")
    assert list(rows) == [f"{n} {what}" for n in (1, 20) for what in ("gated", "add", "select")]
    read = 2 * kernels.packed_bytes("q4_0", n_ff, n_embd)  # gate and up
    one, all_chosen = (rows[f"{tokens} gated"]["gbps"] * 0.0012e9 for tokens in (1, 20))
    values = [tokens * (n_used * n_ff * 4 + n_embd * 1.25) for tokens in (1, 20)]
    assert one == pytest.approx(n_used * read + values[0], abs=0.01 * 0.0012e9)
    assert all_chosen == pytest.approx(n_expert * read + values[1], abs=0.01 * 0.0012e9)


@needs_compiler
def test_a_step_reads_the_experts_that_are_chosen(
    monkeypatch: pytest.MonkeyPatch, pool: kernels.Pool
) -> None:
    shape = PRESETS["moe-tiny"]
    passes = Passes(driven(monkeypatch, sources()), pool, shape, TINY)
    assert passes.is_identical()
    assert passes.replays_agree()
    row = passes.decode(1.0)["2"]
    least, most = (shape.n_layer * n * shape.n_used for n in (1, 2))
    assert least <= row["experts"] <= most
    model = random_model(shape, pool)
    expert = sum(
        kernels.packed_bytes(shape.base, *of)
        for of in 2 * [(shape.n_ff, shape.n_embd)] + [(shape.n_embd, shape.n_ff)]
    )
    assert expert_bytes(model) == expert
    matrices = [t for t in model.weights.tensors() if isinstance(t, kernels.Matrix)]
    every = sum(m.bytes for m in matrices) - model.weights.embedding.bytes
    assert streamed_bytes(model) == every - shape.n_layer * shape.n_expert * expert
    banks = 3 * shape.n_layer * shape.n_used * shape.n_ff * shape.n_embd
    attention = 2 * (shape.n_head + shape.n_kv_head) * shape.head_dim
    others = shape.n_layer * shape.n_embd * (attention + shape.n_expert)
    assert token_parameters(model) == banks + others


@needs_compiler
def test_passes_through_the_driver(monkeypatch: pytest.MonkeyPatch, pool: kernels.Pool) -> None:
    passes = Passes(driven(monkeypatch, sources()), pool, PRESETS["tiny"], TINY)
    assert passes.is_identical()
    assert passes.replays_agree()
    row = passes.decode_on_device(1.0)["2"]
    assert (row["ms"], row["ms_in_turn"]) == (1.2, 1.2)


@needs_compiler
@pytest.mark.parametrize("name", [TINY_MODEL, *TINY_MODELS.values()])
def test_the_first_models_touch_no_memory_of_others(
    monkeypatch: pytest.MonkeyPatch, pool: kernels.Pool, name: str
) -> None:
    device = driven(monkeypatch, sources(), is_checked=True)
    assert Passes(device, pool, PRESETS[name], TINY).is_identical()


@needs_compiler
def test_seconds_of_an_emulated_gpu_are_those_of_the_clock() -> None:
    emulated = Emulator(compile_kernels(ROOT / "build/simt", sources(), is_checked=False))
    calls: list[int] = []
    assert seconds(emulated, lambda: calls.append(1), 5) > 0
    assert len(calls) == 2


def options(folder: Path, **changes: Any) -> argparse.Namespace:
    given = {"emulated": True, "quick": True, "seconds": 100.0, "threads": 1, "folder": folder}
    return argparse.Namespace(**given | changes)


@needs_compiler
def test_a_run_goes_on_where_the_last_one_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = State(tmp_path / "state-emulated-quick.json", gpu.key_of_kernels(), gpu.key_of_code())
    state.put("cases 0", {"cases": 2, "differences": []})
    cases = next(p for p in steps.parts(True, True) if p.name == "cases")
    Run(state, options(tmp_path)).part(cases)
    assert state.failed == {"cases 2": "build is missing: not yet"}
    state.put("build", {})
    Run(state, options(tmp_path, seconds=-1.0)).part(cases)
    assert state.failed == {"cases 2": LATE}
    state.failed.clear()
    absent = [Step(name, lambda _: {}) for name in ("absent", "next")]  # a process finds no such
    Run(state, options(tmp_path)).part(Part("some", [*cases.steps, *absent]))
    assert set(state.failed) == {"absent", "next"}
    printed = capsys.readouterr().out
    assert re.search(r"cases 2: \d+ s: {", printed)
    assert "cases 0: " not in printed
    kept = State(tmp_path / "state-emulated-quick.json", gpu.key_of_kernels(), gpu.key_of_code())
    assert kept.results == {
        "build": {},
        "cases 0": {"cases": 2, "differences": []},
        "cases 2": {"cases": 2, "differences": []},
    }
    assert kept.of_earlier_code == []
    path = tmp_path / "state-emulated-quick.json"
    assert State(path, gpu.key_of_kernels(), "other code").of_earlier_code == list(kept.results)
    assert not State(path, KERNELS, gpu.key_of_code()).results


def test_a_process_that_ends_badly_after_its_last_step_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ends.py"
    program.write_text(f"print('{BEGIN}a'); print('{DONE}{{}}'); raise SystemExit(3)")
    monkeypatch.setattr(gpu, "python_command", lambda *_: [sys.executable, str(program)])
    state = State(tmp_path / "state.json", KERNELS, KERNELS)
    Run(state, options(tmp_path)).part(Part("some", [Step("a", lambda _: {})], needs=()))
    assert state.results == {"a": {}}
    assert state.failed == {"some": "its process ended with 3"}


def test_what_a_step_lacked_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "finds.py"
    program.write_text(f"print('{BEGIN}a'); print('{DONE}{{\"rows\": 1}}')")
    monkeypatch.setattr(gpu, "python_command", lambda *_: [sys.executable, str(program)])
    state = State(tmp_path / "state.json", KERNELS, KERNELS)
    state.put("a", {"absent": "no source"})
    part = Part("some", [Step("a", lambda _: {})], needs=())
    Run(state, options(tmp_path)).part(part)  # an emulated GPU lacks it always
    assert state.results == {"a": {"absent": "no source"}}
    Run(state, options(tmp_path, emulated=False)).part(part)
    assert state.results == {"a": {"rows": 1}}


def test_a_step_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(f"import time; print('{BEGIN}a', flush=True); time.sleep(50)")
    monkeypatch.setattr(gpu, "python_command", lambda *_: [sys.executable, str(program)])
    monkeypatch.setattr(gpu, "KILL_AFTER_S", 0.0)
    state = State(tmp_path / "state.json", KERNELS, KERNELS)
    run = Run(state, options(tmp_path, emulated=False))
    run.part(Part("some", [Step("a", lambda _: {}, seconds=0.5)], needs=()))
    assert state.failed == {"a": "its process ended with -9 after 1 s"}


def test_the_figures_of_the_main_model_come_before_what_they_do_not_need() -> None:
    names = [part.name for part in steps.parts(emulated=False, quick=False)]
    first_parts = ["contact", "build", "first", "golden", "ceilings", MAIN_MODEL, "compiled"]
    assert names[: len(first_parts)] == first_parts
    assert names[-4:] == ["llama.cpp", *first.TOOLS]
    assert steps.LLAMA_BUILD_S < steps.LLAMA_S < 480 - 100


def test_a_figure_is_null_with_a_reason_until_it_is_measured() -> None:
    every = steps.parts(emulated=False, quick=False)
    results: dict[str, Any] = {}
    found = summary(results, every, {}, tiny=False)
    assert (found["identical"], found["cases"]) == (None, 0)
    assert set(found["reasons"]) == FIGURES
    for part in every:
        for step in part.steps:
            if step.name.startswith(("contact", "first ", "cases ", "compiled ")):
                results[step.name] = {"cases": 500, "differences": []}
            if step.name == "golden" or step.name.endswith("identical"):
                results[step.name] = {"identical": True}
    results["promotion"] = {"identical": True, "promote_vs_prefill": 7.0}
    for lanes, goodput in zip((*steps.SERVED, *steps.PARTED), (4.0, 6.0, 2.0, 2.5), strict=True):
        results[lanes[0]] = {"goodput": goodput, "is_bound_found": True}
    results["0.6b decode"] = {"64": {"tokens_per_s": 300.0}}
    rows = [{"pl": 1, "speed_tg": 50.0}, {"pl": 64, "speed_tg": 100.0}]
    results["llama.cpp"] = {"rows": rows}
    results[f"{MAIN_MODEL} decode"] = {"1": {"of_copy": 0.5}}
    results[f"{MAIN_MODEL} prefill"] = {"8192": {"not_measured": "about 99 s are expected"}}
    results[f"{MOE_MODEL} decode"] = {"1": {"of_copy": 0.25}}
    results[f"{MOE_MODEL} prefill"] = {"8192": {"of_ceiling": 0.75}}
    found = summary(results, every, {}, tiny=False)
    assert found == {
        "identical": True,
        "cases": 10_000,
        "decode_b1_of_copy": 0.5,
        "prefill_of_ceiling": None,
        "experts_decode_b1_of_copy": 0.25,
        "experts_prefill_of_ceiling": 0.75,
        "promote_vs_prefill_8k": 7.0,
        "coexec_goodput": 1.5,
        "coexec_goodput_of_part": 1.25,
        "decode_b64_vs_llama": 3.0,
        "reasons": {"prefill_of_ceiling": "about 99 s are expected"},
    }
    results["cases 500"]["differences"] = ["case 501"]
    results["co-execution gpu"]["goodput"] = 0.0
    results["llama.cpp"] = {"absent": "no source"}
    found = summary(results, every, {}, tiny=False)
    assert found["reasons"].pop("decode_b64_vs_llama") == "no source"
    results["co-execution part of the gpu"]["is_bound_found"] = False
    saturated = summary(results, every, {}, tiny=False)
    assert saturated["coexec_goodput_of_part"] is None
    assert "at the highest rate" in saturated["reasons"]["coexec_goodput_of_part"]
    assert found["identical"] is False
    assert found["coexec_goodput"] is None
    assert set(found["reasons"]) == {"identical", "prefill_of_ceiling", "coexec_goodput"}


def test_rows_of_llama_are_read(tmp_path: Path) -> None:
    program = tmp_path / "llama-batched-bench"
    row = {"pp": 8, "tg": 32, "pl": 64, "speed_pp": 2.5, "speed_tg": 4.5, "n_kv": 40}
    program.write_text(
        f"#!/bin/sh\necho main: n_kv_max = 40\necho '{json.dumps(row)}'\necho $* >&2\n"
    )
    program.chmod(0o755)
    rows = steps.run_llama(program, tmp_path / "model.gguf", 64, 8)
    assert rows == [{"pp": 8, "tg": 32, "pl": 64, "speed_pp": 2.5, "speed_tg": 4.5}] * 2


@needs_compiler
def test_a_launch_that_fails_names_its_kernel(pool: kernels.Pool) -> None:
    emulated = Emulator(compile_kernels(ROOT / "build/simt", sources(), is_checked=False))
    assert first.differences(emulated, pool, "embed q4_0", 1) == []
    launch = emulated._launch

    def broken(one: KernelLaunch) -> None:
        if one.kernel == "take_rows":
            has_failed.append(one.kernel)
            raise GpuFault("CUDA_ERROR_ILLEGAL_ADDRESS")
        launch(one)

    def free_unless_failed(address: int) -> None:
        if has_failed:  # as a device, which does nothing any more
            raise GpuFault("cuMemFree: CUDA_ERROR_ILLEGAL_ADDRESS")
        free(address)

    has_failed, free = list[str](), emulated._free
    emulated._launch = broken  # type: ignore[method-assign]
    emulated._free = free_unless_failed  # type: ignore[method-assign]
    with pytest.raises(GpuFault, match=r"^take_rows, grid \(3, 1, 1\), \d+ threads: CUDA_"):
        first.differences(emulated, pool, "embed q4_0", 1)


@needs_compiler
def test_the_first_contact_finds_launches_that_do_nothing(
    monkeypatch: pytest.MonkeyPatch, pool: kernels.Pool
) -> None:
    device = driven(monkeypatch, [first.CONTACT_SOURCE])
    assert first.contact(device, pool) == []
    monkeypatch.setattr(module.CudaGraph, "replay", lambda _: None)
    assert [found.split(":")[0] for found in first.contact(device, pool)] == [
        "launches that are captured",
        "launches that are replayed",
    ]


@pytest.mark.parametrize(("status", "said"), [(0, "0 errors"), (86, "Invalid"), (3, "no device")])
def test_what_a_sanitizer_finds_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, said: str
) -> None:
    monkeypatch.setattr(first, "TOOLKITS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert first.sanitized("memcheck") == {"absent": "no compute-sanitizer"}
    program = tmp_path / first.SANITIZER
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *"--report-api-errors no"*) ;; *) echo "= NOT_FOUND"; exit 86 ;; esac\n'
        f"echo '========= {said}'\nexit {status}\n"
    )
    program.chmod(0o755)
    if status == first.ERRORS_EXIT:
        with pytest.raises(RuntimeError, match=said):
            first.sanitized("memcheck")
    else:
        assert first.sanitized("memcheck") == {"said" if status == 0 else "absent": said}


@pytest.mark.parametrize("fault", ["raised", "differs", "late"])
def test_a_run_ends_with_the_first_kernel_that_is_wrong(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault: str,
) -> None:
    def part(self: Run, of: Part) -> None:
        begun.append(of.name)
        for step in of.steps:
            if fault == "raised" and step.name == "first linear q8_0":
                self._state.failed[step.name] = "GpuFault: linear_few_q8_0"
            elif fault == "late" and step.name == "first linear q8_0":
                self._state.failed[step.name] = LATE
            else:
                is_wrong = fault == "differs" and step.name == "first linear q8_0"
                found = ["linear_few_q8_0"] if is_wrong else []
                self._state.put(step.name, {"cases": 1, "differences": found})

    begun: list[str] = []
    monkeypatch.setattr(Run, "part", part)
    monkeypatch.setattr(gpu, "summary", lambda *_: {"identical": None})
    code = gpu.main([str(tmp_path), "--emulated", "--quick"])
    assert begun == ["contact", "build", "first"] if fault != "late" else len(begun) > 5
    if fault != "late":
        assert code == 1
        assert "first linear q8_0: " in capsys.readouterr().out
        result = json.loads((tmp_path / "result-emulated-quick.json").read_text())
        assert "linear_few_q8_0" in result["details"]["failed"]["golden"]


@needs_compiler
async def test_the_highest_rate_is_found_by_doubling_and_halving() -> None:
    tried: list[float] = []

    async def attained(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= 11.0 else 0.9

    assert await highest(attained, 4.0, 2, 100.0) == 10.0
    assert tried == [4.0, 8.0, 16.0, 12.0, 10.0]
    assert await highest(attained, 4.0, 2, 8.0) == 8.0  # no higher one can be tried
    assert await highest(attained, 32.0, 0, 100.0) == 0.0


def test_an_answer_is_good_within_both_targets_of_its_class() -> None:
    targets = SlaConfig().interactive  # 500 ms, 50 ms
    for times, good in (
        ([0.4, 0.44], True),
        ([0.6, 0.61], False),
        ([0.4, 0.5], False),
        ([], False),
    ):
        assert is_good(Stream(times=times), targets, 1.0) is good
    assert is_good(Stream(times=[0.6, 0.61]), targets, 2.0)


def test_both_engines_of_co_execution_get_the_same_requests() -> None:
    asked = arrivals(4.0, REAL)
    assert asked == arrivals(4.0, REAL)
    assert len(asked) == 32
    assert {one.sla for one in asked} == set(CLASSES)
    assert max(one.context for one in asked) == CONTEXT_MAX


@needs_compiler
def test_a_model_that_computes_other_numbers_is_found(
    monkeypatch: pytest.MonkeyPatch, pool: kernels.Pool
) -> None:
    emulated = Emulator(compile_kernels(ROOT / "build/simt", sources(), is_checked=False))
    passes = Passes(emulated, pool, PRESETS["tiny"], TINY)
    original = emulated.copy_in

    def flip(address: int, array: np.ndarray[Any, np.dtype[Any]]) -> None:
        changed = array.copy()
        changed.reshape(-1).view(np.uint8)[:1] ^= 1
        original(address, changed)

    monkeypatch.setattr(emulated, "copy_in", flip)
    assert not passes.is_identical()


@needs_compiler
@pytest.mark.skipif(find_library("cuda") is not None, reason="there may be a GPU")
def test_nothing_is_built_on_a_machine_without_a_gpu(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "bench/gpu.sh"), str(tmp_path / "results")]
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 1
    said = [line for line in done.stdout.splitlines() if line.startswith("  a GPU, its driver")]
    assert len(said) == 1
    assert "building" not in done.stdout
    assert not (tmp_path / "results").exists()


@needs_compiler
@pytest.mark.slow
def test_the_script_reports_every_figure(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "bench/gpu.sh"), str(tmp_path), "--emulated", "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert result["identical"] is True
    # The emulator keeps every promise, or none, and has no llama.cpp to be compared with.
    beyond = {"coexec_goodput", "coexec_goodput_of_part", "decode_b64_vs_llama"}
    assert result["reasons"].keys() <= beyond
    assert not [name for name in FIGURES - beyond if result[name] is None]
    assert json.loads((tmp_path / "result-emulated-quick.json").read_text())["result"] == result
