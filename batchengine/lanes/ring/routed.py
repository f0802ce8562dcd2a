"""Attention of a step that has pages with peers: its queries go round, the worker attends to its
own pages meanwhile, and folds them in last.

Entries whose pages lie with the same peers in the same order go together, as units of some heads,
of which so many are under way at a time as WAY_BYTES has room for. A layer waits until every unit
is back, refused, or late. Nothing goes round in a layer whose window hides all pages of the peers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import kernels
from batchengine.core import SUPERPAGE_PAGES
from batchengine.lanes.ring.spans import Heads, SpanAttention, Spans
from batchengine.lanes.step_input import I32Array, StepInput, U64Array
from batchengine.wire import lane as wire
from batchengine.wire.data import Accumulators, DataMessage, HeldSpan, Hop, Query, QueryEntry
from batchengine.wire.frames import Payload

log = logging.getLogger("batchengine.worker")

# Accumulators of a unit, beyond which its heads are divided. One unit is best for up to 64 tokens;
# 512 tokens took 0.63 of the time in eight units, which follow one another round the ring.
UNIT_BYTES = 1 << 20

# Queries and accumulators of units under way: what waits at a holder, of which a link may have
# WAITING_BYTES_MAX there, and with it what waits here for the pages before. 128 heads of latent
# attention have 200 MB for the 640 tokens of a step.
WAY_BYTES = 16 << 20

LAP_S_MAX = 10.0  # that a unit may be under way, however long its step is
STEP_LAPS = 2.0  # a step waits for so many times `lap_ms` in all its layers together

Send = Callable[[int, DataMessage, Payload], bool]  # link, message, payload


@dataclass(slots=True)
class Group:
    """Entries of a step with one route. rows: first token of each; links: those to the holders in
    their order, none if all pages are here."""

    entries: list[int]
    rows: list[int]
    counts: list[int]
    spans: Spans
    hops: tuple[Hop, ...]
    links: tuple[int, ...]
    why: str = ""  # it cannot be completed any more

    @property
    def runs(self) -> list[tuple[int, int]]:
        return list(zip(self.rows, self.counts, strict=True))


@dataclass(slots=True)
class Unit:
    """Some heads of a group, in one layer after the other. `way_bytes`: of its queries and
    accumulators; `due`: when it must have come round."""

    number: int
    group: Group
    heads: Heads
    slices: list[I32Array]
    queries: kernels.Queries
    way_bytes: int
    early: kernels.Partials | None = None
    before: Payload | None = None
    due: float = 0.0


@dataclass(slots=True)
class Laps:
    """The layer that is computed, and its units: those to be sent, those under way by number, and
    those for which the worker's own pages are to be attended to, which are in the same order."""

    layer: int = -1
    window: int = 0
    sinks: kernels.Sinks | None = None
    to_send: deque[Unit] = field(default_factory=deque[Unit])
    units: dict[int, Unit] = field(default_factory=dict[int, Unit])
    own: deque[Unit] = field(default_factory=deque[Unit])


