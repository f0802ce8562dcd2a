"""Fixtures that several kv_store test files share: a folder, an open store, a lane, a small disk.

A file takes one by name: `tmp_path = kv_scene.tmp_path`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes.store_check import check_integrity
from kv_store.store import Store
from tests.support.kv_workload import Lane, descriptor, scratch, settings


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory if possible."""
    yield from scratch()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store; its index is checked at the end."""
    opened = Store.open(tmp_path / "store", descriptor(), settings())
    yield opened
    check_integrity(opened)
    opened.close()


@pytest.fixture
def lane(store: Store) -> Iterator[Lane]:
    made = Lane(store)
    yield made
    made.close()


@contextlib.contextmanager
def small_disk(options: str) -> Iterator[Path]:
    """A tmpfs with these mount options, a real full disk. Skips where mounting is not permitted."""
    folder = tempfile.mkdtemp(prefix="kv-disk-")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        os.rmdir(folder)
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        os.rmdir(folder)
