"""Router: chooses lane and strategy of a request, as one pure function over frozen views.

Owns the decision tree and the sentences that explain it. Reads no clocks, queues or lanes:
`RouteState` holds precomputed sums of each lane, so that a decision takes microseconds at any queue
length. Same inputs, same decision.

The tree.

 1. Latency-sensitive: interactive, promoted by the caller, or a standard request with targets
    as tight as the interactive ones                   -> fast lanes
 2. Throughput-tolerant: background and batch          -> bulk lanes
 3. Standard, long prompt                              -> fast lanes
 4. Standard, short prompt                             -> bulk lanes

Choice among lanes. The *SLA ratio* of a lane is the largest ratio of predicted to target time
(TTFT, TPOT, TTLT); up to 1 all targets are met. On a lane without the session's KV, the migration
is part of the TTFT.

 5. The lane of least SLA ratio in the tree's tier is chosen if that is within a limit, else the
    lane of the least of all. With s = the least of all, the limit is s + `tolerance` * max(1, s),
    and at least 1 unless the request is latency-sensitive.
 6. A session stays on its lane while that lane belongs to the tier and is within the limit of rule
    5. Unless the request is latency-sensitive, the session also stays if it moved less than
    `dwell_ms_min` ago; and, within the limit, on a fast lane if an interactive turn was there less
    than `demote_idle_ms` ago (a client may send background requests to a session that its user is
    in), or if the lane is not loaded. So promotion is quick and demotion slow.

No candidates are dead lanes, lanes that the context does not fit, and full ones other than the
session's own. More load never makes a lane more attractive: the SLA ratio grows with every number
of the load, and else only rule 6 reads the load, to leave a loaded lane.

With peers, the rules above have chosen the local strategy, and these compare it with others, which
`layouts` predicts. Peers that are not up, or whose link was never measured, get nothing.

 7. The context exceeds every lane here: the ring, for any class, if a lane here that can own a ring
    has no other reason to refuse.
 8. A session on a ring stays there while its prediction is within `tolerance` of a lane here. If
    the request is latency-sensitive it leaves, unless the lane, after gathering the KV, is beyond
    the limit of rule 5 with the ring as the best.
 9. Another session gets on a ring if it is throughput-tolerant, `ring_depth_min` sessions are on
    the lane, and the prediction is no worse; never less than `dwell_ms_min` after it moved.
10. A throughput-tolerant prompt goes through the pipeline if it fills it, that is if at most
    `bubble_max` of the time is spent filling and emptying it, and if the local prefill takes
    `pipeline_gain` times as long or longer, unless more than `pipeline_cached_max` of the prompt
    has KV already. Time behind prompts in the pipeline counts for none of this gain; that behind
    those of the same tenant does not count at all, since computed locally the prompt would delay
    them; but a promise that is kept locally is not broken for it. This is independent of rules 8
    and 9.
11. Without ring and pipeline, a peer's lane is taken if the local ratio is above 1 and that of the
    peer is less by `tolerance` * max(1, its own). The turn begins on the lane of rules 1 to 6: its
    first token is computed there, and others until the peer has caught up.

More load of a peer never makes a strategy with it preferred: its predictions grow, and no rule
reads its load otherwise.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from batchengine.policy.cost import LaneLoad, predict
from batchengine.policy.linked import layouts
from batchengine.policy.linked.layouts import (
    LOCAL,
    PIPELINE,
    REMOTE,
    RING,
    Held,
    LayoutFacts,
    LayoutTimes,
    LayoutWork,
    PeerState,
    Rejected,
)

FAST, BULK, ANY = "fast", "bulk", "any"
# Why a lane is no candidate.
NO_FIT, FULL = "the context does not fit", "its queue is full"
DOWN, STARTS = "it is down", "it is starting"
RANK_INTERACTIVE, RANK_STANDARD = 0, 1  # values of scheduler.RANK


class Reason(enum.StrEnum):
    """Reason of a decision, as a stable sentence; the names are labels of metrics."""

    NO_LANE = "no lane is up"
    NO_FIT = "the context fits no lane"
    FULL = "every queue is full"
    ONLY = "only this lane can take it"
    URGENT = "latency-sensitive: fast lane"
    TOLERANT = "throughput-tolerant: bulk lane"
    LONG = "long prompt: fast lane"
    SHORT = "short prompt: bulk lane"
    HOME = "its KV is here"
    DWELL = "it moved here a moment ago"
    CEILING = "an interactive turn was here a moment ago"
    IDLE_FAST = "its KV is here and this lane is not loaded"
    SPILL = "lanes of its tier would break the promise"
    BEST = "no lane keeps the promise: the nearest to it"
    RING_CONTEXT = "the context exceeds every lane here: ring"
    RING_DEPTH = "throughput-tolerant in a deep batch: ring"
    RING_HOME = "its KV is on a ring"
    FROM_RING = "latency-sensitive: from the ring to one lane"
    PIPELINE = "throughput-tolerant prompt that fills the pipeline"
    PEER_SPILL = "lanes here would break the promise: a peer's lane"


class RoutePolicy(msgspec.Struct, frozen=True, gc=False):
    """Constants of the tree; milliseconds, tokens and ratios."""

    long_prompt_tokens: int = 2048
    urgent_ttft_ms: float = 500.0  # the interactive class's targets
    urgent_tpot_ms: float = 50.0
    tolerance: float = 0.25
    dwell_ms_min: float = 5_000.0
    demote_idle_ms: float = 60_000.0
    loaded_ratio: float = 0.5  # a lane with so many of its seats taken is loaded
    move_ms: float = 10.0  # fixed cost of a migration
    move_row_ms: float = 0.01  # cost of a migration per row of the open page
    ring_depth_min: int = 16  # sessions of a lane, from which on a ring may take some
    bubble_max: float = 0.25  # share of a prefill in which the pipeline fills and empties
    pipeline_cached_max: float = 1.0  # share of a prompt that may have KV, to go through it
    pipeline_gain: float = 1.25  # local prefill over that of a pipeline, from which on it is used


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """One request. Targets are resolved: the request's own, or those of its class."""

    rank: int  # of its class: 0 = interactive ... 3 = batch
    prompt_tokens: int
    tokens_out: int  # expected
    context_tokens: int  # prompt and the longest answer, which must fit
    ttft_ms: float
    tpot_ms: float
    ttlt_ms: float = math.inf
    promote: bool = False  # the caller asks for the fast tier
    stored_tokens: int = 0  # leading ones whose pages every lane finds in the store


