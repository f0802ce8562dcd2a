"""A GPU lane of a model with windows: of a page, layers with a window have copies of their own."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from batchengine.core import GREEDY
from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.gpu.device import CudaDevice
from batchengine.lanes.gpu.kv_room import KvRoom, bytes_min, divide
from batchengine.lanes.gpu.page_cache import PageCache, PageCopies
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.step_input import StepLimits, StepOutput, take_samples, unpack
from batchengine.wire import lane as wire
from batchengine.wire.lane import ARENA_BIT
from bench.models.synthetic import PRESETS, write_synthetic
from bench.simt.emulator import COMPILER, ROOT, Emulator, compile_kernels
from kernels.cuda.page_parts import LayerPart, PageParts, Run
from kv_store.arenas.arena import Arena
from kv_store.layout import PageLayout
from tests.lanes.test_page_cache import FakeGpu

CONTEXT, TOKENS, SESSIONS, PAGES = 1024, 300, 3, 4  # pages of a session
WINDOW = 40
SHAPE = replace(PRESETS["gpt-oss-tiny"], n_layer=2, n_expert=4, n_used=2, window=WINDOW)
SLOTS = SESSIONS * PAGES


class Side:
    """A device with an arena, in which session i has the slots from PAGES i on."""

    def __init__(self, device: Any, resources: Any, model: Path, folder: Path) -> None:
        self.device = device
        cache = str(folder.parent / "cache")
        load = wire.Load(str(model), cache, resources, TOKENS, SESSIONS, CONTEXT)
        facts = device.load(load, lambda *_: None)
        layout = PageLayout(facts.layers)
        self.page_bytes = layout.page_bytes
        folder.mkdir()
        self.arena = Arena.create(str(folder / "arena.1"), layout, SLOTS, 1)
        attach = wire.Attach(self.arena.path, SLOTS, layout.page_bytes, str(folder))
        self.memory: HostMemory = device.attach(attach, layout)
        self.limits = StepLimits(TOKENS, SESSIONS, CONTEXT, facts.vocab_size)
        owners = [wire.ReserveSlot(i, 1, bytes([i // PAGES]), 1, i % PAGES) for i in range(SLOTS)]
        self.memory.prepare(wire.Step((), reserve=tuple(owners)), ())

    def step(self, entries: Sequence[tuple[int, int, Sequence[int]]]) -> StepOutput:
        """The output of a step of entries of (session, start, tokens)."""
        made, codes, ids = list[wire.Entry](), array("Q"), array("i")
        for session, start, tokens in entries:
            n_pages = -(-(start + len(tokens)) // 256)
            made.append(wire.Entry(session, 1, start, len(tokens), n_pages, GREEDY))
            codes.extend([ARENA_BIT | PAGES * session + page for page in range(n_pages)])
            ids.extend(tokens)
        batch = unpack(wire.Step(tuple(made)), codes.tobytes() + ids.tobytes(), self.limits)
        take_samples(batch, {})
        started = self.device.start(batch)
        started.tokens()
        return started.finish()

    def pages(self) -> list[bytes]:
        while self.device.do_deferred():
            pass
        return [bytes(self.memory.tile(slot, 0, self.page_bytes)) for slot in range(SLOTS)]


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[tuple[Side, Side]]:
    """A CPU and an emulated GPU."""
    if COMPILER is None:
        pytest.skip("no g++")
    write_synthetic(tmp_path / "model.gguf", SHAPE)
    emulator = Emulator(compile_kernels(ROOT / "build/simt", is_checked=False))
    on_gpu, on_cpu = wire.CudaResources(0, 1 << 28, 0, 1, (), 0), wire.CpuResources(1, (), 0)
    made = [
        Side(device, resources, tmp_path / "model.gguf", tmp_path / name)
        for name, device, resources in (
            ("cpu", CpuDevice(), on_cpu),
            ("gpu", CudaDevice(lambda *_: emulator), on_gpu),
        )
    ]
    yield made[0], made[1]
    for side in made:
        side.device.close()
        side.arena.close(delete=True)


def copies_of(side: Side) -> PageCopies:
    assert isinstance(side.device, CudaDevice)
    assert side.device.gpu is not None
    return side.device.gpu.pages


@pytest.mark.parametrize("rooms", [(3, 4), pytest.param((3, 100), marks=pytest.mark.slow)])
def test_sessions_longer_than_the_window_have_the_bits_of_the_cpu(
    sides: tuple[Side, Side], rooms: tuple[int, int]
) -> None:
    """Prompts, decodes, and turns that go back to where pages had been given up; also if no step of
    all sessions fits."""
    cpu, gpu = sides
    windowed, whole = copies_of(gpu).caches
    assert (windowed.part.window, whole.part.window) == (WINDOW, 0)
    windowed.pages_max, whole.pages_max = rooms
    rng = np.random.default_rng(1)

    def both(entries: Sequence[tuple[int, int, list[int]]]) -> StepOutput:
        outputs = [side.step(entries) for side in (cpu, gpu)]
        assert outputs[0] == outputs[1]
        return outputs[1]

    def prompt(session: int, start: int, end: int) -> None:
        for at in range(start, end, TOKENS):
            n = min(TOKENS, end - at)
            both([(session, at, rng.integers(0, 100, n).tolist())])

    ends = [770, 510, 300]
    for session, end in enumerate(ends):
        prompt(session, 0, end)
    for _ in range(3):
        output = both([(session, end, [7]) for session, end in enumerate(ends)])
        assert len(output.rows) == SESSIONS
        ends = [end + 1 for end in ends]
    prompt(0, 100, 330)  # another turn from there on
    prompt(1, 256, 300)
    both([(0, 330, [1, 2, 3]), (1, 300, [4]), (2, ends[2], [5, 6])])
    assert cpu.pages() == gpu.pages()


def test_hidden_pages_of_a_prompt_are_not_on_the_gpu(sides: tuple[Side, Side]) -> None:
    """A session whose pages come from the host is there with the pages that its window sees."""
    cpu, gpu = sides
    copies, tokens = copies_of(gpu), list(range(90)) * 9
    for start in range(0, 810, 270):
        for side in sides:
            side.step([(0, start, tokens[start : start + 270])])
    copies.forget([ARENA_BIT | slot for slot in range(SLOTS)])
    want, got = (side.step([(0, 810, [1])]) for side in (cpu, gpu))
    assert got == want
    assert [len(cache) for cache in copies.caches] == [1, 4]  # of positions 771 to 810, and of all


def test_runs_of_a_page_lie_one_after_another_in_its_copy() -> None:
    shape = kernels.PageShape([(1, 32)] * 5)
    parts = PageParts(shape, [40, 0, 40, 40, 0], 1024).parts
    host = np.arange(2 * shape.payload_bytes, dtype=np.uint64).view(np.uint8)
    host = host[: 2 * shape.payload_bytes].reshape(2, -1).copy()
    gpu = FakeGpu(100)
    copies = PageCopies([PageCache(gpu, part, 4) for part in parts])
    codes = np.array([5, 6], np.uint64)
    at = np.array([kernels.address_of(page.data) for page in host], np.uint64)
    step = np.array([[1, 290, 2]], np.int32)
    found = copies.addresses(codes, at, step, np.zeros(2, bool))
    assert found.shape == (2, 2)
    for addresses, part in zip(found.tolist(), parts, strict=True):
        for address, page in zip(addresses, host, strict=True):
            wanted = b"".join([page[run.start : run.end].tobytes() for run in part.runs])
            assert gpu.held[address].tobytes() == wanted
    hidden = copies.addresses(codes, at, np.array([[1, 400, 2]], np.int32), np.zeros(2, bool))
    assert hidden.tolist() == [[0, found[0, 1]], found[1].tolist()]


def test_memory_is_divided_between_the_parts() -> None:
    """A window's part gets what steps may see of it, and at most half of what is left."""
    window, whole = LayerPart(1024, (Run(0, 500),)), LayerPart(0, (Run(500, 600),))
    room = KvRoom(40_000, context_pages=16, tokens_max=512, entries_max=4)

    def taken_by(n: int) -> int:
        return n

    assert bytes_min([window, whole], room, taken_by) == 7 * 500 + 16 * 100
    counts = divide([window, whole], room, taken_by)
    assert counts == (22, 290)  # 4 entries see 5 pages each, and a chunk covers 2
    few = room._replace(n_bytes=9_100)
    assert divide([window, whole], few, taken_by) == (11, 36)
    assert divide([window, whole], few._replace(n_bytes=5_100), taken_by) == (7, 16)
    assert divide([whole], room, taken_by) == (400,)
    assert divide([window], room, taken_by) == (80,)
