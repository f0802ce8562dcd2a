"""The layout of one KV page: 256 tokens, every layer a host owns, in the order kernels read.

Owns the sizes, offsets and the identity (`layout_id`, `Descriptor`) of a page; its files and states
are elsewhere. Every lane reads exactly this layout.

One head, D = head_dim (all integers little-endian):

    K       int8 [256/16][D/4][16][4]     16-token tiles, 4 consecutive d together
    K scale fp16 [256/16][D/32][16]       one per 32 dims of a token
    V       int8 [256/4][D][4]            4 consecutive tokens together
    V scale fp16 [256]                    one per token

Heads in order inside a layer, layers in order inside a page; then zeros up to a multiple of 64 KiB.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

if sys.byteorder != "little":  # kernels map the files, so no byte is ever swapped
    raise ImportError("batchengine stores are little-endian only")

PAGE_TOKENS = 256
PAGE_ALIGN_BYTES = 64 * 1024  # covers every page size in use and the alignment of direct I/O
KV_DTYPE = "kv8-v1"
Page = bytes | bytearray | memoryview
K_SCALE_DIMS = 32

# One row of the arena's sidecar: token id, 1 if written, XXH3-64 of the row's bytes.
ROW_RECORD_DTYPE = np.dtype([("token", "<u4"), ("valid", "<u4"), ("digest", "<u8")])
ROW_RECORDS_BYTES = PAGE_TOKENS * ROW_RECORD_DTYPE.itemsize
assert ROW_RECORDS_BYTES == 4096


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of a page. head_dim is a multiple of 32; sizes below are in bytes."""

    n_layer: int
    n_kv_head: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.n_layer < 1 or self.n_kv_head < 1:
            raise ValueError(f"a page needs layers and heads, got {self}")
        if self.head_dim < 32 or self.head_dim % K_SCALE_DIMS:
            raise ValueError(f"head_dim must be a multiple of {K_SCALE_DIMS}, got {self.head_dim}")

    @property
    def k_bytes(self) -> int:
        return PAGE_TOKENS * self.head_dim

    @property
    def k_scale_bytes(self) -> int:
        return PAGE_TOKENS * (self.head_dim // K_SCALE_DIMS) * 2

    @property
    def v_bytes(self) -> int:
        return PAGE_TOKENS * self.head_dim

    @property
    def head_bytes(self) -> int:
        return self.k_bytes + self.k_scale_bytes + self.v_bytes + PAGE_TOKENS * 2

    @property
    def payload_bytes(self) -> int:
        return self.n_layer * self.n_kv_head * self.head_bytes

    @property
    def page_bytes(self) -> int:
        return -(-self.payload_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes that belong to one token, over all layers and heads."""
        return self.payload_bytes // PAGE_TOKENS

    @property
    def layout_id(self) -> str:
        """Hex SHA-256 of the layout's description: equal id = bytes may be exchanged."""
        text = (
            f"{KV_DTYPE};tokens={PAGE_TOKENS};k=[16][D/4][16][4];ks=[16][D/32][16]f16;"
            f"v=[64][D][4];vs=[256]f16;layers={self.n_layer};kv_heads={self.n_kv_head};"
            f"head_dim={self.head_dim};align={PAGE_ALIGN_BYTES}"
        )
        return hashlib.sha256(text.encode()).hexdigest()

    def gather_rows(
        self, page: bytes | bytearray | memoryview, first: int, count: int
    ) -> npt.NDArray[np.uint8]:
        """The bytes of rows [first, first+count): shape (count, row_bytes), layers and heads in
        order, per head K[D] ‖ K scale[D/32] ‖ V[D] ‖ V scale. A row record's digest covers them."""
        parts = list[npt.NDArray[np.uint8]]()
        for part in self._parts(page):
            heads, _, inner, _ = part.shape
            rows = part.transpose(0, 1, 3, 2).reshape(heads, PAGE_TOKENS, inner)
            parts.append(rows[:, first : first + count].view(np.uint8))
        joined = np.concatenate(parts, axis=2)
        return np.ascontiguousarray(joined.transpose(1, 0, 2)).reshape(count, self.row_bytes)

    def copy_rows(self, source: Page, target: bytearray | memoryview, count: int) -> None:
        """Copy rows [0, count) of one page into another; nothing else of `target` changes."""
        for ours, theirs in zip(self._parts(target), self._parts(source), strict=True):
            whole, rest = divmod(count, ours.shape[3])
            ours[:, :whole] = theirs[:, :whole]
            if rest:
                ours[:, whole, :, :rest] = theirs[:, whole, :, :rest]

    def clear_rows(self, page: bytearray | memoryview, first: int) -> None:
        """Zero rows [first, 256) of a page."""
        for part in self._parts(page):
            whole, rest = divmod(first, part.shape[3])
            if rest:
                part[:, whole, :, rest:] = 0
                whole += 1
            part[:, whole:] = 0

    def _parts(self, page: Page) -> tuple[npt.NDArray[np.unsignedinteger[Any]], ...]:
        """Views of K, K scale, V, V scale of a page, each (heads, groups, inner, tokens of one
        group); one group is contiguous in memory."""
        d = self.head_dim
        flat = np.frombuffer(page, np.uint8, self.payload_bytes).reshape(-1, self.head_bytes)
        k, ks, v, vs = np.split(
            flat, np.cumsum([self.k_bytes, self.k_scale_bytes, self.v_bytes]).tolist(), axis=1
        )
        heads = len(flat)
        return (
            k.view("<u4").reshape(heads, 16, d // 4, 16),
            ks.view("<u2").reshape(heads, 16, d // 32, 16),
            v.reshape(heads, 64, d, 4),
            vs.view("<u2").reshape(heads, 1, 1, 256),
        )


# The smallest and a common shape, computed by hand: the formulas above must not change.
assert PageLayout(1, 1, 32).head_bytes == 8192 + 512 + 8192 + 512
assert PageLayout(28, 8, 128).payload_bytes == 28 * 8 * (2 * 32768 + 2048 + 512)
assert PageLayout(28, 8, 128).page_bytes == 233 * 65536
assert PageLayout(28, 8, 128).row_bytes * 256 == PageLayout(28, 8, 128).payload_bytes


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What the bytes of a page represent. Two stores share KV only if every field is equal.

    `extra` holds further (name, value) pairs of the model's arithmetic, e.g. RoPE parameters;
    values are text so that their encoding is unique.
    """

    model_hash: str  # hex SHA-256: tensor data and architecture metadata
    arith_id: str  # hex: golden vectors of the canonical arithmetic
    arch: str
    layout: PageLayout
    first_layer: int = 0
    provenance: str = "canonical"
    rope_digest: str = ""
    tokenizer_hash: str = ""
    extra: tuple[tuple[str, str], ...] = ()

    def fields(self) -> dict[str, str]:
        """Every field by name, as text."""
        shape = self.layout
        named = {
            "magic": "BEKV",
            "version": "1",
            "endianness": "LE",
            "model_hash": self.model_hash,
            "arith_id": self.arith_id,
            "provenance": self.provenance,
            "arch": self.arch,
            "first_layer": str(self.first_layer),
            "n_layer": str(shape.n_layer),
            "n_kv_head": str(shape.n_kv_head),
            "head_dim": str(shape.head_dim),
            "kv_dtype": KV_DTYPE,
            "layout_id": shape.layout_id,
            "page_tokens": str(PAGE_TOKENS),
            "page_bytes": str(shape.page_bytes),
            "rope_digest": self.rope_digest,
            "tokenizer_hash": self.tokenizer_hash,
            "k_is_post_rope": "1",
        }
        return named | {f"x.{name}": value for name, value in self.extra}

    def to_json(self) -> str:
        return json.dumps(self.fields(), sort_keys=True, ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Descriptor:
        """The descriptor that `to_json` wrote. Raises ValueError for any other text: a sender may
        be hostile."""
        try:
            named = json.loads(text)
        except RecursionError:
            raise ValueError("a descriptor is no nested text") from None
        if not isinstance(named, dict):
            raise ValueError("a descriptor is an object")
        fields = {str(k): str(v) for k, v in cast(dict[str, object], named).items()}
        extra = {name[2:]: fields[name] for name in fields if name.startswith("x.")}
        try:
            shape = [int(fields[name]) for name in ("n_layer", "n_kv_head", "head_dim")]
            found = cls(
                fields["model_hash"],
                fields["arith_id"],
                fields["arch"],
                PageLayout(*shape),
                int(fields["first_layer"]),
                fields["provenance"],
                fields["rope_digest"],
                fields["tokenizer_hash"],
                tuple(extra.items()),
            )
        except KeyError as error:
            raise ValueError(f"a descriptor has the field {error}") from None
        if found.to_json() != text:
            raise ValueError("a descriptor of another version")
        return found

    @property
    def repr_id(self) -> bytes:
        """SHA-256 of the descriptor, 32 bytes."""
        return hashlib.sha256(b"batchengine repr v1\0" + self.to_json().encode()).digest()


def differing_fields(ours: Descriptor, stored_json: str) -> list[str]:
    """Names of the fields in which a stored descriptor differs: the reason a session recomputes."""
    try:
        stored = json.loads(stored_json)
    except ValueError:
        return ["unreadable"]
    if not isinstance(stored, dict):
        return ["unreadable"]
    theirs = cast(dict[str, object], stored)
    mine = ours.fields()
    return sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
