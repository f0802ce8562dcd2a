"""Which recurrent state each session of one lane goes on with.

A model with recurrent layers computes a token only from the state behind the token before. A
session has that state with its worker, at its frontier; a file of the store has it at some other
positions: at the end of a page every `interval` tokens and near the end of a prompt, and at the
frontier of a session that rests, leaves its lane, or is parked. Without one the session falls back
to the last position that has one: what lies behind is computed again, with the same bits.

    timeline   0 ........... 2048 ........... 4096 ......... 4352 .... 4700
    states     none needed   saved            saved          saved     live, at the frontier
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.kv.slots import Slots
from batchengine.kv.states.pool import INTERVAL_MIN, StatePool, save_interval
from batchengine.session import Loss, Session, State
from batchengine.session_kv import LiveState, StateSlot, full_pages, page_start, rows_in
from batchengine.wire import lane as wire
from kv_store import keys
from kv_store.states import state_name, state_seed
from kv_store.store import Store

PROVEN_MAX = 16  # rows behind a saved state that an import may find: those of a draft

log = logging.getLogger("batchengine.kv")


class EntryStates(NamedTuple):
    """The states of one entry of a step: the slot that it reads, -1 for none, and the one that it
    writes; its taker releases that one, unless it becomes the session's."""

    read: int
    written: StateSlot


class StateSave(NamedTuple):
    """A state to be written to a file: key and parent name it."""

    session: Session
    key: bytes
    parent: bytes
    slot: int


class StateLoad(NamedTuple):
    """A state to be read from a file into a slot, for a session at this position."""

    session: Session
    epoch: int
    position: int
    key: bytes
    parent: bytes
    slot: StateSlot


class StateChores(NamedTuple):
    """What a frame saves and loads."""

    saves: tuple[StateSave, ...] = ()
    loads: tuple[StateLoad, ...] = ()

    def messages(self) -> tuple[tuple[wire.StateFile, ...], tuple[wire.StateFile, ...]]:
        """As a Step has them."""
        saves = [_file(save.slot, save.key, save.parent) for save in self.saves]
        loads = [_file(load.slot.index, load.key, load.parent) for load in self.loads]
        return tuple(saves), tuple(loads)


