"""Names and checksums of pages: content keys, sealed checksums, payload digests, row digests.

SHA-256 names content (it must resist crafted collisions); XXH3 detects damage (it must be fast).
Every hash is domain separated and length prefixed, so no two inputs share an encoding.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from kv_store.layout import PAGE_TOKENS

KEY_BYTES = 32
ROOT_KEY = bytes(KEY_BYTES)  # the parent of a first page
MASK64 = (1 << 64) - 1
_LENGTH, _PAGE_COUNT = struct.Struct("<Q"), struct.Struct("<QIQ")
_PAGE_HEAD = struct.pack("<I19sQ", 19, b"batchengine page v1", KEY_BYTES)
ROW_SEED_STEP = 0x9E3779B97F4A7C15  # odd: neighbouring positions get distant seeds, none repeats

Tokens = Sequence[int] | npt.NDArray[np.uint32]
assert array("I").itemsize == 4


def token_bytes(tokens: Tokens | bytes) -> bytes:
    """Token ids as u32 little-endian. Raises ValueError for an id outside u32."""
    if isinstance(tokens, bytes):
        return tokens
    try:
        return array("I", tokens).tobytes()
    except OverflowError as error:
        raise ValueError("a token id is outside u32") from error


def token_ids(blob: bytes) -> list[int]:
    """The inverse of `token_bytes`."""
    ids = array("I")
    ids.frombytes(blob)
    return ids.tolist()


def hash_parts(domain: bytes, parts: Iterable[bytes]) -> bytes:
    """SHA-256 over a domain and length-prefixed parts."""
    h = hashlib.sha256(struct.pack("<I", len(domain)) + domain)
    for part in parts:
        h.update(_LENGTH.pack(len(part)))
        h.update(part)
    return h.digest()


def content_key(
    parent: bytes, tokens: Tokens | bytes, repr_id: bytes, tenant_salt: bytes = b""
) -> bytes:
    """Key of the page that holds `tokens` (1..256 ids) after `parent` (ROOT_KEY for the first)."""
    ids = token_bytes(tokens)
    n = len(ids) // 4
    if len(parent) != KEY_BYTES or not 1 <= n <= PAGE_TOKENS or len(ids) % 4:
        raise ValueError(f"a page has 1..{PAGE_TOKENS} tokens and a {KEY_BYTES}-byte parent key")
    parts = (  # what `hash_parts` would hash: parent, count, ids, representation, salt
        _PAGE_HEAD, parent, _PAGE_COUNT.pack(4, n, 4 * n), ids, _LENGTH.pack(len(repr_id)), repr_id,
        _LENGTH.pack(len(tenant_salt)), tenant_salt,
    )  # fmt: skip
    return hashlib.sha256(b"".join(parts)).digest()


def chain_keys(
    tokens: Tokens | bytes, repr_id: bytes, tenant_salt: bytes = b"", parent: bytes = ROOT_KEY
) -> list[bytes]:
    """Keys of every *full* page of a timeline, in order."""
    ids, keys = token_bytes(tokens), list[bytes]()
    for end in range(PAGE_TOKENS * 4, len(ids) + 1, PAGE_TOKENS * 4):
        parent = content_key(parent, ids[end - PAGE_TOKENS * 4 : end], repr_id, tenant_salt)
        keys.append(parent)
    return keys


def payload_digest(page: bytes | bytearray | memoryview) -> bytes:
    """XXH3-128 of a whole page (page_bytes, padding zeroed), unseeded: equal across lanes, hosts
    and recomputation. 16 bytes."""
    return xxhash.xxh3_128_digest(page)


def sealed_seed(store_uuid: bytes, page_id: int, gen: int, key: bytes, layout_id: str) -> int:
    """The u64 seed that ties a sealed checksum to one page of one store."""
    name = struct.pack("<II", page_id, gen)
    return _low64(hash_parts(b"batchengine seal v1", (store_uuid, name, key, layout_id.encode())))


def sealed_checksum(page: bytes | bytearray | memoryview, seed: int) -> bytes:
    """Seeded XXH3-128 of a whole page: a stale, misdirected or foreign page fails it. 16 bytes."""
    return xxhash.xxh3_128_digest(page, seed)


def blob_checksum(session: str, start: int, blob: bytes) -> bytes:
    """XXH3-64 of a token blob, seeded with its session and start position. 8 bytes."""
    seed = _low64(
        hash_parts(b"batchengine tokens v1", (session.encode(), struct.pack("<Q", start)))
    )
    return xxhash.xxh3_64_digest(blob, seed)


def row_seeds(
    arena_id: bytes, slot: int, gen: int, session: bytes, epoch: int, first: int, count: int
) -> npt.NDArray[np.uint64]:
    """Seeds of the row digests for positions [first, first+count) of a session's timeline."""
    name = struct.pack("<IIQ", slot, gen, epoch)
    base = _low64(hash_parts(b"batchengine row v1", (arena_id, name, session)))
    positions = np.arange(first, first + count, dtype=np.uint64)
    return np.uint64(base) + positions * np.uint64(ROW_SEED_STEP)  # wraps modulo 2^64


def _low64(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little")
