"""The table of a link's states under a simulated clock."""

from __future__ import annotations

import random
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine.peers.transitions import (
    BACKOFF_MAX_S,
    BACKOFF_MIN_S,
    DOWN_S,
    REFUSED_RETRY_S,
    STEADY_S,
    SUSPECT_S,
    TABLE,
    TICK_S,
    Effect,
    LinkEvent,
    LinkMachine,
    LinkState,
)

S, E = LinkState, LinkEvent


def test_a_link_that_is_lost_as_soon_as_it_is_up_is_dialled_ever_more_rarely() -> None:
    run = Run()
    dials = list[float]()
    for _ in range(200):
        run.wait(TICK_S)
        if run.machine.state is S.DIALLING:
            dials.append(run.now)
            run.on(E.CONNECTED, E.ACCEPTED)
            run.on(E.LOST)
    assert 5 <= len(dials) <= 12, "in 20 s"


def test_a_side_that_does_not_dial_says_so() -> None:
    assert Run().machine.why == "not connected yet"
    assert Run(dials=False).machine.why == "not connected yet: the other side dials"


class Run:
    """One machine and a clock that only `wait` moves."""

    def __init__(self, *, dials: bool = True, seed: int = 1) -> None:
        self.now = 100.0
        self.machine = LinkMachine(dials=dials, rng=random.Random(seed), now=self.now)
        self.effects: list[Effect] = []

    def on(self, *events: LinkEvent, why: str = "") -> LinkState:
        for event in events:
            self.effects += self.machine.on(event, self.now, why)
        return self.machine.state

    def wait(self, seconds: float, *, heard_every: float | None = None) -> list[float]:
        """Tick for so long; returns the times from the start at which the state changed."""
        began, changes, heard = self.now, list[float](), self.now
        while self.now < began + seconds - 1e-9:
            self.now += TICK_S
            if heard_every is not None and self.now - heard >= heard_every:
                heard = self.now
                self.on(E.HEARD)
            before = self.machine.state
            event = self.machine.tick(self.now)
            if event is not None:
                self.on(event)
            if self.machine.state is not before:
                changes.append(self.now - began)
        return changes

    def up(self) -> Run:
        self.wait(TICK_S)
        assert self.on(E.CONNECTED, E.ACCEPTED) is S.UP
        return self


def test_the_side_that_dials_comes_up() -> None:
    run = Run()
    run.wait(TICK_S)
    assert run.machine.state is S.DIALLING
    assert run.effects == [Effect.DIAL]
    assert run.on(E.CONNECTED) is S.GREETING
    assert run.effects == [Effect.DIAL, Effect.GREET]
    assert run.on(E.ACCEPTED) is S.UP
    assert run.machine.why == ""


def test_the_side_that_accepts_never_dials() -> None:
    run = Run(dials=False)
    assert run.wait(60.0) == []
    assert run.on(E.CONNECTED, E.ACCEPTED) is S.UP
    assert run.on(E.LOST, why="gone") is S.DOWN
    assert run.wait(60.0) == []
    assert run.machine.why == "gone"
    assert Effect.DIAL not in run.effects


def test_silence_is_suspect_then_down() -> None:
    run = Run().up()
    suspect, down, *_ = run.wait(DOWN_S + 0.05)
    assert SUSPECT_S - 1e-6 <= suspect <= SUSPECT_S + TICK_S + 1e-6
    assert DOWN_S - 1e-6 <= down <= DOWN_S + TICK_S + 1e-6
    assert Effect.CLOSE in run.effects


def test_a_peer_that_is_heard_stays_up() -> None:
    run = Run().up()
    assert run.wait(30.0, heard_every=0.9) == []
    run.wait(SUSPECT_S + TICK_S)
    assert run.machine.state is S.SUSPECT
    assert run.on(E.HEARD) is S.UP


def test_a_greeting_that_does_not_come_ends() -> None:
    run = Run()
    run.wait(TICK_S)
    run.on(E.CONNECTED)
    assert run.wait(DOWN_S + TICK_S)[0] <= DOWN_S + TICK_S
    assert run.machine.state is not S.GREETING


