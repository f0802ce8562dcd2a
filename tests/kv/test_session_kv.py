"""The page table of a session: after every operation it has the slot of every page."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.session import Session
from batchengine.session_kv import (
    Cut,
    ParkedTail,
    PendingRows,
    SessionKv,
    full_pages,
    page_start,
    pages_for,
    rows_in,
)
from batchengine.wire.lane import FromArena
from kv_store.arenas.arena import ArenaSlot
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.index import PageRef

TOKENS = 9 * PAGE_TOKENS


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 12))
def test_tokens_and_pages_are_converted_consistently(tokens: int, page: int) -> None:
    assert page_start(full_pages(tokens)) <= tokens <= page_start(pages_for(tokens))
    assert pages_for(tokens) - full_pages(tokens) == (tokens % PAGE_TOKENS != 0)
    assert sum(rows_in(p, tokens) for p in range(pages_for(tokens))) == tokens
    assert rows_in(page, page_start(page)) == 0
    assert rows_in(page, page_start(page + 2)) == PAGE_TOKENS


class Ledger:
    """Allocates slots, pins and holds, and counts which of them a table still has."""

    def __init__(self) -> None:
        self.made = 0
        self.slots: set[ArenaSlot] = set()
        self.pins: Counter[PageRef] = Counter()
        self.holds: set[int] = set()

    def slot(self) -> ArenaSlot:
        self.made += 1
        self.slots.add(slot := ArenaSlot(self.made % 50, self.made))
        return slot

    def ref(self) -> PageRef:
        self.made += 1
        self.pins[ref := PageRef(self.made, 1)] += 1
        return ref

    def pending(self, page: int, rows: int, *, arena: bool) -> PendingRows:
        self.made += 1
        self.holds.add(number := self.made)
        source = FromArena("cpu.1", number, 0, 1) if arena else PageRef(number, 1)
        return PendingRows(page, rows, source, lambda: self.holds.remove(number))

    def give_back(self, cut: Cut) -> None:
        self.slots -= set(cut.slots)
        self.pins.subtract(cut.refs)

    def check(self, session: Session) -> None:
        """Nothing is leaked, nothing is released twice, and the frontier has its pages."""
        session.check()
        kv = session.kv
        assert session.frontier <= kv.reach() == page_start(len(kv.sealed) + len(kv.open))
        assert set(kv.open) == self.slots
        held = Counter(kv.sealed) + Counter([kv.parked.ref] if kv.parked else [])
        assert held == +self.pins
        assert len(kv.pending) == len(self.holds)


@settings(deadline=None)
@given(st.data())
def test_a_table_keeps_its_order_and_releases_everything_once(data: st.DataObject) -> None:
    session, ledger = Session(1, "s", "t"), Ledger()
    session.tokens = list(range(TOKENS))
    kv = session.kv

    def compute() -> None:
        if kv.pending:
            return
        end = min(TOKENS - 1, session.frontier + data.draw(st.integers(1, 700)))
        while kv.reach() < end:
            kv.append(ledger.slot())
        filled = kv.filled(session.frontier, end)
        assert [page for page, _ in filled] == [
            page for page in range(9) if session.frontier < page_start(page + 1) <= end
        ]
        assert all(kv.slot_at(page_start(page)) == slot for page, slot in filled)
        if kv.parked is not None:  # its slot changes
            ledger.pins.subtract([kv.parked.ref])
            kv.parked = None
        session.frontier = end

    def seal() -> None:
        if kv.open and session.frontier >= page_start(len(kv.sealed) + 1):
            slot = kv.seal_first(ref := ledger.ref(), ref.page_id)
            ledger.slots.remove(slot)

    def park() -> None:
        page, rows = (
            full_pages(session.frontier),
            rows_in(full_pages(session.frontier), session.frontier),
        )
        if (
            rows
            and kv.slot_at(session.frontier)
            and kv.parked is None
            and page + 1 == len(kv.codes)
        ):
            kv.parked = ParkedTail(page, rows, ledger.ref())

    def cut() -> None:
        tokens = data.draw(st.integers(0, TOKENS))
        before = session.frontier, kv.reach()
        ledger.give_back(session.cut(tokens))
        assert kv.reach() == min(before[1], page_start(pages_for(tokens)))
        assert session.frontier == min(before[0], tokens, kv.reach())
        assert all(page_start(rows.page) + rows.rows <= tokens for rows in kv.pending)
        reopen()

    def rebase() -> None:
        shared = data.draw(st.integers(0, TOKENS - 1))
        assert session.rebase([*range(shared), *range(-1, shared - TOKENS - 1, -1)]) == shared
        ledger.give_back(session.cut(session.frontier))
        reopen()
        session.tokens = list(range(TOKENS))

    def die() -> None:
        """The worker dies: open pages are pending until they are imported again."""
        slots = kv.take_open()
        ledger.slots -= set(slots)
        if kv.parked is not None:
            ledger.pins.subtract([kv.parked.ref])
            kv.parked = None
        session.frontier = min(session.frontier, kv.reach())
        first = len(kv.codes)
        if slots:
            kv.claim([ledger.pending(first + i, 256, arena=True) for i in range(len(slots))])
            assert kv.is_waiting_for_arena()

    def bring() -> None:
        """Rows of a parked tail follow the sealed pages; any others are refused."""
        at = data.draw(st.sampled_from([0, 1]))
        if kv.open:
            return
        rows = [ledger.pending(len(kv.codes) + at, data.draw(st.integers(1, 255)), arena=False)]
        if at:
            with pytest.raises(ValueError, match="do not follow"):
                kv.claim(rows)
            rows[0].release()
        else:
            kv.claim(rows)
            assert not kv.is_waiting_for_arena()

    def import_rows() -> None:
        """All rows of the first complete pending pages, and the rows that the next one has."""
        reach = kv.reach()
        for rows in kv.take_pending(lambda _: True):
            if page_start(rows.page) == reach:
                kv.append(ledger.slot())
                reach += rows.rows
            rows.release()
        session.frontier = min(reach, TOKENS - 1)

    def reopen() -> None:
        """A frontier inside the last sealed page: no row is written there."""
        if session.frontier < kv.sealed_tokens:
            assert not kv.open
            ledger.pins.subtract([kv.unseal_last()])
            session.frontier = kv.reach()

    acts = [compute, compute, seal, seal, park, cut, rebase, die, bring, import_rows]
    for act in data.draw(st.lists(st.sampled_from(acts), max_size=30)):
        act()
        ledger.check(session)
    ledger.give_back(session.cut(0))
    ledger.check(session)
    assert not ledger.slots
    assert not +ledger.pins
    assert not ledger.holds


def test_the_check_detects_invalid_tables() -> None:
    slot, ref = ArenaSlot(1, 1), PageRef(1, 1)
    rows = PendingRows(0, 1, ref, lambda: None)
    for break_it in (
        lambda kv: kv.codes.append(slot.code),
        lambda kv: (kv.sealed.append(ref), kv.codes.append(slot.code)),
        lambda kv: (kv.append(slot), setattr(kv, "pending", [rows])),
        lambda kv: setattr(kv, "pending", [rows._replace(page=1)]),
        lambda kv: (kv.append(slot), setattr(kv, "parked", ParkedTail(1, 3, ref))),
    ):
        kv = SessionKv()
        kv.check(0)
        break_it(kv)
        with pytest.raises(AssertionError):
            kv.check(0)
    with pytest.raises(AssertionError, match="has no page"):
        SessionKv().check(1)


def test_no_rows_are_pending_behind_an_open_page() -> None:
    kv, ledger = SessionKv(), Ledger()
    kv.append(ledger.slot())
    with pytest.raises(ValueError, match="do not follow"):
        kv.claim([ledger.pending(1, 20, arena=False)])
    kv.claim([])
    assert not kv.pending