class RoutedAttention:
    """The attention of one worker's steps with entries that have segments, one step at a time.

    `send` returns False for a link that has ended, `peer_of` names the peer behind a link, and
    `wait` serves the links for at most so many seconds.
    """

    def __init__(
        self,
        attention: SpanAttention,
        send: Send,
        peer_of: Callable[[int], str | None],
        wait: Callable[[float], None],
        counts: Counter[str],
        first_unit: int,
    ) -> None:
        self._attention = attention
        self._send = send
        self._peer_of = peer_of
        self._wait = wait
        self._counts = counts
        self._next_unit = first_unit
        self._owner = peer_of(wire.SELF) or ""
        self._groups: list[Group] = []
        self._units: list[Unit] = []
        self._laps = Laps()
        self._lap_s = self._left_s = 0.0  # that a unit, and all layers, may wait
        self._waited_s = 0.0

    def end(self) -> list[int]:
        """End the step; returns its entries that cannot be completed."""
        groups, self._groups, self._units = self._groups, [], []
        return sorted([entry for group in groups if group.why for entry in group.entries])

    @property
    def waited_us(self) -> int:
        """Time in which the step could only wait for its laps, whatever was served meanwhile."""
        return round(self._waited_s * 1e6)

    def begin(self, batch: StepInput, addresses: U64Array) -> None:
        """Take up a step; addresses: of its pages, 0 for one that lies with a peer."""
        self._lap_s = min(LAP_S_MAX, batch.lap_ms / 1000)
        self._left_s = STEP_LAPS * batch.lap_ms / 1000
        self._waited_s = 0.0
        pages = np.split(addresses, np.cumsum(batch.shape[:, 2])[:-1])
        rows = (np.cumsum(batch.shape[:, 0]) - batch.shape[:, 0]).tolist()
        routes: dict[tuple[int, ...], list[int]] = {}
        for index, entry in enumerate(batch.entries):
            routes.setdefault(tuple([s.link for s in entry.segments]), []).append(index)
        self._groups = [
            self._group(batch, route, entries, rows, pages) for route, entries in routes.items()
        ]
        self._units = [unit for group in self._groups for unit in self._cut(group)]

    def attend(
        self,
        queries: kernels.Queries,
        layer: int,
        out: kernels.Rows,
        window: int,
        sinks: kernels.Sinks | None,
    ) -> None:
        """Attention of one layer for all entries; rows of unreachable ones are zero."""
        laps = self._laps = Laps(layer, window, sinks)
        for unit in self._units:
            unit.early = unit.before = None
            if not unit.group.why:
                laps.own.append(unit)
                if not unit.group.spans.hides(window):
                    laps.to_send.append(unit)
        self._go_round(queries, out)
        laps.units.clear()
        self._zero(out)

    def on_accumulators(self, link: int, message: Accumulators, data: Payload) -> None:
        """Take a unit that has come round."""
        unit = self._laps.units.get(message.unit)
        if unit is None or message.layer != self._laps.layer or unit.before is not None:
            self._counts["late"] += 1
        elif unit.group.links[-1] != link:
            self._counts["malformed"] += 1
        else:
            unit.before = data

    def on_refusal(self, number: int, why: str) -> None:
        """Give a unit up, and with it its group."""
        unit = self._laps.units.get(number)
        if unit is None:
            self._counts["late"] += 1
        else:
            self._fail(unit.group, why)

    def lose(self, link: int) -> None:
        """Give up the groups with a holder behind a link that has ended."""
        for group in self._groups:
            if link in group.links:
                self._fail(group, "the link to a holder has ended")

    # ---------------------------------------------------------------------------- one step

    def _group(
        self,
        batch: StepInput,
        route: tuple[int, ...],
        entries: list[int],
        rows: Sequence[int],
        pages: Sequence[U64Array],
    ) -> Group:
        spans: list[tuple[int, int, int, int]] = []
        visits: list[list[HeldSpan]] = [[] for _ in route]
        for index in entries:
            entry, at = batch.entries[index], 0
            for visit, segment in zip(visits, entry.segments, strict=True):
                count = segment.n_pages // SUPERPAGE_PAGES
                visit.append(HeldSpan(segment.hold, segment.first_page, at, count))
                at += count
            end = -(-entry.n_pages // SUPERPAGE_PAGES)
            spans.append((entry.n_tokens, entry.start, at, end - at))
        peers = [self._peer_of(link) for link in route]
        hops = tuple(
            Hop(peer or "", tuple(visit)) for peer, visit in zip(peers, visits, strict=True)
        )
        return Group(
            entries,
            [rows[index] for index in entries],
            [span[0] for span in spans],
            Spans(spans, [pages[index] for index in entries]),
            hops,
            route,
            "there is no link to a holder" if None in peers else "",
        )

    def _cut(self, group: Group) -> list[Unit]:
        """The units of a group: as many heads each as keep it below UNIT_BYTES.

        Those of local entries too: between two units the links are served.
        """
        attention, n_tokens = self._attention, group.spans.n_tokens
        units: list[Unit] = []
        for heads in attention.cut(n_tokens, UNIT_BYTES):
            way_bytes = n_tokens * (attention.row_bytes(heads) + attention.query_bytes(heads))
            queries = attention.queries(n_tokens, heads)
            slices = attention.slices(group.spans, heads)
            units.append(Unit(self._next_unit, group, heads, slices, queries, way_bytes))
            self._next_unit = (self._next_unit + 1) % (1 << 64)
        return units

    # --------------------------------------------------------------------------- one layer

    def _go_round(self, queries: kernels.Queries, out: kernels.Rows) -> None:
        """Complete every unit, and fail the groups of those that do not come round in time."""
        laps, looked = self._laps, 0.0  # when the links were served last, with nothing else to do
        while True:
            self._send_queries(queries)
            has_own = bool(laps.own) and (not laps.to_send or laps.own[0] is not laps.to_send[0])
            if has_own:
                self._compute_own(laps.own.popleft(), queries, out)
                self._wait(0.0)
            began = time.monotonic()
            left = [unit for unit in laps.units.values() if not unit.group.why]
            ready = [unit for unit in left if unit.before is not None and unit.early is not None]
            for unit in ready:
                self._fold(unit, out)
            if not (has_own or ready):
                if not (left or laps.to_send or laps.own):
                    return
                late = [unit for unit in left if unit.due <= looked]
                for unit in late:
                    self._fail(unit.group, f"it has not come round in time, {self._lap_s:.3f} s")
                looked = time.monotonic()
                if left and not late:
                    self._wait(max(0.0, min([unit.due for unit in left]) - looked))
                    self._waited_s += time.monotonic() - looked
            self._left_s -= time.monotonic() - began

    def _send_queries(self, queries: kernels.Queries) -> None:
        """Send what WAY_BYTES has room for, or one unit."""
        laps = self._laps
        if not laps.to_send:
            return
        n_bytes = sum([unit.way_bytes for unit in laps.units.values() if not unit.group.why])
        while laps.to_send:
            unit = laps.to_send[0]
            if not unit.group.why:
                if n_bytes and n_bytes + unit.way_bytes > WAY_BYTES:
                    return
                n_bytes += unit.way_bytes
                laps.units[unit.number] = unit
                self._send_query(unit, self._take_queries(unit, queries))
            laps.to_send.popleft()

    def _take_queries(self, unit: Unit, queries: kernels.Queries) -> bytes:
        """Load a unit's queries of this layer; returns them as bytes."""
        heads = unit.heads
        n_kv_head = self._attention.n_kv_head
        data = queries.to_bytes(n_kv_head, (heads.first, heads.count), unit.group.runs)
        unit.queries.load_bytes(data, heads.n_kv)
        return data

    def _send_query(self, unit: Unit, data: bytes) -> None:
        group = unit.group
        query = Query(
            unit.number,
            self._laps.layer,
            unit.heads.first,
            unit.heads.count,
            self._laps.window,
            self._owner,
            tuple(
                QueryEntry(n, start)
                for n, start in zip(group.counts, group.spans.starts, strict=True)
            ),
            group.hops,
        )
        unit.due = time.monotonic() + min(self._lap_s, self._left_s)
        if not self._send(group.links[0], query, data):
            self._fail(group, "the link to a holder has ended")

    def _compute_own(self, unit: Unit, queries: kernels.Queries, out: kernels.Rows) -> None:
        """Attend to the worker's own pages; finish what sees no others."""
        if unit.group.why:
            return
        if unit.number in self._laps.units:
            unit.early = self._attend(unit, unit.slices[0])
        else:
            self._take_queries(unit, queries)
            self._finish(unit, self._attend(unit, unit.group.spans.with_hidden), out)

    def _fold(self, unit: Unit, out: kernels.Rows) -> None:
        """Fold the worker's own pages into what has come round, which completes the unit."""
        attention = self._attention
        try:
            total = attention.take_before(unit.before or b"", unit.group.spans, unit.heads)
            for span in unit.slices:
                part, unit.early = unit.early, None
                part = part or self._attend(unit, span)
                kernels.fold(attention.pool, total, part)
                attention.put(part, unit.heads)
        except ValueError as error:
            self._counts["malformed"] += 1
            self._fail(unit.group, str(error))
            return
        unit.before = None
        del self._laps.units[unit.number]
        self._finish(unit, total, out)

    def _attend(self, unit: Unit, span: I32Array) -> kernels.Partials:
        laps, spans = self._laps, unit.group.spans
        return self._attention.attend(
            unit.queries, spans, span, laps.layer, unit.heads, laps.window
        )

    def _finish(self, unit: Unit, total: kernels.Partials, out: kernels.Rows) -> None:
        rows, first, sinks = unit.group.rows, unit.heads.first, self._laps.sinks
        kernels.finish(self._attention.pool, total, out, rows=rows, first_head=first, sinks=sinks)
        self._attention.put(total, unit.heads)

    def _fail(self, group: Group, why: str) -> None:
        if not group.why:
            group.why = why
            log.warning("%d entries are unreachable: %s", len(group.entries), why)

    def _zero(self, out: kernels.Rows) -> None:
        for group in self._groups:
            if group.why:
                values = out.view(max(row + n for row, n in group.runs))
                for row, n in group.runs:
                    values[row : row + n] = 0
