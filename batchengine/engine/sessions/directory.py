"""The directory of sessions: their durable names, and a session found by what a person calls it.

Owns the order of a search: memory before ledger; an exact id, then the ids that the caller made of
a client's own one, then a unique beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from batchengine.core import ID_PREFIX_CHARS_MIN
from kv_store.store import Store

STORED_MAX = 1000  # most recent sessions of the ledger that a beginning may mean
Name = tuple[str, str]  # (tenant, session id)


def durable_name(tenant: str, session_id: str) -> str:
    """What the ledger calls the session: the same in every run."""
    return f"{tenant}\x1f{session_id}"


def name_of(durable: str) -> Name:
    """The inverse of `durable_name`."""
    tenant, _, session_id = durable.partition("\x1f")
    return tenant, session_id


async def find(
    in_memory: Collection[Name],
    store: Store,
    given: str,
    own: Collection[Name],
    tenant: str | None,
) -> list[Name]:
    """Sessions that `given` may mean, of one tenant or of all: more than one is ambiguous.

    `own` are the names of a session that a client calls `given`.
    """
    found = matching(in_memory, given, own, tenant)
    if not found:
        infos = await asyncio.wrap_future(store.ledger.list_sessions())
        stored = [name_of(info.id) for info in infos[:STORED_MAX]]
        found = matching(stored, given, own, tenant)
    return found


def matching(
    names: Collection[Name], given: str, own: Collection[Name], tenant: str | None
) -> list[Name]:
    """The names that `given` means: exactly, else by a client's id, else by a beginning."""
    mine = [name for name in dict.fromkeys(names) if tenant in (None, name[0])]
    if exact := [name for name in mine if name[1] == given]:
        return exact
    theirs = [name for name in mine if name in own]
    if theirs or len(given.removeprefix("be_")) < ID_PREFIX_CHARS_MIN:
        return theirs
    return [name for name in mine if name[1].startswith((given, f"be_{given}"))]
