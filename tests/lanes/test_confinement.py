"""What a worker can no longer do once it has loaded; it still computes."""

from __future__ import annotations

import errno
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from batchengine.child import confinement
from batchengine.engine import Engine
from batchengine.text.frontend import TextFrontend
from tests.support.confined_worker import PRY
from tests.support.engines import Reference, Site, read, request, running_engine, until, words

pytestmark = pytest.mark.usefixtures("started_by_exec")

ROOT = Path(__file__).resolve().parents[2]


async def test_a_worker_that_was_taken_over_reaches_nothing_outside(
    site: Site, reference: Reference
) -> None:
    """A step of the real engine tries every way out, then computes."""
    found = site.folder / "found"
    command = (sys.executable, "-m", "tests.support.confined_worker", str(found))
    prompt = [*words(51, 40), PRY, *words(52, 40)]
    async with running_engine(site, command) as engine:
        answer = await read(engine.submit(request(prompt, 24)))
        assert answer.tokens == reference.tokens(prompt, 24)
        assert engine.state.lanes[0].lane.incarnation == 1
    numbers: dict[str, int] = json.loads(found.read_text())
    own = {name: numbers.pop(name) for name in list(numbers) if name.startswith("own ")}
    assert set(own.values()) == {0}, own
    assert_all_refused(numbers)


def assert_all_refused(numbers: dict[str, int]) -> None:
    assert len(numbers) > 80
    assert {name for name, number in numbers.items() if number != errno.EPERM} == set()


async def test_a_text_process_that_was_taken_over_reaches_nothing_outside(
    pocket_path: Path,
) -> None:
    text = await TextFrontend.open(pocket_path, reader="tests.support.confined_worker:read")
    try:
        assert_all_refused(json.loads(await text.read(b"", b"")))
        assert await text.encode("the small fox")
    finally:
        await text.close()


def test_both_architectures_refuse_the_same_calls() -> None:
    only_x86 = {"fork", "vfork", "modify_ldt", "iopl", "ioperm"}
    x86, arm = confinement.X86_64.calls, confinement.AARCH64.calls
    assert set(x86) - set(arm) == only_x86
    assert not set(arm) - set(x86)
    assert not set(confinement.REFUSED) - set(x86)
    for kind in confinement.ARCHITECTURES.values():
        assert len(set(kind.calls.values())) == len(kind.calls)
        assert len(confinement.program(kind, 77)) % 8 == 0


APART = """
import sys
from batchengine.child import guard

guard.drop_privileges()
try:
    exec(sys.argv[1])
    print("done")
except Exception as error:
    print(type(error).__name__)
"""


def run_apart(code: str) -> str:
    """What happens to `code` in another process of this user, without privileges."""
    command = [sys.executable, "-c", APART, code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    return done.stdout.strip()


PRIVATE = """
import os, sys
from batchengine.child import guard
from tests.lanes.test_confinement import run_apart

def others(name):
    return run_apart(f"open('/proc/{os.getpid()}/{name}', 'rb')")

guard.drop_privileges()  # a process of root is closed to those with fewer privileges
assert others("environ") == "done"
guard.keep_private()
assert [others("mem"), others("environ")] == ["PermissionError", "PermissionError"]
assert os.listdir("/proc/self/fd") and open("/proc/self/statm").read()
"""


def test_a_private_process_is_closed_to_others_of_its_user() -> None:
    done = subprocess.run([sys.executable, "-c", PRIVATE], cwd=ROOT, timeout=60)
    assert done.returncode == 0


ON_ANOTHER_MACHINE = """
import platform
from batchengine.lanes import worker

platform.machine = lambda: "riscv64"
worker.main()
"""


async def test_a_worker_that_cannot_be_confined_is_a_trouble(
    site: Site, reference: Reference
) -> None:
    """It serves; the status says so as long as that worker runs."""
    command = (sys.executable, "-c", ON_ANOTHER_MACHINE)
    async with running_engine(site, command) as engine:
        (lane,) = (loop.lane for loop in engine.state.lanes)
        (trouble,) = engine.stats()["troubles"]
        assert f"lane {lane.name} unconfined" in trouble
        assert "riscv64" in trouble
        await until(lambda: confined(engine, lane.name) == 0.0)
        prompt = words(53, 20)
        assert (await read(engine.submit(request(prompt, 4)))).tokens == reference.tokens(prompt, 4)
        lane.unconfined = ""  # as of a worker that was started since
        assert engine.stats()["troubles"] == []
        await until(lambda: confined(engine, lane.name) == 1.0)


def confined(engine: Engine, lane: str) -> float | None:
    registry = engine.state.metrics.registry
    return registry.get_sample_value("batchengine_lane_confined", {"lane": lane})


def test_a_machine_without_a_table_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "riscv64" in confinement.confine()
