"""The steps in flight: their frames, what their answers apply to, and the check of an answer.

A worker has one step to compute, and may have the next ones already, which are *ahead*: each was
planned before the answer to the step before it. The rows of a step ahead are those of sessions that
the step before computes too: the worker takes its own samples as the inputs of decodes, the tokens
of a prompt are known.
"""

from __future__ import annotations

import functools
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from batchengine import errors
from batchengine.core import PAGE_TOKENS
from batchengine.engine.turns.turn import Turn
from batchengine.kv import LaneKv, Seal
from batchengine.kv.lane_kv import Chores
from batchengine.kv.states import EntryStates
from batchengine.lanes.worker_process import Lane, LaneRequest
from batchengine.policy import scheduler
from batchengine.policy.drafts import NO_DRAFT, Draft
from batchengine.policy.rows import TurnRow
from batchengine.session import Session, State
from batchengine.session_kv import StateSlot, full_pages, pages_for
from batchengine.wire import lane as wire
from kv_store.arenas.arena import ArenaSlot

STEP_DEADLINE_MIN_S = 30.0  # far longer than any step, far shorter than timeouts of clients
STEP_DEADLINE_FACTOR = 20.0  # a step that takes 20 times its prediction is a hang
CHUNK_AHEAD_MS_MAX = 20.0  # a turn that arrives waits for it, and a longer one hides little more
QUEUE_MS_MAX = 20.0  # of all steps, for a third one and more: where steps are longer, two hide all
STUCK_FACTOR = 2.0  # of the deadline, which ends a step in any case


class StepEntry(NamedTuple):
    """One entry of the step in flight, of `n_tokens` tokens of the timeline. `wants`: the entry
    samples a token; `state`: where its recurrent state is written, of a model that has one;
    `draft`: tokens that it computes besides."""

    turn: Turn
    n_tokens: int
    wants: bool
    state: StateSlot | None = None
    draft: Draft = NO_DRAFT


class LostSteps(NamedTuple):
    """What a worker had when it died. oldest: its step; is_sent: whether the worker was given it;
    seals: of pages that its steps read back."""

    oldest: InFlightStep | None
    is_sent: bool
    seals: list[Seal]


class InFlightStep(NamedTuple):
    """The frame of a step in flight, and the turns, slots and seals that its answer is for."""

    step: wire.Step
    payload: bytes
    parts: list[StepEntry]
    fills: list[tuple[Turn, int, ArenaSlot]]
    verify: list[Seal]
    chores: Chores
    predicted_ms: float
    recomputed: int = 0  # tokens whose rows there were once
    is_ahead: bool = False  # planned before the step before it was committed

    @property
    def deadline_s(self) -> float:
        """After so long the worker is ended."""
        return max(STEP_DEADLINE_MIN_S, STEP_DEADLINE_FACTOR * self.predicted_ms / 1000)

    @property
    def drafted(self) -> int:
        """Tokens of drafts in this step."""
        return sum([len(part.draft.tokens) for part in self.parts])

    def holds(self, session: Session) -> bool:
        """Whether the session computes in this step."""
        return any(part.turn.session is session for part in self.parts)


class Reach(NamedTuple):
    """Where the steps in flight leave a session: the position behind their tokens, and how many of
    its tokens they sample."""

    end: int
    samples: int


def reaches_of(steps: Iterable[InFlightStep]) -> dict[int, Reach]:
    """Where steps in flight, oldest first, leave their sessions, but for those with an entry that
    will be void."""
    found: dict[int, Reach] = {}
    void = set[int]()
    for step in steps:
        for (turn, n, wants, *_), entry in zip(step.parts, step.step.entries, strict=True):
            end, samples = found.get(entry.session, Reach(turn.session.frontier, 0))
            if entry.start == end:
                found[entry.session] = Reach(end + n, samples + wants)
            else:
                void.add(entry.session)
    return {key: reach for key, reach in found.items() if key not in void}


