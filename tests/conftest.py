"""Fixtures shared by every seam: the bundled pocket model, and scratch folders that vanish."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tracebacks import give_lines

ROOT = Path(__file__).resolve().parent.parent


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure inside an instruction without a line is a failed test, not the end of pytest."""
    if call.excinfo is not None:
        give_lines(call.excinfo.value)
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)
    return (yield)


@pytest.fixture(scope="session")
def pocket_path() -> Path:
    """The bundled pocket model: 4 layers, 256 wide, qwen3, Q4_0."""
    path = ROOT / "pocket" / "pocket-q4_0.gguf"
    assert path.is_file(), "pocket/pocket-q4_0.gguf is part of the repository"
    return path


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One packed-weights cache for the whole run, so that a model is packed once."""
    return tmp_path_factory.mktemp("weights")
