"""Ring decode: how long a token of a session takes whose KV lies on several daemons.

Owns the closed form of one lap.

In each layer the owner sends its queries along the route. A holder passes them on at once, attends
to its own KV meanwhile, folds its partial results into the accumulators that come from the holder
before it, and sends these on; the last holder sends them to the owner. Each of the n head groups is
a unit of its own, and they follow one another. With links 0 .. r, the last one leading back to the
owner, a lap takes the longest of

    own     n units on the owner
    holder  query over the links before it + wait + n units there + accumulator over those after it
    link    first unit reaches it + n units of bytes + what the last unit has still to do after it

It is never too late, and too early by less than EARLY_MAX, where units wait for the accumulators of
other daemons and then for a link. For a daemon that is on the route twice it may be 1.6 times off.
tests/policy/test_ring.py compares it with a simulation of every message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS, SUPERPAGE_PAGES
from batchengine.policy.cost import LinkSpeed

SUPER_PAGE_TOKENS = PAGE_TOKENS * SUPERPAGE_PAGES  # a daemon holds a multiple, except the owner
EARLY_MAX = 0.3  # of a predicted lap; above 0.1 in one of a thousand random routes


class RingShape(NamedTuple):
    """What a model sends around. Bytes are of one head group, that is one KV head, of one token."""

    layers: int  # that attend to KV
    kv_heads: int
    query_bytes: int
    accumulator_bytes: int


class RingHolder(NamedTuple):
    """A daemon on a route, `tokens` of whose KV it holds, and the link that leads to it.

    `kv_token_ms`: for one query of all layers and one token of KV. `wait_ms`: until it answers a
    query of one layer, because it computes something else. A daemon may be on a route twice.
    """

    name: str
    tokens: int
    kv_token_ms: float
    link: LinkSpeed
    wait_ms: float = 0.0


def shape_of(
    n_layers: int, n_head: int, n_kv_head: int, head_dim: int, v_first: int = 0
) -> RingShape:
    """Return the shape for KV and queries of 8 bits with a scale per 32, and fp32 accumulators.

    Of a group of G heads and dimension D, a query has G * D * (1 + 4 / 32) bytes, an accumulator
    G * (4 * V + 8), of the V dims from `v_first` on (KvHeads).
    """
    group = n_head // n_kv_head
    query = group * (head_dim + 4 * -(-head_dim // 32))
    return RingShape(n_layers, n_kv_head, query, group * (4 * (head_dim - v_first) + 8))


def token_ms(
    shape: RingShape,
    holders: Sequence[RingHolder],
    home: LinkSpeed,
    own_tokens: int,
    own_kv_token_ms: float,
) -> float:
    """Predict the milliseconds of one token of a session, for attention alone.

    `home` leads from the last holder to the owner, which has the last `own_tokens` of the context.
    """
    units = shape.kv_heads
    per_unit = 1.0 / (shape.layers * shape.kv_heads)
    own_ms = units * own_tokens * own_kv_token_ms * per_unit
    links = [*(holder.link for holder in holders), home]
    query_ms = [shape.query_bytes / link.bytes_per_ms for link in links]
    fold_ms = [shape.accumulator_bytes / link.bytes_per_ms for link in links]
    served: dict[str, float] = {}  # ms of one unit on each daemon, which may be on the route twice
    for holder in holders:
        unit_ms = holder.tokens * holder.kv_token_ms * per_unit
        served[holder.name] = served.get(holder.name, 0.0) + unit_ms
    after_ms = [0.0] * (len(links) + 1)  # from the beginning of a link to the owner
    for index in range(len(links) - 1, -1, -1):
        after_ms[index] = after_ms[index + 1] + fold_ms[index] + links[index].latency_ms
    lap_ms = max(own_ms, units * query_ms[0])
    come_ms = ready_ms = 0.0  # the first unit's query, and its accumulators, reach a link
    last_come_ms = 0.0  # the last unit's query
    for index, holder in enumerate(holders):
        onward, passes_on = links[index + 1], index + 1 < len(holders)
        unit_ms = holder.tokens * holder.kv_token_ms * per_unit
        sent_ms, then_ms = fold_ms[index + 1], after_ms[index + 2]
        last_come_ms = max(come_ms + units * query_ms[index], last_come_ms + query_ms[index])
        last_come_ms += links[index].latency_ms
        come_ms += query_ms[index] + links[index].latency_ms
        begin_ms = come_ms + holder.wait_ms
        ready_ms = max(ready_ms, begin_ms + unit_ms)
        link_ms = sent_ms + (query_ms[index + 1] if passes_on else 0.0)
        lap_ms = max(
            lap_ms,
            begin_ms + units * served[holder.name] + after_ms[index + 1],
            last_come_ms + holder.wait_ms + unit_ms + after_ms[index + 1],
            ready_ms + units * sent_ms + onward.latency_ms + then_ms,
            come_ms + units * link_ms + onward.latency_ms + then_ms,
        )
        ready_ms += sent_ms + onward.latency_ms
    return shape.layers * lap_ms
