"""File-backed KV pages, their manifest and the token ledger; independent of requests and SLAs.

A page is the KV of 256 tokens over all layers. It is computed in an *arena* slot (OPEN, one
writer process), then copied by the store into an *extent* slot (SEALED, immutable, checksummed),
then named in the manifest (PUBLISHED) where its content key can be matched. Pages can be
recomputed from the ledger's tokens, so writes to the ledger are fsynced and those to pages are not.

`kv_store.store.Store.open` opens or creates a store and blocks; `store.pages` is the PagePool of
the representation it was opened for, `store.ledger` takes the records of `kv_store.ledger.writes`.
`kv_store.fsck.fsck(path, repair=False)` checks a store that is not open. Errors carry .what .why
.fix (`kv_store.errors`); after a LedgerError nothing more may be acknowledged.
"""
