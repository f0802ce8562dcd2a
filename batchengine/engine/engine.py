"""The engine's API, which the service calls. Sessions are named by (tenant, id).

Owns start and stop. Never blocks the event loop: lane workers compute, the store's threads do the
I/O of files and SQLite, and text processes read bodies, tokenise and check grammars.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec

from batchengine import errors
from batchengine.config import Config
from batchengine.core import (
    BatchEngineError,
    DaemonLoad,
    GenerationRequest,
    ModelInfo,
    PastTurn,
    Presence,
    Stage,
)
from batchengine.engine import boot, report
from batchengine.engine.lane.supervisor import store_error
from batchengine.engine.parts import Launch, Running
from batchengine.engine.placement.migration import OnPoint, pass_point
from batchengine.engine.remote import move
from batchengine.engine.sessions import directory
from batchengine.engine.state import EngineState
from batchengine.engine.turns.stream import Generation
from batchengine.lanes.worker_process import WORKER
from batchengine.peers.transitions import LinkState
from batchengine.policy.router import BULK, FAST
from batchengine.text.frontend import TextFrontend
from kv_store.errors import StoreError

log = logging.getLogger("batchengine.engine")

SHUTDOWN_S = 5.0  # for cancelled turns to end between two steps, which take far less
GIVE_BACK_S = 10.0  # in which a peer takes at least one page back, before it is not waited for
GIVE_BACK_POLL_S = 0.05
SETTLE_S = 5.0  # for migrations that are under way when the daemon stops
OPERATIONS_MAX = 4  # of a tenant at a time: the ledger reads and writes for them, one by one
LANES_STOP_S = 40.0  # more than the shortest deadline of a step


class Engine:
    """One model with its lanes and its store. Use: `start`, `submit`..., `stop`."""

    def __init__(
        self,
        config: Config,
        *,
        worker_command: tuple[str, ...] = WORKER,
        reader: str = "",
        on_point: OnPoint = pass_point,
    ) -> None:
        """`worker_command` replaces the worker program (tests of the same protocol); `reader`
        names the function that answers `text.read`; `on_point` is called at each point of a
        migration."""
        self.config = config
        self.state = EngineState(config)
        self.metrics = self.state.metrics
        self._worker_command = worker_command
        self._reader = reader
        self._on_point = on_point
        self._phase = "loading"
        self.progress = 0.0  # share of loading that is done, 0 to 1
        self._running: Running | None = None
        self._watcher: asyncio.Task[None] | None = None
        # of operations, by tenant
        self._turns = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(OPERATIONS_MAX))

    def __repr__(self) -> str:
        state = self.state
        return f"<Engine {self._phase} turns={len(state.turns)} sessions={len(state.sessions)}>"

    # ------------------------------------------------------------------------------- state

    @property
    def phase(self) -> str:
        """Phase of the engine: loading, ready, leaving, degraded, refusing, draining or stopped."""
        if self._phase == "ready" and self.state.leaving:
            return "leaving"
        if self._phase == "ready" and not self.state.is_serving:
            return "refusing"
        if self._phase == "ready" and report.troubles(self.state):
            return "degraded"
        return self._phase

    @property
    def fatal(self) -> BaseException | None:
        """The defect for which the daemon must restart."""
        return self.state.fatal

    @property
    def running(self) -> Running:
        """The parts of the engine; raises LOADING until it has started."""
        if self._running is None:
            raise errors.LOADING(progress=self.progress)
        return self._running

    @property
    def info(self) -> ModelInfo:
        """Facts about the model; raises LOADING as `running` does."""
        return self.running.info

    @property
    def text(self) -> TextFrontend:
        """Tokenizer and chat template of the model; raises LOADING as `running` does."""
        return self.running.text

    # -------------------------------------------------------------------------- start, stop

    async def start(self, on_stage: Callable[[Stage], None]) -> None:
        """Load the model on every lane and open the store; requests may come afterwards."""
        try:
            running = await boot.start(
                Launch(
                    self.config,
                    self.state,
                    self._worker_command,
                    self._reader,
                    on_stage,
                    self._set_progress,
                    self._on_point,
                )
            )
        except BaseException:
            self._phase = "stopped"
            raise
        self._running = running
        running.begin()
        self._watcher = asyncio.create_task(self._watch(running), name="watcher")
        self.progress, self._phase = 1.0, "ready"

    def _set_progress(self, fraction: float) -> None:
        self.progress = min(0.99, fraction)  # less than before if a stage has to begin again

    async def _watch(self, running: Running) -> None:
        """Wait until a vital task ends; then fail every request, and set `fatal`."""
        error = await running.tasks.failure
        self.state.fatal, self._phase = error, "degraded"
        running.requests.fail_all(error)

    async def stop(self, drain_s: float) -> None:
        """Stop admitting, let turns finish for up to `drain_s`, end the rest with "shutdown".

        Requests that still wait for their session then get 503, with the time to retry.
        """
        if self._phase == "stopped":
            return
        self._phase, self.state.stopping = "draining", True
        if (running := self._running) is not None:
            self.leave()
            await asyncio.gather(running.requests.over(drain_s), self._given_back(drain_s))
            await running.migrator.settle(SETTLE_S)
            if self.fatal is None:
                running.requests.cancel_all()
                await running.requests.over(SHUTDOWN_S)
                await running.parking.park_all()
            await self._stop_parts(running)
        self._phase = "stopped"

    async def _given_back(self, timeout_s: float) -> None:
        """Wait until peers have taken back what is kept for them, while it gets less."""
        given, least, since = self.running.linked.given, 1 << 62, time.monotonic()
        until = since + timeout_s
        while given.n_pages and time.monotonic() < min(until, since + GIVE_BACK_S):
            if given.n_pages < least:
                least, since = given.n_pages, time.monotonic()
            await asyncio.sleep(GIVE_BACK_POLL_S)

    async def _stop_parts(self, running: Running) -> None:
        for loop in self.state.lanes:
            loop.stop()
        await running.tasks.lanes_over(LANES_STOP_S)
        running.requests.end_all()
        running.journal.flush()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await running.tasks.cancel()
        await running.close()

    # ------------------------------------------------------------------------------ requests

    def submit(self, request: GenerationRequest) -> Generation:
        """Admit one generation, or raise BatchEngineError."""
        return self.running.requests.submit(request)

    async def begin(self, request: GenerationRequest) -> Generation:
        """Choose the timeline that the request goes on with, and admit it; see `Families`."""
        return await self.running.families.begin(request)

    async def past_turn(self, tenant: str, turn_id: str, *, has_texts: bool = True) -> PastTurn:
        """Return a turn of the ledger with its answer, whose texts may be left out. Raises
        BatchEngineError (404)."""
        return await self.running.past_turns.find(tenant, turn_id, has_texts=has_texts)

    async def forget_turn(self, tenant: str, turn_id: str) -> dict[str, Any]:
        """Erase what a response has beside its tokens. Raises BatchEngineError (404, 503)."""
        forget = self.running.past_turns.forget
        return await self._to_its_end(tenant, lambda: forget(tenant, turn_id))

    async def resume(
        self, tenant: str, session_id: str, from_token: int = 0, turn_id: str = ""
    ) -> Generation:
        """Stream the session's last turn again; see `Families.resume`."""
        return await self.running.families.resume(tenant, session_id, from_token, turn_id)

    def requests(
        self, tenant: str | None = None, count_max: int | None = None
    ) -> list[dict[str, Any]]:
        """One row per request that was admitted and has neither ended nor been cancelled; with
        `tenant` only those of that tenant, with `count_max` only the first."""
        return report.request_rows(self.state, tenant, count_max)

    def explain(self, given: str, tenant: str | None = None) -> dict[str, Any]:
        """Return the routing decisions of a request or session, their reasons and their results.

        `given` is an id or a unique prefix of one; with `tenant`, among that tenant's only.
        Raises BatchEngineError (404, 409).
        """
        return self.running.dispatcher.explain(given, tenant)

    def predicted(self, request_id: str) -> dict[str, Any] | None:
        """Return the predicted lane, ttft_ms, tpot_ms and move_ms; None = no prediction."""
        return self.running.dispatcher.log.predicted(request_id)

    # ------------------------------------------------------------------------------ sessions

    def sessions(
        self, tenant: str | None = None, count_max: int | None = None
    ) -> list[dict[str, Any]]:
        """One row per session in memory or interrupted one, with `tenant` of that only; with
        `count_max` only those in memory that were used last."""
        rows = report.session_rows(self.state, tenant, count_max)
        if self._running is not None and count_max is None:
            rows += report.interrupted_rows(self._running.recovery.interrupted, tenant)
        return rows

    async def find_sessions(
        self, given: str, own: Collection[tuple[str, str]], tenant: str | None
    ) -> list[tuple[str, str]]:
        """Return (tenant, id) of the sessions that `given` may mean; see `directory.find`."""
        running = self.running
        names = [*self.state.names(), *running.recovery.interrupted]
        return await directory.find(names, running.store, given, own, tenant)

    def has_session(self, tenant: str, session_id: str) -> bool:
        """Whether `sessions` lists this session."""
        is_interrupted = self._running is not None and (
            (tenant, session_id) in self._running.recovery.interrupted
        )
        return is_interrupted or self.state.find(tenant, session_id) is not None

    def timelines(self, tenant: str, session_id: str) -> list[str]:
        """Ids of the timelines that a session's name means, the main one last."""
        return self.running.families.of_name(tenant, session_id)

    async def presence(self, tenant: str, session_id: str) -> Presence:
        """Whether this session is in memory, in the ledger only, or nowhere."""
        if self.state.find(tenant, session_id) is not None:
            return Presence.IN_MEMORY
        is_stored = await self.running.recovery.is_stored(tenant, session_id)
        return Presence.STORED if is_stored else Presence.UNKNOWN

    async def stored_sessions(self, count_max: int) -> list[dict[str, Any]]:
        """One row per session of the ledger, also of those in memory; most recently used first."""
        return await report.stored_rows(self.running.store, count_max)

    async def session_detail(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Return all facts about one session except its text."""
        return await self.running.operations.detail(tenant, session_id)

    async def why(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Where the last prompt differed from the session's history, and the tokens recomputed."""
        return await self.running.operations.why(tenant, session_id)

    async def messages(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Return the session's history as messages."""
        return await self.running.operations.messages(tenant, session_id)

    async def fork(
        self, tenant: str, session_id: str, new_id: str, name: str = ""
    ) -> dict[str, Any]:
        """Create a second session with the same timeline and the same pages; `name`: what its
        client calls it."""
        fork = self.running.operations.fork
        return await self._to_its_end(tenant, lambda: fork(tenant, session_id, new_id, name))

    async def park(
        self, tenant: str, session_id: str, tool_call_id: str | None = None
    ) -> dict[str, Any]:
        """Move the KV of a session that waits for a tool out of its lane."""
        park = self.running.operations.park
        return await self._to_its_end(tenant, lambda: park(tenant, session_id, tool_call_id))

    async def drop(self, tenant: str, session_id: str) -> dict[str, Any]:
        """Delete the session and its history."""
        drop = self.running.operations.drop
        return await self._to_its_end(tenant, lambda: drop(tenant, session_id))

    async def _to_its_end(
        self, tenant: str, operation: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        """Run an operation whether its caller waits for it or leaves: none stays half done.

        Of one tenant OPERATIONS_MAX run at a time, and others wait.
        """

        async def outcome() -> dict[str, Any] | BatchEngineError:
            try:
                async with self._turns[tenant]:
                    return await operation()
            except BatchEngineError as error:
                return error

        found = await asyncio.shield(self.running.tasks.spawn(outcome(), "operation"))
        if isinstance(found, BatchEngineError):
            raise found
        return found

    async def promote(self, tenant: str, session_id: str, to: str | None = None) -> dict[str, Any]:
        """Move a session to lane `to`, or to the best fast one, between two of its tokens.

        `to` may be a peer, which then computes the turn that runs. Without `to` it is a peer if
        lanes here are predicted to break the turn's promise and the peer less so; if that peer
        refuses, it is the best lane here, or the session stays, and the report says why.
        Returns a MoveReport as a dict. Raises BatchEngineError: then nothing has changed.
        """
        return await self._relocate(tenant, session_id, to, FAST)

    async def demote(self, tenant: str, session_id: str, to: str | None = None) -> dict[str, Any]:
        """Like `promote`, by default to the best lane for work that can wait."""
        return await self._relocate(tenant, session_id, to, BULK)

    async def _relocate(
        self, tenant: str, session_id: str, to: str | None, tier: str
    ) -> dict[str, Any]:
        session = self.state.find(tenant, session_id)
        if session is None:
            if await self.presence(tenant, session_id) is Presence.STORED:
                raise errors.SESSION_AT_REST(session_id=session_id)
            raise errors.UNKNOWN_SESSION(given=session_id)
        running = self.running
        moved = await move.relocate(
            self.state, running.dispatcher, running.remote.away, session, to, tier
        )
        return moved.as_dict()

    # ------------------------------------------------------------------------------- operator

    def peer_names(self) -> list[str]:
        """Names of the peers, whether they are linked now or not."""
        return [] if self._running is None else self._running.plans.peer_names()

    def lanes(self) -> list[dict[str, Any]]:
        """One row per lane."""
        return report.lane_rows(self.state)

    def load(self) -> DaemonLoad:
        """Return what the lanes have to do now."""
        return self.state.load

    def stats(self) -> dict[str, Any]:
        """Return the numbers of /health and of the status command."""
        interrupted = 0 if self._running is None else len(self._running.recovery.interrupted)
        links = {} if self._running is None else self._running.peers.links
        return {
            **report.numbers(self.state),
            "sessions_interrupted": interrupted,
            "peers": len(links),
            "peers_up": sum(link.state is LinkState.UP for link in links.values()),
            **({} if self._running is None else self._running.linked_rows.numbers()),
        }

    def leave(self, *, undo: bool = False) -> None:
        """Take no new sessions, have peers take back the pages that are held for them, and compute
        the turns that run here as far as they have room.

        Sessions in memory go on. With `undo`, take new sessions again.
        """
        state = self.state
        if state.leaving == undo:
            log.info("new sessions are %s", "taken again" if undo else "not taken any more")
        state.leaving = not undo
        state.peer_load = msgspec.structs.replace(state.peer_load, leaves=state.leaving)
        if state.leaving and self._phase == "ready":  # else turns end with the daemon
            self.running.remote.away.leave()

    def remains(self) -> dict[str, Any]:
        """What a daemon that leaves still waits for: requests that have not ended, and pages that
        it keeps or computes for peers."""
        rows, linked = self.requests(), self.running.linked_rows
        given = linked.given()
        stages = [row for row in linked.pipelines() if row["role"] == "stage"]
        return {
            "leaving": self.state.leaving,
            "requests": rows,
            "given": given,
            "stages": stages,
            "over": not (rows or given or stages),
        }

    async def peers(self, *, measure: bool = False) -> dict[str, Any]:
        """Facts about the links to other daemons; with `measure` after a series of bytes on each
        that is up. Raises PEERS_OFF."""
        peers = self.running.peers
        if measure:
            await peers.measure()
        status, linked = peers.status(), self.running.linked_rows
        rows = [row | linked.of_peer(row["name"]) for row in status["peers"]]
        return {**status, "peers": rows, "pipelines": linked.pipelines()}

    async def store_op(self, op: str) -> dict[str, Any]:
        """Run `op`: stat, verify (read every page, invalidate bad ones) or gc (collect garbage
        and rewrite the ledger)."""
        store = self.running.store
        try:
            if op == "stat":
                usage = await asyncio.wrap_future(store.ledger.usage())
                return {**store.stat(), **report.tenant_rows(usage)}
            if op == "verify":
                found = [await asyncio.wrap_future(pool.verify_all()) for pool in store.pools]
                each = [dataclasses.asdict(one) for one in found]
                return {name: sum([one[name] for one in each]) for name in each[0]}
            if op == "gc":
                return await self.running.maintenance.collect_all()
        except StoreError as error:
            raise store_error(errors.STORE_FAILED, error) from error
        raise ValueError(f"{op} is none of stat, verify and gc")
