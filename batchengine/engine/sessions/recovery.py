"""A session that comes back: from the ledger to a live timeline, and on with a turn that broke off.

Owns what one life of the engine learns from the ledger of the lives before it: tokens, epoch, the
turn to go on with, suspects, and which tool calls a session waits for; and the reason whenever KV
that should be there is not. Refuses to compute or to move pages: lanes and their tables do that.

The timeline decides everything. A request whose prompt is the beginning of the timeline may be a
repetition: if the ledger says that the last turn was asked for in the same way, its tokens are
sent again and the turn goes on from there, since the same request has the same tokens. Otherwise
the client's prompt wins, and the timeline is cut where the two differ.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

import msgspec

from batchengine import errors
from batchengine.core import PAGE_TOKENS, GenerationRequest
from batchengine.engine.lane.suspects import STRIKES_MAX, Suspects
from batchengine.engine.sessions.crash_marker import CrashMarker
from batchengine.engine.sessions.directory import durable_name, name_of
from batchengine.engine.state import EngineState
from batchengine.engine.turns import records
from batchengine.engine.turns.journal import DONE, INCARNATIONS, RUNNING, Journal
from batchengine.engine.turns.records import (
    CALLS_FIELD,
    ParkedMark,
    SessionFacts,
    SessionMeta,
    session_meta,
    turn_record,
)
from batchengine.engine.turns.stream import Continuation, Generation
from batchengine.engine.turns.turn import Turn
from batchengine.kv import LaneKv
from batchengine.lanes.worker_process import Lane
from batchengine.session import (
    LOG_UNKNOWN,
    NOT_LOGGED,
    Session,
    common_prefix,
)
from batchengine.session_kv import PendingRows, page_start, rows_in
from batchengine.wire import FromArena
from kv_store import keys
from kv_store.arenas.orphaned import ORPHANED_S
from kv_store.errors import StoreError
from kv_store.layout import differing_fields
from kv_store.ledger.queries import SessionInfo, SessionRecord, TurnInfo
from kv_store.store import Store

log = logging.getLogger("batchengine.reopen")

CALLS_MAX = 4096  # tool calls of one tenant that are remembered at once,
CALLS_ALL = 16 * CALLS_MAX  # and of all of them
ORPHANED_SESSIONS = 4096  # whose rows in arenas of earlier lives are kept for them
TIDY_S = 5.0  # between looks at the arenas of earlier lives
# This run did not see them go: evicted in an earlier run, in a damaged extent, or never sealed.
PAGES_GONE = "pages are no longer in the store"


class SessionRecovery:
    """What the ledger knows that memory does not. All methods run on the engine's loop."""

    def __init__(
        self, state: EngineState, store: Store, journal: Journal, suspects: Suspects
    ) -> None:
        self._state = state
        self._suspects = suspects
        self._store = store
        self._journal = journal
        self._calls: dict[str, dict[str, str]] = {}  # tenant -> tool call -> session id
        self.interrupted: dict[tuple[str, str], SessionInfo] = {}  # amid a turn when it ended

    def meta(self, session: Session) -> SessionMeta:
        """What the ledger keeps of a named session."""
        facts = self._state.facts.get(session.key)
        return SessionMeta() if facts is None else facts.meta

    def closing_meta(self, turn: Turn) -> SessionMeta:
        """What the ledger keeps of the session as its turn ends: whether it waits for a tool now
        is part of it."""
        facts = self._state.facts.get(turn.session.key)
        if facts is None:
            return SessionMeta()
        if facts.parks is not None or turn.generation.request.park:
            parked = ParkedMark.now(facts.parks or "")
            facts.meta = msgspec.structs.replace(facts.meta, parked=parked)
        return facts.meta

    async def start(self, crash_marker: CrashMarker) -> None:
        """Read what the last run left: broken turns, suspects, parked tool calls. No tokens."""
        ledger = self._store.ledger
        infos, suspects = await asyncio.gather(
            asyncio.wrap_future(ledger.list_sessions()),
            asyncio.wrap_future(ledger.suspects()),
        )
        await self._suspects.load(suspects, crashed=bool(crash_marker.text))
        crash_marker.listen()
        self._store.orphaned.retain(info.id.encode() for info in infos[:ORPHANED_SESSIONS])
        self.interrupted = {name_of(i.id): i for i in infos if i.state == RUNNING}
        recent = [info for info in infos[:CALLS_ALL] if CALLS_FIELD in info.meta]
        for info in reversed(recent):  # the newest is remembered last
            for call in session_meta(info.meta).calls:
                self.remember_call(info.tenant, call, name_of(info.id)[1])

    async def tidy(self) -> None:
        """Delete arenas of earlier runs once their rows are wanted no more; ends within minutes."""
        orphaned = self._store.orphaned
        deadline = asyncio.get_running_loop().time() + ORPHANED_S
        while orphaned.names or orphaned.busy:
            over = asyncio.get_running_loop().time() > deadline
            await asyncio.to_thread(orphaned.sweep, everything=over)
            if over:
                return
            await asyncio.sleep(TIDY_S)

    # ---------------------------------------------------------------------------- tool calls

    def remember_call(self, tenant: str, call: str, session_id: str) -> None:
        """The session waits for this tool call; of too many, who has most forgets its oldest."""
        mine = self._calls.setdefault(tenant, {})
        mine.pop(call, None)
        mine[call] = session_id
        if len(mine) <= CALLS_MAX:
            if sum(map(len, self._calls.values())) <= CALLS_ALL:
                return
            mine = max(self._calls.values(), key=len)
        del mine[next(iter(mine))]

    def session_of(self, tenant: str, calls: Sequence[str]) -> str | None:
        """The session that waits for one of these calls; the last call counts most."""
        mine = self._calls.get(tenant, {})
        for call in reversed(calls):
            found = mine.get(call)
            if found is not None:
                return found
        return None

    def forget(self, tenant: str, session_id: str) -> None:
        """The session is dropped: its strikes and calls with it."""
        name = durable_name(tenant, session_id)
        self._suspects.forget(name)
        self.interrupted.pop((tenant, session_id), None)
        self._store.orphaned.forget(name.encode())
        mine = self._calls.pop(tenant, {})
        if kept := {call: name for call, name in mine.items() if name != session_id}:
            self._calls[tenant] = kept

    # ------------------------------------------------------------------------------- look

    def must_load(self, session: Session, generation: Generation) -> bool:
        """Whether the ledger must be asked before this request may change the session."""
        request = generation.request
        if request.session_id is None or generation.looked:
            return False
        if session.logged < 0 or generation.resumes is not None:
            return True
        n = len(request.prompt)
        is_prefix = len(session.tokens) > n and session.tokens[:n] == list(request.prompt)
        return is_prefix or bool(request.idempotency_key)

    async def load(self, session: Session, generation: Generation) -> None:
        """What the ledger has of the session, and which of its turns this request goes on with.

        Raises BatchEngineError: a damaged history, a session that must not run, nothing to resume.
        """
        generation.looked = True
        found = await self._read_settled(session)
        if found is None:
            session.logged = NOT_LOGGED
            if generation.resumes is not None:
                raise errors.UNKNOWN_SESSION(given=session.session_id)
            return
        if generation.resumes is not None:
            self._check_resume(session, generation, found)
        self._reconcile(session, generation, found)
        facts = self._take_over(session, found)
        if (strikes := self._suspects.strikes(session)) >= STRIKES_MAX:
            raise errors.SESSION_QUARANTINED(session_id=session.session_id, strikes=strikes)
        self.interrupted.pop((session.tenant, session.session_id), None)
        if session.logged < len(session.tokens) and len(generation.request.prompt) <= len(
            session.tokens
        ):
            # Tokens that the ledger refused were sent to no reader that may rely on them.
            self._rebase(session, session.tokens[: max(1, session.logged)])
        generation.continuation = _find(found, session, generation, bool(facts.changed))

    def _check_resume(self, session: Session, generation: Generation, found: SessionRecord) -> None:
        """Before anything changes: a reader that is refused must not cost the session its past.

        Raises BatchEngineError: the turn is not the last one, or its prompt is no longer there.
        """
        asked, last = generation.request, found.turns[-1] if found.turns else None
        if last is None:
            raise errors.NOTHING_TO_RESUME(session_id=session.session_id)
        if last.id != asked.request_id:  # it began since this reader was let in
            raise errors.TURN_FOLLOWED(session_id=session.session_id, turn_id=asked.request_id)
        prompt, n = list(asked.prompt), last.prompt_end
        timelines = [found.tokens]
        if session.tokens and session.logged != LOG_UNKNOWN:
            timelines.append(session.tokens)  # it is what counts; else the ledger does
        is_prompt = all(len(t) >= n and t[:n] == prompt for t in timelines)
        if not is_prompt or "tokenizer_hash" in self._changes(found):
            raise errors.NOTHING_TO_RESUME(session_id=session.session_id)

    def _reconcile(self, session: Session, generation: Generation, found: SessionRecord) -> None:
        """A record was refused, so memory and ledger may have gone apart: the ledger's timeline
        wins if the request goes back to it: that one is durable, and the other was refused."""
        prompt, kept = list(generation.request.prompt), found.tokens
        if session.logged != LOG_UNKNOWN or not session.tokens or kept[: len(prompt)] != prompt:
            return
        if "tokenizer_hash" not in self._changes(found):
            self._rebase(session, kept)

    def _rebase(self, session: Session, tokens: Sequence[int]) -> None:
        """As `Session.rebase`, of a session without a turn; its lane's table follows."""
        session.rebase(tokens)
        if (home := self._state.home.get(session.key)) is not None:
            home.kv.slots.fit(session)

    # -------------------------------------------------------------------------------- begin

    def begin(self, turn: Turn, lane: Lane) -> None:
        """The request becomes the session's timeline, or its turn goes on; both are written.

        Sets what the turn may expect of old KV, and why less than that would be no surprise.
        """
        session, generation = turn.session, turn.generation
        request, more = generation.request, generation.continuation
        turn.timeline = len(session.tokens)
        if more is None:
            old = session.tokens
            shared = session.rebase(request.prompt)
            found = records.rebase(old, session.tokens, shared)
        else:
            shared = turn.timeline
            session.frontier = max(0, min(session.frontier, shared - 1))
            found = records.rebase(session.tokens, session.tokens, shared)
        turn.shared = shared
        if request.session_id is None:
            return
        facts = self._state.facts.setdefault(session.key, SessionFacts(SessionMeta()))
        facts.meta = SessionMeta(
            self._store.pages.repr_id.hex(),
            found,
            found if found.is_edit else facts.meta.edit,
            facts.meta.calls,
        )
        incarnation = self._store.epoch * INCARNATIONS + lane.incarnation
        self._suspects.begin(turn)
        if more is not None and more.turn_id:
            self._journal.go_on(turn, more.turn_id, lane.name, incarnation, facts.meta)
        else:
            self._journal.begin(turn, shared, lane.name, incarnation, facts.meta)

    # ----------------------------------------------------------------------------- open rows

    def import_open_rows(self, turn: Turn, kv: LaneKv) -> None:
        """After the sealed pages of the prefix: an open page that exists somewhere, row by row.

        It is in an arena of the life before this one, if the session was killed with it, or in the
        store, as a tail that this session or a twin of it parked.
        """
        session = turn.session
        first = len(session.kv.codes)
        home = self._state.home.get(session.key)
        if home is not None and home.draining:
            return  # no session there takes them
        if session.kv.pending or session.kv.open or session.frontier != session.kv.reach():
            return
        ids = session.tokens[session.frontier :]
        if len(ids) < 2:
            return  # one is left to compute in any case
        left = self._left_open(session, first)
        tail = self._tail(session, first, ids, turn.priority)
        if tail is not None and (not left or left[0].rows <= tail.rows):
            kv.slots.claim_pending(session, [tail])
        elif left:
            if tail is not None:
                tail.release()
            kv.slots.claim_pending(session, left)

    def _left_open(self, session: Session, first: int) -> list[PendingRows]:
        """Pages from `first` on that the last life left in its arenas, without a gap.

        One epoch is one timeline, so rows in sequence that hold our tokens, after pages that
        hold our tokens, are ours, even beyond what the ledger knows: the client sent those.
        """
        facts = self._state.facts.get(session.key)
        if facts is None or not facts.old_epoch:
            return []
        self._store.orphaned.retry()
        life, found, page = facts.old_owner // INCARNATIONS, list[PendingRows](), first
        for slot in self._store.orphaned.find(session.name, facts.old_epoch):
            number = int(slot.arena.rpartition(".")[2])
            if slot.page_index != page or number // INCARNATIONS != life:
                continue  # of one page, the slot with most rows comes first
            rows = min(slot.rows, rows_in(page, len(session.tokens)))
            if rows < 1:
                break
            source = FromArena(slot.arena, slot.slot, slot.gen, facts.old_epoch)
            found.append(PendingRows(page, rows, source, _nothing))
            if rows < PAGE_TOKENS:
                break
            page += 1
        return found

    def _tail(
        self, session: Session, first: int, ids: Sequence[int], priority: int
    ) -> PendingRows | None:
        """The longest parked tail that our tokens begin with after page `first`."""
        store, salt, parent = self._store, session.salt, keys.ROOT_KEY
        if first and len(session.kv.keys) >= first:
            parent = session.kv.keys[first - 1]
        elif first:
            before = session.tokens[: page_start(first)]
            parent = keys.chain_keys(before, store.pages.repr_id, salt)[-1]
        ref = store.pages.find_tail(parent, ids, salt, pin=True, priority=priority)
        if ref is None:
            return None
        return PendingRows(first, store.pages.page_tokens(ref), ref, lambda: store.pages.unpin(ref))

    def count_reuse(self, turn: Turn) -> None:
        """The turn computes: what it reuses is known, and why that is less than it might be."""
        session, generation, found = turn.session, turn.generation, turn.reused
        facts = self._state.facts.get(session.key)
        reason, kind = _shortfall(turn, facts)
        generation.reuse_reason = reason
        metrics = self._state.metrics
        if kind:
            metrics.kv_rejected_total.labels(kind).inc()
        if facts is None or turn.generation.request.session_id is None:
            return
        if facts.restored and found:
            metrics.kv_restored_tokens_used_total.inc(found)
        if facts.restored:
            self._store.orphaned.forget(session.name)
            facts.restored, facts.changed, facts.old_epoch = False, (), 0
        if facts.meta.rebase is not None:
            met = msgspec.structs.replace(facts.meta.rebase, kept=found, reason=reason)
            edit = met if met.is_edit else facts.meta.edit
            facts.meta = SessionMeta(facts.meta.repr_id, met, edit, facts.meta.calls)

    # ------------------------------------------------------------------------------- records

    async def resumable(
        self, tenant: str, session_id: str, from_token: int, turn_id: str = ""
    ) -> GenerationRequest:
        """The request of the session's last turn, as its client had sent it. 404, 409, 400.

        With `turn_id` only if that is the last turn: tokens of another are no answer's rest.
        """
        found = await self.record(durable_name(tenant, session_id), session_id)
        turn = found.turns[-1] if found.turns else None
        if turn is not None and turn_id not in ("", turn.id):
            raise errors.TURN_FOLLOWED(session_id=session_id, turn_id=turn_id)
        asked = None if turn is None else turn_record(turn.sampling)
        if turn is None or asked is None:
            raise errors.NOTHING_TO_RESUME(session_id=session_id)
        if not 0 <= from_token <= asked.tokens_max:
            raise errors.FROM_TOKEN_OUTSIDE(from_token=from_token, tokens_max=asked.tokens_max)
        prompt = found.tokens[: turn.prompt_end]
        return asked.request(turn.id, session_id, tenant, prompt)

    async def record(self, name: str, session_id: str) -> SessionRecord:
        """Everything durable about a session; 404 if there is nothing."""
        found = await self._read(name)
        if found is None:
            raise errors.UNKNOWN_SESSION(given=session_id)
        return found

    async def is_stored(self, name: str) -> bool:
        """Whether the ledger has the session."""
        return await self._read(name) is not None

    async def _read(self, name: str) -> SessionRecord | None:
        try:
            found = await asyncio.wrap_future(self._store.ledger.load_session(name))
        except StoreError as error:
            log.error("session %r: %s", name, error)
            raise errors.SESSION_DAMAGED(why=error.why or "the ledger cannot read it") from error
        return None if found is None else dataclasses.replace(found, turns=_in_order(found.turns))

    async def _read_settled(self, session: Session) -> SessionRecord | None:
        """As `_read`, of a session that no migration gives another owner meanwhile."""
        while True:
            epoch = session.epoch
            found = await self._read(session.name.decode())
            if session.key in self._state.moves:
                await self._state.moved(session)
            elif session.epoch == epoch:
                return found

    def _take_over(self, session: Session, found: SessionRecord) -> SessionFacts:
        """The record becomes the session, or what the session was refused is known again."""
        info, facts = found.info, self._state.facts.get(session.key)
        if facts is None:
            facts = self._state.facts[session.key] = SessionFacts(session_meta(info.meta))
            facts.changed = self._changes(found)
            facts.restored = True
            if any(turn.status == RUNNING for turn in found.turns):
                self._suspects.cut_off(session)
        if not session.tokens:
            session.tokens = list(found.tokens)
            if "tokenizer_hash" in facts.changed:
                session.tokens = []  # ids of another vocabulary mean nothing here
            facts.old_epoch, facts.old_owner = info.epoch, info.owner_incarnation
            session.epoch = max(session.epoch, info.epoch + 1)
        session.epoch = max(session.epoch, info.epoch)
        session.logged_epoch = info.epoch
        known = common_prefix(session.tokens, found.tokens)
        session.logged = known
        if known < len(found.tokens):
            self._journal.cut(session, known)
        return facts

    def _changes(self, found: SessionRecord) -> tuple[str, ...]:
        """Fields in which the KV this session had differs from the KV we compute."""
        repr_id = session_meta(found.info.meta).repr_id or found.info.repr_id.hex()
        if repr_id == self._store.pages.repr_id.hex():
            return ()
        for known, text in self._store.ledger.replay.reprs.items():
            if known.hex() == repr_id:
                return tuple(differing_fields(self._store.pages.descriptor, text))
        return ("unknown",)


