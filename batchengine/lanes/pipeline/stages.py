"""The stages and gatherings of one worker, and what they send over its data links.

A tile, or a part of a state, waits until the link to its owner has room, so that attention for
others and rows for the next stage are not held up by it. A stage whose link ends, or whose peer
sends what does not fit, ends alone.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import xxhash

from batchengine.core import PAGE_TOKENS, BatchEngineError
from batchengine.lanes.pipeline.gather import BadTile, GatherPart, TileGather
from batchengine.lanes.pipeline.stage import StageEnded, StageLayers, rows_of, state_span
from batchengine.lanes.pipeline.states import SaveState, StateGather
from batchengine.lanes.ring.data_links import DataLinks
from batchengine.lanes.step_input import BadStep
from batchengine.model import Stepper
from batchengine.wire import lane as wire
from batchengine.wire.data import DataMessage, Hidden, StatePart, Tile
from batchengine.wire.frames import Payload

STAGES_MAX = 64
TILES_WAITING_BYTES = 2 << 20  # on a link, beyond which tiles wait where they were computed

Send = Callable[[int, DataMessage, Payload], bool]  # link, message, payload


class Gathering(NamedTuple):
    """What comes to the owner of one pipeline."""

    tiles: TileGather
    states: StateGather

    def event(self, run: int, why: str = "") -> wire.GatherChanged:
        """How far it has come, for the engine."""
        pages, states = self.tiles, self.states
        return wire.GatherChanged(run, pages.accepted, pages.complete, why, states.complete)


class Stages:
    """Every stage and gathering of a worker, by run.

    `tile(slot, offset, size)` is writable memory of an arena slot, and raises BadStep. `save`
    writes the file of a state. `send` is that of the ring: it reaches this worker itself too.
    """

    def __init__(
        self,
        stepper: Stepper,
        tile: Callable[[int, int, int], memoryview],
        save: SaveState,
        links: DataLinks,
        send: Send,
        report: Callable[[wire.StageEvent], None],
        counts: Counter[str],
    ) -> None:
        self._stepper = stepper
        self._memory = tile
        self._save = save
        self._links = links
        self._send = send
        self._report = report
        self._counts = counts
        self._stages: dict[int, StageLayers] = {}
        self._gathers: dict[int, Gathering] = {}
        # By link, in turn: of which stage, what is sent, and its bytes.
        self._tiles: dict[int, deque[tuple[StageLayers, Tile | StatePart, memoryview]]] = {}
        shape = stepper.model.shape
        layers = [shape.layer(index) for index in range(shape.n_layer)]
        self._layers = [(of.page_offset, of.page_bytes) for of in layers]  # of a page

    @property
    def has_work(self) -> bool:
        """Whether a tile can be sent now."""
        return any(map(self._has_room, self._tiles))

    # ------------------------------------------------------------------------------ the engine

    def take(self, note: wire.StageNote) -> None:
        """Do what the engine says of a pipeline."""
        match note:
            case wire.OpenStage():
                self._open(note)
            case wire.CloseStage():
                self._drop(note.run)
                if note.run in self._gathers:
                    self._end_gather(note.run, "it was closed")
            case wire.Gather():
                self._open_gather(note)
            case wire.GatherPages() | wire.GatherState():
                self._accept(note)

    def step(self, step: wire.StageStep, payload: Payload) -> wire.StageDone:
        """Compute the next tokens of a stage. Raises BadStep for others."""
        began = time.perf_counter_ns()
        stage = self._stages.get(step.run)
        if stage is None:
            return wire.StageDone(step.run, 0, "there is no such stage")
        n = step.n_tokens
        if step.start != stage.frontier or not 1 <= n <= self._stepper.hidden.tokens_max:
            raise BadStep(f"a stage at {stage.frontier} was asked for {n} tokens at {step.start}")
        tokens = np.frombuffer(payload, np.int32)
        n_vocab = self._stepper.model.spec.n_vocab
        if len(tokens) != (0 if stage.note.first else n) or stage.frontier + n > stage.arrived:
            raise BadStep(f"{len(tokens)} tokens for {n} of a stage, {stage.arrived} have arrived")
        states = stage.states
        if states is not None and stage.frontier + n > states.next_wanted(stage.frontier):
            raise BadStep(f"{n} tokens at {stage.frontier} pass a position whose state is wanted")
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < n_vocab):
            raise BadStep("token id outside the vocabulary")
        try:
            hidden = stage.compute(n, tokens)
        except StageEnded as error:
            self._drop(step.run)
            return wire.StageDone(step.run, _us_since(began), str(error))
        if self._stages.get(step.run) is not stage:
            return wire.StageDone(step.run, _us_since(began), "it was closed")
        if stage.following is not None:
            message = Hidden(step.run, step.start, n)
            if not self._send(stage.following, message, hidden.tobytes()):
                self._drop(step.run)
                return wire.StageDone(step.run, _us_since(began), "no link to the next stage")
        found: list[tuple[StageLayers, Tile | StatePart, memoryview]] = []
        for page in range(step.start // PAGE_TOKENS, stage.frontier // PAGE_TOKENS):
            for layer, tile in stage.tiles(page):
                digest = xxhash.xxh3_128_digest(tile)
                found.append((stage, Tile(step.run, page, layer, digest), tile))
        for offset, part in stage.state_parts():
            digest = xxhash.xxh3_128_digest(part)
            found.append((stage, StatePart(step.run, stage.frontier, offset, digest), part))
        if found:
            self._tiles.setdefault(stage.owner, deque()).extend(found)
        self.pump()
        return wire.StageDone(step.run, _us_since(began))

    def reused(self, step: wire.Step) -> None:
        """End every gathering into a slot that a step is about to give another use."""
        if not self._gathers:
            return
        slots = {*step.poison, *(slot.slot for slot in (*step.reserve, *step.relabel))}
        slots.update(rows.to.slot for rows in step.import_rows)
        for run in [run for run, gather in self._gathers.items() if gather.tiles.needs(slots)]:
            self._end_gather(run, "a slot of it has another use")

    def _open(self, note: wire.OpenStage) -> None:
        names = (note.previous, note.following, note.owner)
        previous, following, owner = (self._links.link_to(name) if name else None for name in names)
        try:
            if note.run in self._stages or len(self._stages) >= STAGES_MAX:
                raise StageEnded(f"it is open, or {STAGES_MAX} others are")
            for name, link in zip(names, (previous, following, owner), strict=True):
                if name and link is None:
                    raise StageEnded(f"there is no link to {name}")
            if owner is None:
                raise StageEnded("it has no owner")
            stage = self._stages[note.run] = StageLayers(
                note, self._stepper, previous=previous, following=following, owner=owner
            )
        except (StageEnded, OverflowError) as error:
            self._report(wire.StageChanged(note.run, 0, str(error)))
            return
        self._report(wire.StageChanged(note.run, stage.arrived))

    def _open_gather(self, note: wire.Gather) -> None:
        parts, at, why, model = list[GatherPart](), 0, "", self._stepper.model
        for part in note.parts:
            link = self._links.link_to(part.peer)
            if link is None:
                why = f"there is no link to {part.peer}"
            elif part.first != at or part.end <= at:
                why = "its parts do not follow one another"
            else:
                rows = rows_of(model, part.first, part.end)
                span = state_span(model, part.first, part.end)
                parts.append(GatherPart(link, rows.start, rows.stop, *span))
                at = part.end
        if not why and at != len(model.layers):
            why = f"its parts are {at} layers"
        if not why and (note.run in self._gathers or len(self._gathers) >= STAGES_MAX):
            why = f"it is open, or {STAGES_MAX} others are"
        if not why:
            state_bytes = 0 if model.states is None else model.states.image_bytes
            self._gathers[note.run] = Gathering(
                TileGather(parts, self._layer_of, self._counts),
                StateGather(parts, state_bytes, self._save, self._counts),
            )
        self._report(wire.GatherChanged(note.run, 0, 0, why))

    def _accept(self, note: wire.GatherPages | wire.GatherState) -> None:
        gather = self._gathers.get(note.run)
        if gather is None:
            return  # it has ended, which was reported
        try:
            if isinstance(note, wire.GatherState):
                gather.states.accept(note)
                return
            gather.tiles.accept(note.slots)
        except (BadTile, BatchEngineError) as error:
            self._end_gather(note.run, str(error))
            return
        self._report(gather.event(note.run))

    def _layer_of(self, slot: int, layer: int) -> memoryview:
        return self._memory(slot, *self._layers[layer])

    # ------------------------------------------------------------------------------- the links

    def on_hidden(self, link: int, message: Hidden, data: Payload) -> None:
        """Rows of a stage have arrived."""
        stage = self._stages.get(message.run)
        if stage is None:
            self._counts["late"] += 1
            return
        try:
            stage.on_hidden(link, message, data)
        except StageEnded as error:
            if link != stage.previous:  # of a peer that has no part in it
                self._counts["malformed"] += 1
                return
            self._end_stage(message.run, str(error))
            return
        self._report(wire.StageChanged(message.run, stage.arrived))

    def on_tile(self, link: int, message: Tile | StatePart, data: Payload) -> None:
        """A tile of a page, or a part of a state, has arrived."""
        gather = self._gathers.get(message.run)
        if gather is None:
            self._counts["late"] += 1
            return
        if all(part.link != link for part in gather.tiles.parts):
            self._counts["malformed"] += 1
            return
        try:
            if isinstance(message, Tile):
                is_more = gather.tiles.take(link, message, data)
            else:
                is_more = gather.states.take(link, message, data)
        except BadTile as error:
            self._end_gather(message.run, str(error))
            return
        if is_more:
            self._report(gather.event(message.run))

    def lose(self, link: int) -> None:
        """End what needs a link that has ended."""
        for run in [run for run, stage in self._stages.items() if link in stage.links]:
            self._end_stage(run, "a link of it ended")
        for run in [
            run
            for run, gather in self._gathers.items()
            if any(part.link == link for part in gather.tiles.parts)
        ]:
            self._end_gather(run, "a link of it ended")

    def pump(self) -> None:
        """Send a tile, or a part of a state, on each link that has room."""
        for link in [link for link in self._tiles if self._has_room(link)]:
            tiles = self._tiles.pop(link)
            _, message, data = tiles.popleft()
            if tiles:
                self._tiles[link] = tiles
            self._send(link, message, bytes(data))  # a link that has ended ends the stage: `lose`

    def _has_room(self, link: int) -> bool:
        return self._links.waiting(link) < TILES_WAITING_BYTES

    def _end_stage(self, run: int, why: str) -> None:
        stage = self._drop(run)
        if stage is not None:
            self._report(wire.StageChanged(run, stage.arrived, why))

    def _drop(self, run: int) -> StageLayers | None:
        stage = self._stages.pop(run, None)
        if stage is not None and (tiles := self._tiles.pop(stage.owner, None)) is not None:
            left = deque([tile for tile in tiles if tile[0] is not stage])
            if left:
                self._tiles[stage.owner] = left
        return stage

    def _end_gather(self, run: int, why: str) -> None:
        self._report(self._gathers.pop(run).event(run, why))


def _us_since(began: int) -> int:
    return (time.perf_counter_ns() - began) // 1000
