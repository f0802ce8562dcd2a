"""`make check-arm`: the kernels built for aarch64 give the bits of this machine, on every level.

The program `print_golden` is built twice, for this machine and by a cross compiler for aarch64. The
second one runs under qemu, once per level, and must print the hashes of the first one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64", "qemu-aarch64-static")
LIBRARIES = "/usr/aarch64-linux-gnu"
# Processors of qemu, "max" with every extension, and the levels that the kernels must find on them.
LEVELS = {
    "cortex-a57": ["scalar"],
    "neoverse-n1": ["scalar", "neon-dotprod"],
    "max": ["scalar", "neon-dotprod", "neon-i8mm"],
}
BEST = "max"


def missing_packages(find: Callable[[str], str | None] = shutil.which) -> list[str]:
    """Debian packages that the check needs and this machine does not have."""
    missing = [] if find(COMPILER) else ["g++-aarch64-linux-gnu"]
    return missing if any(map(find, EMULATORS)) else [*missing, "qemu-user"]


def sections(text: str) -> dict[str, list[str]]:
    """The lines "HASH NAME" of each level that `print_golden` printed."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("level "):
            found[line.removeprefix("level ")] = lines = []
        else:
            lines.append(line)
    return found


def differences(expected: Sequence[str], found: Sequence[str]) -> list[str]:
    """Names of the records whose hashes differ, and a line for records that are missing."""
    names = [a.partition(" ")[2] for a, b in zip(expected, found, strict=False) if a != b]
    if len(expected) != len(found):
        names.append(f"({len(found)} records instead of {len(expected)})")
    return names


def output_of(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def build_here(program: str = "print_golden") -> Path:
    """The program for this machine, from the objects of `make native`."""
    cmake = f"{sys.prefix}/bin/cmake"
    output_of([cmake, "--build", f"{ROOT}/build/native", "--target", program])
    return ROOT / "build/native" / program


def build_for_arm() -> Path:
    """The program for aarch64; the compiler's warnings are errors."""
    folder, cmake = ROOT / "build/arm", f"{sys.prefix}/bin/cmake"
    settings = {
        "CMAKE_MAKE_PROGRAM": f"{sys.prefix}/bin/ninja",
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": COMPILER,
        "BATCHENGINE_MODULE": "OFF",
    }
    defined = [f"-D{name}={value}" for name, value in settings.items()]
    output_of([cmake, "-S", f"{ROOT}/kernels", "-G", "Ninja", "-B", str(folder), *defined])
    subprocess.run([cmake, "--build", str(folder)], check=True)
    return folder / "print_golden"


def main() -> int:
    if missing := missing_packages():
        print("check-arm needs these Debian packages: apt-get install", *missing)
        return 1
    here, arm = str(build_here()), str(build_for_arm())
    emulator = next(filter(None, map(shutil.which, EMULATORS)))

    def on(processor: str, *levels: str) -> str:
        return output_of([emulator, "-L", LIBRARIES, "-cpu", processor, arm, *levels])

    for processor, levels in LEVELS.items():
        if (found := on(processor).split()) != levels:
            print(f"levels found on {processor}: {found}, not {levels}")
            return 1
    expected = sections(output_of([here, "scalar"]))["scalar"]
    levels = LEVELS[BEST]
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda level: sections(on(BEST, level))[level], levels))
    wrong = False
    for level, found in zip(levels, outputs, strict=True):
        differing = differences(expected, found)
        print(f"{level}: {len(found)} records, {len(differing)} differ", *differing[:20])
        wrong = wrong or bool(differing)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