class RouteSession(msgspec.Struct, frozen=True, gc=False):
    """A session that has KV. `lane` holds its open page; sealed pages are shared by all lanes.

    `held`: leading tokens that peers hold; `gather_ms` is the time to bring these here
    (`layouts.gather_ms`).
    """

    lane: str
    reused_tokens: int  # leading tokens of the prompt whose KV exists
    open_rows: int = 0  # of those, rows that a migration would copy
    dwell_ms: float = math.inf  # since the session last changed its lane
    urgent_ms: float = math.inf  # since its last latency-sensitive turn
    held: Held = ()
    gather_ms: float = 0.0


class LaneState(msgspec.Struct, frozen=True, gc=False):
    """One lane. `tier` any serves both tiers; lanes of one `pool` are variants of each other."""

    name: str
    load: LaneLoad = LaneLoad()
    alive: bool = True
    tier: str = ANY
    pool: str = ""
    context_max: int = 1 << 30  # tokens whose KV is held here for one session of the lane
    full: bool = False  # its queue has the maximal length
    owns_rings: bool = True  # pages of its sessions may lie with peers
    starts: bool = False  # it is not alive, but will be soon
    copy_token_ms: float = 0.0  # to give a session's KV to the lane's own memory, per token


class RouteState(msgspec.Struct, frozen=True, gc=False):
    """Every lane and peer at one moment. Without `facts` no strategy over peers is considered, and
    with them those of `strategies`: the others are not available."""

    lanes: tuple[LaneState, ...]
    policy: RoutePolicy = RoutePolicy()
    peers: tuple[PeerState, ...] = ()
    facts: LayoutFacts | None = None
    strategies: tuple[str, ...] = (PIPELINE, RING, REMOTE)


