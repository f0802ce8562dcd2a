"""The layout of one KV page: 256 tokens, every layer a host owns, in the order kernels read.

Owns the sizes, offsets and the identity (`layout_id`, `Descriptor`) of a page; its files and states
are elsewhere. Every lane reads exactly this layout.

One head, D = head_dim (all integers little-endian):

    K       int8 [256/16][D/4][16][4]     16-token tiles, 4 consecutive d together
    K scale fp16 [256/16][D/32][16]       one per 32 dims of a token
    V       int8 [256/4][D][4]            4 consecutive tokens together
    V scale fp16 [256]                    one per token

A latent layer (`KvHeads.v_first`, of models with multi-head latent attention) has no V: it is K,
whose dims from v_first on have one scale, that of V. K scales are those of the dims before.

Heads in order inside a layer, layers in order inside a page; then zeros up to a multiple of 64 KiB.
Layers may differ in their heads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

if sys.byteorder != "little":  # kernels map the files, so no byte is ever swapped
    raise ImportError("batchengine stores are little-endian only")

PAGE_TOKENS = 256
PAGE_ALIGN_BYTES = 64 * 1024  # covers every page size in use and the alignment of direct I/O
KV_DTYPE, LATENT_DTYPE = "kv8-v1", "kv8-mla-v1"
Page = bytes | bytearray | memoryview
Part = npt.NDArray[np.unsignedinteger[Any]]
K_SCALE_DIMS = 32
LAYERS_MAX = 1 << 12  # of a layout that is read, and HEADS_MAX of either number of its heads
HEADS_MAX = 1 << 16

# One row of the arena's sidecar: token id, 1 if written, XXH3-64 of the row's bytes.
ROW_RECORD_DTYPE = np.dtype([("token", "<u4"), ("valid", "<u4"), ("digest", "<u8")])
ROW_RECORDS_BYTES = PAGE_TOKENS * ROW_RECORD_DTYPE.itemsize
assert ROW_RECORDS_BYTES == 4096


class KvHeads(NamedTuple):
    """The KV heads of one layer. head_dim is a multiple of 32; so is v_first, which is above 0 in
    latent layers. Sizes below are in bytes."""

    n_kv_head: int
    head_dim: int
    v_first: int = 0

    @property
    def k_scales(self) -> int:
        """How many a token has, besides that of V."""
        return (self.v_first or self.head_dim) // K_SCALE_DIMS

    @property
    def k_bytes(self) -> int:
        return PAGE_TOKENS * self.head_dim

    @property
    def k_scale_bytes(self) -> int:
        return PAGE_TOKENS * self.k_scales * 2

    @property
    def v_bytes(self) -> int:
        return 0 if self.v_first else PAGE_TOKENS * self.head_dim

    @property
    def head_bytes(self) -> int:
        return self.k_bytes + self.k_scale_bytes + self.v_bytes + PAGE_TOKENS * 2

    @property
    def layer_bytes(self) -> int:
        return self.n_kv_head * self.head_bytes


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Shape of a page: the heads of each layer. Sizes are in bytes."""

    layers: tuple[KvHeads, ...]
    payload_bytes: int = field(init=False, repr=False, compare=False)  # kept: pages are read by it

    @classmethod
    def uniform(cls, n_layer: int, n_kv_head: int, head_dim: int, v_first: int = 0) -> Self:
        """A page whose layers are all alike."""
        return cls((KvHeads(n_kv_head, head_dim, v_first),) * n_layer)

    def __post_init__(self) -> None:
        if not self.layers or any(heads.n_kv_head < 1 for heads in self.layers):
            raise ValueError(f"a page needs layers and heads, got {self}")
        for heads in set(self.layers):
            if heads.head_dim < 32 or heads.head_dim % K_SCALE_DIMS:
                why = f"must be a multiple of {K_SCALE_DIMS}, got {heads.head_dim}"
                raise ValueError(f"head_dim {why}")
            if heads.v_first % K_SCALE_DIMS or not 0 <= heads.v_first < heads.head_dim:
                why = f"must be a multiple of {K_SCALE_DIMS} below {heads.head_dim}"
                raise ValueError(f"v_first {why}, got {heads.v_first}")
        n_bytes = sum(heads.layer_bytes * n for heads, n in Counter(self.layers).items())
        object.__setattr__(self, "payload_bytes", n_bytes)

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers are alike."""
        return len(set(self.layers)) == 1

    @property
    def page_bytes(self) -> int:
        return -(-self.payload_bytes // PAGE_ALIGN_BYTES) * PAGE_ALIGN_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes that belong to one token, over all layers and heads."""
        return self.payload_bytes // PAGE_TOKENS

    @property
    def is_latent(self) -> bool:
        """Whether any layer is."""
        return any(heads.v_first for heads in self.layers)

    @property
    def heads_text(self) -> tuple[str, str, str]:
        """n_kv_head, head_dim and v_first as text: one number if all layers are alike, else one for
        each; no v_first if no layer is latent."""
        layers = self.layers[:1] if self.is_uniform else self.layers
        return (
            ",".join(str(heads.n_kv_head) for heads in layers),
            ",".join(str(heads.head_dim) for heads in layers),
            ",".join(str(heads.v_first) for heads in layers) if self.is_latent else "",
        )

    @classmethod
    def from_text(cls, n_layer: str, n_kv_head: str, head_dim: str, v_first: str = "") -> Self:
        """The layout of such texts. Raises ValueError for any others, and for absurd sizes."""
        texts = n_kv_head, head_dim, v_first
        if max(map(len, (n_layer, *texts))) > 6 * LAYERS_MAX:
            raise ValueError("heads of a page are no such long text")
        n = _number(n_layer, LAYERS_MAX)
        each = [
            [_number(value, HEADS_MAX, least) for value in text.split(",", LAYERS_MAX)]
            for text, least in zip(texts, (1, 1, 0), strict=True)
            if text or least
        ]
        layers = tuple(map(KvHeads, *each))
        layout = cls(layers * n if len(layers) == 1 else layers)
        if layout.n_layer != n or layout.heads_text != texts:
            raise ValueError(f"{n_kv_head!r} heads of {head_dim!r} dims are not {n} layers")
        return layout

    @property
    def kv_dtype(self) -> str:
        """The name of the format."""
        return LATENT_DTYPE if self.is_latent else KV_DTYPE

    @property
    def layout_id(self) -> str:
        """Hex SHA-256 of the layout's description: equal id = bytes may be exchanged."""
        n_kv_head, head_dim, v_first = self.heads_text
        text = (
            f"{self.kv_dtype};tokens={PAGE_TOKENS};k=[16][D/4][16][4];ks=[16][D/32][16]f16;"
            f"v=[64][D][4];vs=[256]f16;layers={self.n_layer};kv_heads={n_kv_head};"
            f"head_dim={head_dim};align={PAGE_ALIGN_BYTES}"
        )
        if v_first:  # ks=[16][v_first/32][16] and no v in layers where it is not 0
            text += f";v_first={v_first}"
        return hashlib.sha256(text.encode()).hexdigest()

    def gather_rows(
        self, page: bytes | bytearray | memoryview, first: int, count: int
    ) -> npt.NDArray[np.uint8]:
        """The bytes of rows [first, first+count): shape (count, row_bytes), layers and heads in
        order, per head K[D] ‖ K scale[D/32] ‖ V[D] ‖ V scale, without V if it is latent. A row
        record's digest covers them."""
        found = list[npt.NDArray[np.uint8]]()
        for parts in self._runs(page):
            joined = list[npt.NDArray[np.uint8]]()
            for part in parts:
                heads, _, inner, _ = part.shape
                rows = part.transpose(0, 1, 3, 2).reshape(heads, PAGE_TOKENS, inner)
                joined.append(rows[:, first : first + count].view(np.uint8))
            of_heads = np.concatenate(joined, axis=2)
            width = of_heads.shape[0] * of_heads.shape[2]
            found.append(np.ascontiguousarray(of_heads.transpose(1, 0, 2)).reshape(count, width))
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)

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

    def _parts(self, page: Page) -> Iterator[Part]:
        return itertools.chain.from_iterable(self._runs(page))

    def _runs(self, page: Page) -> Iterator[tuple[Part, ...]]:
        """For each run of layers that are alike views of K, K scale, V, V scale of a page, each
        (heads, groups, inner, tokens of one group); one group is contiguous in memory. V of latent
        layers is not among them."""
        at, memory = 0, np.frombuffer(page, np.uint8, self.payload_bytes)
        for of, layers in itertools.groupby(self.layers):
            size = of.layer_bytes * sum(1 for _ in layers)
            flat = memory[at : at + size].reshape(-1, of.head_bytes)
            at += size
            d, heads = of.head_dim, len(flat)
            k, ks, v, vs = np.split(
                flat, np.cumsum([of.k_bytes, of.k_scale_bytes, of.v_bytes]).tolist(), axis=1
            )
            keys = k.view("<u4").reshape(heads, 16, d // 4, 16)
            key_scales = ks.view("<u2").reshape(heads, 16, of.k_scales, 16)
            value_scales = vs.view("<u2").reshape(heads, 1, 1, 256)
            if of.v_first:
                yield keys, key_scales, value_scales
            else:
                yield keys, key_scales, v.reshape(heads, 64, d, 4), value_scales


def _number(text: str, most: int, least: int = 1) -> int:
    """A number of a layout. Raises ValueError."""
    if len(text) > len(str(most)) or not least <= (value := int(text)) <= most:
        raise ValueError(f"a page has no {text[:20]!r} layers, heads or dims")
    return value


# The smallest and a common shape, computed by hand: the formulas above must not change.
assert KvHeads(1, 32).head_bytes == 8192 + 512 + 8192 + 512
assert KvHeads(1, 576, 64).head_bytes == 256 * (576 + 2 * 2 + 2)
_COMMON = PageLayout.uniform(28, 8, 128)
assert _COMMON.payload_bytes == 28 * 8 * (2 * 32768 + 2048 + 512)
assert _COMMON.page_bytes == 233 * 65536
assert _COMMON.row_bytes * 256 == _COMMON.payload_bytes


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
        n_kv_head, head_dim, v_first = shape.heads_text
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
            "n_kv_head": n_kv_head,
            "head_dim": head_dim,
            "kv_dtype": shape.kv_dtype,
            "layout_id": shape.layout_id,
            "page_tokens": str(PAGE_TOKENS),
            "page_bytes": str(shape.page_bytes),
            "rope_digest": self.rope_digest,
            "tokenizer_hash": self.tokenizer_hash,
            "k_is_post_rope": "1",
        } | ({"v_first": v_first} if v_first else {})
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
            shape = [fields[name] for name in ("n_layer", "n_kv_head", "head_dim")]
            shape.append(fields.get("v_first", ""))
            found = cls(
                fields["model_hash"],
                fields["arith_id"],
                fields["arch"],
                PageLayout.from_text(*shape),
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
