"""Session and SLA carriers, notifications, the admin socket, and rules for listening addresses."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from batchengine.config import Config, load
from batchengine.core import BatchEngineError, Kind, SlaClass
from service import session_ids
from service.admin import client
from service.admin.socket import AdminSocket
from service.cli import main
from service.http import access, listener
from service.notify import Notifier
from service.protocols import carriers, schema
from service.protocols.carriers import Caller
from tests.support.fake_engine import FakeEngine, chat, post, serving

Pairs = list[tuple[str, str]]


def body_of(values: dict[str, Any]) -> schema.ChatRequest:
    full = {"messages": [{"role": "user", "content": "x"}], **values}
    return schema.read_request(schema.ChatRequest, full)[0]


def headers_of(pairs: Pairs) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict(pairs))


EVERYTHING: Pairs = [
    ("X-OpenWebUI-Chat-Id", "webui"),
    ("X-Conversation-Id", "conversation"),
    ("X-Other-Session-Id", "generic"),
    ("x-session-affinity", "affinity"),
    ("conversation_id", "codex-conversation"),
    ("session_id", "codex-old"),
    ("session-id", "codex-new"),
    ("thread-id", "thread"),
    ("x-session-id", "opencode"),
    ("x-claude-code-session-id", "claude"),
    ("x-claude-code-agent-id", "claude-agent"),
    ("x-dynamo-session-id", "dynamo"),
    ("x-batchengine-session-id", "ours"),
]
NEVER: Pairs = [
    ("x-client-request-id", "openclaw"),
    ("x-parent-session-id", "parent"),
    ("x-dynamo-parent-session-id", "parent"),
]


def test_session_carriers_have_the_documented_precedence() -> None:
    """Each carrier has precedence over all after it: remove them one by one from the top."""
    fields: dict[str, Any] = {
        "batchengine": {"session_id": "extension"},
        "session_id": "vllm",
        "prompt_cache_key": "cache-key",
        "metadata": {"session_id": "meta"},
        "user": "someone",
    }
    remaining = list(EVERYTHING)

    def first(headers: Pairs) -> str:
        return next(iter(carriers.session_carriers(body_of(fields), headers_of(headers))))[0]

    assert first(remaining + NEVER) == "batchengine.session_id"
    found = carriers.session_of(body_of(fields), headers_of(remaining + NEVER), "t")
    assert found == session_ids.session_key("t", "extension")
    del fields["batchengine"]
    while remaining:
        wanted, value = remaining[-1]
        assert first(remaining + NEVER) == wanted.lower()
        found = carriers.session_of(body_of(fields), headers_of(remaining + NEVER), "t")
        assert found == session_ids.session_key("t", value)
        remaining.pop()
    for field in ("session_id", "prompt_cache_key", "metadata"):
        assert first(NEVER) in (field, f"{field}.session_id")
        assert carriers.session_of(body_of(fields), headers_of(NEVER), "t") is not None
        del fields[field]
    assert (
        carriers.session_of(body_of(fields), headers_of(NEVER), "t") is None
    )  # `user` names a person, not a session


def test_a_users_id_holds_a_session_where_it_is_json_or_ends_with_one() -> None:
    def named(user_id: str) -> str | None:
        fields = {"metadata": {"user_id": user_id}}
        found = carriers.session_carriers(body_of(fields), headers_of([]))
        return next((value for _, value in found), None)

    assert named('{"device_id": "d", "session_id": "s-1"}') == "s-1"
    session = "0ce6817c-0e24-48f7-b264-2afbc79c1adc"
    for account in ("", session):  # Claude Code 1.0 and 2.0
        assert named(f"user_{'a5' * 32}_account_{account}_session_{session}") == session
    others = ("user-17", "user_1_account__session_7", f"x_session_{session}", "{" * 500, "{")
    for other in (*others, '{"session_id": 7}', '{"a": 1}', '["session_id"]', "user_" * 2000):
        assert named(other) is None


def test_session_ids_are_bound_to_their_tenant() -> None:
    ours = session_ids.session_key("a", "my session")
    assert ours == session_ids.session_key("a", "my session")
    assert ours != session_ids.session_key("b", "my session")
    assert session_ids.session_key("a", ours) == ours  # ids that the daemon issued are kept
    assert session_ids.session_key("b", ours) != ours
    assert session_ids.session_key("", "x") != session_ids.session_key("x", "")  # length-prefixed
    forged = ours[:-1] + ("a" if ours[-1] != "a" else "b")
    assert session_ids.session_key("a", forged) != forged
    for bad in ("a\nb", "\x7f", "a\x00", "x" * 5000, "caf\udce9"):
        with pytest.raises(BatchEngineError) as caught:
            session_ids.session_key("a", bad)
        assert caught.value.kind is Kind.INVALID
    assert session_ids.session_key("a", "x" * 4000).startswith("be_")  # long ids are hashed


# body, headers, caller's class, expected class
SLA_CLASSES: list[tuple[dict[str, Any], Pairs, SlaClass | None, str]] = [
    ({}, [], None, "standard"),
    ({}, [], SlaClass.BACKGROUND, "background"),
    ({"model": "m:batch"}, [], SlaClass.BACKGROUND, "batch"),
    ({"model": "m:interactive"}, [], None, "interactive"),
    ({"model": "m:standard"}, [], None, "standard"),  # not an alias: `m` itself is standard
    ({"model": "batch"}, [], None, "standard"),
    ({"model": "m:batch", "speed": "fast"}, [], None, "interactive"),
    ({"speed": "fast", "service_tier": "flex"}, [], None, "background"),
    ({"service_tier": "priority"}, [], None, "interactive"),
    ({"service_tier": "ultrafast"}, [], None, "interactive"),
    ({"service_tier": "batch"}, [], None, "batch"),
    ({"service_tier": "auto"}, [], SlaClass.BATCH, "batch"),
    ({"service_tier": "default", "model": "m:background"}, [], None, "background"),
    ({"service_tier": "standard_only", "model": "m:background"}, [], None, "standard"),
    ({"service_tier": "flex"}, [("X-LLM-D-Inference-Objective", "interactive")], None,
     "interactive"),
    ({"batchengine": {"class": "batch"}}, [("x-llm-d-inference-objective", "interactive")], None,
     "batch"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "pairs", "key_class", "expected"), SLA_CLASSES)
def test_the_class_is_read_from_its_carriers(
    fields: dict[str, Any], pairs: Pairs, key_class: SlaClass | None, expected: str
) -> None:
    found = carriers.sla_of(body_of(fields), headers_of(pairs), Caller("", key_class), Config())
    assert found.sla_class == expected


def test_targets_and_priorities_are_read_from_their_carriers() -> None:
    def resolve(fields: dict[str, Any], pairs: Pairs) -> Any:
        return carriers.sla_of(body_of(fields), headers_of(pairs), Caller(), Config())

    pairs = [
        ("x-llm-d-slo-ttft-ms", "250"),
        ("x-slo-ttft-ms", "999"),
        ("x-slo-tpot-ms", "40.5"),
        ("x-batchengine-ttlt-ms", "60000"),
    ]
    found = resolve({}, pairs)
    assert (found.ttft_ms, found.tpot_ms, found.ttlt_ms) == (250.0, 40.5, 60000.0)
    found = resolve({"batchengine": {"ttft_ms": 100}}, pairs)
    assert (found.ttft_ms, found.tpot_ms) == (100.0, 40.5)  # each value has its own carrier
    assert resolve({"priority": 5}, []).priority == -5  # vLLM: lower = sooner
    hints = {"nvext": {"agent_hints": {"priority": 7}}, "priority": 5}
    assert resolve(hints, []).priority == 7
    assert resolve({"priority": 5}, [("x-dynamo-request-priority", "3")]).priority == 3
    assert resolve({**hints, "batchengine": {"priority": 1}}, []).priority == 1
    for text in ("nan", "inf", "-1", "0", "abc", "1e99", "", "9" * 40):
        with pytest.raises(BatchEngineError) as caught:
            resolve({}, [("x-slo-tpot-ms", text)])
        assert caught.value.param == "x-slo-tpot-ms"
    with pytest.raises(BatchEngineError) as caught:
        resolve({}, [("x-llm-d-inference-objective", "vip")])
    assert caught.value.kind is Kind.INVALID


def test_a_later_carrier_is_not_read_when_an_earlier_one_has_a_value() -> None:
    found = carriers.sla_of(
        body_of({"batchengine": {"class": "batch"}, "service_tier": "nonsense"}),
        headers_of([]),
        Caller(),
        Config(),
    )
    assert found.sla_class == SlaClass.BATCH


@pytest.mark.parametrize(
    ("host", "keys", "tls", "code"),
    [
        ("127.0.0.1", False, False, ""),
        ("::1", False, False, ""),
        ("localhost", False, False, ""),
        ("0.0.0.0", False, False, "BE1106"),
        ("0.0.0.0", True, False, "BE1111"),
        ("0.0.0.0", False, True, "BE1106"),
        ("192.168.1.5", True, True, ""),
    ],
)
def test_a_non_local_address_needs_a_key_and_tls(
    host: str, keys: bool, tls: bool, code: str
) -> None:
    given: dict[str, object] = {"server.host": host, "server.tls_terminated": tls}
    given |= {"auth.keys.k.key": "k" * 20} if keys else {}
    if not code:
        assert load(None, given).server.host == host
        return
    with pytest.raises(BatchEngineError) as caught:
        load(None, given)
    assert caught.value.code == code


def test_key_files_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team a\nfirst-key-1\n\n  second-key-2  \n")
    path.chmod(0o644)
    with pytest.raises(BatchEngineError, match="open to other users"):
        access.key_lines(path)
    path.chmod(0o600)
    assert access.key_lines(path) == ["first-key-1", "second-key-2"]
    with pytest.raises(BatchEngineError, match="cannot be read"):
        access.key_lines(tmp_path / "nothing")


def test_the_error_of_a_port_in_use_has_a_fix() -> None:
    with listener.bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(BatchEngineError) as caught:
            listener.bind("127.0.0.1", port)
    assert caught.value.code == "BE1110"
    assert "in use" in caught.value.why
    assert "--port" in caught.value.fix
    with pytest.raises(BatchEngineError, match="cannot listen"):
        listener.bind("203.0.113.7", 0)


def test_notifications_reach_the_service_manager(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        manager.settimeout(60)
        env = {
            "NOTIFY_SOCKET": str(path),
            "WATCHDOG_USEC": "300000",
            "WATCHDOG_PID": str(os.getpid()),
        }
        notifier = Notifier(env)
        notifier.stage("[1/5] map weights")
        assert manager.recv(4096).decode().splitlines() == [
            "STATUS=[1/5] map weights",
            "EXTEND_TIMEOUT_USEC=120000000",
        ]
        notifier.ready("serving")
        assert manager.recv(4096) == b"READY=1\nSTATUS=serving"
        alive = True

        async def watch() -> None:
            task = asyncio.create_task(notifier.feed_watchdog(lambda: alive))
            await asyncio.sleep(0.25)
            task.cancel()

        asyncio.run(watch())
        assert manager.recv(4096) == b"WATCHDOG=1"
        assert manager.recv(4096) == b"WATCHDOG=1"
        manager.setblocking(False)
        while True:
            try:
                manager.recv(4096)
            except BlockingIOError:
                break
        alive = False  # no watchdog ping for an engine that does not progress
        asyncio.run(watch())
        with pytest.raises(BlockingIOError):
            manager.recv(4096)
        notifier.stopping("draining", 90)
        assert manager.recv(4096).startswith(b"STOPPING=1\n")
        notifier.close()
    abstract = f"\0batchengine-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(abstract)
        other = Notifier(
            {"NOTIFY_SOCKET": "@" + abstract[1:], "WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}
        )
        assert other.watchdog_s == 0.0  # meant for another process
        other.ready("x")
        assert manager.recv(100).startswith(b"READY=1")
        other.close()
    Notifier({}).ready("without a manager nothing happens")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).close()


async def test_the_admin_socket_answers_commands(tmp_path: Path) -> None:
    path = tmp_path / "run" / "admin.sock"
    stopped: list[bool] = []

    engine = FakeEngine(delay_s=30.0)
    async with serving(engine) as served:
        admin = AdminSocket(path, served.service, lambda: stopped.append(True))
        await admin.open()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

        async def ask(command: str, **arguments: str) -> dict[str, Any]:
            return await asyncio.to_thread(client.admin, str(path), command, **arguments)

        status = (await ask("status"))["status"]
        assert (status["state"], status["model"]) == ("ready", "fake")
        request = asyncio.create_task(post(served, "/v1/chat/completions", chat()))
        for _ in range(500):
            if served.service.live:
                break
            await asyncio.sleep(0.01)
        rows = (await ask("requests"))["requests"]
        assert len(rows) == 1
        assert len((await ask("sessions"))["sessions"]) == 1
        await ask("cancel", request_id=rows[0]["request_id"])
        status_code, reply, _ = await request
        assert (status_code, reply["error"]["code"]) == (409, "cancelled")
        with pytest.raises(BatchEngineError, match="no such request"):
            await ask("cancel", request_id="req_unknown")
        with pytest.raises(BatchEngineError, match="unknown command"):
            await ask("shutdown")
        await ask("stop")
        assert stopped == [True]

        reader, writer = await asyncio.open_unix_connection(str(path))
        for line in (b"\n", b"[]\n", b"\xff\n", b'{"command": "status", "x": 1}\n', b"{\n"):
            writer.write(line)
            answer = json.loads(await reader.readline())
            assert answer["ok"] is False
        writer.write(b"x" * 100_000 + b"\n")  # beyond the limit: disconnected, not buffered
        assert await reader.read() == b""
        writer.close()
        assert (await ask("status"))["ok"]

        second = AdminSocket(path, served.service, lambda: None)
        with pytest.raises(BatchEngineError, match="another daemon answers"):
            await second.open()
        await second.close()
        assert path.exists()  # the second daemon leaves the socket of the first one
        await admin.close()
        assert not path.exists()


async def test_a_new_connection_of_the_admin_socket_is_closed_with_it(tmp_path: Path) -> None:
    """Also a connection whose task has not begun: its transport would never be closed."""
    path = tmp_path / "admin.sock"
    async with serving() as served:
        admin = AdminSocket(path, served.service, lambda: None)
        await admin.open()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(str(path))
            while not admin._connections:  # noqa: ASYNC110  nothing reports a new connection
                await asyncio.sleep(0)
            (transport,) = [writer.transport for writer in admin._connections.values()]
            await admin.close()
            await asyncio.sleep(0)
            assert transport.is_closing()
            assert connection.recv(1) == b""
        assert admin._connections == {}


async def test_a_stale_admin_socket_is_replaced_and_a_plain_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    async with serving() as served:
        admin = AdminSocket(path, served.service, lambda: None)
        await admin.open()
        await admin.close()
        path.write_text("precious")
        with pytest.raises(BatchEngineError, match="not a socket"):
            await admin.open()
        assert path.read_text() == "precious"


async def test_admin_refuses_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "admin.sock"
    monkeypatch.setattr("service.admin.socket._peer_uid", lambda writer: 12345)
    async with serving() as served:
        admin = AdminSocket(path, served.service, lambda: None)
        await admin.open()
        with pytest.raises(BatchEngineError):
            await asyncio.to_thread(client.admin, str(path), "status")
        await admin.close()


def test_a_missing_daemon_is_reported(tmp_path: Path) -> None:
    with pytest.raises(BatchEngineError) as caught:
        client.admin(str(tmp_path / "none"), "status")
    assert caught.value.name == "no_daemon"
    with pytest.raises(BatchEngineError) as caught:
        client.Client("http://127.0.0.1:9").models()
    assert caught.value.name == "no_daemon"
    for bad in ("ftp://x", "127.0.0.1:7717", "http://"):
        with pytest.raises(BatchEngineError, match="not the address"):
            client.Client(bad)


def test_a_daemon_of_another_user_is_not_reported_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(sock: socket.socket, address: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect", refused)
        with pytest.raises(BatchEngineError, match="another user's daemon") as caught:
            client.admin("/run/a.sock", "status")
    assert "root" in caught.value.fix
    assert main.exit_code(caught.value) == 1


def test_a_lost_connection_is_not_reported_as_an_absent_daemon(tmp_path: Path) -> None:
    for family, address in (
        (socket.AF_UNIX, str(tmp_path / "a.sock")),
        (socket.AF_INET, ("127.0.0.1", 0)),
    ):
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(address)
            listener.listen()

            def hang_up(listener: socket.socket = listener) -> None:
                peer, _ = listener.accept()
                peer.recv(65536)
                peer.close()

            thread = threading.Thread(target=hang_up)
            thread.start()
            is_unix = family == socket.AF_UNIX
            url = "" if is_unix else f"http://127.0.0.1:{listener.getsockname()[1]}"
            with pytest.raises(BatchEngineError) as caught:
                _ = client.admin(str(address), "status") if is_unix else client.Client(url).models()
            thread.join(5)
        assert caught.value.name == "connection_lost"
        assert caught.value.why


async def test_the_client_streams_and_reports_errors() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:

        def call_and_check() -> None:
            caller = client.Client(served.base)
            assert caller.models()[0] == "fake"
            chunks = list(caller.stream_chat(chat()))
            assert chunks[-1]["usage"]["completion_tokens"] == 3
            with pytest.raises(BatchEngineError) as caught:
                list(caller.stream_chat(chat(temperature=9)))
            assert (caught.value.kind, caught.value.code) == (Kind.INVALID, "BE1701")
            engine.fail_after = 1
            with pytest.raises(BatchEngineError, match="not finite"):
                list(caller.stream_chat(chat()))

        await asyncio.to_thread(call_and_check)


async def test_closing_a_stream_of_the_client_cancels_it() -> None:
    engine = FakeEngine(reply=["x"] * 1000, delay_s=0.02)
    async with serving(engine) as served:

        def call_and_check() -> None:
            stream = client.Client(served.base).stream_chat(chat())
            next(stream)
            stream.close()

        await asyncio.to_thread(call_and_check)
        async with asyncio.timeout(60):
            await engine.generations[0].cancelled.wait()


def test_service_imports_no_tokenizer_and_no_engine() -> None:
    """The HTTP layer needs the engine's API only; `daemon.run` imports the engine."""
    import subprocess

    code = (
        "import sys, service.http.app, service.http.listener, service.admin.socket;"
        "heavy = {'llama_cpp', 'torch', 'batchengine.engine', 'kernels._native'};"
        "heavy &= set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
