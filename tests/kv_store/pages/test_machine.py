"""The store against a simple model: random reserve, seal, publish, pin, evict, load, restart."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bench.processes.store_check import check_index, check_integrity
from kv_store.errors import StaleRef
from kv_store.keys import ROOT_KEY, chain_keys
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.allocator import NoRoom
from kv_store.pages.index import TRANSITIONS, Page, PageEvent, PageIndex, PageRef, PageState
from kv_store.pages.pool import Ticket
from kv_store.store import Store
from tests.support.kv_workload import (
    SALT,
    Lane,
    descriptor,
    evict,
    page_state,
    payload_of,
    read_page,
    scratch,
    tokens_of,
    wait_for_growth,
)
from tests.support.kv_workload import settings as store_settings

NAMES = st.integers(0, 5)  # timelines; those of one parity share their first page
PAGES = 3


def timeline(name: int) -> np.ndarray:
    ids = tokens_of(name, PAGES)
    ids[:PAGE_TOKENS] = tokens_of(1000 + name % 2, 1)
    return ids


class StoreMachine(RuleBasedStateMachine):
    """Model: which keys are published and not certainly evicted, and the pins of each holder."""

    def __init__(self) -> None:
        super().__init__()
        self.scratch = scratch()
        self.folder = next(self.scratch) / "store"
        self.incarnation = 0

    @initialize(pages=st.integers(3, 12), extent=st.integers(1, 4))
    def start(self, pages: int, extent: int) -> None:
        self.settings = store_settings(pages, extent)
        self.pages = pages
        self.known: dict[bytes, PageRef] = {}
        self.pins: dict[PageRef, int] = {}
        self.tickets: list[tuple[Ticket, bool]] = []  # and whether it is sealed
        self.open()

    def open(self) -> None:
        self.incarnation += 1
        self.store = Store.open(self.folder, descriptor(), self.settings)
        self.lane = Lane(self.store, 2, self.incarnation)
        self.keys = {
            name: chain_keys(timeline(name), self.store.pages.repr_id, SALT) for name in range(6)
        }

    @rule(name=NAMES, page=st.integers(0, PAGES - 1), priority=st.integers(0, 2))
    def seal(self, name: int, page: int, priority: int) -> None:
        wait_for_growth(self.store)
        parent = self.keys[name][page - 1] if page else ROOT_KEY
        ids = timeline(name)[page * PAGE_TOKENS : (page + 1) * PAGE_TOKENS]
        probe = self.store.pages.reserve(parent, ids, SALT, priority)
        if isinstance(probe, NoRoom):
            growing = probe is NoRoom.GROWING
            full = not self.store.stat()["pages_free"] and not evict(self.store, 1)
            assert growing or full, probe
            return
        self.store.pages.abort(probe)
        ticket = self.lane.seal(parent, ids, priority)
        assert ticket.key == self.keys[name][page]
        self.tickets.append((ticket, True))

    @precondition(lambda self: self.tickets)
    @rule(index=st.integers(0, 10), give_up=st.booleans())
    def end_ticket(self, index: int, give_up: bool) -> None:
        ticket, _ = self.tickets.pop(index % len(self.tickets))
        if give_up:
            self.store.pages.abort(ticket)
            return
        future = self.store.pages.publish(ticket)
        self.store.ledger.commit()
        ref = future.result(20)
        assert page_state(self.store, ref) is PageState.PUBLISHED
        self.known[ticket.key] = ref
        self.pins[ref] = self.pins.get(ref, 0) + 1

    @rule(name=NAMES, pin=st.booleans())
    def match(self, name: int, pin: bool) -> None:
        refs = self.store.pages.match_prefix(timeline(name), SALT, pin=True)
        good = self.store.pages.load(refs).result(20)
        assert all(good)
        for key, ref in zip(self.keys[name], refs, strict=False):
            assert self.known[key] == ref, "found a page that was never published"
            assert read_page(self.store, ref) == payload_of(key).tobytes(), "wrong KV"
            if pin:
                self.pins[ref] = self.pins.get(ref, 0) + 1
            else:
                self.store.pages.unpin(ref)

    @rule(name=NAMES, page=st.integers(0, PAGES - 1), n=st.sampled_from([1, 3, 100, 255]))
    def park(self, name: int, page: int, n: int) -> None:
        """Publish a tail that is not pinned."""
        wait_for_growth(self.store)
        parent = self.keys[name][page - 1] if page else ROOT_KEY
        ids = timeline(name)[page * PAGE_TOKENS : page * PAGE_TOKENS + n]
        probe = self.store.pages.reserve(parent, ids, SALT)
        if isinstance(probe, NoRoom):
            return
        self.store.pages.abort(probe)
        ref, key = self.lane.add(parent, ids)
        self.known[key] = ref
        self.store.pages.unpin(ref)

    @rule(name=NAMES, page=st.integers(0, PAGES - 1), n=st.integers(1, PAGE_TOKENS))
    def find_tail(self, name: int, page: int, n: int) -> None:
        parent = self.keys[name][page - 1] if page else ROOT_KEY
        ids = timeline(name)[page * PAGE_TOKENS : page * PAGE_TOKENS + n]
        ref = self.store.pages.find_tail(parent, ids, SALT, pin=True)
        if ref is None:
            return
        assert self.store.pages.load([ref]).result(20) == [True]
        key = self.store.pages.key_of(parent, ids[: self.store.pages.page_tokens(ref)], SALT)
        assert self.known[key] == ref, "found a tail that was never published"
        assert read_page(self.store, ref) == payload_of(key).tobytes(), "wrong KV"
        self.store.pages.unpin(ref)

    @rule()
    def scrub(self) -> None:
        found = self.store.pages.scrub_next().result(20)
        assert found is None or found.good

    @rule(everything=st.booleans())
    def look_after(self, everything: bool) -> None:
        if everything:
            report = self.store.pages.verify_all().result(20)
            assert (report.bad, report.good + report.gone) == (0, report.total)
        else:
            self.store.gc().result(20)
            assert not self.store.stat()["tails_superseded"]

    @precondition(lambda self: self.pins)
    @rule(index=st.integers(0, 20))
    def unpin(self, index: int) -> None:
        ref = list(self.pins)[index % len(self.pins)]
        self.store.pages.unpin(ref)
        self.pins[ref] -= 1
        if not self.pins[ref]:
            del self.pins[ref]

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        assert evict(self.store, count) <= count

    @rule(name=NAMES)
    def invalidate(self, name: int) -> None:
        for ref in self.store.pages.match_prefix(timeline(name), SALT)[:1]:
            self.store.pages.invalidate(ref)
            assert self.store.pages.match_prefix(timeline(name), SALT) == []

    @rule()
    def restart(self) -> None:
        for ticket, _ in self.tickets:
            self.store.pages.abort(ticket)
        self.lane.close()
        self.store.close()
        self.tickets, self.pins = [], {}
        self.open()

    @invariant()
    def audited(self) -> None:
        if not hasattr(self, "store"):
            return
        check_integrity(self.store)
        for ref, count in self.pins.items():
            page = self.store.pages.index.get(ref)  # a pinned page never loses its slot
            assert page.pins >= count
        numbers = self.store.stat()
        assert int(numbers["pages_total"]) <= self.pages

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.lane.close()
            self.store.close()
        self.scratch.close()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_only_transitions_of_the_table_exist() -> None:
    """Every (state, event) pair leads to the state of the table, or changes nothing."""
    for state, event in itertools.product(PageState, PageEvent):
        table = PageIndex()
        page = table.add_slot(0, 0)
        table._counts[PageState.FREE] -= 1
        table._counts[state] += 1
        page.state = state
        if state in (PageState.PUBLISHED, PageState.LISTED, PageState.LOADING):
            table._by_key[page.key] = page
            table._verified[0] = None
            table._link(page)
        target = TRANSITIONS[state].get(event)
        if target is None:
            with pytest.raises(StaleRef, match="cannot"):
                table.apply(page, event)
            assert page.state is state
        else:
            table.apply(page, event)
            assert page.state is target


@pytest.mark.parametrize("holder", ["pins", "writers"])
def test_a_held_slot_is_never_freed(holder: str) -> None:
    table = PageIndex()
    table.add_slot(0, 0)
    page = table.take_free()
    assert page is not None
    table.apply(page, PageEvent.RELEASE)
    setattr(page, holder, 1)
    with pytest.raises(StaleRef, match="still held"):
        table.apply(page, PageEvent.FREE)
    setattr(page, holder, 0)
    table.apply(page, PageEvent.FREE)
    assert page.gen == 1


def published(table: PageIndex, page_id: int, parent: bytes, priority: int = 0) -> Page:
    table.add_slot(page_id, 0)
    page = table.find(page_id)
    assert page is not None
    page.key, page.parent, page.priority = bytes([page_id + 1]) * 32, parent, priority
    table.apply(page, PageEvent.LIST)
    return page


def test_the_next_victim_equals_a_search_of_all_pages() -> None:
    """Lowest priority first, then least recently used; pages with children and pinned ones stay."""
    rng = np.random.default_rng(3)
    for _ in range(60):
        table, pages = PageIndex(), list[Page]()
        for page_id in range(14):
            parent = ROOT_KEY
            if pages and rng.integers(3):
                parent = pages[rng.integers(len(pages))].key
            pages.append(published(table, page_id, parent, int(rng.integers(3))))
        for _ in range(20):
            page = pages[rng.integers(len(pages))]
            match rng.integers(4):
                case 0:
                    table.touch(page, int(rng.integers(3)))
                case 1:
                    table.pin(page)
                case 2 if page.pins:
                    table.unpin(page)
                case _:
                    table.touch(page)
        while (victim := table.next_victim()) is not None:
            check_index(table)
            able = [
                page
                for page in pages
                if page.state is PageState.LISTED
                and not page.pins
                and not any(p.parent == page.key and p.state is PageState.LISTED for p in pages)
            ]
            assert victim is min(able, key=lambda page: (page.priority, page.lru_seq))
            table.apply(victim, PageEvent.RELEASE)
        for page in pages:  # the rest is pinned or has a pinned descendant
            if page.state is PageState.LISTED and not page.pins:
                assert any(p.parent == page.key and p.state is PageState.LISTED for p in pages)


def test_a_slot_whose_generations_are_exhausted_is_never_reused() -> None:
    table = PageIndex()
    table.add_slot(0, 0xFFFFFFFE)
    page = table.take_free()
    assert page is not None
    table.apply(page, PageEvent.RELEASE)
    table.apply(page, PageEvent.FREE)
    assert table.take_free() is None
    check_index(table)


def test_the_index_check_detects_inconsistent_pages() -> None:
    table = PageIndex()
    page = published(table, 0, ROOT_KEY)
    check_index(table)
    for name, value in {"pins": -1, "writers": 2, "state": PageState.FREE, "parent": b"x"}.items():
        good = getattr(page, name)
        setattr(page, name, value)
        with pytest.raises(AssertionError):
            check_index(table)
        setattr(page, name, good)
    check_index(table)
