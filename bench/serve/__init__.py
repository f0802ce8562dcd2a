"""A daemon under many clients: concurrent streams beside idle connections, on the HashLM lane.

HashLM computes next to nothing, so the service is what is measured: HTTP, text processes, engine,
step loop, journal. `streams` streams are open at any time during `--seconds`, each of a request of
its own, and `--idle` connections have asked once and stay open. `errors` counts streams that did
not end properly; `lag_p99_ms` is by how much a timer in the daemon's event loop is late;
`rss_growth_mb` the growth of the engine process from the first third of the run to its end.

`vs_llama_server` is `ratio` of `bench agents` in the same run: finished turns a minute of agents
with a shared system prompt, several turns, half of them interactive, ours over llama-server's; null
where that program is not on the PATH or --no-trace is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from batchengine.child.command import python_command
from bench import agents, report
from bench.serve.streams import Tally, idle_connections, keep_busy
from service.cli.local.cluster import free_ports

POCKET = Path(__file__).resolve().parents[2] / "pocket" / "pocket-q4_0.gguf"
SPARE_FILES = 1024


class HashDaemon:
    """A daemon process with a HashLM lane; a context manager."""

    def __init__(self, folder: Path, streams: int, idle: int, verbose: bool) -> None:
        self._verbose = verbose
        (self.port,) = free_ports(1)
        settings = {
            "model.path": str(POCKET),
            "server.port": self.port,
            "server.admin_socket": str(folder / "admin.sock"),
            "store.dir": str(folder / "kv"),
            "store.allow_volatile": True,
            "cache_dir": str(folder / "cache"),
            "limits.streams_max": streams + idle,
            "limits.queue_max": 2 * streams,
        }
        command = python_command("bench.serve.hash_daemon", json.dumps(settings))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).resolve().parents[2],
        )

    def __enter__(self) -> HashDaemon:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if self._verbose:
                print(line, end="", file=sys.stderr)
            if line.lstrip().startswith("ready"):
                return self
        raise RuntimeError(f"the daemon ended with {self._process.wait()}")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=60)

    def report(self) -> dict[str, float]:
        """What it measured since the last report."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"the daemon ended with {self._process.wait()}")


async def load(daemon: HashDaemon, args: argparse.Namespace) -> tuple[list[Tally], list[Any]]:
    """Three equal parts of the run, each with the daemon's report after it."""
    tallies: list[Tally] = []
    reports: list[Any] = []
    async with idle_connections(daemon.port, args.idle):
        await asyncio.to_thread(daemon.report)
        for part in range(3):
            seconds = args.seconds / 3
            first = part * 1_000_000
            tally = await keep_busy(daemon.port, args.streams, seconds, args.tokens, first)
            tallies.append(tally)
            reports.append(await asyncio.to_thread(daemon.report))
            print(f"  part {part + 1}: {tally.answers} answers, {reports[-1]}", flush=True)
    return tallies, reports


def allow_files(count: int) -> None:
    """Raises this process's limit of open files, which the daemon inherits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(hard, count)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench serve", description=__doc__)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=90.0)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--no-trace", action="store_true", help="without the trace of agents")
    parser.add_argument("--quick", action="store_true", help="50 streams, 200 idle, 6 s, no trace")
    parser.add_argument("--verbose", action="store_true", help="the daemon's output on stderr")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    if args.quick:
        args.streams, args.idle, args.seconds, args.no_trace = 50, 200, 6.0, True
    allow_files(args.streams + args.idle + SPARE_FILES)
    with (
        tempfile.TemporaryDirectory(prefix="batchengine-serve-") as scratch,
        HashDaemon(Path(scratch), args.streams, args.idle, args.verbose) as daemon,
    ):
        tallies, reports = asyncio.run(load(daemon, args))
    failed = [error for tally in tallies for error in tally.errors]
    for error in failed[:5]:
        print(f"  {error}")
    ttft = [ms for tally in tallies for ms in tally.ttft_ms]
    details: dict[str, Any] = {
        "idle": args.idle,
        "seconds": args.seconds,
        "tokens": args.tokens,
        "answers": sum(tally.answers for tally in tallies),
        "ttft_p50_ms": round(float(np.median(ttft)), 1) if ttft else None,
        "reports": reports,
    }
    ratio = None if args.no_trace else trace_ratio(details)
    result: dict[str, Any] = {
        "streams": max(tally.open_max for tally in tallies),
        "errors": len(failed),
        "lag_p99_ms": max(part["lag_p99_ms"] for part in reports),
        "rss_growth_mb": round(reports[-1]["rss_mb"] - reports[0]["rss_mb"], 2),
        "vs_llama_server": ratio,
    }
    report.finish(result, details=details, json_path=args.json)
    return 0 if not failed else 1


def trace_ratio(details: dict[str, Any]) -> float | None:
    """`ratio` of the trace of agents; its figures go into `details`."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        agents.main(["--json", file.name])
        details["agents"] = json.loads(Path(file.name).read_text())
    return details["agents"]["result"]["ratio"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
