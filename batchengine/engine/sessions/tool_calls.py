"""Sessions that wait for tool calls, found by a request that carries the result of one.

Owns the map from a tenant's calls to sessions, with a limit per tenant. Many clients number their
calls alike (`call_1`), so a call alone proves nothing: the request must continue the session's
timeline, too, as its mark says. A session that was parked with its turn waits under the id of that
turn.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from batchengine.engine.turns.records import TimelineMark
from kv_store import keys

CALLS_MAX = 4096  # tool calls of one tenant that are kept
CALLS_ALL = 16 * CALLS_MAX  # of all tenants
SESSIONS_MAX = 16  # latest sessions of one tenant that are kept for one call


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Waiting:
    """A session, which one or more calls refer to, and the mark of its timeline."""

    session_id: str
    mark: TimelineMark


class ToolCalls:
    """The calls that sessions of one engine wait for, or waited for."""

    def __init__(self) -> None:
        self._calls: dict[str, dict[str, dict[str, _Waiting]]] = {}  # by tenant, call, session id
        self._waiting = weakref.WeakValueDictionary[tuple[str, str], _Waiting]()

    def __repr__(self) -> str:
        return f"<ToolCalls {sum(map(len, self._calls.values()))} sessions={len(self._waiting)}>"

    def add(self, tenant: str, call: str, session_id: str, mark: TimelineMark) -> None:
        """Record that the session waits for this call; beyond the limits, drop the oldest call of
        the tenant that has the most."""
        waiting = self._waiting.get((tenant, session_id))
        if waiting is None:
            waiting = self._waiting[tenant, session_id] = _Waiting(session_id, mark)
        waiting.mark = mark
        mine = self._calls.setdefault(tenant, {})
        sessions = mine[call] = mine.pop(call, {})
        sessions.pop(session_id, None)
        sessions[session_id] = waiting
        if len(sessions) > SESSIONS_MAX:
            del sessions[next(iter(sessions))]
        if len(mine) <= CALLS_MAX:
            if sum(map(len, self._calls.values())) <= CALLS_ALL:
                return
            mine = max(self._calls.values(), key=len)
        del mine[next(iter(mine))]

    def set_mark(self, tenant: str, session_id: str, mark: TimelineMark) -> None:
        """Replace the mark of a session that has calls; its timeline has changed."""
        waiting = self._waiting.get((tenant, session_id))
        if waiting is not None:
            waiting.mark = mark

    def find(self, tenant: str, calls: Sequence[str], prompt: Sequence[int]) -> str | None:
        """Return the id of a session that has one of these calls and whose timeline the prompt
        continues; of several, the one with the longest timeline."""
        mine = self._calls.get(tenant, {})
        waiting = {w for call in calls for w in mine.get(call, {}).values()}
        if not waiting:
            return None
        try:
            ids = keys.token_bytes(prompt)
        except ValueError:  # no token of any model
            return None
        found, digest, done = None, hashlib.sha256(), 0
        for one in sorted(waiting, key=lambda w: w.mark.tokens):
            if one.mark.tokens > len(prompt):
                break
            digest.update(ids[done * 4 : one.mark.tokens * 4])
            done = one.mark.tokens
            if done and one.mark.digest == digest.hexdigest():
                found = one.session_id
        return found

    def forget(self, tenant: str, session_id: str) -> None:
        """Delete a dropped session from every call."""
        mine = self._calls.get(tenant, {})
        for call in [call for call, sessions in mine.items() if session_id in sessions]:
            del mine[call][session_id]
            if not mine[call]:
                del mine[call]
        if not mine:
            self._calls.pop(tenant, None)
