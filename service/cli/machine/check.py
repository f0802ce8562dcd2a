"""`check`: everything that `serve` would refuse, found without starting anything.

Owns the list of checks. Each is what `serve` itself calls at its start, or the same test on the
same file; one that fails does not keep the others from being made.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchengine import errors
from batchengine.config import (
    CONTEXT_TOKENS_MIN,
    Config,
    check_model_file,
    disk_bytes,
    disk_warnings,
    limit_warnings,
    warnings,
)
from batchengine.core import BatchEngineError
from service.admin.client import admin

GIB = 1 << 30


def check_header(path: str) -> None:
    """Raises what `serve` would refuse a model file for, by its header."""
    from batchengine.gguf import GgufFile
    from batchengine.text.vocab import Tokenizer
    from batchengine.weights import plan_tensors, read_spec

    check_model_file(path)
    with GgufFile(path) as gguf:
        plan_tensors(gguf, read_spec(gguf))
    Tokenizer(path).close()


def check_folders(config: Config) -> None:
    """Raises if the store or the packed weights cannot be written, or another daemon has the store,
    before a model is loaded."""
    found = Findings()
    _store(config, None, found)
    _lock(config, None, found)
    _cache(config, None, found)


@dataclass(slots=True)
class Findings:
    """Problems, which `serve` would refuse, and warnings, with which it starts."""

    problems: list[BatchEngineError] = field(default_factory=list[BatchEngineError])
    warnings: list[str] = field(default_factory=list[str])
    facts: dict[str, Any] = field(default_factory=dict[str, Any])  # of the model


def check(config: Config, *, may_run: bool = False) -> Findings:
    """Every check, in the order of a start. A daemon of this configuration that runs is a warning,
    unless it `may_run`."""
    found = Findings()
    found.warnings += warnings(config) + disk_warnings(config) + limit_warnings(config)
    running = _running(config)
    parts = [_model, _gpu, _address, _admin_socket, _store, _lock, _cache, _peers]
    if may_run and running is not None:
        parts.remove(_address)
    for part in parts:
        try:
            found.warnings += part(config, running, found)
        except BatchEngineError as error:
            found.problems.append(error)
    return found


def _running(config: Config) -> dict[str, Any] | None:
    """The status of the daemon that answers at the admin socket, if there is one."""
    try:
        return admin(config.server.admin_socket, "status", patience_s=2.0)["status"]
    except BatchEngineError:
        return None


Running = dict[str, Any] | None
Part = Callable[[Config, Running, Findings], "Iterator[str] | list[str]"]


def _model(config: Config, running: Running, found: Findings) -> list[str]:
    """The header of the model, its tensors, and what of it fits this machine."""
    import psutil

    from batchengine.gguf import GgufFile
    from service.cli.plan import read_model

    path = config.model.path
    if not path:
        raise errors.NO_MODEL()
    check_model_file(path)
    found.facts, _ = read_model(Path(path), config.limits.context_tokens)
    notes: list[str] = []
    wanted, trained = config.limits.context_tokens, found.facts["context_trained"]
    if wanted > trained:
        notes.append(f"ctx will be {trained:,} instead of {wanted:,}: the model knows no more")
    kv_bytes = found.facts["kv_bytes_per_token"] * found.facts["context_tokens"]
    fits = config.store.budget_bytes // found.facts["kv_bytes_per_token"]
    if fits < CONTEXT_TOKENS_MIN:
        raise errors.STORE_TOO_SMALL(
            budget_bytes=config.store.budget_bytes,
            tokens=fits,
            least=CONTEXT_TOKENS_MIN,
            wanted_bytes=kv_bytes,
        )
    if kv_bytes > config.store.budget_bytes:
        notes.append(
            f"store.budget_bytes = {config.store.budget_bytes:,} holds no session of"
            f" {found.facts['context_tokens']:,} tokens, which takes {kv_bytes:,}: ctx will be less"
        )
    packed, free = found.facts["packed_bytes"], int(psutil.virtual_memory().available)
    if packed > free and running is None:
        notes.append(
            f"the weights take {packed / GIB:,.1f} GiB and {free / GIB:,.1f} GiB of memory are free"
        )
    with GgufFile(path) as gguf:
        if "tokenizer.chat_template" not in gguf.values:
            notes.append("the model file has no chat template: ChatML will be used")
        elif why := asyncio.run(_template_fault(path)):
            notes.append(f"{why}; plain completions will work")
    return notes


async def _template_fault(path: str) -> str:
    """Why the chat template cannot be used, found in a text process, as in the daemon; or ""."""
    from batchengine.text.frontend import TextFrontend

    text = await TextFrontend.open(path)
    try:
        return await text.template_fault()
    finally:
        await text.close()


def _gpu(config: Config, running: Running, found: Findings) -> list[str]:
    if config.require:
        from batchengine.lanes.gpu.device import check_gpus

        check_gpus([lane.device for lane in config.lanes if lane.kind == "cuda"])
    return []


def _address(config: Config, running: Running, found: Findings) -> list[str]:
    """The address to listen on. A port that the running daemon of this configuration has is free
    once it stops."""
    from service.http.listener import bind

    server = config.server
    try:
        bind(server.host, server.port).close()
    except BatchEngineError:
        if running is not None and running["address"] == server.address:
            return [f"a daemon of this configuration runs, pid {running['pid']}: stop it first"]
        raise
    return []


def _admin_socket(config: Config, running: Running, found: Findings) -> list[str]:
    path = config.server.admin_socket
    if why := _unwritable(os.path.dirname(path)):
        raise errors.ADMIN_SOCKET(path=path, why=why)
    if os.path.lexists(path) and not Path(path).is_socket():
        raise errors.ADMIN_SOCKET(path=path, why="something that is not a socket is in the way")
    return []


def _store(config: Config, running: Running, found: Findings) -> list[str]:
    """The store's folder: made or writable, on a file system that is supported."""
    from kv_store.errors import StoreError
    from kv_store.store import check_directory

    folder = config.store.dir
    if why := _unwritable(folder):
        raise errors.STORE_UNOPENED(folder=folder, why=why)
    try:
        notes = list(check_directory(folder, config.store.allow_volatile))
        return notes + ([] if running else _room(config, found))
    except StoreError as error:
        raise errors.STORE_UNUSABLE(what=error.what, why=error.why, fix=error.fix) from None
    except OSError as error:
        raise errors.STORE_UNOPENED(folder=folder, why=error.strerror or str(error)) from None


