"""A device computes a step while the host finishes the one before: the order, and the bits."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchengine import errors
from batchengine.core import GREEDY, Sampling
from batchengine.lanes.cpu import CpuDevice
from batchengine.lanes.gpu.device import CudaDevice
from batchengine.lanes.gpu.lane import LATE_ENTRIES_MIN, GpuStep
from batchengine.lanes.gpu.memory import DeviceMemory
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.state_memory import NoStates, StateSlots
from batchengine.lanes.step_input import (
    BadStep,
    StepInput,
    StepLimits,
    StepOutput,
    take_samples,
    unpack,
)
from batchengine.lanes.worker import Worker
from batchengine.wire import lane as wire
from batchengine.wire.frames import BlockingLink
from batchengine.wire.lane import ARENA_BIT
from bench.models.synthetic import PRESETS, write_synthetic
from bench.simt.emulator import COMPILER, ROOT, Emulator, compile_kernels
from kernels.cuda import driver
from kernels.cuda.driver import CudaGpu
from kernels.cuda.gpu import GpuFault
from kv_store.arenas.arena import Arena, ArenaSlot, SlotOwner
from kv_store.layout import PageLayout
from tests.kernels.cuda.fake_driver import FakeDriver
from tests.support.arena_rows import rows_left

SLOTS, CONTEXT = 2 * (LATE_ENTRIES_MIN + 1), 512  # two slots of each session
SHAPE = replace(PRESETS["tiny"], n_layer=2, n_embd=96, n_ff=96, head_dim=32)
PENALISED = Sampling(temperature=0.8, seed=3, repetition_penalty=1.7, frequency_penalty=0.4)
LAYOUT = PageLayout.uniform(1, 1, 32)
FACTS = wire.ModelFacts("", "", 1, LAYOUT.layers, LAYOUT.payload_bytes, 100, {})


@dataclass
class Logged:
    """A step of `LoggingDevice`; its token is its number, for each session. It is computed once it
    was looked at so often."""

    number: int
    log: list[str]
    sessions: Sequence[int]
    may_be_followed: bool
    looks: int

    @property
    def is_computed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def sample(self) -> None: ...

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
    may_be_followed: bool = False
    looks: int = 0
    log: list[str] = field(default_factory=list[str])
    given: list[StepInput] = field(default_factory=list[StepInput])
    after: list[int] = field(default_factory=list[int])  # steps before, whose tokens lacked
    states: StateSlots = field(default_factory=NoStates)

    def load(self, load: wire.Load, report: Any) -> wire.ModelFacts:
        return FACTS

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LoggingDevice:
        return self

    def check(self, step: wire.Step) -> None: ...

    def prepare(self, step: wire.Step, imported: Any) -> tuple[int, ...]:
        return ()

    def finish(self, step: wire.Step) -> tuple[tuple[bytes, ...], tuple[bool, ...]]:
        return (), ()

    def start(self, batch: StepInput, after: Any = None) -> Logged:
        self.given.append(batch)
        self.after.append(0 if after is None else after.number)
        self.log.append(f"start {len(self.given)}")
        sessions = [entry.session for entry in batch.entries]
        return Logged(len(self.given), self.log, sessions, self.may_be_followed, self.looks)

    def tokens(self) -> list[list[int]]:
        """Of each step."""
        return [batch.tokens.tolist() for batch in self.given]

    def do_deferred(self) -> bool:
        self.log.append("deferred")
        return False

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
    attach = wire.Attach("", SLOTS, LAYOUT.page_bytes, "")
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
    assert device.tokens() == [[0], [1], [2]]  # each takes the token of the step before
    assert device.after == [0, 0, 0]


def test_the_next_step_is_started_before_the_tokens_of_one_that_feeds_it() -> None:
    device = LoggingDevice(overlaps=True, may_be_followed=True)
    orders(device, decode(5, ahead=False), decode(6, ahead=True), decode(7, ahead=True))
    assert device.log == [
        *("start 1", "start 2", "tokens 1", "finish 1"),
        *("start 3", "tokens 2", "finish 2", "tokens 3", "finish 3"),
    ]
    assert device.tokens() == [[0], [1], [2]]  # which are there before they are needed
    assert device.after == [0, 1, 2]


def test_a_step_that_comes_while_the_device_computes_is_started_at_once() -> None:
    """The worker looks for it, as long as the tokens of the step before are not there."""
    device = LoggingDevice(overlaps=True, may_be_followed=True, looks=1 << 30)
    ours, theirs = socket.socketpair()
    end, link = (BlockingLink(one, wire.LANE_LINK) for one in (ours, theirs))
    worker = Worker(link, 1, {wire.CpuResources: lambda: device})
    thread = threading.Thread(target=worker.serve)
    thread.start()
    attach = wire.Attach("", SLOTS, LAYOUT.page_bytes, "")
    load = wire.Load("", "", wire.CpuResources(1, (), 0), 8, 4, CONTEXT)
    for message, payload in ((load, b""), (attach, b""), decode(5, ahead=False)):
        end.send(wire.LANE_LINK.encode(message, payload, incarnation=1))
    until = time.monotonic() + 30.0
    while len(device.log) < 1 and time.monotonic() < until:
        time.sleep(0.01)
    device.looks = 0
    message, payload = decode(6, ahead=True)
    end.send(wire.LANE_LINK.encode(message, payload, incarnation=1))
    ours.shutdown(socket.SHUT_WR)
    thread.join()
    assert device.log[:3] == ["start 1", "start 2", "tokens 1"]
    for one in (end, link):
        one.close()


def test_an_entry_whose_sample_lacks_is_noted() -> None:
    """The step before has found the rows of its session unusable: the device took any token."""

    class Failing(LoggingDevice):
        def start(self, batch: StepInput, after: Any = None) -> Logged:
            step = super().start(batch, after)
            return replace(step, sessions=()) if len(self.given) == 1 else step

    device = Failing(overlaps=True, may_be_followed=True)
    orders(device, decode(5, ahead=False), decode(6, ahead=True), decode(7, ahead=True))
    assert [batch.untaken for batch in device.given] == [(), (0,), (0,)]


def test_rows_that_wait_are_stored_before_a_fault_of_the_gpu_is_answered() -> None:
    class Failing(LoggingDevice):
        def start(self, batch: StepInput, after: Any = None) -> Logged:
            raise GpuFault("an illegal address")

    device = Failing(overlaps=True)
    (answer,) = orders(device, decode(5, ahead=False))
    assert isinstance(answer, wire.Failed)
    assert (answer.code, answer.fatal, device.log) == (errors.GPU_FAILED.code, True, ["deferred"])


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


def test_a_refusal_of_a_step_that_was_begun_early_is_its_answer() -> None:
    """The next time it might be accepted, and would take a token that is not there any more."""

    class Refusing(LoggingDevice):
        def start(self, batch: StepInput, after: Any = None) -> Logged:
            if len(self.given) == 1:
                self.given.append(batch)
                raise BadStep("no file can be opened just now")
            return super().start(batch, after)

    device = Refusing(overlaps=True)
    steps = decode(5, ahead=False), decode(6, ahead=True), decode(7, ahead=False)
    kinds = [type(answer) for answer in orders(device, *steps)]
    assert kinds == [wire.StepDone, wire.Failed, wire.StepDone]
    assert device.log[:2] == ["start 1", "tokens 1"]


class Side:
    """A device with an arena of its own, and the rows of its sessions."""

    def __init__(
        self, device: CpuDevice | CudaDevice, resources: Any, model: Path, folder: Path
    ) -> None:
        self.device = device
        load = wire.Load(str(model), str(folder.parent / "cache"), resources, 300, SLOTS, CONTEXT)
        facts = device.load(load, lambda *_: None)
        layout = PageLayout(facts.layers)
        self.page_bytes = layout.page_bytes
        folder.mkdir()
        self.arena = Arena.create(str(folder / "arena.1"), layout, SLOTS, 1)
        attach = wire.Attach(self.arena.path, SLOTS, layout.page_bytes, str(folder))
        self.memory = device.attach(attach, layout)
        self.batch: StepInput
        self.limits = StepLimits(300, SLOTS, CONTEXT, facts.vocab_size)
        owners = [wire.ReserveSlot(i, 1, bytes([i]), 1, i % 2) for i in range(SLOTS)]
        self.memory.prepare(wire.Step((), reserve=tuple(owners)), ())

    def page(self, slot: int) -> bytes:
        """The rows of a slot."""
        assert isinstance(self.device.memory, HostMemory)
        return bytes(self.device.memory.tile(slot, 0, self.page_bytes))

    def step(
        self,
        start: int,
        tokens: Sequence[Sequence[int]],
        sampled: Mapping[int, int],
        *,
        after: GpuStep | None = None,
        histories: Sequence[Sequence[int]] = (),
    ) -> Any:
        """A step of some tokens of each session; of sampled ones, if none are named, or of those of
        a step `after` which it comes. Histories are penalised."""
        n, sessions = len(tokens[0]) or 1, range(len(tokens))
        pages, sampling = -(-(start + n) // 256), PENALISED if histories else GREEDY
        of = len(histories[0]) if histories else 0
        takes = not tokens[0]
        entries = [
            wire.Entry(i, 1, start, n, pages, sampling, of, takes_sample=takes) for i in sessions
        ]
        codes = array("Q", [ARENA_BIT | 2 * i + p for i in sessions for p in range(pages)])
        ids = array("i", [token for own in tokens for token in own or [0]])
        ids.extend([token for own in histories for token in own])
        step = wire.Step(tuple(entries))
        self.batch = unpack(step, codes.tobytes() + ids.tobytes(), self.limits)
        if after is None:
            take_samples(self.batch, sampled)
        return self.device.start(self.batch, after)

    def proven(self, slot: int, ids: Sequence[int]) -> int:
        """How many leading rows of a slot are those of these tokens."""
        owner = SlotOwner(bytes([slot]), 1, 1, slot % 2)
        return rows_left(self.arena, ArenaSlot(slot, 1), owner, ids)


@pytest.fixture
def sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Side, Side, FakeDriver]]:
    """A CPU, and a GPU behind a driver that computes nothing before it is waited for."""
    if COMPILER is None:
        pytest.skip("no g++")
    fake = FakeDriver(Emulator(compile_kernels(ROOT / "build/simt", is_checked=False)))
    monkeypatch.setattr(driver.importlib, "import_module", {"cuda.bindings.driver": fake}.get)
    write_synthetic(tmp_path / "model.gguf", SHAPE)
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


@pytest.mark.parametrize("sessions", [2, LATE_ENTRIES_MIN])
def test_overlapping_steps_give_the_bits_of_the_cpu(
    sides: tuple[Side, Side, FakeDriver], sessions: int
) -> None:
    cpu, gpu, fake = sides
    rng = np.random.default_rng(4)
    fed = [rng.integers(0, 100, 233).tolist() for _ in range(sessions)]
    start = 0
    for count in (30,) * 7 + (22,):  # chunks of the prompt
        for side in (cpu, gpu):
            one = side.step(start, [own[start : start + count] for own in fed], {})
            one.tokens()
            one.finish()
        start += count
    first = [own[start:] for own in fed]
    running, want = gpu.step(start, first, {}), cpu.step(start, first, {})
    assert isinstance(running, GpuStep)
    for position in range(start + 1, start + 38):  # past the end of a page
        wanted = want.tokens()
        tokens = running.tokens()
        assert tokens == wanted
        for session, own in enumerate(fed):
            own.append(tokens[session])
        following = gpu.step(position, [[]] * sessions, tokens)
        waits = fake.calls.count("cuStreamSynchronize")
        output = running.finish()
        assert fake.calls.count("cuStreamSynchronize") == waits  # the next step may run on
        assert output == want.finish()
        running, want = following, cpu.step(position, [[]] * sessions, wanted)
    assert running.tokens() == want.tokens()
    assert running.finish() == want.finish()
    (n,) = {len(own) for own in fed}
    assert n == 270
    late = 0 if sessions < LATE_ENTRIES_MIN else n % 16
    for session, own in enumerate(fed):
        assert gpu.proven(2 * session, own[:256]) == 256
        assert gpu.proven(2 * session + 1, own[256:]) == n - 256 - late
    check_pages(cpu, gpu, fed)


def check_pages(cpu: Side, gpu: Side, fed: Sequence[Sequence[int]]) -> None:
    """Once the GPU's late rows are stored, both sides have the same proven rows."""
    while gpu.device.do_deferred():
        pass
    for session, own in enumerate(fed):
        for page in range(2):
            slot, ids = 2 * session + page, own[256 * page : 256 * (page + 1)]
            assert [side.proven(slot, ids) for side in (cpu, gpu)] == [len(ids)] * 2
            assert gpu.page(slot) == cpu.page(slot)