def _nothing() -> None:
    """The orphaned arenas keeps its files by session, not by slot."""


def _shortfall(turn: Turn, facts: SessionFacts | None) -> tuple[str, str]:
    """Why less KV was reused than the prompt is long, for people and as a metric's label.

    The prompt of a turn that goes on is all of it that exists.
    """
    found, prompt = turn.reused, turn.length
    if not turn.timeline:
        return ("first use", "") if found < prompt - 1 else ("", "")
    expected = min(turn.shared, turn.timeline - 1, prompt - 1)  # the last token has no KV yet
    reasons: list[str] = []
    if turn.shared < min(turn.timeline, prompt):
        reasons.append(f"history edited at token {turn.shared}")
    if found >= expected:
        return "; ".join(reasons), "edited" if reasons else ""
    lost, kind = expected - found, "gone"
    if facts is not None and facts.changed:
        fields = ", ".join(facts.changed)
        reasons.append(f"model or numerics changed: {fields}")
        kind = "changed"
    elif turn.loss is not None:
        reasons.append(turn.loss.text)
        kind = turn.loss.label
    elif lost < PAGE_TOKENS and found + PAGE_TOKENS < turn.timeline:  # that page was full
        where = "that is" if reasons else "the prompt ends"
        reasons.append(f"{where} inside a sealed page, and those are reused whole")
        kind = "edited"
    elif lost < PAGE_TOKENS:
        reasons.append("the open page was not kept")
        kind = "tail"
    else:
        reasons.append(PAGES_GONE)
    return "; ".join(reasons), kind


