"""States of a pipeline: whatever order the parts of its stages come in, the files are right, and
what does not fit is refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import xxhash

from batchengine.lanes.pipeline.gather import BadTile, GatherPart
from batchengine.lanes.pipeline.states import StageStates, StateGather
from batchengine.wire import lane as wire
from batchengine.wire.data import STATE_PART_BYTES, StatePart
from kv_store.states import state_name

STATE_BYTES = 5 * 64
CUTS = (0, 64, 64, 256, STATE_BYTES)  # bytes of four stages, of which one has no recurrent layer
PARTS = tuple(
    GatherPart(link, link, link + 1, first, end)
    for link, (first, end) in enumerate(itertools.pairwise(CUTS))
)
NAME = state_name(bytes(32), bytes(32))
Act = Callable[[StateGather], object]


def filled(stage: StageStates, position: int, seed: int) -> None:
    """Write to the state at a wanted position what a computation might."""
    rng = np.random.default_rng(seed)
    for _, part in stage.parts(position):
        part[:] = rng.bytes(len(part))


def part_of(position: int, offset: int, data: bytes) -> StatePart:
    return StatePart(1, position, offset, xxhash.xxh3_128_digest(data))


class Files:
    """What a worker was asked to save."""

    def __init__(self) -> None:
        self.saved: list[tuple[str, int, bytes]] = []
        self.is_full = False

    def save(self, name: str, seed: int, state: memoryview) -> bool:
        self.saved.append((name, seed, bytes(state)))
        return not self.is_full


@pytest.mark.parametrize("seed", range(6))
def test_states_are_put_together_in_any_order(seed: int) -> None:
    """Stages run ahead of each other, and frames are doubled."""
    rng, files, counts = random.Random(seed), Files(), Counter[str]()
    gather = StateGather(PARTS, STATE_BYTES, files.save, counts)
    stages = [StageStates(*of, interval=512, n_tokens=1280) for of in itertools.pairwise(CUTS)]
    expected = dict[int, bytes]()
    sent: list[list[tuple[StatePart, bytes]]] = [[] for _ in stages]
    for position in (512, 1024, 1280):
        gather.accept(wire.GatherState(1, position, NAME if position != 1024 else "", position))
        whole = bytearray(STATE_BYTES)
        for link, stage in enumerate(stages):
            filled(stage, position, position + link)
            for offset, data in stage.parts(position):
                whole[offset : offset + len(data)] = data
                sent[link].append((part_of(position, offset, bytes(data)), bytes(data)))
        expected[position] = bytes(whole)
    doubled = 0
    while any(sent):
        link = rng.choice([link for link, parts in enumerate(sent) if parts])
        part, data = sent[link].pop(0)
        gather.take(link, part, data)
        if rng.random() < 0.3:
            assert not gather.take(link, part, data)
            doubled += 1
    assert gather.complete == 3
    assert sorted(files.saved) == sorted((NAME, at, expected[at]) for at in (512, 1280))
    assert counts["duplicate"] == doubled


@pytest.mark.parametrize("end", [64, 192])
def test_a_stage_keeps_what_is_sent_and_reads_what_it_has_written(end: int) -> None:
    stage = StageStates(64, end, interval=512, n_tokens=1280)
    assert [stage.next_wanted(at) for at in (0, 511, 512, 1100)] == [512, 512, 1024, 1280]
    ends = (100, 200, 512, 600, 1024, 1280)
    pairs = [stage.chunk(end)[0].tolist() for end in ends]
    assert [pair[0] for pair in pairs] == [0, *(pair[1] for pair in pairs[:-1])]
    assert all(read != written for read, written in pairs)
    kept = [pair[1] for pair, end in zip(pairs, ends, strict=True) if stage.is_wanted(end)]
    others = [pair[1] for pair, end in zip(pairs, ends, strict=True) if not stage.is_wanted(end)]
    assert len(kept) == 3 == len(set(kept))
    assert not set(kept) & set(others)


def test_a_large_state_is_sent_in_parts() -> None:
    size = STATE_PART_BYTES + 64
    stage, files = StageStates(0, size, interval=256, n_tokens=256), Files()
    gather = StateGather([GatherPart(0, 0, 1, 0, size)], size, files.save, Counter())
    gather.accept(wire.GatherState(1, 256, NAME, 5))
    filled(stage, 256, 1)
    parts = list(stage.parts(256))
    assert [len(data) for _, data in parts] == [STATE_PART_BYTES, 64]
    done = [gather.take(0, part_of(256, at, bytes(data)), bytes(data)) for at, data in parts]
    assert done == [False, True]
    assert files.saved == [(NAME, 5, b"".join(bytes(data) for _, data in parts))]


def take(
    offset: int, n: int, *, position: int = 512, link: int = 1
) -> Callable[[StateGather], object]:
    data = bytes(n)
    return lambda gather: gather.take(link, part_of(position, offset, data), data)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (take(0, 64), "does not compute it"),  # of another stage's bytes
        (take(STATE_BYTES, 64), "does not compute it"),
        (take(-64, 64), "does not compute it"),
        (take(64, 64, link=2), "does not compute it"),
        (take(64, 64, position=1024), "was not named"),
        (take(128, 64), "do not follow"),
        (take(64, 256), "do not follow"),  # into the next stage's
        (take(64, 0), "differ from their digest"),
        (take(64, STATE_PART_BYTES + 1), "differ from their digest"),
        (lambda g: g.take(1, StatePart(1, 512, 64, bytes(16)), bytes(64)), "differ from"),
        (lambda g: g.accept(wire.GatherState(1, 512, NAME, 1)), "does not follow"),
        (lambda g: g.accept(wire.GatherState(1, 300, NAME, 1)), "does not follow"),
        (lambda g: g.accept(wire.GatherState(1, 600, "../../x", 1)), "not named like"),
    ],
)
def test_what_does_not_fit_is_refused(act: Act, why: str) -> None:
    files = Files()
    parts = [GatherPart(of.link, of.first, of.end, of.state_first, of.state_end) for of in PARTS]
    parts[1:3] = [GatherPart(1, 1, 3, 64, 256)]
    gather = StateGather(parts, STATE_BYTES, files.save, Counter())
    gather.accept(wire.GatherState(1, 512, NAME, 1))
    with pytest.raises(BadTile, match=why):
        act(gather)
    assert gather.complete == 0
    assert not files.saved


def test_a_model_without_state_has_none_and_a_full_disk_takes_none() -> None:
    files = Files()
    files.is_full = True
    gather = StateGather([GatherPart(0, 0, 1)], 0, files.save, Counter())
    with pytest.raises(BadTile, match="does not follow"):
        gather.accept(wire.GatherState(1, 512, NAME, 1))
    gather = StateGather([GatherPart(0, 0, 1, 0, 64)], 64, files.save, Counter())
    gather.accept(wire.GatherState(1, 512, NAME, 1))
    with pytest.raises(BadTile, match="the disk takes no state"):
        gather.take(0, part_of(512, 0, bytes(64)), bytes(64))