def first_decode(side: Side, fed: Sequence[Sequence[int]], past: int) -> Any:
    """The step of the last token of a prompt of each session; the others are computed before."""
    last = len(fed[0]) - 1
    for start in range(0, last, 30):
        one = side.step(start, [own[start : min(last, start + 30)] for own in fed], {})
        one.tokens()
        one.finish()
    histories = [own[-past:] for own in fed] if past else ()
    return side.step(last, [own[-1:] for own in fed], {}, histories=histories)


@pytest.mark.parametrize(
    ("sessions", "past", "is_early"), [(2, 0, True), (2, 5, False), (LATE_ENTRIES_MIN, 5, True)]
)
def test_a_step_that_takes_samples_on_the_gpu_gives_the_bits_of_the_cpu(
    sides: tuple[Side, Side, FakeDriver], sessions: int, past: int, is_early: bool
) -> None:
    """It is given before the samples are known, also as the ends of histories of `past` tokens, and
    is computed before the host has finished the step before, or later."""
    cpu, gpu, fake = sides
    fake.is_early = is_early
    rng = np.random.default_rng(5)
    fed = [rng.integers(0, 100, 250).tolist() for _ in range(sessions)]
    running, want = (first_decode(side, fed, past) for side in (gpu, cpu))
    was_queued = 0
    for position in range(250, 262):  # past the end of a page
        histories = [[*own[len(own) - past + 1 :], 0] for own in fed] if past else ()
        waits = fake.calls.count("cuStreamSynchronize")
        assert running.may_be_followed
        following = gpu.step(position, [[]] * sessions, {}, after=running, histories=histories)
        was_queued += not running.is_computed  # but where memory is freed, which waits for it
        wanted, tokens = want.tokens(), running.tokens()
        assert fake.calls.count("cuStreamSynchronize") == waits  # that would be a wait for both
        assert tokens == wanted
        take_samples(gpu.batch, tokens)
        assert gpu.batch.untaken == ()
        for session, own in enumerate(fed):
            own.append(tokens[session])
        assert running.finish() == want.finish()
        histories = [own[-past:] for own in fed] if past else ()
        running = following
        want = cpu.step(position, [[]] * sessions, wanted, histories=histories)
    assert was_queued > 8 or is_early
    assert running.tokens() == want.tokens()
    assert running.finish() == want.finish()
    check_pages(cpu, gpu, fed)


