"""Recovery of sessions from the ledger, and continuation of unfinished turns.

Owns what a run of the engine reads from the records of earlier runs: tokens, epoch, the turn to
continue, suspects, and which tool calls a session waits for; and the reason when less KV is reused
than the timeline had. Computes nothing and moves no pages: lanes and their tables do that.

A request whose prompt is a prefix of the timeline may be a repetition. If the last turn in the
ledger had the same parameters, its tokens are sent again and the turn continues after them, since
the arithmetic is deterministic; a turn that another model began is at most sent again. Otherwise
the timeline is cut where the prompt differs from it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

import msgspec

from batchengine import errors
from batchengine.core import FORM_RESPONSES, PAGE_TOKENS, GenerationRequest
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.lane.suspects import STRIKES_MAX, Suspects
from batchengine.engine.sessions.crash_marker import CrashMarker
from batchengine.engine.sessions.directory import FamilyTable, durable_name, name_of
from batchengine.engine.sessions.tool_calls import CALLS_ALL, ToolCalls
from batchengine.engine.state import EngineState
from batchengine.engine.turns import records
from batchengine.engine.turns.journal import DONE, RUNNING, Journal
from batchengine.engine.turns.records import (
    CALLS_FIELD,
    ParkedMark,
    SessionFacts,
    SessionMeta,
    TimelineMark,
    TurnRecord,
    session_meta,
    turn_record,
    with_call,
)
from batchengine.engine.turns.stream import Continuation, Generation
from batchengine.engine.turns.turn import Turn
from batchengine.lanes.worker_process import Lane
from batchengine.session import (
    LOG_UNKNOWN,
    NOT_LOGGED,
    Session,
    common_prefix,
)
from batchengine.session_kv import PendingRows, page_start, rows_in
from batchengine.wire.lane import FromArena
from kv_store import keys
from kv_store.arenas.orphaned import ORPHANED_S
from kv_store.errors import StoreError
from kv_store.layout import differing_fields
from kv_store.ledger.continuity import INCARNATIONS
from kv_store.ledger.queries import SessionInfo, SessionRecord, TurnInfo
from kv_store.store import Store

log = logging.getLogger("batchengine.sessions")

ROWS_MIN = 2  # of a page, that are copied rather than computed again
# Evicted in an earlier run, in a damaged extent, or never sealed: this run has no `Loss` of them.
PAGES_GONE = "pages were not computed before, or are no longer in the store"


class SessionRecovery:
    """Reads sessions and turns from the ledger. All methods run on the engine's event loop."""

    def __init__(
        self, state: EngineState, store: Store, journal: Journal, suspects: Suspects
    ) -> None:
        self._state = state
        self._suspects = suspects
        self._store = store
        self._journal = journal
        self.calls = ToolCalls()
        self.families = FamilyTable()
        self.interrupted: dict[tuple[str, str], SessionInfo] = {}  # exited during a turn

    def meta(self, session: Session) -> SessionMeta:
        """Return the meta of a named session."""
        facts = self._state.facts.get(session.key)
        return SessionMeta() if facts is None else facts.meta

    def closing_meta(self, turn: Turn) -> SessionMeta:
        """Return the session's meta at the end of its turn, marked if it waits for a tool."""
        session, request = turn.session, turn.generation.request
        facts = self._state.facts.get(session.key)
        if facts is None:
            return SessionMeta()
        if facts.parks is not None or request.park:
            parked = ParkedMark.now(facts.parks or "")
            facts.meta = msgspec.structs.replace(facts.meta, parked=parked)
        waits = request.park and request.output.calls
        if waits:
            facts.meta = with_call(facts.meta, request.request_id)
        facts.meta = msgspec.structs.replace(facts.meta, used_s=round(records.unix_s()))
        self._mark(session, facts)
        if waits and facts.meta.mark is not None:
            call, mark = request.request_id, facts.meta.mark
            self.calls.add(session.tenant, call, session.session_id, mark)
        return facts.meta

    def _mark(self, session: Session, facts: SessionFacts) -> None:
        """Mark the timeline of a session that has tool calls, which may be continued by them."""
        if facts.meta.calls:
            mark = TimelineMark.of(session.tokens)
            facts.meta = msgspec.structs.replace(facts.meta, mark=mark)
            self.calls.set_mark(session.tenant, session.session_id, mark)

    async def start(self, crash_marker: CrashMarker) -> None:
        """Read interrupted sessions, suspects and tool calls of earlier runs, but no tokens."""
        ledger = self._store.ledger
        infos, suspects = await asyncio.gather(
            asyncio.wrap_future(ledger.list_sessions()),
            asyncio.wrap_future(ledger.suspects()),
        )
        await self._suspects.load(suspects, crashed=bool(crash_marker.text))
        crash_marker.listen()
        self.interrupted = {name_of(i.id): i for i in infos if i.state == RUNNING}
        self.families.load([name_of(info.id) for info in reversed(infos)])
        recent = [info for info in infos[:CALLS_ALL] if CALLS_FIELD in info.meta]
        for info in reversed(recent):  # oldest first: `add` drops the oldest
            meta = session_meta(info.meta)
            if meta.mark is not None:
                for call in meta.calls:
                    self.calls.add(info.tenant, call, name_of(info.id)[1], meta.mark)

    async def tidy(self) -> None:
        """Delete the arenas of earlier runs after ORPHANED_S."""
        await asyncio.sleep(ORPHANED_S)
        await asyncio.to_thread(self._store.orphaned.sweep)

    def forget(self, tenant: str, session_id: str) -> None:
        """Delete strikes and tool calls of a dropped session."""
        self._suspects.forget(durable_name(tenant, session_id))
        self.interrupted.pop((tenant, session_id), None)
        self.calls.forget(tenant, session_id)
        self.families.forget(tenant, session_id)

    # ------------------------------------------------------------------------------- load

    def must_load(self, session: Session, generation: Generation) -> bool:
        """Whether `load` must be called before this request may change the session."""
        request = generation.request
        if request.session_id is None or generation.loaded:
            return False
        if session.logged < 0 or generation.resumes is not None:
            return True
        n = len(request.prompt)
        is_prefix = len(session.tokens) > n and session.tokens[:n] == list(request.prompt)
        return is_prefix or bool(request.idempotency_key)

    async def load(self, session: Session, generation: Generation) -> None:
        """Load the session from the ledger, and find the turn that this request continues.

        Raises BatchEngineError for a damaged history, a quarantined session, nothing to resume.
        """
        generation.loaded = True
        found = await self._read_settled(session)
        if found is None:
            session.logged = NOT_LOGGED
            if generation.resumes is not None:
                raise errors.UNKNOWN_SESSION(given=session.session_id)
            return
        if generation.resumes is not None:
            self._check_resume(session, generation, found)
        self._reconcile(session, generation, found)
        self._take_over(session, found)
        if (strikes := self._suspects.strikes(session)) >= STRIKES_MAX:
            raise errors.SESSION_QUARANTINED(session_id=session.session_id, strikes=strikes)
        self.interrupted.pop((session.tenant, session.session_id), None)
        if session.logged < len(session.tokens) and len(generation.request.prompt) <= len(
            session.tokens
        ):
            # Drop the tokens that the ledger refused: they are not durable.
            self._rebase(session, session.tokens[: max(1, session.logged)])
        changed = ", ".join(self._changes(found))
        more = _find(found, session, generation, bool(changed))
        if more is not None:
            more.changed = changed
        generation.continuation = more

    def _check_resume(self, session: Session, generation: Generation, found: SessionRecord) -> None:
        """Check a resume before anything changes.

        Raises BatchEngineError: the turn is not the last one, or its prompt is no longer there.
        """
        asked, last = generation.request, found.turns[-1] if found.turns else None
        if last is None:
            raise errors.NOTHING_TO_RESUME(session_id=session.session_id)
        if last.id != asked.request_id:  # another turn began since this request was admitted
            raise errors.TURN_FOLLOWED(session_id=session.session_id, turn_id=asked.request_id)
        prompt, n = list(asked.prompt), last.prompt_end
        timelines = [found.tokens]
        if session.tokens and session.logged != LOG_UNKNOWN:
            timelines.append(session.tokens)  # must hold the prompt too, as it is the current one
        is_prompt = all(len(t) >= n and t[:n] == prompt for t in timelines)
        if not is_prompt or "tokenizer_hash" in self._changes(found):
            raise errors.NOTHING_TO_RESUME(session_id=session.session_id)

    def _reconcile(self, session: Session, generation: Generation, found: SessionRecord) -> None:
        """Rebase the session to the ledger's timeline, if a record of it was refused and the
        prompt is a prefix of that timeline."""
        prompt, kept = list(generation.request.prompt), found.tokens
        if session.logged != LOG_UNKNOWN or not session.tokens or kept[: len(prompt)] != prompt:
            return
        if "tokenizer_hash" not in self._changes(found):
            self._rebase(session, kept)

    def _rebase(self, session: Session, tokens: Sequence[int]) -> None:
        """Rebase a session without a turn, and fit its page table on its lane."""
        session.rebase(tokens)
        if (home := self._state.home.get(session.key)) is not None:
            home.kv.slots.fit(session)

    # -------------------------------------------------------------------------------- begin

    def begin(self, turn: Turn, lane: Lane) -> None:
        """Rebase the session to the prompt, or continue its turn, and record that in the ledger.

        Sets `turn.timeline` and `turn.shared`, from which `count_reuse` finds missing KV.
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
            name=request.client_name or facts.meta.name,
            used_s=round(records.unix_s()),
            parent=request.parent_id or facts.meta.parent,
            prompt_tokens=len(request.prompt),
        )
        self._mark(session, facts)
        self._suspects.begin(turn)
        if more is not None and more.turn_id:
            self._journal.go_on(turn, more.turn_id, lane, facts.meta)
        else:
            self._journal.begin(turn, shared, lane, facts.meta)

    # ----------------------------------------------------------------------------- open rows

    def import_open_rows(self, turn: Turn, loop: LaneLoop) -> None:
        """Claim existing rows of the open pages after the sealed prefix, as pending rows.

        They are in an arena of the last run, if that was killed, or in the store, as a parked tail
        of a session with the same tokens.
        """
        session, slots = turn.session, loop.kv.slots
        first = len(session.kv.codes)
        if loop.draining:
            return  # a draining lane imports no rows
        if session.kv.pending or session.kv.open or session.frontier != session.kv.reach():
            return
        ids = session.tokens[session.frontier :]
        if len(ids) < 2:
            return  # the last token is computed in any case
        left = self._left_open(session, first)
        request = turn.generation.request
        shares = request.found is not None and (request.found.shared or request.parent_id)
        rows_min = ROWS_MIN if shares else PAGE_TOKENS
        tail = self._tail(session, first, ids, turn.priority, rows_min)
        if tail is not None and (not left or left[0].rows <= tail.rows):
            slots.claim_pending(session, [tail])
        elif left:
            if tail is not None:
                tail.release()
            slots.claim_pending(session, left)

    def _left_open(self, session: Session, first: int) -> list[PendingRows]:
        """Return rows of pages from `first` on, without a gap, in arenas of the last run.

        One epoch is one timeline, so rows with the session's tokens after pages with its tokens are
        valid, even of tokens that the ledger lacks and the client sent.
        """
        facts = self._state.facts.get(session.key)
        if facts is None or not facts.old_epoch:
            return []
        self._store.orphaned.retry()
        run, found, page = facts.old_owner // INCARNATIONS, list[PendingRows](), first
        for slot in self._store.orphaned.find(session.name, facts.old_epoch):
            number = int(slot.arena.rpartition(".")[2])
            if slot.page_index != page or number // INCARNATIONS != run:
                continue  # a slot of the same page with fewer rows, or of another run
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
        self, session: Session, first: int, ids: Sequence[int], priority: int, rows_min: int
    ) -> PendingRows | None:
        """Find and pin the page whose rows most of `ids` are, the tokens from page `first` on: a
        parked tail, or a page of another timeline that begins with `rows_min` of them."""
        store, salt, parent = self._store, session.salt, keys.ROOT_KEY
        if first and len(session.kv.keys) >= first:
            parent = session.kv.keys[first - 1]
        elif first:
            before = session.tokens[: page_start(first)]
            parent = keys.chain_keys(before, store.pages.repr_id, salt)[-1]
        found = store.pages.find_rows(
            parent, ids, salt, rows_min=rows_min, pin=True, priority=priority
        )
        if found is None:
            return None
        ref, rows = found
        return PendingRows(first, rows, ref, lambda: store.pages.unpin(ref))

    def count_reuse(self, turn: Turn) -> None:
        """Record how much KV the turn reused, and why that is less than its prompt."""
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
            facts.restored, facts.changed, facts.old_epoch = False, (), 0
        if facts.meta.rebase is not None:
            met = msgspec.structs.replace(facts.meta.rebase, kept=found, reason=reason)
            edit = met if met.is_edit else facts.meta.edit
            facts.meta = msgspec.structs.replace(facts.meta, rebase=met, edit=edit)

    # ------------------------------------------------------------------------------- records

    async def resumable(
        self, tenant: str, session_id: str, from_token: int, turn_id: str = ""
    ) -> GenerationRequest:
        """Return the request of the session's last turn, as its client had sent it.

        Raises BatchEngineError (404, 409, 400), also if `turn_id` is set and not the last turn.
        """
        found = await self.record(tenant, session_id)
        turn = found.turns[-1] if found.turns else None
        if turn is not None and turn_id not in ("", turn.id):
            raise errors.TURN_FOLLOWED(session_id=session_id, turn_id=turn_id)
        asked = None if turn is None else turn_record(turn.sampling)
        if turn is None or asked is None or not self.has_same_tokens(found):
            raise errors.NOTHING_TO_RESUME(session_id=session_id)
        if not 0 <= from_token <= asked.tokens_max:
            raise errors.FROM_TOKEN_OUTSIDE(from_token=from_token, tokens_max=asked.tokens_max)
        prompt = found.tokens[: turn.prompt_end]
        return asked.request(turn.id, session_id, tenant, prompt)

    async def record(self, tenant: str, session_id: str) -> SessionRecord:
        """Return the ledger's record of a session. Raises BatchEngineError (404, or damaged)."""
        found = await self.find(tenant, session_id)
        if found is None:
            raise errors.UNKNOWN_SESSION(given=session_id)
        return found

    async def readable(self, tenant: str, session_id: str) -> SessionRecord | None:
        """Return the record of a session whose tokens are those of the model that runs, None if it
        has none. Raises BatchEngineError (409, or damaged)."""
        found = await self.find(tenant, session_id)
        if found is not None and not self.has_same_tokens(found):
            raise errors.SESSION_OF_OTHER_TOKENS(session_id=session_id)
        return found

    async def find(self, tenant: str, session_id: str) -> SessionRecord | None:
        """Return the ledger's record of a session, None if it has none. Raises BatchEngineError."""
        return await self._read(durable_name(tenant, session_id))

    async def is_stored(self, tenant: str, session_id: str) -> bool:
        """Whether the ledger has the session."""
        return await self.find(tenant, session_id) is not None

    async def _read(self, name: str) -> SessionRecord | None:
        try:
            found = await asyncio.wrap_future(self._store.ledger.load_session(name))
        except StoreError as error:
            log.error("session %r: %s", name, error)
            raise errors.SESSION_DAMAGED(why=error.why or "the ledger cannot read it") from error
        return None if found is None else dataclasses.replace(found, turns=_in_order(found.turns))

    async def _read_settled(self, session: Session) -> SessionRecord | None:
        """Read the session's record, again if a migration changed its owner meanwhile."""
        while True:
            epoch = session.epoch
            found = await self._read(session.name.decode())
            if session.key in self._state.moves:
                await self._state.moved(session)
            elif session.epoch == epoch:
                return found

    def _take_over(self, session: Session, found: SessionRecord) -> None:
        """Fill a new session from the record; of a known one, update what the ledger has of it."""
        info, facts = found.info, self._state.facts.get(session.key)
        if facts is None:
            facts = self._state.facts[session.key] = SessionFacts(session_meta(info.meta))
            facts.changed = self._changes(found)
            facts.restored = True
            if any(turn.status == RUNNING for turn in found.turns):
                self._suspects.note_interrupted(session)
        if not session.tokens:
            session.tokens = list(found.tokens)
            if "tokenizer_hash" in facts.changed:
                session.tokens = []  # token ids of another vocabulary
            facts.old_epoch, facts.old_owner = info.epoch, info.owner_incarnation
            session.epoch = max(session.epoch, info.epoch + 1)
        session.epoch = max(session.epoch, info.epoch)
        session.logged_epoch = info.epoch
        known = common_prefix(session.tokens, found.tokens)
        session.logged = known
        if known < len(found.tokens):
            self._journal.cut(session, known)

    def has_same_tokens(self, found: SessionRecord) -> bool:
        """Whether the session's token ids are those of the model that runs now."""
        return "tokenizer_hash" not in self._changes(found)

    def _changes(self, found: SessionRecord) -> tuple[str, ...]:
        """Return the descriptor fields in which the session's old KV differs from the store's."""
        repr_id = session_meta(found.info.meta).repr_id or found.info.repr_id.hex()
        if repr_id == self._store.pages.repr_id.hex():
            return ()
        for known, text in self._store.ledger.replay.reprs.items():
            if known.hex() == repr_id:
                return tuple(differing_fields(self._store.pages.descriptor, text))
        return ("unknown",)


