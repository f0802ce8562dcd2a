"""HashLM as an oracle: the same tokens on every schedule, other tokens for any wrong byte."""

from __future__ import annotations

import asyncio
import json
import signal
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from batchengine.config import LaneConfig
from batchengine.core import Sampling
from batchengine.lanes.step_input import StepLimits, StepOutput, unpack
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from bench.models import hashlm
from bench.models.hashlm import LAYOUT, HashDevice, HashTimeline, hashlm_tokens
from kv_store.arenas.arena import Arena, SlotOwner
from kv_store.osio import Files
from tests.support.arena_rows import valid_rows
from tests.support.engines import Site, read, request, running_engine, until, words

VOCAB = 2048
SLOTS = 8
LIMITS = StepLimits(tokens_max=2048, entries_max=8, context_tokens=2048, vocab_size=VOCAB)


def test_its_tokens_are_fixed() -> None:
    """A change here invalidates every recorded expectation."""
    assert hashlm_tokens([1, 2, 3], 4) == [793, 1202, 24, 1780]
    assert hashlm_tokens(words(1, 600), 3) == [1071, 1975, 1120]


def test_tokens_depend_on_seed_model_and_every_prompt_token() -> None:
    prompt = words(1, 600)
    plain = hashlm_tokens(prompt, 8)
    assert hashlm_tokens(prompt, 8) == plain
    others = [
        hashlm_tokens(prompt, 8, seed=1),
        hashlm_tokens(prompt, 8, model="other"),
        hashlm_tokens(prompt[1:], 8),
        hashlm_tokens([prompt[1], prompt[0], *prompt[2:]], 8),
        hashlm_tokens([*prompt[:300], prompt[300] ^ 1, *prompt[301:]], 8),
    ]
    for other in others:
        assert not set(enumerate(other)) & set(enumerate(plain))
    assert all(hashlm.FIRST_TOKEN <= token < VOCAB for token in plain)


