"""Which sessions the ledger forgets: limits of sessions and bytes, with a fair share per tenant.

Pure functions. A tenant that has no more than its share loses nothing, however much others have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple


class Kept(NamedTuple):
    """A session in the ledger, and the bytes of its rows."""

    id: str
    tenant: str
    epoch: int
    used_seq: int
    row_bytes: int


def fair_share(uses: Iterable[int], limit: int) -> int:
    """Return the largest share such that all uses together, each cut to it, are within `limit`."""
    left, ordered = limit, sorted(uses)
    for index, use in enumerate(ordered):
        share = left // (len(ordered) - index)
        if use > share:
            return max(0, share)
        left -= use
    return limit


def over_share(
    sessions: Sequence[Kept], sessions_max: int, bytes_max: int, keep: Collection[str], at_most: int
) -> list[Kept]:
    """Return up to `at_most` of the sessions (longest unused first) whose tenants have more than
    their share of sessions or bytes, never those in `keep`."""
    counts = Counter(session.tenant for session in sessions)
    sizes = Counter[str]()
    for session in sessions:
        sizes[session.tenant] += session.row_bytes
    count_share = fair_share(counts.values(), sessions_max)
    bytes_share = fair_share(sizes.values(), bytes_max)
    over: list[Kept] = []
    for session in sessions:
        if len(over) == at_most:
            break
        is_over = counts[session.tenant] > count_share or sizes[session.tenant] > bytes_share
        if is_over and session.id not in keep:
            over.append(session)
            counts[session.tenant] -= 1
            sizes[session.tenant] -= session.row_bytes
    return over
