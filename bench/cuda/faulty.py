"""Kernels of experts and of recurrent mixers with one fault each, and whether the emulator or
the comparison finds it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

import kernels
from bench.cuda.cases import Case, Differs, experts_case
from bench.cuda.cases.recurrent import delta_net_case, mamba2_case, short_conv_case
from bench.simt.emulator import KERNELS, Emulator, EmulatorFault, compile_kernels
from kernels.cuda.gpu import Gpu

KIND = "q4_0"
ONE_A_KIND, KEPT = "QUANTISED(", f"QUANTISED({KIND})"  # lines of linear.cu
INCLUDED = re.compile(r"^#include .*\n", re.MULTILINE)
DEFINED = re.compile(r"^#define (\w+)", re.MULTILINE)
RECURRENT = "recurrent.cu"
SOURCES = "experts.cu", "linear.cu", "rows.cu", RECURRENT  # that the cases need
# Tokens, experts, experts of a token: of one chunk, and of several.
COUNTS = (3, 5, 2), (40, 6, 3), (70, 4, 2)
SEEDS = 3
RECURRENT_SEEDS = 6
LAST = "    for (int i = gpu::thread(); i < n; i += gpu::threads())\n        to.order["


class Fault(NamedTuple):
    """A text of a source, and what stands there instead."""

    source: str
    right: str
    wrong: str


FAULTS = {
    "the matrix of another expert, few": Fault(
        "linear.cu", "expert} * all_tiles + (own_tile", "expert} * (all_tiles - 1) + (own_tile"
    ),
    "the matrix of another expert, many": Fault(
        "linear.cu", "expert} * tiles + (has_tile", "expert} * (tiles - 1) + (has_tile"
    ),
    "experts summed from the last one": Fault(
        "experts.cu",
        "for (int j = 0; j < n_used; j++)\n        sum = ca::add_expert",
        "for (int j = n_used - 1; j >= 0; j--)\n        sum = ca::add_expert",
    ),
    "experts of a token from the last one": Fault(
        "experts.cu",
        "gpu::count_bits(chosen & ((1u << gpu::lane()) - 1u))",
        "gpu::count_bits(chosen >> gpu::lane()) - 1",
    ),
    "equal logits by the higher id": Fault("experts.cu", "&& i > last)", "&& i < last)"),
    "pairs of an expert at one place": Fault("experts.cu", "+ ranks[i]]", "+ 0 * ranks[i]]"),
    "each chunk sorted as the first one": Fault(
        "experts.cu", "= first + earlier;", "= first + 0 * earlier;"
    ),
    "no barrier before pairs are placed": Fault("experts.cu", "    gpu::barrier();\n" + LAST, LAST),
    "no barrier before pairs are counted": Fault(
        "experts.cu", "    gpu::barrier();\n    const int count", "    const int count"
    ),
    "no barrier before a token's sum": Fault("experts.cu", "    gpu::warp_barrier();\n", ""),
    "portions that are not there": Fault(
        "experts.cu", "i < to.portions_max && has_portions;", "i < 0;"
    ),
    "a portion with a pair of the next one": Fault(
        "experts.cu", "start, columns, static", "start, columns + 1, static"
    ),
    "chains added crosswise": Fault(
        RECURRENT, "ca::add_rn(sum[2 * c], sum[2 * c + 1])", "ca::add_rn(sum[c], sum[c + n])"
    ),
    "the key of a neighbour": Fault(
        RECURRENT, "head / layer.key_run %", "(head / layer.key_run + 1) %"
    ),
    "inputs of the entry before": Fault(
        RECURRENT, "if (t + j >= before)", "if (token + j >= before)"
    ),
    "the oldest input kept": Fault(
        RECURRENT, "left[(j - 1) * stride] = x[j]", "left[(j - 1) * stride] = x[j - 1]"
    ),
    "a token that is not there yet": Fault(
        RECURRENT, "copies_wait<RING - 3>", "copies_wait<RING - 2>"
    ),
    "no barrier between tokens": Fault(
        RECURRENT,
        "        gpu::barrier();  // token t + 1 is there",
        "        // token t + 1 is there",
    ),
    "the state before the last token": Fault(
        RECURRENT, "answered[other * CHAINS_MAX", "answered[half * CHAINS_MAX"
    ),
    "half a block of columns taken for a whole one": Fault(
        RECURRENT, "IS_DELTA || column < head_dim;", "IS_DELTA || column >= 0;"
    ),
    "B taken for C": Fault(
        RECURRENT, "IS_DELTA ? 0 : first_key + keys", "IS_DELTA ? 0 : first_key"
    ),
    "the norm of another group": Fault(RECURRENT, "factor, norm[first + k]", "factor, norm[k]"),
    "the skip of another head": Fault(RECURRENT, "d[(first + k) / head_dim]", "d[k / head_dim]"),
    "a product without its gate": Fault(
        RECURRENT, "ca::mul_rn(b[i * stride], x[i * stride])", "float(x[i * stride])"
    ),
}


class Replaced:
    """Another GPU, some of whose kernels have a prefix in their names."""

    def __init__(self, gpu: Emulator, prefix: str) -> None:
        self._gpu, self._prefix = gpu, prefix
        self._names = set(gpu.kernels())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)

    def launch(self, kernel: str, *launch: Any) -> None:
        """Run the kernel with the prefix, if there is one."""
        replaced = self._prefix + kernel
        self._gpu.launch(replaced if replaced in self._names else kernel, *launch)


def compiled(folder: Path) -> Emulator:
    """A GPU with the kernels as they are, and with each fault, by the prefix of its number."""
    written = folder / "faulty"
    written.mkdir(parents=True, exist_ok=True)
    sources = [_written(name, written) for name in SOURCES]
    return Emulator(compile_kernels(folder, sources))


def is_found(gpu: Emulator, pool: kernels.Pool, name: str | None) -> bool:
    """Whether a fault of FAULTS is found in one of a few cases; None: a fault, where there is none.
    gpu: of `compiled`."""
    faulty = cast(Gpu, Replaced(gpu, "" if name is None else _prefix(name)))
    for seed, case in _cases(None if name is None else FAULTS[name].source):
        gpu.seed = seed
        try:
            case(faulty, pool, np.random.default_rng(seed))
        except (Differs, EmulatorFault):
            return True
    return False


def _cases(source: str | None) -> Iterator[tuple[int, Case]]:
    """Those that use a source, or all."""
    if source != RECURRENT:
        for seed in range(SEEDS):
            for counts in COUNTS:
                yield seed, partial(experts_case, kind=KIND, counts=counts)
    if source in (RECURRENT, None):
        for seed in range(RECURRENT_SEEDS):
            yield seed, delta_net_case
            yield seed, mamba2_case
            yield seed, short_conv_case


def _prefix(name: str) -> str:
    return f"fault{list(FAULTS).index(name)}_"


def _written(source: str, folder: Path) -> Path:
    """A source as it is and with each of its faults, each in a namespace of its own: reading the
    headers is half of what a file takes."""
    copies = {"": (KERNELS / source).read_text()}
    includes = "".join(INCLUDED.findall(copies[""]))
    for name, fault in FAULTS.items():
        if fault.source == source:
            if (count := copies[""].count(fault.right)) != 1:
                raise ValueError(f"{source} has {count} times {fault.right!r}")
            copies[_prefix(name)] = copies[""].replace(fault.right, fault.wrong)
    text = includes
    for prefix, copy in copies.items():
        text += f"namespace {prefix or 'right'} {{\n{_kept(copy, prefix)}}}\n"
    path = folder / source
    path.write_text(text)
    return path


def _kept(text: str, prefix: str) -> str:
    """Kernels with a prefix in their names; of those of quantised matrices, the ones of KIND."""
    text = re.sub(r"\b(KERNEL|KERNEL_AT_ONCE)\(", rf"\1({prefix}", INCLUDED.sub("", text))
    lines = [
        line
        for line in text.splitlines(keepends=True)
        if not line.startswith(ONE_A_KIND) or line.startswith(KEPT)
    ]
    defined = [f"#undef {name}\n" for name in DEFINED.findall(text)]  # with the prefix
    return "".join([*lines, *defined])
