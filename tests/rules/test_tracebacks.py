"""A failure in an instruction without a line is reported as one failed test."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.support.tracebacks import give_lines

ROOT = Path(__file__).resolve().parents[2]
FAILING = """
import itertools
import signal


def late(number, frame):
    raise TimeoutError("the text of the failure")


def spin():
    for number in itertools.repeat(1):
        if number:
            last = number


def test_fails():
    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    spin()


def test_passes():
    pass
"""


def test_every_entry_gets_a_line() -> None:
    scene: dict[str, Any] = {}
    exec(FAILING, scene)
    before = signal.getsignal(signal.SIGALRM)
    try:
        with pytest.raises(TimeoutError) as caught:
            scene["test_fails"]()
    finally:
        signal.signal(signal.SIGALRM, before)
    missing = [entry.tb_lineno is None for entry in entries(caught.value)]
    give_lines(caught.value)
    lines = [entry.tb_lineno for entry in entries(caught.value)]
    assert None not in lines
    if sys.version_info < (3, 12):  # the interpreter that leaves it out
        assert missing == [False, False, True, False]
        assert lines[2] == scene["spin"].__code__.co_firstlineno


def test_pytest_goes_on_behind_such_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_scene.py").write_text(FAILING)
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "tests.conftest"]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "the text of the failure" in ended.stdout


def entries(error: BaseException) -> list[types.TracebackType]:
    found, entry = list[types.TracebackType](), error.__traceback__
    while entry is not None:
        found.append(entry)
        entry = entry.tb_next
    return found
