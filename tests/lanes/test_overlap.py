"""A device computes a step while the host finishes the one before: the order, and the bits."""

from __future__ import annotations

import socket
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchengine.core import GREEDY
from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.cuda import CudaDevice, GpuStep
from batchengine.lanes.host_device import HostDevice
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.step_input import StepInput, StepLimits, StepOutput, take_samples, unpack
from batchengine.lanes.worker import Worker
from batchengine.wire import lane as wire
from batchengine.wire.frames import BlockingLink
from batchengine.wire.lane import ARENA_BIT
from bench.models.synthetic import PRESETS, write_synthetic
from bench.simt.emulator import COMPILER, ROOT, Emulator, compile_kernels
from kernels.cuda import driver
from kernels.cuda.driver import CudaGpu
from kv_store.arenas.arena import Arena, ArenaSlot, SlotOwner
from kv_store.layout import PageLayout
from tests.kernels.cuda.fake_driver import FakeDriver
from tests.support.arena_rows import rows_left

SLOTS, CONTEXT = 4, 512
SESSIONS = 2
FACTS = wire.ModelFacts("", "", 1, 1, 1, 32, PageLayout(1, 1, 32).payload_bytes, 100, {})


@dataclass
class Logged:
    """A step of `LoggingDevice`; its token is its number, for each session."""

    number: int
    log: list[str]
    sessions: Sequence[int]

    def tokens(self) -> Mapping[int, int]:
        self.log.append(f"tokens {self.number}")
        return dict.fromkeys(self.sessions, self.number)

    def finish(self) -> StepOutput:
        self.log.append(f"finish {self.number}")
        rows = [wire.SampledRow(session, self.number, 0.0) for session in self.sessions]
        return StepOutput(tuple(rows), ())


@dataclass
class LoggingDevice:
    """A device without memory, which notes what it is asked for."""

    overlaps: bool
    log: list[str] = field(default_factory=list[str])
    given: list[list[int]] = field(default_factory=list[list[int]])  # tokens of steps

    def load(self, load: wire.Load, report: Any) -> wire.ModelFacts:
        return FACTS

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LoggingDevice:
        return self

    def check(self, step: wire.Step) -> None: ...

    def prepare(self, step: wire.Step, imported: Any) -> tuple[int, ...]:
        return ()

    def finish(self, step: wire.Step) -> tuple[tuple[bytes, ...], tuple[bool, ...]]:
        return (), ()

    def start(self, batch: StepInput) -> Logged:
        self.given.append(batch.tokens.tolist())
        self.log.append(f"start {len(self.given)}")
        return Logged(len(self.given), self.log, [entry.session for entry in batch.entries])

    def close(self) -> None: ...


def decode(start: int, *, ahead: bool, **chores: Any) -> tuple[wire.Step, bytes]:
    """A step of a token of one session."""
    entry = wire.Entry(1, 1, start, 1, 1, GREEDY, takes_sample=ahead)
    return wire.Step((entry,), **chores), array("Q", [ARENA_BIT]).tobytes() + bytes(4)


def orders(device: LoggingDevice, *steps: tuple[wire.Step, bytes]) -> list[wire.LaneMessage]:
    """The answers of a worker to steps that are sent before it computes the first."""
    ours, theirs = socket.socketpair()
    end, link = (BlockingLink(one, wire.LANE_LINK) for one in (ours, theirs))
    worker = Worker(link, 1, {wire.CpuResources: lambda: device})
    attach = wire.Attach("", SLOTS, PageLayout(1, 1, 32).page_bytes, "")
    load = wire.Load("", "", wire.CpuResources(1, (), 0), 8, 4, CONTEXT)
    for message, payload in ((load, b""), (attach, b""), *steps):
        end.send(wire.LANE_LINK.encode(message, payload, incarnation=1))
    ours.shutdown(socket.SHUT_WR)
    thread = threading.Thread(target=worker.serve)
    thread.start()
    answers: list[wire.LaneMessage] = []
    for _ in range(2 + len(steps)):
        frame = end.receive()
        assert frame is not None
        answers.append(frame.message)
    thread.join()
    for one in (end, link):
        one.close()
    return answers[2:]


