"""Predictions for one session whose work is laid out over several daemons.

Owns the rows of peers and the predicted times of the three layouts: a pipeline that computes the
prompt, a ring that attends while the session decodes on a lane here, and a peer's lane that does
all. The router decides; nothing here reads a clock or a link. A prediction takes microseconds: the
pipeline is planned beforehand (`pipeline.plan`), and a ring needs one closed form for each number
of its daemons.

Every prediction grows with every number of a peer's load. So the division of a context over a ring
does not depend on loads: it would else change with them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from batchengine.policy.cost import LaneLoad, LinkSpeed, predict, wait_ms
from batchengine.policy.linked import pipeline, ring
from batchengine.policy.linked.pipeline import PipelinePlan, PromptWork
from batchengine.policy.linked.ring import SUPER_PAGE_TOKENS, RingHolder, RingShape

LOCAL = "local"  # on one lane of this daemon
PIPELINE = "pipeline"  # prefill: each daemon computes some layers
RING = "ring"  # decode: on one lane, attention where the KV is
REMOTE = "remote"  # on one lane of a peer
UP = "up"  # the only state of a peer in which it gets work
LEAVING, SLOW = "leaving", "slow"  # as states: it is up, and gets nothing more
SHARED = 2.0  # slower, when a daemon computes for its own sessions too


class Rejected(enum.StrEnum):
    """Why a strategy was not chosen, as a stable sentence."""

    DOWN = "a peer is down"
    SUSPECT = "a peer is suspect"
    REFUSED = "a peer is refused"
    LEAVING = "a peer is leaving"
    SLOW = "a peer is slower than predicted"
    NOT_MEASURED = "a link was never measured"
    NO_ROOM = "free KV memory is too small"
    NO_PLAN = "no pipeline is planned"
    BUBBLE = "the prompt does not fill the pipeline"
    TOLERANT_ONLY = "only for throughput-tolerant requests"
    CACHED = "much of the prompt has KV already"
    SHALLOW = "too few sessions are in the batch"
    SLOWER = "it is predicted to be slower"
    DWELL = "it moved a moment ago"
    KEPT = "lanes here keep the promise"
    OTHER = "another strategy comes first"
    NOT_AVAILABLE = "it is not available now"
    NO_TURNS = "it computes no turns of this model"
    OWN_HEADS = "peers hold no pages of models whose layers have different heads"
    LONG_STEPS = "peers hold no pages: lane.tokens_per_step queries of this model exceed a message"


class PeerState(msgspec.Struct, frozen=True, gc=False):
    """Another daemon at one moment. `state` is that of the link to it, LEAVING or SLOW.

    `load` is of its lane with most room; its `cost` has the measured speeds. `hold_bytes_free` is
    what it would keep for sessions that run here, `kv_free_bytes` for one that runs there.
    """

    name: str
    state: str = UP
    load: LaneLoad = LaneLoad()
    kv_free_bytes: int = 0
    rtt_ms: float = 0.0
    bytes_per_ms: float = 0.0  # 0 = not measured
    hold_bytes_free: int = 0
    takes_turns: bool = True

    @property
    def link(self) -> LinkSpeed:
        """The link in either direction."""
        return LinkSpeed(self.bytes_per_ms, self.rtt_ms / 2)

    @property
    def is_busy(self) -> bool:
        """Whether it has sessions of its own."""
        return self.load.seated > 0 or self.load.waiting > 0


class LayoutFacts(msgspec.Struct, frozen=True, gc=False):
    """What predictions need to know of the model, and the pipeline in use; None = there is none.
    `state_bytes`: of the recurrent state that goes along with KV; 0 = the model has none.
    `unheld`: why peers hold none of its pages; None = they do. `queue_ms`: for how long the
    pipeline is kept by prompts that were given to it, on idle daemons; `own_queue_ms` of it by
    those of the tenant who asks."""

    shape: RingShape
    kv_token_bytes: int  # of all layers
    pipeline: PipelinePlan | None = None
    unheld: Rejected | None = None
    queue_ms: float = 0.0
    own_queue_ms: float = 0.0
    state_bytes: int = 0


class LayoutTimes(msgspec.Struct, frozen=True, gc=False):
    """Predicted times of one layout, and the peers that it needs. `rejected` is set if it cannot
    be used; then the times are 0. `tokens_here` of a ring's context are not with peers. The TTFT of
    a pipeline is `prefill_ms` after `queue_ms` behind other prompts, `own_queue_ms` of it behind
    those of the same tenant; idle daemons are kept for `alone_ms` by the prompt."""

    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    move_ms: float = 0.0  # part of the TTFT: for KV to get where it is needed
    peers: tuple[str, ...] = ()
    rejected: Rejected | None = None
    tokens_here: int = 0
    prefill_ms: float = 0.0
    queue_ms: float = 0.0
    own_queue_ms: float = 0.0
    alone_ms: float = 0.0


class LayoutWork(NamedTuple):
    """A request as a layout sees it; the prompt has KV up to `frontier`."""

    rank: int
    frontier: int
    n_tokens: int
    tokens_out: int
    context_tokens: int


Held = tuple[tuple[str, int], ...]  # (peer, tokens) of the leading tokens, in order of the route


def not_usable(peer: PeerState | None) -> Rejected | None:
    """Return why a peer gets no work, or None."""
    if peer is None:
        return Rejected.DOWN
    if peer.state != UP:
        return _BY_STATE.get(peer.state, Rejected.DOWN)
    return None if peer.bytes_per_ms > 0.0 else Rejected.NOT_MEASURED


_BY_STATE = {
    "suspect": Rejected.SUSPECT,
    "refused": Rejected.REFUSED,
    LEAVING: Rejected.LEAVING,
    SLOW: Rejected.SLOW,
}


def gather_ms(held: Held, peers: Sequence[PeerState], kv_token_bytes: int) -> float:
    """Return the time to bring here the KV that peers hold: all of them send at the same time.

    Infinite if one of them gets no work: that range must be computed again.
    """
    by_name = {peer.name: peer for peer in peers}
    sent_ms: dict[str, float] = {}
    for name, tokens in held:
        peer = by_name.get(name)
        if peer is None or not_usable(peer) is not None:
            return math.inf
        ms = tokens * kv_token_bytes / peer.bytes_per_ms
        sent_ms[name] = sent_ms.get(name, peer.rtt_ms) + ms
    return max(sent_ms.values(), default=0.0)


def on_peer(peer: PeerState, facts: LayoutFacts, work: LayoutWork, held: Held) -> LayoutTimes:
    """Predict a peer's lane: KV that it does not hold is sent to it first, from here, and behind it
    the recurrent state."""
    why = not_usable(peer)
    if why is None and not peer.takes_turns:
        why = Rejected.NO_TURNS
    there = sum([tokens for name, tokens in held if name == peer.name])
    if why is None and (work.context_tokens - there) * facts.kv_token_bytes > peer.kv_free_bytes:
        why = Rejected.NO_ROOM
    if why is not None:
        return LayoutTimes(peers=(peer.name,), rejected=why)
    rank, frontier, n_tokens, tokens_out, _ = work
    expected = predict(peer.load, rank, frontier, n_tokens, tokens_out)
    missing = max(0, frontier - there)
    sent_bytes = missing * facts.kv_token_bytes + (facts.state_bytes if missing else 0)
    move_ms = peer.rtt_ms + sent_bytes / peer.bytes_per_ms
    return LayoutTimes(expected.ttft_ms + move_ms, expected.tpot_ms, move_ms, (peer.name,))


def through_pipeline(
    facts: LayoutFacts,
    peers: Sequence[PeerState],
    here: LaneLoad,
    work: LayoutWork,
    bubble_max: float,
) -> LayoutTimes:
    """Predict a prompt that goes through the pipeline for a session that decodes on a lane here.

    `here` is the load of that lane. A stage that has other work is at half speed, also where a peer
    computes stages of other daemons. The prompt waits for those that the pipeline computes before
    it, and for prefill that waits at a peer; each stage
    first gets the KV that its layers have up to `work.frontier`. The first token comes no sooner
    than this lane computes a prompt's last token.
    """
    plan = facts.pipeline
    if plan is None or len(plan.stages) < 2:
        return LayoutTimes(rejected=Rejected.NO_PLAN)
    by_name = {peer.name: peer for peer in peers}
    slowdown: list[float] = []
    used: list[str] = []
    peer_ms = kv_ms = 0.0
    for stage in plan.stages:
        load, beside_ms = here, 0.0
        if stage.push is not None:  # not this daemon's own
            peer = by_name.get(stage.name)
            why = not_usable(peer)
            if peer is None or why is not None:
                return LayoutTimes(peers=(stage.name,), rejected=why)
            used.append(stage.name)
            load, beside_ms = peer.load, peer.load.stage_ms
            of_stage = facts.kv_token_bytes * (stage.end - stage.first) / plan.stages[-1].end
            kv_ms = max(kv_ms, work.frontier * of_stage / peer.bytes_per_ms)
            peer_ms = max(peer_ms, wait_ms(load, work.rank))
        slowdown.append(SHARED if load.seated or load.waiting or beside_ms else 1.0)
    blocks = pipeline.blocks_of(PromptWork(work.frontier, work.n_tokens), plan.chunk_tokens, 1)
    found = pipeline.times(plan.stages, blocks, slowdown)
    alone = pipeline.times(plan.stages, blocks)  # whether it is filled does not depend on loads
    slow = max(slowdown)
    queue_ms, own_queue_ms = slow * facts.queue_ms, slow * facts.own_queue_ms
    prefill_ms = peer_ms + kv_ms + found.total_ms
    ttft_ms = max(queue_ms + prefill_ms, wait_ms(here, work.rank))
    rejected = Rejected.BUBBLE if 1.0 - alone.longest_ms / alone.makespan_ms > bubble_max else None
    rank, frontier, n_tokens, tokens_out, _ = work
    tpot_ms = predict(here, rank, frontier, n_tokens, tokens_out).tpot_ms
    return LayoutTimes(
        ttft_ms,
        tpot_ms,
        kv_ms + found.exposed_ms,
        tuple(used),
        rejected,
        prefill_ms=prefill_ms,
        queue_ms=queue_ms,
        own_queue_ms=own_queue_ms,
        alone_ms=alone.longest_ms,
    )


def through_ring(
    facts: LayoutFacts,
    peers: Sequence[PeerState],
    here: LaneLoad,
    own_tokens_max: int,
    work: LayoutWork,
    held: Held,
) -> LayoutTimes:
    """Predict a session that decodes on the lane of load `here`, which holds up to
    `own_tokens_max` tokens of its KV, while peers hold the others.

    `held` is what peers hold already: then the route stays as it is, or grows at its end by what
    this lane cannot hold. Else the context is divided over the number of peers with the shortest
    predicted time per token. KV is sent to the peers while the prompt is computed; the rest of the
    time to send it is exposed.
    """
    rank, frontier, n_tokens, tokens_out, context = work
    if facts.unheld is not None:
        return LayoutTimes(rejected=facts.unheld)
    if held:
        route = _held_route(held, peers)
        if isinstance(route, Rejected):
            return LayoutTimes(peers=tuple(name for name, _ in held), rejected=route)
        excess = context - sum([tokens for _, tokens in route]) - own_tokens_max
        added = _growth(facts, route[-1][0], peers, excess)
        routes = [[*route, *added]] if excess <= sum([tokens for _, tokens in added]) else []
    else:
        able = [peer for peer in peers if not_usable(peer) is None]
        if not able:
            whys = [why for peer in peers if (why := not_usable(peer)) is not None]
            return LayoutTimes(rejected=whys[0] if whys else Rejected.DOWN)
        routes, added = _routes(facts, able, here, own_tokens_max, context), []
    if not routes:
        return LayoutTimes(rejected=Rejected.NO_ROOM)
    expected = predict(here, rank, frontier, n_tokens, tokens_out)
    kv_tokens = frontier + n_tokens + tokens_out / 2
    other_ms = expected.tpot_ms - here.cost.decode_kv_ms * kv_tokens
    best: tuple[float, list[tuple[PeerState, int]]] | None = None
    for route in routes:
        token_ms = _token_ms(facts, route, here, context)
        if best is None or token_ms < best[0]:
            best = token_ms, route
    assert best is not None
    token_ms, route = best
    sent = added if held else route
    sent_ms = [tokens * facts.kv_token_bytes / peer.bytes_per_ms for peer, tokens in sent]
    move_ms = max(0.0, max(sent_ms, default=0.0) - expected.ttft_ms)
    return LayoutTimes(
        expected.ttft_ms + move_ms,
        other_ms + token_ms,
        move_ms,
        tuple(dict.fromkeys([peer.name for peer, _ in route])),
        tokens_here=max(0, context - sum([tokens for _, tokens in route])),
    )


def _held_route(held: Held, peers: Sequence[PeerState]) -> list[tuple[PeerState, int]] | Rejected:
    by_name = {peer.name: peer for peer in peers}
    route: list[tuple[PeerState, int]] = []
    for name, tokens in held:
        peer = by_name.get(name)
        why = not_usable(peer)
        if peer is None or why is not None:
            return why or Rejected.DOWN
        route.append((peer, tokens))
    return route


def _growth(
    facts: LayoutFacts, last: PeerState, peers: Sequence[PeerState], excess: int
) -> list[tuple[PeerState, int]]:
    """Return what peers would take of `excess` tokens: the last holder of a route, then those with
    most room."""
    found: list[tuple[PeerState, int]] = []
    others = [peer for peer in peers if peer is not last and not_usable(peer) is None]
    for peer in [last, *sorted(others, key=lambda peer: (-peer.hold_bytes_free, peer.name))]:
        wanted = -(-excess // SUPER_PAGE_TOKENS) * SUPER_PAGE_TOKENS
        tokens = min(_room(facts, peer), wanted)
        if tokens > 0:
            found.append((peer, tokens))
            excess -= tokens
    return found


def _room(facts: LayoutFacts, peer: PeerState) -> int:
    """Tokens in whole super-pages that a peer would keep in addition."""
    super_page_bytes = SUPER_PAGE_TOKENS * facts.kv_token_bytes
    return SUPER_PAGE_TOKENS * (peer.hold_bytes_free // super_page_bytes)


def _token_ms(
    facts: LayoutFacts, route: Sequence[tuple[PeerState, int]], here: LaneLoad, context: int
) -> float:
    """Predict attention of one token. A link between two peers counts as the worse of the links
    from here to each of them."""
    holders: list[RingHolder] = []
    before: LinkSpeed | None = None
    for peer, tokens in route:
        link = own_link = peer.link
        if before is not None:
            link = LinkSpeed(
                min(before.bytes_per_ms, link.bytes_per_ms),
                max(before.latency_ms, link.latency_ms),
            )
        before = own_link
        kv_ms = peer.load.cost.decode_kv_ms
        wait = peer.load.step_ms / facts.shape.layers if peer.is_busy else 0.0
        slow = SHARED if peer.is_busy else 1.0
        holders.append(RingHolder(peer.name, tokens, slow * kv_ms, link, wait))
    assert before is not None
    own = max(0, context - sum([tokens for _, tokens in route]))
    return ring.token_ms(facts.shape, holders, before, own, here.cost.decode_kv_ms)


def _routes(
    facts: LayoutFacts,
    able: Sequence[PeerState],
    here: LaneLoad,
    own_tokens_max: int,
    context: int,
) -> list[list[tuple[PeerState, int]]]:
    """Return the divisions of a context over this daemon and the 1, 2, ... fastest peers that have
    room, in proportion to their speeds and within their memory."""
    order = sorted(able, key=lambda peer: (peer.load.cost.decode_kv_ms, peer.rtt_ms, peer.name))
    rooms = [(peer, room) for peer in order if (room := _room(facts, peer))]
    own_speed = 1.0 / here.cost.decode_kv_ms
    found: list[list[tuple[PeerState, int]]] = []
    for count in range(1, len(rooms) + 1):
        left, route = context, list[tuple[PeerState, int]]()
        speeds = [1.0 / peer.load.cost.decode_kv_ms for peer, _ in rooms[:count]]
        shares = divide(context, [own_speed, *speeds], [own_tokens_max, *(n for _, n in rooms)])
        if shares is None:
            continue
        for (peer, room), share in zip(rooms, shares[1:], strict=False):
            pages = -(-int(share) // SUPER_PAGE_TOKENS)
            tokens = min(room, SUPER_PAGE_TOKENS * pages, left)
            tokens -= tokens % SUPER_PAGE_TOKENS
            left -= tokens
            if tokens:
                route.append((peer, tokens))
        if route and left <= own_tokens_max:
            found.append(route)
    return found


def divide(total: int, speeds: Sequence[float], rooms: Sequence[float]) -> list[float] | None:
    """Divide `total` in proportion to `speeds`, at most `rooms` each; None = there is no room.

    `rooms` may be longer than `speeds`: the others are ignored.
    """
    shares = [0.0] * len(speeds)
    free = set(range(len(speeds)))
    left = float(total)
    while free:
        speed = sum(speeds[i] for i in free)
        full = [i for i in free if rooms[i] * speed <= left * speeds[i]]
        if not full:
            for i in free:
                shares[i] = left * speeds[i] / speed
            return shares
        for i in full:
            shares[i] = float(rooms[i])
            left -= rooms[i]
            free.remove(i)
    return shares if left <= 0.0 else None
