"""Answers the queries of peers with partials over pages that this worker holds for them.

A query is sent on to the next holder before anything is computed, and accumulators of the pages
before are folded in when they come. Nothing here waits: a query whose accumulators do not come is
dropped. Owns the table of holds and the queries that are not finished.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

import kernels
from batchengine.core import PAGE_TOKENS, SUPERPAGE_PAGES
from batchengine.lanes.ring.spans import Heads, SpanAttention, Spans
from batchengine.lanes.step_input import I32Array, U64Array
from batchengine.wire import lane as wire
from batchengine.wire.data import Accumulators, DataMessage, HeldSpan, Query, QueryEntry, Refuse
from batchengine.wire.frames import PAYLOAD_BYTES_MAX, Payload

JOBS_MAX = 1024  # unfinished queries of all peers
JOB_S = 30.0  # after which a query is dropped whose accumulators have not come
WAITING_BYTES_MAX = 64 << 20  # queries and accumulators of one link that are not finished
EARLY_BYTES_MAX = 256 << 20  # partials that wait for what lies before them
ENTRIES_MAX = 1024
HOPS_MAX = 64
PAGES_MAX = 1 << 16  # of all entries of a query, those that lie elsewhere included
WINDOW_MAX = 1 << 31

Send = Callable[[str, DataMessage, Payload], bool]  # peer, message, payload
Key = tuple[int, int, int, int]  # link, unit, layer, hops left


class BadQuery(Exception):
    """Why a query is refused."""


@dataclass(frozen=True, slots=True)
class HeldPages:
    """The pages of one hold: their addresses in order, and what attends to them:
    `shape` is None for pages of the worker's own model."""

    addresses: U64Array
    attention: SpanAttention
    shape: wire.HeadShape | None


@dataclass(slots=True)
class Job:
    """One query that is not finished.

    `is_early`: what can be computed before the accumulators have come has been. `early` = partials
    of the first slice, none where too many wait already.
    """

    key: Key
    attention: SpanAttention
    query: Query
    queries: Payload
    spans: Spans
    heads: Heads
    slices: list[I32Array]
    since: float
    is_early: bool = False
    early: kernels.Partials | None = None
    early_bytes: int = 0
    before: Payload | None = None

    @property
    def next_peer(self) -> str:
        hops = self.query.hops
        return hops[1].peer if len(hops) > 1 else self.query.owner


