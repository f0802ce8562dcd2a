"""Pipelines over several real workers, driven as their engines would drive them."""

from __future__ import annotations

import asyncio
import os
import random
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeVar

from batchengine.core import PAGE_TOKENS
from batchengine.lanes.worker_process import Lane
from batchengine.wire import lane as wire
from tests.lanes.ring.scene import Node, Scene

Event = TypeVar("Event", bound=wire.LaneEvent)
Changed = TypeVar("Changed", wire.StageChanged, wire.GatherChanged)
_turns: dict[Lane, asyncio.Lock] = defaultdict(asyncio.Lock)  # a worker has one request at a time


async def event_of(node: Node, kind: type[Event], run: int) -> Event:
    """The next event of a kind about a pipeline, which is consumed."""
    async with asyncio.timeout(20):
        while True:
            for event in node.events:
                if isinstance(event, kind) and getattr(event, "run", None) == run:
                    node.events.remove(event)
                    return event
            node.changed.clear()
            await node.changed.wait()


class Ended(Exception):
    """A stage or the gathering ended."""


class Pipeline:
    """One pipeline: `parts` compute the tokens for `owner`, whose arena gets the pages."""

    def __init__(
        self, scene: Scene, run: int, owner: str, parts: Sequence[wire.Part], tokens: Sequence[int]
    ) -> None:
        self.scene = scene
        self.run = run
        self.owner = scene[owner]
        self.parts = parts
        self.tokens = tokens
        self.n_pages = len(tokens) // PAGE_TOKENS
        self.slots: list[int] = []

    async def open(self) -> None:
        """Have the owner gather and every stage open."""
        owner, run = self.owner, self.run
        reserve: list[wire.ReserveSlot] = []
        for page in range(self.n_pages):
            self.slots.append(owner.free.pop() if owner.free else owner.used)
            owner.used += self.slots[-1] == owner.used
            reserve.append(wire.ReserveSlot(self.slots[-1], 0, b"pipeline", 1, page))
        async with _turns[owner.lane]:
            await owner.lane.run(wire.Step((), reserve=tuple(reserve)), b"", deadline_s=20.0)
        owner.lane.note(wire.Gather(run, tuple(self.parts)))
        self.must(await event_of(owner, wire.GatherChanged, run))
        owner.lane.note(wire.GatherPages(run, tuple(self.slots)))
        assert self.must(await event_of(owner, wire.GatherChanged, run)).accepted == self.n_pages
        names = ["", *(part.peer for part in self.parts), ""]
        for index, part in enumerate(self.parts):
            node = self.scene[part.peer]
            node.lane.note(
                wire.OpenStage(
                    run, part.first, part.end, len(self.tokens),
                    names[index], names[index + 2], owner.name,
                )
            )  # fmt: skip
            self.must(await event_of(node, wire.StageChanged, run))

    @staticmethod
    def must(event: Changed) -> Changed:
        if event.why:
            raise Ended(event.why)
        return event

    async def stage(self, index: int, rng: random.Random, piece_max: int = 512) -> None:
        """Compute all tokens of a stage in random pieces."""
        part, total = self.parts[index], len(self.tokens)
        node, run = self.scene[part.peer], self.run
        frontier, arrived = 0, 0 if part.first else total
        while frontier < total:
            while arrived == frontier:
                arrived = self.must(await event_of(node, wire.StageChanged, run)).arrived
            n = min(arrived - frontier, rng.randint(1, piece_max))
            payload = b"" if part.first else array("i", self.tokens[frontier : frontier + n])
            async with _turns[node.lane]:
                done = await node.lane.run_stage(
                    wire.StageStep(run, frontier, n), bytes(payload), deadline_s=20.0
                )
            if done.why:
                raise Ended(done.why)
            frontier += n

    async def gathered(self) -> None:
        """Wait for all pages."""
        complete = 0
        while complete < self.n_pages:
            event = await event_of(self.owner, wire.GatherChanged, self.run)
            complete = self.must(event).complete

    async def compute(self, seed: int, piece_max: int = 512) -> None:
        """From `open` to the last page."""
        await self.open()
        rng = random.Random(seed)
        async with asyncio.TaskGroup() as group:
            for index in range(len(self.parts)):
                stage_rng = random.Random(rng.random())
                group.create_task(self.stage(index, stage_rng, piece_max))
            group.create_task(self.gathered())

    def close(self) -> None:
        """Forget the pipeline everywhere, and free the slots."""
        for node in {self.owner.name, *(part.peer for part in self.parts)}:
            self.scene[node].lane.note(wire.CloseStage(self.run))
        self.owner.free += self.slots

    def pages(self) -> list[bytes]:
        """The bytes of the gathered pages."""
        return [page_bytes(self.owner, slot) for slot in self.slots]


def page_bytes(node: Node, slot: int) -> bytes:
    """The KV in a slot of a node's arena."""
    return os.pread(node.arena.fd, node.layout.payload_bytes, node.arena.shape.page_offset(slot))


def parts_of(cuts: Sequence[int], names: Sequence[str], n_layers: int) -> list[wire.Part]:
    """The parts of stages that begin at 0 and at `cuts`."""
    ends = [*cuts, n_layers]
    starts = [0, *cuts]
    return [wire.Part(*part) for part in zip(names, starts, ends, strict=True)]
