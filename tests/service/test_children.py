"""Child processes of every kind: none runs a file of the working directory or sees a secret."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from bench.processes.engine_child import engine_zygote
from service.admin.client import Client
from service.cli.local.child import ChildDaemon
from tests.lanes.test_confinement import run_apart
from tests.support.engines import Site, read, request, running_engine, words

pytestmark = pytest.mark.usefixtures("started_by_exec")

# Modules that children import, and this process has imported already.
PLANTED = ("msgspec", "numpy", "xxhash", "psutil", "aiohttp", "kernels", "batchengine")
PLANT = "open({mark!r}, 'a').write(__name__ + '\\n')\nraise ImportError('planted')\n"
SECRET = "s3cr3t-value"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which modules of the working directory write that they ran."""
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    for name in PLANTED:
        (here / f"{name}.py").write_text(PLANT.format(mark=str(mark)))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(here), *sys.path])  # as `python -m` makes it
    monkeypatch.setenv("PYTHONPATH", str(here))
    monkeypatch.setenv("BATCHENGINE_API_KEY", SECRET)
    return mark


def assert_clean(mark: Path, children: Iterable[psutil.Process]) -> int:
    count = 0
    for child in children:
        if child.status() == psutil.STATUS_ZOMBIE:  # of an earlier test
            continue
        values = child.environ()
        assert SECRET not in values.values(), child
        assert Path(child.cwd()) != Path.cwd(), child
        count += 1
    assert not mark.exists(), mark.read_text()
    return count


async def test_workers_and_text_processes(site: Site, mark: Path) -> None:
    before = psutil.Process().children()
    async with running_engine(site) as engine:
        assert await engine.text.encode_chat([{"role": "user", "content": "hi"}])
        assert len((await read(engine.submit(request(words(61, 30), 4)))).tokens) == 4
        assert assert_clean(mark, set(psutil.Process().children()).difference(before)) >= 2


def test_the_daemon_of_a_conversation_and_its_children(pocket_path: Path, mark: Path) -> None:
    with ChildDaemon(pocket_path, lambda _: None) as daemon:
        client = Client(daemon.wait_ready(60))
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert list(client.stream_chat(body))
        process = psutil.Process(daemon.pid)
        assert assert_clean(mark, [process, *process.children(recursive=True)]) >= 3
        # The daemon holds keys and prompts: another process of its user cannot read them.
        for name in ("mem", "environ"):
            assert run_apart(f"open('/proc/{daemon.pid}/{name}', 'rb')") == "PermissionError"
        assert "Max core file size        0 " in Path(f"/proc/{daemon.pid}/limits").read_text()


def test_processes_of_benches(mark: Path) -> None:
    zygote = engine_zygote()
    zygote.close()
    assert not mark.exists(), mark.read_text()
