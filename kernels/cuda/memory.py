"""Buffers of a forward pass in memory of a GPU, named as those of `kernels`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

import kernels
from kernels.cuda.gpu import Gpu
from kernels.cuda.page_parts import page_table

BLOCK, SPAN_VALUES = 32, 128  # values with one scale, and values that are laid out together
ALIGNMENT = 256  # of the arrays of a parcel
QUERY_TILE_ROWS = 16  # query rows of a block of `attend`; `attend_many` has twice as many
NARROW_DIMS = 256  # of a head; wider and latent ones have own kernels, none of them of many rows
ACCUMULATOR_BYTES = 64 << 20  # of one launch of `attend`, unless one tile has more
FEW_BLOCKS = 256  # of `attend` for a step; up to here a block is given a page of a super-page

LINE_BYTES = 64  # of the layout of pages, as in kv8.h
STATE_ALIGNMENT = 64  # of state images
STATE_ENTRY = np.dtype(  # StateEntry of recurrent.cu
    {
        "names": ["read", "written", "first_token", "n_tokens"],
        "formats": [np.uint64, np.uint64, np.int32, np.int32],
        "itemsize": 32,
    }
)

I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]


class AttendTile(NamedTuple):
    """Query rows of an entry, and the super-pages that they see: the fields of `AttendTile` of
    attention.cu, int32 each."""

    first_token: int
    start_position: int
    first_page: int
    first_row: int
    rows: int
    superpages: int
    first_result: int = 0
    first_superpage: int = 0


class TileHeads(NamedTuple):
    """What the tiles of layers have in common."""

    n_head: int
    n_kv_head: int
    head_dim: int
    window: int
    part: int  # of the pages
    is_latent: bool


class Scratch:
    """Memory for an array of one step. It grows to the largest one."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._size = 0
        self.address = 0

    def reserve(self, n_bytes: int) -> int:
        """The address of `n_bytes` of any value, until the next call. Raises MemoryError."""
        if n_bytes > self._size:
            n_bytes = max(n_bytes, self._size * 3 // 2)
            if self._size:
                self._gpu.free(self.address)
                self._size = 0
            self.address = self._gpu.allocate(n_bytes)
            self._size = n_bytes
        return self.address

    def put(self, array: NDArray[np.generic]) -> int:
        """The address of a copy of an array, until the next call. Raises MemoryError."""
        address = self.reserve(max(1, array.nbytes))
        if array.nbytes:
            self._gpu.copy_in(address, np.ascontiguousarray(array))
        return address


class Parcel:
    """Arrays that are copied to the GPU together: one call of the driver instead of many."""

    def __init__(self, gpu: Gpu) -> None:
        self._memory = Scratch(gpu)

    def send(self, arrays: Sequence[NDArray[np.generic]]) -> list[int]:
        """The addresses of copies, until the next call. An array's is the same one as long as those
        before it have the same sizes, but for parcels that are larger than all before. Raises
        MemoryError."""
        ends = np.cumsum([-(-max(1, array.nbytes) // ALIGNMENT) for array in arrays]) * ALIGNMENT
        starts = [0, *ends[:-1].tolist()]
        parcel = np.zeros(int(ends[-1]), np.uint8)
        for at, array in zip(starts, arrays, strict=True):
            parcel[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        base = self._memory.put(parcel)
        return [base + at for at in starts]


class Rows:
    """fp32 rows (tokens_max, width), without gaps; for each a byte, 1 if it is not finite."""

    def __init__(self, gpu: Gpu, tokens_max: int, width: int) -> None:
        self.tokens_max, self.width = tokens_max, width
        self.address = gpu.allocate(4 * tokens_max * width)
        self.nonfinite = gpu.allocate(tokens_max)


class BadRows(Sequence[int]):
    """Indices of the rows with a NaN or an infinity, which are known once they are fetched."""

    def __init__(self, gpu: Gpu, address: int, rows: int) -> None:
        self._gpu, self._address = gpu, address
        self._flags = np.zeros(rows, np.uint8)
        self._is_fetched = False
        self._found: list[int] | None = None

    def fetch(self) -> BadRows:
        """Those of the launches so far, for which the wait for a later mark is enough."""
        rows = BadRows(self._gpu, self._address, len(self._flags))
        self._gpu.fetch(self._address, rows._flags)
        rows._is_fetched = True
        return rows

    def _indices(self) -> list[int]:
        if self._found is None:
            if not self._is_fetched:
                self._gpu.copy_out(self._address, self._flags)
            self._found = np.flatnonzero(self._flags).tolist()
        return self._found

    def __len__(self) -> int:
        return len(self._indices())

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._indices()[index]


class Activations:
    """Quantised activations of one step, as activations.h has them.

    Float matrices read fp32 rows at `values`, `stride` values apart: those that were quantised, or,
    with `keep_float`, the normed ones, which have memory of their own. gathered: the activations of
    tokens that products of pairs read instead (experts.py); then these have no memory, nor before
    they are written.
    """

    def __init__(self, gpu: Gpu, tokens_max: int, width: int, keep_float: bool) -> None:
        self.tokens_max, self.width, self.stride = tokens_max, width, width
        self._gpu, self._keep_float = gpu, keep_float
        self.gathered: Activations | None = None
        self.values = 0

    @cached_property
    def addresses(self) -> list[int]:
        """Of q, scale and sums. Raises MemoryError."""
        spans = -(-self.width // SPAN_VALUES)
        blocks = 4 * self.tokens_max * spans * (SPAN_VALUES // BLOCK)
        sizes = self.tokens_max * spans * SPAN_VALUES, blocks, blocks
        return [self._gpu.allocate(size) for size in sizes]

    @property
    def scale(self) -> int:
        return self.addresses[1]

    @cached_property
    def kept(self) -> int:
        """The memory of normed rows; 0: they are not kept. Raises MemoryError."""
        return self._gpu.allocate(4 * self.tokens_max * self.width) if self._keep_float else 0


class Queries:
    """Quantised queries of one step."""

    def __init__(self, gpu: Gpu, tokens_max: int, n_head: int, head_dim: int) -> None:
        self.n_head, self.head_dim = n_head, head_dim
        self.q = gpu.allocate(tokens_max * n_head * head_dim)
        self.scale = gpu.allocate(4 * tokens_max * n_head * (head_dim // BLOCK))


class KvRows:
    """The page rows of one step. The rows of two steps are kept on the host."""

    def __init__(self, gpu: Gpu, tokens_max: int, shape: kernels.PageShape) -> None:
        self.address = gpu.allocate(tokens_max * shape.row_bytes)
        self._gpu = gpu
        self._last, self._next = (kernels.KvRows(tokens_max, shape) for _ in range(2))
        for rows in (self._last, self._next):
            gpu.pin(rows.view(tokens_max))

    def fetch(self, tokens: int) -> kernels.KvRows:
        """Copy rows to the host, by the next wait for the GPU; they stay there until the next
        `fetch` but one."""
        self._last, self._next = self._next, self._last
        self._gpu.fetch(self.address, self._last.view(tokens))
        return self._last


class TileRun(NamedTuple):
    """Tiles that are attended to together: of up to `rows` query rows and `superpages`, with `each`
    accumulators of a super-page."""

    rows: int
    each: int
    first: int
    n_tiles: int
    superpages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The query rows of a step in tiles; m, denominators and o: accumulators of a launch."""

    table: int
    launches: tuple[TileRun, ...]
    m: int
    denominators: int
    o: int

    def address_of(self, tile: int) -> int:
        """Where the table of tiles holds one."""
        return self.table + 4 * len(AttendTile._fields) * tile


class Batch:
    """The tokens of one step, and the pages and states they read and write, by addresses of the
    GPU. windows: of the parts of pages."""

    def __init__(
        self,
        gpu: Gpu,
        tokens_max: int,
        entries_max: int,
        pages_max: int,
        *,
        windows: Sequence[int] = (0,),
    ) -> None:
        self._limits = tokens_max, entries_max, pages_max
        self._parcel = Parcel(gpu)
        self._windows = windows
        # Positions, of states the entry of each token and the entries, of each part the pages that
        # are written; then tables of tiles, and of each part all pages. Their number varies, and it
        # moves what lies behind them, so they are the last; in steps of a token per entry that of a
        # part with a window is the same.
        self._unsent: list[NDArray[np.generic]] = []
        self._sent = [0] * 3  # the addresses, but of tables and pages
        self._written, self._pages = ([0] * len(windows) for _ in range(2))
        self._has_states = False
        self._entries: list[tuple[int, int]] = []  # tokens and start position
        self._firsts: list[list[int]] = []  # of each part; see PageTable
        self._tiles: dict[TileHeads, Tiles] = {}  # of all steps so far
        self._memory = defaultdict[TileHeads, tuple[Scratch, ...]](
            lambda: tuple([Scratch(gpu) for _ in range(4)])
        )
        self.n_tokens = self.n_entries = 0

    def set(
        self, tokens: I32, entries: I32, page_addresses: U64, *, absent_pages: bool = False
    ) -> None:
        """As `kernels.Batch.set`; no page may be absent. Where pages have several parts, addresses
        are (parts, pages), and any in parts whose window hides the page from all tokens of its
        entry. ValueError if they do not fit."""
        parts = np.atleast_2d(page_addresses)
        counts, starts, n_pages = (entries[:, i] for i in range(3))
        sizes = len(tokens), len(entries), parts.shape[1]
        if absent_pages or any(n > most for n, most in zip(sizes, self._limits, strict=True)):
            raise ValueError(f"a step of {sizes} tokens, entries and pages")
        if int(counts.sum()) != len(tokens) or int(n_pages.sum()) != parts.shape[1]:
            raise ValueError("the entries have other counts of tokens or pages")
        if len(parts) != len(self._windows):
            raise ValueError(
                f"addresses of {len(parts)} parts, and pages have {len(self._windows)}"
            )
        first_row = np.cumsum(counts) - counts
        positions = np.arange(len(tokens)) + np.repeat(starts - first_row, counts)
        first_page = np.repeat(np.cumsum(n_pages) - n_pages, counts)
        written = parts[:, first_page + positions // kernels.PAGE_TOKENS]
        pages = [page_table(entries, *of) for of in zip(parts, self._windows, strict=True)]
        self._firsts = [table.firsts.tolist() for table in pages]
        self._entries = [(int(n), int(start)) for n, start, _ in entries.tolist()]
        tables: list[I32] = []
        for heads in self._tiles:
            table, self._tiles[heads] = self._make_tiles(heads)
            tables.append(table)
        none = [np.zeros(0, np.int32), np.zeros(0, STATE_ENTRY)]
        tokens_of = [positions.astype(np.int32), *none, *written]
        self._unsent = [*tokens_of, *tables, *[table.pages for table in pages]]
        self._has_states = False
        self.n_tokens, self.n_entries = len(tokens), len(entries)

    def set_states(self, reads: U64, writes: U64) -> None:
        """As `kernels.Batch.set_states`; before anything of the step is sent. ValueError if they do
        not fit."""
        self._has_states = False
        if not len(reads) == len(writes) == self.n_entries:
            raise ValueError(f"{len(reads)} and {len(writes)} states of {self.n_entries} entries")
        if not writes.all() or len(np.unique(writes)) != len(writes):
            raise ValueError("an entry without a state of its own to write")
        if (np.concatenate([reads, writes]) % STATE_ALIGNMENT).any() or np.isin(
            reads, writes
        ).any():
            raise ValueError("a state at an odd address, or one that is read and written")
        if not self._unsent:
            raise ValueError("the step was sent without states")
        counts = np.array([n for n, _ in self._entries], np.int32)
        table = np.zeros(len(counts), STATE_ENTRY)
        table["read"], table["written"], table["n_tokens"] = reads, writes, counts
        table["first_token"] = np.cumsum(counts) - counts
        self._unsent[1:3] = [np.repeat(np.arange(len(counts), dtype=np.int32), counts), table]
        self._has_states = True

    def send(
        self, before: Sequence[NDArray[np.generic]] = (), after: Sequence[NDArray[np.generic]] = ()
    ) -> list[int]:
        """Copy what `set` was given, with other arrays before and after it, whose addresses are
        returned, in one copy. What is not sent is, once it is asked for. Raises MemoryError."""
        addresses = self._parcel.send([*before, *self._unsent, *after])
        end = len(before) + len(self._unsent)
        mine, n = addresses[len(before) : end], len(self._windows)
        self._sent, self._written = mine[:3], mine[3 : 3 + n]
        tables, self._pages = mine[3 + n : -n], mine[-n:]
        self._unsent = []
        for heads, table in zip(self._tiles, tables, strict=True):
            self._tiles[heads] = replace(self._tiles[heads], table=table)
        return addresses[: len(before)] + addresses[end:]

    def _addresses(self) -> list[int]:
        if self._unsent:
            self.send()
        return self._sent

    @property
    def launches(self) -> tuple[tuple[TileRun, ...], ...]:
        """What steps have in common whose launches have equal arguments, tokens apart."""
        return tuple([tiles.launches for tiles in self._tiles.values()])

    @property
    def positions(self) -> int:
        """int32 of each token."""
        return self._addresses()[0]

    def written(self, part: int) -> int:
        """The page of each token, by address."""
        self._addresses()
        return self._written[part]

    def pages(self, part: int) -> int:
        """The pages of all entries that `tiles` count, by address."""
        self._addresses()
        return self._pages[part]

    @property
    def states(self) -> tuple[int, int]:
        """The entry of each token, int32, and STATE_ENTRY of each entry. ValueError if the step has
        no states."""
        if not self._has_states:
            raise ValueError("the batch has no states")
        _, entry_of, entries = self._addresses()
        return entry_of, entries

    def tiles(self, heads: TileHeads) -> Tiles:
        """The query rows of the step in tiles for `attend`, the same for every layer with such
        heads; a window of 0 is none."""
        self._addresses()
        if heads not in self._tiles:
            table, tiles = self._make_tiles(heads)
            self._tiles[heads] = replace(tiles, table=self._memory[heads][0].put(table))
        return self._tiles[heads]

    def _make_tiles(self, heads: TileHeads) -> tuple[I32, Tiles]:
        """The table, and the tiles, which have no address of it yet."""
        n_kv_head, head_dim = heads.n_kv_head, heads.head_dim
        most = ACCUMULATOR_BYTES // (4 * QUERY_TILE_ROWS * (head_dim + 2))
        table: list[AttendTile] = []
        launches: list[TileRun] = []
        largest = 0
        for rows_max in (QUERY_TILE_ROWS, 2 * QUERY_TILE_ROWS):
            first, used, deepest = len(table), 0, 0
            tiles = list(self._tiles_of(heads, rows_max))
            is_few = (
                rows_max == QUERY_TILE_ROWS
                and n_kv_head * sum(t.superpages for t in tiles) <= FEW_BLOCKS
            )
            each = kernels.SUPERPAGE_TOKENS // kernels.PAGE_TOKENS if is_few else 1
            for tile in tiles:
                accumulators = -(-tile.rows // QUERY_TILE_ROWS) * tile.superpages * each * n_kv_head
                if used and used + accumulators > most:
                    launches.append(_tile_run(rows_max, each, first, len(table), deepest))
                    first, used, deepest = len(table), 0, 0
                table.append(tile._replace(first_result=used))
                used += accumulators
                deepest, largest = max(deepest, tile.superpages), max(largest, used)
            if used:
                launches.append(_tile_run(rows_max, each, first, len(table), deepest))
        _, m, denominators, o = self._memory[heads]
        n = 4 * largest * QUERY_TILE_ROWS
        memory = m.reserve(n), denominators.reserve(n), o.reserve(n * head_dim)
        return np.array(table, np.int32), Tiles(0, tuple(launches), *memory)

    def _tiles_of(self, heads: TileHeads, rows_max: int) -> Iterator[AttendTile]:
        """The tiles of the entries whose tiles have up to `rows_max`, without their results."""
        n_head, n_kv_head, head_dim, window, part, is_latent = heads
        has_many = head_dim <= NARROW_DIMS and not is_latent
        group = n_head // n_kv_head
        first_token = 0
        for (n, start), first_page in zip(self._entries, self._firsts[part], strict=True):
            is_long = n * group > QUERY_TILE_ROWS and has_many
            for row in (
                range(0, n * group, rows_max) if is_long == (rows_max > QUERY_TILE_ROWS) else ()
            ):
                rows = min(rows_max, n * group - row)
                first_seen = max(0, start + row // group - window + 1) if window else 0
                first = first_seen // kernels.SUPERPAGE_TOKENS
                end = (start + (row + rows - 1) // group) // kernels.SUPERPAGE_TOKENS + 1
                yield AttendTile(first_token, start, first_page, row, rows, end - first, 0, first)
            first_token += n


def _tile_run(rows: int, each: int, first: int, end: int, superpages: int) -> TileRun:
    """With a power of two of super-pages, so that steps have the same launches for longer."""
    return TileRun(rows, each, first, end - first, 1 << (superpages - 1).bit_length())
