"""Import of open rows into one lane's arena.

Owns the slots that the rows will get, and the order in which frames import them. Imports after a
worker's exit, a migration, parking or a restart differ only in the source: the arena of a dead or
another worker, or a partial page of the store. The worker reports how many leading rows it has
verified; the others are computed again.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from batchengine.core import PAGE_TOKENS
from batchengine.kv.arenas import DeadArenas
from batchengine.kv.digests import DigestQueue
from batchengine.kv.slots import LostArena, Slots
from batchengine.session import Loss, Session, State
from batchengine.session_kv import PendingRows, page_start
from batchengine.wire import lane as wire
from kv_store.arenas.arena import Arena, ArenaSlot
from kv_store.pages.index import PageRef
from kv_store.store import Store

IMPORT_BYTES = 32 << 20  # pages copied by one frame at most: all turns of the lane wait for it


class RowImport:
    """One import of a session's open rows. `rows[i]` rows of `pending_rows[i]` were verified."""

    def __init__(self, session: Session, epoch: int, arena: Arena) -> None:
        self.session = session
        self.epoch = epoch  # in the headers of the new slots
        self.arena = arena
        self.imported: asyncio.Future[bool] | None = None  # whether every page was answered
        self.pending_rows: Sequence[PendingRows] = ()
        self.slots: list[ArenaSlot] = []
        self.rows: list[int] = []
        self.sent = 0
        self.over = False  # installed or abandoned
        self.fallen: Callable[[], None] | None = None  # set if its worker died: releases the arena

    @property
    def is_complete(self) -> bool:
        return len(self.rows) == len(self.pending_rows)


