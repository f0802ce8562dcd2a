"""The timeline that a request goes on with: a table of cases, and bounds for any numbers."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchengine.core import TimelineUse
from batchengine.policy.timelines.choice import MEMBERS_MAX, Asked, Timeline, TimelineChoice, choose

NEW, CONTINUED, EDITED = TimelineUse.NEW, TimelineUse.CONTINUED, TimelineUse.EDITED
FORKED, UNNAMED = TimelineUse.FORKED, TimelineUse.UNNAMED
# a conversation: system part of 9,000 tokens, first message up to 9,100, an answer of 400
MAIN = Timeline("s", 9500, 9100, 0, used=5)
TITLE = Timeline("s.2", 700, 680, 0, used=6)


def at(common: int, one: Timeline = MAIN, *, busy: bool = False) -> Timeline:
    return one._replace(common=common, busy=busy)


class Case(NamedTuple):
    what: str
    asked: Asked
    members: tuple[Timeline, ...]
    use: TimelineUse
    id: str = ""
    is_history_missing: bool = False


CASES = (
    Case("the first request of an id", Asked(9100, 9000, 9100, True), (), NEW),
    Case("the next turn", Asked(9700, 9000, 9100), (at(9500),), CONTINUED, "s"),
    Case("without the reasoning of the last answer", Asked(9300, 9000, 9100), (at(9098),),
         CONTINUED, "s"),
    Case("the same request again", Asked(9100, 9000, 9100, True), (at(9100),), CONTINUED, "s"),
    Case("the last message edited", Asked(9102, 9000, 9080), (at(9085),), EDITED, "s"),
    Case("an earlier message edited, most is common", Asked(9600, 2000, 2050), (at(6000),),
         EDITED, "s"),
    Case("OpenClaw: a tail of 60 tokens moves behind the newest message",
         Asked(9800, 9000, 9020), (at(9035),), CONTINUED, "s"),
    Case("half of a long conversation taken back", Asked(31_000, 9000, 9100),
         (Timeline("s", 70_000, 69_000, 30_500),), FORKED),
    Case("OpenCode: a title while the turn runs", Asked(680, 500, 670, True),
         (at(2, busy=True),), FORKED),
    Case("OpenCode: a title, the session is idle", Asked(680, 500, 670, True), (at(2),), FORKED),
    Case("the main conversation after its title was first", Asked(9100, 9000, 9100, True),
         (at(2, TITLE),), FORKED),
    Case("the next turn beside a title", Asked(9700, 9000, 9100), (at(9500), at(2, TITLE)),
         CONTINUED, "s"),
    Case("Codex: a child with the id of its parent", Asked(9400, 9000, 9390, True),
         (at(9010, busy=True),), FORKED, "", True),
    Case("a parallel call of the same conversation", Asked(9200, 9000, 9100),
         (at(9100, busy=True),), FORKED),
    Case("a fork goes on while the first is busy", Asked(9400, 9000, 9100),
         (at(9100, busy=True), Timeline("s.2", 9300, 9200, 9300)), CONTINUED, "s.2"),
    Case("the newest message alone, behind the system part", Asked(9020, 9000, 9015, True),
         (at(9001),), FORKED, "", True),
    Case("the newest message alone, without a system part", Asked(12, 0, 8, True), (at(2),),
         FORKED, "", True),
    Case("another system part is another task", Asked(680, 500, 670, True), (at(30),), FORKED),
    Case("an unknown template: half in common", Asked(9700), (at(5000),), EDITED, "s"),
    Case("an unknown template: less", Asked(9700), (at(4000),), FORKED),
    Case("a session whose turn was never begun", Asked(20, 0, 10, True),
         (Timeline("s", 0, 0, 0),), CONTINUED, "s"),
    Case("a short first message is another one", Asked(16, 5, 9, True),
         (Timeline("s", 30, 14, 6),), FORKED, "", True),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_the_table(case: Case) -> None:
    found = choose(case.asked, case.members)
    assert (found.use, found.id) == (case.use, case.id)
    assert found.is_history_missing == case.is_history_missing


SHORT = Timeline("s", 14, 10, 0)
# (request, timeline, least common prefix for the use before the bar, the use with one token less)
EDGES = (
    ("half of the last prompt", Asked(9700), MAIN, 4550, EDITED, FORKED),
    ("the first message, but for 8 tokens", Asked(9700, 9000, 9100), MAIN, 9092, CONTINUED, FORKED),
    ("half of a short first message", Asked(16, 5, 9), SHORT, 7, CONTINUED, FORKED),
    ("the last prompt, but for 8 tokens", Asked(9000, 8000, 8100), MAIN, 9092, CONTINUED, EDITED),
    ("but for its sixteenth part", Asked(9500, 8000, 8100), MAIN, 8532, CONTINUED, EDITED),
)


@pytest.mark.parametrize(("asked", "one", "common", "use", "less"), [row[1:] for row in EDGES],
                         ids=[row[0] for row in EDGES])  # fmt: skip
def test_the_edges_of_each_rule(
    asked: Asked, one: Timeline, common: int, use: TimelineUse, less: TimelineUse
) -> None:
    assert choose(asked, [at(common, one)]).use is use
    assert choose(asked, [at(common - 1, one)]).use is less


def test_a_request_shorter_than_the_timeline_moves_no_tail() -> None:
    assert choose(Asked(9499, 8000, 8100), [at(8532)]).use is EDITED


def test_what_is_shared_and_what_is_cut() -> None:
    found = choose(Asked(9102, 9000, 9080), [at(9085), at(2, TITLE)])
    assert found == TimelineChoice(EDITED, "s", "s", 9085, 9500 - 9085)
    found = choose(Asked(680, 500, 670, True), [at(30), at(2, TITLE)])
    assert found == TimelineChoice(FORKED, "", "s", 30)


def test_a_full_family_replaces_the_least_related_one_that_is_idle() -> None:
    """Never the long conversation for a flood of short ones, and none that computes."""
    flood = [Timeline(f"s.{n}", 600 + n, 500, 3, used=n) for n in range(2, MEMBERS_MAX + 1)]
    asked = Asked(500, 400, 495, True)
    found = choose(asked, [at(3), *flood])
    assert found == TimelineChoice(FORKED, "s.2", "s.16", 3, 602 - 3)
    busy = [one._replace(busy=True) for one in flood]
    assert choose(asked, [at(3), *busy]).id == "s"
    assert choose(asked, [at(3, busy=True), *busy]) == TimelineChoice(UNNAMED, "", "s.16", 3)


@given(
    st.integers(1, 20_000),
    st.integers(0, 20_000),
    st.lists(
        st.tuples(
            st.integers(0, 20_000), st.integers(0, 20_000), st.integers(0, 20_000), st.booleans()
        ),
        max_size=MEMBERS_MAX,
    ),
)
def test_no_busy_timeline_is_taken_and_at_most_half_is_cut(
    length: int, first_end: int, rows: list[tuple[int, int, int, bool]]
) -> None:
    members = [
        Timeline(f"s.{n}", tokens, min(tokens, prompt), min(tokens, common, length), busy, n)
        for n, (tokens, prompt, common, busy) in enumerate(rows)
    ]
    found = choose(Asked(length, min(first_end, length) // 2, min(first_end, length)), members)
    taken = next((one for one in members if one.id == found.id), None)
    if taken is None:
        assert found.use in (NEW, FORKED, UNNAMED)
        return
    assert not taken.busy
    is_replaced = found.use is FORKED
    assert is_replaced or 2 * taken.common >= taken.prompt
    whole = [one for one in members if not one.busy and one.common == one.length]
    if not is_replaced:
        assert taken.common >= max((one.common for one in whole), default=0)