class Strategy(NamedTuple):
    """Layout of prefill and decode of one session: LOCAL, PIPELINE, RING or REMOTE."""

    prefill: str = LOCAL
    decode: str = LOCAL


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """Prediction for one lane; `excluded` is why it was not considered, "" = it was.

    A struct, because one is made per lane and decision; a named tuple takes seven times as long.
    """

    lane: str
    ttft_ms: float = 0.0  # with `move_ms`, the time of a migration
    tpot_ms: float = 0.0
    move_ms: float = 0.0
    sla_ratio: float = 0.0
    excluded: str = ""


class Outlook(msgspec.Struct, frozen=True, gc=False):
    """Prediction for one strategy over peers, and why it was chosen (a Reason) or not.

    The times are 0 if it could not be used at all.
    """

    strategy: Strategy
    peers: tuple[str, ...]
    why: Reason | Rejected
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    move_ms: float = 0.0
    sla_ratio: float = 0.0
    tokens_here: int = 0  # of a ring's context
    queue_ms: float = 0.0  # part of the TTFT: behind other prompts of the pipeline
    alone_ms: float = 0.0  # for which the prompt keeps the pipeline, if its daemons are idle


class Decision(msgspec.Struct, frozen=True):
    """Lane of a request. `lane` "" = none can take it; `predicted` is None exactly then.

    For REMOTE `lane` is the name of the peer, and `begins_on` that of the lane here where a turn
    begins which goes there. `peers` are those that the strategy needs.
    """

    strategy: Strategy
    lane: str
    reason: Reason
    predicted: Candidate | None
    candidates: tuple[Candidate, ...] = ()
    peers: tuple[str, ...] = ()
    outlooks: tuple[Outlook, ...] = ()
    begins_on: str = ""


LOCAL_STRATEGY = Strategy()
PIPELINED, RINGED, ON_PEER = Strategy(PIPELINE), Strategy(LOCAL, RING), Strategy(REMOTE, REMOTE)
_SLA_RATIO = operator.itemgetter(0)  # of (ratio, lane, candidate)


def is_urgent(request: RouteRequest, policy: RoutePolicy) -> bool:
    """Whether a request is latency-sensitive; background and batch are not by their targets."""
    rank = request.rank
    return (
        rank == RANK_INTERACTIVE
        or request.promote
        or (
            rank == RANK_STANDARD
            and (
                request.ttft_ms <= policy.urgent_ttft_ms or request.tpot_ms <= policy.urgent_tpot_ms
            )
        )
    )


def is_loaded(lane: LaneState, policy: RoutePolicy) -> bool:
    """Whether sessions wait, or `loaded_ratio` of the seats are taken."""
    load = lane.load
    return load.waiting > 0 or load.seated >= policy.loaded_ratio * load.seats


def route(request: RouteRequest, session: RouteSession | None, state: RouteState) -> Decision:
    """Choose lane and strategy; the module's docstring has the numbered rules."""
    local = _on_lanes(request, session, state)
    if not state.peers or state.facts is None:
        return local
    return _Comparison(request, session, state, state.facts, local).decision()


def _on_lanes(request: RouteRequest, session: RouteSession | None, state: RouteState) -> Decision:
    """Choose among the lanes of this daemon, by rules 1 to 6."""
    policy = state.policy
    candidates = tuple([_candidate(request, session, lane, policy) for lane in state.lanes])
    able = [
        (candidate.sla_ratio, lane, candidate)
        for lane, candidate in zip(state.lanes, candidates, strict=True)
        if not candidate.excluded
    ]
    if not able:
        return _without_lane(candidates)
    urgent = is_urgent(request, policy)
    if urgent:
        tier, why = FAST, Reason.URGENT
    elif request.rank > RANK_STANDARD:
        tier, why = BULK, Reason.TOLERANT
    elif _to_compute(request, session) >= policy.long_prompt_tokens:
        tier, why = FAST, Reason.LONG
    else:
        tier, why = BULK, Reason.SHORT
    if len(able) == 1:
        return Decision(LOCAL_STRATEGY, able[0][1].name, Reason.ONLY, able[0][2], candidates)
    best = min(able, key=_SLA_RATIO)
    limit = best[0] + policy.tolerance * max(1.0, best[0])
    if not urgent and limit < 1.0:
        limit = 1.0
    if session is not None:
        stay = _stay(session, able, tier, urgent, limit, policy)
        if stay is not None:
            return Decision(LOCAL_STRATEGY, session.lane, stay[0], stay[1], candidates)
    mine = [entry for entry in able if entry[1].tier in (tier, ANY)]
    if mine:
        first = min(mine, key=_SLA_RATIO)
        if first[0] <= limit:
            return Decision(LOCAL_STRATEGY, first[1].name, why, first[2], candidates)
    why = Reason.SPILL if best[0] <= 1.0 else Reason.BEST
    return Decision(LOCAL_STRATEGY, best[1].name, why, best[2], candidates)


