"""Coroutine tests of this folder run on uvloop, as the daemon does, and wait little for files."""

from __future__ import annotations

import inspect

import pytest
import uvloop

from batchengine.peers import peers


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers of this process look at their folders ten times a second."""
    monkeypatch.setattr(peers, "WATCH_S", 0.1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    uvloop.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True
