"""Holds given: pages that this daemon keeps pinned for routes of other daemons' sessions, and the
formats of these pages.

Owns their pins and the byte budget. A hold is named by (peer, its incarnation, hold id). Pages are
reserved before they are sent, added in any order, and can be attended to as far as they are
complete from the first one. The owner trims a hold at its end, or releases it; a new incarnation of
the owner, or its end, releases all of its holds. Sends no messages: the caller passes on what a
method returns.

A peer that serves another model says in its Hello what its pages are. They have a pool of their own
in the store, with the same byte budget; it is opened when the peer first asks for room, and its
extents are deleted once no page of them is in use. Attending to pages takes the shape of their
model, no weights (WEAVER, ATC '25: attention offloaded into a process that runs another model).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from batchengine.peers.link import PeerLink
from batchengine.wire.lane import HeadShape
from batchengine.wire.peer import LAYERS_MAX, KvFormat
from kv_store.layout import Descriptor
from kv_store.pages.index import PageRef
from kv_store.pages.pool import PagePool
from kv_store.store import Store

log = logging.getLogger("batchengine.linked")

HOLDS_MAX = 4096  # of one peer: its table here stays small, whatever it asks for
MODELS_MAX = 8  # other models whose pages a daemon keeps at a time
HEAD_DIM_MAX = 576  # of the kernels
QUERY_DIMS_MAX = 1 << 17  # of all query heads: DeepSeek V3 has 128 of 576
PAGE_BYTES_MAX = 128 << 20  # 256 tokens of such a model; some pages on their way lie in memory
KV_HEADS_MAX = 128
GIVEN_BACK_S = 10.0  # for extents of other models, after their last hold has ended
RETURN_S = 0.5  # between two looks for extents without a page in use


class Misfit(Exception):
    """A message of a peer does not fit what was said before: its link must end, for this reason."""


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

    @property
    def cost_bytes(self) -> int:
        """Bytes of the store's budget that a page takes: extents of another model are not whole
        pages of this one."""
        if self.shape is None:
            return self.page_bytes
        return _cost_bytes(self.page_bytes, self.pool.core.budget.extent_bytes)

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

    def __init__(self, page_format: PageFormat) -> None:
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
        return sum([self.pages_in(one) * one.cost_bytes for one in formats])

    def is_awaiting(self, page_format: PageFormat) -> bool:
        """Whether pages of a format were promised room and have not come."""
        return self._awaited[page_format] > 0

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

    def awaits(self, name: HoldName, index: int) -> bool:
        """Whether this page was promised room and has not come."""
        hold = self._holds.get(name)
        return hold is not None and 0 <= index < len(hold.pages) and hold.pages[index] is None

    def __contains__(self, name: HoldName) -> bool:
        return name in self._holds

    # ---------------------------------------------------------------------------------- requests

    def reserve(self, name: HoldName, n_pages: int, page_format: PageFormat) -> int:
        """Promise room for pages at the end of a hold, which begins if it is new.

        Returns the index of the first of them. Raises HoldRefused, and changes nothing, for
        another incarnation than the peer's present one, or more than the budget.
        """
        if self._incarnations.get(name.peer) != name.incarnation:
            raise HoldRefused(f"{name.peer} has no link in that incarnation")
        if n_pages < 1:
            raise HoldRefused(f"{n_pages} pages were asked for")
        hold = self._holds.get(name)
        if self._names.get(name.hold, name) != name:
            raise HoldRefused("another hold has this number")
        if hold is not None and hold.format is not page_format:
            raise HoldRefused("the hold has pages of another model")
        if n_pages * page_format.cost_bytes > self.bytes_free:
            raise HoldRefused(f"there is room for {max(0, self.bytes_free)} bytes")
        if hold is None:
            if sum(other.peer == name.peer for other in self._holds) >= HOLDS_MAX:
                raise HoldRefused(f"{name.peer} has {HOLDS_MAX} holds")
            hold = self._holds[name] = _Hold(page_format)
            self._names[name.hold] = name
        hold.touched = time.monotonic()
        self._filling[name] = None
        index = len(hold.pages)
        hold.pages += [None] * n_pages
        self._awaited[hold.format] += n_pages
        return index

    def add(self, name: HoldName, index: int, page: KeptPage) -> bool:
        """Put a page into its place, with one pin that the hold takes over.

        False: the place is gone, taken, or of another model, and the pin was given back.
        """
        if not self.awaits(name, index) or self.format(name) is not page.format:
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

    def trim(self, name: HoldName, kept: int) -> bool:
        """Keep the first `kept` places of a hold by its owner's word; 0 releases it.

        False for no such hold, or nothing to drop.
        """
        hold = self._holds.get(name)
        if hold is None or kept >= len(hold.pages):
            return False
        dropped = hold.pages[kept:]
        del hold.pages[kept:]
        hold.n_complete = min(hold.n_complete, kept)
        self._drop(name, dropped)
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
            elif hold.touched < before and self.trim(name, hold.n_complete):
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
            self._drop(name, self._holds[name].pages)
            self._forget(name)
        return names

    def _forget(self, name: HoldName) -> None:
        del self._holds[name], self._names[name.hold]

    def _drop(self, name: HoldName, pages: list[KeptPage | None]) -> None:
        page_format = self._holds[name].format
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


class PageFormats:
    """The formats of one daemon. Used on the event loop only."""

    def __init__(self, store: Store) -> None:
        self.own = PageFormat(store.pages)
        self._store = store
        self._others: dict[bytes, PageFormat] = {}  # by repr_id
        self._opening = asyncio.Lock()
        self._return_at = 0.0
        self._held_until = 0.0
        self._returning: Future[int] | None = None

    def __repr__(self) -> str:
        return f"<PageFormats others={len(self._others)} bytes={self.other_bytes}>"

    @property
    def others(self) -> list[PageFormat]:
        """The formats of other models whose pools are open."""
        return list(self._others.values())

    @property
    def other_bytes(self) -> int:
        """Bytes of the store's files that have pages of other models."""
        return sum([other.pool.allocator.file_bytes for other in self.others])

    def known(self, link: PeerLink) -> PageFormat:
        """The format in which pages of a peer's timelines are looked for: that of its model if its
        pool is open. Else they can only be in extents that no pool has, which any pool finds."""
        found = None
        if link.is_of_other_model and link.facts is not None:
            found = self._others.get(_bytes_of(link.facts.repr_id))
        return found or self.own

    async def of(self, link: PeerLink, holds: HoldsGiven) -> PageFormat:
        """The format of a peer's pages, whose pool is opened. Raises HoldRefused, StoreError."""
        if not link.is_of_other_model:
            return self.own
        if link.facts is None or link.facts.kv is None:
            raise HoldRefused("it did not say what its pages are")
        kv, facts = link.facts.kv, link.facts
        descriptor = _read(kv, (facts.model_hash, facts.arith_id, facts.repr_id))
        shape = _shape(descriptor, kv.n_head)
        async with self._opening:
            found = self._others.get(descriptor.repr_id)
            if found is not None:
                if found.shape != shape:
                    raise HoldRefused("another peer said of the same model that it has other heads")
                return found
            if len(self._others) >= MODELS_MAX and not await self._close_one(holds):
                raise HoldRefused(f"pages of {MODELS_MAX} other models are kept already")
            opening = self._store.pools.open(descriptor, on_demand=True)
            pool = await asyncio.wrap_future(opening)
            found = self._others[descriptor.repr_id] = PageFormat(pool, shape)
            log.info("pages of %s are kept for peer %s", facts.model_id, link.name)
            return found

    async def _close_one(self, holds: HoldsGiven) -> bool:
        """Close a pool without pages; False: each has some."""
        for repr_id, other in list(self._others.items()):
            if not (other.pool.allocator.file_bytes or holds.pages_in(other)):
                del self._others[repr_id]
                return await asyncio.wrap_future(self._store.pools.close(other.pool))
        return False

    def bytes_taken(self, now: float, holds: HoldsGiven) -> int:
        """Bytes that the store's own model lacks: those of other models' extents, and of pages that
        were promised room. Extents that do not come back without a hold are not waited for."""
        promised = sum([holds.pages_in(other) * other.cost_bytes for other in self.others])
        if promised:
            self._held_until = now + GIVEN_BACK_S
        return max(self.other_bytes if now < self._held_until else 0, promised)

    def bytes_free(self, holds: HoldsGiven) -> int:
        """What could be kept of other models in addition: whole extents that neither pages in use
        have, nor those of other models."""
        if holds.bytes_free <= 0:
            return holds.bytes_free
        own, extent_bytes = self.own.pool, self._store.core.budget.extent_bytes
        idle = max(0, own.allocator.slots_now - own.index.pinned) * self.own.page_bytes
        in_use = sum([holds.pages_in(other) * other.cost_bytes for other in self.others])
        left = idle // extent_bytes * extent_bytes + max(0, self.other_bytes - in_use)
        return min(holds.bytes_free, left)

    def bytes_max(self, link: PeerLink | None, bound: int) -> int:
        """What could be kept of a peer's pages if nothing else were, of `bound` bytes in all."""
        budget = self._store.core.budget
        if link is None or link.facts is None or not link.is_of_other_model:
            return min(bound, budget.budget_bytes)
        kv, facts = link.facts.kv, link.facts
        if kv is None:
            return 0
        try:
            descriptor = _read(kv, (facts.model_hash, facts.arith_id, facts.repr_id))
        except HoldRefused:
            return 0
        page_bytes = descriptor.layout.page_bytes
        unit = max(budget.extent_bytes, page_bytes)
        bound = min(bound, budget.budget_bytes // unit * unit)
        return bound // _cost_bytes(page_bytes, budget.extent_bytes) * page_bytes

    def return_room(self, now: float, holds: HoldsGiven) -> None:
        """Delete the extents of other models that have no page in use, every RETURN_S, unless pages
        are on their way: an extent may be new for them."""
        if self._returning is not None and self._returning.done():
            returning, self._returning = self._returning, None
            if (error := returning.exception()) is not None:
                log.error("room of other models' pages is not given back: %s", error)
        if now < self._return_at or self._returning is not None or not self.other_bytes:
            return
        self._return_at = now + RETURN_S
        pools = [other.pool.allocator for other in self.others if not holds.is_awaiting(other)]
        self._returning = self._store.core.thread.submit(
            lambda: sum([pool.give_idle_extents() for pool in pools])
        )


def _bytes_of(text: str) -> bytes:
    """Bytes from hex digits; b"" from other text."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _cost_bytes(page_bytes: int, extent_bytes: int) -> int:
    """Bytes of whole extents that a page of another model takes."""
    return (
        extent_bytes // (extent_bytes // page_bytes) if page_bytes <= extent_bytes else page_bytes
    )


@functools.lru_cache(maxsize=MODELS_MAX)
def _read(kv: KvFormat, ids: tuple[str, str, str]) -> Descriptor:
    """The descriptor that a peer sent, if it is that of its Hello. Raises HoldRefused."""
    try:
        descriptor = Descriptor.from_json(kv.descriptor)
    except ValueError as error:
        raise HoldRefused(f"its descriptor cannot be used: {error}"[:200]) from None
    if ids != (descriptor.model_hash, descriptor.arith_id, descriptor.repr_id.hex()):
        raise HoldRefused("its descriptor is not that of its ids")
    return descriptor


def _shape(descriptor: Descriptor, n_head: int) -> HeadShape:
    """The attention of a model, if it is one that a worker here can compute. Raises HoldRefused."""
    layout = descriptor.layout
    heads = layout.layers[0]
    shape = HeadShape(layout.n_layer, heads.n_kv_head, heads.head_dim, n_head, heads.v_first)
    if (
        not layout.is_uniform
        or shape.n_layer > LAYERS_MAX
        or shape.n_kv_head > KV_HEADS_MAX
        or shape.head_dim > HEAD_DIM_MAX
        or n_head % shape.n_kv_head
        or n_head * shape.head_dim > QUERY_DIMS_MAX
        or layout.page_bytes > PAGE_BYTES_MAX
    ):
        raise HoldRefused(f"attention of this shape is not computed here: {shape}")
    return shape
