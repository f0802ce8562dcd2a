"""The directory of sessions: their durable names, and the search by an id or its prefix.

Owns the order of a search: memory before ledger; an exact id, then the ids that the service made
from a client's own id, then a prefix. Owns the table of families: a client's id may have several
timelines, each a session of its own.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence

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


def family_of(session_id: str) -> str:
    """Return the id of the family that a timeline belongs to; `be_x.2` is the second of `be_x`."""
    family, dot, number = session_id.rpartition(".")
    return family if dot and number.isdecimal() else session_id


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
    """Return the names whose id is `given`, else those in `own`, else those with the prefix.

    Of a family that is found by `own` or a prefix its own name is returned, once.
    """
    mine = [name for name in dict.fromkeys(names) if tenant in (None, name[0])]
    if exact := [name for name in mine if name[1] == given]:
        return exact
    families = {(tenant, family_of(one)): None for tenant, one in mine}
    theirs = [name for name in families if name in own]
    if theirs or len(given.removeprefix("be_")) < ID_PREFIX_CHARS_MIN:
        return theirs
    among = mine if "." in given else families
    return [name for name in among if name[1].startswith((given, f"be_{given}"))]


class FamilyTable:
    """Ids of the timelines of families that have more than one, by last use.

    A family without an entry has one timeline at most, of the family's own id.
    """

    def __init__(self) -> None:
        self._ids: dict[Name, dict[str, None]] = {}

    def __repr__(self) -> str:
        return f"<FamilyTable {len(self._ids)}>"

    def load(self, names: Sequence[Name]) -> None:
        """Add the sessions of an earlier run; `names` are in the order of their last use."""
        several = {(tenant, family_of(one)) for tenant, one in names if family_of(one) != one}
        for tenant, one in names:
            if (tenant, family_of(one)) in several:
                self._ids.setdefault((tenant, family_of(one)), {})[one] = None

    def members(self, tenant: str, family: str) -> list[str]:
        """Return the ids of a family's timelines, oldest use first; the ledger may lack one."""
        return list(self._ids.get((tenant, family), {family: None}))

    def last(self, tenant: str, session_id: str) -> str:
        """Return the timeline that `session_id` names: itself, or of a family the last one used."""
        if family_of(session_id) != session_id:
            return session_id
        return self.members(tenant, session_id)[-1]

    def new_id(self, tenant: str, family: str) -> str:
        """Return the id of a further timeline, which becomes a member."""
        mine = self._ids.setdefault((tenant, family), {family: None})
        numbers = (int(one.removeprefix(family + ".")) for one in mine if one != family)
        made = f"{family}.{max(numbers, default=1) + 1}"
        mine[made] = None
        return made

    def use(self, tenant: str, session_id: str) -> None:
        """Make a member the one used last."""
        mine = self._ids.get((tenant, family_of(session_id)))
        if mine is not None:
            mine.pop(session_id, None)
            mine[session_id] = None

    def forget(self, tenant: str, session_id: str) -> None:
        """Delete a member."""
        name = tenant, family_of(session_id)
        mine = self._ids.get(name, {})
        mine.pop(session_id, None)
        if not mine or mine.keys() == {name[1]}:
            self._ids.pop(name, None)
