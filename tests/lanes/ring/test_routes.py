"""Steps whose pages lie with other workers have the tokens and the page bytes of one worker."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchengine.core import PAGE_TOKENS
from batchengine.wire import lane as wire
from kernels import SUPERPAGE_TOKENS
from tests.lanes.ring.scene import Entry, Piece, Scene, lasting_scene, same_rows
from tests.support.engines import words

LENGTHS = {1: 5 * SUPERPAGE_TOKENS + 300, 2: 3 * SUPERPAGE_TOKENS + 77, 3: 700}
NAMES = "abcd"


class Ring(NamedTuple):
    """A scene, and the loop that it lives on."""

    runner: asyncio.Runner
    scene: Scene
    expected: dict[tuple[int, int], wire.StepDone]
    asking: asyncio.Lock

    async def answer(self, key: int, end: int) -> wire.StepDone:
        """What one worker samples after `end` tokens."""
        async with self.asking:
            if (key, end) not in self.expected:
                done = await self.scene["d"].step(Entry(key, end - 1, 1))
                self.expected[key, end] = done
        return self.expected[key, end]


@pytest.fixture(scope="module", params=["socketpair", "tcp and tls"])
def ring(
    request: pytest.FixtureRequest,
    pocket_path: Path,
    cache_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Ring]:
    folder, is_tcp = tmp_path_factory.mktemp("ring"), request.param != "socketpair"
    with lasting_scene(NAMES, pocket_path, cache_dir, folder, tcp=is_tcp) as (runner, scene):
        timelines = {key: words(key, length) for key, length in LENGTHS.items()}
        runner.run(scene.prefill("d", timelines))
        yield Ring(runner, scene, {}, asyncio.Lock())


def pieces_of(rng: random.Random, n_held: int) -> list[Piece]:
    """A route of the first super-pages; a node may come several times, the owner too."""
    cuts = sorted(rng.sample(range(1, n_held), rng.randint(0, n_held - 1)))
    edges = [0, *cuts, n_held]
    return [
        Piece(rng.choice(NAMES), first, end - first) for first, end in itertools.pairwise(edges)
    ]


def chunks_of(rng: random.Random, start: int, end: int) -> list[tuple[int, int]]:
    n_cuts = rng.randint(0, min(3, end - start - 1))
    edges = [start, *sorted(rng.sample(range(start + 1, end), n_cuts)), end]
    return [(a, b - a) for a, b in itertools.pairwise(edges)]


async def compute(ring: Ring, rng: random.Random) -> None:
    """One owner computes the ends of some timelines anew, with their pages somewhere."""
    owner = ring.scene[rng.choice("abc")]
    plans: dict[int, tuple[list[Piece], list[tuple[int, int]]]] = {}
    for key in rng.sample(sorted(LENGTHS), rng.randint(1, len(LENGTHS))):
        n_held = rng.randint(0, (LENGTHS[key] - 2) // SUPERPAGE_TOKENS)
        first = rng.randint(n_held * SUPERPAGE_TOKENS, LENGTHS[key] - 2) // PAGE_TOKENS
        start = max(n_held * SUPERPAGE_TOKENS, first * PAGE_TOKENS)
        end = rng.randint(start + 1, min(LENGTHS[key], start + 700))
        owner.renew(key, start // PAGE_TOKENS)
        plans[key] = (pieces_of(rng, n_held) if n_held else []), chunks_of(rng, start, end)
    spans = {key: (c[0][0], sum(c[-1])) for key, (_, c) in plans.items()}
    while any(chunks for _, chunks in plans.values()):
        entries: list[Entry] = []
        for key, (pieces, chunks) in plans.items():
            if chunks:
                start, n = chunks.pop(0)
                entries.append(Entry(key, start, n, pieces, wants=not chunks))
        rng.shuffle(entries)
        done = await owner.step(*entries, scene=ring.scene)
        assert done.unreachable == done.nonfinite == ()
        for row in done.rows:
            expected = await ring.answer(row.session, spans[row.session][1])
            alone = wire.StepDone((row,), (), (), (), 0)
            assert same_rows(alone, expected)
    for key, (start, end) in spans.items():
        assert owner.rows(key, start, end) == ring.scene["d"].rows(key, start, end)
        # The others may have it hold any page.
        await owner.copy(key, ring.scene["d"], end // PAGE_TOKENS)
        await ring.scene.hold(owner.name, key)


@settings(
    max_examples=settings().max_examples // 8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(seed=st.integers(0, 2**32))
def test_any_route_and_chunking_has_the_bits_of_one_worker(ring: Ring, seed: int) -> None:
    ring.runner.run(compute(ring, random.Random(seed)))


ROUTES = [
    [("b", 5)],
    [("b", 2), ("c", 3)],
    [("b", 1), ("c", 1), ("d", 1)],
    [("b", 1), ("c", 2), ("b", 2)],
    [("b", 2), ("b", 3)],
    [("a", 1), ("b", 1), ("a", 3)],
    [("a", 5)],
]


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: "".join(name for name, _ in route))
def test_every_kind_of_route(ring: Ring, route: list[tuple[str, int]]) -> None:
    pieces: list[Piece] = []
    for name, count in route:
        pieces.append(Piece(name, sum(p.count for p in pieces), count))

    async def decode() -> None:
        done = await ring.scene["a"].step(Entry(1, 5300, 1, pieces), scene=ring.scene)
        assert done.unreachable == ()
        assert same_rows(done, await ring.answer(1, 5301))

    ring.runner.run(decode())


def test_two_owners_ring_through_each_other_at_once(ring: Ring) -> None:
    """Each computes decodes and prefill chunks of its own, and serves those of the other."""

    async def own(name: str, other: str, rng: random.Random) -> None:
        owner = ring.scene[name]
        for _ in range(12):
            end = rng.randint(5 * SUPERPAGE_TOKENS + 1, LENGTHS[1])
            pieces = [Piece(other, 0, 2), Piece("c", 2, 1), Piece(other, 3, 2)]
            n = rng.choice((1, 1, end - 5 * SUPERPAGE_TOKENS))
            pair = Entry(1, end - n, n, pieces), Entry(2, 3100, 1, [Piece(other, 0, 3)])
            done = await owner.step(*pair, scene=ring.scene)
            assert done.unreachable == ()
            one, two = await ring.answer(1, end), await ring.answer(2, 3101)
            expected = wire.StepDone(one.rows + two.rows, (), (), (), 0)
            assert same_rows(done, expected)

    async def both() -> None:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            group.create_task(own("a", "b", random.Random(1)))
            group.create_task(own("b", "a", random.Random(2)))

    ring.runner.run(both())
    for name in NAMES:
        counts = ring.runner.run(ring.scene[name].counts())
        assert set(counts) <= {"query"}, counts
