"""Linked engines in processes of their own on this host, each with one lane, for benches that kill.

Control and data links go over loopback, or over a network of `networks`. An engine that was killed
is started again with its store and its address, so its peers find it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchengine.lanes.worker_process import WORKER
from batchengine.peers import certificates
from bench.processes.engine_child import EngineProcess, kill_child
from bench.processes.engine_exec import ExecSpawner
from bench.processes.networks import Loopback, Network

LINKED_S = 30.0  # until all links are up
ROOM_S = 3.0
POLL_S = 0.02


@dataclass(frozen=True)
class NodePlan:
    """One engine: the lane's cores (and as many threads), and bytes of KV for its own sessions and
    for those of peers, which are in the same store. `model`: another one than the plan's."""

    name: str
    cores: tuple[int, ...]
    own_bytes: int
    hold_bytes: int
    model: Path | None = None


@dataclass
class ClusterPlan:
    """What all nodes have in common. `overrides` are of the configuration; unless `is_linked` no
    node knows another one."""

    model: Path
    folder: Path
    cache_dir: Path
    context_tokens: int
    tls: bool = True
    entries_max: int = 16
    quiet: bool = True
    is_linked: bool = True
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])


class Cluster:
    """Engines that are each other's peers. Use `cluster` below."""

    def __init__(self, plan: ClusterPlan, nodes: Sequence[NodePlan], network: Network) -> None:
        self._spawner = ExecSpawner()
        self._plan = plan
        self.plans = {node.name: node for node in nodes}
        self._network = network
        self.engines: dict[str, EngineProcess] = {}
        for node in nodes:
            self._folder(node.name).mkdir(parents=True)
        self._certify()

    def _folder(self, name: str) -> Path:
        return self._plan.folder / name

    def _certify(self) -> None:
        first, *others = self.plans
        if self._plan.tls:
            certificates.create_authority(self._folder(first) / "peers", first)
            for name in others:
                bundle = certificates.issue_bundle(self._folder(first) / "peers", name)
                certificates.import_bundle(self._folder(name) / "peers", bundle)
        for name in self.plans if self._plan.is_linked else ():
            for other in self.plans:
                if other != name:
                    address = self._network.reached(other)
                    certificates.write_peer(self._folder(name) / "peers", other, address)

    def spawn(self, name: str) -> EngineProcess:
        """Start an engine, or start it again, without waiting for it."""
        plan, node = self._plan, self.plans[name]
        overrides = {
            "store.budget_bytes": node.own_bytes + node.hold_bytes,
            "limits.context_tokens": plan.context_tokens,
            "peers.listen": self._network.listens(name),
            "peers.dir": str(self._folder(name) / "peers"),
            "peers.hold_bytes": node.hold_bytes,
            "peers.tls": plan.tls,
            "router.promote_auto": False,
            **({} if plan.tls else {"peers.name": name}),
            **plan.overrides,
        }
        lane = {
            "name": "cpu",
            "threads": len(node.cores),
            "cores": node.cores,
            "entries_max": plan.entries_max,
        }
        made = EngineProcess(
            self._spawner,
            {
                "model": str(node.model or plan.model),
                "folder": str(self._folder(name)),
                "cache_dir": str(plan.cache_dir),
                "prefix": self._network.prefix(name),
                "command": WORKER,
                "lanes": [lane],
                "quiet": plan.quiet,
                "overrides": overrides,
            },
        )
        self.engines[name] = made
        return made

    async def start(self, name: str) -> None:
        """Start an engine and wait until it serves. Raises RuntimeError."""
        if not await self.spawn(name).is_ready():
            raise RuntimeError(f"the engine of {name} has ended: see its log")

    async def linked(self, *names: str) -> None:
        """Wait until these engines have a data link to every other. Raises TimeoutError."""
        due = time.monotonic() + LINKED_S
        for name in names or self.plans:
            while True:
                status = (await self.engines[name].call("peers")).get("status", {})
                if (
                    sum(row.get("data") == "up" for row in status.get("peers", []))
                    == len(self.plans) - 1
                ):
                    break
                if time.monotonic() > due:
                    raise TimeoutError(f"{name} has no data links: {status}")
                await asyncio.sleep(POLL_S)

    async def has_room(self, name: str, tokens: int) -> None:
        """Wait until an engine has heard that peers have room for such a context, for ROOM_S."""
        due = time.monotonic() + ROOM_S
        while (await self.engines[name].call("context"))["tokens"] < tokens:
            if time.monotonic() > due:
                return
            await asyncio.sleep(POLL_S)

    async def kill_worker(self, name: str) -> bool:
        """SIGKILL the worker of an engine; False if it has none now."""
        engine = self.engines[name]
        pid = (await engine.call("worker")).get("pid", 0)
        return bool(pid) and kill_child(pid, engine.pid)

    async def restart(self, name: str) -> None:
        """Start a killed engine again and wait for its links."""
        await self.engines[name].over()
        await self.start(name)
        await self.linked(name)


@contextlib.asynccontextmanager
async def cluster(
    plan: ClusterPlan, nodes: Sequence[NodePlan], network: Network | None = None
) -> AsyncIterator[Cluster]:
    """Linked engines that serve, over loopback if no network is given; killed at the end."""
    network = network or Loopback()
    async with network.opened([node.name for node in nodes]):
        made = Cluster(plan, nodes, network)
        try:
            await asyncio.gather(*(made.start(name) for name in made.plans))
            if plan.is_linked:
                await made.linked()
            yield made
        finally:
            for engine in made.engines.values():
                engine.kill()
                await engine.over()