@pytest.mark.parametrize("sessions", [2, LATE_ENTRIES_MIN + 1])
def test_a_row_of_an_unknown_token_gets_no_record(
    sides: tuple[Side, Side, FakeDriver], sessions: int
) -> None:
    """The step before has found the rows of session 1 unusable: the GPU took any token."""
    gpu = sides[1]
    running = first_decode(gpu, [[3, 4, 5]] * sessions, 0)
    following = gpu.step(3, [[]] * sessions, {}, after=running)
    tokens = running.tokens()
    running.finish()
    take_samples(gpu.batch, {session: tokens[session] for session in tokens if session != 1})
    assert gpu.batch.untaken == (1,)
    assert (len(following.tokens()), len(following.finish().rows)) == (sessions, sessions)
    while gpu.device.do_deferred():
        pass
    for session in range(sessions):
        held = gpu.proven(2 * session, [3, 4, 5, 0 if session == 1 else tokens[session]])
        assert held == (3 if session == 1 else 4)


def test_late_rows_are_stored_before_they_are_needed_and_forgotten_with_their_slot(
    sides: tuple[Side, Side, FakeDriver],
) -> None:
    gpu, tokens = sides[1], [[7]] * LATE_ENTRIES_MIN
    memory = gpu.device.memory
    assert isinstance(memory, DeviceMemory)

    def decode_one(position: int) -> None:
        one = gpu.step(position, tokens, {})
        one.tokens()
        one.finish()

    def held() -> list[int]:
        return [gpu.proven(2 * i, [7] * 9) for i in range(LATE_ENTRIES_MIN)]

    for position in range(3):
        decode_one(position)
    assert (len(memory.late), held()) == (3 * LATE_ENTRIES_MIN, [0] * LATE_ENTRIES_MIN)
    decode_one(1)  # the rows from 1 on were void
    assert len(memory.late) == 2 * LATE_ENTRIES_MIN
    memory.finish(wire.Step((), digest=(wire.Digest(0, 2),)))
    assert held()[:2] == [2, 0]
    relabel = wire.Relabel(2, 1, bytes([2]), 1, 0, 2)
    memory.prepare(wire.Step((), relabel=(relabel,)), ())
    assert held()[:3] == [2, 2, 0]
    memory.prepare(wire.Step((), touch=(ARENA_BIT | 6,)), ())  # before it is read by another lane
    assert (held()[3], memory.touch_failures) == (2, 0)
    memory.prepare(wire.Step((), poison=(4,)), ())
    memory.prepare(wire.Step((), reserve=(wire.ReserveSlot(4, 1, bytes([4]), 1, 0),)), ())
    assert len(memory.late) == 2 * (LATE_ENTRIES_MIN - 4)
    one = gpu.step(2, tokens[:4], {})  # few entries: stored at once, behind those that wait
    one.tokens()
    one.finish()
    assert held() == [3, 3, 0, 3, *[0] * (LATE_ENTRIES_MIN - 4)]
    decode_one(5)  # a gap
    assert held()[4:] == [2] * (LATE_ENTRIES_MIN - 4)
    gpu.device.close()
    assert len(memory.late) == 0


