"""The open pages in the arenas of a dead engine, and the workers that held them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import xxhash

from kv_store.arenas.arena import FILE_HEADER, FILE_HEADER_BYTES, SIDECAR_BYTES, SLOT_HEADER
from kv_store.layout import ROW_RECORDS_BYTES
from kv_store.ledger.continuity import INCARNATIONS

_HEADER_SPAN = 48  # bytes of a slot header that its checksum covers


class Held(NamedTuple):
    """An open page that one worker may write. `session` is as the arena names it, in hex."""

    session: str
    epoch: int
    page_index: int


def newest_arenas(folder: Path, lanes: Iterable[str]) -> list[Path]:
    """The arena of each lane's last worker in the last run; earlier arenas are read only."""
    last: dict[str, int] = {}
    for path in folder.iterdir():
        lane, _, number = path.name.rpartition(".")
        if lane in lanes and number.isdigit():
            last[lane] = max(last.get(lane, 0), int(number))
    life = max(last.values(), default=0) // INCARNATIONS
    return [folder / f"{lane}.{n}" for lane, n in last.items() if n // INCARNATIONS == life]


def slots(path: Path) -> Iterator[Held]:
    """Every slot with a whole header; a torn file has none."""
    data = path.read_bytes()
    if len(data) < FILE_HEADER.size:
        return
    count = FILE_HEADER.unpack_from(data)[2]
    first = len(data) - count * SIDECAR_BYTES
    if count < 1 or first < FILE_HEADER_BYTES:
        return
    for slot in range(count):
        at = first + slot * SIDECAR_BYTES + ROW_RECORDS_BYTES
        session, epoch, _, page_index, check = SLOT_HEADER.unpack_from(data, at)
        if check == xxhash.xxh3_64_intdigest(data[at : at + _HEADER_SPAN]):
            yield Held(session.hex(), epoch, page_index)


def double_slots(folder: Path, lanes: Iterable[str]) -> list[str]:
    """Open pages that the last workers of two lanes both hold under one epoch: never allowed."""
    if not os.path.isdir(folder):
        return []
    owners: dict[Held, str] = {}
    double: list[str] = []
    for path in newest_arenas(folder, lanes):
        for held in set(slots(path)):
            other = owners.setdefault(held, path.name)
            if other != path.name:
                double.append(f"{held} in {other} and {path.name}")
    return double
