"""Page tables of the sessions of one lane, and the slots of its arena.

Owns which session holds which slot, and which slots are reclaimable. A session whose slots are
reclaimed keeps its sealed pages; the other rows are imported from a parked tail in the store or
the arena of a dead worker, or recomputed with the same bits.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from batchengine.session import Loss, Session, State
from batchengine.session_kv import (
    Cut,
    HeldSegment,
    Holders,
    PendingRows,
    full_pages,
    page_start,
    pages_for,
    rows_in,
)
from batchengine.wire import lane as wire
from kv_store import keys
from kv_store.arenas.arena import Arena, ArenaSlot
from kv_store.pages.index import PageRef
from kv_store.pages.pool import Ticket
from kv_store.store import Store

log = logging.getLogger("batchengine.kv")


class Seal:
    """Sealing of one page from the arena into the store. `session` None = the session left.

    A page of fewer than 256 tokens is a tail being parked, whose slot the session keeps.
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
        self.lanes = session.kv.writers_of(session.kv.first_open, index)
        self.timeline = session.tokens  # this list may grow, or be replaced, but never shrinks
        self.tokens = session.tokens[start : start + rows]
        self.salt = session.salt
        self.priority = session.priority
        self.ticket: Ticket | None = None
        self.written = False  # the store has written the page; the manifest row is next
        self.ref: PageRef | None = None
        self.dropped = False  # its rows are invalid: it must not be published
        self.again = False  # failed before, so it does not count in `is_moving`

    @property
    def is_tail(self) -> bool:
        return len(self.tokens) < PAGE_TOKENS

    @property
    def chain(self) -> list[int]:
        """The timeline up to the end of the page."""
        return self.timeline[: page_start(self.index) + len(self.tokens)]


class LostArena(NamedTuple):
    """The arena of a dead worker, and the epoch in the header of every slot that was held."""

    arena: Arena
    epochs: dict[ArenaSlot, int]


class Leaving(NamedTuple):
    """Slots of a session that has moved to another lane, for `Slots.release`."""

    arena: Arena | None
    slots: list[ArenaSlot]


class Labels(NamedTuple):
    """Changes of slots by one frame: indices to poison, slots to reserve, new headers."""

    poison: tuple[int, ...]
    reserve: tuple[wire.ReserveSlot, ...]
    relabel: tuple[wire.Relabel, ...]

    def reserves(self, slot: ArenaSlot) -> bool:
        return any((fresh.slot, fresh.gen) == (slot.slot, slot.gen) for fresh in self.reserve)

    def relabels(self, slot: ArenaSlot) -> bool:
        return any((label.slot, label.gen) == (slot.slot, slot.gen) for label in self.relabel)


class NoHolders:
    """The holders of a daemon without peers: none."""

    def link(self, segment: HeldSegment) -> int | None:
        return None

    def release(self, segments: Sequence[HeldSegment]) -> None:
        """Do nothing: no peer was given a page, so none keeps any."""

    def hold_here(self, refs: Sequence[PageRef]) -> HeldSegment:
        raise RuntimeError("no route begins without a peer")


