"""Faults of a simulated world: kinds, rates, and the errors that each explains."""

from __future__ import annotations

import random

from tests.simulation.seams import Tape

# Chance of each kind of fault per occasion, if the seed has this kind.
FAULTS = {
    "die": 0.02,  # per step of a worker, at one of POINTS
    "hang": 0.002,
    "nan": 0.004,
    "twice": 0.02,  # an answer arrives twice
    "slow": 0.02,  # a step takes a hundred times as long
    "full": 0.03,  # per write of a page
    "io": 0.02,  # per read or write of a page
    "stuck": 0.02,  # a store thread pauses
    "disk": 0.3,  # per read or write of a page: it is slow
    "bad": 0.5,  # per second: a page of the store is found invalid
    "evict": 2.0,  # per second: the store is full and evicts pages of idle sessions
    "ledger": 0.01,  # per commit: no room
    "kill": 0.25,  # per second: a worker, from outside
    "crash": 0.08,  # per second: the engine
    "point": 0.10,  # per point of a hand-over: one of the above, or a delay
}
# In a part of the seeds engines die often and the disk is slow: sessions are moved and cut, and
# pages are evicted, while pages are being read.
COLD = {"crash": 1.0, "disk": 0.7, "evict": 6.0, "bad": 1.0}
# Between daemons; chosen as above.
LINK_FAULTS = {
    "cut": 0.5,  # per second: a direction between two daemons, or both, carries nothing for a while
    "reset": 0.5,  # per second: a connection
    "vanish": 0.3,  # per second: one end of a connection; the other one hears nothing
    "far": 0.3,  # per second: everything takes a hundred times as long, for a while
    "mute": 0.01,  # per question for pages: no answer
    "refuse": 0.01,
    "late": 0.05,  # per note to a worker: it is busy
    "lie": 0.02,  # per frame of a daemon that does not keep to the protocol
    "flip": 0.1,  # per part of a page of a daemon that sends other bytes
}
# Errors that a client may get, and the faults that explain them.
EXPLAINED: dict[str, tuple[str, ...]] = {
    "numeric_fault": ("nan",),
    "session_quarantined": ("die", "hang", "point"),
    "durability_unavailable": ("ledger", "full"),
    "client_too_slow": ("slow",),
    "overloaded": (),
    "rate_limit_exceeded": (),
    "lane_down": ("die", "hang", "kill", "point", "full", "io"),
    "cancelled_at_a_point": ("point",),
    "context_length_exceeded": (),
    "kv_too_small": (),
    "kv_full": (),
}


def choose(tape: Tape) -> tuple[bool, dict[str, float]]:
    """Whether the seed is a cold one, and the chance of each kind of fault that it has.

    Half of the kinds, each with its own rate: a failure among few kinds is easier to diagnose.
    """
    chosen = _draw(tape("faults"), FAULTS)
    is_cold = tape("cold").random() < 0.25
    return is_cold, chosen | COLD if is_cold else chosen


def choose_of_links(tape: Tape) -> dict[str, float]:
    """The chance of each kind of fault between daemons that the seed has; a quarter has none."""
    rng = tape("link faults")
    return {} if rng.random() < 0.25 else _draw(rng, LINK_FAULTS)


def _draw(rng: random.Random, kinds: dict[str, float]) -> dict[str, float]:
    return {
        kind: chance * rng.choice([0.3, 1.0, 3.0])
        for kind, chance in kinds.items()
        if rng.random() < 0.5
    }
