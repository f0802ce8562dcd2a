"""Unit tests of sessions and streams: transitions, timelines, bounded events."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchengine import errors
from batchengine.core import (
    DoneEvent,
    ErrorEvent,
    QueuedEvent,
    TokenEvent,
    Usage,
)
from batchengine.engine.turns.stream import EVENTS_MAX, EVENTS_RESUME, Generation
from batchengine.engine.turns.turn import Turn
from batchengine.policy.scheduler import TurnRow
from batchengine.session import (
    COMPARED_AT_ONCE,
    TRANSITIONS,
    Event,
    IllegalTransition,
    Session,
    State,
    common_prefix,
)
from batchengine.text.detokeniser import Detokeniser
from kv_store.keys import chain_keys
from kv_store.layout import PAGE_TOKENS
from tests.support.engines import read, request

few = st.lists(st.integers(0, 2), max_size=40)


@given(few, few)
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


def test_common_prefix_of_long_lists_is_exact_around_every_slice() -> None:
    whole = list(range(3 * COMPARED_AT_ONCE))
    cuts = {0, 1, len(whole) - 1}
    cuts |= {n * COMPARED_AT_ONCE + by for n in (1, 2) for by in (-1, 0, 1)}
    for cut in cuts:
        assert common_prefix(whole, [*whole[:cut], -1, *whole[cut + 1 :]]) == cut
    assert common_prefix(whole, [*whole, 7]) == common_prefix(whole, list(whole)) == len(whole)


class Token(int):
    """A token that counts how often tokens are compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Token.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def known(tokens: list[int], pages: int) -> Session:
    """A session with this timeline, which knows the content keys of its first pages."""
    session = Session(1, "s", "t")
    session.tokens = tokens
    session.kv.keys = chain_keys(tokens[: pages * PAGE_TOKENS], b"repr", b"t")
    return session


@given(st.integers(0, 1100), st.integers(0, 1100), st.integers(0, 4), st.integers(0, 4))
def test_the_common_prefix_is_the_same_with_content_keys(
    cut: int, length: int, pages: int, asked: int
) -> None:
    """Wherever the timelines part, and however many keys either side knows."""
    whole = list(range(1100))
    prompt = [*whole[:cut], *(9 for _ in whole[cut:])][:length]
    keys = chain_keys(prompt, b"repr", b"t")[:asked]
    session = known(whole, pages)
    assert session.common(prompt, keys) == common_prefix(whole, prompt)


def test_a_prompt_is_compared_with_many_long_timelines_page_by_page() -> None:
    """16 of 100,000 tokens held the event loop for 20 ms and more, token by token."""
    pages, last = 100, 99 * PAGE_TOKENS
    whole = list(range(pages * PAGE_TOKENS))
    prompt = list(map(Token, whole))
    keys = chain_keys(prompt, b"repr", b"t")
    for number in range(16):
        cut = last - number
        session = known([*whole[:cut], *(9 for _ in whole[cut:])], pages)
        Token.compared = 0
        assert session.common(prompt, keys) == cut
        assert 0 < Token.compared <= 2 * PAGE_TOKENS


@given(few, few.filter(bool), st.integers(0, 40))
def test_rebase_keeps_a_token_to_compute(old: list[int], new: list[int], frontier: int) -> None:
    session = Session(1, "s", "")
    session.tokens = list(old)
    session.frontier = min(frontier, len(old))
    shared = session.rebase(new)
    assert session.tokens == new
    assert session.frontier <= min(shared, len(new) - 1, frontier)
    assert session.to_compute >= 1


def test_states_change_by_the_table_only() -> None:
    for state in State:
        for event in Event:
            session = Session(1, "s", "")
            session.state = state
            if event in TRANSITIONS[state]:
                session.on(event)
                assert session.state is TRANSITIONS[state][event]
            else:
                with pytest.raises(IllegalTransition, match=event.name):
                    session.on(event)
                assert session.state is state


def test_repr_is_the_status_line() -> None:
    session = Session(1, "7f3a", "")
    session.tokens = [1, 2, 3]
    assert repr(session) == "<Session 7f3a IDLE frontier=0/3 pages=0 sealed=0 epoch=1>"


def generation(
    stop: tuple[str, ...] = (), calls: list[str] | None = None, pieces: list[bytes] | None = None
) -> Generation:
    calls = [] if calls is None else calls
    pieces = pieces or [b"a", b"b", b"c"]
    return Generation(
        request([1], 10, stop=stop),
        "s",
        lambda: Detokeniser(pieces.__getitem__, lambda _: False),
        0.0,
        lambda _: calls.append("cancel"),
        lambda _: calls.append("room"),
    )


def done(text: str = "") -> DoneEvent:
    return DoneEvent("stop", Usage(), text)


