"""Everything that a GPU is measured for, in short runs that continue one another.

    python -m bench.cuda.gpu FOLDER [--emulated] [--quick] [--seconds 480] [--target sm_90]

`bench/gpu.sh` builds the native module and calls it. First the kernels of one source run, within
seconds (`contact`), then every kernel on small shapes: if one fails, or differs from the CPU, the
run names it and ends. FOLDER/state-DEVICE.json keeps the result of each step
(bench/cuda/steps.py), and a later run does those that lack, that failed, or that were measured with
other kernels or another GPU lane. FOLDER/result-DEVICE.json has all of
them, and names those that were measured before any other code changed (`of_earlier_code`). No step
begins that might end after `--seconds`; the last line is the RESULT so far, with a reason for each
figure that is null:
`identical` (golden hashes, random cases, whole models and sessions that move), `cases`,
`decode_b1_of_copy` and `prefill_of_ceiling` (of the 8B shape; prefill of 8,192 tokens),
`experts_decode_b1_of_copy` and `experts_prefill_of_ceiling` (the same of the 30B-A3B shape, of the
experts that are chosen),
`promote_vs_prefill_8k` (time of a prefill over that of a move, of the 0.6B shape) and
`coexec_goodput` (of GPU and CPU over that of the GPU alone; `_of_part`: with a part of the GPU),
`decode_b64_vs_llama` (tokens a second of 64 entries over llama.cpp's, of the 0.6B shape).
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchengine.child.command import python_command
from bench import report
from bench.cuda import ceilings, steps
from bench.cuda.gpus import CUBINS
from bench.cuda.steps import MAIN_MODEL, MOE_MODEL, Part, Place, Result, Step
from kernels.cuda.compile import CompileUnit, cubins, sources, texts, units

# A step is ended that is still at work so long after the end of the run, or after STUCK times as
# long as it may take: a kernel that hangs costs no more.
KILL_AFTER_S, STUCK = 30.0, 2.0
BEGIN, DONE, FAILED = "BEGIN ", "DONE ", "FAILED "
LATE, NOT_YET = "the time was over", "not yet"
ROOT = Path(__file__).resolve().parents[2]


class State:
    """Results of steps, in a file that is replaced after each."""

    def __init__(self, path: Path, kernels_key: str, code_key: str) -> None:
        self._path, self._lock = path, threading.Lock()
        self._kernels_key, self._code_key = kernels_key, code_key
        self._steps: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.failed: dict[str, str] = {}  # reasons, of this run

    @property
    def results(self) -> dict[str, Result]:
        """Results by step, measured with the kernels that are here."""
        with self._lock:
            return {name: step["result"] for name, step in self._kept()}

    @property
    def of_earlier_code(self) -> list[str]:
        """Those of `results` that were measured with other code, beside the kernels."""
        with self._lock:
            return [name for name, step in self._kept() if step.get("code") != self._code_key]

    def _kept(self) -> list[tuple[str, Any]]:
        every = self._steps.items()
        return [(name, step) for name, step in every if step["kernels"] == self._kernels_key]

    def put(self, name: str, result: Result) -> None:
        """Keep a result."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with self._lock:
            keys = {"kernels": self._kernels_key, "code": self._code_key}
            self._steps[name] = {**keys, "at": now, "result": result}
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self._steps, indent=1) + "\n")
            part.replace(self._path)