def test_the_next_step_is_started_between_tokens_and_the_rest() -> None:
    device = LoggingDevice(overlaps=True)
    orders(device, decode(5, ahead=False), decode(6, ahead=True), decode(7, ahead=True))
    assert device.log == [
        *("start 1", "tokens 1", "start 2", "finish 1"),
        *("tokens 2", "start 3", "finish 2", "tokens 3", "finish 3"),
    ]
    assert device.given == [[0], [1], [2]]  # each takes the token of the step before


def reserving(slot: int) -> dict[str, Any]:
    return {"reserve": (wire.ReserveSlot(slot, 1, b"s", 1, 0),)}


@pytest.mark.parametrize(
    ("overlaps", "second", "is_early"),
    [
        (True, decode(6, ahead=False), True),  # a chunk of a prompt, say
        (True, decode(6, ahead=True, **reserving(1)), True),
        (True, decode(6, ahead=True, poison=(1,), freed=(3,), touch=(5,)), True),
        (False, decode(6, ahead=True), False),
        (True, decode(6, ahead=True, **reserving(0)), False),  # the first step writes there
        (True, decode(6, ahead=True, poison=(0,)), False),
        (True, decode(6, ahead=True, relabel=(wire.Relabel(1, 1, b"s", 1, 0, 5),)), False),
        (True, (wire.Step(()), b""), False),
    ],
)
def test_a_step_is_started_early_unless_its_chores_touch_rows_of_the_one_before(
    overlaps: bool, second: tuple[wire.Step, bytes], is_early: bool
) -> None:
    device = LoggingDevice(overlaps)
    orders(device, decode(5, ahead=False), second)
    assert device.log[2] == ("start 2" if is_early else "finish 1")


def test_a_slot_whose_rows_are_digested_is_not_taken_early() -> None:
    """Its tail is zeroed with that, and what the device has of it goes."""
    device = LoggingDevice(overlaps=True)
    parks = decode(5, ahead=False, digest=(wire.Digest(1, 7),))
    orders(device, parks, decode(6, ahead=True, **reserving(1)))
    assert device.log[2] == "finish 1"


def test_a_step_that_is_refused_is_answered_in_its_turn() -> None:
    device = LoggingDevice(overlaps=True)
    refused = decode(CONTEXT, ahead=True)
    answers = orders(device, decode(5, ahead=False), refused, decode(6, ahead=False))
    kinds = [type(answer) for answer in answers]
    assert kinds == [wire.StepDone, wire.Failed, wire.StepDone]
    assert device.log[:3] == ["start 1", "tokens 1", "finish 1"]


