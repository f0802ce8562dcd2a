"""Which timeline of a session's family a request goes on with, from numbers alone.

A client's id names a family of timelines: agents ask for titles and start children under the id of
the session that runs. The timeline with the longest common prefix takes a request that continues
it. A timeline is never rewritten by another conversation, and none waits for another's turn: such
a request begins a timeline of its own, which shares KV with the others by content.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchengine.core import PAGE_TOKENS, TimelineUse

MEMBERS_MAX = 16  # timelines of one family
# Last tokens of a message or prompt that may differ where a client sends it again: the generation
# prompt, and tokens that merge with their neighbours in another way.
TOLERANCE = 8
# A part of the last prompt that agents move behind the newest message: at most one in so many.
TAIL_PARTS = 16


class Asked(NamedTuple):
    """A prompt. `head`: tokens before the first user's message, `first_end`: up to its end; both 0
    = unknown. `is_single`: no assistant's message follows it."""

    length: int
    head: int = 0
    first_end: int = 0
    is_single: bool = False


class Timeline(NamedTuple):
    """A member of the family. `length` in tokens, `prompt` of them the prompt of its last turn;
    the first `common` are the request's too. `busy`: a turn of another request runs or waits.
    `used` orders members by their last use."""

    id: str
    length: int
    prompt: int
    common: int
    busy: bool = False
    used: int = 0


class TimelineChoice(NamedTuple):
    """The decision. `id`: the member that takes the request; "" = a new one, or none if `use` is
    UNNAMED. `of`: the member whose first `shared` tokens it has; of the one that takes it `cut`
    tokens go. A member that takes a fork was another conversation, which nothing has room for."""

    use: TimelineUse
    id: str = ""
    of: str = ""
    shared: int = 0
    cut: int = 0
    is_history_missing: bool = False


def choose(
    asked: Asked, members: Sequence[Timeline], members_max: int = MEMBERS_MAX
) -> TimelineChoice:
    """Choose the timeline of a request. `members` are those of its family, none twice."""
    if not members:
        return TimelineChoice(TimelineUse.NEW)
    idle = [one for one in members if not one.busy and goes_on(asked, one)]
    nearest = max(members, key=lambda one: (one.common, one.used))
    of = nearest.id if nearest.common else ""
    if idle:
        best = max(idle, key=lambda one: (one.common, one.used))
        use = TimelineUse.CONTINUED if has_grown(asked, best) else TimelineUse.EDITED
        return TimelineChoice(use, best.id, best.id, best.common, best.length - best.common)
    missing = asked.is_single and any(is_of(asked, one) for one in members)
    fork = TimelineChoice(TimelineUse.FORKED, "", of, nearest.common, is_history_missing=missing)
    if len(members) < members_max:
        return fork
    free = [one for one in members if not one.busy]
    if not free:
        return fork._replace(use=TimelineUse.UNNAMED)
    out = min(free, key=lambda one: (one.common // PAGE_TOKENS, one.length, one.used))
    return fork._replace(id=out.id, cut=out.length - out.common)


def goes_on(asked: Asked, one: Timeline) -> bool:
    """Whether a prompt is of the same conversation as a timeline, which may be cut for it: they
    have the first user's message in common, and at least half of the last prompt."""
    if one.common == one.length:
        return True  # nothing is cut
    if 2 * one.common < min(one.prompt, one.length):
        return False
    return one.common >= asked.first_end - min(TOLERANCE, (asked.first_end - asked.head) // 2)


def has_grown(asked: Asked, one: Timeline) -> bool:
    """Whether a prompt has what the timeline had, as far as numbers tell: it differs in the last
    answer only, which clients and templates write anew, or in few tokens before it, and is as long
    as all of it. The first is a repeated turn, too."""
    cut = min(one.length, one.prompt) - one.common
    is_tail = asked.length >= one.length and cut * TAIL_PARTS <= one.prompt
    return cut <= TOLERANCE or is_tail


def is_of(asked: Asked, one: Timeline) -> bool:
    """Whether a prompt with one message has the beginning of the timeline's conversation, and
    none of its messages."""
    known = asked.head - min(TOLERANCE, asked.head // 8)
    return one.length > 0 and known <= one.common < asked.first_end
