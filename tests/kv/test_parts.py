"""Unit tests of the parts of a lane's KV: arenas of dead workers, slots, digests, touches."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchengine.kv.arenas import DeadArenas
from batchengine.kv.digests import REST_TICKS, DigestQueue
from batchengine.kv.importing import RowImporter
from batchengine.kv.slots import Seal, Slots
from batchengine.kv.touching import PageTouches
from batchengine.session import Event, Loss, Session
from batchengine.session_kv import PendingRows
from batchengine.wire.lane import FromArena
from kv_store.arenas.arena import Arena, ArenaSlot
from kv_store.layout import PAGE_TOKENS
from kv_store.pages.index import PageRef
from kv_store.store import Store
from tests.support import kv_scene
from tests.support.kv_workload import descriptor, settings

tmp_path = kv_scene.tmp_path
SLOTS = 4
SOURCE = FromArena("cpu.9", 0, 0, 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store.open(tmp_path / "store", descriptor(), settings())
    yield made
    made.close()


@pytest.fixture
def arena(store: Store) -> Arena:
    return store.create_arena("cpu", 1, SLOTS)


@pytest.fixture
def slots(store: Store, arena: Arena) -> Iterator[Slots]:
    made = Slots(store)
    made.attach(arena)
    yield made
    lost = made.lose_arena()
    if lost is not None:
        lost.arena.close(delete=True)


def member(slots: Slots, key: int, tokens: int) -> Session:
    """A waiting session that has computed so many tokens."""
    session = Session(key, f"s{key}", "")
    session.tokens = list(range(tokens + 1))
    session.on(Event.START)
    slots.enter(session)
    assert slots.ensure(session, tokens)
    session.frontier = tokens
    slots.make_reclaimable(session)
    return session


def seal_of(slots: Slots, session: Session) -> Seal:
    """A seal of the first open page that waits for a ticket."""
    assert slots.arena is not None
    slot = session.kv.open[0]
    seal = slots.seals[slot] = Seal(session, 0, slot, slots.arena, b"", b"")
    return seal


# ------------------------------------------------------------------------------ dead arenas


def test_a_dead_arena_is_deleted_when_its_last_holder_releases_it(arena: Arena) -> None:
    arenas = DeadArenas()
    first, second = arenas.hold(arena), arenas.hold(arena)
    arenas.retire(arena)
    first()
    first()
    assert arenas.dead == [arena], "the second call of one holder counts for nothing"
    assert Path(arena.path).exists()
    second()
    assert not arenas
    assert not Path(arena.path).exists()


def test_an_arena_without_a_holder_is_deleted_when_its_worker_dies(arena: Arena) -> None:
    arenas = DeadArenas()
    arenas.hold(arena)()
    assert Path(arena.path).exists(), "its worker is up"
    arenas.retire(arena)
    assert not Path(arena.path).exists()


# ------------------------------------------------------------------------------ slots


def test_slots_of_the_oldest_session_are_reclaimed_and_reported(slots: Slots) -> None:
    old, young = member(slots, 1, 2 * PAGE_TOKENS), member(slots, 2, 2 * PAGE_TOKENS)
    assert slots.available == SLOTS
    third = member(slots, 3, 1)
    assert len(third.kv.open) == 1
    assert not old.kv.open
    assert old.loss is Loss.RECLAIMED
    assert len(young.kv.open) == 2
    assert slots.take_changed() == [old]
    assert not slots.take_changed()


def test_a_slot_with_a_ticket_is_not_reclaimed(slots: Slots) -> None:
    session = member(slots, 1, 2 * PAGE_TOKENS)
    seal = seal_of(slots, session)
    slots.truncate(session, 0)
    assert seal.slot not in slots.seals, "without a ticket the seal is over"
    assert slots.available == SLOTS
    again = member(slots, 2, PAGE_TOKENS)
    seal = seal_of(slots, again)
    seal.ticket = object()  # type: ignore[assignment]
    slots.truncate(again, 0)
    assert slots.seals == {seal.slot: seal}
    assert seal.session is None
    assert slots.available == SLOTS - 1


def test_a_lost_arena_gives_the_epoch_of_every_slot(slots: Slots) -> None:
    session = member(slots, 1, PAGE_TOKENS + 1)
    session.epoch = 7
    slots.fit(session)
    held = list(session.kv.open)
    assert slots.is_relabeling(session) is False, "not sent: the first frame reserves them"
    lost = slots.lose_arena()
    assert lost is not None
    assert lost.epochs == dict.fromkeys(held, 7)
    assert not slots.is_attached
    assert not slots.ensure(session, 3 * PAGE_TOKENS)
    slots.attach(lost.arena)


def test_labels_are_under_way_until_their_own_frame_is_answered(slots: Slots) -> None:
    """Two frames may be in flight: the answer to one says nothing of the other."""
    session, other = member(slots, 1, 10), member(slots, 2, 10)
    (slot,), (freed,) = session.kv.open, other.kv.open
    slots.take_labels()
    session.epoch = 2
    slots.fit(session)
    slots.truncate(other, 0)
    assert not slots.is_reserved(slot)
    slots.take_labels()
    slots.labeled()
    assert slots.is_reserved(slot)
    assert (slots.is_relabeling(session), slots.is_poisoning) == (True, True)
    slots.labeled()
    assert (slots.is_relabeling(session), slots.is_poisoning) == (False, False)
    assert slots.frames == 2
    assert slots.take() == ArenaSlot(freed.slot, freed.gen + 1)


def test_pages_from_the_frontier_on_are_given_back(slots: Slots, arena: Arena) -> None:
    session = member(slots, 1, PAGE_TOKENS)
    assert slots.ensure(session, PAGE_TOKENS + 1)
    assert (len(session.kv.open), arena.n_free) == (2, SLOTS - 2)
    slots.trim(session)
    assert (len(session.kv.open), arena.n_free) == (1, SLOTS - 1)
    assert session.frontier == PAGE_TOKENS
    slots.trim(session)
    assert len(session.kv.open) == 1


# ------------------------------------------------------------------------------ digests


def test_a_tail_is_digested_after_its_session_was_idle(slots: Slots) -> None:
    digests, session = DigestQueue(slots), member(slots, 1, 10)
    session.on(Event.FINISH)
    assert [digests.tick() for _ in range(REST_TICKS)] == [*[[]] * (REST_TICKS - 1), [session]]
    assert digests.add_tail(session)
    assert digests
    (due,) = digests.take()
    assert due == (session, 0, 10, session.kv.open[0])
    assert not digests


def test_a_tail_that_could_not_be_parked_is_tried_again(slots: Slots) -> None:
    """As while an earlier tail of its slot is being sealed: ever less often."""
    digests, session = DigestQueue(slots), member(slots, 1, 10)
    session.on(Event.FINISH)
    tries = [tick for tick in range(1, 10 * REST_TICKS) if digests.tick()]
    assert tries == [REST_TICKS, 2 * REST_TICKS, 4 * REST_TICKS, 8 * REST_TICKS]


def test_a_tail_whose_session_runs_again_is_not_digested(slots: Slots) -> None:
    digests, session = DigestQueue(slots), member(slots, 1, 10)
    assert digests.add_tail(session)
    session.on(Event.ADMIT)
    assert not digests.take()


# ------------------------------------------------------------------------------ importing


@pytest.mark.parametrize("change", ["rows", "epoch", "frozen", "moved"])
def test_an_import_whose_session_no_longer_waits_is_ended(
    store: Store, slots: Slots, change: str
) -> None:
    arenas, released = DeadArenas(), list[int]()
    digests = DigestQueue(slots)
    importer = RowImporter(store, slots, digests, arenas, lambda: None)
    session = Session(1, "s", "")
    session.tokens = list(range(300))
    session.on(Event.START)
    session.on(Event.ADMIT)
    slots.enter(session)
    slots.claim_pending(session, [PendingRows(0, 20, SOURCE, lambda: released.append(0))])
    assert importer.has_chores
    messages, tokens, row_imports = importer.take_imports()
    assert [message.rows for message in messages] == [20]
    assert len(tokens) == 20 * 4
    assert slots.available == SLOTS - 1
    if change == "rows":
        slots.drop_pending(session)
    elif change == "epoch":
        session.epoch += 1
    elif change == "frozen":
        session.on(Event.FREEZE)
    else:
        slots.detach(session)
    assert importer.has_chores, "a slot is to be poisoned"
    importer.arrived(row_imports, [20])
    assert not importer.imports
    assert not session.kv.open
    assert slots.available == SLOTS
    assert released == [0] * (change == "rows")


def test_imported_rows_enter_the_page_table(store: Store, slots: Slots) -> None:
    importer = RowImporter(store, slots, DigestQueue(slots), DeadArenas(), lambda: None)
    session = Session(1, "s", "")
    session.tokens = list(range(300))
    session.on(Event.START)
    session.on(Event.ADMIT)
    slots.enter(session)
    slots.claim_pending(session, [PendingRows(0, 20, SOURCE, lambda: None)])
    _, _, row_imports = importer.take_imports()
    importer.arrived(row_imports, [15])
    assert session.frontier == importer.rows_imported == 15
    assert len(session.kv.open) == 1
    assert slots.take_changed() == [session]
    assert not importer.has_chores


def test_a_parked_tail_concerns_the_steps_only_while_its_session_has_a_seat(
    store: Store, slots: Slots
) -> None:
    importer = RowImporter(store, slots, DigestQueue(slots), DeadArenas(), lambda: None)
    parked = list[Session]()
    for key in range(100):
        session = Session(key, f"s{key}", "")
        session.tokens = list(range(300))
        slots.enter(session)
        tail = PendingRows(0, 20, PageRef(key, 1), lambda: None)
        slots.claim_pending(session, [tail])
        parked.append(session)
    assert not importer.has_chores
    assert not slots.members_pending(), "the next steps look at none of them"
    seated = parked[50]
    seated.on(Event.START)
    slots.protect(seated)
    assert not importer.has_chores, "it waits for a seat"
    seated.on(Event.ADMIT)
    slots.protect(seated)
    assert importer.has_chores
    assert slots.members_pending() == [seated]
    seated.on(Event.PREEMPT)
    assert not slots.members_pending()


# ------------------------------------------------------------------------------ touches


def test_a_touch_ends_with_its_last_page_or_with_the_worker() -> None:
    async def scene() -> None:
        touches = PageTouches(32 << 20, lambda: None)  # two pages of a frame
        three, none = touches.touch([1, 2, 3]), touches.touch([])
        codes, owners = touches.take()
        assert codes == [1, 2]
        touches.touched(owners)
        assert not three.done()
        codes, owners = touches.take()
        assert codes == [3]
        assert not touches
        touches.touched(owners)
        assert three.done()
        assert none.done()
        dead = touches.touch([4])
        touches.arena_died()
        assert dead.done()
        assert not touches

    asyncio.run(scene())