class Run:
    """One run: the steps that lack, until the time is over."""

    def __init__(self, state: State, options: argparse.Namespace) -> None:
        self._state, self._options = state, options
        self._end = time.monotonic() + options.seconds

    def wrong(self, part: Part) -> list[str]:
        """What failed in a part, and what differs."""
        found: list[str] = []
        results, failed = self._state.results, self._state.failed
        for step in part.steps:
            found += [
                f"{step.name}: {x}" for x in results.get(step.name, {}).get("differences", [])
            ]
            if step.name in failed and not failed[step.name].endswith(LATE):
                found.append(f"{step.name}: {failed[step.name]}")
        return found

    def part(self, part: Part) -> None:
        """Run the steps of a part that lack."""
        results = self._state.results
        pending = [step.name for step in part.steps if self._lacks(results.get(step.name))]
        lacking = [name for name in part.needs if name not in results]
        if pending and lacking:
            first = lacking[0]
            self._fail(pending, f"{first} is missing: {self._state.failed.get(first, NOT_YET)}")
        elif pending:
            print(f"{part.name}: {len(pending)} of {len(part.steps)} steps", flush=True)
            shares = [pending[i :: part.jobs] for i in range(part.jobs)]
            threads = [threading.Thread(target=self._share, args=(part, s)) for s in shares if s]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _lacks(self, result: Result | None) -> bool:
        """Whether a step is to run: what it needed and did not find may be there now."""
        return result is None or ("absent" in result and not self._options.emulated)

    def _fail(self, names: Sequence[str], why: str) -> None:
        if names:
            self._state.failed.update(dict.fromkeys(names, why))
            count = f", {len(names)} steps" if len(names) > 1 else ""
            print(f"  {names[0]}{count}: not measured: {why}", flush=True)

    def _share(self, part: Part, names: list[str]) -> None:
        """Run steps in processes, a further one after each step that fails."""
        while names:
            if time.monotonic() >= self._end:
                self._fail(names, LATE)
                return
            names = self._process(part, names)

    def _process(self, part: Part, names: list[str]) -> list[str]:
        """Run steps in one process; returns those that are left."""
        options = self._options
        flags = [f"--{name}" for name in ("emulated", "quick") if getattr(options, name)]
        left_s = str(self._end - time.monotonic())
        command = python_command(
            "bench.cuda.gpu",
            *(str(options.folder), *flags, "--seconds", left_s),
            *("--threads", str(max(1, options.threads // part.jobs)), "--steps", *names),
        )
        began, why, began_at = "", "", 0.0
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            kill = self._kill_later(process, None)
            for line in process.stdout or ():
                if line.startswith(BEGIN):
                    began, began_at = line.removeprefix(BEGIN).strip(), time.monotonic()
                    kill.cancel()
                    kill = self._kill_later(process, next(s for s in part.steps if s.name == began))
                elif line.startswith(DONE):
                    result = json.loads(line.removeprefix(DONE))
                    self._state.put(began, result)
                    took_s = time.monotonic() - began_at
                    print(f"  {began}: {took_s:.0f} s: {json.dumps(result)[:200]}", flush=True)
                    names = [name for name in names if name != began]
                    began = ""
                elif line.startswith(FAILED):
                    why = line.removeprefix(FAILED).strip()
                else:
                    print(line, end="", flush=True)
        kill.cancel()
        code = process.returncode
        if code == 0:
            self._fail(names, LATE)
            return []
        if not names:  # it ended badly after its last step
            self._fail([part.name], why or f"its process ended with {code}")
            return []
        failed = began or names[0]
        took = f" after {time.monotonic() - began_at:.0f} s" if began else ""
        self._fail([failed], why or f"its process ended with {code}{took}")
        return [name for name in names if name != failed]

    def _kill_later(self, process: subprocess.Popen[str], step: Step | None) -> threading.Timer:
        """End a process that is at work for too long, with a step or without one."""
        left_s = max(0.0, self._end - time.monotonic())
        if step is not None and not self._options.emulated:
            left_s = min(left_s, STUCK * step.seconds)
        timer = threading.Timer(left_s + KILL_AFTER_S, process.kill)
        timer.start()
        return timer


def run_steps(options: argparse.Namespace, state: State) -> int:
    """Run the named steps in this process."""
    end = time.monotonic() + options.seconds
    every = {s.name: s for p in steps.parts(options.emulated, options.quick) for s in p.steps}
    place = Place(options.emulated, options.quick, options.threads, state.results)
    for name in options.steps:
        step = every[name]
        if not options.emulated and time.monotonic() + step.seconds > end:
            return 0
        print(f"{BEGIN}{name}", flush=True)
        try:
            result = step.run(place)
        except Exception as error:  # of any kind: the reason goes into the result
            print(f"{FAILED}{type(error).__name__}: {' '.join(str(error).split())}", flush=True)
            raise
        print(f"{DONE}{json.dumps(result)}", flush=True)
    return 0


def summary(
    results: dict[str, Result], every: list[Part], failed: dict[str, str], tiny: bool
) -> Result:
    """The RESULT line: a figure is null, with a reason, as long as it is not measured."""
    reasons: dict[str, str] = {}

    def lacking(figure: str, *names: str) -> bool:
        absent = [name for name in names if name not in results]
        if absent:
            why = failed.get(absent[0], NOT_YET)
            reasons[figure] = f"{absent[0]}: {why}" + (f"; {len(absent)} steps" * (len(absent) > 1))
        return bool(absent)

    counted = [n.name for p in every for n in p.steps if n.name.startswith("cases ")]
    compared = [
        n.name for p in every if p.name in ("contact", "first", "compiled") for n in p.steps
    ] + counted
    models = [n.name for p in every for n in p.steps if n.name.endswith(" identical")]
    checked = ["golden", *models, "promotion"]
    differs = [n for n in compared if results.get(n, {}).get("differences")]
    differs += [n for n in checked if results.get(n, {"identical": True})["identical"] is False]
    identical = False if differs else None if lacking("identical", *compared, *checked) else True
    found: Result = {
        "identical": identical,
        "cases": sum(results[n]["cases"] for n in counted if n in results),
        "decode_b1_of_copy": None,
        "prefill_of_ceiling": None,
        "experts_decode_b1_of_copy": None,
        "experts_prefill_of_ceiling": None,
        "promote_vs_prefill_8k": None,
        "coexec_goodput": None,
        "coexec_goodput_of_part": None,
        "decode_b64_vs_llama": None,
    }
    if differs:
        reasons["identical"] = ", ".join(differs)
    decode, prefill = steps.main_rows(tiny)
    for figure, step, row, key in (
        ("decode_b1_of_copy", f"{MAIN_MODEL} decode", decode, "of_copy"),
        ("prefill_of_ceiling", f"{MAIN_MODEL} prefill", prefill, "of_ceiling"),
        ("experts_decode_b1_of_copy", f"{MOE_MODEL} decode", decode, "of_copy"),
        ("experts_prefill_of_ceiling", f"{MOE_MODEL} prefill", prefill, "of_ceiling"),
    ):
        if not lacking(figure, step):
            rows = results[step]
            measured = rows.get(row, {})
            found[figure] = measured.get(key)
            if key not in measured:
                reasons[figure] = str(measured.get("not_measured", f"{step}: no row {row}"))
    if not lacking("promote_vs_prefill_8k", "promotion"):
        found["promote_vs_prefill_8k"] = results["promotion"]["promote_vs_prefill"]
    for figure, lanes in (
        ("coexec_goodput", steps.SERVED),
        ("coexec_goodput_of_part", steps.PARTED),
    ):
        served = [name for name, _ in lanes]
        if not lacking(figure, *served):
            alone, both = (results[name]["goodput"] for name in served)
            if not results[served[0]]["is_bound_found"]:
                reasons[figure] = f"{served[0]}: all promises are kept at the highest rate tried"
            elif alone:
                found[figure] = round(both / alone, 3)
            else:
                reasons[figure] = "the GPU alone keeps its promises at no rate"
    own = f"{steps.LLAMA_MODEL} decode"
    if not lacking("decode_b64_vs_llama", own, steps.LLAMA_STEP):
        theirs, batch = results[steps.LLAMA_STEP], steps.LLAMA_BATCH
        speeds = [row["speed_tg"] for row in theirs.get("rows", []) if row["pl"] == batch]
        measured = results[own].get(str(batch), {})
        if speeds and "tokens_per_s" in measured:
            found["decode_b64_vs_llama"] = round(measured["tokens_per_s"] / speeds[0], 3)
        else:
            why = measured.get("not_measured", f"{own}: no row {batch}")
            reasons["decode_b64_vs_llama"] = str(theirs.get("absent", why))
    return found | {"reasons": reasons}


def key_of_kernels() -> str:
    """A digest of the sources of the kernels, of what launches them, and of the GPU lane."""
    folders = (ROOT / of for of in ("kernels/cuda", "batchengine/model", "batchengine/lanes/gpu"))
    launching = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return _digest([*(text for source in sources() for text in texts(source)), *launching])


def key_of_code() -> str:
    """A digest of all sources that a result may depend on."""
    folders = (ROOT / name for name in ("batchengine", "kernels", "kv_store", "bench/cuda"))
    kinds = (".py", ".cpp", ".h", ".cu")
    return _digest([p for of in folders for p in sorted(of.rglob("*.*")) if p.suffix in kinds])


def _digest(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def name_of_device() -> str:
    """The name of the first GPU as a part of a file name: results of two kinds are kept apart."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "gpu"
    return re.sub(r"[^a-z0-9]+", "-", said.strip().lower())


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--emulated", action="store_true", help="on an emulated GPU, tiny shapes")
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, few cases: whether all of it runs"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="of this run")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--steps", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--target", help="only compile the kernels, for one such as sm_90")
    options = parser.parse_args(argv)
    if options.target:
        made = cubins(options.target, CUBINS, [*units(), CompileUnit(ceilings.SOURCE)])
        print(f"{options.target}: {', '.join(made)}")
        return 0
    options.folder = options.folder.resolve()
    options.folder.mkdir(parents=True, exist_ok=True)
    device = "emulated" if options.emulated else name_of_device()
    name = f"{device}-quick" if options.quick else device
    state = State(options.folder / f"state-{name}.json", key_of_kernels(), key_of_code())
    if options.steps:
        return run_steps(options, state)
    run, every = Run(state, options), steps.parts(options.emulated, options.quick)
    for i, part in enumerate(every):
        run.part(part)
        if part.is_gate and (wrong := run.wrong(part)):
            print(
                f"{part.name}: {len(wrong)} wrong, so nothing else is measured:", *wrong, sep="\n  "
            )
            names = [step.name for later in every[i + 1 :] for step in later.steps]
            state.failed.update(dict.fromkeys(names, wrong[0]))
            break
    results = state.results
    found = summary(results, every, state.failed, options.emulated or options.quick)
    details = {
        "device": results.get("build", {}).get("device"),
        "steps": results,
        "failed": state.failed,
        "of_earlier_code": state.of_earlier_code,
        "threads": options.threads,
    }
    path = options.folder / f"result-{name}.json"
    report.finish(found, details=details, json_path=str(path))
    has_failed = any(not why.endswith(LATE) for why in state.failed.values())
    return 1 if found["identical"] is False or has_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