def _lock(config: Config, running: Running, found: Findings) -> list[str]:
    """The lock of the store, which the running daemon of this configuration holds."""
    from kv_store.errors import StoreLocked
    from kv_store.store import check_lock

    try:
        if running is None:
            check_lock(config.store.dir)
    except StoreLocked as error:
        raise errors.STORE_LOCKED(what=error.what, why=error.why, fix=error.fix) from None
    except OSError:  # `_store` says what is wrong with the folder
        return []
    return []


def _room(config: Config, found: Findings) -> list[str]:
    """A warning if the open pages of the lanes do not fit the disk of the store."""
    from batchengine.policy.capacity import open_pages
    from kv_store.layout import PAGE_TOKENS

    page_bytes = found.facts.get("kv_bytes_per_token", 0) * PAGE_TOKENS
    free, _ = disk_bytes(config.store.dir) or (1 << 62, 0)
    if not page_bytes:
        return []
    budget = config.store.budget_bytes
    pages = sum(
        one.open_pages or open_pages(one.entries_max, budget, page_bytes) for one in config.lanes
    )
    if pages * page_bytes <= free:
        return []
    return [
        f"open pages of the lanes take {pages * page_bytes:,} bytes and {config.store.dir} has"
        f" {free:,} free, unless files of an earlier run make room"
    ]


def _cache(config: Config, running: Running, found: Findings) -> list[str]:
    """The folder of packed weights, and room in it for those of this model."""
    folder = config.cache_dir
    if why := _unwritable(folder):
        raise errors.CACHE_UNWRITABLE(folder=folder, why=why)
    free, _ = disk_bytes(folder) or (1 << 62, 0)
    needed = found.facts.get("packed_bytes", 0)
    if needed > free:
        return [
            f"the packed weights take {needed:,} bytes and {folder} has {free:,} free, unless they"
            " are there already"
        ]
    return []


def _peers(config: Config, running: Running, found: Findings) -> list[str]:
    if not config.peers.listen:
        return []
    from batchengine.peers.identity import identity_of

    identity_of(config.peers)
    return []


def _unwritable(folder: str) -> str:
    """Why this user can make no file in `folder`, which may not exist yet; or ""."""
    place = _existing(folder)
    if not os.path.isdir(place):
        return f"{place} is not a directory"
    with contextlib.suppress(OSError):
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            return f"{place}: {os.strerror(errno.EROFS).lower()}"
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place}: {os.strerror(errno.EACCES).lower()}"
    return ""


def _existing(folder: str) -> str:
    """The folder, or the nearest one above it that exists."""
    place = os.path.abspath(folder)
    while not os.path.lexists(place) and os.path.dirname(place) != place:
        place = os.path.dirname(place)
    return place
