"""Fixtures of all tests: the bundled pocket model, and temporary folders."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import subprocess
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from batchengine.child import process
from bench.processes.clones import Clones
from tests.support import engines
from tests.support.engines import Reference, Site
from tests.support.tracebacks import give_lines

ROOT = Path(__file__).resolve().parent.parent

# Random tests draw other examples in each `make soak`, 1,000 of them; otherwise the same 100, or
# their part of it, so that a change passes or fails for what it changes.
MACHINES_ARE_SHARED: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
}
settings.register_profile("soak", max_examples=1000, **MACHINES_ARE_SHARED)
settings.register_profile("suite", derandomize=True, **MACHINES_ARE_SHARED)
settings.load_profile("suite")

# Little of what collection makes is garbage, and a search for it looks at half a million objects.
gc.disable()

# What tests ask listens on loopback, to which a proxy of this machine has no way.
for _name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Later searches for garbage leave out modules and tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A failure inside an instruction without a line is a failed test, not the end of pytest."""
    if call.excinfo is not None:
        give_lines(call.excinfo.value)
        call.excinfo = pytest.ExceptionInfo.from_exception(call.excinfo.value)
    return (yield)


@pytest.fixture(scope="session", autouse=True)
def clones() -> Iterator[Clones]:
    """Engines in the process of the tests start their children as clones: importing is most of a
    start."""
    made = Clones()
    with pytest.MonkeyPatch.context() as patched:
        own = types.SimpleNamespace(Popen=made.popen, DEVNULL=subprocess.DEVNULL)
        patched.setattr(process, "subprocess", own)
        yield made
    made.close()


@pytest.fixture
def started_by_exec(clones: Clones) -> Iterator[None]:
    """For tests of how processes start: every child is started by exec."""
    clones.is_used = False
    yield
    clones.is_used = True


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


@pytest.fixture
def site(pocket_path: Path, tmp_path: Path, cache_dir: Path) -> Site:
    """The pocket model and an empty folder."""
    return Site(pocket_path, tmp_path, cache_dir)


@pytest.fixture
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane of `running_engine` has as many threads as a daemon on this machine would have."""
    monkeypatch.setattr(engines, "THREADS", 0)


@pytest.fixture(scope="session")
def reference(pocket_path: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers of the pocket model when it computes one timeline alone."""
    made = Reference(pocket_path, cache_dir)
    yield made
    made.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in a new event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
