"""Moves of a session between the CPU and the GPU while it is read, against computing its KV again.

Each session computes its prompt on the CPU, then streams and moves: to the GPU, whose memory has
none of its pages, back, and to the GPU again, whose memory still has those that are sealed. Its
tokens are compared with those of a session that computes the same prompt on the GPU and never
moves; the prefill of that one, until its first token, is what a move saves.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass
from typing import Any

from batchengine.config.settings import RouterConfig
from batchengine.engine import Engine
from bench.cuda.serving.engines import (
    CPU,
    GPU,
    Site,
    Stream,
    ask,
    prompt_of,
    running,
    scratch,
    until,
)

ON_REQUEST = RouterConfig(promote_auto=False, demote_idle_s=0.0)  # no session moves by itself
MOVES = (GPU, CPU, GPU)
BETWEEN = 16  # tokens between two moves
TOKENS_MAX = 2000  # of a stream, which ends after the last move
STREAM_S = 120.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of a prompt, and sessions."""

    length: int
    sessions: int


REAL, FEW = Sizes(8192, 3), Sizes(20, 1)


async def on_lane(engine: Engine, tenant: str, session: str, lane: str, site: Site) -> None:
    """A session that has computed nothing but a few tokens, on a lane."""
    first = prompt_of(site, 2, [7])
    await Stream().read(engine, ask(first, 1, session=session, tenant=tenant))
    report = await engine.promote(tenant, session, lane)
    if report["result"] not in ("moved", "already there"):
        raise RuntimeError(f"{session} to {lane}: {report}")


async def moved(engine: Engine, site: Site, prompt: tuple[int, ...], name: str) -> dict[str, Any]:
    """One session: its moves, and the same prompt on the GPU without one."""
    await on_lane(engine, "", name, CPU, site)
    between = 2 if site.tiny else BETWEEN
    stream = Stream()
    reading = asyncio.create_task(stream.read(engine, ask(prompt, TOKENS_MAX, session=name)))
    reports: list[dict[str, Any]] = []
    for lane in (*MOVES, None):
        count = len(stream.tokens) + between
        await until(lambda n=count: len(stream.tokens) >= n or reading.done(), STREAM_S)
        if lane is not None:
            reports.append(await engine.promote("", name, lane))
    stream.cancel()
    await reading
    await on_lane(engine, "other", name, GPU, site)
    alone = Stream()
    tokens = min(len(stream.tokens), 8 if site.tiny else TOKENS_MAX)
    await alone.read(engine, ask(prompt, tokens, session=name, tenant="other"))
    return {
        "results": [report["result"] for report in reports],
        "total_ms": [round(report["total_ms"], 2) for report in reports],
        "gap_ms": [round(report["gap_ms"], 2) for report in reports],
        "prefill_cpu_ms": round(stream.ttft_ms, 1),
        "prefill_gpu_ms": round(alone.ttft_ms, 1),
        "tpot_gpu_ms": round(alone.tpot_ms, 2),
        "streamed": len(stream.tokens),
        "identical": stream.tokens[:tokens] == alone.tokens and alone.lane == GPU,
    }


async def measure(site: Site) -> dict[str, Any]:
    """Medians of the sessions. promote_vs_prefill: prefill on the GPU over the first move there."""
    sizes = FEW if site.tiny else REAL
    with scratch(site) as (folder, model):
        async with running(site, model, folder, (CPU, GPU), ON_REQUEST) as engine:
            rows = [
                await moved(engine, site, prompt_of(site, sizes.length, [i]), f"s{i}")
                for i in range(sizes.sessions)
            ]
    medians = {
        f"{what}_{way}": statistics.median(row[what][i] for row in rows)
        for what in ("total_ms", "gap_ms")
        for i, way in enumerate(("to_gpu", "to_cpu", "to_gpu_again"))
    }
    prefill = {
        name: statistics.median(row[name] for row in rows)
        for name in ("prefill_cpu_ms", "prefill_gpu_ms")
    }
    return {
        "tokens": sizes.length,
        **medians,
        **prefill,
        "promote_vs_prefill": round(prefill["prefill_gpu_ms"] / medians["total_ms_to_gpu"], 2),
        "demote_vs_prefill": round(prefill["prefill_cpu_ms"] / medians["total_ms_to_cpu"], 2),
        "moved": all(result == "moved" for row in rows for result in row["results"]),
        "identical": all(row["identical"] for row in rows),
        "sessions": rows,
    }
