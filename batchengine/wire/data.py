"""Messages of a data link, between the workers of two daemons: queries one way round a ring of
holders, accumulators the same way; rows of the residual stream from one stage of a pipeline to the
next, and tiles of KV and parts of recurrent states to its owner.

A query visits the holders of a route's pages in the order of the pages. Each holder sends the
query on at once, attends to its own pages, takes the accumulators of the pages before them, folds
its own in and sends the result on; the last hop is the worker that asked. Pages are named by hold
and index only, and the receiver checks them against its own table. A pipeline is named by its run,
and each of its messages is accepted from one link only.
"""

from __future__ import annotations

import msgspec

from batchengine.wire.frames import Frame, LinkSchema, Message

VERSION = 5  # stands in the features of Hello, too: a data link has no greeting
# Pages of a pipeline that are computed by some of its stages and not yet with its owner, at most.
WINDOW_PAGES = 16
STATE_PART_BYTES = 1 << 20


class QueryEntry(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One sequence of a query: its tokens stand at positions [start, start + n_tokens)."""

    n_tokens: int
    start: int


class HeldSpan(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Super-pages [first, first + count) of one entry: pages of a hold, from its page `page`.

    Every token of the entry stands behind them.
    """

    hold: int
    page: int
    first: int
    count: int


class Hop(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A visit to the daemon `peer`: one span per entry of the query."""

    peer: str
    spans: tuple[HeldSpan, ...]


class Query(Message, tag=1, frozen=True):
    """Attend, then send what comes of it to the next hop; the first of `hops` is the receiver.

    Payload: the queries of all entries' tokens of heads [first_head, first_head + n_heads) of
    attention layer `layer` (kernels.Queries.to_bytes): all that read some KV heads, or some of
    those that read one. `window`: how many tokens one sees, its own the last of them; 0 = all.
    `unit` is unique among those of `owner`, the daemon that receives the accumulators in the end.
    """

    unit: int
    layer: int
    first_head: int
    n_heads: int
    window: int
    owner: str
    entries: tuple[QueryEntry, ...]
    hops: tuple[Hop, ...]


class Accumulators(Message, tag=2, frozen=True):
    """Partials of a query's entries from super-page 0 to where the receiver's own begin.

    `hops_left`: as many as the receiver's query has hops, 0 at the owner. Payload:
    kernels.Partials.to_bytes; of latent layers without the dims that V has not.
    """

    unit: int
    layer: int
    hops_left: int


class Refuse(Message, tag=3, frozen=True):
    """To the owner: a unit cannot be completed, such as for a hold that has ended."""

    unit: int
    why: str


class Hidden(Message, tag=4, frozen=True):
    """To the next stage: the residual stream of tokens [start, start + n_tokens) of a pipeline.

    They follow those sent before. Payload: f32, a row per token.
    """

    run: int
    start: int
    n_tokens: int


class Tile(Message, tag=5, frozen=True):
    """To the owner of a pipeline: one layer of one full page.

    Payload: the layer's bytes of the page; `digest` is their XXH3-128.
    """

    run: int
    page: int
    layer: int
    digest: bytes


class StatePart(Message, tag=6, frozen=True):
    """To the owner of a pipeline: a part of the recurrent state behind `position` tokens, from byte
    `offset` of the whole model's state on.

    The parts of a stage follow one another, state after state. Payload: at most STATE_PART_BYTES;
    `digest` is their XXH3-128.
    """

    run: int
    position: int
    offset: int
    digest: bytes


DataMessage = Query | Accumulators | Refuse | Hidden | Tile | StatePart
DataFrame = Frame[DataMessage]
DATA_LINK = LinkSchema[DataMessage](VERSION, Query, Accumulators, Refuse, Hidden, Tile, StatePart)
