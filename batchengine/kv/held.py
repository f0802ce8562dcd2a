"""Pages of one lane's sessions that other daemons hold: handing over, taking back, loss.

Owns the change of tables between sealed and held pages, at super-page boundaries. When a holder is
gone, exactly its range is computed again: earlier pages are attended to as before, and later ones
are kept and taken again once the range is complete. Moves no bytes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

from batchengine.kv.slots import Slots
from batchengine.session import Loss, Session
from batchengine.session_kv import HeldSegment, full_pages, page_start
from kv_store.pages.index import PageRef
from kv_store.store import Store

log = logging.getLogger("batchengine.kv")


class HeldTables:
    """Held pages in the tables of one lane. `slots.holders` are those who hold them."""

    def __init__(self, store: Store, slots: Slots) -> None:
        self._store = store
        self._slots = slots

    def hand_over(self, session: Session, segment: HeldSegment) -> None:
        """Replace the session's first sealed pages by a segment, whose holder has all of them.

        Raises ValueError, and changes nothing, if the table has not as many sealed pages, or some
        were not read since the store was opened.
        """
        kv = session.kv
        if self.is_cold(session):
            raise ValueError(f"{session!r}: its pages are being read")
        self._slots.know_keys(session, kv.n_held + segment.n_pages)
        for key, ref in zip(kv.keys[kv.n_held :], kv.sealed[: segment.n_pages], strict=False):
            kv.digests[key] = self._store.pages.digest(ref)
        self._store.pages.give_up(kv.hand_over(segment))

    def is_cold(self, session: Session) -> bool:
        """Whether some of the session's sealed pages were not read since the store was opened."""
        return True in self._store.pages.cold(session.kv.sealed)

    def take_back(self, session: Session, refs: Sequence[PageRef]) -> None:
        """Replace the session's last held pages by these, whose pins it takes over.

        Raises ValueError, and changes nothing, if they are not whole super-pages of the table.
        """
        codes = [self._store.pages.slot_code(ref) for ref in refs]
        self._slots.holders.release(session.kv.take_back(refs, codes))

    def recheck(self, session: Session) -> bool:
        """Keep the held pages before the first one that is lost or invalid, and renumber links.

        What follows a lost range is kept for `rejoin`, what follows an invalid page is dropped.
        True if any KV was dropped. The session may compute again if a holder did not answer.
        """
        kv, is_cut = session.kv, False
        kv.cut_off = False
        if kv.invalid_from is not None:
            self._slots.truncate(session, kv.invalid_from)
            session.loss, kv.invalid_from, is_cut = Loss.CHECKSUM, None, True
        if not kv.held:
            return is_cut
        links = [self._slots.holders.link(segment) for segment in kv.held]
        if None in links:
            self._set_aside(session, links.index(None))
            is_cut = True
        linked = [
            segment._replace(link=link)
            for segment, link in zip(kv.held, links, strict=False)
            if link is not None
        ]
        if linked != kv.held:
            kv.replace_held(linked)
        return is_cut

    def _set_aside(self, session: Session, index: int) -> None:
        """Have the pages of one segment computed again, and keep what follows."""
        kv = session.kv
        lost = kv.held[index]
        log.warning("%r: %d pages are lost with peer %s", session, lost.n_pages, lost.peer)
        self._slots.give_back(kv.set_aside(index, self._slots.give_back))
        session.frontier = min(session.frontier, page_start(kv.n_held))
        session.loss = Loss.PEER
        self._slots.recount(session)

    def rejoin(self, session: Session) -> bool:
        """Take the later pages, up to which the session has computed; its frontier moves on.

        False: the last pages before them are not sealed yet. Those before the pages of a peer
        become a segment that this daemon holds itself, since local pages follow all segments.
        """
        kv, pages = session.kv, self._store.pages
        kv.cut_later(full_pages(len(session.tokens) - 1))  # one token is left to compute
        if not kv.later:
            return True
        if kv.open or kv.pending:
            return False
        later = kv.take_later()
        if later.first != kv.first_open:
            raise AssertionError(f"{session!r}: pages from {later.first} on do not follow")
        if later.held and kv.sealed:
            self._hold_here(session)
        for segment in later.held:
            kv.append_held(segment)
        good = list(itertools.takewhile(pages.is_resident, later.sealed))
        kv.extend_sealed(good, [pages.slot_code(ref) for ref in good])
        for ref in later.sealed[len(good) :]:
            pages.unpin(ref)
        self._slots.know_keys(session, kv.first_open)
        session.frontier = kv.reach()
        session.computed = max(session.computed, session.frontier)
        self.recheck(session)
        return True

    def _hold_here(self, session: Session) -> None:
        """Make the sealed pages of a table a segment; their pins pass to the hold."""
        refs = list(session.kv.sealed)
        session.kv.hand_over(self._slots.holders.hold_here(refs))

    def invalid(self, keys: set[bytes]) -> None:
        """Have sessions drop their held pages of these keys, and what follows them.

        Tables change at the next `recheck` of their session.
        """
        for session in self._slots.members.values():
            kv = session.kv
            if not (kv.held or kv.later):
                continue
            self._slots.know_keys(session, kv.later[-1].last if kv.later else kv.n_held)
            first = next((page for page, key in enumerate(kv.keys) if key in keys), None)
            if first is None:
                continue
            kv.cut_later(first)
            if first < kv.n_held and (kv.invalid_from is None or first < kv.invalid_from):
                kv.invalid_from = first