class AttentionServer:
    """The holds of one worker and the queries for them.

    `name` is the daemon's own; `send` reaches a peer by name, and returns False where it cannot.
    """

    def __init__(
        self, attention: SpanAttention, name: str, send: Send, counts: Counter[str]
    ) -> None:
        self._attention = attention  # of the worker's own model
        self._others: dict[wire.HeadShape, SpanAttention] = {}  # of other models
        self._name = name
        self._send = send
        self._counts = counts
        self._holds: dict[int, HeldPages] = {}
        self._jobs: dict[Key, Job] = {}
        self._todo: dict[int, deque[Job]] = {}  # by link, in turn
        self._waiting_bytes: Counter[int] = Counter()  # by link
        self._early_bytes = 0
        self._last: tuple[Query, Spans] | None = None  # the next layer has the same spans

    @property
    def has_work(self) -> bool:
        """Whether a query can be computed or completed now."""
        return bool(self._todo)

    @property
    def n_work(self) -> int:
        """Queries that can be computed or completed now."""
        return sum([len(jobs) for jobs in self._todo.values()])

    @property
    def has_timers(self) -> bool:
        """Whether queries wait that may have to be dropped."""
        return bool(self._jobs)

    def hold(self, note: wire.Hold, addresses: U64Array) -> None:
        """Answer queries for these pages from now on.

        Queries under way go on if the hold grows or shrinks at its end, but for those of pages that
        are not in it any more: their memory may be gone soon.
        """
        held = self._holds.get(note.hold)
        if held is not None and not _is_start(held.addresses, addresses):
            self.release(note.hold)
        self._refuse_queries(note.hold, len(addresses), "the hold was cut")
        self._last = None
        attention = self._attention_of(note.shape)
        self._holds[note.hold] = HeldPages(addresses, attention, note.shape)

    def _attention_of(self, shape: wire.HeadShape | None) -> SpanAttention:
        """What attends to pages of a model, with buffers that its holds share."""
        if shape is None:
            return self._attention
        found = self._others.get(shape)
        if found is None:
            own = self._attention
            page = kernels.PageShape(shape.n_layer, shape.n_kv_head, shape.head_dim, shape.v_first)
            found = SpanAttention(own.pool, page, shape.n_head, own.tokens_max)
            self._others[shape] = found
        return found

    def release(self, hold: int) -> None:
        """Answer no more queries for a hold; those under way are refused."""
        held = self._holds.pop(hold, None)
        if held is None:
            return
        self._last = None
        if held.shape is not None and not any(
            other.shape == held.shape for other in self._holds.values()
        ):
            del self._others[held.shape]
        self._refuse_queries(hold, 0, "the hold was released")

    def _refuse_queries(self, hold: int, n_pages: int, why: str) -> None:
        """Refuse the queries under way that attend to other pages of a hold than the first ones."""
        for job in list(self._jobs.values()):
            if any(
                span.hold == hold and span.page + span.count * SUPERPAGE_PAGES > n_pages
                for span in job.query.hops[0].spans
            ):
                self._refuse(job, why)

    def lose(self, link: int) -> None:
        """Refuse the queries that came by a link that has ended."""
        for job in [job for job in self._jobs.values() if job.key[0] == link]:
            self._refuse(job, "the link to the holder before has ended")
        self._waiting_bytes.pop(link, None)
        self._todo.pop(link, None)

    def on_query(self, link: int, query: Query, queries: Payload, now: float) -> bool:
        """Send a query on and keep it for `serve`; False if the link leaves too much unfinished."""
        key = (link, query.unit, query.layer, len(query.hops))
        if key in self._jobs:
            self._counts["duplicate"] += 1
            return True
        try:
            attention, spans, heads = self._checked(query, queries)
        except (BadQuery, ValueError) as error:
            self._counts["refused"] += 1
            self._send(query.owner, Refuse(query.unit, str(error)), b"")
            return True
        slices = attention.slices(spans, heads)
        job = self._jobs[key] = Job(key, attention, query, queries, spans, heads, slices, now)
        self._waiting_bytes[link] += len(queries)
        self._counts["query"] += 1
        rest = query.hops[1:]
        if rest and not self._send(
            rest[0].peer, msgspec.structs.replace(query, hops=rest), queries
        ):
            self._refuse(job, f"there is no link to {rest[0].peer}")
            return True
        self._todo.setdefault(link, deque()).append(job)
        return self._waiting_bytes[link] <= WAITING_BYTES_MAX

    def on_accumulators(self, link: int, message: Accumulators, data: Payload) -> bool:
        """Keep what lies before a query's spans; False if the link leaves too much unfinished."""
        job = self._jobs.get((link, message.unit, message.layer, message.hops_left))
        if job is None or job.before is not None or job.spans.is_first:
            self._counts["late"] += 1
            return True
        job.before = data
        self._waiting_bytes[link] += len(data)
        if job.is_early:
            self._todo.setdefault(link, deque()).appendleft(job)
        return self._waiting_bytes[link] <= WAITING_BYTES_MAX

    def serve(self) -> None:
        """Compute or complete the next query; each link has its turn."""
        link = next(iter(self._todo))
        jobs = self._todo.pop(link)
        job = jobs.popleft()
        if jobs:
            self._todo[link] = jobs
        if self._jobs.get(job.key) is not job:
            return
        try:
            if job.spans.is_first:
                queries = job.attention.load(job.queries, job.heads)
                self._answer(job, self._attend(job, queries, job.slices[0]))
                return
            if not job.is_early:
                self._compute_early(job)
            if job.before is not None:
                self._complete(job, job.before)
        except ValueError as error:
            self._counts["malformed"] += 1
            self._refuse(job, str(error))

    def expire(self, now: float) -> None:
        """Drop the queries that have waited for too long."""
        while self._jobs and now - (job := next(iter(self._jobs.values()))).since >= JOB_S:
            self._counts["expired"] += 1
            self._drop(job)

    def _compute_early(self, job: Job) -> None:
        """Attend to the first slice before what lies before it has come."""
        job.is_early = True
        rows = int(job.slices[0][:, 2].max()) * job.spans.n_tokens
        n_bytes = rows * job.attention.row_bytes(job.heads)
        if self._early_bytes + n_bytes > EARLY_BYTES_MAX:
            return
        queries = job.attention.load(job.queries, job.heads)
        job.early = self._attend(job, queries, job.slices[0])
        job.early_bytes = n_bytes
        self._early_bytes += n_bytes

    def _complete(self, job: Job, before: Payload) -> None:
        """Fold the spans into what lies before them, and send the result on."""
        attention = job.attention
        total = attention.take_before(before, job.spans, job.heads)
        slices = job.slices
        if job.early is not None:
            kernels.fold(attention.pool, total, job.early)
            slices = slices[1:]
        if slices:
            queries = attention.load(job.queries, job.heads)
            for span in slices:
                part = self._attend(job, queries, span)
                kernels.fold(attention.pool, total, part)
                attention.put(part, job.heads)
        self._answer(job, total)

    def _attend(self, job: Job, queries: kernels.Queries, span: I32Array) -> kernels.Partials:
        query = job.query
        return job.attention.attend(queries, job.spans, span, query.layer, job.heads, query.window)

    def _answer(self, job: Job, partials: kernels.Partials) -> None:
        """Send accumulators to the next hop, which ends the query here."""
        _, unit, layer, hops_left = job.key
        data = partials.to_bytes()
        job.attention.put(partials, job.heads)
        if self._send(job.next_peer, Accumulators(unit, layer, hops_left - 1), data):
            self._drop(job)
        else:
            self._refuse(job, f"there is no link to {job.next_peer}")

    def _refuse(self, job: Job, why: str) -> None:
        """Have the owner know that a query will not be answered, and drop it."""
        self._drop(job)
        self._send(job.query.owner, Refuse(job.query.unit, why), b"")

    def _drop(self, job: Job) -> None:
        if self._jobs.pop(job.key, None) is None:
            return
        self._waiting_bytes[job.key[0]] -= len(job.queries) + len(job.before or b"")
        if job.early is not None:
            job.attention.put(job.early, job.heads)
            self._early_bytes -= job.early_bytes

    def _checked(self, query: Query, queries: Payload) -> tuple[SpanAttention, Spans, Heads]:
        """What attends to a query at this hop, its spans and heads; raises BadQuery or ValueError
        for one that cannot be answered."""
        hops = query.hops
        if len(self._jobs) >= JOBS_MAX:
            raise BadQuery(f"{JOBS_MAX} queries are not finished")
        if not 1 <= len(hops) <= HOPS_MAX or hops[0].peer != self._name:
            raise BadQuery(f"not a query for {self._name}")
        attention = self._attention_for(hops[0].spans)
        heads = attention.heads(query.first_head, query.n_heads)
        if not 0 <= query.layer < attention.shape.n_layer:
            raise BadQuery(f"layer {query.layer}")
        if not 0 <= query.window <= WINDOW_MAX:
            raise BadQuery(f"a window of {query.window}")
        last = self._last
        if last is not None and (last[0].entries, last[0].hops[0]) == (query.entries, hops[0]):
            spans = last[1]
        else:
            spans = self._spans(query.entries, hops[0].spans)
            self._last = query, spans
        if len(queries) != spans.n_tokens * attention.query_bytes(heads):
            raise BadQuery(f"{len(queries)} bytes of queries")
        if spans.n_tokens * attention.row_bytes(heads) > PAYLOAD_BYTES_MAX:
            raise BadQuery("accumulators of more than a message")
        return attention, spans, heads

    def _attention_for(self, spans: tuple[HeldSpan, ...]) -> SpanAttention:
        """What attends to spans, all of which are of one model."""
        holds = [self._holds.get(span.hold) for span in spans]
        found = {id(held.attention): held.attention for held in holds if held is not None}
        if len(found) > 1:
            raise BadQuery("spans of several models")
        return next(iter(found.values()), self._attention)

    def _spans(self, entries: tuple[QueryEntry, ...], spans: tuple[HeldSpan, ...]) -> Spans:
        if not 1 <= len(entries) <= ENTRIES_MAX or len(spans) != len(entries):
            raise BadQuery(f"{len(entries)} entries and {len(spans)} spans")
        counts = [entry.n_tokens for entry in entries]
        if min(counts) < 1 or sum(counts) > self._attention.tokens_max:
            raise BadQuery(f"{sum(counts)} tokens of {self._attention.tokens_max}")
        if len({span.first == 0 for span in spans}) != 1:
            raise BadQuery("only some of the spans are the first")
        if min(entry.start for entry in entries) < 0:
            raise BadQuery("a position below zero")
        n_pages = [-(-(entry.start + entry.n_tokens) // PAGE_TOKENS) for entry in entries]
        if sum(n_pages) > PAGES_MAX:
            raise BadQuery(f"{sum(n_pages)} pages of {PAGES_MAX}")
        addresses = [
            self._addresses(entry, span, n)
            for entry, span, n in zip(entries, spans, n_pages, strict=True)
        ]
        return Spans(
            [
                (entry.n_tokens, entry.start, span.first, span.count)
                for entry, span in zip(entries, spans, strict=True)
            ],
            addresses,
        )

    def _addresses(self, entry: QueryEntry, span: HeldSpan, n_pages: int) -> U64Array:
        """Addresses of an entry's pages: those of the span, 0 elsewhere."""
        held = self._holds.get(span.hold)
        if held is None:
            raise BadQuery("there is no such hold")
        n_held, end = span.count * SUPERPAGE_PAGES, (span.first + span.count) * SUPERPAGE_PAGES
        if not (span.first >= 0 and span.count >= 1 and span.page >= 0):
            raise BadQuery("a span below zero")
        if span.page + n_held > len(held.addresses) or entry.start < end * PAGE_TOKENS:
            raise BadQuery("a span outside its hold, or not before its entry")
        addresses = np.zeros(n_pages, np.uint64)
        addresses[end - n_held : end] = held.addresses[span.page : span.page + n_held]
        return addresses


def _is_start(one: U64Array, other: U64Array) -> bool:
    """Whether the shorter of two tables is the beginning of the longer one."""
    n = min(len(one), len(other))
    return np.array_equal(one[:n], other[:n])