class Slots:
    """Page tables of the members of one lane, and the holders of the slots of its arena.

    `seals` are the seals that hold a slot. The seal pipeline adds them; when a session gives up a
    slot, its seal is removed here, unless the seal has a ticket.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.members: dict[int, Session] = {}  # sessions of this lane, by key
        self.holders: Holders = NoHolders()
        self.arena: Arena | None = None  # of the worker that is up
        self.seals: dict[ArenaSlot, Seal] = {}
        self.reclaimable: dict[Session, int] = {}  # sessions that do not run -> slots to gain
        self._changed: dict[Session, None] = {}
        self._claims: dict[Session, None] = {}  # see `members_pending`
        self.epochs: dict[ArenaSlot, int] = {}  # in the header of every held slot
        self._poison: dict[int, None] = {}
        self._fresh: dict[ArenaSlot, wire.ReserveSlot] = {}
        self._relabels: dict[ArenaSlot, wire.Relabel] = {}
        self._sent: deque[Labels] = deque()  # by frames that are not answered yet
        self.frames = 0  # answered

    def __repr__(self) -> str:
        return f"<Slots {self.arena!r} reclaimable={len(self.reclaimable)} seals={len(self.seals)}>"

    # ------------------------------------------------------------------------------- members

    @property
    def is_attached(self) -> bool:
        """Whether a worker is up and has mapped its arena."""
        return self.arena is not None

    def owns(self, session: Session) -> bool:
        """Whether the session is a member; slots of two arenas may be equal as values."""
        return self.members.get(session.key) is session

    def enter(self, session: Session) -> None:
        """Make the session a member."""
        self.members[session.key] = session
        if session.kv.pending:
            self._claims[session] = None

    def detach(self, session: Session) -> Leaving:
        """Remove a session that moves to another lane; it keeps its sealed pages.

        Seals with a ticket continue without it. Returns the other open slots, for `release`.
        """
        slots = session.kv.take_open()
        left = Leaving(self.arena, list(slots))
        for slot in slots:
            if self._leave_seal(slot):
                left.slots.remove(slot)
        self.reclaimable.pop(session, None)
        self.unpark(session)
        self.members.pop(session.key, None)
        session.kv.set_state(None)
        return left

    def release(self, left: Leaving) -> None:
        """Poison and free the slots of a session that left, unless their worker died."""
        if left.arena is not None and left.arena is self.arena:
            for slot in left.slots:
                self.drop(slot)

    def changed(self, session: Session) -> None:
        """Note that the session lost or regained KV, for `take_changed`."""
        self._changed[session] = None

    def take_changed(self) -> list[Session]:
        """Return the sessions that lost or regained KV since the last call."""
        changed, self._changed = self._changed, {}
        return list(changed)

    # ------------------------------------------------------------------------------- slots

    @property
    def total(self) -> int:
        """Number of slots of the arena; 0 = no worker is up."""
        return 0 if self.arena is None else self.arena.shape.slots

    @property
    def available(self) -> int:
        """Number of slots that the next step may use: free and reclaimable ones."""
        n_free = 0 if self.arena is None else self.arena.n_free
        return n_free + sum(self.reclaimable.values())

    def ensure(self, session: Session, until: int) -> bool:
        """Give the session slots for positions below `until`; False = the arena is full."""
        kv = session.kv
        if session.frontier > kv.reach():  # a defect: a new slot has zeros, not KV
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
        """Make slots and pins of a session that does not run reclaimable, as the newest one."""
        self.reclaimable.pop(session, None)
        if session.kv.codes or session.kv.later:
            self.reclaimable[session] = self._reclaimable_slots(session)

    def protect(self, session: Session) -> None:
        """Make the slots of a session that runs or ends not reclaimable."""
        self.reclaimable.pop(session, None)
        if session.kv.pending:
            self._claims[session] = None

    def truncate(self, session: Session, n_pages: int) -> None:
        """Drop the pages from index `n_pages` on; the frontier falls back to the remaining ones."""
        self.give_back(session.cut(page_start(n_pages)))
        self.recount(session)

    def trim(self, session: Session) -> None:
        """Give back the open pages from the frontier on, which have no row that counts."""
        n_pages = max(session.kv.first_open, pages_for(session.frontier))
        if n_pages < len(session.kv.codes):
            self.truncate(session, n_pages)

    def clear(self, session: Session) -> None:
        """Drop every page of the session, also those after a range that was lost."""
        session.kv.drop_later()
        self.truncate(session, 0)

    def keep_held(self, session: Session) -> None:
        """Drop every page of the session but those that peers hold before any other."""
        session.kv.drop_later()
        self.truncate(session, session.kv.n_held)

    def give_back(self, dropped: Cut) -> None:
        """Free what a table does not refer to any more."""
        for slot in dropped.slots:
            self.drop(slot)
        for ref in dropped.refs:
            self._store.pages.unpin(ref)
        if dropped.held:
            self.holders.release(dropped.held)

    def keep_sealed(self, session: Session) -> None:
        """Drop the open pages and pending rows of the session."""
        self.truncate(session, session.kv.first_open)

    def drop_pending(self, session: Session) -> None:
        """Drop the pending rows of the session, which are then recomputed."""
        self.truncate(session, len(session.kv.codes))

    def fit(self, session: Session) -> None:
        """Keep the pages that fit a changed timeline, and relabel open slots with its epoch."""
        self._fit(session)
        if any(self.epochs.get(slot) != session.epoch for slot in session.kv.open):
            self._relabel(session)

    def _fit(self, session: Session) -> None:
        """Keep the pages below the frontier that may be appended to.

        A frontier inside a sealed page continues in an imported copy of its leading rows; inside a
        page that is being sealed it falls back to the start of the page.
        """
        kv, frontier = session.kv, session.frontier
        page = full_pages(frontier)
        rows, slot = rows_in(page, frontier), kv.slot_at(frontier)
        seal = None if slot is None else self.seals.get(slot)
        if kv.pending and frontier == kv.reach():
            return  # there is no open page, and the pending rows fit already
        if rows and slot is not None and (seal is None or seal.is_tail):
            parked = kv.parked
            if page + 1 < len(kv.codes):
                self.truncate(session, page + 1)
            elif parked is not None and (parked.page, parked.rows) != (page, rows):
                self.unpark(session)
        elif page < kv.n_held:
            self.truncate(session, page)
        elif rows and slot is None:
            self.truncate(session, page + 1)
            ref = kv.unseal_last()  # its pin passes to the pending row
            session.frontier = kv.reach()
            self.claim_pending(session, [self.pending_in_page(page, rows, ref)])
        else:
            self.truncate(session, page)

    def _relabel(self, session: Session) -> None:
        """Have the next frame write the session's epoch to the headers of its open slots."""
        for page, slot in enumerate(session.kv.open, session.kv.first_open):
            label = self.label(slot, session, session.epoch, page)
            if slot in self._fresh:
                self._fresh[slot] = label
                continue
            rows = rows_in(page, session.frontier)
            self._relabels[slot] = wire.Relabel(
                slot.slot, slot.gen, session.name, session.epoch, page, rows
            )

    def label(self, slot: ArenaSlot, session: Session, epoch: int, page: int) -> wire.ReserveSlot:
        """Return the header for a held slot, and record its epoch."""
        self.epochs[slot] = epoch
        return wire.ReserveSlot(slot.slot, slot.gen, session.name, epoch, page)

    def take(self, *, reclaim: bool = True) -> ArenaSlot | None:
        """Take a slot of the arena, reclaiming one if none is free; None if there is none."""
        if self.arena is None:
            return None
        slot = self.arena.reserve()
        while slot is None:
            if not reclaim or not self._reclaim():
                return None
            slot = self.arena.reserve()
        self._poison.pop(slot.slot, None)  # the next frame zeroes the slot instead
        return slot

    def recount(self, session: Session) -> None:
        """Update the number of slots that reclaiming from the session would free."""
        if session in self.reclaimable:
            self.reclaimable[session] = self._reclaimable_slots(session)

    def _reclaimable_slots(self, session: Session) -> int:
        """Count the slots that `drop` would free at once: no seal with a ticket holds them."""
        seals = map(self.seals.get, session.kv.open)
        return sum(seal is None or seal.ticket is None for seal in seals)

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
        """Drop the session's open pages; a parked tail after the sealed ones becomes pending."""
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
        """Return leading rows of a page of the store as pending rows, which take over its pin."""
        return PendingRows(index, rows, ref, lambda: self._store.pages.unpin(ref))

    def unpark(self, session: Session) -> None:
        """Unpin the parked copy of the tail, since the open slot is about to change."""
        parked, session.kv.parked = session.kv.parked, None
        if parked is not None:
            self._store.pages.unpin(parked.ref)

    def evict_oldest(self, taker: Session | None) -> bool:
        """Unpin the sealed pages of the oldest reclaimable session with any, for eviction.

        If they are not evicted, `extend` finds them when the session computes next.
        """
        for session in self.reclaimable:
            kv = session.kv
            if session is not taker and (kv.sealed or any(later.sealed for later in kv.later)):
                self.keep_held(session)
                session.loss = Loss.EVICTED
                self.changed(session)
                return True
        return False

    def know_keys(self, session: Session, n_pages: int) -> None:
        """Compute the content keys of the session's first `n_pages` pages as far as they lack."""
        known, kv = len(session.kv.keys), session.kv
        if known < n_pages:
            parent = kv.keys[-1] if known else keys.ROOT_KEY
            tokens = session.tokens[page_start(known) : page_start(n_pages)]
            kv.keys += keys.chain_keys(tokens, self._store.pages.repr_id, session.salt, parent)

    def drop(self, slot: ArenaSlot) -> None:
        """Free a slot of a session; a seal with a ticket keeps the slot until the seal ends."""
        if not self._leave_seal(slot):
            self.free(slot)

    def _leave_seal(self, slot: ArenaSlot) -> bool:
        """Detach the slot's seal from its session; True if it has a ticket, and so continues.

        A seal without a ticket ends: the pipeline drops it.
        """
        seal = self.seals.get(slot)
        if seal is not None and seal.ticket is not None:
            seal.session = None
            return True
        self.seals.pop(slot, None)
        return False

    def free(self, slot: ArenaSlot) -> None:
        """Free a slot that nothing reads; the next frame poisons it."""
        if self.arena is None:
            return
        self.arena.release(slot)  # the frame that poisons it precedes any frame that uses it
        self.epochs.pop(slot, None)
        self._relabels.pop(slot, None)
        self._fresh.pop(slot, None)
        self._poison[slot.slot] = None

    # ------------------------------------------------------------------------------ pending rows

    def claim_pending(self, session: Session, pending_rows: Sequence[PendingRows]) -> None:
        """Set the session's pending rows, of the pages right after those in its table.

        Raises ValueError, and changes nothing, if they do not follow.
        """
        session.kv.claim(pending_rows)
        if pending_rows and self.owns(session):
            self._claims[session] = None

    def members_pending(self) -> list[Session]:
        """Return the members whose pending rows may be imported, oldest claim first.

        The parked tail of a member without a seat is not among them: there may be thousands, and
        the steps look here. `protect` adds it.
        """
        for session in list(self._claims):
            if not self.owns(session) or not _has_importable(session):
                del self._claims[session]
        return list(self._claims)

    # ------------------------------------------------------------------------------- the frame

    def warm(self, slots: Iterable[ArenaSlot]) -> None:
        """Have the next frame write to these slots, so that later writes cause no page faults."""
        self._poison.update((slot.slot, None) for slot in slots)

    @property
    def has_labels(self) -> bool:
        """Whether the next frame has slots to poison, reserve or relabel."""
        return bool(self._poison or self._fresh or self._relabels)

    def take_labels(self) -> Labels:
        """Take the next frame's changes of slots; after each frame call `labeled`."""
        labels = Labels(
            tuple(self._poison), tuple(self._fresh.values()), tuple(self._relabels.values())
        )
        self._sent.append(labels)
        self._poison, self._fresh, self._relabels = {}, {}, {}
        return labels

    def labeled(self) -> None:
        """Note that the oldest frame with labels was executed."""
        self._sent.popleft()
        self.frames += 1

    def is_reserved(self, slot: ArenaSlot) -> bool:
        """Whether the worker has reserved a slot that a session holds."""
        return slot not in self._fresh and not any(sent.reserves(slot) for sent in self._sent)

    @property
    def is_poisoning(self) -> bool:
        """Whether slots that were freed are not poisoned yet."""
        return bool(self._poison) or any(sent.poison for sent in self._sent)

    def is_relabeling(self, session: Session) -> bool:
        """Whether headers of the session's slots do not have its new epoch yet."""
        sent = any(labels.relabels(slot) for labels in self._sent for slot in session.kv.open)
        return sent or not self._relabels.keys().isdisjoint(session.kv.open)

    # ------------------------------------------------------------------------------- the worker

    def attach(self, arena: Arena) -> None:
        """Use the arena that a new worker has mapped; no session has a slot in it yet."""
        self.arena = arena

    def lose_arena(self) -> LostArena | None:
        """Give up the arena of a dead worker; its seals continue without a session.

        The tables still have the slots: `RowImporter.arena_died` turns them into pending rows.
        """
        lost = None if self.arena is None else LostArena(self.arena, self.epochs)
        for seal in self.seals.values():
            seal.session = None
        # Keys of a dead arena's slots may repeat in the new one.
        self.arena, self.seals, self.epochs = None, {}, {}
        self._poison, self._fresh, self._relabels = {}, {}, {}
        self._sent.clear()
        # The slots are gone, but pins of sessions that do not run are still reclaimable.
        self.reclaimable = {
            session: 0 for session in self.reclaimable if session.kv.sealed or session.kv.later
        }
        return lost


def _has_importable(session: Session) -> bool:
    """Whether a step may import pending rows: without a seat only those in an arena."""
    if session.state in (State.IDLE, State.WAITING):
        return any(isinstance(rows.source, wire.FromArena) for rows in session.kv.pending)
    return bool(session.kv.pending)
