"""Majority vote of witnesses on the digest of a page. Pure functions."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from kv_store import keys

NOT_FINITE = b""  # in place of the digest of a page with NaN or Inf
UNKNOWN = "an earlier run"  # witness of a page that an earlier run or several lanes computed
FRESH_WORKER = "a fresh worker"


class PageContent(NamedTuple):
    """What a page is computed from: all tokens up to the page's end, and the salt."""

    tokens: array[int]
    salt: bytes

    @property
    def page(self) -> int:
        return (len(self.tokens) - 1) // PAGE_TOKENS

    def key(self, repr_id: bytes) -> bytes:
        """The content key of the page."""
        start = self.page * PAGE_TOKENS
        before = keys.chain_keys(self.tokens[:start], repr_id, self.salt) if start else []
        parent = before[-1] if before else keys.ROOT_KEY
        return keys.content_key(parent, self.tokens[start:], repr_id, self.salt)


class Statement(NamedTuple):
    """The payload digest of a page as computed by `witness`: a lane, UNKNOWN or FRESH_WORKER."""

    witness: str
    digest: bytes


class Outcome(NamedTuple):
    """Result of a vote. `digest` None: there was no majority, so no witness is `wrong`."""

    digest: bytes | None
    wrong: frozenset[str]
    why: str


def majority(statements: Iterable[Statement]) -> Outcome:
    """Return the digest that at least two and more than half of all witnesses have stated.

    A witness that stated another digest is wrong, even if it stated the right one as well: the
    arithmetic is deterministic. Only lanes are listed as `wrong`.
    """
    by_digest: dict[bytes, set[str]] = {}
    for witness, digest in statements:
        by_digest.setdefault(digest, set()).add(witness)
    witnesses = set[str]().union(*by_digest.values())
    most = max(map(len, by_digest.values()), default=0)
    leaders = [digest for digest, by in by_digest.items() if len(by) == most]
    if len(leaders) != 1 or most < 2 or 2 * most <= len(witnesses):
        return Outcome(None, frozenset(), "no majority: every content of the page is invalid")
    others = [by for digest, by in by_digest.items() if digest != leaders[0]]
    wrong = set[str]().union(*others) - {UNKNOWN, FRESH_WORKER}
    agreed = " and ".join(sorted(by_digest[leaders[0]]))
    named = ", ".join(f"lane {name}" for name in sorted(wrong)) or UNKNOWN
    return Outcome(leaders[0], frozenset(wrong), f"{agreed} agree: {named} was wrong")


def statement(lanes: frozenset[str], digest: bytes) -> Statement:
    """Statement on a page with rows of `lanes`; the witness of several lanes is UNKNOWN."""
    return Statement(next(iter(lanes)) if len(lanes) == 1 else UNKNOWN, digest)