def _nothing() -> None:
    """Release nothing: the orphaned arenas keep files by session, not by slot."""


def _shortfall(turn: Turn, facts: SessionFacts | None) -> tuple[str, str]:
    """Return why less KV was reused than possible, as text and as a metric's label; or "".

    The prompt of a continued turn is its whole timeline.
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
    elif lost < PAGE_TOKENS and found + PAGE_TOKENS < turn.timeline:  # the lost page was full
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
    """Find the turn that this request repeats or resumes. A request that asks for it again gets the
    seed that the turn was given. Raises OTHER_REQUEST_OF_KEY."""
    request, turns = generation.request, history.turns
    last = turns[-1] if turns else None
    if generation.resumes is not None and last is not None:
        return _continuation(session, last)  # `_check_resume` has checked it
    if request.idempotency_key:
        for index, turn in enumerate(turns):
            if turn.idempotency_key != request.idempotency_key:
                continue
            if list(request.prompt) != session.tokens[: turn.prompt_end]:
                raise errors.OTHER_REQUEST_OF_KEY()
            asked = turn_record(turn.sampling)
            if asked is None or not asked.asks_the_same(request):
                raise errors.OTHER_REQUEST_OF_KEY()
            generation.request = _with_seed_of(request, asked)
            end = min((later.prompt_start for later in turns[index + 1 :]), default=None)
            return _continuation(session, turn, end)
    if last is None or is_changed or request.sampling.logprobs >= 0:
        return None
    asked = turn_record(last.sampling)
    if asked is not None and request.is_retry and asked.asks_the_same(request):
        generation.request = request = _with_seed_of(request, asked)
    if asked is None or not asked.says_the_same(request.sampling):
        return None
    if asked.constraint != request.constraint:
        return None
    if list(request.prompt) != session.tokens[: last.prompt_end]:
        return None
    found = _continuation(session, last)
    same = (asked.tokens_max, asked.stop, asked.ignore_eos)
    if request.idempotency_key or same != (request.tokens_max, request.stop, request.ignore_eos):
        found.turn_id = ""  # the same tokens, but other limits: recorded as a new turn
        ends = last.finish_reason == "stop" or request.tokens_max <= len(found.tokens)
        if request.form == FORM_RESPONSES and (ends or asked.stop != request.stop):
            return None  # nothing would be recorded of it, and a response is found by its turn
    return found


def _with_seed_of(request: GenerationRequest, asked: TurnRecord) -> GenerationRequest:
    """The request with the seed of a recorded turn."""
    sampling = msgspec.structs.replace(request.sampling, seed=asked.sampling.seed)
    return dataclasses.replace(request, sampling=sampling)


def _continuation(session: Session, turn: TurnInfo, end: int | None = None) -> Continuation:
    return Continuation(
        turn_id=turn.id,
        tokens=session.tokens[turn.prompt_end : end],
        is_last=end is None,
        is_done=turn.status == DONE,
    )


def _in_order(turns: list[TurnInfo]) -> list[TurnInfo]:
    """Sort turns by their beginning; the order within one commit comes from their numbers."""
    if len({turn.seq for turn in turns}) == len(turns):
        return turns
    asked = ((turn, turn_record(turn.sampling)) for turn in turns)
    numbers = {turn.id: 0 if known is None else known.number for turn, known in asked}
    return sorted(turns, key=lambda turn: (turn.seq, numbers[turn.id]))
