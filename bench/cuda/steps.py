"""The steps of `bench/gpu.sh`, in parts: what each measures, in which order.

A step takes a `Place` and returns what JSON can hold. The steps of a part share what its first one
has made, and run in one process, or in several if the part has more `jobs`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import kernels
from bench.cuda import ceilings, first
from bench.cuda.assembly.ptx import faults
from bench.cuda.cases import cases
from bench.cuda.comparison import compare_cases
from bench.cuda.gpus import BUILD, open_gpu
from bench.cuda.passes import REAL, TINY, Passes
from bench.cuda.serving import goodput, promotion
from bench.cuda.serving.engines import PART_MULTIPROCESSORS, make_site, scratch
from bench.cuda.speed import Speeds
from bench.models.synthetic import PRESETS
from kernels.cuda.compile import CompileUnit, compile_unit, units
from kernels.cuda.gpu import Gpu

CASES, CHUNK = 10_000, 500  # random cases, and those of a step
EMULATED_CASES, EMULATED_CHUNK = 300, 100
QUICK_CASES, QUICK_CHUNK = 4, 2
MODELS = ("0.6b", "8b", "27b", "30b-a3b")
MAIN_MODEL, MAIN_LENGTH = "8b", 8192  # of the RESULT line
MOE_MODEL = "30b-a3b"  # with experts
RECURRENT_MODEL = "qwen35moe-35b-a3b"  # with experts and recurrent layers
TINY_MODEL = "tiny"
TINY_MODELS = {MOE_MODEL: "moe-tiny", RECURRENT_MODEL: "qwen35moe-tiny"}
EXPERT_KINDS = ("q4_0", "q4_k", "q6_k", "mxfp4")  # of common files

SERVED = [(f"co-execution {lanes}", lanes) for lanes in goodput.LANES]
PARTED = [(f"co-execution {lanes}", lanes) for lanes in goodput.PARTED]
LLAMA_SOURCE, LLAMA_BUILD_S = "LLAMA_SOURCE", 300
LLAMA_S = 360.0  # of the 480 of a run; a native module that is built takes up to 100
LLAMA_PROJECT = """cmake_minimum_required(VERSION 3.20)
project(measured C CXX)
add_subdirectory("${LLAMA}" llama.cpp)
add_subdirectory("${LLAMA}/tools/batched-bench" batched-bench)
"""  # without tests, examples, servers and their sources
LLAMA_TOOL, LLAMA_STEP, LLAMA_MODEL, LLAMA_BATCH = "llama-batched-bench", "llama.cpp", "0.6b", 64
LLAMA_CONTEXT, LLAMA_TOKENS = 1024, 32  # the context is that of REAL
CUDA_PACKAGES, CUBLAS = "cu13", ("cublas", "cublasLt")  # of NVIDIA's Python packages

Result = dict[str, Any]


class Place:
    """What a process of a part runs its steps on. `known`: results of earlier parts, by step."""

    def __init__(
        self, emulated: bool, quick: bool, threads: int, known: Mapping[str, Result]
    ) -> None:
        self.emulated, self.tiny, self.known = emulated, emulated or quick, known
        self._threads = threads
        self._passes: tuple[str, Passes] | None = None

    @cached_property
    def pool(self) -> kernels.Pool:
        return kernels.Pool(self._threads)

    @cached_property
    def opened(self) -> tuple[Gpu, dict[str, Any]]:
        """The GPU with the kernels of the product, and what it is."""
        return open_gpu(self.emulated, units(), is_checked=False)

    @property
    def gpu(self) -> Gpu:
        return self.opened[0]

    @cached_property
    def speeds(self) -> Speeds:
        return Speeds(self.gpu, self.pool, self.known["ceilings"], self.tiny)

    def passes(self, model: str) -> Passes:
        """The forward passes of a model, which one process has at a time."""
        if self._passes is None or self._passes[0] != model:
            tiny = TINY_MODELS.get(model, TINY_MODEL)
            preset = PRESETS[tiny if self.tiny else model]
            sizes = TINY if self.tiny else REAL
            self._passes = model, Passes(self.gpu, self.pool, preset, sizes)
        return self._passes[1]


@dataclass(frozen=True, slots=True)
class Step:
    """One figure or several. seconds: how long it may take on a GPU."""

    name: str
    run: Callable[[Place], Result]
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """Steps in order; jobs: processes that share them; is_gate: the run ends if one of them fails
    or finds a difference, as all of it is measured again with other kernels."""

    name: str
    steps: list[Step]
    jobs: int = 1
    needs: tuple[str, ...] = ("build",)  # steps of earlier parts
    is_gate: bool = False


def touch(place: Place) -> Result:
    """Whether the device, its driver and the compiler work, with the kernels of one source."""
    started = time.perf_counter()
    gpu, device = open_gpu(place.emulated, [CompileUnit(first.CONTACT_SOURCE)], is_checked=False)
    opened_s = time.perf_counter() - started
    return {
        "device": device,
        "seconds": round(opened_s, 2),
        "differences": first.contact(gpu, place.pool),
    }


def build(place: Place) -> Result:
    """Compiles the kernels of a GPU, or takes those of an earlier run."""
    started = time.perf_counter()
    _, device = place.opened
    return {"device": device, "seconds": round(time.perf_counter() - started, 2)}


def check_compiled(place: Place, unit: CompileUnit) -> Result:
    """What the compiler of this machine made of a source, as the tests check it elsewhere."""
    if place.emulated:
        return {"absent": "the emulator has no compiler of a GPU"}
    made = compile_unit(unit, place.gpu.facts.target)
    return {"differences": faults(made.ptx, made.report)}


def run_first(place: Place, name: str) -> Result:
    """A few cases of one name, each launch on its own."""
    seeds = 1 if place.tiny else first.SEEDS
    return {"cases": seeds, "differences": first.differences(place.gpu, place.pool, name, seeds)}


def run_first_model(place: Place) -> Result:
    """Two steps of tiny models, launched as those of a lane."""
    names = TINY_MODEL, *TINY_MODELS.values()
    made = {name: Passes(place.gpu, place.pool, PRESETS[name], TINY) for name in names}
    differs = [name for name, passes in made.items() if not passes.is_identical()]
    return {"differences": [f"{name}: logits or rows" for name in differs]}


def sanitize(place: Place, tool: str) -> Result:
    """The same cases under a tool that looks at every access."""
    return {"absent": "the emulator does it"} if place.emulated else first.sanitized(tool)


def golden(place: Place) -> Result:
    """The golden hash of each instruction set of the CPU, against the one of this version."""
    from tests.kernels.test_arith_id import ARITH_ID

    level, found = kernels.isa(), dict[str, bool]()
    for name in kernels.isa_levels():
        kernels.set_isa(name)
        found[name] = kernels.arith_id(place.pool) == ARITH_ID
    kernels.set_isa(level)
    faults = kernels.arithmetic_faults(place.pool)
    return {"levels": found, "faults": faults, "identical": all(found.values()) and not faults}


def compare(place: Place, numbers: range) -> Result:
    """Random cases of these numbers on the GPU and on the CPU."""
    differences = compare_cases(place.gpu, place.pool, numbers)
    return {"cases": len(numbers), "differences": differences}


def measure_ceilings(place: Place) -> Result:
    """The ceilings, on a GPU with the kernels for them alone."""
    gpu, device = open_gpu(place.emulated, [CompileUnit(ceilings.SOURCE)], is_checked=False)
    return dict(ceilings.measure(gpu, int(device["multiprocessors"]), place.tiny))


def measure_part(place: Place) -> Result:
    """The ceilings of the part of the GPU that co-execution is measured with, too."""
    gpu, device = open_gpu(
        place.emulated,
        [CompileUnit(ceilings.SOURCE)],
        is_checked=False,
        multiprocessors_max=PART_MULTIPROCESSORS,
    )
    count = int(device["multiprocessors"])
    return {"multiprocessors": count, **ceilings.measure(gpu, count, place.tiny)}


def model_steps(model: str) -> list[Step]:
    """Decoding and prefill of one model."""
    return [
        Step(f"{model} identical", lambda p: {"identical": p.passes(model).is_identical()}),
        Step(
            f"{model} replays identical", lambda p: {"identical": p.passes(model).replays_agree()}
        ),
        Step(f"{model} decode", lambda p: p.passes(model).decode(copy_gbps(p.known))),
        Step(f"{model} prefill", lambda p: p.passes(model).prefill(p.known["ceilings"]), 100.0),
        Step(
            f"{model} decode on the device",
            lambda p: p.passes(model).decode_on_device(copy_gbps(p.known)),
        ),
    ]


def promote(place: Place) -> Result:
    """Moves of a session between the CPU and the GPU."""
    return asyncio.run(promotion.measure(make_site(place.emulated, place.tiny)))


def serve(place: Place, lanes: str) -> Result:
    """The goodput of an engine with these lanes."""
    return asyncio.run(goodput.measure(make_site(place.emulated, place.tiny), lanes))


def cublas_options(include: Path) -> list[str]:
    """Where llama.cpp finds cuBLAS of a Python package, whose headers `include` links to."""
    found = importlib.util.find_spec("nvidia")
    for place in found.submodule_search_locations or () if found else ():
        folder = Path(place) / CUDA_PACKAGES
        libraries = {name: sorted(folder.glob(f"lib/lib{name}.so*")) for name in CUBLAS}
        if all(libraries.values()):
            include.mkdir(exist_ok=True)
            for header in folder.glob("include/cublas*.h"):
                (include / header.name).unlink(missing_ok=True)
                (include / header.name).symlink_to(header)
            flags = [f"-DCMAKE_{language}_FLAGS=-I{include}" for language in ("CUDA", "CXX")]
            return flags + [f"-DCUDA_{name}_LIBRARY={of[0]}" for name, of in libraries.items()]
    return []


def compare_with_llama(place: Place) -> Result:
    """Speeds of llama.cpp on this GPU, compiled from the source that LLAMA_SOURCE names."""
    source = os.environ.get(LLAMA_SOURCE)
    if not source:
        return {"absent": f"{LLAMA_SOURCE} names no source of llama.cpp"}
    build = BUILD / "gpu-llama"
    project = build / "project"
    project.mkdir(parents=True, exist_ok=True)
    (project / "CMakeLists.txt").write_text(LLAMA_PROJECT)
    configure = ["cmake", "-S", str(project), "-B", str(build), "-G", "Ninja"]
    configure += [f"-DLLAMA={source}", "-DLLAMA_BUILD_COMMON=ON"]
    configure += ["-DGGML_CUDA=ON", "-DGGML_CUDA_NO_VMM=ON"]
    configure += ["-DCMAKE_CUDA_ARCHITECTURES=native", *cublas_options(build / "include")]
    subprocess.run(configure, check=True, stdout=sys.stderr)
    make = ["timeout", "--signal=KILL", str(LLAMA_BUILD_S), "cmake", "--build", str(build)]
    if subprocess.run([*make, "--target", LLAMA_TOOL], stdout=sys.stderr).returncode:
        raise RuntimeError(f"llama.cpp does not build in {LLAMA_BUILD_S} s; a next run goes on")
    with scratch(make_site(place.emulated, place.tiny)) as (_, model):
        rows = run_llama(build / "batched-bench" / LLAMA_TOOL, model, LLAMA_BATCH, LLAMA_CONTEXT)
    return {"model": LLAMA_MODEL, "rows": rows}


def run_llama(program: Path, model: Path, batch: int, context: int) -> list[Result]:
    """What llama.cpp computes a second: prompts of `context` tokens (`speed_pp`) and tokens behind
    them (`speed_tg`) by prompts at once (`pl`), and one prompt that is eight times as long."""
    rows: list[Result] = []
    for prompt, counts in (
        (context, [n for n in (1, 16, 64) if n <= batch]),
        (8 * context, [1]),  # in a run of its own: each prompt has an equal share of the KV
    ):
        run = [str(program), "-m", str(model), "-ngl", "99", "--output-format", "jsonl"]
        run += ["-c", str(max(counts) * (prompt + LLAMA_TOKENS)), "-npp", str(prompt)]
        run += ["-ntg", str(LLAMA_TOKENS), "-npl", ",".join(map(str, counts))]
        printed = subprocess.run(run, check=True, capture_output=True, text=True).stdout
        found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
        rows += [
            {key: row[key] for key in ("pp", "tg", "pl", "speed_pp", "speed_tg")} for row in found
        ]
    return rows


def copy_gbps(known: Mapping[str, Result]) -> float:
    """The rate of a copy, once it is measured."""
    return float(known["ceilings"]["copy_gbps"])


def main_rows(tiny: bool) -> tuple[str, str]:
    """The rows of decoding and prefill that the RESULT line has."""
    return ("1", str(MAIN_LENGTH)) if not tiny else (str(TINY.batches[0]), str(TINY.lengths[0]))


def parts(emulated: bool, quick: bool) -> list[Part]:
    """All parts, in order."""
    count, chunk = (EMULATED_CASES, EMULATED_CHUNK) if emulated else (CASES, CHUNK)
    count, chunk = (QUICK_CASES, QUICK_CHUNK) if quick else (count, chunk)
    chunks = [range(first, min(first + chunk, count)) for first in range(0, count, chunk)]
    jobs = 2 if emulated else max(1, min(8, len(os.sched_getaffinity(0)) // 2))
    kinds = kernels.KINDS if not quick else kernels.KINDS[:1]
    linear = [Step(f"linear {k}", lambda p, k=k: dict(p.speeds.linear(k)), 30.0) for k in kinds]
    attend = Step("attend", lambda p: dict(p.speeds.attend()))
    banks = EXPERT_KINDS if not quick else EXPERT_KINDS[:1]
    experts = [Step(f"experts {k}", lambda p, k=k: dict(p.speeds.experts(k)), 30.0) for k in banks]
    models = MODELS if not quick else (MAIN_MODEL, MOE_MODEL)
    each = [Step(f"first {name}", partial(run_first, name=name), 30.0) for name in cases()]
    each.append(Step("first model", run_first_model))
    longest_s = first.SANITIZED_S + 10.0

    def of_model(name: str) -> Part:
        return Part(name, model_steps(name), needs=("build", "ceilings"))

    return [
        Part("contact", [Step("contact", touch)], needs=(), is_gate=True),
        Part("build", [Step("build", build, 150.0)], needs=(), is_gate=True),
        Part("first", each, is_gate=True),
        Part("golden", [Step("golden", golden)], needs=()),
        Part("ceilings", [Step("ceilings", measure_ceilings)]),
        of_model(MAIN_MODEL),
        Part(  # as long as `build`, and what it looks for is rare
            "compiled",
            [
                Step(f"compiled {unit.name}", partial(check_compiled, unit=unit), 90.0)
                for unit in units()
            ],
            jobs=jobs,
            is_gate=True,
        ),
        Part(
            "cases",
            [Step(f"cases {c.start}", partial(compare, numbers=c), 90.0) for c in chunks],
            jobs=1 if quick else jobs,
        ),
        Part("kernels", [*linear, *experts, attend], needs=("build", "ceilings")),
        *(of_model(name) for name in models if name != MAIN_MODEL),
        Part("promotion", [Step("promotion", promote, 150.0)]),
        *(Part(name, [Step(name, partial(serve, lanes=lanes), 300.0)]) for name, lanes in SERVED),
        Part("ceilings of a part", [Step("ceilings of a part", measure_part)]),
        *(Part(name, [Step(name, partial(serve, lanes=lanes), 300.0)]) for name, lanes in PARTED),
        of_model(RECURRENT_MODEL),
        Part(LLAMA_STEP, [Step(LLAMA_STEP, compare_with_llama, LLAMA_S)]),
        *(
            Part(tool, [Step(tool, partial(sanitize, tool=tool), longest_s)])
            for tool in first.TOOLS
        ),
    ]
