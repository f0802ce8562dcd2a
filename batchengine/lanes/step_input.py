"""Checks one Step frame and unpacks it into the arrays that a device needs.

Payload of a Step, little-endian, in this order (widest first, so every part stays aligned):

    [ slot codes u64 | tokens i32 | penalty histories i32 | tokens of imported rows i32 | ...
      sum n_pages       sum n_tokens  sum history_len         sum import.rows
    ... scored tokens i32 ]
        sum scored
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from batchengine import errors
from batchengine.core import LOGPROBS_MAX, PAGE_TOKENS, SUPERPAGE_PAGES, BatchEngineError
from batchengine.wire import lane as wire
from batchengine.wire.frames import Payload

SLOT_MASK = (1 << 32) - 1

U64Array = NDArray[np.uint64]
I32Array = NDArray[np.int32]
Mask = NDArray[np.uint32]
MaskKey = tuple[int, int]  # session and position of the token
Masks = Callable[[Sequence[MaskKey | None]], list[Mask | None]]


class BadStep(BatchEngineError):
    """A Step frame contradicts itself or this worker's capacities; nothing was computed."""

    def __init__(self, why: str) -> None:
        row = errors.STEP_REFUSED
        super().__init__(row.code, row.kind, row.name, row.what, why)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Largest counts of one step of this worker; `vocab_size` bounds token ids.

    has_links: entries may have segments.
    """

    tokens_max: int
    entries_max: int
    context_tokens: int
    vocab_size: int
    has_links: bool = False


def no_masks(keys: Sequence[MaskKey | None]) -> list[Mask | None]:
    """Masks of a step without any."""
    return [None] * len(keys)


@dataclass(slots=True)
class StepInput:
    """A checked step. tokens (T,), codes (P,), shape rows are (n_tokens, start, n_pages).

    imported: per Step.import the tokens its rows must hold. is_routed: an entry has segments.
    masks: waits for masks; None for keys that are None, and for masks that are late.
    scored: for each entry the tokens behind its leading ones whose log-probabilities are wanted; of
    no entries: none. untaken: indices of entries with `takes_sample` for whose session the step
    before sampled no token; their rows get no record.
    """

    entries: tuple[wire.Entry, ...]
    shape: I32Array
    tokens: I32Array
    codes: U64Array
    histories: list[I32Array | None]
    imported: list[I32Array]
    is_routed: bool = False
    lap_ms: int = 0
    masks: Masks = no_masks
    scored: Sequence[I32Array] = ()
    untaken: tuple[int, ...] = ()

    @property
    def drafts(self) -> list[int]:
        """How many of the last tokens of each entry are a draft."""
        return [entry.drafts for entry in self.entries]


@dataclass(slots=True)
class StepOutput:
    """rows: one per token that was sampled, for entries that wanted one and whose rows are finite;
    nonfinite: the indices of the entries with a row that is not; unreachable: of those that a peer
    did not serve; waited_us: for peers; unmasked: indices of those without a token since their mask
    is late; scores: of the entries with Entry.scored whose rows can be used; rejected: (index of an
    entry, how many of its last tokens are a draft that was wrong), whose rows get no record."""

    rows: tuple[wire.SampledRow, ...]
    nonfinite: tuple[int, ...]
    unreachable: tuple[int, ...] = ()
    waited_us: int = 0
    unmasked: tuple[int, ...] = ()
    scores: tuple[wire.ScoredRows, ...] = ()
    rejected: tuple[tuple[int, int], ...] = ()

    @property
    def unusable(self) -> tuple[int, ...]:
        """The entries whose rows get no record."""
        return self.nonfinite + self.unreachable + self.unmasked


def unpack(step: wire.Step, payload: Payload, limits: StepLimits) -> StepInput:
    """Check a Step against its payload and the worker's limits; raises BadStep."""
    entries = step.entries
    if len(entries) > limits.entries_max:
        raise BadStep(f"{len(entries)} entries of {limits.entries_max}")
    n_tokens = n_pages = n_history = n_scored = n_logits = 0
    shape: list[tuple[int, int, int]] = []
    for entry in entries:
        count, start, pages = entry.n_tokens, entry.start, entry.n_pages
        if count < 1 or start < 0 or start + count > limits.context_tokens:
            raise BadStep(f"session {entry.session}: tokens [{start}, {start + count})")
        if pages != (start + count + PAGE_TOKENS - 1) // PAGE_TOKENS:
            raise BadStep(f"session {entry.session}: {pages} pages for {start + count} tokens")
        n_tokens += count
        n_pages += pages
        if entry.history_len < 0 or (entry.history_len and entry.sampling is None):
            raise BadStep(f"session {entry.session}: a history of {entry.history_len} tokens")
        if entry.masked and entry.sampling is None:
            raise BadStep(f"session {entry.session}: a mask for no token")
        if entry.takes_sample and (count != 1 or entry.sampling is None):
            raise BadStep(f"session {entry.session}: a sample as {count} tokens")
        if entry.drafts:
            _check_draft(entry)
        if not (0 <= entry.scored <= count and 0 <= entry.scored_best <= LOGPROBS_MAX):
            raise BadStep(f"session {entry.session}: {entry.scored} of {count} tokens are scored")
        n_history += entry.history_len
        n_logits += entry.drafts + (entry.sampling is not None)
        n_scored += entry.scored
        shape.append((count, start, pages))
    if n_tokens > limits.tokens_max:
        raise BadStep(f"{n_tokens} tokens of {limits.tokens_max}")
    if n_logits > (most := wire.logits_rows_max(limits.entries_max)):
        raise BadStep(f"{n_logits} rows with logits of {most}")
    n_imported = sum([_imported_rows(import_rows) for import_rows in step.import_rows])
    if len(payload) != 8 * n_pages + 4 * (n_tokens + n_history + n_imported + n_scored):
        raise BadStep(f"payload has {len(payload)} bytes")
    codes = np.frombuffer(payload, np.uint64, n_pages)
    tokens = np.frombuffer(payload, np.int32, n_tokens, 8 * n_pages)
    scored_at = len(payload) - 4 * n_scored
    for ids in (tokens, np.frombuffer(payload, np.int32, n_scored, scored_at)):
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= limits.vocab_size):
            raise BadStep("token id outside the vocabulary")
    _check_writers(shape, codes)
    is_routed = any(entry.segments for entry in entries)
    if is_routed:
        _check_segments(entries, codes, limits)
    histories: list[I32Array | None] = []
    at = 8 * n_pages + 4 * n_tokens
    for entry in entries:
        length = entry.history_len
        histories.append(np.frombuffer(payload, np.int32, length, at) if length else None)
        at += 4 * length
    imported: list[I32Array] = []
    for import_rows in step.import_rows:
        imported.append(np.frombuffer(payload, np.int32, import_rows.rows, at))
        at += 4 * import_rows.rows
    scored: list[I32Array] = []
    for entry in entries if n_scored else ():
        scored.append(np.frombuffer(payload, np.int32, entry.scored, at))
        at += 4 * entry.scored
    table = np.array(shape, np.int32).reshape(-1, 3)
    return StepInput(
        entries, table, tokens, codes, histories, imported, is_routed, step.lap_ms, scored=scored
    )


