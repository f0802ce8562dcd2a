"""The cost of canonical arithmetic: the kernels against a build of them with free float order.

The other build is `make free-order`: the same sources and int8 dots with every float sum, rounding
and division released (kernels/csrc/common/free_order.h says what that changes), made beside the
product and used only here. Each build runs in a process of its own, and the product in a second
one as control; the three take short turns in changing order. `cost` is the median over turns of
(canonical seconds / free seconds) - 1, `control` the same of the product against itself: a cost
within the control is noise of the machine (memory placement, neighbours). `cost_of_best` compares
the fastest turns. Rows `prefill_512` and `decode_*` are whole forward passes of the synthetic
model, the others single kernels.

Needs AVX-512 VNNI: on lower levels both builds are the same code, and the bench says so.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from batchengine.child.command import environment, python_command
from bench import report
from bench.kernels import attention_case, linear_case, norm_case

ROOT = Path(__file__).resolve().parent.parent
FREE = ROOT / "build" / "free-order"
LEVEL = "avx512-vnni"


class BuildRows:
    """The rows, in the process of one build. Each call of a row returns seconds per pass."""

    def __init__(self, threads: int, quick: bool) -> None:
        from bench.engine import synthetic_model
        from bench.models.local_runner import LocalRunner

        kernels.set_isa(LEVEL)
        self.quick = quick
        path = synthetic_model("0.1b" if quick else "0.6b")
        self.runner = LocalRunner(
            path,
            threads=threads,
            tokens_max=512,
            entries_max=16,
            n_pages=64,
            cache_dir=path.parent,
        )
        self.rng = np.random.default_rng(3)
        self.rows: dict[str, Callable[[], object]] = {"prefill_512": self._prefill(512)}
        for name, batch, length in (
            ("decode_b1", 1, 16),
            ("decode_b16", 16, 16),
            ("decode_4k_b1", 1, 1024 if quick else 4096),
        ):
            self.rows[name] = self._decode(batch, length)
        self._kernels()

    def _tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, self.runner.spec.n_vocab, count).tolist()

    def _prefill(self, count: int) -> Callable[[], object]:
        from bench.models.local_runner import LocalSequence

        prompt = self._tokens(count)

        def run() -> None:
            sequence = LocalSequence()
            self.runner.prefill(sequence, prompt)
            self.runner.release(sequence)

        return run

    def _decode(self, batch: int, length: int) -> Callable[[], object]:
        from bench.models.local_runner import LocalSequence

        first = LocalSequence()
        self.runner.prefill(first, self._tokens(length))
        sequences = [first] + [self.runner.fork(first) for _ in range(batch - 1)]

        def run() -> None:
            self.runner.step([(s, [7]) for s in sequences])
            for s in sequences:
                del s.tokens[length:]

        return run

    def _kernels(self) -> None:
        """Shapes of the 0.6B model: its widest product, its attention, its norm."""
        pool, rng, quick = self.runner.pool, self.rng, self.quick
        for tokens in (1, 16, 512):
            shape, cold = ((512, 512), 2**20) if quick else ((3072, 1024), 64 * 2**20)
            case = linear_case(pool, rng, "q4_0", tokens, shape, cold)
            self.rows[f"linear_q4_0_{tokens}"] = case.run
        self.rows["linear_q4_0_512_k3072"] = linear_case(
            pool, rng, "q4_0", 512, (512 if quick else 1024, 3072), 0
        ).run
        self.rows["attend_decode"] = attention_case(
            pool, rng, 2, 512 if quick else 4096, 1, 1 if quick else 4
        ).run
        self.rows["attend_prefill"] = attention_case(pool, rng, 2, 512, 256, 1).run
        self.rows["norm_quantise_512"] = norm_case(pool, rng, 512, 1024).run

    def facts(self) -> dict[str, Any]:
        """The identity of this build, and its logits of a short prompt; both builds must agree."""
        prompt = np.random.default_rng(5).integers(3, self.runner.spec.n_vocab, 32).tolist()
        logits = self.runner.all_logits(prompt)[-1]
        return {
            "arith_id": kernels.arith_id(self.runner.pool),
            "module": str(Path(kernels.__file__).parent),
            "rows": list(self.rows),
            "logits": logits[:4096].astype(float).tolist(),
        }

    def serve(self) -> None:
        """Answers one line per request: a row and how many passes give seconds per pass."""
        print(json.dumps(self.facts()), flush=True)
        for line in sys.stdin:
            name, passes = json.loads(line)
            run = self.rows[name]

            def many(run: Callable[[], object] = run, passes: int = passes) -> None:
                for _ in range(passes):
                    run()

            print(json.dumps(report.seconds(many) / passes), flush=True)


class Side:
    """A build, in a child process."""

    def __init__(self, package: Path, threads: int, quick: bool) -> None:
        search = [str(package), str(ROOT)]
        command = python_command("bench.canonical", "--serve", str(threads))
        self.process = subprocess.Popen(
            command + (("--quick",) if quick else ()),
            env=environment() | {"PYTHONPATH": os.pathsep.join(search)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.facts: dict[str, Any] = self._answer()
        found = Path(self.facts["module"])
        if found != package / "kernels":
            raise RuntimeError(f"kernels came from {found}, not from {package}")

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and line[0] not in "{0123456789":  # printed while the model is written
            line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a build ended early; its message stands above")
        return json.loads(line)

    def seconds(self, row: str, passes: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([row, passes]) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(sides: dict[str, Side], row: str, budget_s: float, turns: int) -> dict[str, Any]:
    """Measures all sides in turn, in every order, each turn about `budget_s` long."""
    for side in sides.values():
        once = side.seconds(row, 1)
    passes = max(1, round(budget_s / max(once, 1e-6)))
    samples: dict[str, list[float]] = {name: [] for name in sides}
    orders = list(itertools.permutations(sides))
    for turn in range(turns):
        for name in orders[turn % len(orders)]:
            samples[name].append(sides[name].seconds(row, passes))
    ours, free, control = (np.array(samples[name]) for name in ("canonical", "free", "control"))
    costs = ours / free - 1.0
    entry: dict[str, Any] = {
        "canonical_us": round(float(np.median(ours)) * 1e6, 1),
        "free_us": round(float(np.median(free)) * 1e6, 1),
        "cost": round(float(np.median(costs)), 4),
        "range": [round(float(costs.min()), 4), round(float(costs.max()), 4)],
        "cost_of_best": round(float(ours.min() / free.min()) - 1.0, 4),
        "control": round(float(np.median(control / ours)) - 1.0, 4),
    }
    cost, best, noise = (100 * entry[key] for key in ("cost", "cost_of_best", "control"))
    print(
        f"  {row:<22}{entry['canonical_us']:11.1f} us  free {entry['free_us']:11.1f} us"
        f"  cost {cost:+5.1f} %  [{100 * costs.min():+.1f} … {100 * costs.max():+.1f}]"
        f"  of best {best:+5.1f} %  control {noise:+5.1f} %",
        flush=True,
    )
    return entry


def is_stale() -> bool:
    """Whether a kernel source is newer than the product's module."""
    sources = (ROOT / "kernels" / "csrc").rglob("*.*")
    built = min(p.stat().st_mtime for p in (ROOT / "kernels").glob("_native*.so"))
    return max(p.stat().st_mtime for p in sources) > built


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench canonical", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=0, help="default 24, quick 3")
    parser.add_argument("--rows", default="", help="only these rows, separated by commas")
    parser.add_argument("--json", help="write figures to this file")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        BuildRows(args.serve, args.quick).serve()
        return 0
    if LEVEL not in kernels.isa_levels():
        print(f"this processor has no {LEVEL}: both builds would run the same code")
        report.finish({"canonical_cost": {}}, details={"isa": kernels.isa()}, json_path=args.json)
        return 0
    subprocess.run(["make", "-s", "free-order"], cwd=ROOT, check=True, stdout=sys.stderr)
    if not args.quick and is_stale():
        print("kernels/ is newer than the module in place: make native")
        return 1
    builds = {"canonical": ROOT, "free": FREE, "control": ROOT}
    sides = {name: Side(at, args.threads, args.quick) for name, at in builds.items()}
    ours, free = sides["canonical"], sides["free"]
    if ours.facts["arith_id"] == free.facts["arith_id"]:
        raise RuntimeError("the free build computes the same bits: it is not free")
    x, y = (np.array(side.facts["logits"]) for side in (ours, free))
    cosine = float(x @ y / np.sqrt((x @ x) * (y @ y)))
    if cosine < 0.999:
        raise RuntimeError(f"the free build computes another model: cosine {cosine:.5f}")
    turns = args.turns or (3 if args.quick else 24)
    rows = args.rows.split(",") if args.rows else ours.facts["rows"]
    print(f"{LEVEL}, {args.threads} threads, {turns} turns; logits of the two: cosine {cosine:.6f}")
    result = {r: compare(sides, r, 0.02 if args.quick else 0.1, turns) for r in rows}
    for side in sides.values():
        side.close()
    details = {"threads": args.threads, "turns": turns, "cosine": cosine, "isa": LEVEL}
    report.finish({"canonical_cost": result}, details=details, json_path=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
