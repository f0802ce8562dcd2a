"""HashLM: a fake model whose next token depends on every KV byte, so wrong KV gives wrong tokens.

Row p of a timeline is a pseudo-random function of (model, row p-1 as it is in its page, all bytes
of the full pages before, token, position); the next token is a hash of all bytes of rows 0..p. All
are read through the page table, so one wrong, stale, foreign or reordered byte changes all later
tokens, even if only a chunk of a prefill read it. With a recurrent state (Faults.state_bytes), a
state that is not the one behind the row before does so too. `hashlm_tokens` computes the same
without an engine, pages, states or processes.

Runs as a worker: `python -m bench.models.hashlm SOCKET_FD PARENT_PID REPORT_FD FILES_FD
INCARNATION`. The environment variable HASHLM_FAULTS (JSON, see Faults) injects crashes, delays
and NaN.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from batchengine.child import command
from batchengine.gguf import GgufFile
from batchengine.lanes.device import LaneMemory, Report
from batchengine.lanes.host_device import Computed, HostDevice, wanted_rows
from batchengine.lanes.host_memory import HostMemory
from batchengine.lanes.step_input import I32Array, Mask, StepInput, StepOutput, U64Array
from batchengine.lanes.worker import Worker, main
from batchengine.weights import read_spec
from batchengine.wire import lane as wire
from batchengine.wire.frames import BlockingLink, Payload
from kv_store.layout import PAGE_TOKENS, PageLayout

LAYOUT = PageLayout.uniform(2, 1, 32)
ROW_BYTES = LAYOUT.row_bytes
FIRST_TOKEN = 20  # smallest token that it samples: those below may end a turn
MASK64 = (1 << 64) - 1
_POSITION = struct.Struct("<QI")
FAULTS = "HASHLM_FAULTS"
WORKER_COMMAND = command.python_command("bench.models.hashlm")
command.KEPT.add(FAULTS)  # an engine in this process gives it to its workers

# Points of a step at which a crash can be injected, in order.
POINTS = (
    "before_chores",
    "after_chores",
    "before_rows",
    "inside_row",  # half of the step's first row is written
    "before_records",  # every row is written, no record
    "before_answer",
    "inside_answer",  # half of the frame is sent
    "after_answer",
)


class Faults(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The faults of a worker's run. Steps count from 1 in each run, chores-only too."""

    die: str = ""  # one of POINTS
    at: int = 1  # in this step,
    life: int = 0  # of this incarnation; 0 = of each
    signal: str = "SIGKILL"  # of which the engine blames no step
    delay_ms: float = 0.0  # of every step
    nan_at: int = 0  # the first entry of this step has rows that are not finite
    model: str = ""  # another name is another model: other rows, other identity
    state_bytes: int = 0  # of the recurrent state
    n_tokens: int = 0  # it samples so many different ones, so its text repeats itself; 0 = all

    @staticmethod
    def of_environment() -> Faults:
        """The faults of HASHLM_FAULTS; raises msgspec.ValidationError for a misspelt one."""
        faults = msgspec.json.decode(os.environ.get(FAULTS, "{}"), type=Faults)
        if faults.die and faults.die not in POINTS:
            raise msgspec.ValidationError(f"die is one of {', '.join(POINTS)}")
        return faults


def _model_key(model: str) -> bytes:
    return hashlib.sha256(b"hashlm v2 " + model.encode()).digest()


def _row(key: bytes, before: bytes, past: bytes, position: int, token: int) -> bytes:
    """The bytes of a row; `before` are those of the row before it, empty for the first, and `past`
    stands for the full pages before its own."""
    return hashlib.shake_128(key + _POSITION.pack(position, token) + past + before).digest(
        ROW_BYTES
    )


def _past(pages: Sequence[bytes]) -> bytes:
    """The digests of whole pages as one."""
    return xxhash.xxh3_128_digest(b"".join(pages))


def _next_token(pages: Sequence[bytes], tail: bytes, seed: int, n_tokens: int) -> int:
    """The token after the rows of `pages` (digest of each whole page) and `tail` (row bytes), one
    of `n_tokens`."""
    value = xxhash.xxh3_64_intdigest(b"".join((*pages, tail)), seed & MASK64)
    return FIRST_TOKEN + value % n_tokens


