"""A GGUF file assembled from parts that may each be wrong, and one named builder per defect.

Independent of the reader under test and of the `gguf` package, which cannot write invalid files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def array(kind: int, items: list[bytes], count: int | None = None) -> bytes:
    return u32(kind) + u64(len(items) if count is None else count) + b"".join(items)


@dataclass
class Tensor:
    name: str | bytes
    shape: tuple[int, ...]
    kind: int = 0
    offset: int = 0
    n_dims: int | None = None

    def encode(self) -> bytes:
        dims = u32(len(self.shape) if self.n_dims is None else self.n_dims)
        sizes = b"".join(u64(d) for d in self.shape)
        return text(self.name) + dims + sizes + u32(self.kind) + u64(self.offset)


@dataclass
class File:
    """Defaults make a small valid file: two tensors, values of every type."""

    magic: bytes = b"GGUF"
    version: bytes = field(default_factory=lambda: u32(3))
    n_tensors: int | None = None
    n_keys: int | None = None
    keys: list[tuple[str | bytes, int, bytes]] = field(
        default_factory=lambda: [
            ("general.architecture", STRING, text("llama")),
            ("general.alignment", U32, u32(32)),
            ("llama.block_count", U32, u32(1)),
            ("llama.rope.freq_base", F32, struct.pack("<f", 10000.0)),
            ("tokenizer.ggml.add_bos_token", BOOL, b"\x01"),
            ("tokenizer.ggml.tokens", ARRAY, array(STRING, [text("a"), text("bc"), text(b"\xff")])),
            ("tokenizer.ggml.scores", ARRAY, array(F32, [struct.pack("<f", 0.5)] * 3)),
        ]
    )
    tensors: list[Tensor] = field(
        default_factory=lambda: [
            Tensor("a.weight", (8,), 0, 0),
            Tensor("b.weight", (32, 4), 2, 32),
        ]
    )
    data: bytes = bytes(range(32)) + bytes(96)

    def encode(self) -> bytes:
        head = self.magic + self.version
        head += u64(len(self.tensors) if self.n_tensors is None else self.n_tensors)
        head += u64(len(self.keys) if self.n_keys is None else self.n_keys)
        for key, kind, value in self.keys:
            head += text(key) + u32(kind) + value
        for tensor in self.tensors:
            head += tensor.encode()
        return head + bytes(-len(head) % 32) + self.data

    def with_key(self, key: str | bytes, kind: int, value: bytes) -> File:
        self.keys.append((key, kind, value))
        return self

    def with_tensor(self, *args: Any, **kwargs: Any) -> File:
        self.tensors.append(Tensor(*args, **kwargs))
        return self


def _replaced(name: str, kind: int, value: bytes) -> bytes:
    file = File()
    file.keys = [(k, kind, value) if k == name else (k, t, v) for k, t, v in file.keys]
    return file.encode()


def _lone_tensor(**changes: Any) -> bytes:
    file = File(tensors=[Tensor("a.weight", (8,), 0, 0)])
    for key, value in changes.items():
        setattr(file.tensors[0], key, value)
    return file.encode()


HUGE = (1 << 64) - 1

# name -> (error code, a word of the message, builder)
HOSTILE: dict[str, tuple[str, str, Callable[[], bytes]]] = {
    "empty": ("BE1304", "0 bytes", lambda: b""),
    "only_magic": ("BE1304", "4 bytes", lambda: b"GGUF"),
    "not_gguf": ("BE1302", "PK", lambda: File(magic=b"PK\x03\x04").encode()),
    "git_lfs": ("BE1302", "git lfs pull", lambda: b"version https://git-lfs.github.com/spec/v1"),
    "web_page": ("BE1302", "not the page", lambda: b"<!doctype html><html lang=en>"),
    "version_1": ("BE1303", "version is 1", lambda: File(version=u32(1)).encode()),
    "version_0": ("BE1303", "version is 0", lambda: File(version=u32(0)).encode()),
    "version_99": ("BE1303", "version is 99", lambda: File(version=u32(99)).encode()),
    "big_endian": ("BE1303", "big-endian", lambda: File(version=struct.pack(">I", 3)).encode()),
    "huge_tensor_count": ("BE1305", "tensors", lambda: File(n_tensors=HUGE).encode()),
    "huge_key_count": ("BE1305", "keys", lambda: File(n_keys=HUGE).encode()),
    "many_tensors_declared": ("BE1304", "tensors", lambda: File(n_tensors=60000).encode()),
    "one_key_too_many": ("BE1304", "past the end", lambda: File(n_keys=12).encode()[:300]),
    "key_twice": (
        "BE1306",
        "general.alignment",
        lambda: File().with_key("general.alignment", U32, u32(64)).encode(),
    ),
    "empty_key": ("BE1306", "empty", lambda: File().with_key("", U32, u32(1)).encode()),
    "key_not_utf8": ("BE1308", "UTF-8", lambda: File().with_key(b"\xff\xfe", U32, u32(1)).encode()),
    "huge_key": (
        "BE1305",
        "length of key 0",
        lambda: File(keys=[(b"x" * 70000, U32, u32(1))]).encode(),
    ),
    "string_length_wraps": (
        "BE1305",
        "general.name",
        lambda: File().with_key("general.name", STRING, u64(HUGE) + b"x").encode(),
    ),
    "string_past_end": (
        "BE1304",
        "general.name",
        lambda: File().with_key("general.name", STRING, u64(1 << 20) + b"x").encode(),
    ),
    "string_not_utf8": (
        "BE1308",
        "general.name",
        lambda: File().with_key("general.name", STRING, text(b"a\xc3(")).encode(),
    ),
    "unknown_value_type": ("BE1307", "k.x", lambda: File().with_key("k.x", 13, u64(0)).encode()),
    "unknown_element_type": (
        "BE1307",
        "k.x",
        lambda: File().with_key("k.x", ARRAY, array(77, [])).encode(),
    ),
    "nested_array": (
        "BE1307",
        "array of arrays",
        lambda: File().with_key("k.x", ARRAY, array(ARRAY, [array(U8, [b"a"])])).encode(),
    ),
    "array_count_wraps": (
        "BE1305",
        "k.x",
        lambda: File().with_key("k.x", ARRAY, array(U64, [], HUGE // 8 + 2)).encode(),
    ),
    "array_past_end": (
        "BE1304",
        "k.x",
        lambda: File().with_key("k.x", ARRAY, array(U64, [], 1 << 20)).encode(),
    ),
    "strings_past_end": (
        "BE1304",
        "string 1 of key k.x",
        lambda: (
            File()
            .with_key("k.x", ARRAY, array(STRING, [text("a"), u64(1 << 40)], 2) + bytes(64))
            .encode()
        ),
    ),
    "alignment_zero": ("BE1309", "0", lambda: _replaced("general.alignment", U32, u32(0))),
    "alignment_odd": ("BE1309", "48", lambda: _replaced("general.alignment", U32, u32(48))),
    "alignment_huge": (
        "BE1309",
        "power of two",
        lambda: _replaced("general.alignment", U32, u32(1 << 31)),
    ),
    "alignment_text": (
        "BE1309",
        "not an integer",
        lambda: _replaced("general.alignment", STRING, text("32")),
    ),
    "alignment_bool": ("BE1309", "integer", lambda: _replaced("general.alignment", BOOL, b"\x01")),
    "tensor_twice": (
        "BE1310",
        "a.weight",
        lambda: File().with_tensor("a.weight", (8,), 0, 128 - 32).encode(),
    ),
    "tensor_without_name": ("BE1310", "no name", lambda: _lone_tensor(name="")),
    "tensor_long_name": ("BE1305", "name of tensor 0", lambda: _lone_tensor(name="x" * 65)),
    "tensor_no_dimensions": ("BE1311", "0 dimensions", lambda: _lone_tensor(n_dims=0)),
    "tensor_many_dimensions": (
        "BE1311",
        "4294967295 dimensions",
        lambda: _lone_tensor(n_dims=(1 << 32) - 1),
    ),
    "tensor_zero_dimension": ("BE1311", "a.weight", lambda: _lone_tensor(shape=(8, 0))),
    "tensor_product_wraps": (
        "BE1314",
        "a.weight",
        lambda: _lone_tensor(shape=(1 << 32, 1 << 32, 1 << 2)),
    ),
    "tensor_ragged_blocks": (
        "BE1311",
        "multiples of 32",
        lambda: _lone_tensor(shape=(33,), kind=2),
    ),
    "tensor_unknown_type": ("BE1312", "4096", lambda: _lone_tensor(kind=4096)),
    "tensor_removed_type": ("BE1312", "type 33 (Q4_0_8_8)", lambda: _lone_tensor(kind=33)),
    "offset_misaligned": ("BE1313", "33", lambda: _lone_tensor(offset=33)),
    "offset_outside": ("BE1314", "a.weight", lambda: _lone_tensor(offset=1 << 20)),
    "offset_wraps": ("BE1314", "a.weight", lambda: _lone_tensor(offset=HUGE - 31)),
    "data_missing": ("BE1314", "b.weight", lambda: File(data=bytes(64)).encode()),
    "tensors_overlap": (
        "BE1315",
        "a.weight and b.weight",
        lambda: File(tensors=[Tensor("a.weight", (16,)), Tensor("b.weight", (8,), 0, 32)]).encode(),
    ),
}
