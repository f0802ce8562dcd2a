"""Clones of a process that has imported its modules are children like those started by exec."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.processes.clones import Clones
from tests.support.engines import Reference, Site, read, request, running_engine, until, words

# What the kernel says of a process, and is equal for all that run one module.
OF_STATUS = ("PPid", "Threads", "Seccomp", "NoNewPrivs", "CapEff", "CapPrm", "SigBlk", "SigIgn",
             "SigCgt")  # fmt: skip


def facts(pid: int) -> dict[str, Any]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    process = psutil.Process(pid)
    return {name: status[name] for name in OF_STATUS} | {
        "leads its group": os.getpgid(pid) == pid,
        "priority": os.getpriority(os.PRIO_PROCESS, pid),
        "killed first": Path(f"/proc/{pid}/oom_score_adj").read_text(),
        "cores": os.sched_getaffinity(pid),
        "folder": process.cwd(),
        "environment": process.environ(),
        "files": sorted(type_of(path) for path in Path(f"/proc/{pid}/fd").iterdir()),
    }


def type_of(path: Path) -> str:
    """The kind of an open file: a file, socket, pipe or one of the kernel's own."""
    named = os.readlink(path)
    return "file" if named.startswith("/") else named.partition(":")[0]


async def children(site: Site, words_of: list[int]) -> dict[str, dict[str, Any]]:
    """Facts of the processes of an engine: its worker, and a text process."""
    before = set(psutil.Process().children())
    async with running_engine(site) as engine:
        await engine.text.encode("the small fox")
        assert len((await read(engine.submit(request(words_of, 4)))).tokens) == 4
        worker = int(engine.lanes()[0]["pid"])
        others = {child.pid for child in psutil.Process().children() if child not in before}
        texts = [pid for pid in others - {worker} if is_seccomp(pid)]
        return {"worker": facts(worker), "text": facts(min(texts))}


def is_seccomp(pid: int) -> bool:
    """Whether this is a confined process: a template is none."""
    return "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()


async def test_a_clone_is_a_child_like_one_started_by_exec(
    site: Site, clones: Clones, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_started = clones.n_started
    cloned = await children(site.at("cloned"), words(1, 40))
    assert clones.n_started >= n_started + 2
    monkeypatch.setattr(clones, "is_used", False)
    n_started = clones.n_started
    assert await children(site.at("by exec"), words(1, 40)) == cloned
    assert clones.n_started == n_started


async def test_the_end_of_a_clone_is_reported(site: Site, reference: Reference) -> None:
    prompt = words(2, 40)
    async with running_engine(site) as engine:
        reader = read(engine.submit(request(prompt, 4)))
        assert (await reader).tokens == reference.tokens(prompt, 4)
        for number in (signal.SIGKILL, signal.SIGSEGV):
            lane = engine.state.lanes[0].lane
            incarnation = lane.incarnation
            os.kill(lane.pid, number)
            death = await lane.died()
            assert death.reason == f"was ended by {number.name}"
            await until(lambda: lane.incarnation > incarnation and lane.is_attached)  # noqa: B023
        assert (await read(engine.submit(request(prompt, 4)))).tokens == reference.tokens(prompt, 4)


async def test_a_template_that_has_ended_is_replaced(site: Site, clones: Clones) -> None:
    async with running_engine(site.at("first")):
        pass
    for template in clones.templates:
        os.kill(template.pid, signal.SIGKILL)
        await until(lambda: not template.is_running)  # noqa: B023
    async with running_engine(site.at("second")) as engine:
        assert len((await read(engine.submit(request(words(3, 40), 4)))).tokens) == 4
