"""The KV of one lane, as its step loop uses it.

Owns the order in which the parts act, before and after a frame and after a worker's exit. A session
whose worker died keeps its sealed pages; its open rows stay in the dead arena until the next worker
has imported them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from batchengine.kv.arenas import DeadArenas
from batchengine.kv.digests import DueDigest
from batchengine.kv.disputes import Disputes
from batchengine.kv.held import HeldTables
from batchengine.kv.importing import RowImport, RowImporter
from batchengine.kv.invalidation import Invalidation
from batchengine.kv.prefix import PrefixMatcher
from batchengine.kv.sealing import SealPipeline
from batchengine.kv.slots import Labels, Leaving, Seal, Slots
from batchengine.kv.states import LaneStates, StateChores
from batchengine.kv.touching import FreedCodes, PageTouches
from batchengine.session import Session
from batchengine.wire import lane as wire
from kv_store.store import Store


class Chores(NamedTuple):
    """What a frame holds besides entries, and the owner of each answer."""

    labels: Labels
    import_rows: tuple[wire.ImportRows, ...]
    import_tokens: bytes
    touch: tuple[int, ...]
    digest: tuple[wire.Digest, ...]
    freed: tuple[int, ...]
    deleted: tuple[int, ...]
    row_imports: list[RowImport]  # of each `import_rows`
    touches: list[asyncio.Future[None]]  # that resolve after the frame
    digests: list[DueDigest]  # of each `digest`
    states: StateChores = StateChores()


class LaneKv:
    """The parts of one lane's KV. Each part depends only on parts created before it.

    `wake` is called from any thread when the lane's loop has something to do; `commit` when a
    manifest row waits for a commit. `kind` is the lane's: a GPU has copies of sealed pages.
    """

    def __init__(
        self,
        store: Store,
        disputes: Disputes,
        wake: Callable[[], None],
        commit: Callable[[], None],
        kind: str = "cpu",
    ) -> None:
        self.disputes = disputes
        self.arenas = DeadArenas()
        self.slots = Slots(store)
        self.states = LaneStates(store, self.slots, wake)
        self.prefix = PrefixMatcher(store, self.slots, self.states)
        self.sealing = SealPipeline(store, self.slots, self.arenas, disputes, wake, commit)
        self.held = HeldTables(store, self.slots)
        disputes.watchers += [self.held.invalid, self.states.invalid]
        self.invalidation = Invalidation(store, self.slots, self.held, self.sealing, disputes)
        self.importing = RowImporter(store, self.slots, self.sealing.digests, self.arenas, wake)
        self.touches = PageTouches(store.pages.layout.page_bytes, wake)
        self._freed, self._deleted = FreedCodes(), FreedCodes()

        def deleted(extent: int) -> None:
            self._deleted.add(extent)
            wake()

        store.core.on_deleted.append(deleted)
        if kind == "cuda":
            store.pages.watch_freed(self._freed.add)

    def __repr__(self) -> str:
        return f"<LaneKv {self.slots!r} {self.sealing!r} {self.importing!r}>"

    # ------------------------------------------------------------------------------ the frame

    def poll(self) -> None:
        """Apply the results of the store's threads. Called while every step in flight is ahead: it
        may cut tables."""
        self.sealing.poll()
        self.importing.poll()

    def chores(self) -> tuple[Chores, list[Seal]]:
        """Take what the next frame holds besides entries, and the seals it verifies.

        Call after the entries were chosen: a frame never digests a tail whose session computes.
        """
        deleted = self._deleted.take()  # first: their pages are freed before, and named so
        import_rows, tokens, row_imports = self.importing.take_imports()
        touch, touches = self.touches.take()
        digests = self.sealing.digests.take()
        chores = Chores(
            self.slots.take_labels(),
            tuple(import_rows),
            tokens,
            tuple(touch),
            tuple([wire.Digest(slot.slot, rows) for _, _, rows, slot in digests]),
            self._freed.take(),
            deleted,
            row_imports,
            touches,
            digests,
            self.states.take_chores(),
        )
        return chores, self.sealing.read_back.take()

    def answered(
        self,
        chores: Chores,
        digests: tuple[bytes, ...],
        imported: tuple[int, ...],
        states: tuple[bool, ...] = (),
    ) -> None:
        """Apply the answers of the frame with these chores."""
        self.slots.labeled()
        for (session, index, rows, slot), digest in zip(chores.digests, digests, strict=True):
            self.sealing.digested(session, index, rows, slot, digest)
        self.importing.arrived(chores.row_imports, imported)
        self.touches.touched(chores.touches)
        self.states.answered(chores.states, states)

    @property
    def has_chores(self) -> bool:
        """Whether a frame must be sent even without entries."""
        return bool(self._has_other_chores or self.sealing.read_back.due() or self._deleted)

    @property
    def _has_other_chores(self) -> bool:
        """Whether a frame must be sent for more than reading published pages back."""
        return self.slots.has_labels or self._has_moves

    @property
    def _has_moves(self) -> bool:
        """Whether the next frame has rows to import, tails to digest, pages to fault in, or states
        to save or load."""
        is_due = self.sealing.digests or self.touches or self.importing.has_chores
        return bool(is_due or self.states.has_chores)

    def park(self, session: Session) -> bool:
        """Have the open tail and the state of a session that does not run stored. False if there is
        nothing to store."""
        is_tail, is_state = self.sealing.park(session), self.states.save(session)
        if not is_state:
            self.states.rests(session)  # another session with these tokens has saved it
        return is_tail or is_state

    def park_resting(self) -> None:
        """Park the sessions that rest (`DigestQueue.tick`). Call once a second."""
        for session in self.sealing.digests.tick():
            self.park(session)

    def is_parking(self, session: Session) -> bool:
        """Whether a session that does not run waits for `park`."""
        is_tail = session.kv.parked is None and bool(session.kv.open)
        return is_tail or self.states.is_saving(session)

    def detach(self, session: Session) -> Leaving:
        """Remove a session that moves to another lane; see `Slots.detach`."""
        self.states.leave(session)
        return self.slots.detach(session)

    def rejoin(self, session: Session) -> bool:
        """Take the pages after a lost range, which the session has computed again up to them.

        False: the range is being sealed. If it cannot be sealed now, the pages are given up.
        """
        if self.held.rejoin(session):
            return True
        if self.is_sealing:
            return False
        session.kv.drop_later()
        return True

    @property
    def is_busy(self) -> bool:
        """Whether something waits for the next frame, or for room in the store."""
        return bool(self.sealing.has_results or self.sealing.queued or self.has_chores)

    @property
    def awaits_boundary(self) -> bool:
        """Whether something waits for a moment between two steps, or for room in the store. What a
        step ahead may do is not: label slots, and read published pages back."""
        return self._has_moves or bool(self.sealing.queued)

    @property
    def is_sealing(self) -> bool:
        """Whether slots will be freed: seals or chores are in flight, or the store makes room."""
        return self.sealing.is_moving or self._has_other_chores

    # ------------------------------------------------------------------------------ the worker

    def close(self) -> None:
        """Delete all arenas, after the worker has ended for good."""
        self.arenas.close()
        lost = self.slots.lose_arena()
        if lost is not None:
            lost.arena.close(delete=True)

    def lane_died(self, chores: Chores | None) -> None:
        """Turn open rows into pending rows of the dead arena; seals in flight continue from it.

        `chores` of the last frame, if any, will not be answered. Call after the worker's exit.
        """
        lost = self.slots.lose_arena()
        if lost is not None:
            self.importing.arena_died(lost)
            self.touches.arena_died()
        if chores is not None:
            self.touches.touched(chores.touches)
        self.sealing.arena_died()
        self.states.worker_died()
        if lost is not None:
            self.arenas.retire(lost.arena)  # stays while pending rows or seals hold it

    def drop_imports(self, chores: Chores) -> None:
        """Drop the rows that a frame was to import when its worker died."""
        for row_import in chores.row_imports:
            if self.slots.owns(row_import.session):
                self.slots.drop_pending(row_import.session)

    def drop_dead_arenas(self) -> None:
        """Give up pending rows in dead arenas, to make room for a new arena."""
        for session in self.slots.members_pending():
            if any(isinstance(pending.source, wire.FromArena) for pending in session.kv.pending):
                self.slots.drop_pending(session)
                self.slots.changed(session)
