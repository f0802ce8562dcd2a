"""The directory of sessions: their durable names, and the search by an id or its prefix.

Owns the order of a search: memory before ledger; an exact id, then the ids that the service made
from a client's own id, then a prefix.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection

from batchengine.core import ID_PREFIX_CHARS_MIN
from kv_store.store import Store

STORED_MAX = 1000  # most recent sessions of the ledger that are searched
Name = tuple[str, str]  # (tenant, session id)


def durable_name(tenant: str, session_id: str) -> str:
    """Return the session's name in the ledger, which is the same in every run."""
    return f"{tenant}\x1f{session_id}"


def name_of(durable: str) -> Name:
    """Return (tenant, session id): the inverse of `durable_name`."""
    tenant, _, session_id = durable.partition("\x1f")
    return tenant, session_id


async def find(
    in_memory: Collection[Name],
    store: Store,
    given: str,
    own: Collection[Name],
    tenant: str | None,
) -> list[Name]:
    """Return the sessions that `given` may mean; with `tenant`, of that tenant only.

    `own` are the names that the service made from `given` as a client's own id.
    """
    found = matching(in_memory, given, own, tenant)
    if not found:
        infos = await asyncio.wrap_future(store.ledger.list_sessions())
        theirs = (info for info in infos if tenant in (None, info.tenant))
        stored = [name_of(info.id) for info in itertools.islice(theirs, STORED_MAX)]
        found = matching(stored, given, own, tenant)
    return found


def matching(
    names: Collection[Name], given: str, own: Collection[Name], tenant: str | None
) -> list[Name]:
    """Return the names whose id is `given`, else those in `own`, else those with the prefix."""
    mine = [name for name in dict.fromkeys(names) if tenant in (None, name[0])]
    if exact := [name for name in mine if name[1] == given]:
        return exact
    theirs = [name for name in mine if name in own]
    if theirs or len(given.removeprefix("be_")) < ID_PREFIX_CHARS_MIN:
        return theirs
    return [name for name in mine if name[1].startswith((given, f"be_{given}"))]
