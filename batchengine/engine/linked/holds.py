"""Holds given: pages that this daemon keeps pinned for routes of other daemons' sessions.

Owns their pins and the byte budget. A hold is named by (peer, its incarnation, hold id); its epoch
is that of the route. Pages are reserved before they are sent, added in any order, and can be
attended to as far as they are complete from the first one. The owner trims a hold at its end, or
releases it; a new incarnation of the owner, or its end, releases all of its holds. Sends no
messages: the caller passes on what a method returns.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from batchengine.wire.lane import HeadShape
from kv_store.pages.index import PageRef
from kv_store.pages.pool import PagePool

HOLDS_MAX = 4096  # of one peer: its table here stays small, whatever it asks for


class HoldRefused(Exception):
    """A request about a hold cannot be met; the text says why, for the peer."""


class HoldName(NamedTuple):
    """A hold of one run of a daemon."""

    peer: str
    incarnation: int
    hold: int


@dataclass(frozen=True, eq=False, slots=True)
class PageFormat:
    """The pages of one model. `shape`: of its attention; None = this daemon's own model."""

    pool: PagePool
    shape: HeadShape | None = None

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.pool.layout.page_bytes

    def unpin(self, ref: PageRef) -> None:
        """Give one pin of a page back."""
        self.pool.unpin(ref)


class KeptPage(NamedTuple):
    """A pinned page of the store, and its content key."""

    ref: PageRef
    key: bytes
    format: PageFormat


class _Hold:
    """Pages of one hold: None until a page was added. `n_complete` counts the leading ones that
    were; `touched`: when one was promised or added."""

    def __init__(self, epoch: int, page_format: PageFormat) -> None:
        self.epoch = epoch
        self.format = page_format
        self.pages: list[KeptPage | None] = []
        self.n_complete = 0
        self.touched = 0.0