def takers_of(batch: StepInput) -> list[int]:
    """Indices of the entries that take a sample."""
    return [index for index, entry in enumerate(batch.entries) if entry.takes_sample]


def take_samples(batch: StepInput, sampled: Mapping[int, int]) -> None:
    """Give entries that take a sample the token that the step before sampled for their session.

    If that step sampled no token for the session, as its rows were unusable, the entry computes
    with token 0, or, on a device that took the sample itself (`Device.start`), with any token. The
    engine ignores the result.
    """
    takers = takers_of(batch)
    if not takers:
        return
    batch.tokens = batch.tokens.copy()
    batch.untaken = tuple([i for i in takers if batch.entries[i].session not in sampled])
    ends = np.cumsum(batch.shape[:, 0]) - 1
    for index in takers:
        token = sampled.get(batch.entries[index].session, 0)
        batch.tokens[ends[index]] = token
        history = batch.histories[index]
        if history is not None:
            batch.histories[index] = np.append(history[:-1], np.int32(token))


def _check_draft(entry: wire.Entry) -> None:
    """Raise BadStep unless a draft follows one token, in its page, which it does not fill; or in an
    entry that needs more than its tokens to sample."""
    end = entry.start + entry.n_tokens
    if not 0 < entry.drafts == entry.n_tokens - 1 < end % PAGE_TOKENS:
        raise BadStep(f"session {entry.session}: {entry.drafts} of {entry.n_tokens} are a draft")
    has_more = entry.banned or entry.segments or entry.scored or entry.takes_sample
    if entry.sampling is None or has_more:
        raise BadStep(f"session {entry.session}: a draft, and the entry is no plain one")


