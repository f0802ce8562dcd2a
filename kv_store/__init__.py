"""File-backed KV pages, their manifest and the token ledger. Knows no request and no SLA.

A page is the KV of 256 tokens over all layers. It is computed in an *arena* slot (OPEN, one
writer process), then copied by the store into an *extent* slot (SEALED, immutable, checksummed),
then named in the manifest (PUBLISHED) where its content key can be matched. Pages are a cache;
the token ledger is the database. Fsync the ledger, never the pages.

    store = Store.open(path, Descriptor(...), StoreSettings(budget_bytes=...))   # blocking

`store.pages` is the PagePool of that representation, `store.pool(descriptor)` opens a further one;
all share one byte budget, one page thread and one ledger. A pool composes an index (states, order),
an allocator (slots, eviction), a loader, a sealer and maintenance; `core` is what pools share.

    pages.match_prefix(tokens, salt, pin=True) -> list[PageRef]     # may be unread since start:
    pages.load(refs) -> Future[list[bool]]                          # False = recompute that page
    pages.reserve(parent_key, tokens, salt, priority) -> Ticket | NoRoom
    pages.seal(ticket, arena, slot, lane_digest) -> Future[PageRef] # arena to extent, verified
    pages.publish(ticket) -> Future[PageRef]                        # durable with ledger.commit()
    pages.invalidate(*refs_or_keys, descendants=..., slot_failed=...)
    store.events.on_ready(wake); store.events.drain()               # PageInvalid
    store.ledger.append(*records); store.ledger.commit() -> Future  # kv_store.ledger.writes
    store.create_arena(lane, incarnation, slots) -> Arena           # worker side: ArenaMapping
    store.orphaned                                                  # arenas of earlier runs
    store.maintain(), gc(keep), stat(), close()

`seal` and `publish` must be shielded from cancellation: their result is a pin that is given back
with `unpin`. 1 to 255 tokens make a parked tail: a leaf, found by `find_tail`.

Offline: `kv_store.fsck.fsck(path, repair=False)`. Errors carry .what .why .fix (`kv_store.errors`);
after a LedgerError nothing more may be acknowledged.
"""

from kv_store.arenas.arena import (
    ARENA_SLOT_BIT,
    Arena,
    ArenaMapping,
    ArenaShape,
    ArenaSlot,
    SlotOwner,
    SlotState,
    delete_arena,
    valid_rows,
)
from kv_store.arenas.orphaned import ORPHANED_S, OrphanedArenas, OrphanedSlot
from kv_store.errors import (
    LedgerError,
    LedgerRefused,
    NumericsFault,
    StaleRef,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreGone,
    StoreLocked,
    StoreUnsupported,
    StoreVersion,
)
from kv_store.events import PageInvalid, StoreEvents
from kv_store.keys import (
    ROOT_KEY,
    chain_keys,
    content_key,
    payload_digest,
    row_digests,
    sealed_checksum,
    token_bytes,
    token_ids,
)
from kv_store.layout import PAGE_TOKENS, Descriptor, PageLayout, differing_fields
from kv_store.ledger.ledger import Ledger
from kv_store.ledger.queries import SessionInfo, SessionRecord, SuspectInfo, TurnInfo
from kv_store.pages.allocator import NoRoom, NoRoomKind
from kv_store.pages.core import Rates
from kv_store.pages.extents import ExtentInfo
from kv_store.pages.index import Page, PageRef, PageState
from kv_store.pages.maintenance import GcReport, ScrubResult, VerifyReport
from kv_store.pages.pool import PagePool, PageProof, Ticket
from kv_store.store import Recovery, Store, StoreSettings

__all__ = [
    "ARENA_SLOT_BIT",
    "ORPHANED_S",
    "PAGE_TOKENS",
    "ROOT_KEY",
    "Arena",
    "ArenaMapping",
    "ArenaShape",
    "ArenaSlot",
    "Descriptor",
    "ExtentInfo",
    "GcReport",
    "Ledger",
    "LedgerError",
    "LedgerRefused",
    "NoRoom",
    "NoRoomKind",
    "NumericsFault",
    "OrphanedArenas",
    "OrphanedSlot",
    "Page",
    "PageInvalid",
    "PageLayout",
    "PagePool",
    "PageProof",
    "PageRef",
    "PageState",
    "Rates",
    "Recovery",
    "ScrubResult",
    "SessionInfo",
    "SessionRecord",
    "SlotOwner",
    "SlotState",
    "StaleRef",
    "Store",
    "StoreCorrupt",
    "StoreError",
    "StoreEvents",
    "StoreFull",
    "StoreGone",
    "StoreLocked",
    "StoreSettings",
    "StoreUnsupported",
    "StoreVersion",
    "SuspectInfo",
    "Ticket",
    "TurnInfo",
    "VerifyReport",
    "chain_keys",
    "content_key",
    "delete_arena",
    "differing_fields",
    "payload_digest",
    "row_digests",
    "sealed_checksum",
    "token_bytes",
    "token_ids",
    "valid_rows",
]