async def test_tokens_wait_for_the_turn_to_be_durable() -> None:
    g = generation()
    g.push(QueuedEvent(1, None))
    g.add_token(0, None, ())
    assert await g.events() == [QueuedEvent(1, None)]
    waiting = asyncio.ensure_future(g.events())
    await asyncio.sleep(0)
    assert not waiting.done()
    g.release()
    assert [type(e) for e in await waiting] == [TokenEvent]
    g.end(done())
    g.end(done("twice"))
    assert await g.events() == [done()]
    assert await g.events() == []


async def test_an_end_sends_held_tokens_and_an_error_drops_them() -> None:
    """A turn that ends without an error is durable and sent whole; one that fails before its
    commit is not."""

    g = generation()
    g.add_token(1, None, ())
    g.end(done())
    assert [type(e) for e in await g.events()] == [TokenEvent, DoneEvent]
    g = generation()
    g.add_token(1, None, ())
    g.fail(errors.STEP_MISMATCH(what="digests"))
    assert [type(e) for e in await g.events()] == [ErrorEvent]


async def test_the_time_per_token_counts_what_this_stream_computed() -> None:
    """A resumed turn sends the tokens of the earlier stream again, which took no time."""
    g = generation()
    assert await g.replay([0, 1, 2, 0], frozenset()) == ""
    assert g.tpot_ms is None
    g.completion_tokens += 5
    g.first_token_ms, g.last_token_ms = 600.0, 700.0
    assert (g.completion_tokens, g.tpot_ms) == (9, 25.0)


def test_a_turn_is_one_row_of_the_scheduler() -> None:
    """`Turn.row` fills the fields by position."""
    turn = Turn(Session(7, "s", ""), generation(), horizon_ms=3.0, tpot_ms=4.0, now_ms=5.0)
    turn.session.tokens, turn.session.frontier, turn.admitted_ms = [1, 2, 3], 1, 6.0
    turn.paused = turn.session.suspect = True
    row = turn.row(running=False, evictable=8)
    assert row is turn.row(running=False)
    assert row == TurnRow(
        rank=1, deadline_ms=3.0, key=7, horizon_ms=3.0, tpot_ms=4.0, served_ms=5.0,
        admitted_ms=6.0, frontier=1, to_compute=2, open_until=0, pages_held=0, pages_max=1,
        slots_held=0, running=False, paused=True, suspect=True, pages_evictable=8,
    )  # fmt: skip


async def test_an_abort_ends_the_reader_and_the_computation() -> None:
    calls: list[str] = []
    g = generation(calls=calls)
    g.abort(errors.STEP_MISMATCH(what="digests"))
    assert [type(e) for e in await g.events()] == [ErrorEvent]
    assert calls == ["cancel"]


async def test_text_has_whole_characters_and_no_stop_strings() -> None:
    g = generation(("cb",), pieces=[b"\xe2\x82", b"\xac", b"c", b"b"])
    g.release()
    assert [g.add_token(t, None, ()) for t in (0, 1, 2, 2, 3)] == [False] * 4 + [True]
    g.end(done(g.rest(True)))
    answer = await read(g)
    assert answer.text == "€c"
    assert [e.text for e in answer.events[:-1]] == ["", "€", "", "c", ""]
    cut = generation(("cb",), pieces=[b"\xe2\x82", b"c"])
    cut.release()
    assert cut.add_token(1, None, ()) is False
    assert cut.rest(False) == "c"  # held back, but not a stop string


async def test_cancel_is_idempotent_and_sends_no_event() -> None:
    calls: list[str] = []
    g = generation(calls=calls)
    g.release()
    g.add_token(0, None, ())
    waiting = asyncio.ensure_future(read(g))
    g.cancel()
    g.cancel()
    g.add_token(1, None, ())
    g.end(done())
    assert (await waiting).events == []
    assert calls == ["cancel"]
    after = generation(calls=calls)
    after.end(done())
    after.cancel()
    assert calls == ["cancel"], "the engine is not told about what it has finished"


async def test_the_buffer_is_bounded_and_new_room_is_reported() -> None:
    calls: list[str] = []
    g = generation(calls=calls)
    g.release()
    for _ in range(EVENTS_MAX):
        assert not g.full
        g.add_token(0, None, ())
    assert g.full
    g.paused_since_ms = 1.0
    for _ in range(EVENTS_MAX - EVENTS_RESUME - 1):
        await g.__anext__()
    assert calls == []
    await g.__anext__()
    assert calls == ["room"]


async def test_a_stream_has_one_reader() -> None:
    g = generation()
    first = asyncio.ensure_future(g.events())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="one reader"):
        await g.events()
    g.end(done())
    assert await first == [done()]
