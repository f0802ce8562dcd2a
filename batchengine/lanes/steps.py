"""One Step frame as arrays, checked: what a Compute needs and nothing it has to distrust.

Payload of a Step, little-endian, in this order (widest first, so every part stays aligned):

    [ place codes u64 | tokens i32 | penalty histories i32 | tokens of adopted rows i32 ]
      sum n_pages       sum n_tokens  sum history_len         sum adopt.rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from batchengine import wire
from batchengine.core import PAGE_TOKENS, BatchEngineError

ARENA_BIT = 1 << 63  # place code: set = index of an arena place, else (extent << 32) | place
PLACE_MASK = (1 << 32) - 1

U64Array = NDArray[np.uint64]
I32Array = NDArray[np.int32]


class BadStep(BatchEngineError):
    """A Step frame contradicts itself or this worker's capacities; nothing was computed."""

    def __init__(self, why: str) -> None:
        super().__init__("BE2201", "step refused", why=why)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step of this worker may hold."""

    tokens_max: int
    entries_max: int
    context_tokens: int
    vocab_size: int


@dataclass(slots=True)
class StepBatch:
    """A checked step. tokens (T,), codes (P,), shape rows are (n_tokens, start, n_pages).

    adopted: per Step.adopt the tokens its rows must hold.
    """

    entries: tuple[wire.Entry, ...]
    shape: I32Array
    tokens: I32Array
    codes: U64Array
    histories: list[I32Array | None]
    adopted: list[I32Array]


@dataclass(slots=True)
class StepOutput:
    """rows: one per entry that wanted a token and is not poisoned; poisoned: entry indices.

    row_digests: u64 per token of the batch, for the arena's row records.
    """

    rows: tuple[wire.Row, ...]
    poisoned: tuple[int, ...]
    row_digests: U64Array


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a Compute knows once loaded; becomes the worker's Ready."""

    arith_id: str
    isa: str
    threads: int
    n_layer: int
    n_kv_head: int
    head_dim: int
    payload_bytes: int
    vocab_size: int
    identity: dict[str, str | int | float]


Report = Callable[[str, str, float, float], None]  # stage, detail, progress 0..1, seconds


class Compute(Protocol):
    """The arithmetic behind a lane. Stateless but for weights and scratch."""

    def load(self, load: wire.Load, report: Report) -> ModelFacts: ...
    def run(self, batch: StepBatch, addresses: U64Array, seeds: U64Array) -> StepOutput: ...
    def close(self) -> None: ...


def unpack(step: wire.Step, payload: bytes, limits: Limits) -> StepBatch:
    """Check a Step against its payload and the worker's limits; raises BadStep."""
    entries = step.entries
    if len(entries) > limits.entries_max:
        raise BadStep(f"{len(entries)} entries of {limits.entries_max}")
    n_tokens = n_pages = n_history = 0
    shape: list[tuple[int, int, int]] = []
    for entry in entries:
        count, start, pages = entry.n_tokens, entry.start, entry.n_pages
        if count < 1 or start < 0 or start + count > limits.context_tokens:
            raise BadStep(f"session {entry.session}: tokens [{start}, {start + count})")
        if pages != (start + count + PAGE_TOKENS - 1) // PAGE_TOKENS:
            raise BadStep(f"session {entry.session}: {pages} pages for {start + count} tokens")
        n_tokens += count
        n_pages += pages
        if entry.spec is not None:
            if entry.spec.history_len < 0:
                raise BadStep("negative history")
            n_history += entry.spec.history_len
        shape.append((count, start, pages))
    if n_tokens > limits.tokens_max:
        raise BadStep(f"{n_tokens} tokens of {limits.tokens_max}")
    n_adopted = sum([_adopted_rows(adopt) for adopt in step.adopt])
    if len(payload) != 8 * n_pages + 4 * (n_tokens + n_history + n_adopted):
        raise BadStep(f"payload has {len(payload)} bytes")
    codes = np.frombuffer(payload, np.uint64, n_pages)
    tokens = np.frombuffer(payload, np.int32, n_tokens, 8 * n_pages)
    if n_tokens and (int(tokens.min()) < 0 or int(tokens.max()) >= limits.vocab_size):
        raise BadStep("token id outside the vocabulary")
    _check_writers(shape, codes)
    histories: list[I32Array | None] = []
    at = 8 * n_pages + 4 * n_tokens
    for entry in entries:
        length = 0 if entry.spec is None else entry.spec.history_len
        histories.append(np.frombuffer(payload, np.int32, length, at) if length else None)
        at += 4 * length
    adopted: list[I32Array] = []
    for adopt in step.adopt:
        adopted.append(np.frombuffer(payload, np.int32, adopt.rows, at))
        at += 4 * adopt.rows
    table = np.array(shape, np.int32).reshape(-1, 3)
    return StepBatch(entries, table, tokens, codes, histories, adopted)


def _adopted_rows(adopt: wire.Adopt) -> int:
    if not 0 <= adopt.rows <= PAGE_TOKENS:
        raise BadStep(f"{adopt.rows} rows to adopt into one page")
    return adopt.rows


def _check_writers(shape: list[tuple[int, int, int]], codes: U64Array) -> None:
    """Every page a step appends to is an arena place with exactly one writer in this step."""
    #   codes of one entry:  [ full pages, read only | pages of [start, start+count), written ]
    #                          base                     base + start // 256      base + n_pages
    written: list[int] = []
    base = 0
    for _, start, pages in shape:
        written += range(base + start // PAGE_TOKENS, base + pages)
        base += pages
    places = codes[written].tolist()
    if any(code < ARENA_BIT for code in places):
        raise BadStep("a page to be written is not in the arena")
    if len(set(places)) != len(places):
        raise BadStep("two writers for one page")
