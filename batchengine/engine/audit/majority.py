"""Pages by their content, what witnesses state of one, and what most of them say. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS
from kv_store import keys

NOT_FINITE = b""  # in place of the digest of a page with NaN or Inf
UNKNOWN = "an earlier run"  # computed a page, or several lanes did together
FRESH_WORKER = "a fresh worker"


class PageContent(NamedTuple):
    """A page by what it must hold: the tokens of its chain up to its end, salt and priority."""

    tokens: array[int]
    salt: bytes
    priority: int

    @property
    def page(self) -> int:
        return (len(self.tokens) - 1) // PAGE_TOKENS

    def key(self, repr_id: bytes) -> bytes:
        """Its content key."""
        return self.link(repr_id)[1]

    def link(self, repr_id: bytes) -> tuple[bytes, bytes]:
        """The content keys of the page before it and of itself."""
        start = self.page * PAGE_TOKENS
        before = keys.chain_keys(self.tokens[:start], repr_id, self.salt) if start else []
        parent = before[-1] if before else keys.ROOT_KEY
        return parent, keys.content_key(parent, self.tokens[start:], repr_id, self.salt)


class Statement(NamedTuple):
    """A witness computed the page with this payload digest, some time ago or just now."""

    witness: str
    digest: bytes


class Outcome(NamedTuple):
    """What an audit found. `digest` None: undecidable, so no witness is `wrong`."""

    digest: bytes | None
    wrong: frozenset[str]
    why: str


def majority(statements: Iterable[Statement]) -> Outcome:
    """The digest that two witnesses or more, and most of all witnesses, have stated.

    A witness that stated anything else is wrong, even if it stated the right digest as well: the
    arithmetic is deterministic. Lanes only are named as wrong.
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
    """Of a page with rows of these lanes: one lane answers for it, several do not."""
    return Statement(next(iter(lanes)) if len(lanes) == 1 else UNKNOWN, digest)