def _find(
    history: SessionRecord, session: Session, generation: Generation, is_changed: bool
) -> Continuation | None:
    """The turn of the ledger that this request is, if it is one."""
    request, turns = generation.request, history.turns
    last = turns[-1] if turns else None
    if generation.resumes is not None and last is not None:
        return _continuation(session, last)  # `_check_resume` has let it pass
    if request.idempotency_key:
        for index, turn in enumerate(turns):
            if turn.idempotency_key != request.idempotency_key:
                continue
            if list(request.prompt) != session.tokens[: turn.prompt_end]:
                raise errors.OTHER_REQUEST_OF_KEY()
            asked = turn_record(turn.sampling)
            if asked is None or not asked.asks_the_same(request):
                raise errors.OTHER_REQUEST_OF_KEY()
            sampling = msgspec.structs.replace(request.sampling, seed=asked.sampling.seed)
            generation.request = dataclasses.replace(request, sampling=sampling)
            end = min((later.prompt_start for later in turns[index + 1 :]), default=None)
            return _continuation(session, turn, end)
    if last is None or is_changed or request.sampling.logprobs >= 0:
        return None
    asked = turn_record(last.sampling)
    if asked is None or not asked.says_the_same(request.sampling):
        return None
    if list(request.prompt) != session.tokens[: last.prompt_end]:
        return None
    found = _continuation(session, last)
    same = (asked.tokens_max, asked.stop, asked.ignore_eos)
    if request.idempotency_key or same != (request.tokens_max, request.stop, request.ignore_eos):
        found.turn_id = ""  # the same tokens, but another answer: a turn of its own
    return found


def _continuation(session: Session, turn: TurnInfo, end: int | None = None) -> Continuation:
    return Continuation(
        turn_id=turn.id,
        tokens=session.tokens[turn.prompt_end : end],
        is_last=end is None,
        is_done=turn.status == DONE,
    )


def _in_order(turns: list[TurnInfo]) -> list[TurnInfo]:
    """As they began. Of one commit the ledger does not know it, and the last turn decides much."""
    if len({turn.seq for turn in turns}) == len(turns):
        return turns
    asked = ((turn, turn_record(turn.sampling)) for turn in turns)
    numbers = {turn.id: 0 if known is None else known.number for turn, known in asked}
    return sorted(turns, key=lambda turn: (turn.seq, numbers[turn.id]))