def best_lane(state: RouteState, tier: str, tokens: int, away_from: str = "") -> str:
    """Return the least loaded lane of `tier` that can hold `tokens` tokens; "" = there is none.

    For moves that no request waits for. A lane of tier ANY counts for both tiers.
    """
    able = [
        ((lane.load.seated + lane.load.waiting) / lane.load.seats, lane.tier == ANY, lane.name)
        for lane in state.lanes
        if lane.alive
        and not lane.full
        and lane.tier in (tier, ANY)
        and tokens <= lane.context_max
        and lane.name != away_from
    ]
    return min(able)[2] if able else ""


def _to_compute(request: RouteRequest, session: RouteSession | None) -> int:
    n = request.prompt_tokens - (
        request.stored_tokens if session is None else session.reused_tokens
    )
    return n if n > 0 else 1


def _candidate(
    request: RouteRequest, session: RouteSession | None, lane: LaneState, policy: RoutePolicy
) -> Candidate:
    """Predict the request's times on the lane, with a migration if necessary, and the ratio."""
    if not lane.alive:
        return Candidate(lane.name, excluded=STARTS if lane.starts else DOWN)
    if request.context_tokens > lane.context_max:
        return Candidate(lane.name, excluded=NO_FIT)
    if lane.full and (session is None or session.lane != lane.name):
        return Candidate(lane.name, excluded=FULL)
    frontier, move_ms = request.stored_tokens, 0.0
    n = request.prompt_tokens - frontier
    if session is not None:
        frontier = session.reused_tokens
        n = request.prompt_tokens - frontier
        if n < 1:
            frontier, n = frontier + n - 1, 1
        move_ms = session.gather_ms
        if session.lane != lane.name:
            move_ms += policy.move_ms + policy.move_row_ms * session.open_rows
            move_ms += lane.copy_token_ms * frontier
    tokens_out = request.tokens_out
    expected = predict(lane.load, request.rank, frontier, n, tokens_out)
    ttft_ms, tpot_ms = expected.ttft_ms + move_ms, expected.tpot_ms
    ratio = max(  # as in `_sla_ratio`, without a call
        ttft_ms / request.ttft_ms,
        tpot_ms / request.tpot_ms,
        (ttft_ms + tpot_ms * tokens_out) / request.ttlt_ms,
    )
    return Candidate(lane.name, ttft_ms, tpot_ms, move_ms, ratio)


def _stay(
    session: RouteSession,
    able: list[tuple[float, LaneState, Candidate]],
    tier: str,
    urgent: bool,
    limit: float,
    policy: RoutePolicy,
) -> tuple[Reason, Candidate] | None:
    """Return, by rule 6, why the session stays on its lane; None if it may leave."""
    home = next((entry for entry in able if entry[1].name == session.lane), None)
    if home is None:
        return None
    ratio, lane, candidate = home
    is_in_tier = lane.tier in (tier, ANY)
    if urgent:
        return (Reason.HOME, candidate) if is_in_tier and ratio <= limit else None
    if session.dwell_ms < policy.dwell_ms_min:
        return Reason.DWELL, candidate
    if ratio > limit:
        return None
    if is_in_tier:
        return Reason.HOME, candidate
    if lane.tier == FAST and session.urgent_ms < policy.demote_idle_ms:
        return Reason.CEILING, candidate
    if lane.tier == FAST and not is_loaded(lane, policy):
        return Reason.IDLE_FAST, candidate
    return None


def _without_lane(candidates: tuple[Candidate, ...]) -> Decision:
    """Return the decision that no lane can take the request."""
    excluded = {candidate.excluded for candidate in candidates}
    full = Reason.FULL if FULL in excluded else Reason.NO_LANE
    reason = Reason.NO_FIT if NO_FIT in excluded else full
    return Decision(LOCAL_STRATEGY, "", reason, None, candidates)


# ---- strategies over peers ----