class Side:
    """A device with an arena of its own, and the rows of its sessions."""

    def __init__(self, device: HostDevice, resources: Any, model: Path, folder: Path) -> None:
        self.device = device
        load = wire.Load(str(model), str(folder.parent / "cache"), resources, 64, 4, CONTEXT)
        facts = device.load(load, lambda *_: None)
        layout = PageLayout(facts.n_layer, facts.n_kv_head, facts.head_dim)
        self.page_bytes = layout.page_bytes
        folder.mkdir()
        self.arena = Arena.create(str(folder / "arena.1"), layout, SLOTS, 1)
        attach = wire.Attach(self.arena.path, SLOTS, layout.page_bytes, str(folder))
        self.memory = device.attach(attach, layout)
        self.limits = StepLimits(64, 4, CONTEXT, facts.vocab_size)
        owners = [wire.ReserveSlot(i, 1, bytes([i]), 1, i % 2) for i in range(SLOTS)]
        self.memory.prepare(wire.Step((), reserve=tuple(owners)), ())

    def page(self, slot: int) -> bytes:
        """The rows of a slot."""
        assert isinstance(self.device.memory, HostMemory)
        return bytes(self.device.memory.tile(slot, 0, self.page_bytes))

    def step(self, start: int, tokens: Sequence[Sequence[int]], sampled: Mapping[int, int]) -> Any:
        """A step of some tokens of each session; of sampled ones, if none are named."""
        n = len(tokens[0]) or 1
        pages = -(-(start + n) // 256)
        entries = [
            wire.Entry(i, 1, start, n, pages, GREEDY, takes_sample=not tokens[0])
            for i in range(SESSIONS)
        ]
        codes = array("Q", [ARENA_BIT | 2 * i + p for i in range(SESSIONS) for p in range(pages)])
        ids = array("i", [token for own in tokens for token in own or [0]])
        batch = unpack(wire.Step(tuple(entries)), codes.tobytes() + ids.tobytes(), self.limits)
        take_samples(batch, sampled)
        return self.device.start(batch)


@pytest.fixture
def sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Side, Side, FakeDriver]]:
    """A CPU, and a GPU behind a driver that computes nothing before it is waited for."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    fake = FakeDriver(Emulator(compile_kernels(ROOT / "build/simt", is_checked=False)))
    monkeypatch.setattr(driver.importlib, "import_module", {"cuda.bindings.driver": fake}.get)
    write_synthetic(tmp_path / "model.gguf", replace(PRESETS["tiny"], n_layer=2))
    gpu = CudaDevice(lambda *_: CudaGpu(0, lambda target: {"all": target.encode()}))
    on_gpu, on_cpu = wire.CudaResources(0, 1 << 28, 0, 1, (), 0), wire.CpuResources(1, (), 0)
    made = [
        Side(device, resources, tmp_path / "model.gguf", tmp_path / name)
        for name, device, resources in (("cpu", CpuDevice(), on_cpu), ("gpu", gpu, on_gpu))
    ]
    yield made[0], made[1], fake
    for side in made:
        side.device.close()
        side.arena.close(delete=True)


def test_overlapping_steps_give_the_bits_of_the_cpu(sides: tuple[Side, Side, FakeDriver]) -> None:
    cpu, gpu, fake = sides
    rng = np.random.default_rng(4)
    prompt = [rng.integers(0, 100, 250).tolist() for _ in range(SESSIONS)]
    start = 0
    for count in (60, 60, 60, 60):  # chunks of the prompt
        for side in (cpu, gpu):
            chunk = [own[start : start + count // 2] for own in prompt]
            one = side.step(start, chunk, {})
            one.tokens()
            one.finish()
        start += count // 2
    first = [own[start : start + 1] for own in prompt]
    fed = [own[: start + 1] for own in prompt]  # what each session has been given
    running, want = gpu.step(start, first, {}), cpu.step(start, first, {})
    assert isinstance(running, GpuStep)
    for position in range(start + 1, start + 16):
        wanted = want.tokens()
        tokens = running.tokens()
        assert tokens == wanted
        for session, own in enumerate(fed):
            own.append(tokens[session])
        following = gpu.step(position, [[]] * SESSIONS, tokens)
        waits = fake.calls.count("cuStreamSynchronize")
        output = running.finish()
        assert fake.calls.count("cuStreamSynchronize") == waits  # the next step may run on
        assert output == want.finish()
        running, want = following, cpu.step(position, [[]] * SESSIONS, wanted)
    assert running.tokens() == want.tokens()
    assert running.finish() == want.finish()
    for slot in (0, 2):
        pages = [side.page(slot) for side in (cpu, gpu)]
        assert pages[0] == pages[1]
        owner, ids = SlotOwner(bytes([slot]), 1, 1, 0), fed[slot // 2]
        for side in (cpu, gpu):
            at = ArenaSlot(slot, 1)
            assert rows_left(side.arena, at, owner, ids) == len(ids) == start + 16
