"""The majority vote on the content of a page, a pure function of statements."""

from __future__ import annotations

from array import array

import pytest

from batchengine.engine.audit.majority import (
    FRESH_WORKER,
    UNKNOWN,
    PageContent,
    Statement,
    majority,
    statement,
)

TABLE: dict[str, tuple[str, str | None, str]] = {
    # case: (statements "witness=content", the right content, wrong lanes)
    "one of two lanes": ("a=x b=y a=x b=y fresh=y", "y", "a"),
    "one of two lanes, once only": ("a=x b=y a=y b=y fresh=y", "y", "a"),
    "one of three lanes": ("a=x b=y a=x b=y c=y", "y", "a"),
    "two of three lanes against the third and an earlier run": ("a=x ?=y b=x c=y", None, ""),
    "the same, with a fresh worker": ("a=x ?=y b=x c=y fresh=x", "x", "c"),
    "the stored page was wrong": ("a=x b=y a=x b=x fresh=x", "x", "b"),
    "the stored page was wrong, of an earlier run": ("a=x ?=y a=x b=x fresh=x", "x", ""),
    "the only lane, against an earlier run": ("a=x ?=y a=x fresh=y", "y", "a"),
    "the only lane, once only": ("a=x ?=y a=y fresh=y", "y", "a"),
    "the only lane, against itself": ("a=x a=y a=x fresh=y", "y", "a"),
    "the only lane was right, the earlier run wrong": ("a=x ?=y a=x fresh=x", "x", ""),
    "a lane with NaN": ("a= b=y a= b=y fresh=y", "y", "a"),
    "two lanes were wrong in the same way, once": ("a=x b=x a=y b=y fresh=y", "y", "ab"),
    "two lanes, no fresh worker": ("a=x b=y a=x b=y", None, ""),
    "two lanes, no fresh worker, once only": ("a=x b=y a=y b=y", "y", "a"),
    "the only lane, no fresh worker": ("a=x ?=y a=x", None, ""),
    "two against two": ("a=x b=x c=y d=y", None, ""),
    "half of them, two others differ": ("a=x b=x c=y d=z", None, ""),
    "three witnesses, three contents": ("a=x b=y fresh=z", None, ""),
    "most of them, but no majority": ("a=x b=x c=y d=z e=w", None, ""),
    "one witness": ("a=x", None, ""),
    "no witness": ("", None, ""),
}
NAMES = {"fresh": FRESH_WORKER, "?": UNKNOWN}


def stated(text: str) -> Statement:
    witness, content = text.split("=")
    return Statement(NAMES.get(witness, witness), content.encode())


@pytest.mark.parametrize("case", TABLE)
def test_the_majority_gives_the_right_content_and_the_wrong_lanes(case: str) -> None:
    given, right, wrong = TABLE[case]
    for statements in (given.split(), given.split()[::-1]):
        outcome = majority(map(stated, statements))
        assert outcome.digest == (None if right is None else right.encode())
        assert outcome.wrong == frozenset(wrong)


def test_the_reason_names_the_lanes_that_agreed_and_the_wrong_ones() -> None:
    given, *_ = TABLE["one of three lanes"]
    assert majority(map(stated, given.split())).why == "b and c agree: lane a was wrong"


def test_a_statement_on_rows_of_two_lanes_has_no_known_witness() -> None:
    assert statement(frozenset(["a"]), b"x") == Statement("a", b"x")
    assert statement(frozenset(["a", "b"]), b"x") == Statement(UNKNOWN, b"x")
    assert statement(frozenset(), b"x") == Statement(UNKNOWN, b"x")


@pytest.mark.parametrize(("tokens", "page"), [(1, 0), (256, 0), (257, 1), (512, 1), (513, 2)])
def test_the_tokens_up_to_the_end_of_a_page_say_which_it_is(tokens: int, page: int) -> None:
    assert PageContent(array("i", range(tokens)), b"").page == page