@functools.cache
def _offsets() -> NDArray[np.int64]:
    """(256, row bytes): the offset in a page of each byte of each row."""
    where = np.arange(LAYOUT.page_bytes)
    low = LAYOUT.gather_rows((where & 0xFF).astype(np.uint8).tobytes(), 0, PAGE_TOKENS)
    high = LAYOUT.gather_rows((where >> 8).astype(np.uint8).tobytes(), 0, PAGE_TOKENS)
    return high.astype(np.int64) << 8 | low


class HashTimeline:
    """One timeline as pure data: the rows of its tokens, and the token that follows."""

    def __init__(self, *, vocab: int, model: str = "", n_tokens: int = 0) -> None:
        self._key = _model_key(model)
        self._n_tokens = n_tokens or vocab - FIRST_TOKEN
        self._pages: list[bytes] = []
        self._past = _past(())
        self._tail: list[bytes] = []
        self._last = b""
        self._length = 0

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the timeline."""
        for token in tokens:
            self._last = _row(self._key, self._last, self._past, self._length, token)
            self._tail.append(self._last)
            self._length += 1
            if len(self._tail) == PAGE_TOKENS:
                page = np.zeros(LAYOUT.payload_bytes, np.uint8)
                page[_offsets()] = np.frombuffer(b"".join(self._tail), np.uint8).reshape(
                    PAGE_TOKENS, ROW_BYTES
                )
                self._pages.append(xxhash.xxh3_128_digest(page.data))
                self._past = _past(self._pages)
                self._tail.clear()

    def next_token(self, seed: int = 0) -> int:
        """The token that HashLM samples after the tokens added so far."""
        return _next_token(self._pages, b"".join(self._tail), seed, self._n_tokens)


def hashlm_tokens(
    prompt: Sequence[int],
    n: int,
    *,
    seed: int = 0,
    vocab: int = 2048,
    model: str = "",
    n_tokens: int = 0,
) -> list[int]:
    """The `n` tokens that HashLM samples after a prompt, by definition and without an engine."""
    timeline, sampled = HashTimeline(vocab=vocab, model=model, n_tokens=n_tokens), list[int]()
    timeline.add(prompt)
    while len(sampled) < n:
        sampled.append(timeline.next_token(seed))
        timeline.add(sampled[-1:])
    return sampled


class HashDevice(HostDevice):
    """The device of a HashLM worker. The model file is read for its vocabulary size only."""

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__()
        self.faults = faults or Faults.of_environment()
        self.steps = 0
        self._key = _model_key(self.faults.model)
        self._n_tokens = 0
        self._views: dict[int, NDArray[np.uint8]] = {}

    def load(self, load: wire.Load, report: Report) -> wire.ModelFacts:
        """Read the vocabulary size; there are no weights."""
        with GgufFile(load.model_path) as gguf:
            vocab = read_spec(gguf).n_vocab
        self._n_tokens = self.faults.n_tokens or vocab - FIRST_TOKEN
        report("map weights", "none", 0.9, 0.0)
        report("cpu kernels", "hashes", 0.95, 0.0)
        return wire.ModelFacts(
            arith_id=hashlib.sha256(b"hashlm arithmetic v2").hexdigest(),
            isa="hash",
            threads=1,
            layers=LAYOUT.layers,
            payload_bytes=LAYOUT.payload_bytes,
            vocab_size=vocab,
            identity={"model_hash": self._key.hex(), "arch": "hashlm", "rope_digest": "none"},
            state_bytes=self.faults.state_bytes,
            is_whole=bool(self.faults.state_bytes),
        )

    def attach(self, attach: wire.Attach, layout: PageLayout) -> LaneMemory:
        """Map the arena of this worker."""
        self.memory = HashMemory(attach, layout, self.at)
        return self.memory

    def compute(self, batch: StepInput, addresses: U64Array, seeds: U64Array) -> Computed:
        """Write the rows of every entry; read all rows of entries with `sampling`."""
        self.at("before_rows")
        if self.faults.delay_ms:
            time.sleep(self.faults.delay_ms / 1000.0)
        tokens, digests = batch.tokens.tolist(), np.empty(len(batch.tokens), np.uint64)
        all_pages, all_seeds = addresses.tolist(), seeds.tolist()
        sampled: list[wire.SampledRow] = []
        rejected: list[tuple[int, int]] = []
        nonfinite: list[int] = []
        unmasked: list[int] = []
        wanted = wanted_rows(batch)
        masks = dict(zip(wanted.masks, batch.masks(wanted.masks), strict=True))
        states = None if self.memory is None else self.memory.states.addresses(batch)
        first_token = first_page = 0
        for index, (entry, (count, start, n_pages)) in enumerate(
            zip(batch.entries, batch.shape.tolist(), strict=True)
        ):
            pages = [self._page(a) for a in all_pages[first_page : first_page + n_pages]]
            span, wrong = slice(first_token, first_token + count), 0
            is_good = states is None or self._is_state(int(states[index, 0]), pages, start)
            rows = self._append(pages, start, tokens[span], is_good=is_good)
            digests[span] = [
                xxhash.xxh3_64_intdigest(row, seed)
                for row, seed in zip(rows, all_seeds[span], strict=True)
            ]
            if index == 0 and self.steps and self.steps == self.faults.nan_at:
                nonfinite.append(index)
            elif entry.sampling is not None:
                draft = tokens[span][count - entry.drafts :]
                first = start + count - entry.drafts
                keys = [(entry.session, first + n) for n in range(entry.drafts + 1)]
                allows = [masks[key] for key in keys] if entry.masked else None
                chosen = self._sample(pages, first, draft, entry.sampling.seed, allows)
                if not chosen:
                    unmasked.append(index)
                has_top = entry.sampling.logprobs > 0
                sampled += [
                    wire.SampledRow(entry.session, token, 0.0, ((token, 0.0),) if has_top else ())
                    for token in chosen
                ]
                if chosen and (wrong := len(draft) + 1 - len(chosen)):
                    rejected.append((index, wrong))
            if states is not None:
                kept = int(count) - wrong
                state = self._state_of(rows[kept - 1], int(start) + kept)
                self._state_at(int(states[index, 1]))[:] = state
            first_token, first_page = first_token + count, first_page + n_pages
        self.at("before_records")
        output = StepOutput(
            tuple(sampled),
            tuple(nonfinite),
            unmasked=tuple(unmasked),
            rejected=tuple(rejected),
        )
        return output, digests

    def do_deferred(self) -> bool:
        """Nothing was put off."""
        return False

    def close(self) -> None:
        """Nothing to close."""

    def at(self, point: str) -> None:
        """Kill this process if a crash is injected at this point."""
        if self.dies_at(point):
            os.kill(os.getpid(), getattr(signal, self.faults.signal))

    def dies_at(self, point: str) -> bool:
        """Whether a crash is injected at this point of this step."""
        faults = self.faults
        return faults.die == point and self.steps == faults.at

    def _page(self, address: int) -> NDArray[np.uint8]:
        """A view of the payload at an address, so that bytes are read again each time."""
        view = self._views.get(address)
        if view is None:
            memory = (ctypes.c_ubyte * LAYOUT.payload_bytes).from_address(address)
            view = self._views[address] = np.frombuffer(memoryview(memory), np.uint8)
        return view

    def _state_of(self, before: bytes, position: int) -> NDArray[np.uint8]:
        """The recurrent state behind the row `before`, the last of the first `position`."""
        part = hashlib.shake_128(b"state" + self._key + _POSITION.pack(position, 0) + before)
        return np.frombuffer(part.digest(self.faults.state_bytes), np.uint8)

    def _state_at(self, address: int) -> NDArray[np.uint8]:
        memory = (ctypes.c_ubyte * self.faults.state_bytes).from_address(address)
        return np.frombuffer(memoryview(memory), np.uint8)

    def _is_state(self, address: int, pages: list[NDArray[np.uint8]], start: int) -> bool:
        """Whether the state at an address, 0 = none, is the one behind the first `start` rows."""
        if not start or not address:
            return not start and not address
        return np.array_equal(
            self._state_at(address), self._state_of(_row_before(pages, start), start)
        )

    def _append(
        self,
        pages: list[NDArray[np.uint8]],
        start: int,
        tokens: list[int],
        *,
        is_good: bool = True,
    ) -> list[bytes]:
        """Write the rows of positions [start, start + len(tokens)); returns their bytes, which are
        others if the state is not `is_good`."""
        offsets = _offsets()
        before = _row_before(pages, start) if is_good else b"another state"
        rows: list[bytes] = []
        digests = [xxhash.xxh3_128_digest(page.data) for page in pages[: start // PAGE_TOKENS]]
        for page, first, last in _spans(start, len(tokens)):
            at, past = len(rows), _past(digests)
            for position in range(start + at, start + at + last - first):
                before = _row(self._key, before, past, position, tokens[position - start])
                rows.append(before)
            if self.dies_at("inside_row"):
                half = ROW_BYTES // 2
                pages[page][offsets[first][:half]] = np.frombuffer(rows[0], np.uint8, half)
                self.at("inside_row")
            data = np.frombuffer(b"".join(rows[at:]), np.uint8)
            pages[page][offsets[first:last]] = data.reshape(-1, ROW_BYTES)
            digests.append(xxhash.xxh3_128_digest(pages[page].data))  # for full pages only
        return rows

    def _sample(
        self,
        pages: list[NDArray[np.uint8]],
        length: int,
        draft: Sequence[int],
        seed: int,
        masks: Sequence[Mask | None] | None,
    ) -> list[int]:
        """The tokens that follow the first `length` rows, and those of a draft behind them: up to
        the first token that the draft has not, or whose mask is late."""
        tokens: list[int] = []
        for n in range(len(draft) + 1):
            mask = None if masks is None else masks[n]
            if masks is not None and mask is None:
                break
            tokens.append(_allowed(self._read(pages, length + n, seed), mask))
            if tokens[n : n + 1] != list(draft[n : n + 1]):
                break
        return tokens

    def _read(self, pages: list[NDArray[np.uint8]], length: int, seed: int) -> int:
        """The token after the first `length` rows, every byte of them read now."""
        full, rest = divmod(length, PAGE_TOKENS)
        digests = [xxhash.xxh3_128_digest(page.data) for page in pages[:full]]
        tail = pages[full][_offsets()[:rest]].tobytes() if rest else b""
        return _next_token(digests, tail, seed, self._n_tokens)


def _row_before(pages: list[NDArray[np.uint8]], start: int) -> bytes:
    """The row before position `start`, as it is in its page; nothing before the first one."""
    if not start:
        return b""
    page, row = divmod(start - 1, PAGE_TOKENS)
    return pages[page][_offsets()[row]].tobytes()


def _allowed(token: int, mask: Mask | None) -> int:
    """The token that a mask makes of one that was sampled without it."""
    if mask is None:
        return token
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(ids[token % len(ids)])


def _spans(start: int, count: int) -> Iterator[tuple[int, int, int]]:
    """(page, first row, last row + 1) of positions [start, start + count)."""
    end = start + count
    for page in range(start // PAGE_TOKENS, -(-end // PAGE_TOKENS)):
        base = page * PAGE_TOKENS
        yield page, max(start - base, 0), min(end - base, PAGE_TOKENS)


class HashMemory(HostMemory):
    """The real memory of a worker, with crash points before and after its chores."""

    def __init__(self, attach: wire.Attach, layout: PageLayout, at: Callable[[str], None]) -> None:
        super().__init__(attach, layout)
        self._at = at

    def prepare(self, step: wire.Step, imported: Sequence[I32Array]) -> tuple[int, ...]:
        self._at("before_chores")
        counts = super().prepare(step, imported)
        self._at("after_chores")
        return counts


class HashWorker(Worker):
    """The real worker around HashLM, with crash points around its answers."""

    def __init__(
        self,
        link: BlockingLink[wire.LaneMessage],
        incarnation: int,
        device: HashDevice | None = None,
    ) -> None:
        device = self.device = device or HashDevice()
        faults = device.faults
        if faults.life not in (0, incarnation):
            device.faults = Faults(
                delay_ms=faults.delay_ms,
                model=faults.model,
                state_bytes=faults.state_bytes,
                n_tokens=faults.n_tokens,
            )
        super().__init__(link, incarnation, {wire.CpuResources: lambda: device})

    def _step(self, number: int, step: wire.Step, payload: Payload) -> wire.LaneMessage:
        self.device.steps += 1
        return super()._step(number, step, payload)

    def _send(self, message: wire.LaneMessage, asked: wire.LaneFrame) -> None:
        is_step = isinstance(asked.message, wire.Step)
        if is_step:
            self.device.at("before_answer")
            if self.device.dies_at("inside_answer"):
                frame = wire.LANE_LINK.encode(
                    message, step=asked.step, incarnation=self._incarnation
                )
                self._link.send(frame[: len(frame) // 2])
                self.device.at("inside_answer")
        super()._send(message, asked)
        if is_step:
            self.device.at("after_answer")


if __name__ == "__main__":
    main(HashWorker)