class RowImporter:
    """Imports rows into the arena of one lane. Calls `wake` when the next frame has imports."""

    def __init__(
        self,
        store: Store,
        slots: Slots,
        digests: DigestQueue,
        arenas: DeadArenas,
        wake: Callable[[], None],
    ) -> None:
        self._store = store
        self._slots = slots
        self._digests = digests
        self._arenas = arenas
        self._wake = wake
        self._local: dict[Session, RowImport] = {}  # members' own pending rows
        self.imports: dict[RowImport, None] = {}  # all that hold slots
        self.queue: deque[RowImport] = deque()  # those with something to send
        self.rows_imported = 0

    def __repr__(self) -> str:
        return f"<RowImporter imports={len(self.imports)} queued={len(self.queue)}>"

    # ----------------------------------------------------------------------- called from outside

    def prepare(
        self,
        session: Session,
        epoch: int,
        n_pages: int,
        *,
        reclaim: bool = True,
        warm: bool = False,
    ) -> RowImport | None:
        """Reserve slots for `n_pages` open pages of a session; None if the arena has too few.

        `warm`: the next frame writes to the slots, so that the import causes no page faults.
        """
        self.poll()
        if self._slots.arena is None:
            return None
        row_import = RowImport(session, epoch, self._slots.arena)
        if not self._widen(row_import, n_pages, reclaim=reclaim):
            return None
        self.imports[row_import] = None
        if warm:
            self._slots.warm(row_import.slots)
        return row_import

    def import_rows(self, row_import: RowImport, pending_rows: Sequence[PendingRows]) -> bool:
        """Queue rows for copying; a complete import may be repeated with what has been added since.

        False, and the import is abandoned, if slots are lacking.
        """
        if row_import.over or row_import.arena is not self._slots.arena:
            return False
        if not self._widen(row_import, len(pending_rows), reclaim=True):
            self.abandon(row_import)
            return False
        while len(row_import.slots) > len(pending_rows):
            self._slots.free(row_import.slots.pop())
        row_import.pending_rows, row_import.rows, row_import.sent = pending_rows, [], 0
        if not pending_rows:
            self._end(row_import, True)
        else:
            self.queue.append(row_import)
            self._wake()
        return True

    def abandon(self, row_import: RowImport) -> None:
        """End the import and free its slots; later answers are ignored."""
        if row_import.over:
            return
        row_import.over = True
        self.imports.pop(row_import, None)
        if row_import.arena is self._slots.arena:
            for slot in row_import.slots:
                self._slots.free(slot)
        if row_import.fallen is not None:
            row_import.fallen()
        self._wake()

    def install(self, row_import: RowImport) -> None:
        """Append the imported pages to the session's table, and move its frontier.

        If the worker died meanwhile, the rows become pending rows in its arena instead.
        """
        session, kv = row_import.session, row_import.session.kv
        row_import.over = True
        self.imports.pop(row_import, None)
        self._slots.claim_pending(session, [])
        if row_import.fallen is not None:
            self._install_fallen(row_import)
            return
        reach = kv.sealed_tokens
        for pending, slot, rows in zip(
            row_import.pending_rows, row_import.slots, row_import.rows, strict=True
        ):
            first = page_start(pending.page)
            if first != reach or not rows:
                self._slots.free(slot)  # sealed meanwhile, or the rows before it are missing
                continue
            kv.append(slot)
            reach = first + rows
        if not all(row_import.rows):
            session.loss = Loss.WORKER
        self.rows_imported += reach - kv.sealed_tokens
        last = max(0, len(session.tokens) - (session.state is not State.IDLE))  # one is to compute
        session.frontier = min(reach, last)
        session.computed = max(session.computed, session.frontier)
        for page, slot in kv.filled(kv.sealed_tokens, session.frontier):
            self._digests.add(session, page, slot)

    def _install_fallen(self, row_import: RowImport) -> None:
        session = row_import.session
        first = session.kv.first_open
        session.frontier = min(session.frontier, session.kv.reach())  # it has no open page yet
        pending_rows = [
            self._pending_in_arena(pending.page, rows, row_import.arena, slot, row_import.epoch)
            for pending, slot, rows in zip(
                row_import.pending_rows, row_import.slots, row_import.rows, strict=True
            )
            if pending.page >= first and rows
        ]
        if row_import.fallen is not None:
            row_import.fallen()
        self.bring(session, pending_rows)

    def sources(self, session: Session) -> list[PendingRows]:
        """Return the sources of the session's open rows, for another lane to copy."""
        if self._slots.arena is None or session.kv.pending:
            return list(session.kv.pending)
        return [
            PendingRows(
                page,
                PAGE_TOKENS,
                self._source(self._slots.arena, slot, self._slots.epochs[slot]),
                lambda: None,  # the arena of a worker that is up is not held
            )
            for page, slot in enumerate(session.kv.open, session.kv.first_open)
        ]

    def bring(self, session: Session, pending_rows: Sequence[PendingRows]) -> None:
        """Claim rows of a session that moved here; release them if they do not follow its pages."""
        try:
            if pending_rows:
                self._slots.claim_pending(session, pending_rows)
        except ValueError:
            for pending in pending_rows:
                pending.release()

    # --------------------------------------------------------------------------- own pending rows

    def poll(self) -> None:
        """Abandon imports that their session does not wait for any more. Called between steps."""
        for session, row_import in list(self._local.items()):
            if self._is_stale(row_import):
                del self._local[session]
                self.abandon(row_import)

    def _is_stale(self, row_import: RowImport) -> bool:
        """Whether the session waits for other rows now, is frozen or closed, or has left.

        The list of pending rows is replaced whenever it changes.
        """
        session = row_import.session
        return (
            session.kv.pending is not row_import.pending_rows
            or session.epoch != row_import.epoch
            or session.state in (State.FROZEN, State.CLOSED)
            or not self._slots.owns(session)
        )

    def _is_importable(self, session: Session) -> bool:
        """Whether the session's pending rows are to be imported now; see `is_expecting`."""
        if session in self._local or session.state in (State.FROZEN, State.CLOSED):
            return False
        return session.is_expecting

    def _import_pending(self) -> None:
        """Start imports of pending rows of members, those with a seat first."""
        self.poll()
        if self._slots.arena is None:
            return
        due = [session for session in self._slots.members_pending() if self._is_importable(session)]
        due.sort(key=lambda session: session.state is not State.RUNNING)
        for session in due:
            if len(self.queue) > self._pages_max:
                return
            self._import_local(session)

    def _import_local(self, session: Session) -> None:
        pending_rows, wanted = session.kv.pending, session.state is not State.IDLE
        row_import = self.prepare(session, session.epoch, len(pending_rows), reclaim=wanted)
        if row_import is None:  # too few slots: keep the sealed pages only
            self._slots.drop_pending(session)
            session.loss = Loss.WORKER
            self._slots.changed(session)
            return
        self._local[session] = row_import
        self.import_rows(row_import, pending_rows)

    def _end(self, row_import: RowImport, complete: bool) -> None:
        """End an import; `complete`: every answer came."""
        session, imported = row_import.session, row_import.imported
        if imported is not None and not imported.done():
            imported.set_result(complete)
        if self._local.get(session) is not row_import:
            return
        del self._local[session]
        if complete:
            self.install(row_import)
            if session.state in (State.IDLE, State.WAITING):
                self._slots.make_reclaimable(session)  # `lose_arena` has set its slots to 0
        self._slots.changed(session)

    def _widen(self, row_import: RowImport, n_pages: int, *, reclaim: bool) -> bool:
        """Take slots until there are `n_pages`; on failure, free those taken here."""
        before = len(row_import.slots)
        while len(row_import.slots) < n_pages:
            slot = self._slots.take(reclaim=reclaim)
            if slot is None:
                while len(row_import.slots) > before:
                    self._slots.free(row_import.slots.pop())
                return False
            row_import.slots.append(slot)
        return True

    # ------------------------------------------------------------------------------- frames

    @property
    def _pages_max(self) -> int:
        return max(1, IMPORT_BYTES // self._store.pages.layout.page_bytes)

    @property
    def has_chores(self) -> bool:
        """Whether the next frame has rows to copy, or slots of a stale import are to be freed."""
        if self.queue or any(map(self._is_stale, self._local.values())):
            return True
        if self._slots.arena is None:
            return False
        return any(map(self._is_importable, self._slots.members_pending()))

    def take_imports(self) -> tuple[list[wire.ImportRows], bytes, list[RowImport]]:
        """Take the next pages to copy, up to IMPORT_BYTES.

        Returns the messages, the token ids of their rows (int32), and the import of each message.
        """
        self._import_pending()
        messages, tokens, owners = list[wire.ImportRows](), array("i"), list[RowImport]()
        while self.queue and len(messages) < self._pages_max:
            row_import = self.queue[0]
            if row_import.over or row_import.sent == len(row_import.pending_rows):
                self.queue.popleft()
                continue
            at = row_import.sent
            row_import.sent += 1
            message, ids = self._import_message(row_import, at)
            messages.append(message)
            tokens.extend(ids)
            owners.append(row_import)
            if row_import.sent == len(row_import.pending_rows):
                self.queue.popleft()  # else `has_chores` would cause an empty frame
        return messages, tokens.tobytes(), owners

    def _import_message(self, row_import: RowImport, at: int) -> tuple[wire.ImportRows, list[int]]:
        pending, slot, session = (
            row_import.pending_rows[at],
            row_import.slots[at],
            row_import.session,
        )
        first = page_start(pending.page)
        ids = session.tokens[first : first + pending.rows]
        label = self._slots.label(slot, session, row_import.epoch, pending.page)
        source = pending.source
        if not isinstance(source, wire.FromArena):
            session.kv.writers[pending.page] = self._store.pages.lanes_of(source)
            source, ids = self._page_source(source, ids)
        return wire.ImportRows(label, len(ids), source), ids

    def _page_source(self, ref: PageRef, ids: list[int]) -> tuple[wire.FromPage, list[int]]:
        """Source of a page of the store, whose tokens were compared before; no ids if invalid."""
        if not self._store.pages.is_resident(ref):  # invalid, though a pin keeps its bytes
            return wire.FromPage(0, 0, bytes(16)), []
        return wire.FromPage(*self._store.pages.proof(ref)), ids

    def arrived(self, row_imports: Sequence[RowImport], imported: Sequence[int]) -> None:
        """Apply the answer of a frame: verified rows of each message of `take_imports`."""
        self.poll()
        for row_import, rows in zip(row_imports, imported, strict=True):
            if row_import.over or row_import.fallen is not None:
                continue
            row_import.rows.append(rows)
            if row_import.is_complete:
                self._end(row_import, True)

    # -------------------------------------------------------------------------- worker exit

    def arena_died(self, lost: LostArena) -> None:
        """Turn the open rows of members into pending rows of the dead worker's arena."""
        for session in self._slots.members.values():
            self._leave_in_arena(session, lost)
        self._imports_died(lost.arena)

    def _leave_in_arena(self, session: Session, lost: LostArena) -> None:
        """Turn the session's open pages into pending rows of the dead arena."""
        kv = session.kv
        if not kv.open:
            return
        parked, kv.parked = kv.parked, None
        found = [
            self._pending_in_arena(page, PAGE_TOKENS, lost.arena, slot, lost.epochs[slot])
            for page, slot in enumerate(kv.take_open(), kv.first_open)
        ]
        if parked is not None:  # use the parked copy of the last page instead
            found.pop().release()
            found.append(self._slots.pending_in_page(parked.page, parked.rows, parked.ref))
        session.frontier = min(session.frontier, kv.reach())
        self._slots.claim_pending(session, found)

    def _pending_in_arena(
        self, index: int, rows: int, arena: Arena, slot: ArenaSlot, epoch: int
    ) -> PendingRows:
        source = self._source(arena, slot, epoch)
        return PendingRows(index, rows, source, self._arenas.hold(arena))

    def _source(self, arena: Arena, slot: ArenaSlot, epoch: int) -> wire.FromArena:
        return wire.FromArena(os.path.basename(arena.path), slot.slot, slot.gen, epoch)

    def _imports_died(self, arena: Arena) -> None:
        """Keep complete imports in the dead arena until `install`; end the others."""
        self.queue.clear()
        for row_import in list(self.imports):
            if row_import.fallen is not None:
                continue  # its worker died before this one
            if (
                row_import.pending_rows
                and row_import.is_complete
                and row_import.session not in self._local
            ):
                row_import.fallen = self._arenas.hold(arena)
            else:
                row_import.over = True
                del self.imports[row_import]
                self._end(row_import, False)
