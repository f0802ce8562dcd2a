"""The time that longer work may take in a step beside decodes: rule 3 of the scheduler.

Pure functions of numbers and rows. share: decodes keep their part of the lane. slack: no decode
misses its TPOT target. Which of the two bounds the work depends on deadlines, and between tenants
on what they are owed (rule 7).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from batchengine.policy.rows import TurnRow
from batchengine.policy.shares import Shares


class Decodes(NamedTuple):
    """The decodes of a step that is being planned."""

    rows: list[TurnRow]
    ms: float  # of the step with them alone
    slack_ms: float  # beyond it, until the first of them misses its TPOT target
    now_ms: float


def budget_ms(
    head: TurnRow, work_ms: float, decodes: Decodes, shares: Shares, *, share: float
) -> float:
    """Return the time for longer work, of which `head` is the most urgent and takes `work_ms` in
    all. `share`: prefill time per decode time.

    A target that the decodes alone already miss does not limit prefill. Beside decodes of another
    tenant, in `head`'s class or a more urgent one, a deadline takes no more than the share; and a
    target of another, not more urgent one leaves the share and what is owed.
    """
    rows, slack_ms = decodes.rows, decodes.slack_ms
    share_ms = decodes.ms * share
    own_ms, meets_others = slack_ms, False
    if shares.several:
        own_ms = _due_ms(head, rows) - decodes.now_ms - decodes.ms
        meets_others = _meets_others(head, rows)
    if decodes.ms > min(r.tpot_ms for r in rows):
        found_ms = share_ms
    elif share_ms > slack_ms:
        found_ms = max(slack_ms, min(share_ms, own_ms))
    elif not meets_others and _is_late(head, work_ms, decodes, share_ms):
        found_ms = slack_ms
    else:
        found_ms = share_ms
    if owed_ms := shares.owed_ms(head, rows):
        found_ms = max(found_ms, min(share_ms + owed_ms, own_ms))
    return found_ms


def _is_late(head: TurnRow, work_ms: float, decodes: Decodes, share_ms: float) -> bool:
    """Whether `head` would miss its deadline if it only got `share_ms` of every step."""
    if share_ms <= 0.0:
        return True
    return decodes.now_ms + work_ms * (1.0 + decodes.ms / share_ms) > head.deadline_ms


def _due_ms(head: TurnRow, decodes: list[TurnRow]) -> float:
    """Return when a decode of `head`'s tenant, or a more urgent one, misses its target."""
    rows = [r for r in decodes if r.rank < head.rank or r.tenant == head.tenant]
    return min((r.served_ms + r.tpot_ms for r in rows), default=math.inf)


def _meets_others(head: TurnRow, decodes: list[TurnRow]) -> bool:
    """Whether a decode of another tenant is as urgent as `head`."""
    return any(r.tenant != head.tenant and r.rank <= head.rank for r in decodes)