class Lab:
    """A HashDevice over a real arena, in this process."""

    def __init__(self, folder: Path, model: Path) -> None:
        (folder / "ext").mkdir()
        self.arena = Arena.create(str(folder / "cpu.1"), LAYOUT, SLOTS, 1)
        attach = wire.Attach(self.arena.path, SLOTS, LAYOUT.page_bytes, str(folder / "ext"))
        self.device = HashDevice(hashlm.Faults())
        load = wire.Load(str(model), "", wire.CpuResources(1, (), 0), 2048, 8, 2048)
        assert self.device.load(load, lambda *_: None).vocab_size == VOCAB
        memory = self.device.attach(attach, LAYOUT)
        fresh = tuple(wire.ReserveSlot(index, 0, b"s", 1, index) for index in range(SLOTS))
        memory.prepare(wire.Step((), reserve=fresh), ())

    def step(
        self, tokens: list[int], start: int, first_slot: int = 0, seed: int = 0,
        slots: Sequence[int] = (),
    ) -> StepOutput:  # fmt: skip
        """One entry at `start`, its page p in slot first_place + p, or in places[p]."""
        pages = -(-(start + len(tokens)) // 256)
        where = slots or range(first_slot, first_slot + pages)
        codes = array("Q", [ARENA_BIT | slot for slot in where])
        entry = wire.Entry(1, 1, start, len(tokens), pages, Sampling(seed=seed))
        payload = codes.tobytes() + array("i", tokens).tobytes()
        batch = unpack(wire.Step((entry,)), payload, LIMITS)
        return self.device.run(batch)

    def page(self, slot: int) -> np.ndarray:
        return np.frombuffer(self.device.memory._arena.page(slot), np.uint8)


@pytest.fixture
def lab(tmp_path: Path, pocket_path: Path) -> Iterator[Lab]:
    made = Lab(tmp_path, pocket_path)
    yield made
    made.arena.close(delete=True)


def test_a_page_that_only_one_chunk_of_the_prefill_attended_to_has_an_effect(lab: Lab) -> None:
    """A real model would compute other rows then, although the page is right again later."""
    prompt = words(2, 700)
    lab.step(words(3, 256), 0, first_slot=5)
    lab.step(prompt[:300], 0)
    lab.step(prompt[300:400], 300, slots=[5, 1])
    said = lab.step(prompt[400:], 400).rows[0].token
    assert said != hashlm_tokens(prompt, 1)[0]


@pytest.mark.parametrize("chunk", [1, 7, 255, 256, 257, 700])
def test_pages_hold_the_bytes_of_the_definition(lab: Lab, chunk: int) -> None:
    prompt, said = words(2, 700), -1
    for start in range(0, len(prompt), chunk):
        said = lab.step(prompt[start : start + chunk], start, seed=5).rows[0].token
    expected = hashlm_tokens(prompt, 3, seed=5)
    got = [said]
    for _ in range(2):
        at = len(prompt) + len(got) - 1
        got.append(lab.step(got[-1:], at, seed=5).rows[0].token)
    assert got == expected
    # The records prove the rows, as those of a real lane do.
    rows = [*prompt, *expected[:2]]
    for page in range(3):
        owner, part = SlotOwner(b"s", 1, 0, page), rows[page * 256 :][:256]
        shape, ident = lab.arena.shape, lab.arena.arena_id
        assert valid_rows(Files(), lab.arena.fd, shape, ident, page, owner, part) == len(part)


def test_any_wrong_byte_changes_the_token(lab: Lab) -> None:
    """In a full page and in a tail; bytes outside the rows have no effect."""
    prompt, rng = words(3, 300), np.random.default_rng(1)
    good = lab.step(prompt, 0).rows[0].token
    offsets = hashlm._offsets()
    missed = 0
    for _ in range(200):
        row = int(rng.integers(0, 299))
        at = offsets[row % 256, rng.integers(0, hashlm.ROW_BYTES)]
        page = lab.page(row // 256)
        byte = int(page[at])
        page[at] = byte ^ 1 << int(rng.integers(0, 8))
        # The last row again: it is rewritten from its predecessor, and everything is read.
        missed += lab.step(prompt[299:], 299).rows[0].token == good
        page[at] = byte
    assert missed <= 2  # one in 2028 by chance
    assert lab.step(prompt[299:], 299).rows[0].token == good
    lab.page(1)[offsets[44, 0]] ^= 1  # row 300
    assert lab.step(prompt[299:], 299).rows[0].token == good


def test_swapped_pages_change_the_token(lab: Lab) -> None:
    prompt = words(4, 600)
    good = lab.step(prompt, 0).rows[0].token
    first = lab.page(0).copy()
    lab.page(0)[:] = lab.page(1)
    lab.page(1)[:] = first
    assert lab.step(prompt[599:], 599).rows[0].token != good


def test_a_timeline_added_in_parts_gives_the_same_token() -> None:
    prompt = words(5, 530)
    one, many = HashTimeline(vocab=VOCAB), HashTimeline(vocab=VOCAB)
    one.add(prompt)
    for token in prompt:
        many.add([token])
    assert one.next_token() == many.next_token()


# ------------------------------------------------------------------------------ in the engine

LANE = LaneConfig("cpu", tokens_per_step=512, chunk_tokens_max=256, entries_max=4)


async def test_the_engine_computes_the_tokens_of_the_definition(site: Site) -> None:
    """With batches, chunks, preemption for lack of slots, and prefix hits."""

    shared = words(6, 700)
    prompts = [words(i, 40 * i) for i in range(7, 17)]
    prompts += [[*shared, *words(20 + i, 90)] for i in range(6)]
    lane = LaneConfig("cpu", tokens_per_step=512, entries_max=4, open_pages=10)
    async with running_engine(site, hashlm.WORKER_COMMAND, (lane,)) as engine:
        for _ in range(2):  # the second time, prefixes are found
            answers = await asyncio.gather(
                *(
                    read(engine.submit(request(p, 40, sampling=Sampling(seed=i))))
                    for i, p in enumerate(prompts)
                )
            )
            for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
                assert answer.error is None
                assert answer.tokens == hashlm_tokens(prompt, 40, seed=i)
        assert int(engine.stats()["pages_sealed"]) > 0
        assert engine.metrics.prefix_hit_tokens_total._value.get() > 0


async def test_a_changed_byte_of_a_sealed_page_changes_the_token(site: Site) -> None:
    """No part of the engine checks pages in each step, so the oracle must."""
    prompt = words(8, 300)
    async with running_engine(site, hashlm.WORKER_COMMAND) as engine:
        first = await read(engine.submit(request(prompt, 3)))
        assert first.tokens == hashlm_tokens(prompt, 3)
        await until(lambda: int(engine.stats()["pages_sealed"]) >= 1)
        with (site.folder / "kv" / "ext" / "000001.kv").open("r+b") as file:
            byte = file.read(1)[0]
            file.seek(0)
            file.write(bytes([byte ^ 1]))
        second = await read(engine.submit(request(prompt, 3)))
        assert second.tokens != first.tokens


@pytest.mark.parametrize("point", hashlm.POINTS)
async def test_a_worker_death_within_a_step_changes_no_token(
    point: str, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = {"die": point, "at": 7, "life": 1}
    monkeypatch.setenv(hashlm.FAULTS, json.dumps(faults))
    prompts = [words(9, 250), words(10, 30)]
    async with running_engine(site, hashlm.WORKER_COMMAND, (LANE,)) as engine:
        answers = await asyncio.gather(*(read(engine.submit(request(p, 30))) for p in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.error is None
            assert answer.tokens == hashlm_tokens(prompt, 30)
        assert engine.lanes()[0]["incarnation"] == 2


async def test_an_injected_nan_ends_that_turn_only(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(hashlm.FAULTS, json.dumps({"nan_at": 5}))
    async with running_engine(site, hashlm.WORKER_COMMAND, (LANE,)) as engine:
        prompts = [words(9, 20), words(10, 30)]
        answers = await asyncio.gather(*(read(engine.submit(request(p, 30))) for p in prompts))
        failed = [a for a in answers if a.error is not None]
        assert [a.error.code for a in failed if a.error] == ["BE2302"]
        for prompt, answer in zip(prompts, answers, strict=True):
            if answer.error is None:
                assert answer.tokens == hashlm_tokens(prompt, 30)


def test_a_misspelt_fault_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ('{"dei": "inside_row"}', '{"die": "insid_row"}', "{"):
        monkeypatch.setenv(hashlm.FAULTS, wrong)
        with pytest.raises(msgspec.DecodeError):
            HashDevice()
    assert {getattr(signal, hashlm.Faults().signal)} == {signal.SIGKILL}
