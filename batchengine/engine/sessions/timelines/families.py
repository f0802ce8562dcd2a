"""Families: the timelines of one client's id, and the one that a request goes on with.

Owns that choice. A timeline is a session of its own; the first one of a family has the family's id,
others have its id and a number (`be_….2`). What is compared is in memory, or read from the ledger
at the first request of a family in this run; the rule is `policy.timelines.choice`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from batchengine import errors
from batchengine.core import BatchEngineError, Found, GenerationRequest, Kind, TimelineUse
from batchengine.engine.sessions.directory import Name, family_of
from batchengine.engine.sessions.parking import Parking
from batchengine.engine.sessions.past.attempts import is_again
from batchengine.engine.sessions.recovery import SessionRecovery
from batchengine.engine.sessions.requests import Requests
from batchengine.engine.sessions.timelines.appending import Appending
from batchengine.engine.sessions.timelines.outline import Outlines
from batchengine.engine.state import EngineState
from batchengine.engine.turns.records import TurnRecord, last_prompt
from batchengine.engine.turns.stream import Generation
from batchengine.policy.timelines.choice import Asked, Timeline, TimelineChoice, choose
from batchengine.session import Session, common_prefix
from batchengine.session_kv import page_start

KEYS_MEMBERS_MIN = 3  # of a family, from which on the keys of a prompt's pages are worth their time
# refusals to resume a turn in a timeline that does not have it
OF_ANOTHER_TIMELINE = frozenset(
    (
        errors.UNKNOWN_SESSION.code,
        errors.NOTHING_TO_RESUME.code,
        errors.TURN_FOLLOWED.code,
    )
)
WARM_TOKENS_MIN = 16  # of an open page, that are worth a copy in the store


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """A request with its timeline. `turn_id`: it repeats this turn, which runs: take that over."""

    request: GenerationRequest
    turn_id: str = ""


class Families:
    """Choices for the requests of one engine. All methods run on its event loop."""

    def __init__(
        self,
        state: EngineState,
        recovery: SessionRecovery,
        requests: Requests,
        appending: Appending,
        parking: Parking,
        outlines: Outlines,
    ) -> None:
        self._state = state
        self._recovery = recovery
        self._table = recovery.families
        self._requests = requests
        self._appending = appending
        self._parking = parking
        self._outlines = outlines

    async def begin(self, request: GenerationRequest) -> Generation:
        """Choose the timeline that the request goes on with, and admit it.

        Raises BatchEngineError before anything has changed.
        """
        request, more = await self._requests.attempts.taken(request)
        prepared = await self._prepare(request)
        request = prepared.request
        if prepared.turn_id and request.session_id is not None:
            try:
                taken = await self._requests.resume(
                    request.tenant, request.session_id, 0, prepared.turn_id
                )
                taken.request = dataclasses.replace(
                    taken.request,
                    found=request.found,
                    attempt=request.attempt,
                    streams=request.streams,
                )
            except BatchEngineError as error:
                if error.kind is not Kind.CONFLICT:  # it has ended meanwhile
                    raise
            else:
                return taken
        return self._requests.submit(request, more)

    async def resume(
        self, tenant: str, session_id: str, from_token: int, turn_id: str
    ) -> Generation:
        """Stream the session's last turn again; see `Requests.resume`. Of a family the turn names
        the timeline; without one it is the main timeline."""
        resume = self._requests.resume
        if not turn_id:
            return await resume(tenant, self.main(tenant, session_id), from_token)
        refusal = errors.UNKNOWN_SESSION(given=session_id)
        for one in self.meant(tenant, session_id):
            try:
                return await resume(tenant, one, from_token, turn_id)
            except BatchEngineError as error:
                if refusal.code in OF_ANOTHER_TIMELINE:
                    refusal = error
        raise refusal

    async def _prepare(self, request: GenerationRequest) -> Prepared:
        """Choose the timeline; to be submitted before any other task runs.

        Raises BatchEngineError before anything has changed.
        """
        if not request.in_family or request.session_id is None:
            request = await self._appending.prompted(request) if request.append else request
            return Prepared(request)
        if request.append:
            return await self._appended(request)
        prepared = await self._chosen(request)
        found = prepared.request.found
        if found is not None and found.use is TimelineUse.NEW and request.parent_id:
            await self._warm_parent(request.tenant, request.parent_id, request.prompt)
            return await self._chosen(request)
        return prepared

    def meant(self, tenant: str, session_id: str) -> list[str]:
        """Return the timelines that a name means: of a family all, oldest use first; with a number
        that one, and the first one has number 1."""
        family = family_of(session_id)
        if family == session_id:
            return self._table.members(tenant, family)
        return [family if session_id == f"{family}.1" else session_id]

    def of_name(self, tenant: str, session_id: str) -> list[str]:
        """Return the timelines that a name means, the main one last."""
        main = self.main(tenant, session_id)
        return [one for one in self.meant(tenant, session_id) if one != main] + [main]

    def main(self, tenant: str, session_id: str) -> str:
        """Return the timeline that a name means where it can be one only: the longest one in
        memory, of those that compute if any does; else the one used last."""
        ids = self.meant(tenant, session_id)
        if len(ids) == 1:
            return ids[0]
        sessions = self._sessions(tenant, ids)
        by_tokens = {s: (self._state.is_busy(s), len(s.tokens)) for s in sessions}
        if not by_tokens:
            return ids[-1]
        return max(by_tokens, key=by_tokens.__getitem__).session_id

    async def _appended(self, request: GenerationRequest) -> Prepared:
        """Return a request that appends; behind an earlier turn it may need another timeline."""
        if not request.append_to:
            last = self._table.last(request.tenant, request.session_id or "")
            request = dataclasses.replace(request, session_id=last)
        asked = await self._appending.prompted(request)
        is_fork = asked.found is not None and asked.found.use is TimelineUse.FORKED
        if not is_fork or asked.session_id is None:
            return Prepared(asked)
        chosen = await self._chosen(asked)
        return Prepared(dataclasses.replace(chosen.request, found=asked.found), chosen.turn_id)

    # ------------------------------------------------------------------------------- choice

    async def _chosen(self, request: GenerationRequest, *, is_warm: bool = False) -> Prepared:
        tenant, prompt = request.tenant, list(request.prompt)
        family = tenant, family_of(request.session_id or "")
        if request.idempotency_key:
            await self._check_key(family, request.idempotency_key, prompt)
        members = await self._members(family, prompt)
        if (running := self._repeated(members, request)) is not None:
            return self._taken_over(running, request)
        choice = choose(Asked(len(prompt), *self._outlines.of(request.prompt)), members)
        if choice.use is TimelineUse.FORKED and not is_warm:
            (of,) = self._sessions(tenant, [choice.of]) or (None,)
            if of is not None and await self._warm(of, choice.shared):
                return await self._chosen(request, is_warm=True)
        return Prepared(self._named(request, family, choice))

    def _named(
        self, request: GenerationRequest, family: Name, choice: TimelineChoice
    ) -> GenerationRequest:
        """Return the request with the id of the timeline that was chosen."""
        session_id: str | None = choice.id
        if choice.use is TimelineUse.UNNAMED:
            session_id = None
        elif choice.use is TimelineUse.NEW:
            session_id = family[1]
        elif not choice.id:
            session_id = self._table.new_id(*family)
        if session_id is not None:
            self._table.use(family[0], session_id)
        self._state.metrics.timelines_total.labels(choice.use.value).inc()
        if choice.is_history_missing:
            self._state.metrics.history_missing_total.inc()
        found = Found(choice.use, choice.of, choice.shared, choice.cut, choice.is_history_missing)
        return dataclasses.replace(request, session_id=session_id, found=found)

    # ------------------------------------------------------------------------------ members

    async def _members(self, family: Name, prompt: list[int]) -> list[Timeline]:
        """Return the timelines of a family, those in the ledger too; oldest use first."""
        known: dict[str, Timeline | None] = {}
        while True:
            ids = self._table.members(*family)
            missing = [one for one in ids if one not in known and not self._is_loaded(family, one)]
            if not missing:
                break
            for one in missing:
                known[one] = await self._read(family[0], one, prompt)
                if known[one] is None:
                    self._table.forget(family[0], one)
        page_keys: list[bytes] = []  # quicker than comparing tokens of several timelines
        if len(ids) >= KEYS_MEMBERS_MIN and self._state.lanes:
            salt = family[0].encode()
            page_keys = self._state.lanes[0].kv.prefix.page_keys(prompt, salt)
        found: list[Timeline] = []
        for used, one in enumerate(ids):
            session = self._state.sessions.get((family[0], one))
            member = known.get(one)
            if session is not None and self._is_loaded(family, one):
                member = self._view(session, prompt, page_keys)
            if member is not None:
                found.append(member._replace(used=used))
        return found

    def _is_loaded(self, family: Name, session_id: str) -> bool:
        """Whether memory says more of a session than the ledger does."""
        session = self._state.sessions.get((family[0], session_id))
        return session is not None and (bool(session.tokens) or self._state.is_busy(session))

    async def _read(self, tenant: str, session_id: str, prompt: list[int]) -> Timeline | None:
        found = await self._recovery.find(tenant, session_id)
        if found is None:
            return None
        last = found.turns[-1].prompt_end if found.turns else len(found.tokens)
        common = common_prefix(found.tokens, prompt)
        return Timeline(session_id, len(found.tokens), last, common)

    def _view(self, session: Session, prompt: list[int], page_keys: list[bytes]) -> Timeline:
        """Return a session in memory as the rule sees it."""
        facts = self._state.facts.get(session.key)
        tokens, waiting = session.tokens, self._waiting(session)
        if not tokens and waiting:
            tokens = list(waiting[0].request.prompt)
            common = common_prefix(tokens, prompt)
        else:
            common = session.common(prompt, page_keys)
        last = len(tokens) if facts is None else last_prompt(facts.meta, len(tokens))
        return Timeline(session.session_id, len(tokens), last, common, bool(waiting))

    def _waiting(self, session: Session) -> list[Generation]:
        """Return the requests of a session that have readers and are not over."""
        if not self._state.is_busy(session):
            return []
        mine = (g for g, of in self._state.requests.items() if of is session)
        return [g for g in mine if not g.is_over]

    def _sessions(self, tenant: str, ids: Iterable[str]) -> list[Session]:
        """Return those of the sessions that are in memory."""
        found = (self._state.sessions.get((tenant, one)) for one in ids)
        return [session for session in found if session is not None]

    # ------------------------------------------------------------------------------ repeats

    async def _check_key(self, family: Name, key: str, prompt: list[int]) -> None:
        """Raise OTHER_REQUEST_OF_KEY if the family has turns with this key, none of this prompt."""
        prompts: list[list[int]] = []
        for one in self._table.members(*family):
            if (found := await self._recovery.find(family[0], one)) is not None:
                same = [turn for turn in found.turns if turn.idempotency_key == key]
                prompts += [found.tokens[: turn.prompt_end] for turn in same]
        if prompts and prompt not in prompts:
            raise errors.OTHER_REQUEST_OF_KEY()

    def _repeated(
        self, members: Iterable[Timeline], request: GenerationRequest
    ) -> Generation | None:
        """Return the request of a family that this one repeats while it is served.

        Without a key that says so, none is taken if two ask the same: either may have a reader.
        Raises OTHER_REQUEST_OF_KEY.
        """
        key = request.idempotency_key
        sessions = self._sessions(request.tenant, (one.id for one in members))
        keyed = [
            running
            for session in sessions
            for running in self._waiting(session)
            if running.request.idempotency_key == key
        ]
        same = [running for running in keyed if running.request.prompt == request.prompt]
        if not key:
            same = [running for running in same if _is_same(running.request, request)]
        elif keyed and not same:
            raise errors.OTHER_REQUEST_OF_KEY()
        return same[0] if len(same) == 1 or (key and same) else None

    def _taken_over(self, running: Generation, request: GenerationRequest) -> Prepared:
        """Return the request for the turn that runs: it waits behind it if it has its key, and
        else takes its place, since its client has given up on the first attempt."""
        session = self._state.requests[running]
        found = Found(TimelineUse.CONTINUED, session.session_id, len(request.prompt))
        request = dataclasses.replace(request, session_id=session.session_id, found=found)
        if request.idempotency_key:
            return Prepared(request)
        turn = self._state.turns.get(running)
        if turn is not None and turn.turn_id:
            return Prepared(request, turn.turn_id)
        running.abort(errors.RESUMED_ELSEWHERE())
        return Prepared(request)

    # ----------------------------------------------------------------------------- open pages

    async def _warm(self, session: Session, shared: int) -> bool:
        """Have a copy of the session's open page in the store, if a fork that shares so many
        tokens needs it; whether anything may have changed meanwhile."""
        known = min(shared, session.frontier) - page_start(session.kv.first_open)
        if known < WARM_TOKENS_MIN or not self._state.is_at_rest(session):
            return False
        await self._parking.park(session, leave=False)
        return True

    async def _warm_parent(self, tenant: str, parent_id: str, prompt: Sequence[int]) -> None:
        """Have a copy of the parent's open page in the store, if a new session shares it."""
        tokens = list(prompt)
        ids = self._table.members(tenant, family_of(parent_id))
        views = {
            session: common_prefix(session.tokens, tokens)
            for session in self._sessions(tenant, ids)
        }
        if views:
            nearest = max(views, key=views.__getitem__)
            await self._warm(nearest, views[nearest])


def _is_same(running: GenerationRequest, request: GenerationRequest) -> bool:
    """Whether a request is one that runs, sent again; see `is_again`."""
    if not request.is_retry and (not request.attempt or running.attempt != request.attempt):
        return False  # not the same body
    return is_again(request, running.streams) and TurnRecord.of(running).asks_the_same(request)
