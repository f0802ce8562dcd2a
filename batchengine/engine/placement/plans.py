"""What the router knows of peers: their speeds, the links to them, what they would keep, and the
pipeline that would be used now; and what a decision for a strategy over peers begins.

Owns the measurement of links and the plan, which is made anew in a thread when speeds or peers
have changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable

import msgspec

from batchengine.core import PAGE_TOKENS, BatchEngineError, ModelInfo
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.linked.pipelines import PipelineQueue, Pipelines, QueuedPrompt
from batchengine.engine.linked.routes import ALL_PAGES, RouteKeeper
from batchengine.engine.placement.decision_log import DecisionLog, DecisionRecord
from batchengine.engine.turns.stream import Generation
from batchengine.engine.turns.turn import Turn
from batchengine.kv.states import save_interval
from batchengine.peers.features import TURNS
from batchengine.peers.link import PeerLink
from batchengine.peers.peers import PEER_TENANT, Peers
from batchengine.peers.transitions import LinkState
from batchengine.policy.cost import LaneLoad, LinkSpeed, StepCost, work_of
from batchengine.policy.linked import layouts, pipeline
from batchengine.policy.linked.layouts import Held, LayoutFacts, PeerState
from batchengine.policy.linked.pipeline import (
    PipelineModel,
    PipelinePlan,
    PromptWork,
    StageHost,
)
from batchengine.policy.linked.ring import shape_of
from batchengine.policy.router import ON_PEER, PIPELINED, RINGED, Decision, Reason, RouteState
from batchengine.session import Session
from batchengine.session_kv import SELF

log = logging.getLogger("batchengine.placement")

LOOK_S = 0.5
PLANNED_TOKENS = 8192  # of the prompt that a plan is made for
HOSTS_MAX = 6  # a plan for so many takes half a second
CACHED_MAX = 0.25  # share of a prompt that may have KV when a pipeline computes it from its start
PATIENCE = 3.0  # a pipeline may take so many times the predicted time, and 10 s
FAILED_S = 30.0  # without pipelines after one has failed
CHANGED = 1.25  # ratio of a speed to the one planned with, from which on a plan is made anew


SendAway = Callable[[Turn, str, Callable[[], object]], object]  # see `AwayTurns.expect`


class PeerPlans:
    """The router's view of the peers. Use: `with_peers`, `held`, `prepare`; `run` as a task."""

    def __init__(
        self,
        loop: LaneLoop,
        peers: Peers,
        pipelines: Pipelines,
        keeper: RouteKeeper,
        queue: PipelineQueue,
        info: ModelInfo,
        send_away: SendAway,
    ) -> None:
        self._keeper, self.send_away = keeper, send_away
        self._loop, self._peers, self._pipelines, self.queue = loop, peers, pipelines, queue
        shape, n_layer = info.shape, info.n_layer
        self._is_whole = shape.is_whole  # no pipelines
        self._kv_token_bytes = shape.page_payload_bytes // PAGE_TOKENS
        stored = self._kv_token_bytes  # of a token, with its share of the states that are sent
        if shape.state_bytes:
            stored += shape.state_bytes // save_interval(shape.state_bytes, stored)
        self._model = PipelineModel(n_layer, stored // n_layer, 4 * shape.n_embd)
        n_layer_whole = max(1, shape.n_layer_whole)  # no query leaves where windows hide
        self._shape = shape_of(
            n_layer_whole,
            shape.n_head,
            shape.n_kv_head,
            shape.head_dim,
            shape.v_first,
        )
        self._planned_with: dict[str, tuple[float, ...]] = {}
        # with the pipeline in use
        self.facts = LayoutFacts(
            self._shape,
            self._kv_token_bytes,
            unheld=keeper.unheld,
            state_bytes=shape.state_bytes,
        )
        self._again_at = 0.0

    def with_peers(
        self, state: RouteState, session: Session | None = None, *, remote: bool = True
    ) -> RouteState:
        """The state with the peers, for the router. With `remote` their lanes can be chosen, unless
        the session has pages with peers or is itself a peer's."""
        strategies = (layouts.RING,)
        if time.monotonic() >= self._again_at:
            strategies += (layouts.PIPELINE,)
        if session is not None and (session.kv.held or session.tenant.startswith(PEER_TENANT)):
            remote = False
        if remote:
            strategies += (layouts.REMOTE,)
        queue_ms, own_queue_ms = self.queue.queue_ms("" if session is None else session.tenant)
        return msgspec.structs.replace(
            state,
            peers=tuple([self._peer(link) for _, link in sorted(self._peers.links.items())]),
            facts=msgspec.structs.replace(self.facts, queue_ms=queue_ms, own_queue_ms=own_queue_ms),
            strategies=strategies,
        )

    def peer_names(self) -> list[str]:
        """Names of the peers, whether they are linked now or not."""
        return sorted(self._peers.links)

    def held(self, session: Session, tokens: int) -> tuple[Held, float]:
        """Which of the leading `tokens` of a session peers hold, as (peer, tokens), and the time
        in ms to bring them here, or to compute them if a peer gets no work now."""
        found: list[tuple[str, int]] = []
        for segment in session.kv.held:
            n = min(tokens, segment.n_pages * PAGE_TOKENS)
            if n and segment.peer != SELF:
                found.append((segment.peer, n))
            tokens -= n
        if not found:
            return (), 0.0
        links = filter(None, map(self._peers.links.get, {name for name, _ in found}))
        peers = [self._peer(link) for link in links]
        ms = layouts.gather_ms(tuple(found), peers, self._kv_token_bytes)
        if math.isinf(ms):
            ms = self._cost(None).predict_ms(work_of([(0, sum([n for _, n in found]))]))
        return tuple(found), ms

    def expect(self, generation: Generation, record: DecisionRecord) -> bool:
        """Count the prompt as one of the pipeline's from now on, if the decision is to use it;
        returns whether it is."""
        if (plan := _pipeline_of(record)) is None:
            return False
        stages = plan.stages
        own = sum(stage.end - stage.first for stage in stages if stage.push is None)
        found = next(one for one in record.decision.outlooks if one.strategy == PIPELINED)
        n_tokens = record.request.prompt_tokens
        prompt = QueuedPrompt(record.tenant, n_tokens, own / stages[-1].end, found.alone_ms)
        self.queue.begin(generation, prompt)
        return True

    async def prepare(self, turn: Turn, decisions: DecisionLog) -> None:
        """Begin what the decision about the turn says: where its pages are to be, that a peer
        computes it, and a pipeline that fills the store with full pages of the prompt.

        Whatever comes of it, the turn may begin: it finds what was computed by its content.
        """
        record = decisions.of_request(turn.generation.request_id)
        if record is not None:
            self._arrange(turn.session, record.decision)
            if record.decision.strategy == ON_PEER:
                self.send_away(turn, record.decision.lane, lambda: None)  # it is on the best lane
            try:
                await self._fill_prefix(turn, record)
            finally:
                self.queue.end(turn.generation)

    def _arrange(self, session: Session, decision: Decision) -> None:
        """Have the session's pages placed as the decision says."""
        if decision.reason is Reason.RING_HOME:
            return  # as they lie
        wanted: int | None = None
        if decision.strategy.decode == layouts.LOCAL and session.kv.held:
            wanted = ALL_PAGES
        elif decision.reason is Reason.RING_DEPTH:
            ring = next(one for one in decision.outlooks if one.strategy == RINGED)
            wanted = ring.tokens_here // PAGE_TOKENS
        self._keeper.want(session, wanted)

    def gather(self, session: Session) -> None:
        """Bring the session's pages here as soon as there is room for all: a person waits for it,
        or will."""
        if session.kv.held:
            self._keeper.want(session, ALL_PAGES)

    async def _fill_prefix(self, turn: Turn, record: DecisionRecord) -> None:
        plan, session = _pipeline_of(record), turn.session
        if plan is None:
            return
        tokens, predicted = session.tokens[:-1], record.decision.predicted
        known = self._loop.kv.prefix.stored_tokens(session.tokens, session.salt)
        if known > CACHED_MAX * len(tokens):
            record.note(f"no pipeline: {known} tokens of the prompt are in the store")
            return
        if not self._loop.kv.states.has_room:
            record.note("no pipeline: the store has no room for a recurrent state")
            return
        if len(tokens) // PAGE_TOKENS > self._loop.seats.pages_here:
            record.note("no pipeline: the prompt has more pages than this daemon keeps")
            return
        stages = [(stage.name, stage.first, stage.end) for stage in plan.stages]
        deadline_s = PATIENCE * (0.0 if predicted is None else predicted.ttft_ms) / 1000 + 10.0
        began, generation = time.monotonic(), turn.generation
        pages, why = await self._pipelines.fill(
            stages,
            plan.chunk_tokens,
            tokens,
            session,
            deadline_s,
            lambda: generation.is_over,
            lambda n_pages: self.queue.advance(generation, n_pages * PAGE_TOKENS),
        )
        if why and not generation.is_over:
            self._again_at = time.monotonic() + FAILED_S
        ended, took_s = f": {why}" if why else "", time.monotonic() - began
        record.note(f"the pipeline computed {pages} pages in {took_s:.2f} s{ended}")

    async def run(self) -> None:
        """Measure links and keep the plan up to date, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for link in list(self._peers.links.values()):
                if self._keeper.is_served(link) and link.bandwidth is None:
                    with contextlib.suppress(BatchEngineError):
                        await link.measure_bandwidth()
            if self._is_changed():
                await self._plan()

    def _usable(self) -> list[PeerLink]:
        if self._is_whole:
            return []
        links = [link for _, link in sorted(self._peers.links.items())]
        return [link for link in links if self._pipelines.can_use(link.name)][: HOSTS_MAX - 1]

    def _cost(self, link: PeerLink | None) -> StepCost:
        """Measured cost of this daemon's lane, or that of a peer: by the ratio of their speeds."""
        own = self._loop.cost.cost
        rate = 0 if link is None or link.is_of_other_model else link.load.prefill_tokens_per_s
        if not rate or not self._loop.meter.steps:
            return own
        ratio = 1000.0 / rate / own.prefill_token_ms
        return StepCost(*(ratio * each for each in own))

    def _peer(self, link: PeerLink) -> PeerState:
        load, cost = link.load, self._cost(link)
        entries = load.requests_running + load.requests_waiting
        state = link.state.value
        if link.state is LinkState.UP:
            is_slow = bool(self._keeper.why_slow(link.name))
            state = layouts.LEAVING if load.leaves else layouts.SLOW if is_slow else state
        return PeerState(
            link.name,
            state,
            LaneLoad(
                cost,
                seated=load.requests_running,
                waiting=load.requests_waiting,
                step_ms=cost.fixed_ms + cost.decode_entry_ms * entries,
                prefill_ms=tuple(map(float, load.prefill_ms)),
                stage_ms=float(load.stage_ms),
            ),
            load.kv_free_bytes,
            (link.rtt_us or 0.0) / 1000,
            (link.bandwidth or 0.0) / 1000,
            self._keeper.bytes_free(link.name),
            link.offers(TURNS),
        )

    def _speeds(self) -> dict[str, tuple[float, ...]]:
        found = {"": tuple(self._cost(None)[:2])}
        for link in self._usable():
            if link.bandwidth:
                found[link.name] = (*self._cost(link)[:2], link.bandwidth)
        return found

    def _is_changed(self) -> bool:
        now, then = self._speeds(), self._planned_with
        return now.keys() != then.keys() or any(
            not 1 / CHANGED < a / b < CHANGED
            for name, speeds in now.items()
            for a, b in zip(speeds, then[name], strict=True)
        )

    async def _plan(self) -> None:
        self._planned_with = self._speeds()
        usable = [link for link in self._usable() if link.name in self._planned_with]
        hosts = [self._host("", None)] + [self._host(link.name, link) for link in usable]
        speeds = {
            link.name: LinkSpeed((link.bandwidth or 1.0) / 1000, (link.rtt_us or 0.0) / 2000)
            for link in usable
        }
        links: dict[tuple[str, str], LinkSpeed] = {}
        for one, speed in speeds.items():
            links["", one] = links[one, ""] = speed
            for other, second in speeds.items():  # between two peers: as the worse of both
                if one != other:
                    links[one, other] = LinkSpeed(
                        min(speed.bytes_per_ms, second.bytes_per_ms),
                        max(speed.latency_ms, second.latency_ms),
                    )
        prompt = PromptWork(0, PLANNED_TOKENS)
        found = await asyncio.to_thread(pipeline.plan, hosts, links, "", self._model, prompt)
        is_alone = found is None or len(found.stages) < 2
        self.facts = msgspec.structs.replace(self.facts, pipeline=None if is_alone else found)
        if found is not None:
            stages = ", ".join(f"{s.name or 'here'} {s.first}-{s.end}" for s in found.stages)
            log.info("pipeline of prompts: %s", stages)

    def _host(self, name: str, link: PeerLink | None) -> StageHost:
        cost, n = self._cost(link), self._model.n_layers
        return StageHost(
            name, cost.fixed_ms / n, cost.prefill_token_ms / n, cost.prefill_pair_ms / n
        )


def _pipeline_of(record: DecisionRecord) -> PipelinePlan | None:
    """The pipeline that a prompt is to go through; None = it is not."""
    facts = record.state.facts
    is_used = record.decision.strategy.prefill == layouts.PIPELINE
    return facts.pipeline if is_used and facts is not None else None
