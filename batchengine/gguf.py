"""Reads GGUF files: every byte of the header is checked before it is used.

Owns: the container format (header, key-values, tensor table, bounds of the tensor data), and models
that are split into several files, each with a part of the tensors, of which the first has the keys.
Refuses: any malformed file. Each defect has one error that names the key or the tensor;
no count, length or offset from the file is used before it is compared with the file's actual
size, so that no file can make the reader crash, hang or allocate more than its own size.
The meaning of keys is in weights.spec; tensor data is never converted here.

The `gguf` package needs 7.0 s for the key-values of a 152k-token vocabulary
(ggml-vocab-qwen2.gguf; one numpy object per string part), this reader 0.07 s: strings
of arrays stay bytes in one buffer and only their positions are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import mmap
import operator
import os
import re
import stat
import struct
import threading
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchengine import errors
from batchengine.core import BatchEngineError

MAGIC = b"GGUF"
_PAGE = "it is a web page: download the file itself, not the page that shows it"
_OTHER_FILES = {  # by the first bytes, letters upper case
    b"VERS": "it is a pointer of Git LFS: git lfs pull fetches the file that it stands for",
    b"<!DO": _PAGE,
    b"<HTM": _PAGE,
}
VERSIONS = (2, 3)  # 3 differs from 2 only in that it may be big-endian, which is refused

# Limits: each is far above any model in use and keeps a hostile file's cost below a second.
KEY_COUNT_MAX = 1 << 16
TENSOR_COUNT_MAX = 1 << 16
KEY_BYTES_MAX = (1 << 16) - 1  # the format's own limit
NAME_BYTES_MAX = 64  # the format's own limit
TEXT_BYTES_MAX = 1 << 24  # a chat template is tens of KiB
ELEMENT_COUNT_MAX = 1 << 23  # array elements, summed over the file: 150k tokens + merges is 0.5 M
DIMENSIONS_MAX = 4
ALIGNMENT_MAX = 1 << 20
HEADER_BYTES = (32 << 20, 256 << 20)  # read for the header at first, and if it is longer

PARTS_MAX = 1024  # files of one model

Identity = tuple[int, int, int, int, int]  # dev, ino, size, mtime_ns, ctime_ns

_FIRST_PART = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>\d{5})\.gguf$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A storage type: `block_items` values take `block_bytes` bytes."""

    name: str
    block_items: int
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    number: TensorType(name, items, size)
    for number, name, items, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (15, "Q8_K", 256, 292),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
        (40, "NVFP4", 64, 36),
        (41, "Q1_0", 128, 18),
    )
}
# Types that files may still have and no converter writes any more.
REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}

