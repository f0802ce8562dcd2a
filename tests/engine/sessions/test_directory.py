"""The directory of sessions: which sessions a given text matches."""

from __future__ import annotations

import pytest

from batchengine.engine.sessions.directory import durable_name, matching, name_of

NAMES = [("", "be_abcdef"), ("", "be_abxyz"), ("alice", "be_abcdef"), ("alice", "plan")]


@pytest.mark.parametrize(
    ("given", "own", "tenant", "expected"),
    [
        ("be_abcdef", (), None, [("", "be_abcdef"), ("alice", "be_abcdef")]),
        ("be_abcdef", (), "alice", [("alice", "be_abcdef")]),
        ("abxy", (), None, [("", "be_abxyz")]),
        ("be_abcd", (), "", [("", "be_abcdef")]),
        ("abx", (), None, []),  # too short for a prefix
        ("work", {("", "be_abxyz")}, None, [("", "be_abxyz")]),
        ("plan", {("", "be_abxyz")}, None, [("alice", "plan")]),  # an exact id comes first
        ("work", {("", "be_abxyz")}, "alice", []),
    ],
)
def test_a_text_matches_ids_names_and_prefixes(
    given: str, own: set[tuple[str, str]], tenant: str | None, expected: list[tuple[str, str]]
) -> None:
    assert matching([*NAMES, NAMES[0]], given, own, tenant) == expected


def test_durable_names_are_read_back() -> None:
    assert name_of(durable_name("alice", "plan")) == ("alice", "plan")