def test_time_in_which_this_process_stood_still_is_not_silence() -> None:
    run = Run().up()
    run.now += 60.0
    assert run.machine.tick(run.now) is None
    suspect, *_ = run.wait(2.0)
    assert suspect >= SUSPECT_S - 3 * TICK_S


def test_retries_back_off_and_begin_again_after_success() -> None:
    run = Run()
    times: list[float] = []
    while len(times) < 12:
        run.wait(TICK_S)
        if run.machine.state is S.DIALLING:
            times.append(run.now)
            run.on(E.LOST, why="refused")
    gaps = [b - a for a, b in pairwise(times)]
    assert gaps[0] <= BACKOFF_MIN_S + 2 * TICK_S
    assert all(gap <= BACKOFF_MAX_S + 2 * TICK_S for gap in gaps)
    assert all(gap >= BACKOFF_MAX_S / 2 for gap in gaps[-4:])
    assert len({round(gap, 6) for gap in gaps[-4:]}) > 1, "with jitter"
    run.wait(BACKOFF_MAX_S + TICK_S)
    run.on(E.CONNECTED, E.ACCEPTED)
    run.wait(STEADY_S + TICK_S, heard_every=TICK_S)
    run.on(E.LOST)
    assert run.wait(3 * TICK_S), "a link that was up is dialled again at once"


def test_a_refused_link_rests() -> None:
    run = Run()
    run.wait(TICK_S)
    assert run.on(E.CONNECTED, E.REFUSED, why="arith_id differs") is S.REFUSED
    assert run.effects[-1] is Effect.CLOSE
    assert run.on(E.LOST, why="it closed the connection") is S.REFUSED
    assert run.machine.why == "arith_id differs"
    assert run.wait(REFUSED_RETRY_S - 2 * TICK_S) == []
    run.wait(3 * TICK_S)
    assert run.machine.state is S.DIALLING


def test_a_new_connection_replaces_the_old_one() -> None:
    run = Run(dials=False)
    run.on(E.CONNECTED, E.ACCEPTED)
    del run.effects[:]
    assert run.on(E.CONNECTED) is S.GREETING
    assert run.effects == [Effect.CLOSE, Effect.GREET]


def test_every_state_can_be_left_and_reached() -> None:
    assert {state for state, _ in TABLE} == set(S)
    assert {state for state, _ in TABLE.values()} == set(S)
    assert {event for _, event in TABLE} == set(E)
    for (state, event), (after, effects) in TABLE.items():
        assert (Effect.DIAL in effects) == (event is E.RETRY), (state, event)
        assert (Effect.GREET in effects) == (event is E.CONNECTED), (state, event)
        if event is E.LOST:
            assert after is S.DOWN
    for state, event in product(S, (E.LOST, E.SILENT)):
        if state.is_open and event is E.LOST:
            assert (state, event) in TABLE


def act(run: Run, action: LinkEvent | float) -> None:
    """An event, or a wait of so many seconds."""
    if isinstance(action, LinkEvent):
        run.on(action, why="why")
    else:
        run.wait(action)


actions = st.lists(st.sampled_from(list(E)) | st.floats(0.1, 4.0), max_size=40)


@given(actions, st.booleans(), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_any_history_keeps_the_rules(
    history: list[LinkEvent | float], dials: bool, seed: int
) -> None:
    run, twin = Run(dials=dials, seed=seed), Run(dials=dials, seed=seed)
    for action in history:
        before = run.machine.state
        act(run, action)
        act(twin, action)
        state = run.machine.state
        assert (state, run.machine.since, run.machine.why) == (
            twin.machine.state, twin.machine.since, twin.machine.why,
        )  # fmt: skip
        if action is E.ACCEPTED and state is S.UP:
            assert before in (S.GREETING, S.UP)
        if state is not S.UP:
            assert run.machine.why, "a link that is not up says why"
    if dials:
        run.wait(REFUSED_RETRY_S + BACKOFF_MAX_S + DOWN_S + 1.0)
        assert Effect.DIAL in run.effects
        assert run.machine.state is S.DIALLING, "without a peer it dials, whatever happened before"
