"""File-backed KV pages, their manifest and the token ledger. Knows no request, session policy or SLA.

A page is the KV of 256 tokens over all layers. It is computed in an *arena* place (OPEN, one
writer process), then copied by the store into an *extent* place (SEALED, immutable, checksummed),
then named in the manifest (PUBLISHED) where its content key can be matched. Pages are a cache;
the token ledger is the database. Fsync the ledger, never the pages.

    store = Store.open(path, Descriptor(...), budget_bytes=...)   # blocking; StoreLocked(pid) etc.
    store.warnings, store.recovery                                # what was found, what was dropped

Index: the caller's thread, no file I/O.

    match_prefix(tokens, salt, pin=True, priority=p) -> list[PageRef]   # longest run of full pages
    load(refs) -> Future[list[bool]]     # verifies pages not read since start; await before use;
                                         # False = the page is gone, recompute it (at once if warm)
    pin(ref) / unpin(ref)                # one pin per page-table entry; match(pin) and publish pin once
    place_code(ref) -> int               # (extent_index << 32) | place in extent, for the lane
    proof(ref) -> PageProof              # .place_code .seed .checksum: sealed_checksum(view, seed)
    extents() -> list[ExtentInfo]        # index, path, places, page_bytes: what a lane maps read-only
    reserve(parent_key, tokens, salt, priority) -> Ticket | None   # None: see store.refusal; evicts
    seal(ticket, arena, place, lane_digest) -> Future[PageRef]     # page thread: pread, compare, pwrite
    publish(ticket) -> Future[PageRef]   # row joins the next commit(); result is pinned once and may
                                         # be an older equal page (dedupe); NumericsFault if unequal
    abort(ticket), condemn(ref)          # give up a ticket; never serve this page again
    maintain(), check_integrity(), stat(), close()

Ledger: `store.ledger`, one SQLite thread. Each call is one atomic intent and returns a Future that
resolves when the group commit that holds it is durable; `commit()` starts that group commit and its
Future fails if any intent of it failed. Readers return Futures too.

    open_session(id, tenant, epoch=1, meta="{}") append_turn(id, epoch, turn, start, end, sampling, seed)
    append_tokens(id, epoch, start, ids)         truncate_tokens(id, epoch, length)
    set_pages(id, epoch, [(index, ref)])         finish_turn(id, epoch, turn, status, finish_reason)
    set_owner(id, epoch, incarnation, lane)      drop_session(id)
    load_session(id) -> SessionRecord            list_sessions() -> list[SessionInfo]
    commit() -> Future[int]

Arena (engine side: Arena; worker side: ArenaMapping, the only writer of its bytes).

    arena = Arena.create(path, layout, places, incarnation); arena.reserve() -> ArenaPlace | None
    arena.release(place)                 # QUARANTINE until the worker poisoned it
    arena.freed(place)                   # worker's ack: FREE, generation + 1
"""
