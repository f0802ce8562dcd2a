"""Several engines in one process, linked with each other over loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from batchengine.config import LaneConfig
from batchengine.engine import Engine
from service.cli.local.cluster import free_ports
from tests.support.engines import Site, running_engine, until


@contextlib.asynccontextmanager
async def linked_engines(
    site: Site, names: str, lanes: tuple[LaneConfig, ...] = (), **overrides: object
) -> AsyncIterator[dict[str, Engine]]:
    """Engines with one-letter names, each with a data link to every other."""
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    async with contextlib.AsyncExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name in names:
            folder = site.folder / name / "peers.d"
            folder.mkdir(parents=True)
            for other in names.replace(name, ""):
                (folder / f"{other}.toml").write_text(f'address = "127.0.0.1:{ports[other]}"\n')
            engines[name] = await stack.enter_async_context(
                running_engine(
                    site.at(name),
                    lanes=lanes,
                    peers__listen=f"127.0.0.1:{ports[name]}",
                    peers__name=name,
                    peers__tls=False,
                    peers__dir=str(site.folder / name),
                    **overrides,
                )
            )
        n = len(names) - 1
        await until(lambda: all(are_linked(engine, n) for engine in engines.values()))
        yield engines


def are_linked(engine: Engine, n_peers: int) -> bool:
    """Whether all data links of an engine are up."""
    return len(engine.running.lane_links.up) == n_peers