def test_decodes_beside_a_chunk_of_a_prompt_are_stored_late(
    sides: tuple[Side, Side, FakeDriver],
) -> None:
    cpu, gpu, _ = sides
    rng, counts = np.random.default_rng(6), [1] * 4 + [5] + [1] * 5
    assert sum(n == 1 for n in counts) == LATE_ENTRIES_MIN
    fed: list[list[int]] = [[] for _ in counts]
    for _ in range(3):
        starts, new = [len(own) for own in fed], [rng.integers(0, 100, n).tolist() for n in counts]
        for own, more in zip(fed, new, strict=True):
            own.extend(more)
        entries = [
            wire.Entry(i, 1, start, n, 1, GREEDY)
            for i, (start, n) in enumerate(zip(starts, counts, strict=True))
        ]
        codes = array("Q", [ARENA_BIT | 2 * i for i in range(len(counts))])
        ids = array("i", [token for more in new for token in more])
        outputs: list[StepOutput] = []
        for side in (cpu, gpu):
            payload = codes.tobytes() + ids.tobytes()
            one = side.device.start(unpack(wire.Step(tuple(entries)), payload, side.limits))
            one.tokens()
            outputs.append(one.finish())
        assert outputs[0] == outputs[1]
    held = [gpu.proven(2 * i, own) for i, own in enumerate(fed)]
    assert held == [len(own) if len(own) > 3 else 0 for own in fed]
    while gpu.device.do_deferred():
        pass
    for i, own in enumerate(fed):
        assert gpu.proven(2 * i, own) == cpu.proven(2 * i, own) == len(own)
        assert gpu.page(2 * i) == cpu.page(2 * i)