def _sla_ratio(request: RouteRequest, ttft_ms: float, tpot_ms: float) -> float:
    return max(
        ttft_ms / request.ttft_ms,
        tpot_ms / request.tpot_ms,
        (ttft_ms + tpot_ms * request.tokens_out) / request.ttlt_ms,
    )


class _Comparison:
    """The local strategy of one request beside those over peers, by rules 7 to 11."""

    def __init__(
        self,
        request: RouteRequest,
        session: RouteSession | None,
        state: RouteState,
        facts: LayoutFacts,
        local: Decision,
    ) -> None:
        self._request, self._state, self._facts = request, state, facts
        self._policy, self._local = state.policy, local
        self._urgent = is_urgent(request, self._policy)
        self._tolerant = not self._urgent and request.rank > RANK_STANDARD
        self._held: Held = () if session is None else session.held
        moved = session is not None and session.dwell_ms < self._policy.dwell_ms_min
        self._dwells = moved and not self._urgent
        n = _to_compute(request, session)
        self._work = LayoutWork(
            request.rank, request.prompt_tokens - n, n, request.tokens_out, request.context_tokens
        )

    def decision(self) -> Decision:
        """Return the decision, with the outlook of every strategy."""
        lane, here = self._owner(), self._local.predicted
        strategies, found = self._state.strategies, list[Outlook]()
        if REMOTE in strategies:
            found = [self._remote(peer, here) for peer in self._state.peers]
        if RING in strategies and lane is not None and lane.owns_rings:
            found.append(self._ring(lane, here))
        if PIPELINE in strategies and lane is not None and here is not None:
            found.append(self._pipeline(lane, here))
        used = self._used([outlook for outlook in found if isinstance(outlook.why, Reason)])
        found += [
            Outlook(strategy, (), Rejected.NOT_AVAILABLE)
            for kind, strategy in ((PIPELINE, PIPELINED), (RING, RINGED), (REMOTE, ON_PEER))
            if kind not in strategies
        ]
        outlooks = tuple([one if one in used else _not_used(one) for one in found])
        if not used:
            left = self._urgent and self._held and here is not None
            why = Reason.FROM_RING if left else self._local.reason
            return replace(self._local, reason=why, outlooks=outlooks)
        decode, prefill = used[0], used[-1]
        name = decode.peers[0] if lane is None or decode.strategy == ON_PEER else lane.name
        ttft_ms, tpot_ms = prefill.ttft_ms, decode.tpot_ms
        ratio = _sla_ratio(self._request, ttft_ms, tpot_ms)
        return Decision(
            Strategy(prefill.strategy.prefill, decode.strategy.decode),
            name,
            Reason(decode.why),
            Candidate(name, ttft_ms, tpot_ms, prefill.move_ms, ratio),
            self._local.candidates,
            tuple(dict.fromkeys(decode.peers + prefill.peers)),
            outlooks,
            self._local.lane if decode.strategy == ON_PEER else "",
        )

    def _used(self, able: Sequence[Outlook]) -> Sequence[Outlook]:
        """Return the outlook of the strategy, or two: that of the decode and of the prefill."""
        if not able:
            return ()
        best = min(able, key=lambda outlook: outlook.sla_ratio)
        if self._local.predicted is None:
            return (best,)
        here = [one for one in able if one.strategy != ON_PEER]  # the ring before the pipeline
        return here or (best,)

    def _owner(self) -> LaneState | None:
        """Return the lane that would own a ring: the chosen one, or the idlest of those that the
        context alone excludes; None = there is none."""
        lanes, local = self._state.lanes, self._local
        if local.lane:
            return next(lane for lane in lanes if lane.name == local.lane)
        able = [
            (lane.load.step_ms + lane.load.prefill_ms[-1], index, lane)
            for index, (lane, candidate) in enumerate(zip(lanes, local.candidates, strict=True))
            if candidate.excluded == NO_FIT and not lane.full and lane.owns_rings
        ]
        return min(able)[2] if able else None

    def _outlook(
        self,
        strategy: Strategy,
        times: LayoutTimes,
        rule: Callable[[LayoutTimes, float], Reason | Rejected],
    ) -> Outlook:
        ratio = _sla_ratio(self._request, times.ttft_ms, times.tpot_ms)
        why = times.rejected or rule(times, ratio)
        return Outlook(
            strategy,
            times.peers,
            why,
            times.ttft_ms,
            times.tpot_ms,
            times.move_ms,
            ratio,
            times.tokens_here,
            times.queue_ms,
            times.alone_ms,
        )

    def _limit(self, ratio: float) -> float:
        return ratio + self._policy.tolerance * max(1.0, ratio)

    def _ring(self, lane: LaneState, here: Candidate | None) -> Outlook:
        """Rules 7 to 9."""

        def rule(ring: LayoutTimes, ratio: float) -> Reason | Rejected:
            if here is None:
                return Reason.RING_CONTEXT
            if self._held and self._urgent:
                leaves = here.sla_ratio <= self._limit(ratio)
                return Rejected.TOLERANT_ONLY if leaves else Reason.RING_HOME
            if self._held:
                near = ring.tpot_ms <= here.tpot_ms * (1.0 + self._policy.tolerance)
                return Reason.RING_HOME if near or self._dwells else Rejected.SLOWER
            if not self._tolerant:
                return Rejected.TOLERANT_ONLY
            if lane.load.seated + lane.load.waiting < self._policy.ring_depth_min:
                return Rejected.SHALLOW
            if self._dwells:
                return Rejected.DWELL
            no_worse = ring.tpot_ms <= here.tpot_ms and ratio <= max(1.0, here.sla_ratio)
            return Reason.RING_DEPTH if no_worse else Rejected.SLOWER

        peers, own_max = self._state.peers, lane.context_max
        times = layouts.through_ring(self._facts, peers, lane.load, own_max, self._work, self._held)
        return self._outlook(RINGED, times, rule)

    def _pipeline(self, lane: LaneState, here: Candidate) -> Outlook:
        """Rule 10."""

        def rule(pipeline: LayoutTimes, ratio: float) -> Reason | Rejected:
            if not self._tolerant:
                return Rejected.TOLERANT_ONLY
            if self._work.frontier > self._policy.pipeline_cached_max * self._request.prompt_tokens:
                return Rejected.CACHED
            own_ms = pipeline.prefill_ms * self._policy.pipeline_gain
            others_ms = pipeline.queue_ms - pipeline.own_queue_ms
            gains = own_ms + others_ms <= here.ttft_ms
            no_worse = ratio <= max(1.0, here.sla_ratio)
            return Reason.PIPELINE if gains and no_worse else Rejected.SLOWER

        times = layouts.through_pipeline(
            self._facts, self._state.peers, lane.load, self._work, self._policy.bubble_max
        )
        return self._outlook(PIPELINED, times, rule)

    def _remote(self, peer: PeerState, here: Candidate | None) -> Outlook:
        """Rule 11."""

        def rule(times: LayoutTimes, ratio: float) -> Reason | Rejected:
            if here is None:
                return Rejected.NOT_AVAILABLE
            if here.sla_ratio <= 1.0:
                return Rejected.KEPT
            if self._dwells:
                return Rejected.DWELL
            gains = self._limit(ratio) < here.sla_ratio
            return Reason.PEER_SPILL if gains else Rejected.SLOWER

        work = self._work
        if here is not None:
            frontier = self._request.prompt_tokens - 1
            work = work._replace(frontier=frontier, n_tokens=1)
        times = layouts.on_peer(peer, self._facts, work, self._held)
        if here is not None and times.rejected is None:
            times = _begun_here(times, here, work.tokens_out)
        return self._outlook(ON_PEER, times, rule)


def _begun_here(there: LayoutTimes, here: Candidate, tokens_out: int) -> LayoutTimes:
    """Return the times of a turn that begins on a lane here, with `there` as those of the peer from
    the first token on: until the peer has its own first token, the turn is as slow as here."""
    here_ms = here.tpot_ms * tokens_out
    alone = there.ttft_ms / here_ms if there.ttft_ms < here_ms else 1.0
    tpot_ms = alone * here.tpot_ms + (1.0 - alone) * there.tpot_ms
    return replace(there, ttft_ms=here.ttft_ms, tpot_ms=tpot_ms)


def _not_used(outlook: Outlook) -> Outlook:
    """Return the outlook with a reason against it."""
    return replace(outlook, why=Rejected.OTHER) if isinstance(outlook.why, Reason) else outlook