def _imported_rows(import_rows: wire.ImportRows) -> int:
    if not 0 <= import_rows.rows <= PAGE_TOKENS:
        raise BadStep(f"{import_rows.rows} rows to import into one page")
    return import_rows.rows


def _check_segments(entries: tuple[wire.Entry, ...], codes: U64Array, limits: StepLimits) -> None:
    """Raise BadStep unless the codes of leading pages are those of whole super-pages of holds."""
    if not limits.has_links:
        raise BadStep("segments, and this worker has no data links")
    base = 0
    for entry in entries:
        at = base
        for segment in entry.segments:
            number, first, n = segment.link, segment.first_page, segment.n_pages
            if n < 1 or n % SUPERPAGE_PAGES or not (0 <= first <= SLOT_MASK - n):
                raise BadStep(f"session {entry.session}: a segment of {n} pages from {first}")
            if not (wire.SELF <= number <= wire.LINK_MAX and _is_u64(segment.hold)):
                raise BadStep(f"session {entry.session}: a segment of link {number}")
            if (at - base + n) * PAGE_TOKENS > entry.start:
                raise BadStep(f"session {entry.session}: a peer holds rows that are not computed")
            named = np.uint64(wire.HELD_BIT | number << 32) + np.arange(
                first, first + n, dtype=np.uint64
            )
            if not np.array_equal(codes[at : at + n], named):
                raise BadStep(f"session {entry.session}: codes differ from the segments")
            at += n
        base += entry.n_pages


def _is_u64(*values: int) -> bool:
    return all(0 <= value < 1 << 64 for value in values)


def written_slots(batch: StepInput) -> list[int]:
    """The arena slots to which a step appends rows."""
    shape = [(count, start, pages) for count, start, pages in batch.shape.tolist()]
    return (batch.codes[_written(shape)] & np.uint64(SLOT_MASK)).tolist()


def _written(shape: list[tuple[int, int, int]]) -> list[int]:
    """Which of the codes of a step are those of pages that it appends to."""
    #   codes of one entry:  [ full pages, read only | pages of [start, start+count), written ]
    #                          base                     base + start // 256      base + n_pages
    written: list[int] = []
    base = 0
    for _, start, pages in shape:
        written += range(base + start // PAGE_TOKENS, base + pages)
        base += pages
    return written


def _check_writers(shape: list[tuple[int, int, int]], codes: U64Array) -> None:
    """Raise BadStep unless each page a step appends to is an arena slot with one writer in it."""
    slots = codes[_written(shape)].tolist()
    if any(code < wire.ARENA_BIT for code in slots):
        raise BadStep("a page to be written is not in the arena")
    if len(set(slots)) != len(slots):
        raise BadStep("two writers for one page")