class HoldsGiven:
    """Every hold of this daemon. Used on the event loop only."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max` bounds all holds together."""
        self.bytes_max = bytes_max
        self._holds: dict[HoldName, _Hold] = {}
        self._names: dict[int, HoldName] = {}  # by the number, under which a worker knows the hold
        self._incarnations: dict[str, int] = {}  # of peers whose link is up
        self._holders: dict[bytes, Counter[HoldName]] = {}  # of the page with a key
        self._filling: dict[HoldName, None] = {}  # holds whose last pages may be awaited
        self._awaited = Counter[PageFormat]()  # pages that are reserved and not added
        self._kept = Counter[PageFormat]()  # distinct pages that are kept

    def __repr__(self) -> str:
        return f"<HoldsGiven {len(self._holds)} bytes={self.bytes_held}/{self.bytes_max}>"

    # -------------------------------------------------------------------------------- questions

    @property
    def n_pages(self) -> int:
        """Distinct pages that are kept, and those that were promised."""
        return self._kept.total() + self._awaited.total()

    def pages_in(self, page_format: PageFormat) -> int:
        """Those of one format."""
        return self._kept[page_format] + self._awaited[page_format]

    @property
    def bytes_held(self) -> int:
        """Bytes of distinct pages that are kept, and of those that were promised."""
        formats = self._kept.keys() | self._awaited.keys()
        return sum([self.pages_in(one) * one.page_bytes for one in formats])

    @property
    def bytes_free(self) -> int:
        """What the budget leaves; below 0 after it has shrunk, until owners take pages back."""
        return self.bytes_max - self.bytes_held

    def pages_of(self, peer: str) -> int:
        """Number of pages that are kept for sessions of a peer."""
        holds = (hold for name, hold in self._holds.items() if name.peer == peer)
        return sum(hold.n_complete for hold in holds)

    def pages(self, name: HoldName) -> list[PageRef]:
        """References of what can be attended to. Raises HoldRefused for no such hold."""
        hold = self._find(name)
        return [page.ref for page in hold.pages[: hold.n_complete] if page is not None]

    def n_complete(self, name: HoldName) -> int:
        """Number of pages that can be attended to."""
        return self._find(name).n_complete

    def format(self, name: HoldName) -> PageFormat:
        """The format of a hold's pages. Raises HoldRefused for no such hold."""
        return self._find(name).format

    def epoch(self, name: HoldName) -> int:
        """The epoch of a hold. Raises HoldRefused for no such hold."""
        return self._find(name).epoch

    def check_epoch(self, name: HoldName, epoch: int) -> None:
        """Raise HoldRefused unless this is the epoch of the hold."""
        if (now := self.epoch(name)) != epoch:
            raise HoldRefused(f"epoch {epoch} is not that of the hold, {now}")

    def awaits(self, name: HoldName, epoch: int, index: int) -> bool:
        """Whether this page was promised room and has not come."""
        hold = self._holds.get(name)
        if hold is None or hold.epoch != epoch or not 0 <= index < len(hold.pages):
            return False
        return hold.pages[index] is None

    def __contains__(self, name: HoldName) -> bool:
        return name in self._holds

    # ---------------------------------------------------------------------------------- requests

    def reserve(self, name: HoldName, epoch: int, n_pages: int, page_format: PageFormat) -> int:
        """Promise room for pages at the end of a hold, which begins if it is new.

        Returns the index of the first of them. Raises HoldRefused, and changes nothing, for an
        older epoch, another incarnation than the peer's present one, or more than the budget.
        """
        if self._incarnations.get(name.peer) != name.incarnation:
            raise HoldRefused(f"{name.peer} has no link in that incarnation")
        if n_pages < 1:
            raise HoldRefused(f"{n_pages} pages were asked for")
        hold = self._holds.get(name)
        if hold is not None and epoch < hold.epoch:
            raise HoldRefused(f"epoch {epoch} is over, it is {hold.epoch} now")
        if self._names.get(name.hold, name) != name:
            raise HoldRefused("another hold has this number")
        if n_pages * page_format.page_bytes > self.bytes_free:
            raise HoldRefused(f"there is room for {max(0, self.bytes_free)} bytes")
        if hold is None:
            if sum(other.peer == name.peer for other in self._holds) >= HOLDS_MAX:
                raise HoldRefused(f"{name.peer} has {HOLDS_MAX} holds")
            hold = self._holds[name] = _Hold(epoch, page_format)
            self._names[name.hold] = name
        hold.epoch, hold.touched = epoch, time.monotonic()
        self._filling[name] = None
        index = len(hold.pages)
        hold.pages += [None] * n_pages
        self._awaited[hold.format] += n_pages
        return index

    def add(self, name: HoldName, epoch: int, index: int, page: KeptPage) -> bool:
        """Put a page into its place, with one pin that the hold takes over.

        False: the place is gone, taken or of another epoch, and the pin was given back.
        """
        if not self.awaits(name, epoch, index):
            page.format.unpin(page.ref)
            return False
        hold = self._holds[name]
        hold.pages[index], hold.touched = page, time.monotonic()
        while hold.n_complete < len(hold.pages) and hold.pages[hold.n_complete] is not None:
            hold.n_complete += 1
        if page.key not in self._holders:
            self._holders[page.key] = Counter()
            self._kept[hold.format] += 1
        self._holders[page.key][name] += 1
        self._awaited[hold.format] -= 1
        return True

    def trim(self, name: HoldName, epoch: int, kept: int) -> bool:
        """Keep the first `kept` places of a hold by its owner's word; 0 releases it.

        False for an older epoch, no such hold, or nothing to drop.
        """
        hold = self._holds.get(name)
        if hold is None or epoch < hold.epoch or kept >= len(hold.pages):
            return False
        dropped = hold.pages[kept:]
        del hold.pages[kept:]
        hold.n_complete = min(hold.n_complete, kept)
        self._drop(name, hold.format, dropped)
        if not hold.pages:
            self._forget(name)
        return True

    def unused(self, before: float) -> list[HoldName]:
        """Give up places that were promised and not used since `before`, and what follows them;
        returns the holds, of which some may be gone."""
        trimmed = list[HoldName]()
        for name in list(self._filling):
            hold = self._holds.get(name)
            if hold is None or hold.n_complete == len(hold.pages):
                del self._filling[name]
            elif hold.touched < before and self.trim(name, hold.epoch, hold.n_complete):
                trimmed.append(name)
        return trimmed

    def give_up(self, n_bytes: int) -> list[HoldName]:
        """End the newest holds until so many bytes fewer are kept; returns them, for owners."""
        ended, kept_max = list[HoldName](), self.bytes_held - n_bytes
        for name in reversed(list(self._holds)):
            if self.bytes_held > kept_max:
                ended += self._remove([name])
        return ended

    # ------------------------------------------------------------------------------------- peers

    def peer_up(self, peer: str, incarnation: int) -> list[HoldName]:
        """A link to this run of a peer is up: holds of its earlier runs end, and are returned.

        A link that was down for a moment leaves the holds of the same run as they are.
        """
        self._incarnations[peer] = incarnation
        return self._end(peer, lambda name: name.incarnation != incarnation)

    def peer_down(self, peer: str) -> list[HoldName]:
        """The peer is down: its holds end, and are returned."""
        self._incarnations.pop(peer, None)
        return self._end(peer, lambda name: True)

    def invalid(self, keys: Iterable[bytes]) -> list[HoldName]:
        """End the holds that have a page with one of these keys, which is not valid any more;
        returns them, for their owners.

        The owner computes the range again, or has the valid pages held anew.
        """
        return self._remove(
            list(dict.fromkeys(name for key in keys for name in self._holders.get(key, ())))
        )

    # ------------------------------------------------------------------------------------ helpers

    def _find(self, name: HoldName) -> _Hold:
        hold = self._holds.get(name)
        if hold is None:
            raise HoldRefused(f"there is no hold {name.hold} of {name.peer}")
        return hold

    def _end(self, peer: str, is_over: Callable[[HoldName], bool]) -> list[HoldName]:
        return self._remove([n for n in self._holds if n.peer == peer and is_over(n)])

    def _remove(self, names: list[HoldName]) -> list[HoldName]:
        for name in names:
            self._drop(name, self._holds[name].format, self._holds[name].pages)
            self._forget(name)
        return names

    def _forget(self, name: HoldName) -> None:
        del self._holds[name], self._names[name.hold]

    def _drop(self, name: HoldName, page_format: PageFormat, pages: list[KeptPage | None]) -> None:
        for page in pages:
            if page is None:
                self._awaited[page_format] -= 1
                continue
            holders = self._holders[page.key]
            holders[name] -= 1
            if not holders[name]:
                del holders[name]
            if not holders:
                del self._holders[page.key]
                self._kept[page_format] -= 1
            page_format.unpin(page.ref)

    def check(self) -> None:
        """Compare the counts with the holds. Raises AssertionError."""
        holders, n_awaited = dict[bytes, Counter[HoldName]](), Counter[PageFormat]()
        formats: dict[bytes, PageFormat] = {}
        for name, hold in self._holds.items():
            for page in hold.pages:
                if page is None:
                    n_awaited[hold.format] += 1
                else:
                    holders.setdefault(page.key, Counter())[name] += 1
                    formats[page.key] = hold.format
            assert hold.pages
            assert None not in hold.pages[: hold.n_complete]
            assert hold.pages[hold.n_complete : hold.n_complete + 1] in ([], [None])
            assert name in self._filling or hold.n_complete == len(hold.pages)
        assert holders == self._holders
        assert +n_awaited == +self._awaited
        assert Counter(formats.values()) == +self._kept
        assert self._names == {name.hold: name for name in self._holds}

    def __iter__(self) -> Iterator[HoldName]:
        return iter(self._holds)