class StepBuilder:
    """A step as it is built, entry by entry."""

    def __init__(self) -> None:
        self.entries: list[wire.Entry] = []
        self._parts: list[StepEntry] = []
        self._fills: list[tuple[Turn, int, ArenaSlot]] = []
        self._codes, self._tokens = array("Q"), array("i")
        self._history, self._scored = array("i"), array("i")
        self._recomputed = 0

    def add(
        self,
        turn: Turn,
        start: int,
        end: int,
        samples: int = 0,
        *,
        takes_sample: bool = False,
        states: EntryStates | None = None,
        draft: Draft = NO_DRAFT,
    ) -> None:
        """Add the tokens [start, end) of a turn. The steps in flight sample `samples` more tokens
        than its session has; with `takes_sample` the entry's only token is the last of these. The
        rows of `draft` are in the page of the token before it, and do not fill it."""
        session, n, n_pages = turn.session, end - start, pages_for(end)
        known, table = session.tokens, session.kv.codes
        wants = end == len(known) + samples
        self._recomputed += max(0, min(end, session.computed) - start)
        session.computed = max(session.computed, end)
        self._codes.extend(table if n_pages == len(table) else table[:n_pages])
        if n == 1:
            self._tokens.append(0 if takes_sample else known[start])
        else:
            self._tokens.extend(known[start:end])
        self._tokens.extend(draft.tokens)
        n_history = min(turn.history_tokens, end) if wants else 0
        if n_history:
            self._history.extend([*known[end - n_history :], *[0] * takes_sample])
        n_scored = best = 0
        if (scores := turn.scores) is not None and turn.is_scoring:
            followers, best = scores.wanted(start, end), scores.best
            n_scored = len(followers)
            self._scored.extend(followers)
        self.entries.append(
            wire.Entry(
                session.key, session.epoch, start, n + len(draft.tokens), n_pages,
                turn.sampling if wants else None,
                n_history, tuple([segment.message() for segment in session.kv.held]),
                takes_sample, wants and turn.matcher is not None,
                turn.banned(end) if wants else (), n_scored, best,
                -1 if states is None else states.read,
                -1 if states is None else states.written.index, len(draft.tokens),
            )
        )  # fmt: skip
        written = None if states is None else states.written
        self._parts.append(StepEntry(turn, n, wants, written, draft))
        if full_pages(start) != full_pages(end):
            self._fills += [(turn, page, slot) for page, slot in session.kv.filled(start, end)]

    def finish(
        self, kv: LaneKv, predicted_ms: float, *, lap_ms: int = 0, is_ahead: bool = False
    ) -> InFlightStep:
        """Return the step with its frame, in which the lane's chores are done too."""
        chores, verify = kv.chores()
        digest = tuple([wire.Digest(slot.slot, PAGE_TOKENS) for _, _, slot in self._fills])
        step = wire.Step(
            tuple(self.entries),
            chores.labels.poison,
            chores.labels.reserve,
            digest + chores.digest,
            tuple([kv.sealing.verify_message(seal) for seal in verify]),
            chores.labels.relabel,
            chores.import_rows,
            chores.touch,
            lap_ms,
            chores.freed,
            chores.deleted,
            *chores.states.messages(),
        )
        numbers = self._codes, self._tokens, self._history, chores.import_tokens, self._scored
        return InFlightStep(
            step, b"".join(numbers), self._parts, self._fills, verify, chores, predicted_ms,
            self._recomputed, is_ahead,
        )  # fmt: skip


def prepare_ahead(
    plan: scheduler.StepPlan, steps: Sequence[InFlightStep], kv: LaneKv
) -> InFlightStep | None:
    """Build the step after `steps`, which are in flight, for some sessions of the last one. None if
    the plan is for anything else, if slots are lacking, or if the last one has drafts: where that
    leaves their sessions is not known."""
    last, reaches = steps[-1], reaches_of(steps)
    if last.drafted:
        return None
    parts = {
        entry.session: part
        for part, entry in zip(last.parts, last.step.entries, strict=True)
        if entry.session in reaches
    }
    planned = [(parts[key], reaches[key], n) for key, n in plan.batch if key in parts]
    n_decodes = sum([part.wants for part, _, _ in planned])
    is_plain = not (plan.admit or plan.preempt or plan.shed) and len(planned) == len(plan.batch)
    is_short = n_decodes == len(planned) or plan.predicted_ms <= CHUNK_AHEAD_MS_MAX
    if not (planned and is_plain and is_short and all(_is_plain(*one) for one in planned)):
        return None
    planned = [
        (part, at, kv.states.until(part.turn.session, at.end, at.end + n) - at.end)
        for part, at, n in planned
    ]
    if not all(kv.slots.ensure(part.turn.session, at.end + n) for part, at, n in planned):
        return None
    states = _states_ahead(kv, [part for part, _, _ in planned])
    if states is None:
        return None
    builder = StepBuilder()
    for (part, at, n), of in zip(planned, states, strict=True):
        builder.add(part.turn, at.end, at.end + n, at.samples, takes_sample=part.wants, states=of)
    return builder.finish(kv, plan.predicted_ms, is_ahead=True)


