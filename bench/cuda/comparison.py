"""Random cases of all GPU kernels against the CPU, planted faults, and what the compiler made.

`identical`: cases with the bits of the CPU. `planted_caught`: of the results with one bit changed
on their way back, and of the kernels with a fault that the emulator runs, those that were found.
`targets_compiled`: targets for which every source compiles, without a float operation that it
does not write.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

import kernels
from bench import report
from bench.cuda import faulty
from bench.cuda.assembly.ptx import faults
from bench.cuda.cases import Differs, cases
from bench.cuda.gpus import BUILD, open_gpu
from bench.simt import planted
from bench.simt.emulator import Emulator, compile_kernels
from kernels.cuda.compile import TARGETS, CompileError, CompileUnit, compile_unit, units
from kernels.cuda.gpu import Gpu

EMULATED, QUICK, ON_DEVICE = 300, 30, 10_000  # cases
FLIPPED = (
    "quantise",
    "attention",
    "sample",
    "embed q4_0",
    "select experts",
)  # cases that compare all they copy first


class Flipping:
    """Another GPU, with one bit of every result changed."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def copy_out(self, address: int, array: NDArray[np.generic]) -> None:
        """What lies there, but for a bit."""
        self._gpu.copy_out(address, array)
        array.reshape(-1).view(np.uint8)[0] ^= 1


def compare_cases(gpu: Gpu, pool: kernels.Pool, numbers: Iterable[int]) -> list[str]:
    """The cases of these numbers, of every kernel in turn: what differed."""
    table, differences = list(cases().items()), []
    for i in numbers:
        name, case = table[i % len(table)]
        if isinstance(gpu, Emulator):
            gpu.seed = i
        try:
            case(gpu, pool, np.random.default_rng([i, *name.encode()]))
        except Differs as difference:
            differences.append(f"case {i}, {name}: {difference}")
    return differences


def plant(gpu: Gpu, pool: kernels.Pool) -> dict[str, bool]:
    """Whether each planted fault was found."""
    found: dict[str, bool] = {}
    for name in FLIPPED:
        try:
            cases()[name](cast(Gpu, Flipping(gpu)), pool, np.random.default_rng(1))
            found[f"one bit of {name}"] = False
        except Differs:
            found[f"one bit of {name}"] = True
    if isinstance(gpu, Emulator):
        one = Emulator(compile_kernels(BUILD / "simt", [planted.SOURCE]))
        for name in planted.PLANTED:
            found[name] = all(planted.is_caught(one, name, seed) for seed in planted.SEEDS)
        of_experts = faulty.compiled(BUILD / "simt")
        for name in faulty.FAULTS:
            found[name] = faulty.is_found(of_experts, pool, name)
    return found


def compile_targets(targets: Sequence[str]) -> dict[str, list[str]]:
    """What is wrong with each target."""

    def wrong(unit: CompileUnit, target: str) -> list[str]:
        try:
            made = compile_unit(unit, target)
        except CompileError as error:
            return [str(error)]
        return faults(made.ptx, made.report)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = {t: [pool.submit(wrong, unit, t) for unit in units()] for t in targets}
        return {t: [fault for one in of for fault in one.result()] for t, of in made.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench cuda", description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="on an emulated GPU")
    parser.add_argument("--cases", type=int, help=f"default: {EMULATED}, on a GPU {ON_DEVICE}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} cases, one target")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    gpu, device = open_gpu(options.emulated, units())
    count = options.cases or (
        QUICK if options.quick else EMULATED if options.emulated else ON_DEVICE
    )
    pool = kernels.Pool(len(os.sched_getaffinity(0)))
    print(f"{count} cases on {device['name']}", flush=True)
    differences = compare_cases(gpu, pool, range(count))
    caught = plant(gpu, pool)
    compiled = compile_targets(("sm_90",) if options.quick else TARGETS)
    missed = [f"not found: {name}" for name, is_found in caught.items() if not is_found]
    wrong = [fault for found in compiled.values() for fault in found]
    for line in (*differences, *missed, *wrong):
        print(line)
    result = {
        "cases": count,
        "identical": count - len(differences),
        "planted": len(caught),
        "planted_caught": sum(caught.values()),
        "targets_compiled": sum(not found for found in compiled.values()),
    }
    details: Mapping[str, Any] = {"device": device, "planted": caught, "compiled": compiled}
    report.finish(result, details=details, json_path=options.json)
    return 1 if differences or missed or wrong else 0
