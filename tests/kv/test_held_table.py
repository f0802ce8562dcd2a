"""The page table with pages of peers, against a plain list of where every page lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from batchengine.core import SUPERPAGE_PAGES
from batchengine.session import Session
from batchengine.session_kv import (
    SELF,
    Cut,
    HeldSegment,
    ParkedTail,
    PendingRows,
    SessionKv,
    full_pages,
    page_start,
    pages_for,
    rows_in,
    split_segments,
)
from batchengine.wire.lane import ARENA_BIT, HELD_BIT, FromArena
from kv_store.arenas.arena import ArenaSlot
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.index import PageRef

PAGES = 26
TOKENS = PAGES * PAGE_TOKENS - 3


def test_a_superpage_is_that_of_the_kernels() -> None:
    assert kernels.SUPERPAGE_TOKENS == SUPERPAGE_PAGES * PAGE_TOKENS


def segment(peer: str, hold: int, first: int, n_pages: int, link: int = 3) -> HeldSegment:
    return HeldSegment(peer, 1, link, hold, first, n_pages)


@given(st.lists(st.integers(1, 5).map(lambda n: 4 * n), max_size=4), st.integers(0, 90))
def test_segments_split_where_asked(sizes: list[int], at: int) -> None:
    segments = [segment("n", hold, 8, size) for hold, size in enumerate(sizes)]
    kept, rest = split_segments(segments, at)
    flat = [(s.hold, s.first + i) for s in segments for i in range(s.n_pages)]
    assert [(s.hold, s.first + i) for s in kept for i in range(s.n_pages)] == flat[:at]
    assert [(s.hold, s.first + i) for s in rest for i in range(s.n_pages)] == flat[at:]


class World:
    """A session, everything that was given to its table, and where each of its pages lies.

    `pages[p]` names the content of page p's place: ("held", peer, hold, index), ("sealed", ref) or
    ("open", slot). `peers` maps a place in a hold to whether the peer still keeps it for us.
    """

    def __init__(self) -> None:
        self.session = Session(1, "s", "t")
        self.session.tokens = list(range(TOKENS))
        self.session.kv.keys = [bytes([page]) * 32 for page in range(PAGES)]
        self.made = 0
        self.pages: list[tuple[object, ...]] = []
        self.later: dict[int, tuple[object, ...]] = {}
        self.slots: set[ArenaSlot] = set()
        self.pins: Counter[PageRef] = Counter()
        self.kept: set[tuple[str, int, int]] = set()
        self.sources: set[int] = set()

    def number(self) -> int:
        self.made += 1
        return self.made

    def ref(self) -> PageRef:
        self.pins[ref := PageRef(self.number(), 1)] += 1
        return ref

    def unpin(self, refs: Sequence[PageRef]) -> None:
        for ref in refs:
            assert self.pins[ref] > 0
            self.pins[ref] -= 1

    def release(self, cut: Cut) -> None:
        for slot in cut.slots:
            self.slots.remove(slot)
        self.unpin(cut.refs)
        self.leave(cut.held)

    def leave(self, segments: Sequence[HeldSegment]) -> None:
        for held in segments:
            for index in range(held.first, held.first + held.n_pages):
                self.kept.remove((held.peer, held.hold, index))

    def pending(self, page: int) -> PendingRows:
        self.sources.add(number := self.number())
        source = FromArena("cpu.1", number, 0, 1)
        return PendingRows(page, PAGE_TOKENS, source, lambda: self.sources.remove(number))

    def trim(self, tokens: int) -> None:
        """The model of a cut: whole super-pages of held ones stay, later ones with all of them."""
        n_held = sum(place[0] == "held" for place in self.pages)
        n_pages = pages_for(tokens)
        if tokens < page_start(n_held):
            n_pages = full_pages(tokens) - full_pages(tokens) % SUPERPAGE_PAGES
            self.later = {}
        del self.pages[n_pages:]

    def check(self) -> None:
        session, kv = self.session, self.session.kv
        session.check()
        assert session.frontier <= kv.reach() == page_start(len(self.pages))
        assert session.frontier >= page_start(kv.n_held)
        found: list[tuple[object, ...]] = []
        for held in kv.held:
            found += [("held", held.peer, held.hold, held.first + i) for i in range(held.n_pages)]
        found += [("sealed", ref) for ref in kv.sealed] + [("open", slot) for slot in kv.open]
        assert found == self.pages
        codes = kv.codes.tolist()
        assert all(HELD_BIT <= code < ARENA_BIT for code in codes[: kv.n_held])
        assert all(code < HELD_BIT for code in codes[kv.n_held : kv.first_open])
        assert all(code >= ARENA_BIT for code in codes[kv.first_open :])
        later: dict[int, tuple[object, ...]] = {}
        for pages in kv.later:
            names = [
                ("held", s.peer, s.hold, s.first + i) for s in pages.held for i in range(s.n_pages)
            ] + [("sealed", ref) for ref in pages.sealed]
            assert pages.last == pages.first + len(names)
            later |= dict(enumerate(names, pages.first))
        assert later == self.later
        assert set(kv.open) == self.slots
        pinned = [ref for pages in kv.later for ref in pages.sealed] + kv.sealed
        if kv.parked is not None:
            pinned.append(kv.parked.ref)
        assert Counter(pinned) == +self.pins
        segments = [*kv.held, *(s for pages in kv.later for s in pages.held)]
        places = [(s.peer, s.hold, s.first + i) for s in segments for i in range(s.n_pages)]
        assert len(places) == len(set(places))
        assert set(places) == self.kept
        assert len(kv.pending) == len(self.sources)


@settings(deadline=None)
@given(st.data())
def test_a_table_with_held_pages_agrees_with_a_list(data: st.DataObject) -> None:
    world = World()
    session, kv = world.session, world.session.kv

    def compute(tokens: int = 0) -> None:
        if kv.pending:
            return
        unpark()
        tokens = tokens or data.draw(st.integers(1, 2500))
        end = min(TOKENS - 1, session.frontier + tokens, kv.compute_until)
        while kv.reach() < end:
            number = world.number()
            world.slots.add(slot := ArenaSlot(number % 50, number))
            kv.append(slot)
            world.pages.append(("open", slot))
        filled = kv.filled(session.frontier, end)
        assert [page for page, _ in filled] == [
            page for page in range(PAGES) if session.frontier < page_start(page + 1) <= end
        ]
        assert all(world.pages[page] == ("open", slot) for page, slot in filled)
        session.frontier = end

    def seal() -> None:
        while kv.open and session.frontier >= page_start(kv.first_open + 1):
            page = kv.first_open
            world.slots.remove(kv.seal_first(ref := world.ref(), ref.page_id))
            world.pages[page] = ("sealed", ref)

    def hand_over(*, new: bool = False) -> None:
        n_pages = SUPERPAGE_PAGES * data.draw(st.sampled_from([1, 1, 2]))
        last = kv.held[-1] if kv.held else None
        place = segment(data.draw(st.sampled_from("ab")), world.number(), 0, n_pages)
        if last is not None and not new and data.draw(st.booleans()):
            place = last._replace(first=last.first + last.n_pages, n_pages=n_pages)
        if n_pages > len(kv.sealed):
            with pytest.raises(ValueError, match="handed over"):
                kv.hand_over(place)
            return
        first = kv.n_held
        segments = len(kv.held)
        world.unpin(kv.hand_over(place))
        assert len(kv.held) == segments + (last is None or place.hold != last.hold)
        for index in range(n_pages):
            world.pages[first + index] = ("held", place.peer, place.hold, place.first + index)
            world.kept.add((place.peer, place.hold, place.first + index))

    def take_back() -> None:
        n_pages = data.draw(st.integers(1, 3)) * SUPERPAGE_PAGES
        if n_pages > kv.n_held:
            return
        refs = [world.ref() for _ in range(n_pages)]
        first = kv.n_held - n_pages
        world.leave(kv.take_back(refs, [ref.page_id for ref in refs]))
        world.pages[first : first + n_pages] = [("sealed", ref) for ref in refs]

    def lose() -> None:
        """A holder is gone; what it kept for us is, too."""
        if not kv.held:
            return
        index = data.draw(st.integers(0, len(kv.held) - 1).map(lambda n: len(kv.held) - 1 - n))
        first = sum(s.n_pages for s in kv.held[:index])
        after = first + kv.held[index].n_pages
        kept = {
            p: place for p, place in enumerate(world.pages) if p >= after and place[0] != "open"
        }
        world.release(kv.set_aside(index, world.release))
        world.later |= kept
        del world.pages[first:]
        session.frontier = page_start(first)

    def rejoin() -> None:
        """As HeldTables does it."""
        if not kv.later or kv.open or kv.pending or kv.first_open != kv.later[0].first:
            return
        later = kv.take_later()
        if later.held and kv.sealed:
            here = segment(SELF, world.number(), 0, len(kv.sealed), 0)
            first = kv.n_held
            world.unpin(kv.hand_over(here))
            for index in range(here.n_pages):
                world.pages[first + index] = ("held", SELF, here.hold, index)
                world.kept.add((SELF, here.hold, index))
        for held in later.held:
            kv.append_held(held)
        kv.extend_sealed(later.sealed, [ref.page_id for ref in later.sealed])
        for page in range(later.first, later.last):
            world.pages.append(world.later.pop(page))
        session.frontier = min(kv.reach(), TOKENS - 1)

    def link() -> None:
        number = data.draw(st.integers(0, 5))
        before = list(kv.held)
        kv.replace_held([s._replace(link=number) for s in kv.held])
        assert [s._replace(link=number) for s in before] == kv.held or len(before) > len(kv.held)
        with pytest.raises(ValueError, match="pages"):
            kv.replace_held([segment("a", 1, 0, kv.n_held + 4)])

    def park() -> None:
        page = full_pages(session.frontier)
        rows, slot = rows_in(page, session.frontier), kv.slot_at(session.frontier)
        assert (slot is not None) == (page < len(world.pages) and world.pages[page][0] == "open")
        if rows and slot and kv.parked is None and page + 1 == len(kv.codes) and page:
            kv.parked = ParkedTail(page, rows, world.ref())

    def unpark() -> None:
        if kv.parked is not None:
            world.unpin([kv.parked.ref])
            kv.parked = None

    def cut() -> None:
        tokens = data.draw(st.integers(0, kv.reach()))
        world.trim(tokens)
        world.release(session.cut(tokens))
        settle()

    def rebase() -> None:
        shared = data.draw(st.integers(0, TOKENS - 1))
        session.rebase([*range(shared), *range(-1, shared - TOKENS - 1, -1)])
        for pages in (full_pages(shared),):  # held later ones by whole super-pages
            for page in [*world.later]:
                place = world.later[page]
                end = page + SUPERPAGE_PAGES - page % SUPERPAGE_PAGES
                if (end if place[0] == "held" else page + 1) > pages:
                    del world.later[page]
        world.trim(session.frontier)
        world.release(session.cut(session.frontier))
        settle()
        session.tokens = list(range(TOKENS))
        kv.keys = [bytes([page]) * 32 for page in range(PAGES)]

    def settle() -> None:
        """A frontier inside a sealed page: no row is written there."""
        if session.frontier < kv.sealed_tokens:
            assert not kv.open
            world.unpin([kv.unseal_last()])
            world.pages.pop()
            session.frontier = kv.reach()

    def die() -> None:
        slots = kv.take_open()
        world.slots -= set(slots)
        unpark()
        first = len(kv.codes)
        del world.pages[first:]
        session.frontier = min(session.frontier, kv.reach())
        if slots:
            kv.claim([world.pending(first + index) for index in range(len(slots))])

    def bring() -> None:
        rows = kv.take_pending(lambda _: True)
        for pending in rows:
            number = world.number()
            world.slots.add(slot := ArenaSlot(number % 50, number))
            kv.append(slot)
            world.pages.append(("open", slot))
            pending.release()
        if rows:
            session.frontier = min(kv.reach(), TOKENS - 1)

    acts = [
        compute, compute, seal, seal, hand_over, hand_over, take_back, lose, rejoin, rejoin, link,
        park, cut, rebase, die, bring,
    ]  # fmt: skip
    compute(data.draw(st.sampled_from([TOKENS - 1, page_start(17) + 9, page_start(9)])))
    seal()
    for _ in range(data.draw(st.sampled_from([3, 2, 1, 0]))):
        hand_over(new=True)
    for _ in range(data.draw(st.sampled_from([1, 2, 0]))):
        lose()
        compute(data.draw(st.integers(1, page_start(4))))
        seal()
        world.check()
    for act in data.draw(st.lists(st.sampled_from(acts), min_size=2, max_size=20)):
        act()
        world.check()
    world.trim(0)
    kv.drop_later()
    world.later = {}
    world.release(session.cut(0))
    world.check()
    assert not world.slots
    assert not +world.pins
    assert not world.kept
    assert not world.sources


def test_the_check_detects_invalid_segments() -> None:
    def table(*segments: HeldSegment) -> SessionKv:
        kv = SessionKv()
        kv.keys = [bytes(32)] * 8
        for held in segments:
            kv.append_held(held)
        kv.check(page_start(kv.n_held))
        return kv

    kv = table(segment("a", 1, 0, 4))
    with pytest.raises(AssertionError, match="inside held pages"):
        kv.check(page_start(4) - 1)
    kv.codes[2] += 1
    with pytest.raises(AssertionError, match="codes differ"):
        kv.check(page_start(4))
    kv = table(segment("a", 1, 0, 4))
    kv.keys.clear()
    with pytest.raises(AssertionError, match="keys"):
        kv.check(page_start(4))
    kv = table(segment("a", 1, 0, 8))
    kv.held[0] = kv.held[0]._replace(n_pages=6)
    kv.n_held = 6
    with pytest.raises(AssertionError):
        kv.check(page_start(8))
    for bad in (segment("a", 1, 0, 3), segment("a", 1, 0, 6)):
        with pytest.raises(ValueError, match="may follow"):
            table(bad)
    with pytest.raises(ValueError, match="taken back"):
        table(segment("a", 1, 0, 8)).take_back([PageRef(1, 1)] * 3, [1] * 3)