def _states_ahead(kv: LaneKv, parts: Sequence[StepEntry]) -> list[EntryStates | None] | None:
    """The states of entries that follow these; None if slots are lacking."""
    found: list[EntryStates | None] = [None] * len(parts)
    if not kv.states.is_used:
        return found
    found = [kv.states.begin(part.turn.session, part.state) for part in parts]
    if None not in found:
        return found
    for states in found:
        if states is not None:
            states.written.release()
    return None


def _is_plain(part: StepEntry, reach: Reach, n_tokens: int) -> bool:
    """Whether the next `n_tokens` of a session need nothing but their pages: they are the sample of
    this part, or known. A history would lack all samples but the last one."""
    turn, session = part.turn, part.turn.session
    end = reach.end + n_tokens
    is_next = end == len(session.tokens) + reach.samples and n_tokens == 1
    is_next = is_next and (reach.samples == 1 or not turn.history_tokens)
    is_bound = turn.is_bound or session.kv.cut_off or turn.needs_match
    return not is_bound and (is_next if part.wants else end <= len(session.tokens))


def view_after(
    view: scheduler.LaneView, steps: Sequence[InFlightStep], now_ms: float
) -> scheduler.LaneView:
    """The view as it will be once `steps` are committed, if no turn ends early."""
    reaches = reaches_of(steps)
    turns = {part.turn.session.key: part.turn for step in steps for part in step.parts}
    rows: list[TurnRow] = []
    for row in view.running:
        reach = reaches.get(row.key)
        if reach is None:
            rows.append(row)
            continue
        generation, end = turns[row.key].generation, reach.end
        if generation.completion_tokens + reach.samples < generation.request.tokens_max:
            left = row.to_compute - (end - row.frontier) + reach.samples
            rows.append(row._replace(frontier=end, to_compute=left, served_ms=now_ms))
    return replace(view, running=tuple(rows))


class InFlightSteps:
    """The steps that a lane's worker has, oldest first."""

    def __init__(self, lane: Lane, most: int, on_overhead: Callable[[float], None]) -> None:
        """most: steps in flight. `on_overhead` is called with the ms of a step outside the
        worker."""
        self._lane, self._most = lane, most
        self._on_overhead = on_overhead
        self._steps: deque[InFlightStep] = deque()
        self._requests: deque[LaneRequest] = deque()
        self._is_last_sent = False
        self._since_ms = 0.0  # since when the oldest one could be computed

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[InFlightStep]:
        return iter(self._steps)

    @property
    def last(self) -> InFlightStep:
        """The step that was added last."""
        return self._steps[-1]

    @property
    def are_ahead(self) -> bool:
        """Whether the answers in flight are only used where tables are as they were: `is_ahead`."""
        return all(step.is_ahead for step in self._steps)

    def holds(self, session: Session) -> bool:
        """Whether the session computes in one of these steps."""
        return any(step.holds(session) for step in self._steps)

    def is_stuck(self, now_ms: float) -> bool:
        """Whether the oldest step outlived its deadline, at which it should have ended."""
        if not self._steps:
            return False
        return now_ms - self._since_ms > STUCK_FACTOR * self._steps[0].deadline_s * 1000

    def add(self, step: InFlightStep, began_ms: float) -> None:
        """Add a step that is sent next; `began_ms`: when its preparation began."""
        if not self._steps:
            self._since_ms = began_ms
        self._steps.append(step)
        self._is_last_sent = False

    def send(self) -> None:
        """Send the step that was added last."""
        step = self._steps[-1]
        self._requests.append(self._lane.post(step.step, step.payload, deadline_s=step.deadline_s))
        self._is_last_sent = True

    def send_masks(self) -> None:
        """Send the masks of the oldest step, which is no longer ahead; those that are not known yet
        later. An entry whose turn is not where the step assumed gets empty ones."""
        step, number = self._steps[0], self._requests[0].number
        for part, entry in zip(step.parts, step.step.entries, strict=True):
            if not entry.masked:
                continue
            session, matcher = part.turn.session, part.turn.matcher
            position = entry.start + part.n_tokens
            send = functools.partial(self._send_masks, number, entry.session, position)
            is_current = session.state is State.RUNNING and len(session.tokens) == position
            if matcher is None or not is_current:
                send([b""] * (1 + entry.drafts))
                continue
            matcher.give(send)
            if entry.drafts:
                send = functools.partial(self._send_masks, number, entry.session, position + 1)
                matcher.follow(part.draft.tokens, send)

    def _send_masks(self, number: int, session: int, position: int, masks: Sequence[bytes]) -> None:
        """Send masks of the step of this number, for tokens from a position on."""
        for at, bits in enumerate(masks, position):
            self._lane.note(wire.Mask(session, at, bits), number)

    def fill(
        self,
        view: Callable[[], scheduler.LaneView | None],
        kv: LaneKv,
        now_ms: Callable[[], float],
    ) -> None:
        """Send the steps after those in flight that can be ahead. `view`: the lane's now, in which
        none of them is committed; None: no further step is sent."""
        while len(self._steps) < self._most and (now := view()) is not None:
            if not self._send_ahead(now, kv, now_ms()):
                return

    def _send_ahead(self, view: scheduler.LaneView, kv: LaneKv, now_ms: float) -> bool:
        plan = scheduler.plan(view_after(view, self._steps, now_ms), now_ms)
        queue_ms = sum([step.predicted_ms for step in self._steps]) + plan.predicted_ms
        if len(self._steps) > 1 and queue_ms > QUEUE_MS_MAX:
            return False
        if (ahead := prepare_ahead(plan, self._steps, kv)) is None:
            return False
        self.add(ahead, now_ms)
        self.send()
        return True

    async def answer(self) -> tuple[InFlightStep, wire.StepDone]:
        """Wait for the answer to the oldest step, which is in flight no more. Errors as of
        `Lane.answer`, and STEP_MISMATCH."""
        done = await self._lane.answer(self._requests.popleft())
        check_answer(self._steps[0], done)
        return self._steps.popleft(), done

    def committed(self, step: InFlightStep, done: wire.StepDone, now_ms: float) -> None:
        """Measure the time outside the worker of a step that is answered and committed."""
        if step.parts:
            self._on_overhead(now_ms - self._since_ms - done.elapsed_us / 1000)
        self._since_ms = now_ms

    def died(self) -> LostSteps:
        """Forget all steps, after the worker's exit."""
        oldest = self._steps[0] if self._steps else None
        is_sent = len(self._steps) > 1 or self._is_last_sent
        seals = [seal for step in self._steps for seal in step.verify]
        self._steps.clear()
        self._requests.clear()
        return LostSteps(oldest, is_sent, seals)


