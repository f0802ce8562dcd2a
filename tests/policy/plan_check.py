"""An independent check of the scheduler's plans, which every test of the scheduler applies."""

from __future__ import annotations

import math

from batchengine.config import SlaConfig
from batchengine.core import PAGE_TOKENS, SlaClass
from batchengine.policy.cost import work_of
from batchengine.policy.rows import TurnRow
from batchengine.policy.scheduler import LaneView, StepPlan
from batchengine.session_kv import pages_for

CLASS_TARGETS = {sla_class: SlaConfig().of(sla_class) for sla_class in SlaClass}


def check(view: LaneView, plan: StepPlan) -> list[str]:
    """Return the invariants that `plan` violates on `view`, as sentences; empty = none."""
    running = {r.key: r for r in view.running}
    waiting = {r.key: r for r in view.waiting}
    rows = running | waiting
    tokens = dict(plan.batch)
    out = set(plan.preempt)
    admitted = set(plan.admit)
    known = [e for e in plan.batch if e.key in rows]
    wrong: list[str] = []

    def rule(holds: bool, sentence: str) -> None:
        if not holds:
            wrong.append(sentence)

    rule(len(rows) == len(running) + len(waiting), "a session is running and waiting")
    rule(len(tokens) == len(plan.batch), "a key stands in the batch twice")
    rule(len(known) == len(plan.batch), "the batch names an unknown session")
    rule(sum(tokens.values()) <= view.tokens_max, "more tokens than a step holds")
    rule(len(tokens) <= view.entries_max, "more entries than a step holds")
    rule(all(1 <= n <= rows[k].to_compute for k, n in known), "an entry exceeds its work")
    rule(not any(rows[k].paused for k, _ in known), "a slow reader's session computes")
    rule(all(k in running or k in admitted for k in tokens), "a waiting session computes")
    rule(not out & tokens.keys(), "a preempted session computes")
    rule(admitted <= waiting.keys() and admitted <= tokens.keys(), "admitted without an entry")
    rule(out <= running.keys(), "a session without a seat is preempted")
    rule(set(plan.shed) <= waiting.keys() - admitted, "a seated session is shed")
    for name, keys in (("admit", plan.admit), ("preempt", plan.preempt), ("shed", plan.shed)):
        rule(len(set(keys)) == len(keys), f"{name} names a key twice")
    alone = any(rows[k].suspect for k, _ in known)
    rule(not alone or len(known) == 1, "a suspect does not run alone")
    before = [k for k, r in running.items() if not r.paused and r.to_compute > 0]
    after = len(set(before) - out) + len(admitted)
    rule(after <= max(view.entries_max, len(before)), "more sessions than seats")
    begun = [pages_for(rows[k].frontier + n - rows[k].open_until) for k, n in known]
    freed = sum(running[k].slots_held for k in out if k in running)
    freed -= sum(waiting[k].slots_held for k in admitted if k in waiting)
    rule(sum(max(0, n) for n in begun) <= view.slots_free + freed, "more places than are free")
    held = [pages_for(rows[k].frontier + n) - rows[k].pages_held for k, n in known]
    pinned = sum(waiting[k].pages_evictable for k in admitted if k in waiting)
    rule(
        sum(max(0, n) for n in held) + pinned <= view.pages_free, "more pages than can be reserved"
    )
    expected_ms = view.cost.predict_ms(work_of((rows[k].frontier, n) for k, n in known))
    scored_ms = view.scored_cost.prefill_token_ms - view.cost.prefill_token_ms
    expected_ms += scored_ms * sum(n for k, n in known if rows[k].scored and n > 1)
    near = math.isclose(plan.predicted_ms, expected_ms, rel_tol=1e-6, abs_tol=1e-9)
    rule(near if known else plan.predicted_ms == 0.0, "the prediction is not that of the batch")
    idle = out | tokens.keys() | {k for k, r in running.items() if _begins_page(r)}
    decodes = [k for k in before if running[k].to_compute == 1 and not running[k].suspect]
    if not alone and len(decodes) <= min(view.entries_max, view.tokens_max):
        rule(idle >= set(decodes), "a running decode was left out")
    return wrong


def _begins_page(row: TurnRow) -> bool:
    """Whether the next token needs a slot or a page, of which none may be left."""
    return row.frontier >= min(row.open_until, row.pages_held * PAGE_TOKENS)
