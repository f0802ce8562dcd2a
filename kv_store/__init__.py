"""File-backed KV pages, their manifest and the token ledger. Knows no request and no SLA.

A page is the KV of 256 tokens over all layers. It is computed in an *arena* place (OPEN, one
writer process), then copied by the store into an *extent* place (SEALED, immutable, checksummed),
then named in the manifest (PUBLISHED) where its content key can be matched. Pages are a cache;
the token ledger is the database. Fsync the ledger, never the pages.

    store = Store.open(path, Descriptor(...), StoreSettings(budget_bytes=...))   # blocking
    store.warnings, store.recovery        # what was found, what was dropped

Index: the caller's thread, no file I/O.

    match_prefix(tokens, salt, pin=True, priority=p, tokens_max=n) -> list[PageRef]
                                          # longest run of full pages, token ids compared
    find_tail(parent_key, tokens, salt, pin=True, priority=p) -> PageRef | None
                                          # longest parked tail that `tokens` starts with
    page_tokens(ref) -> int               # 256, or fewer for a parked tail
    load(refs) -> Future[list[bool]]      # verify pages not read since start; await before use;
                                          # False = gone, recompute it; at once if all are warm
    pin(ref), unpin(ref)                  # match(pin=True) and publish() pin once for the caller
    place_code(ref) -> int                # u64 for the lane's page table
    proof(ref) -> PageProof               # .place_code .seed .checksum: sealed_checksum(view)
    extents() -> list[ExtentInfo]         # .index .path .places .page_bytes: lanes map read-only
    reserve(parent_key, tokens, salt, priority) -> Ticket | None   # evicts; None: see .refusal
    seal(ticket, arena, place, lane_digest) -> Future[PageRef]     # pread, compare, pwrite
    publish(ticket) -> Future[PageRef]    # durable with the next ledger.commit(); may be an older
                                          # equal page (dedupe); fails with NumericsFault if unequal
                                          # shield these two from cancellation: their result is
                                          # a pin that somebody must give back
                                          # 1..255 tokens make a parked tail: a leaf, never matched
    abort(ticket), condemn(ref)           # give up a ticket; never serve this page again
    scrub_next() -> Future[ScrubResult | None]    # read one page again, longest unread first
    verify_all(progress) -> Future[VerifyReport]  # read them all; bad ones are condemned
    note_recomputed(ref, payload_digest) -> bool  # False: a numerics fault, the page is condemned
    gc(keep=session_ids) -> Future[GcReport]      # down to the target; sessions beyond the cap
    drop_tails(tokens, tenant, salt) -> Future[int]   # of a dropped session, unless a fork has them
    rates.read_bytes_per_s, .seal_bytes_per_s     # None until measured
    maintain(), check_integrity(), stat(), close()

`ticket.key` is the parent_key of the next page; the first page's parent is ROOT_KEY.

Ledger: `store.ledger`, one SQLite thread. Each call is one atomic intent and returns a Future that
resolves when the group commit that holds it is durable; `commit()` starts that group commit and its
Future fails if any intent of it failed. Readers return Futures too.

    open_session(id, tenant, epoch=1, meta="{}")      set_meta(id, epoch, state, meta)
    append_turn(id, epoch, turn, prompt_start, prompt_end, sampling_json, seed)
    append_tokens(id, epoch, start, ids)              truncate_tokens(id, epoch, length)
    set_pages(id, epoch, [(index, ref)])              finish_turn(id, epoch, turn, status, reason)
    set_owner(id, new_epoch, incarnation, lane)       drop_session(id)
    cut_session(id, new_epoch, length, incarnation, lane)   # set_owner + truncate_tokens
    copy_session(id, new_id, tenant, epoch=1, length=None)  # a fork: tokens and pages, no turns
    rename_session(id, new_id, tenant, epoch=1)       set_suspect(id, incarnation, strikes, alone)
    append(*records)                                  # any records of kv_store.records at once
    load_session(id) -> SessionRecord | None          list_sessions() -> list[SessionInfo]
    unfinished_turns() -> list[(id, TurnInfo)]        find_turn(id, idempotency_key) -> TurnInfo
    suspects() -> list[SuspectInfo]                   prune(sessions_max, keep) -> (sessions, turns)
    commit() -> Future[int]

Arena (engine side: Arena; worker side: ArenaMapping, the only writer of its bytes).

    arena = store.create_arena(lane, incarnation, places)   # StoreGone: the folder was moved
    store.is_in_place() -> bool
    arena.reserve() -> ArenaPlace | None  # .place .gen .code (u64 with bit 63); worker zero-fills
    arena.release(place)                  # QUARANTINE until the worker poisoned it
    arena.freed(place)                    # the worker's ack: FREE, next generation
    arena.close(delete=True)              # once the worker is reaped

    mapping = ArenaMapping(path, layout)  # takes the arena's lock
    mapping.reserve(place, PlaceOwner(session_bytes, epoch, gen, page_index))   # zero-fill
    mapping.page(place) -> memoryview     # page_bytes; mapping.digest(place) for seal()
    mapping.write_records(place, first_row, tokens_u32, digests_u64)   # after the rows' bytes
    owner.seeds(mapping.arena_id, place, first_row, count) -> u64 array for the row digests
    mapping.poison(place)

Attic: arenas that earlier lives of this boot left (`StoreSettings.keep_arenas`), until adopted.

    store.attic.find(session_bytes, epoch) -> list[AtticPlace]   # .arena .place .gen .page_index
    store.attic.forget(session_bytes), retain(sessions)          # what nobody will adopt
    store.attic.sweep(everything=False) -> int    # delete unused files; all of them after ATTIC_S

Offline, without the model's file: `from kv_store.fsck import fsck`; fsck(path, repair=False) ->
FsckReport (.ok .counts .findings with .severity .what .why .repair).

Ready errors for people: StoreLocked(.pid), StoreUnsupported(.fs), StoreVersion, StoreFull,
StoreGone, StoreCorrupt, LedgerError (stop acknowledging, exit), all with .what .why .fix.
"""

from kv_store.arena import (
    ARENA_PLACE_BIT,
    Arena,
    ArenaMapping,
    ArenaPlace,
    ArenaShape,
    PlaceOwner,
    PlaceState,
    delete_arena,
    valid_rows,
)
from kv_store.attic import ATTIC_S, Attic, AtticPlace
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
from kv_store.extent import ExtentInfo
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
from kv_store.ledger import Ledger
from kv_store.pages import Page, PageRef, PageState
from kv_store.places import Rates
from kv_store.pool import PagePool, PageProof, Ticket
from kv_store.sessions import SessionInfo, SessionRecord, SuspectInfo, TurnInfo
from kv_store.store import Recovery, Store, StoreSettings
from kv_store.upkeep import GcReport, ScrubResult, VerifyReport

__all__ = [
    "ARENA_PLACE_BIT",
    "ATTIC_S",
    "PAGE_TOKENS",
    "ROOT_KEY",
    "Arena",
    "ArenaMapping",
    "ArenaPlace",
    "ArenaShape",
    "Attic",
    "AtticPlace",
    "Descriptor",
    "ExtentInfo",
    "GcReport",
    "Ledger",
    "LedgerError",
    "LedgerRefused",
    "NumericsFault",
    "Page",
    "PageLayout",
    "PagePool",
    "PageProof",
    "PageRef",
    "PageState",
    "PlaceOwner",
    "PlaceState",
    "Rates",
    "Recovery",
    "ScrubResult",
    "SessionInfo",
    "SessionRecord",
    "StaleRef",
    "Store",
    "StoreCorrupt",
    "StoreError",
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
