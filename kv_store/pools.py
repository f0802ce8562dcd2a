"""The pools of an open store, one per representation that is open.

All pools share the byte budget: one that needs an extent gets it from representations that are not
open, then from the largest pool that may give one (`StoreCore.may_give`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

from kv_store.errors import StoreCorrupt
from kv_store.layout import Descriptor
from kv_store.ledger import writes
from kv_store.ledger.ledger import pages_of
from kv_store.pages.core import StoreCore
from kv_store.pages.pool import PagePool


class StorePools:
    """The open pools of a store. `warn` gets what opening a pool finds wrong."""

    def __init__(self, core: StoreCore, own: PagePool, warn: Callable[[str], None]) -> None:
        self._core = core
        self._pools = {own.repr_id: own}
        self._warn = warn

    def __iter__(self) -> Iterator[PagePool]:
        return iter(list(self._pools.values()))

    def open(self, descriptor: Descriptor, *, on_demand: bool = False) -> Future[PagePool]:
        """The pool of a representation, opened at the first call.

        One `on_demand` gets no extent before a page needs it. Fails with LedgerError or
        StoreCorrupt.
        """
        return self._core.thread.submit(partial(self._open, descriptor, on_demand))

    def close(self, pool: PagePool) -> Future[bool]:
        """Forget a pool without extents; resolves to whether it had none."""
        return self._core.thread.submit(partial(self._close, pool))

    def _open(self, descriptor: Descriptor, on_demand: bool) -> PagePool:
        """Open a pool (page thread, so that no pool grows meanwhile)."""
        core, repr_id = self._core, descriptor.repr_id
        if (found := self._pools.get(repr_id)) is not None:
            return found
        core.ledger.append(
            writes.AddRepr(repr_id, descriptor.to_json(), descriptor.layout.page_bytes)
        )
        core.ledger.commit().result()
        rows = core.ledger.read(lambda db: pages_of(db, repr_id)).result()
        gens = {row.ref.page_id: row.ref.gen for row in rows}
        with core.lock:
            pool = PagePool(core, descriptor, on_demand=on_demand)
            for info in core.take_foreign(repr_id):
                try:
                    pool.allocator.open_extent(info, gens)
                except StoreCorrupt as error:
                    self._warn(str(error))
                    core.extents.drop(info)
                    core.forget_extent(info)
            for row in rows:
                pool.restore(row)
            self._pools[repr_id] = pool
        if not (pool.allocator.infos or on_demand):
            pool.allocator.grow()
        return pool

    def _close(self, pool: PagePool) -> bool:
        with self._core.lock:
            if pool.allocator.infos:
                return False
            del self._pools[pool.repr_id]
            self._core.pools.remove(pool.allocator)
        return True