def _are_samples(
    step: InFlightStep, rows: Sequence[wire.SampledRow], without_rows: Collection[int]
) -> bool:
    """Whether `rows` are of the entries that sample, but for those `without_rows`: each has the
    tokens of its draft that were right, and one more, which may lack where its mask is late."""
    left = deque(rows)
    for index, (turn, _, wants, _, draft) in enumerate(step.parts):
        if not wants or index in without_rows:
            continue
        of = list[int]()
        while left and left[0].session == turn.session.key and len(of) <= len(draft.tokens):
            of.append(left.popleft().token)
            if of != list(draft.tokens[: len(of)]):
                break
        is_whole = of != list(draft.tokens[: len(of)])
        if not of or not (is_whole or step.step.entries[index].masked):
            return False
    return not left


def check_answer(in_flight: InFlightStep, done: wire.StepDone) -> None:
    """Raise STEP_MISMATCH unless every part of the answer fits the frame that was sent."""
    for what, fits in _checks(in_flight, done):
        if not fits:
            raise errors.STEP_MISMATCH(what=what)


def _checks(in_flight: InFlightStep, done: wire.StepDone) -> Iterator[tuple[str, bool]]:
    """Each part of an answer, and whether it fits; a later check takes the earlier ones for
    granted."""
    step, without_rows = in_flight.step, {*done.nonfinite, *done.unreachable, *done.unmasked}
    yield "entries without rows", without_rows <= set(range(len(in_flight.parts)))
    yield "unreachable entries", all(step.entries[i].segments for i in done.unreachable)
    yield "entries without masks", all(step.entries[i].masked for i in done.unmasked)
    yield "samples", _are_samples(in_flight, done.rows, without_rows)
    scored = [
        (entry.session, entry.scored)
        for index, entry in enumerate(step.entries)
        if entry.scored and index not in without_rows
    ]
    of_done = [(scores.session, len(scores.logprobs) // 4) for scores in done.scores]
    yield "scored prompts", scored == of_done
    are_choices = all(
        len(scores.best) == len(scores.best_logprobs)
        and not len(scores.best) % len(scores.logprobs)
        for scores in done.scores
    )
    yield "choices of scored prompts", are_choices
    yield "digests", len(done.digests) == len(step.digest)
    yield "checked seals", len(done.verified) == len(in_flight.verify)
    yield "states", len(done.states) == len(step.save_states) + len(step.load_states)
    yield "imports", len(done.imported) == len(step.import_rows)
    of_imports = zip(done.imported, step.import_rows, strict=True)
    yield "imported rows", all(0 <= n <= asked.rows for n, asked in of_imports)