def test_the_gpu_gets_a_page_with_its_late_rows(sides: tuple[Side, Side, FakeDriver]) -> None:
    cpu, gpu, _ = sides
    rng, sampled = np.random.default_rng(8), list[Any]()
    prompt = rng.integers(0, 100, (12, LATE_ENTRIES_MIN)).tolist()
    for side in (cpu, gpu):
        for position, tokens in enumerate(prompt):
            if side is gpu and position == 9:
                assert isinstance(gpu.device, CudaDevice)
                assert gpu.device.gpu is not None
                gpu.device.gpu.pages.forget([ARENA_BIT | slot for slot in range(SLOTS)])
            one = side.step(position, [[token] for token in tokens], {})
            sampled.append(one.tokens())
            one.finish()
    assert sampled[: len(prompt)] == sampled[len(prompt) :]


def test_an_idle_worker_does_what_its_device_has_put_off() -> None:
    device = LoggingDevice(overlaps=True)
    ours, theirs = socket.socketpair()
    end, link = (BlockingLink(one, wire.LANE_LINK) for one in (ours, theirs))
    worker = Worker(link, 1, {wire.CpuResources: lambda: device})
    thread = threading.Thread(target=worker.serve)
    thread.start()
    load = wire.Load("", "", wire.CpuResources(1, (), 0), 8, 4, CONTEXT)
    end.send(wire.LANE_LINK.encode(load, incarnation=1))
    end_s = time.monotonic() + 30.0
    while "deferred" not in device.log and time.monotonic() < end_s:
        time.sleep(0.01)
    assert device.log == ["deferred"]
    ours.shutdown(socket.SHUT_WR)
    thread.join()
    for one in (end, link):
        one.close()


def test_a_mask_is_for_one_step() -> None:
    """One that is late for a step, of a draft that was wrong perhaps, is not that of the next step
    for the same position, where other tokens are before it."""
    theirs, ours = socket.socketpair()
    engine = BlockingLink(ours, wire.LANE_LINK)
    try:
        worker = Worker(BlockingLink(theirs, wire.LANE_LINK), 1, {})
        worker._facts = FACTS
        for step, word in ((1, 1), (2, 2)):
            mask = wire.Mask(7, 30, word.to_bytes(4, "little"))
            engine.send(wire.LANE_LINK.encode(mask, step=step, incarnation=1))
        for step, word in ((2, 2), (3, 0), (1, 1)):
            (found,) = worker._wait_masks(step, {}, [(7, 30)])
            assert (0 if found is None else found[0]) == word
    finally:
        ours.close()
        theirs.close()
