"""Errors of the store, each with what happened, why, and what to do about it.

Callers above map these to their own coded errors; this package never formats for HTTP.
"""

from __future__ import annotations


class StoreError(Exception):
    """Base of every error raised here. `what`, `why` and `fix` are plain sentences for a person."""

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return ". ".join(part.rstrip(".") for part in (self.what, self.why, self.fix) if part)


class StoreLocked(StoreError):
    """Another process holds the store. `pid` is what its LOCK file says, 0 = unreadable."""

    def __init__(self, path: str, pid: int) -> None:
        super().__init__(
            f"the store {path} is locked by pid {pid}" if pid else f"the store {path} is locked",
            why="one store has one owner; two would overwrite each other's pages",
            fix="stop the other daemon, or give this one a store of its own (serve --store DIR, or"
            " --instance NAME)",
        )
        self.pid = pid


class StoreUnsupported(StoreError):
    """The directory cannot hold a store (file system, permissions)."""


class StoreMissing(StoreUnsupported):
    """The directory holds no store."""


class StoreFull(StoreError):
    """No space: the file system is full, or below its free-space floor."""


class StoreGone(StoreError):
    """Another folder, or none, stands where the store's was: it was moved or removed."""


class StoreCorrupt(StoreError):
    """Bytes differ from their record. A corrupt page is recomputed, never served."""


class StoreVersion(StoreError):
    """The directory was written by a newer program. Nothing in it was touched."""


class StaleRef(StoreError):
    """A page reference whose generation has passed, or an operation its page state forbids."""


class NumericsFault(StoreError):
    """Two computations of one content key gave different bytes: a lane computes wrongly."""


class LedgerError(StoreError):
    """The ledger has lost durability: stop acknowledging, exit, recover."""


class LedgerRefused(StoreError):
    """One ledger intent broke a rule (stale epoch, hole in the timeline, unknown session)."""
