"""Formats of pages that are kept for peers: those of this daemon's model, and of other models.

A peer that serves another model says in its Hello what its pages are. They have a pool of their own
in the store, with the same byte budget; it is opened when the peer first asks for room, and its
extents are deleted once no page of them is in use. Attending to pages takes the shape of their
model, no weights (WEAVER, ATC '25: attention offloaded into a process that runs another model).
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future

from batchengine.engine.linked.holds import HoldRefused, PageFormat
from batchengine.peers.link import PeerLink
from batchengine.wire.lane import HeadShape
from batchengine.wire.peer import HEADS_MAX, LAYERS_MAX, KvFormat
from kv_store.layout import Descriptor
from kv_store.store import Store

log = logging.getLogger("batchengine.linked")

MODELS_MAX = 8  # other models whose pages one run of a daemon keeps
HEAD_DIM_MAX = 256  # of the kernels
QUERY_DIMS_MAX = 1 << 15  # of all query heads: twice those of the largest models in use
PAGE_BYTES_MAX = 128 << 20  # 256 tokens of such a model; some pages on their way lie in memory
RETURN_S = 0.5  # between two looks for extents without a page in use


class PageFormats:
    """The formats of one daemon. Used on the event loop only."""

    def __init__(self, store: Store) -> None:
        self.own = PageFormat(store.pages)
        self._store = store
        self._others: dict[bytes, PageFormat] = {}  # by repr_id
        self._opening = asyncio.Lock()
        self._return_at = 0.0
        self._returning: Future[int] | None = None

    def __repr__(self) -> str:
        return f"<PageFormats others={len(self._others)} bytes={self.other_bytes}>"

    @property
    def other_bytes(self) -> int:
        """Bytes of the store's files that have pages of other models."""
        return sum([other.pool.allocator.file_bytes for other in self._others.values()])

    def known(self, link: PeerLink) -> PageFormat | None:
        """The format of a peer's pages; None: nothing was kept for another model of this kind."""
        if not link.is_of_other_model or link.facts is None:
            return self.own
        return self._others.get(bytes.fromhex(link.facts.repr_id))

    async def of(self, link: PeerLink) -> PageFormat:
        """The format of a peer's pages, whose pool is opened. Raises HoldRefused, StoreError."""
        if not link.is_of_other_model or link.facts is None or link.facts.kv is None:
            return self.own
        kv, facts = link.facts.kv, link.facts
        descriptor = _read(kv, (facts.model_hash, facts.arith_id, facts.repr_id))
        shape = _shape(descriptor, kv.n_head)
        async with self._opening:
            found = self._others.get(descriptor.repr_id)
            if found is not None:
                if found.shape != shape:
                    raise HoldRefused("another peer said of the same model that it has other heads")
                return found
            if len(self._others) >= MODELS_MAX:
                raise HoldRefused(f"pages of {MODELS_MAX} other models are kept already")
            opening = self._store.open_pool(descriptor, on_demand=True)
            pool = await asyncio.wrap_future(opening)
            found = self._others[descriptor.repr_id] = PageFormat(pool, shape)
            log.info("pages of %s are kept for peer %s", facts.model_id, link.name)
            return found

    def return_room(self, now: float) -> None:
        """Delete the extents of other models that have no page in use, every RETURN_S."""
        is_returning = self._returning is not None and not self._returning.done()
        if now < self._return_at or is_returning or not self.other_bytes:
            return
        self._return_at = now + RETURN_S
        pools = [other.pool.allocator for other in self._others.values()]
        self._returning = self._store.core.thread.submit(
            lambda: sum([pool.give_idle_extents() for pool in pools])
        )


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
    shape = HeadShape(layout.n_layer, layout.n_kv_head, layout.head_dim, n_head)
    if (
        shape.n_layer > LAYERS_MAX
        or shape.n_kv_head > HEADS_MAX
        or shape.head_dim > HEAD_DIM_MAX
        or n_head % shape.n_kv_head
        or n_head * shape.head_dim > QUERY_DIMS_MAX
        or layout.page_bytes > PAGE_BYTES_MAX
    ):
        raise HoldRefused(f"attention of this shape is not computed here: {shape}")
    return shape
