"""Holds given to peers: pins return to the baseline in every order of events."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.engine.linked import holds
from batchengine.engine.linked.holds import (
    HoldName,
    HoldRefused,
    HoldsGiven,
    KeptPage,
    PageFormat,
)
from kv_store.pages.index import PageRef
from kv_store.pages.pool import PagePool

PAGE = 1000


def key(number: int) -> bytes:
    """The content key of a page."""
    return bytes([number])


class Pool:
    """Counts pins per page."""

    def __init__(self, page_bytes: int = PAGE) -> None:
        self.pins: Counter[PageRef] = Counter()
        self.layout = SimpleNamespace(page_bytes=page_bytes)
        self.core = SimpleNamespace(budget=SimpleNamespace(extent_bytes=1 << 30))
        self.format = PageFormat(cast(PagePool, self))

    def pin(self, number: int) -> KeptPage:
        self.pins[ref := PageRef(number, 1)] += 1
        return KeptPage(ref, key(number), self.format)

    def unpin(self, ref: PageRef) -> None:
        assert self.pins[ref] > 0, "a pin is given back twice"
        self.pins[ref] -= 1


def given_by(pool: Pool, n_pages: int = 100) -> HoldsGiven:
    made = HoldsGiven(n_pages * PAGE)
    made.peer_up("north", 7)
    return made


NAME = HoldName("north", 7, 1)


def test_pages_are_attended_to_as_far_as_they_are_complete() -> None:
    pool = Pool()
    held = given_by(pool)
    assert held.reserve(NAME, 4, pool.format) == 0
    assert held.bytes_held == 4 * PAGE
    pages = [pool.pin(number) for number in range(4)]
    refs = [page.ref for page in pages]
    assert held.add(NAME, 1, pages[1])
    assert held.pages(NAME) == []
    assert held.add(NAME, 0, pages[0])
    assert held.pages(NAME) == refs[:2]
    assert held.add(NAME, 2, pages[2])
    assert held.add(NAME, 3, pages[3])
    assert held.reserve(NAME, 2, pool.format) == 4
    assert held.pages(NAME) == refs
    assert held.trim(NAME, 3)
    assert held.pages(NAME) == refs[:3]
    assert not held.trim(NAME, 3)
    assert held.pages_of("north") == 3
    assert held.reserve(NAME, 1, pool.format) == 3
    assert held.trim(NAME, 0)
    assert NAME not in held
    assert not +pool.pins
    assert held.bytes_held == 0


def test_what_is_of_another_time_is_refused() -> None:
    pool = Pool()
    held = given_by(pool, 6)
    held.peer_up("east", 7)
    held.reserve(NAME, 4, pool.format)
    for refused in (
        lambda: held.reserve(NAME._replace(incarnation=6), 1, pool.format),
        lambda: held.reserve(NAME._replace(peer="south"), 1, pool.format),  # no link
        lambda: held.reserve(NAME, 0, pool.format),
        lambda: held.reserve(NAME, 3, pool.format),  # beyond the budget
        lambda: held.reserve(
            NAME._replace(peer="east"), 1, pool.format
        ),  # the number of another's hold
        lambda: held.pages(NAME._replace(hold=2)),
    ):
        with pytest.raises(HoldRefused):
            refused()
    assert not held.add(NAME, 4, pool.pin(1))
    assert not held.add(NAME, -1, pool.pin(1))
    assert held.add(NAME, 0, pool.pin(1))
    assert not held.add(NAME, 0, pool.pin(1))  # twice
    assert pool.pins[PageRef(1, 1)] == 1
    assert held.peer_up("north", 7) == []  # the same run: a link that came back
    assert held.peer_up("north", 8) == [NAME]
    assert not +pool.pins
    held.check()


def test_a_peer_cannot_fill_the_table_with_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "HOLDS_MAX", 3)
    pool = Pool()
    held = given_by(pool)
    for number in range(3):
        held.reserve(NAME._replace(hold=number), 1, pool.format)
    with pytest.raises(HoldRefused, match="holds"):
        held.reserve(NAME._replace(hold=9), 1, pool.format)
    assert held.bytes_held == 3 * PAGE


def test_one_page_in_two_holds_costs_its_bytes_once() -> None:
    pool = Pool()
    held = given_by(pool, 3)
    for number in (1, 2):
        held.reserve(NAME._replace(hold=number), 1, pool.format)
        assert held.add(NAME._replace(hold=number), 0, pool.pin(5))
    assert held.bytes_held == PAGE
    assert held.trim(NAME, 0)
    assert pool.pins[PageRef(5, 1)] == 1
    assert held.invalid([key(4), key(5), key(5)]) == [NAME._replace(hold=2)]
    assert not +pool.pins


class Looks(dict[HoldName, Any]):
    """A table of holds that counts the holds that are looked at."""

    n = 0

    def get(self, name: HoldName, default: Any = None) -> Any:
        self.n += 1
        return super().get(name, default)

    def __getitem__(self, name: HoldName) -> Any:
        self.n += 1
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[HoldName]:
        for name in super().__iter__():
            self.n += 1
            yield name

    def items(self) -> Any:
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        return [self[name] for name in self]


def test_holds_without_news_are_not_looked_at() -> None:
    """Neither when pages become invalid, nor when room that is not used is given up."""
    pool = Pool()
    held = given_by(pool, 1000)
    for number in range(200):
        held.reserve(name := NAME._replace(hold=number), 2, pool.format)
        held.add(name, 0, pool.pin(number))
        if number:
            held.add(name, 1, pool.pin(number))
    held.unused(0.0)
    held._holds = looks = Looks(held._holds)
    assert held.unused(time.monotonic() + 1) == [NAME._replace(hold=0)]
    assert held.invalid([key(7)]) == [NAME._replace(hold=7)]
    assert looks.n < 20
    held.check()


@settings(deadline=None)
@given(st.data())
def test_pins_return_to_the_baseline_in_every_order(data: st.DataObject) -> None:
    """Requests of two peers with ups, downs, and imports that end at any time."""
    pool = Pool()
    held = HoldsGiven(data.draw(st.integers(1, 20)) * PAGE)
    own = [pool.pin(number).ref for number in range(5)]  # pins of others: never given back here
    arriving: list[tuple[HoldName, int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        act = data.draw(
            st.sampled_from(
                ["reserve"] * 4
                + ["arrive"] * 6
                + ["trim", "unused", "up", "up", "down", "bad", "give up"]
            )
        )
        peer = data.draw(st.sampled_from(["north", "south"]))
        name = HoldName(peer, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)))
        if act == "reserve":
            n_pages, free = data.draw(st.integers(0, 6)), held.bytes_free
            try:
                index = held.reserve(name, n_pages, pool.format)
            except HoldRefused:
                assert held.bytes_free == free
            else:
                assert n_pages * PAGE <= free
                arriving += [(name, index + i) for i in range(n_pages)]
        elif act == "arrive" and arriving:
            one = arriving.pop(data.draw(st.integers(0, len(arriving) - 1)))
            held.add(*one, pool.pin(data.draw(st.integers(0, 9))))
        elif act == "trim":
            held.trim(name, data.draw(st.integers(0, 4)))
        elif act == "unused":
            held.unused(time.monotonic() + data.draw(st.sampled_from([-60, 60])))
        elif act == "up":
            held.peer_up(peer, name.incarnation)
            assert all(n.incarnation == name.incarnation for n in held if n.peer == peer)
        elif act == "down":
            held.peer_down(peer)
            assert not any(n.peer == peer for n in held)
        elif act == "give up":
            n_pages = data.draw(st.integers(0, 4))
            kept_max = max(0, held.n_pages - n_pages)
            held.give_up(n_pages * PAGE)
            assert held.n_pages <= kept_max
        elif act == "bad":
            number = data.draw(st.integers(0, 9))
            held.invalid([key(number)])
            assert not any(PageRef(number, 1) in held.pages(name) for name in held)
        held.check()
        assert held.bytes_held <= held.bytes_max
    for peer in ("north", "south"):
        held.peer_down(peer)
    for one in arriving:  # imports that end after everything else
        assert not held.add(*one, pool.pin(3))
    assert +pool.pins == Counter(own)
    assert held.bytes_held == 0
    held.check()


def test_a_hold_has_pages_of_one_model() -> None:
    """A page that was stored for another link of the same run is not taken."""
    pool, other = Pool(), Pool()
    held = given_by(pool)
    held.reserve(NAME, 1, pool.format)
    with pytest.raises(HoldRefused, match="another model"):
        held.reserve(NAME, 1, other.format)
    held.peer_down("north")
    held.peer_up("north", 7)
    held.reserve(NAME, 1, other.format)
    assert not held.add(NAME, 0, pool.pin(1))
    assert not +pool.pins
    assert held.add(NAME, 0, other.pin(1))
    held.check()
    held.peer_down("north")
    held.check()
    assert not +other.pins