# value type number -> little-endian struct code; 8 is a string, 9 an array
_SCALARS: dict[int, str] = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` with the contiguous dimension first, as the file has it.

    `offset` counts bytes from the start of the file, the one of index `part` of the model's.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    n_bytes: int
    part: int = 0


class StringArray:
    """The strings of one array value, as bytes copied from the header by each iteration."""

    def __init__(self, buffer: memoryview, starts: array[int], ends: array[int]) -> None:
        self._buffer = buffer
        self._starts = starts
        self._ends = ends

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[bytes]:
        buffer = self._buffer
        for start, end in zip(self._starts, self._ends, strict=True):
            yield bytes(buffer[start:end])

    def __repr__(self) -> str:
        return f"<StringArray of {len(self)}>"


NumberArray = npt.NDArray[Any]
Value = int | float | bool | str | NumberArray | StringArray


class _Part:
    """One open file of a model. It is mapped by the first call of `view`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd, self.identity = _open_file(path)
        self._map: mmap.mmap | None = None
        self._mapping = threading.Lock()  # tensors are hashed and packed on several threads
        self._view = memoryview(b"")
        try:
            self._head, self.parsed = _read_header(self.fd, self.identity[2], path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        # A view still in use keeps the mapping; it goes with the last view.
        with contextlib.suppress(BufferError):
            self._view.release()
            if self._map is not None:
                self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def header(self) -> memoryview:
        return self._head[: self.parsed.data_start]

    def view(self) -> memoryview:
        with self._mapping:
            if self._map is None:
                try:
                    self._map = mmap.mmap(self.fd, self.identity[2], prot=mmap.PROT_READ)
                except (OSError, ValueError) as error:  # too short by now, or closed
                    raise errors.MODEL_UNREADABLE(path=self.path, why=error) from error
                self._view = memoryview(self._map)
        return self._view


class GgufFile:
    """A checked GGUF file, or all files of a model that is split, by its first one. Use as a
    context manager or call close().

    path, size_bytes (of all files), identity; version, data_start (bytes) of the first one; values:
    key -> value; tensors: name -> TensorInfo in file order. The header is read; a file is mapped
    by the first call of `data`. If it is truncated while a view of a tensor is read, the process
    gets SIGBUS, which is why only lane workers read tensor data. Strings of arrays are readable
    for ever.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        first = _Part(self.path)
        self._parts = [first]
        self.version = first.parsed.version
        self.data_start = first.parsed.data_start
        self.values = first.parsed.values
        try:
            for part in _further_parts(self.path, self.values):
                self._parts.append(_Part(part))
            self.tensors = _all_tensors(self._parts)
        except BaseException:
            self.close()
            raise
        self.identity = _joined_identity([part.identity for part in self._parts])
        self.size_bytes = self.identity[2]

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<GgufFile {self.path.name} v{self.version} keys={len(self.values)} "
            f"tensors={len(self.tensors)} bytes={self.size_bytes}>"
        )

    def close(self) -> None:
        """Closes the files, and unmaps each once no view of it is left."""
        for part in self._parts:
            part.close()

    def header(self) -> memoryview:
        """The bytes before the tensor data: header, key-values and tensor table, of each file."""
        headers = [part.header() for part in self._parts]
        return headers[0] if len(headers) == 1 else memoryview(b"".join(headers))

    def data(self, name: str) -> memoryview:
        """The bytes of one tensor, read-only, in the mapping."""
        info = self.tensors[name]
        return self._parts[info.part].view()[info.offset : info.offset + info.n_bytes]

    def read(self, name: str, first: int, n_bytes: int) -> bytes:
        """Bytes of one tensor from `first` on, without the mapping; fewer if the file was cut
        short. Raises OSError."""
        info = self.tensors[name]
        return os.pread(self._parts[info.part].fd, n_bytes, info.offset + first)

    def is_unchanged(self) -> bool:
        """Whether the open files are as they were when they were opened."""
        return all(file_identity(os.fstat(part.fd)) == part.identity for part in self._parts)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value; KEY_MISSING without a default, KEY_VALUE for another type."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, value, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float (an integer is accepted)."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        if not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string value."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def strings(self, key: str) -> StringArray:
        """An array of strings."""
        value = self.values.get(key)
        if not isinstance(value, StringArray):
            raise self._wrong(key, value, "an array of strings")
        return value

    def _wrong(self, key: str, value: object, wanted: str) -> BatchEngineError:
        if value is None:
            return errors.KEY_MISSING(file=self.path.name, key=key, wanted=wanted)
        shown, why = repr(value)[:80], f"not {wanted}"
        return errors.KEY_VALUE(file=self.path.name, key=key, value=shown, why=why)


@dataclass(frozen=True, slots=True)
class Parsed:
    """The parsed bytes before the tensor data."""

    version: int
    alignment: int
    data_start: int
    values: dict[str, Value]
    tensors: dict[str, TensorInfo]


def _open_file(path: Path) -> tuple[int, Identity]:
    try:
        # O_NONBLOCK: opening a FIFO for reading would otherwise wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise errors.MODEL_UNREADABLE(path=path, why=error) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise errors.MODEL_UNREADABLE(path=path, why="it is not a regular file")
        if status.st_size < 24:
            head = os.pread(fd, len(MAGIC), 0)
            if head != MAGIC[: len(head)]:
                raise _no_gguf(path, head)
            raise errors.GGUF_CUT_SHORT(file=path, why=f"it has {status.st_size} bytes")
    except BaseException:
        os.close(fd)
        raise
    return fd, file_identity(status)


def _no_gguf(file: str | Path, head: bytes) -> BatchEngineError:
    """The error for a file that starts with other bytes; two are what a failed download leaves."""
    shown = f"it starts with {head.decode('latin-1')!r}, not 'GGUF'"
    return errors.GGUF_MAGIC(file=file, why=_OTHER_FILES.get(head.upper(), shown))


def _read_header(fd: int, size: int, path: Path) -> tuple[memoryview, Parsed]:
    """The first bytes of a file, which hold its header, and what they say."""
    for n_bytes in HEADER_BYTES:
        try:
            head = memoryview(_read_start(fd, min(n_bytes, size)))
        except OSError as error:
            raise errors.MODEL_UNREADABLE(path=path, why=error) from error
        try:
            return head, parse(head, str(path), size)
        except BatchEngineError as error:
            is_longer = error.code == errors.GGUF_CUT_SHORT.code and n_bytes < size
            if not is_longer or n_bytes == HEADER_BYTES[-1]:
                raise
    raise AssertionError("the last round returns or raises")


def _read_start(fd: int, n_bytes: int) -> bytes:
    """The first `n_bytes` of a file, or fewer if it is shorter by now."""
    parts, done = list[bytes](), 0
    while done < n_bytes and (part := os.pread(fd, n_bytes - done, done)):
        parts.append(part)
        done += len(part)
    return b"".join(parts)


def model_identity(path: Path) -> Identity:
    """The identity of a model as its files are now, as `GgufFile.identity`. Raises OSError."""
    return _joined_identity([file_identity(os.stat(part)) for part in model_paths(path)])


def model_paths(path: Path) -> list[Path]:
    """The files of a model by the name of its first one, whether they exist or not."""
    name = _FIRST_PART.match(path.name)
    count = int(name["count"]) if name else 1
    if name is None or count > PARTS_MAX:
        return [path]
    return [
        path,
        *(
            path.with_name(f"{name['stem']}-{number:05d}-of-{count:05d}.gguf")
            for number in range(2, count + 1)
        ),
    ]


def _joined_identity(parts: list[Identity]) -> Identity:
    """One identity of several files: it changes when one of them is replaced or written."""
    if len(parts) == 1:
        return parts[0]
    inodes, written, changed = (
        int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:7], "little")
        for of in (
            [part[:3] for part in parts],
            [part[3] for part in parts],
            [part[4] for part in parts],
        )
    )
    return parts[0][0], inodes, sum(part[2] for part in parts), written, changed


def _further_parts(path: Path, values: Mapping[str, Value]) -> list[Path]:
    """The other files of a model, by the keys of its first one."""
    count, number = values.get("split.count", 0), values.get("split.no", 0)
    found = model_paths(path)[1:]
    if count in (0, 1):
        if found:
            why = f"its name says that it is one of {len(found) + 1} files, its keys do not"
            raise errors.MODEL_PARTS(file=path.name, why=why, fix="give it another name")
        return []
    if number != 0:
        raise errors.MODEL_PARTS(
            file=path.name,
            why=f"it is a later part of {count}",
            fix="name the first part (…-00001-of-….gguf)",
        )
    if count != len(found) + 1:
        why = f"it is one of {count} files, which are found by the name of the first"
        fix = "keep the names that the files had (NAME-00001-of-00003.gguf), in one folder"
        raise errors.MODEL_PARTS(file=path.name, why=why, fix=fix)
    for part in found:
        if not part.exists():
            fix = "download all parts of the model into one folder"
            raise errors.MODEL_PARTS(file=path.name, why=f"{part.name} is missing", fix=fix)
    return found


def _all_tensors(parts: list[_Part]) -> dict[str, TensorInfo]:
    """The tensors of all files of a model, which must be parts of the same one."""
    first = parts[0]
    tensors = dict(first.parsed.tensors)
    again = "download all parts of the model again"
    for index, part in enumerate(parts[1:], 1):
        own = part.parsed.values
        place = own.get("split.no"), own.get("split.count")
        if place != (index, len(parts)):
            why = f"{part.path.name} is not part {index + 1} of {len(parts)}"
            raise errors.MODEL_PARTS(file=first.path.name, why=why, fix=again)
        for name, info in part.parsed.tensors.items():
            if name in tensors:
                why = f"tensor {name} is in two of its files"
                raise errors.MODEL_PARTS(file=first.path.name, why=why, fix=again)
            tensors[name] = replace(info, part=index)
    total = first.parsed.values.get("split.tensors.count", len(tensors))
    if len(parts) > 1 and total != len(tensors):
        why = f"its files have {len(tensors)} tensors, not {total}"
        raise errors.MODEL_PARTS(file=first.path.name, why=why, fix=again)
    return tensors


def file_identity(status: os.stat_result) -> Identity:
    """The key under which digests of a file are cached: it changes when the file is written."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class _Cursor:
    """A position within the buffer. Every read gets the name of its value, for errors."""

    def __init__(self, buffer: memoryview, name: str, file_bytes: int | None) -> None:
        self.buffer = buffer
        self.name = name
        self.size = len(buffer)
        self.file_bytes = len(buffer) if file_bytes is None else file_bytes
        self.position = 0
        self.elements_left = ELEMENT_COUNT_MAX

    def truncated(self, reading: str) -> BatchEngineError:
        why = f"{reading} at byte {self.position} goes past the end ({self.size} bytes)"
        return errors.GGUF_CUT_SHORT(file=self.name, why=why)

    def take(self, n_bytes: int, reading: str) -> int:
        """Position of the next `n_bytes`, which are consumed."""
        start = self.position
        if n_bytes > self.size - start:
            raise self.truncated(reading)
        self.position = start + n_bytes
        return start

    def u32(self, reading: str) -> int:
        return _U32.unpack_from(self.buffer, self.take(4, reading))[0]

    def u64(self, reading: str) -> int:
        return _U64.unpack_from(self.buffer, self.take(8, reading))[0]

    def count(self, reading: str, most: int, item_bytes_min: int) -> int:
        """A count from the file, refused unless so many items can follow it."""
        count = self.u64(reading)
        if count > most:
            raise errors.GGUF_COUNT(file=self.name, count=count, reading=reading, most=most)
        if count * item_bytes_min > self.size - self.position:
            raise self.truncated(f"{reading} ({count})")
        return count

    def string(self, reading: str, most: int) -> str:
        length = self.count(f"length of {reading}", most, 1)
        start = self.take(length, reading)
        try:
            return str(self.buffer[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise errors.GGUF_NOT_UTF8(
                file=self.name, reading=reading, start=start, reason=error
            ) from error


def parse(buffer: memoryview, name: str, file_bytes: int | None = None) -> Parsed:
    """Checks and reads everything before the tensor data of a GGUF file that begins with `buffer`.

    `name` is used in error messages; `file_bytes` is the file's size, if the buffer is not all of
    it. Returned arrays of strings refer to the buffer.
    """
    cursor = _Cursor(buffer, name, file_bytes)
    version = _read_version(cursor)
    n_tensors = cursor.count("the number of tensors", TENSOR_COUNT_MAX, 24)
    n_keys = cursor.count("the number of keys", KEY_COUNT_MAX, 13)
    values: dict[str, Value] = {}
    for index in range(n_keys):
        key = cursor.string(f"key {index}", KEY_BYTES_MAX)
        if not key or key in values:
            why = "it is there twice" if key else "empty"
            raise errors.GGUF_KEY_NAME(file=name, key=key, why=why)
        values[key] = _read_value(cursor, key)
    alignment = _alignment(values, name)
    infos: list[tuple[str, TensorType, tuple[int, ...], int, int]] = []
    for index in range(n_tensors):
        infos.append(_read_tensor(cursor, index))
    data_start = -(-cursor.position // alignment) * alignment
    if data_start > cursor.size < cursor.file_bytes:
        raise cursor.truncated("the padding before the tensors")
    tensors = _place_tensors(cursor, infos, data_start, alignment)
    return Parsed(version, alignment, data_start, values, tensors)


def _read_version(cursor: _Cursor) -> int:
    start = cursor.take(4, "the magic number")
    magic = bytes(cursor.buffer[start : start + 4])
    if magic != MAGIC:
        raise _no_gguf(cursor.name, magic)
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if version and version & 0xFFFF == 0:
        why, fix = "it is big-endian", "convert it to little-endian (gguf-convert-endian)"
    else:
        why, fix = f"its version is {version}, not 2 or 3", "convert the model again"
    raise errors.GGUF_VERSION(file=cursor.name, why=why, fix=fix)


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.u32(f"type of key {key}")
    if kind == _STRING:
        return cursor.string(f"value of key {key}", TEXT_BYTES_MAX)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    code = _SCALARS.get(kind)
    if code is None:
        why = f"unknown value type {kind}"
        raise errors.GGUF_VALUE_TYPE(file=cursor.name, key=key, why=why)
    start = cursor.take(struct.calcsize("<" + code), f"value of key {key}")
    return struct.unpack_from("<" + code, cursor.buffer, start)[0]


def _read_array(cursor: _Cursor, key: str) -> Value:
    kind = cursor.u32(f"element type of key {key}")
    if kind == _ARRAY:
        why = "an array of arrays: no model key is one"
        raise errors.GGUF_VALUE_TYPE(file=cursor.name, key=key, why=why)
    code = _SCALARS.get(kind)
    if code is None and kind != _STRING:
        why = f"unknown element type {kind}"
        raise errors.GGUF_VALUE_TYPE(file=cursor.name, key=key, why=why)
    item_bytes = 8 if code is None else struct.calcsize("<" + code)
    count = cursor.count(f"the elements of key {key}", cursor.elements_left, item_bytes)
    cursor.elements_left -= count
    if code is None:
        return _scan_strings(cursor, key, count)
    start = cursor.take(count * item_bytes, f"value of key {key}")
    # A copy: it is small, and aligned.
    dtype = np.dtype("<u1" if code == "?" else f"<{code}")
    return np.frombuffer(cursor.buffer, dtype, count, start).copy()


def _scan_strings(cursor: _Cursor, key: str, count: int) -> StringArray:
    # 150k rounds for a vocabulary: locals only, one comparison per string.
    buffer, size, position, length_at = (
        cursor.buffer,
        cursor.size,
        cursor.position,
        _U64.unpack_from,
    )
    starts, ends = array("Q", bytes(8 * count)), array("Q", bytes(8 * count))
    for index in range(count):
        start = position + 8
        if start > size:
            raise cursor.truncated(f"string {index} of key {key}")
        position = start + length_at(buffer, position)[0]
        if position > size:
            raise cursor.truncated(f"string {index} of key {key}")
        starts[index] = start
        ends[index] = position
    cursor.position = position
    return StringArray(buffer, starts, ends)


def _alignment(values: dict[str, Value], name: str) -> int:
    value = values.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int):
        why = "not an integer"
    elif not 1 <= value <= ALIGNMENT_MAX or value & (value - 1):
        why = f"not a power of two up to {ALIGNMENT_MAX}"
    else:
        return value
    raise errors.GGUF_ALIGNMENT(file=name, value=value, why=why)


def _read_tensor(cursor: _Cursor, index: int) -> tuple[str, TensorType, tuple[int, ...], int, int]:
    """Read one row of the tensor table: name, type, shape, offset in the data, size in bytes."""
    tensor = cursor.string(f"name of tensor {index}", NAME_BYTES_MAX)
    if not tensor:
        raise errors.TENSOR_NAME(tensor=index, problem="has no name", file=cursor.name)
    n_dims = cursor.u32(f"dimensions of tensor {tensor}")
    if not 1 <= n_dims <= DIMENSIONS_MAX:
        why = f"1 to {DIMENSIONS_MAX} are legal"
        raise errors.TENSOR_SHAPE(tensor=tensor, shape=f"{n_dims} dimensions", why=why)
    shape = tuple(cursor.u64(f"shape of tensor {tensor}") for _ in range(n_dims))
    number = cursor.u32(f"type of tensor {tensor}")
    offset = cursor.u64(f"offset of tensor {tensor}")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        name = REMOVED_TYPES.get(number)
        raise errors.TENSOR_TYPE(tensor=tensor, number=f"{number} ({name})" if name else number)
    n_items = math.prod(shape)  # Python integers do not overflow
    if n_items == 0 or shape[0] % kind.block_items:
        why = f"rows of {kind.name} hold multiples of {kind.block_items} and nothing may be 0"
        raise errors.TENSOR_SHAPE(tensor=tensor, shape=f"the shape {list(shape)}", why=why)
    return tensor, kind, shape, offset, n_items // kind.block_items * kind.block_bytes


def _place_tensors(
    cursor: _Cursor,
    infos: list[tuple[str, TensorType, tuple[int, ...], int, int]],
    data_start: int,
    alignment: int,
) -> dict[str, TensorInfo]:
    """Checks that every tensor is aligned, inside the file, and overlaps no other."""
    tensors: dict[str, TensorInfo] = {}
    for tensor, kind, shape, offset, n_bytes in infos:
        if tensor in tensors:
            raise errors.TENSOR_NAME(tensor=tensor, problem="is there twice", file=cursor.name)
        if offset % alignment:
            raise errors.TENSOR_UNALIGNED(tensor=tensor, offset=offset, alignment=alignment)
        if data_start + offset + n_bytes > cursor.file_bytes:
            end = data_start + offset + n_bytes
            raise errors.TENSOR_OUTSIDE(
                tensor=tensor, file=cursor.name, end=end, size=cursor.file_bytes
            )
        tensors[tensor] = TensorInfo(tensor, kind, shape, data_start + offset, n_bytes)
    by_offset = sorted(tensors.values(), key=operator.attrgetter("offset"))
    for before, after in itertools.pairwise(by_offset):
        if before.offset + before.n_bytes > after.offset:
            raise errors.TENSORS_OVERLAP(before=before.name, after=after.name, file=cursor.name)
    return tensors
