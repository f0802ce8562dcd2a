"""The pool of text processes: turns between tenants; processes that die, hang or start slowly."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchengine.child import process
from batchengine.core import BatchEngineError, Kind
from batchengine.fair_queue import FairQueue
from batchengine.text.frontend import TextFrontend
from batchengine.text.pool import LONG_NICE, SHORT_NICE, TextLimits
from tests.support.engines import suspend, until

pytestmark = pytest.mark.usefixtures("started_by_exec")

LONG = "the small fox " * 40_000
ENDLESS = (
    "{% if messages[0].content == 'endless' %}{% for a in range(99999) %}"
    "{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


STOPPED_S = 1.5


def lowest(pid: int) -> int:
    """The largest nice value of a process's threads."""
    threads = map(int, os.listdir(f"/proc/{pid}/task"))
    return max(os.getpriority(os.PRIO_PROCESS, thread) for thread in threads)


def chat(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


@asynccontextmanager
async def opened(path: Path, **settings: Any) -> AsyncIterator[TextFrontend]:
    text = await TextFrontend.open(path, **settings)
    try:
        yield text
    finally:
        await text.close()


# --- the queue ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100)), max_size=60))
def test_items_of_a_tenant_leave_in_order_and_none_is_lost(items: list[tuple[str, int]]) -> None:
    queue = FairQueue[int]()
    for number, (tenant, cost) in enumerate(items):
        queue.push(tenant, cost, number)
    left: list[int] = []
    while (item := queue.pop()) is not None:
        left.append(item)
    assert sorted(left) == list(range(len(items)))
    for tenant in "abc":
        own = [number for number in left if items[number][0] == tenant]
        assert own == sorted(own)


def test_tenants_that_always_wait_take_equal_cost() -> None:
    rng = random.Random(7)
    queue = FairQueue[tuple[str, int]]()
    costs = {"small": lambda: 1, "large": lambda: rng.randint(20, 60), "flood": lambda: 5}
    taken = dict.fromkeys(costs, 0)
    for tenant in costs:
        for _ in range(200 if tenant == "flood" else 2):
            queue.push(tenant, cost := costs[tenant](), (tenant, cost))
    for _ in range(4000):
        found = queue.pop()
        assert found is not None
        tenant, cost = found
        taken[tenant] += cost
        queue.push(tenant, again := costs[tenant](), (tenant, again))
        assert max(taken.values()) - min(taken.values()) <= 2 * 60


def test_a_tenant_that_may_not_leave_is_passed_over() -> None:
    queue = FairQueue[str]()
    queue.push("a", 1, "first")
    queue.push("b", 9, "second")
    assert queue.pop(lambda tenant: tenant != "a") == "second"
    assert queue.pop(lambda tenant: tenant != "a") is None
    assert queue.pop() == "first"


# --- the pool -----------------------------------------------------------------------------------


async def test_a_short_text_does_not_wait_behind_a_long_one(pocket_path: Path) -> None:
    async with opened(pocket_path) as text:
        await text.encode("the")  # its process runs
        long = [asyncio.create_task(text.encode(LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        await text.encode("the")
        assert not any(task.done() for task in long[1:])  # of one tenant, as without keys
        await long[0]
        pids = [worker.pid for worker in text._pool._all if worker.pid]
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert {lowest(pid) for pid in pids} == {
            min(own + nice, 19) for nice in (SHORT_NICE, LONG_NICE)
        }
        for task in long:
            assert len(await task) > 100_000


async def test_a_tenant_with_many_texts_does_not_delay_another(pocket_path: Path) -> None:
    async with opened(pocket_path) as text:
        await asyncio.gather(text.encode("the", tenant="a"), text.encode("the", tenant="b"))
        flood = [asyncio.create_task(text.encode("the " * 500, tenant="a")) for _ in range(400)]
        await asyncio.sleep(0)
        await text.encode("the", tenant="b")
        assert sum(task.done() for task in flood) < 20
        await asyncio.gather(*flood)


async def test_a_text_that_hangs_costs_its_own_tenant_the_limit(pocket_path: Path) -> None:
    limits = TextLimits(cpu_s=1)
    async with opened(pocket_path, template=ENDLESS, limits=limits) as text:
        await text.encode_chat(chat("hi"), tenant="b")
        hanging = asyncio.create_task(text.encode_chat(chat("endless"), tenant="a"))
        for _ in range(20):
            await text.encode_chat(chat("hi"), tenant="b")
        assert not hanging.done()
        with pytest.raises(BatchEngineError, match="more processor time than it may") as caught:
            await hanging
        assert caught.value.name == "chat_template_stopped"
        assert await text.encode_chat(chat("hi"), tenant="a") != []


async def test_a_text_is_not_refused_because_its_process_waits_for_a_processor(
    pocket_path: Path,
) -> None:
    """As on a machine that others keep busy: it is stopped for longer than it may compute."""
    async with opened(pocket_path, limits=TextLimits(cpu_s=1)) as text:
        wanted = await text.encode(LONG)
        (pid,) = [worker.pid for worker in text._pool._all if worker.pid]
        waiting = asyncio.create_task(text.encode(LONG))
        await asyncio.sleep(0)  # it is sent
        suspend(pid)
        await asyncio.sleep(STOPPED_S)
        assert not waiting.done()
        os.kill(pid, signal.SIGCONT)
        assert await waiting == wanted


async def test_a_process_that_hangs_without_computing_is_ended(pocket_path: Path) -> None:
    async with opened(pocket_path) as text:
        await text.encode("hi")
        (worker,) = [worker for worker in text._pool._all if worker.pid]
        suspend(worker.pid)
        worker._limits = TextLimits(wall_s=0.2)
        with pytest.raises(BatchEngineError, match="took longer than 0 s"):
            await text.encode("hi")


async def test_a_process_that_is_stopped_is_replaced_and_costs_no_request(
    pocket_path: Path,
) -> None:
    async with opened(pocket_path) as text:
        wanted = await text.encode("hi")
        (worker,) = [worker for worker in text._pool._all if worker.pid]
        first = worker.pid
        suspend(first)
        worker._limits = TextLimits(idle_s=0.5)
        assert await text.encode("hi") == wanted
        assert worker.pid != first


async def test_processes_that_stop_again_and_again_are_not_blamed_on_the_text(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(pocket_path) as text:
        await text.encode("hi")
        (worker,) = [worker for worker in text._pool._all if worker.pid]
        start = worker.start

        async def start_stopped() -> None:
            await start()
            suspend(worker.pid)

        monkeypatch.setattr(worker, "start", start_stopped)
        worker._limits = TextLimits(idle_s=0.5)
        with pytest.raises(BatchEngineError, match="used no processor time") as caught:
            await text.encode("hi")
        assert (caught.value.kind, caught.value.retry_ms) == (Kind.UNAVAILABLE, 1000)


async def test_a_killed_process_costs_no_request(pocket_path: Path) -> None:
    async with opened(pocket_path) as text:
        wanted = await text.encode(LONG)
        for _ in range(3):
            working = asyncio.create_task(text.encode(LONG))
            await asyncio.sleep(0.05)
            os.kill(max(worker.pid for worker in text._pool._all), signal.SIGKILL)
            assert await working == wanted


async def test_slow_starts_refuse_requests_until_a_start_succeeds(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many starts fail, the next request tries again."""
    async with opened(pocket_path, limits=TextLimits(start_s=0.001)) as text:
        for _ in range(3):
            with pytest.raises(BatchEngineError, match="no process") as caught:
                await text.encode_chat(chat("hi"))
            assert (caught.value.kind, caught.value.retry_ms) == (Kind.UNAVAILABLE, 1000)
        assert text.trouble.startswith("a text process does not start: took longer than 0 s")
        for worker in text._pool._all:
            monkeypatch.setattr(worker, "_limits", TextLimits())
        assert await text.encode_chat(chat("hi")) != []
        assert text.trouble == ""


async def test_a_start_without_a_free_descriptor_leaves_no_process(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def none_left(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with opened(pocket_path) as text, asyncio.timeout(60):
        with monkeypatch.context() as patched:
            patched.setattr(os, "pidfd_open", none_left)
            with pytest.raises(BatchEngineError, match="Too many open files"):
                await text.encode("hi")
        for pid in started:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert await text.encode("hi")


async def test_a_start_without_a_free_socket_is_refused_as_unavailable(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async with opened(pocket_path) as text, asyncio.timeout(60):
        with monkeypatch.context() as patched:
            patched.setattr(socket, "socketpair", none_left)
            with pytest.raises(BatchEngineError, match="Too many open files") as caught:
                await text.encode("hi")
            assert caught.value.kind is Kind.UNAVAILABLE
        assert await text.encode("hi")


async def test_a_process_that_cannot_be_ended_is_given_up(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits inside the kernel; it is reaped when it ends after all."""
    monkeypatch.setattr(process, "KILL_S", 0.3)
    async with opened(pocket_path) as text, asyncio.timeout(60):
        await text.encode("hi")
        stuck = [worker.pid for worker in text._pool._all if worker.pid]
        for pid in stuck:
            suspend(pid)
        with monkeypatch.context() as patched:
            patched.setattr(subprocess.Popen, "send_signal", lambda *_: None)
            for worker in text._pool._all:
                patched.setattr(worker, "_limits", TextLimits(wall_s=0.2))
            with pytest.raises(BatchEngineError, match="could not be ended"):
                await text.encode("hi")
        assert await text.encode("hi")
        for pid in stuck:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in stuck))
        assert await text.encode("hi")


async def test_a_request_that_is_given_up_leaves_the_pool_usable(pocket_path: Path) -> None:
    async with opened(pocket_path) as text:
        gone = [asyncio.create_task(text.encode(LONG)) for _ in range(50)]
        await asyncio.sleep(0.05)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        async with asyncio.timeout(60):
            assert len(await text.encode(LONG)) > 100_000
        assert (text._pool._long.running, text._pool._short.running) == ({}, {})


@pytest.mark.parametrize("begun", [False, True])
async def test_closing_ends_requests_and_processes(pocket_path: Path, begun: bool) -> None:
    """Also a request that is about to start its process."""
    text = await TextFrontend.open(pocket_path)
    await text.encode("the")
    pids = [worker.pid for worker in text._pool._all if worker.pid]
    tasks = [asyncio.create_task(text.encode(LONG)) for _ in range(3)]
    (long,) = text._pool._long.idle
    await asyncio.sleep(0)
    assert text._pool._long.running
    assert not long.is_running
    if begun:
        await until(lambda: long.is_running)
    await text.close()
    for task in tasks:
        with pytest.raises(BatchEngineError, match="stops"):
            await task
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)  # noqa: ASYNC240
    await text.close()


def read_without_end(encoder: object, question: bytes, body: bytes) -> bytes:
    """A reader of bodies that takes all memory it may have."""
    return bytes(1 << 40)


async def test_a_body_that_takes_too_much_memory_is_not_blamed_on_the_template(
    pocket_path: Path,
) -> None:
    reader = f"{__name__}:{read_without_end.__name__}"
    async with opened(pocket_path, reader=reader) as text:
        with pytest.raises(BatchEngineError, match="memory passed the limit") as caught:
            await text.read(b"", b"{}")
        assert (caught.value.code, caught.value.kind) == ("BE1506", Kind.INVALID)
        assert await text.encode("the")


async def test_a_process_that_grew_is_replaced(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "{{ (messages[0].content * 80000000) | length }}"
    async with opened(pocket_path, template=source) as text:
        await text.encode("the")
        first = {worker.pid for worker in text._pool._all}
        with pytest.raises(BatchEngineError, match="memory"):
            await text.encode_chat(chat("0123456789abcdefgh"))
        await text.encode("the")
        assert {worker.pid for worker in text._pool._all} != first


async def test_a_stop_while_processes_start_is_no_warning(
    pocket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = await TextFrontend.open(pocket_path, reader="service.protocols.reading:read")
    await asyncio.sleep(0.05)
    await text.close()
    assert caplog.messages == []