class LaneStates:
    """The states of the sessions of one lane. `until` and `begin` are also for steps ahead, the
    rest happens between two steps. `state_bytes` 0: the model has none, and every session may
    compute.
    """

    def __init__(self, store: Store, slots: Slots, wake: Callable[[], None]) -> None:
        self._store = store
        self._slots = slots
        self._wake = wake
        self._pool: StatePool | None = None  # of the worker that is up
        self._rest_max = 0
        self.paused: Callable[[], Iterable[Session]] = lambda: ()  # have a seat, compute nothing
        self.state_bytes = 0
        self.interval = 0
        self._saves: dict[bytes, StateSave] = {}
        self._loads: list[StateLoad] = []
        self._loading: dict[Session, StateLoad] = {}  # those that sessions wait for
        self._saving: dict[bytes, bytes] = {}  # parents; also in a frame that is not answered
        self._gathering: dict[bytes, bytes] = {}  # of pipelines, by key: parents
        self._wrong: set[bytes] = set()  # of those, what may not be kept

    def __repr__(self) -> str:
        return f"<LaneStates {self._pool!r} saves={len(self._saves)} loads={len(self._loads)}>"

    @property
    def is_used(self) -> bool:
        """Whether the model has recurrent state."""
        return self.state_bytes > 0

    # ------------------------------------------------------------------------------ the worker

    def attach(self, n_slots: int, state_bytes: int, rest_max: int = 0) -> None:
        """Use the slots of a new worker, for states of so many bytes. Sessions at rest whose state
        is saved keep it with the worker only while `rest_max` slots at most are taken."""
        self.state_bytes, self._pool, self._rest_max = state_bytes, StatePool(n_slots), rest_max
        row_bytes = self._store.pages.layout.row_bytes
        self.interval = save_interval(state_bytes, row_bytes) if state_bytes else 0

    def worker_died(self) -> None:
        """Forget the states that were with the worker, and what it was to save and load."""
        for session in self._slots.members.values():
            self.leave(session)
        self._pool = None
        self._saving |= self._gathering
        self._gathering = {}
        self.abandoned(list(self._saving))
        self._saves, self._loads, self._loading = {}, [], {}

    def drop_unproven(self) -> None:
        """Release the states of all sessions, which no computation has proven, and save none that
        wait for a frame. Call while the lane is paused."""
        for session in self._slots.members.values():
            session.kv.set_state(None)
        for key in self._saves:
            del self._saving[key]
        self._saves = {}
        self._wrong.update(self._gathering)

    def invalid(self, wrong: set[bytes]) -> None:
        """Save no state behind these pages, of those that wait for a frame."""
        for save in list(self._saves.values()):
            if not wrong.isdisjoint((save.key, save.parent)):
                del self._saves[save.key], self._saving[save.key]
        behind = [
            key for key, parent in self._gathering.items() if not wrong.isdisjoint((key, parent))
        ]
        self._wrong.update(behind)

    def leave(self, session: Session) -> None:
        """Give up the state that the session has with the worker, or waits for."""
        session.kv.set_state(None)
        if self._loading.pop(session, None) is not None:
            session.kv.awaits_state = False

    # ------------------------------------------------------------------------------ questions

    def key_at(self, session: Session, position: int) -> tuple[bytes, bytes]:
        """Key and parent of the state behind the first `position` tokens, at least one."""
        page, rows = full_pages(position), rows_in(full_pages(position), position)
        self._slots.know_keys(session, page)
        known = session.kv.keys
        if not rows:
            return known[page - 1], known[page - 2] if page > 1 else keys.ROOT_KEY
        parent = known[page - 1] if page else keys.ROOT_KEY
        tail = session.tokens[page_start(page) : position]
        return self._store.pages.key_of(parent, tail, session.salt), parent

    def reach(self, session: Session, position: int) -> int:
        """The last position up to `position` from which the session can go on; 0 needs no state."""
        kv, saved = session.kv, self._store.states
        live = kv.state.position if kv.state is not None else 0
        if live == position or not position:
            return position
        best = live if live < position else 0
        if saved is None or not len(saved):
            return best
        page_first = page_start(full_pages(position))
        for tail in range(position, max(best, page_first, position - PROVEN_MAX), -1):
            if tail % PAGE_TOKENS and self.key_at(session, tail)[0] in saved:
                return tail
        self._slots.know_keys(session, full_pages(position))
        for page in range(full_pages(position), full_pages(best), -1):
            if kv.keys[page - 1] in saved:
                return page_start(page)
        return best

    def is_saved(self, session: Session, position: int) -> bool:
        """Whether a file has the state at a position, or is being written."""
        key = self.key_at(session, position)[0]
        saved = self._store.states
        return key in self._saving or (saved is not None and key in saved)

    def is_due(self, session: Session, position: int) -> bool:
        """Whether the state at the end of a page is to be saved: each `interval` tokens, and before
        the last token of a timeline, since the next prompt may differ from there on."""
        if position % self.interval == 0:
            return not self.is_saved(session, position)
        if position != page_start(full_pages(len(session.tokens) - 1)):
            return False
        before = range(position, max(0, position - INTERVAL_MIN), -PAGE_TOKENS)
        return position >= INTERVAL_MIN and not any(self.is_saved(session, at) for at in before)

    def until(self, session: Session, start: int, end: int) -> int:
        """Where a step from `start` must end, at `end` at the latest, for the state to be saved."""
        if not self.is_used:
            return end
        regular = (start // self.interval + 1) * self.interval
        last = page_start(full_pages(len(session.tokens) - 1))
        for position in sorted({regular, last}):
            if start < position < end and self.is_due(session, position):
                return position
        return end

    def resumable(self, page_keys: Sequence[bytes]) -> int:
        """How many of these pages, of a timeline in order, end where a file has the state."""
        found = (n for n in range(len(page_keys), 0, -1) if self.has_saved(page_keys[n - 1]))
        return next(found, 0)

    @property
    def has_room(self) -> bool:
        """Whether a session could go on from a state that is saved now, or needs none."""
        saved = self._store.states
        return not self.is_used or (saved is not None and saved.has_room(self.state_bytes))

    def has_saved(self, key: bytes) -> bool:
        """Whether a file has the state behind a page, by its content key."""
        return self._store.states is not None and key in self._store.states

    # --------------------------------------------------------------------- before and after a step

    def settle(self, session: Session) -> None:
        """Have the frontier of a session fall back to where it can go on, if it has no state there.

        Rows that are still to be imported may end where a file has the state: they are waited for.
        """
        kv = session.kv
        if not self.is_used or kv.awaits_state:
            return
        while not kv.pending and (
            (reach := self.reach(session, session.frontier)) < session.frontier
        ):
            if session.frontier - reach > PROVEN_MAX:
                session.loss = session.loss or Loss.STATE
            is_live = kv.state is not None and kv.state.position == reach
            if is_live or reach % PAGE_TOKENS:  # inside its open page
                session.frontier = reach
                self._slots.fit(session)
            else:  # of held pages only whole super-pages stay, so it may fall back further
                self._slots.truncate(session, full_pages(reach))

    def prepare(self, session: Session) -> bool:
        """Whether the session may compute from its frontier on: its state there is with the worker,
        or none is needed. Else it is being loaded, or there is no slot for it."""
        kv = session.kv
        if not self.is_used:
            return True
        if kv.awaits_state:
            return False
        self.settle(session)
        if kv.pending:
            return False
        position = session.frontier
        if not position or (kv.state is not None and kv.state.position == position):
            return True
        kv.set_state(None)
        slot = self.take(session)
        if slot is not None:
            key, parent = self.key_at(session, position)
            load = StateLoad(session, session.epoch, position, key, parent, slot)
            self._loads.append(load)
            self._loading[session] = load
            kv.awaits_state = True
        return False

    def begin(self, session: Session, after: StateSlot | None = None) -> EntryStates | None:
        """The states of an entry of the session. `after`: of the step before, if that is not
        committed. None: no slot is free."""
        written = self.take(session)
        if written is None:
            return None
        if after is None and session.frontier:
            state = session.kv.state
            if state is None or state.position != session.frontier:  # a defect
                log.error("%r is at %d, its state is %r", session, session.frontier, state)
                written.release()
                return None
            after = state.slot
        return EntryStates(-1 if after is None else after.index, written)

    def computed(self, session: Session, written: StateSlot) -> None:
        """The state of a session that has just advanced to its frontier. It is saved where others
        may go on from it."""
        position = session.frontier
        session.kv.set_state(LiveState(written, position))
        if not position % PAGE_TOKENS and self.is_due(session, position):
            self.save(session)

    def fall_back(self, session: Session) -> None:
        """Have the frontier of a session fall back to its state, a few tokens before, from where it
        can be saved, parked and moved."""
        state = session.kv.state
        if state is not None and state.position < session.frontier:
            session.frontier = state.position
            self._slots.fit(session)

    def save(self, session: Session) -> bool:
        """Have the next frame write the session's state to a file; False if there is none at its
        frontier, or it is saved already."""
        kv, position = session.kv, session.frontier
        if kv.state is None or kv.state.position != position or self._store.states is None:
            return False
        key, parent = self.key_at(session, position)
        saved = self._store.states
        if key in self._saving or key in saved or not saved.has_room(self.state_bytes):
            return False
        self._saves[key] = StateSave(session, key, parent, kv.state.slot.index)
        self._saving[key] = parent
        self._wake()
        return True

    @property
    def saving(self) -> frozenset[bytes]:
        """Keys of the states that are being written to files."""
        return frozenset(self._saving)

    def is_saving(self, session: Session) -> bool:
        """Whether the state at the session's frontier is being written to a file."""
        return bool(self._saving and session.frontier) and (
            self.key_at(session, session.frontier)[0] in self._saving
        )

    def rests(self, session: Session) -> None:
        """Release the state of a session at rest, which is saved, if many are taken."""
        kv, pool = session.kv, self._pool
        if session.state is not State.IDLE or kv.state is None or pool is None:
            return
        is_saved = kv.state.position == session.frontier and self.is_saved(
            session, session.frontier
        )
        if is_saved and self._slots.owns(session) and pool.n_taken > self._rest_max:
            kv.set_state(None)

    def take(self, taker: Session | None = None) -> StateSlot | None:
        """A slot; if none is free that of another session which rests longest, or is paused. Its
        state is saved by the next frame, before any step writes to the slot."""
        if self._pool is None:
            return None
        while (slot := self._pool.take()) is None:
            others = itertools.chain(self._slots.reclaimable, self.paused())
            holders = (s for s in others if s.kv.state is not None and s is not taker)
            if (session := next(holders, None)) is None:
                return None
            self.save(session)
            session.kv.set_state(None)
        return slot

    def take_alone(self) -> StateSlot | None:
        """A slot for a frame without chores. It is written before the next frame saves anything, so
        a save from a state that was in this slot is given up."""
        slot = self.take()
        for save in list(self._saves.values()):
            if slot is not None and save.slot == slot.index:
                del self._saves[save.key], self._saving[save.key]
        return slot

    # ---------------------------------------------------------------------------- of pipelines

    def gather(self, session: Session, position: int) -> tuple[bytes, bytes] | None:
        """Key and parent of the state at a position, which the worker is to write to a file as a
        pipeline computes it, until `gathered` or `give_up`. None: it is saved, or another frame or
        pipeline saves it, or there is no room."""
        saved, (key, parent) = self._store.states, self.key_at(session, position)
        if saved is None or key in saved or key in self._saving or key in self._gathering:
            return None
        if not self.has_room:
            return None
        self._gathering[key] = parent
        return key, parent

    def gathered(self, key: bytes) -> None:
        """Note that the worker has written the file of a state of a pipeline."""
        parent, saved = self._gathering.pop(key, None), self._store.states
        if parent is not None and saved is not None:
            saved.saved(key, parent, self.state_bytes)
            self._drop_wrong(key)

    def give_up(self, keys: Iterable[bytes]) -> None:
        """Gather these states no more: until `abandoned` the worker may still be writing them."""
        for key in keys:
            if (parent := self._gathering.pop(key, None)) is not None:
                self._saving[key] = parent

    def abandoned(self, keys: Iterable[bytes]) -> None:
        """Note that the worker writes these states no more, which it may have written."""
        for key in keys:
            parent, saved = self._saving.pop(key, None), self._store.states
            if parent is not None and saved is not None:
                saved.abandoned(key, parent)
                self._drop_wrong(key)

    def _drop_wrong(self, key: bytes) -> None:
        if key in self._wrong and self._store.states is not None:
            self._store.states.drop(key)
        self._wrong.discard(key)

    # ------------------------------------------------------------------------------ the frame

    @property
    def has_chores(self) -> bool:
        """Whether the next frame saves or loads states."""
        return bool(self._saves or self._loads)

    def take_chores(self) -> StateChores:
        """Take what the next frame saves and loads."""
        if not self.has_chores:
            return StateChores()
        chores = StateChores(tuple(self._saves.values()), tuple(self._loads))
        self._saves, self._loads = {}, []
        return chores

    def answered(self, chores: StateChores, done: tuple[bool, ...]) -> None:
        """Apply the answer of the frame with these chores."""
        saved = self._store.states
        for save, is_good in zip(chores.saves, done, strict=False):
            self._saving.pop(save.key, None)
            if is_good and saved is not None:
                saved.saved(save.key, save.parent, self.state_bytes)
                self.rests(save.session)
        for load, is_good in zip(chores.loads, done[len(chores.saves) :], strict=True):
            session, kv = load.session, load.session.kv
            is_awaited = self._loading.get(session) is load
            if is_awaited:
                del self._loading[session]
                kv.awaits_state = False
            if not is_good and saved is not None:
                saved.drop(load.key)
            is_here = (session.epoch, session.frontier) == (load.epoch, load.position)
            if is_good and is_awaited and is_here:
                kv.set_state(LiveState(load.slot, load.position))
            else:
                load.slot.release()
            if saved is not None:
                saved.used(load.key, is_last=bool(load.position % PAGE_TOKENS))


def _file(slot: int, key: bytes, parent: bytes) -> wire.StateFile:
    return wire.StateFile(slot, state_name(key, parent), state_seed(key))
