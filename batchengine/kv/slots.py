"""Page tables of the sessions of one lane, and the slots of its arena.

Owns which session holds which slot, and which slots are reclaimable. A session whose slots are
reclaimed keeps its sealed pages; the rest is recomputed with the same bits, or imported from where
its rows still are: a parked tail in the store, the arena of a dead worker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchengine import wire
from batchengine.core import PAGE_TOKENS
from batchengine.session import Loss, Session
from batchengine.session_kv import PendingRows, full_pages, page_start, rows_in
from kv_store.arenas.arena import Arena, ArenaSlot, SlotState
from kv_store.pages.index import PageRef
from kv_store.pages.pool import Ticket
from kv_store.store import Store

log = logging.getLogger("batchengine.kv")


class Seal:
    """One page on its way from the arena to the store. `session` None = the session left.

    A page of fewer than 256 tokens is a tail being parked: its slot stays the session's.
    """

    def __init__(
        self, session: Session, index: int, slot: ArenaSlot, arena: Arena, digest: bytes,
        parent: bytes, rows: int = PAGE_TOKENS,
    ) -> None:  # fmt: skip
        start = index * PAGE_TOKENS
        self.session: Session | None = session
        self.index = index
        self.slot = slot
        self.arena = arena
        self.digest = digest
        self.parent = parent
        self.lanes = session.kv.writers_of(len(session.kv.sealed), index)
        self.timeline = session.tokens  # which may grow, or be replaced, but never shrinks
        self.tokens = session.tokens[start : start + rows]
        self.salt = session.salt
        self.priority = session.priority
        self.ticket: Ticket | None = None
        self.written = False  # the page thread is done; the manifest row is next
        self.ref: PageRef | None = None
        self.dropped = False  # its rows are invalid: it must not be published
        self.again = False  # it failed before: no slot is expected of it

    @property
    def is_tail(self) -> bool:
        return len(self.tokens) < PAGE_TOKENS

    @property
    def chain(self) -> list[int]:
        """The timeline up to the end of the page."""
        return self.timeline[: page_start(self.index) + len(self.tokens)]


class LostArena(NamedTuple):
    """An arena whose worker died, and the epoch in the header of every slot that was held."""

    arena: Arena
    epochs: dict[ArenaSlot, int]


class Leaving(NamedTuple):
    """Slots of a session that computes on another lane now."""

    arena: Arena | None
    slots: list[ArenaSlot]


class Labels(NamedTuple):
    """What the next frame does to slots: indices to poison, slots to reserve, headers to change."""

    poison: tuple[int, ...]
    reserve: tuple[wire.ReserveSlot, ...]
    relabel: tuple[wire.Relabel, ...]


class Slots:
    """Page tables of the members of one lane, and who holds which slot of its arena.

    `seals` are the seals that hold a slot. The seal pipeline adds them; a session that gives up a
    slot takes its seal out here, unless the store reads the slot already.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.members: dict[int, Session] = {}  # sessions of this lane, by key
        self.arena: Arena | None = None  # of the worker that is up
        self.seals: dict[ArenaSlot, Seal] = {}
        self.reclaimable: dict[Session, int] = {}  # not running; slots they would give back
        self._changed: dict[Session, None] = {}
        self._claims: dict[Session, None] = {}  # members that may have pending rows
        self.epochs: dict[ArenaSlot, int] = {}  # in the header of every held slot
        self._poison: dict[int, None] = {}
        self._fresh: dict[ArenaSlot, wire.ReserveSlot] = {}
        self._relabels: dict[ArenaSlot, wire.Relabel] = {}
        self._relabeling: frozenset[ArenaSlot] = frozenset()  # by the frame that was sent

    def __repr__(self) -> str:
        return f"<Slots {self.arena!r} reclaimable={len(self.reclaimable)} seals={len(self.seals)}>"

    # ------------------------------------------------------------------------------- members

    @property
    def is_attached(self) -> bool:
        """A worker is up and has mapped its arena."""
        return self.arena is not None

    def owns(self, session: Session) -> bool:
        """Whether the session is a member; slots of two arenas may be equal as values."""
        return self.members.get(session.key) is session

    def enter(self, session: Session) -> None:
        """The session is a member from now on."""
        self.members[session.key] = session
        if session.kv.pending:
            self._claims[session] = None

    def detach(self, session: Session) -> Leaving:
        """The session computes elsewhere from now on; its sealed pages went with it.

        Seals of its pages that have a ticket go on without a session. `release` what is left.
        """
        slots = session.kv.take_open()
        left = Leaving(self.arena, list(slots))
        for slot in slots:
            if self._leave_seal(slot):
                left.slots.remove(slot)
        self.reclaimable.pop(session, None)
        self.unpark(session)
        self.members.pop(session.key, None)
        return left

    def release(self, left: Leaving) -> None:
        """Slots of a session that left are poisoned and free, unless their arena died."""
        if left.arena is not None and left.arena is self.arena:
            for slot in left.slots:
                self.drop(slot)

    def changed(self, session: Session) -> None:
        """The KV of the session became less, or came back: see `take_changed`."""
        self._changed[session] = None

    def take_changed(self) -> list[Session]:
        """Sessions whose KV became less, or came back, since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed)

    # ------------------------------------------------------------------------------- slots

    @property
    def available(self) -> int:
        """Slots the next step may use: free and reclaimable ones."""
        return self._free_slots() + sum(self.reclaimable.values())

    def ensure(self, session: Session, until: int) -> bool:
        """Give the session slots for positions below `until`; False = the arena is full."""
        kv = session.kv
        if session.frontier > kv.reach():  # never; but zeros are not KV
            log.error("%r has fewer pages than its frontier says: it is computed again", session)
            self.drop_pending(session)
            return False
        while kv.reach() < until:
            slot = self.take()
            if slot is None:
                return False
            self._fresh[slot] = self.label(slot, session, session.epoch, len(kv.codes))
            kv.append(slot)
        return True

    def make_reclaimable(self, session: Session) -> None:
        """The session does not run: its slots and pins may be reclaimed, oldest session first."""
        self.reclaimable.pop(session, None)
        if session.kv.codes:
            self.reclaimable[session] = self._reclaimable_slots(session)

    def protect(self, session: Session) -> None:
        """The session runs again, or ends: its slots are not reclaimed."""
        self.reclaimable.pop(session, None)

    def truncate(self, session: Session, n_pages: int) -> None:
        """Forget the pages from `n_pages` on; the frontier falls back to what is left."""
        dropped = session.cut(page_start(n_pages))
        for slot in dropped.slots:
            self.drop(slot)
        for ref in dropped.refs:
            self._store.pages.unpin(ref)
        self.recount(session)

    def keep_sealed(self, session: Session) -> None:
        """Forget what is not sealed."""
        self.truncate(session, len(session.kv.sealed))

    def drop_pending(self, session: Session) -> None:
        """Forget the rows that are elsewhere: they are computed again."""
        self.truncate(session, len(session.kv.codes))

    def fit(self, session: Session) -> None:
        """After the timeline changed: keep the pages that still hold it, under its epoch."""
        self._fit(session)
        if any(self.epochs.get(slot) != session.epoch for slot in session.kv.open):
            self._relabel(session)

    def _fit(self, session: Session) -> None:
        """Keep the pages below the frontier that may be appended to.

        A frontier inside a sealed page continues in a copy of its leading rows; inside one that is
        on its way to the store it falls back to the page's start.
        """
        kv, frontier = session.kv, session.frontier
        page = full_pages(frontier)
        rows, slot = rows_in(page, frontier), kv.slot_at(frontier)
        if kv.pending and frontier == kv.reach():
            return  # nothing is open here, and what is elsewhere fits already
        if rows and slot is not None and not self._is_sealing(slot):
            parked = kv.parked
            if page + 1 < len(kv.codes):
                self.truncate(session, page + 1)
            elif parked is not None and (parked.page, parked.rows) != (page, rows):
                self.unpark(session)
        elif rows and slot is None:
            self.truncate(session, page + 1)
            ref = kv.unseal_last()  # its pin passes to the pending row
            session.frontier = kv.reach()
            self.claim_pending(session, [self.pending_in_page(page, rows, ref)])
        else:
            self.truncate(session, page)

    def _is_sealing(self, slot: ArenaSlot) -> bool:
        seal = self.seals.get(slot)
        return seal is not None and not seal.is_tail

    def _relabel(self, session: Session) -> None:
        """Open slots get the session's present epoch in their headers."""
        sealed = len(session.kv.sealed)
        for offset, slot in enumerate(session.kv.open):
            page = sealed + offset
            label = self.label(slot, session, session.epoch, page)
            if slot in self._fresh:
                self._fresh[slot] = label
                continue
            rows = rows_in(page, session.frontier)
            self._relabels[slot] = wire.Relabel(
                slot.slot, slot.gen, session.name, session.epoch, page, rows
            )

    def label(self, slot: ArenaSlot, session: Session, epoch: int, page: int) -> wire.ReserveSlot:
        """The header that a held slot gets now."""
        self.epochs[slot] = epoch
        return wire.ReserveSlot(slot.slot, slot.gen, session.name, epoch, page)

    def take(self, *, reclaim: bool = True) -> ArenaSlot | None:
        """A slot of the arena, now held; reclaims one if none is free."""
        if self.arena is None:
            return None
        slot = self.arena.reserve()
        while slot is None:
            if not reclaim or not self._reclaim():
                return None
            slot = self.arena.reserve()
        self._poison.pop(slot.slot, None)  # it is zeroed anyway
        return slot

    def recount(self, session: Session) -> None:
        """The slots that the session would give back may be others now."""
        if session in self.reclaimable:
            self.reclaimable[session] = self._reclaimable_slots(session)

    def _reclaimable_slots(self, session: Session) -> int:
        return sum(1 for slot in session.kv.open if self._is_free_to_go(slot))

    def _is_free_to_go(self, slot: ArenaSlot) -> bool:
        """Only its session reads the slot: `drop` would free it at once."""
        seal = self.seals.get(slot)
        return seal is None or seal.ticket is None

    def _reclaim(self) -> bool:
        """Reclaim the open slots of one session: the oldest with a parked tail, else the oldest.

        A parked tail is imported when its session runs again; any other is recomputed.
        """
        victim = None
        for session, count in self.reclaimable.items():
            if count and session.kv.parked is not None:
                victim = session
                break
            if count and victim is None:
                victim = session
        if victim is None:
            return False
        self.vacate(victim)
        self.changed(victim)
        return True

    def vacate(self, session: Session) -> None:
        """The session keeps what is sealed; a parked tail that follows it waits in the store."""
        parked, session.kv.parked = session.kv.parked, None
        self.keep_sealed(session)
        if parked is None:
            session.loss = Loss.RECLAIMED
            return
        if parked.page == len(session.kv.codes):
            rows = self.pending_in_page(parked.page, parked.rows, parked.ref)
            self.claim_pending(session, [rows])
        else:
            self._store.pages.unpin(parked.ref)

    def pending_in_page(self, index: int, rows: int, ref: PageRef) -> PendingRows:
        """Leading rows of a page of the store as something to import; the pin passes to it."""
        return PendingRows(index, rows, ref, lambda: self._store.pages.unpin(ref))

    def unpark(self, session: Session) -> None:
        """The parked copy of the tail is of no more use: its slot is here and will change."""
        parked, session.kv.parked = session.kv.parked, None
        if parked is not None:
            self._store.pages.unpin(parked.ref)

    def evict_oldest(self, taker: Session) -> bool:
        """Unpin the sealed pages of the oldest reclaimable session that has any: evictable now.

        They may well be found again: `extend` looks when the session computes next.
        """
        for session in self.reclaimable:
            if session.kv.sealed and session is not taker:
                self.truncate(session, 0)
                session.loss = Loss.EVICTED
                self.changed(session)
                return True
        return False

    def _free_slots(self) -> int:
        return 0 if self.arena is None else self.arena.count(SlotState.FREE)

    def drop(self, slot: ArenaSlot) -> None:
        """Give up a slot; a seal that already has a ticket keeps it until the seal ends."""
        if not self._leave_seal(slot):
            self.free(slot)

    def _leave_seal(self, slot: ArenaSlot) -> bool:
        """Whether a seal with a ticket has the slot: it goes on without its session.

        A seal without one is over, and the pipeline forgets it.
        """
        seal = self.seals.get(slot)
        if seal is not None and seal.ticket is not None:
            seal.session = None
            return True
        self.seals.pop(slot, None)
        return False

    def free(self, slot: ArenaSlot) -> None:
        """Nothing reads the slot: it is poisoned by the next frame, and free."""
        if self.arena is None:
            return
        self.arena.release(slot)
        self.arena.freed(slot)  # the frame that poisons it goes out before any that uses it
        self.epochs.pop(slot, None)
        self._relabels.pop(slot, None)
        self._fresh.pop(slot, None)
        self._poison[slot.slot] = None

    # ------------------------------------------------------------------------------ pending rows

    def claim_pending(self, session: Session, pending_rows: Sequence[PendingRows]) -> None:
        """Rows of the pages right after those the session holds, which are elsewhere.

        Raises ValueError, and changes nothing, if they do not follow.
        """
        session.kv.claim(pending_rows)
        if pending_rows and self.owns(session):
            self._claims[session] = None

    def members_pending(self) -> list[Session]:
        """Members whose open rows are elsewhere, oldest claim first."""
        for session in list(self._claims):
            if not session.kv.pending or not self.owns(session):
                del self._claims[session]
        return list(self._claims)

    # ------------------------------------------------------------------------------- the frame

    def warm(self, slots: Iterable[ArenaSlot]) -> None:
        """Have the next frame write to these slots, so that later rows meet no page faults."""
        self._poison.update((slot.slot, None) for slot in slots)

    @property
    def has_labels(self) -> bool:
        """The next frame has something to do to slots."""
        return bool(self._poison or self._fresh or self._relabels)

    def take_labels(self) -> Labels:
        """What the next frame does to slots. Taken once; then call `labeled`."""
        labels = Labels(
            tuple(self._poison), tuple(self._fresh.values()), tuple(self._relabels.values())
        )
        self._relabeling = frozenset(self._relabels)
        self._poison, self._fresh, self._relabels = {}, {}, {}
        return labels

    def labeled(self) -> None:
        """The frame with the last labels was executed."""
        self._relabeling = frozenset()

    def is_relabeling(self, session: Session) -> bool:
        """Whether headers of its slots are yet to follow a cut of its timeline."""
        under_way = self._relabels.keys() | self._relabeling
        return not under_way.isdisjoint(session.kv.open)

    # ------------------------------------------------------------------------------- the worker

    def attach(self, arena: Arena) -> None:
        """A new worker has mapped this arena; no session has a slot in it yet."""
        self.arena = arena

    def lose_arena(self) -> LostArena | None:
        """The worker died: no slot is held, and no seal belongs to a session any more.

        The tables still name the slots, for `RowImporter.arena_died` to take.
        """
        lost = None if self.arena is None else LostArena(self.arena, self.epochs)
        for seal in self.seals.values():
            seal.session = None
        # Keys of a dead arena's slots may repeat in the new one.
        self.arena, self.seals, self.epochs = None, {}, {}
        self._poison, self._fresh, self._relabels = {}, {}, {}
        self._relabeling = frozenset()
        # Slots are gone, but sessions that do not run still give their pins.
        self.reclaimable = {session: 0 for session in self.reclaimable if session.kv.sealed}
        return lost
