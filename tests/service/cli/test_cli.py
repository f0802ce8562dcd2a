"""The command line: output, exit codes, errors, and import time."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import batchengine
from batchengine import errors
from kv_store.errors import StoreUnsupported
from kv_store.store import check_directory, take_lock
from service.admin.client import Client
from service.cli import main
from service.cli.chat import Options, Talk
from tests.hostile.rewrite import edited

ROOT = Path(__file__).resolve().parents[3]
POCKET = ROOT / "pocket" / "pocket-q4_0.gguf"

# A daemon around the fake engine: only the computation is fake.
DAEMON = """
import sys
from batchengine import config
from batchengine.core import BatchEngineError
from service import daemon as server
from tests.support.fake_engine import FakeEngine
reply, delay, port, sock, model = sys.argv[1:6]
loaded = config.load(None, {
    "server.port": int(port), "server.admin_socket": sock, "model.path": model,
    "store.dir": sock + ".store", "server.drain_s": 60.0, "lane.threads": 1,
})
def make_fake():
    import json, os
    engine = FakeEngine(["w "] * int(reply), float(delay))
    if os.environ.get("HISTORY"):
        pairs = (("system", "be kind"), ("user", "earlier"), ("assistant", "yes"))
        engine.history = [{"role": role, "content": content} for role, content in pairs]
        real = engine.text.encode_chat
        def encode_chat(messages, *more):
            print("chat " + json.dumps(messages), flush=True)
            return real(messages, *more)
        engine.text.encode_chat = encode_chat
    if gate := os.environ.get("GATE"):  # no token before this file is there
        pause = engine._pause
        async def wait(generation, seconds):
            while not os.path.exists(gate) and not await pause(generation, 0.01):
                pass
            return await pause(generation, seconds)
        engine._pause = wait
    return engine
try:
    sys.exit(server.run(loaded, lambda c: make_fake()))
except BatchEngineError as error:
    sys.exit(str(error))
"""


def cli(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
    )


class Running:
    """A daemon process of a test, and what it printed."""

    def __init__(self, process: subprocess.Popen[str], admin: Path) -> None:
        self.process = process
        self.admin = str(admin)
        self.lines: list[str] = []
        self.url = ""
        self.ready = threading.Event()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if found := re.match(r"\s+ready\s+(http\S+)", line):
                self.url = found[1]
                self.ready.set()
        self.ready.set()

    def output(self) -> str:
        return "\n".join(self.lines)


@contextmanager
def daemon(
    tmp_path: Path, reply: int = 3, delay_s: float = 0.0, **environment: str
) -> Iterator[Running]:
    model = tmp_path / "fake.gguf"
    model.write_bytes(b"GGUF")
    admin = tmp_path / "a.sock"
    process = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(reply), str(delay_s), "0", str(admin), str(model)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    running = Running(process, admin)
    try:
        assert running.ready.wait(60), running.output()
        assert running.url, running.output()
        yield running
    finally:
        process.kill()
        process.wait()
        running.reader.join(10)
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.alone
def test_version_is_fast_and_imports_little() -> None:
    done = cli("version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"batchengine {batchengine.__version__}")
    assert json.loads(cli("version", "--json").stdout)["batchengine"] == batchengine.__version__
    assert cli("--version").stdout.strip() == batchengine.__version__
    code = (
        "import sys, service.cli.main; service.cli.main.run(['version']);"
        "heavy = {'aiohttp', 'llama_cpp', 'numpy', 'uvloop', 'prometheus_client', 'psutil',"
        " 'torch', 'kernels'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    seconds: list[float] = []
    for _ in range(3):  # processor time: others may have the machine
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert done.returncode == 0, done.stderr
    assert 0.01 < min(seconds) < 0.6, seconds  # 0.2 s


def test_help_names_every_command_and_the_exit_codes() -> None:
    text = cli("--help").stdout
    for command in ("serve", "chat", "ps", "sessions", "version", "check"):
        assert re.search(rf"\b{command}\b", text), command
    assert "Exit codes" in text
    serve = cli("serve", "--help").stdout
    for option in ("--port", "--host", "--threads", "--ctx", "--store", "--api-key-file",
                   "--config", "--allow-volatile-store", "--cache-dir"):  # fmt: skip
        assert option in serve, option


# arguments, exit code, words that the line must contain
BAD_USAGE: list[tuple[list[str], int, tuple[str, ...]]] = [
    (["srve"], 2, ("serve",)),
    (["serve", "--port", "abc"], 2, ("--port",)),
    (["serve", "--prot", "1"], 2, ("--prot",)),
    (["serve"], 2, ("BE1115", "Fix:", "MODEL.gguf")),
    (["serve", "/nowhere/x.gguf"], 2, ("BE1116", "/nowhere/x.gguf", "on the command line pocket")),
    (["serve", "/nowhere/x.gguf", "--port", "70000"], 2, ("port", "70000")),
    (["serve", "/nowhere/x.gguf", "--host", "0.0.0.0"], 2, ("0.0.0.0", "Fix:")),
    (["serve", "/nowhere/x.gguf", "--api-key-file", "/nowhere/k"], 2, ("BE1112", "Fix:")),
    (["serve", "--config", "/nowhere/c.toml"], 2, ("/nowhere/c.toml",)),
    (["ps", "--admin-socket", "/nowhere/a.sock"], 4, ("BE1132", "no daemon", "Fix:")),
    (["sessions", "--admin-socket", "/nowhere/a.sock"], 4, ("BE1132",)),
    (["chat", "--url", "http://127.0.0.1:9"], 4, ("BE1132", "refused", "Fix:")),
    (["chat", "--url", "nonsense"], 1, ("BE1130", "Fix:")),
    (["chat", "--url", "http://127.0.0.1:99999"], 1, ("BE1130", "Fix:")),
    (["chat", "--url", "http://[::1"], 1, ("BE1130", "Fix:")),
    (["chat", "--url", "http://a b/v1"], 1, ("BE1130", "Fix:")),
    (["chat", "/nowhere/x.gguf"], 2, ("BE1116", "no such file", "Fix:")),
    (["serve", "/dev/null"], 2, ("BE1116", "not a regular file")),
    (["serve", "x" * 5000], 2, ("BE1116", "name too long", "Fix:")),
    (["serve", str(POCKET.parent)], 2, ("BE1116", "it is a folder", str(POCKET))),
    (["serve", str(POCKET), "--store", "/dev/null"], 1, ("BE1603", "not a directory")),
    (["serve", "--model", "x.gguf"], 2, ("`batchengine serve MODEL.gguf`",)),
    (["serve", "x.gguf", "--max-model-len=4096"], 2, ("--ctx TOKENS",)),
    (["serve", "x.gguf", "--ctx", "16k"], 2, ('"16k" is no whole number', "serve --help")),
    (["ps", "--watch"], 2, ("`batchengine top`",)),
    (["plan", "pocket", "--config", "/nowhere/c.toml"], 2, ("BE1100",)),
    (["stop"], 2, ('"stop"', "Ctrl-C", "systemctl")),
    (["run", "x.gguf"], 2, ("`batchengine chat MODEL.gguf`",)),
    (["sessions", "foo"], 2, ("'foo'", "sessions show SESSION")),
    (["sessions", "show"], 2, ("SESSION", "sessions show --help")),
    (["sessions", "--limit", "-1"], 2, ("--limit", ">= 0", "sessions --help")),
    (["sessions", "--watch", "nan"], 2, ("--watch",)),
    (["top", "--seconds", "inf"], 2, ("--seconds",)),
    (["top", "--count", "-1"], 2, ("--count", ">= 0")),
    (["drain", "--timeout", "-1"], 2, ("--timeout", ">= 0")),
    (["store", "weights", "--days", "-1"], 2, ("--days", "store weights --help")),
    (["bench", "--streams", "0"], 2, ("--streams", ">= 1")),
    (["chat", "--class", "urgent"], 2, ("interactive", "batch")),
    (["chat", "--temperature", "-1"], 2, ("--temperature", ">= 0")),
    (["chat", "--temperature", "5"], 2, ("--temperature", "<= 2", "chat --help")),
    (["sessions", "--state", "sleepy"], 2, ("--state", "sleepy", "parked", "interrupted")),
    (["chat", "--max-tokens", "0"], 2, ("--max-tokens", ">= 1")),
]


@pytest.mark.parametrize(("arguments", "code", "words"), BAD_USAGE)
def test_errors_are_one_line_without_a_traceback(
    arguments: list[str], code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == code
    out, error = capsys.readouterr()
    assert out == ""
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("batchengine: ")
    assert "Traceback" not in error
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["srve", "--json"], 'Unknown command "srve"', "`batchengine --help`"),
        (["ps", "--json", "--watch"], "Unknown option: --watch", "`batchengine top` looks again"),
        (["sessions", "--limit", "-1", "--json"], "Must be >= 0", "`batchengine sessions --help`"),
        (["sessions", "foo", "--json"], "unexpected argument 'foo'", "name a command"),
        (["plan", "--json"], "MODEL requires an argument", "`batchengine plan --help`"),
    ],
    ids=["command", "option", "value", "argument", "nothing"],
)
def test_wrong_usage_with_json_is_an_error_object(
    arguments: list[str], what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    out, text = capsys.readouterr()
    assert out == ""
    assert text.count("\n") == 1
    error = json.loads(text)["error"]
    assert what in error["what"]
    assert fix in error["fix"]
    assert error["message"].startswith(f"{error['batchengine_code']} {error['what']}")
    assert error["code"] == "invalid_configuration"


def test_a_defect_of_a_command_with_json_is_an_error_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(main, "app", fails)
    assert main.run(["ps"]) == 1
    words = "the command met an unexpected RuntimeError: a defect. Fix: run it again with --debug"
    assert words in capsys.readouterr().err
    assert main.run(["ps", "--json"]) == 1
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "internal_error"


def test_a_key_that_no_header_can_hold_is_an_error_of_one_line() -> None:
    for key in ("one\ntwo", "schlüssel"):
        done = cli("chat", BATCHENGINE_API_KEY=key)
        assert done.returncode == 1
        assert done.stderr.startswith("batchengine: BE1136"), done.stderr
        assert key not in done.stderr


def test_output_that_cannot_be_written_is_said_and_no_letter_stops_a_command() -> None:
    command = [sys.executable, "-m", "service.cli.main", "version"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == f"batchengine: {errors.OUTPUT_LOST(why='no space left on device')}\n"
    assert cli("--help", PYTHONIOENCODING="ascii").returncode == 0
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    assert subprocess.run(closed, cwd=ROOT, stderr=subprocess.PIPE).stderr == b""


def test_a_page_of_help_whose_reader_leaves_is_no_failure() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "batchengine", "serve", "--help"]
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_ends_with_the_code_of_its_error() -> None:
    done = cli("serve", "/nowhere/x.gguf")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("batchengine: BE1116")


def test_debug_shows_the_traceback() -> None:
    done = cli("serve", "/nowhere/x.gguf", "--debug")
    assert "Traceback" in done.stderr


def test_check_reads_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    places = f'cache_dir = "{tmp_path}/cache"\n[store]\ndir = "{tmp_path}/kv"\n'
    server = f'[server]\nport = 0\nadmin_socket = "{tmp_path}/a.sock"\n'
    path.write_text(f'{places}[model]\npath = "{POCKET}"\n{server}')
    done = cli("check", "--config", str(path), "--json")
    assert done.returncode == 0, done.stdout
    found = json.loads(done.stdout)
    assert (found["ok"], found["problems"]) == (True, [])
    assert found["model"]["arch"] == "qwen3"
    assert list(tmp_path.iterdir()) == [path]  # nothing was made
    path.write_text('[model]\npath = "m.gguf"\n[server]\nprot = 8123\n')
    done = cli("check", "--config", str(path))
    assert done.returncode == 2
    assert "line 4" in done.stderr
    assert "server.port" in done.stderr


def test_check_names_everything_that_serve_would_refuse(tmp_path: Path) -> None:
    model, blocked = tmp_path / "m.gguf", tmp_path / "file"
    model.write_text("this is a text, and no model at all")
    blocked.write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = tmp_path / "c.toml"
        path.write_text(
            f'cache_dir = "{blocked}/cache"\n[model]\npath = "{model}"\n[store]\n'
            f'dir = "{blocked}/kv"\n[server]\nport = {taken.getsockname()[1]}\n'
            f'admin_socket = "{blocked}/a.sock"\n'
        )
        done = cli("check", "--config", str(path))
    lines = done.stderr.splitlines()
    codes = [line.split()[1] for line in lines]
    assert codes == ["BE1302", "BE1110", "BE1113", "BE1603", "BE1330"], done.stderr
    assert all("Fix:" in line for line in lines)
    assert "is not a directory" in lines[-1]
    assert done.returncode == 1
    done = cli("check", str(POCKET), "--config", str(path), "--json")
    found = json.loads(done.stdout)
    assert found["ok"] is False
    assert [one["batchengine_code"] for one in found["problems"]] == codes[2:]
    assert (cli("serve", str(model)).stderr.split()[1], done.stderr) == ("BE1302", "")
    path.write_text(f'[store]\nbudget_bytes = 5\ndir = "{tmp_path}/kv"\n[server]\nport = 0\n')
    done = cli("check", str(POCKET), "--config", str(path))
    assert (done.returncode, done.stderr.split()[1]) == (2, "BE1608"), done.stderr


def test_check_warns_of_a_chat_template_that_no_chat_can_use(tmp_path: Path) -> None:
    def edit(values: dict[str, Any], _: object) -> None:
        source = "{{ raise_exception('never') }}"
        values["tokenizer.chat_template"] = source, values["tokenizer.chat_template"][1]

    shutil.copyfile(POCKET, tmp_path / "m.gguf")
    model, path = edited(tmp_path / "m.gguf", edit), tmp_path / "c.toml"
    places = f'cache_dir = "{tmp_path}/cache"\n[store]\ndir = "{tmp_path}/kv"\n'
    path.write_text(f'{places}[server]\nport = 0\nadmin_socket = "{tmp_path}/a.sock"\n')
    done = cli("check", str(model), "--config", str(path))
    assert done.returncode == 0, done.stderr
    assert "warning: the model's chat template refuses these messages: never" in done.stdout


def test_a_key_that_is_too_short_is_named_by_its_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("0123456789abcdef\nshort\n")
    path.chmod(0o600)
    done = cli("serve", str(POCKET), "--api-key-file", str(path), "--store", str(tmp_path / "kv"))
    assert (done.returncode, done.stderr.split()[1]) == (2, "BE1112"), done.stderr
    assert str(path) in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_may_check_the_store_of_a_service(tmp_path: Path) -> None:
    """A service has a user of its own, who owns the folder of its store and the one above."""
    (tmp_path / "kv").mkdir()
    os.chown(tmp_path / "kv", 65534, 65534)
    assert any("belongs to user" in text for text in check_directory(str(tmp_path / "kv"), True))
    os.chown(tmp_path, 65534, 65534)
    found = check_directory(str(tmp_path / "kv"), True)
    assert not any("belongs to user" in text for text in found)


def test_a_store_behind_a_symbolic_link_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to("kv")
    (tmp_path / "kv" / "ext").symlink_to(tmp_path)
    for folder in ("link", "kv"):
        with pytest.raises(StoreUnsupported, match="is a symbolic link") as error:
            check_directory(str(tmp_path / folder), True)
        assert f"{tmp_path / 'kv' if folder == 'link' else tmp_path}, " in error.value.fix


def test_check_says_that_another_daemon_has_the_store(tmp_path: Path) -> None:
    path, folder = tmp_path / "c.toml", tmp_path / "kv"
    folder.mkdir()
    path.write_text(
        f'cache_dir = "{tmp_path}/cache"\n[model]\npath = "{POCKET}"\n[store]\ndir = "{folder}"\n'
        f'[server]\nport = 0\nadmin_socket = "{tmp_path}/a.sock"\n'
    )
    lock = take_lock(str(folder))
    done = cli("check", "--config", str(path))
    assert (done.returncode, done.stderr.split()[1]) == (3, "BE1601"), done.stderr
    done = cli("serve", "--config", str(path))
    assert (done.returncode, done.stderr.split()[1]) == (3, "BE1601"), done.stderr
    assert "map weights" not in done.stdout, "before the model is loaded"
    os.close(lock)
    done = cli("check", "--config", str(path))
    assert done.returncode == 0, done.stderr


def test_check_looks_for_a_gpu_that_is_required(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    lane = '[[lane]]\n[[lane]]\nkind = "cuda"\ndevice = 63\nvram_bytes = 1073741824\n'
    path.write_text(f'require = "gpu"\n[model]\npath = "{POCKET}"\n{lane}')
    done = cli("check", "--config", str(path))
    assert done.returncode == 1
    assert "BE2212" in done.stderr
    assert "GPU 63" in done.stderr


def test_a_daemon_reports_its_start_serves_and_drains(tmp_path: Path) -> None:
    notify, gate = tmp_path / "n", tmp_path / "gate"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notify))
        manager.settimeout(60)
        with daemon(tmp_path, NOTIFY_SOCKET=str(notify), GATE=str(gate)) as running:
            text = running.output()
            assert re.search(r"\[1/2\] map weights +pretended +0\.0 s", text)
            assert "fake.gguf" in text
            messages = [manager.recv(4096).decode() for _ in range(3)]
            assert messages[0].startswith("STATUS=[1/2] map weights")
            assert "EXTEND_TIMEOUT_USEC=" in messages[0]
            assert messages[2].startswith("READY=1")

            done = cli("ps", "--json", "--admin-socket", running.admin)
            assert json.loads(done.stdout)["status"]["state"] == "ready"
            assert "nothing is running" in cli("ps", "--admin-socket", running.admin).stdout
            done = cli("sessions", BATCHENGINE_ADMIN_SOCKET=running.admin)
            none = "no sessions in memory: --all lists those on disk, too"
            assert (done.returncode, done.stdout.strip()) == (0, none)
            done = cli("sessions", "--all", "--match", "x", BATCHENGINE_ADMIN_SOCKET=running.admin)
            assert (done.returncode, done.stdout.strip()) == (0, "no session fits these options")

            answers: list[Any] = []
            stream = threading.Thread(target=lambda: answers.append(ask(running.url)))
            stream.start()
            wait_for(lambda: len(requests_of(running)) == 1)
            assert "req_" in cli("ps", "--admin-socket", running.admin).stdout
            running.process.send_signal(signal.SIGTERM)
            wait_for(lambda: "drain" in running.output())
            gate.touch()
            stream.join(60)
            assert running.process.wait(60) == 0
            assert answers[0]["choices"][0]["finish_reason"] == "stop"  # it was allowed to finish
            assert manager.recv(4096).startswith(b"STOPPING=1")
    assert not Path(running.admin).exists()


def ask(url: str) -> Any:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    request = urllib.request.Request(
        url + "/chat/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def requests_of(running: Running) -> list[Any]:
    from service.admin.client import admin

    return admin(running.admin, "requests")["requests"]


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "never happened"
        time.sleep(0.02)


def test_a_second_signal_ends_the_drain_at_once(tmp_path: Path) -> None:
    with daemon(tmp_path, 2000, 0.05) as running:
        threading.Thread(target=lambda: swallow(ask, running.url), daemon=True).start()
        wait_for(lambda: len(requests_of(running)) == 1)
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "drain" in running.output())
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 130, "the drain takes 60 s"
        assert not Path(running.admin).exists()


def test_the_first_signal_after_a_stop_command_does_not_end_the_drain(tmp_path: Path) -> None:
    from service.admin.client import admin

    gate = tmp_path / "gate"
    with daemon(tmp_path, GATE=str(gate)) as running:
        answers: list[Any] = []
        stream = threading.Thread(target=lambda: answers.append(ask(running.url)))
        stream.start()
        wait_for(lambda: len(requests_of(running)) == 1)
        admin(running.admin, "stop")
        wait_for(lambda: "stop command" in running.output())
        running.process.send_signal(signal.SIGTERM)  # as `systemctl stop` does
        wait_for(lambda: is_taken(running.process.pid))
        gate.touch()
        stream.join(60)
        assert answers[0]["choices"][0]["finish_reason"] == "stop"
        assert running.process.wait(60) == 0
    with daemon(tmp_path, 2000, 0.05) as running:
        threading.Thread(target=lambda: swallow(ask, running.url), daemon=True).start()
        wait_for(lambda: len(requests_of(running)) == 1)
        admin(running.admin, "stop")
        running.process.send_signal(signal.SIGTERM)
        wait_for(lambda: is_taken(running.process.pid))
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(30) == 130


def is_taken(pid: int) -> bool:
    """Whether no signal to the process is pending: a second one then comes behind the first."""
    status = Path(f"/proc/{pid}/status").read_text()
    return not int(re.findall(r"^ShdPnd:\s*(\w+)", status, re.MULTILINE)[0], 16)


def swallow(function: Any, *arguments: Any) -> None:
    with suppress(OSError):
        function(*arguments)


def test_stop_over_the_admin_socket(tmp_path: Path) -> None:
    from service.admin.client import admin

    with daemon(tmp_path) as running:
        assert admin(running.admin, "stop") == {"ok": True, "stopping": True}
        assert running.process.wait(60) == 0
        wait_for(lambda: "stop command" in running.output())


def test_a_port_in_use_is_an_error_of_one_line(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        port = running.url.split(":")[2].split("/")[0]
        model = tmp_path / "fake.gguf"
        done = subprocess.run(
            [sys.executable, "-c", DAEMON, "1", "0", port, str(tmp_path / "b.sock"), str(model)],
            cwd=ROOT, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == 1
        assert "BE1110" in done.stderr
        assert "--port" in done.stderr
        assert "Traceback" not in done.stderr


def test_chat_sends_turns_and_starts_new_sessions(tmp_path: Path) -> None:
    with daemon(tmp_path) as running:
        done = cli("chat", "--url", running.url, stdin="hello\nagain\n/reset\nonce more\n/quit\n")
        assert done.returncode == 0, done.stderr
        answers = [line for line in done.stdout.splitlines() if line]
        assert answers == ["w w w ", "w w w ", "(new session)", "w w w "]
        assert done.stderr == ""
        done = cli("chat", "--url", running.url, "--max-tokens", "99999999", stdin="hello\n")
        assert done.returncode == 1
        assert "max_tokens" in done.stderr


def test_a_session_of_a_daemon_that_ends_with_the_chat_is_not_offered_for_later() -> None:
    talk = Talk(Client("http://127.0.0.1:9"), Options(), keeps=False)
    talk.begin("mine")
    assert "mine: it ends with this conversation" in talk.command("/session")
    kept = Talk(Client("http://127.0.0.1:9"), Options())
    kept.begin("mine")
    assert "chat --session mine" in kept.command("/session")


def test_chat_goes_on_with_a_session_and_never_replaces_its_history(tmp_path: Path) -> None:
    sent = tmp_path / "sent.txt"
    sent.write_text("a text of a file")
    with daemon(tmp_path) as running:
        done = cli("chat", "--url", running.url, "--session", "new", stdin="hello\n")
        assert done.stdout.startswith("(new session new)\nw w w")
        assert (done.returncode, done.stderr) == (0, "")
        done = cli("chat", "--url", running.url, "--session", "new", stdin="again\n")
        assert (done.returncode, "BE1139" in done.stderr) == (1, True)  # no message is recognised
        assert done.stdout == ""
    with daemon(tmp_path, HISTORY="1") as running:
        cli("chat", "--url", running.url, "--session", "old", stdin="hello\n")
        typed = '/help\n/file {}\n/nothing\nwhat\\\nis it\n"""\ntwo\nlines\n"""\n/session\n'
        done = cli("chat", "--url", running.url, "--session", "old", stdin=typed.format(sent))
        assert done.stderr == ""
        shown = "system: be kind\nuser: earlier\nassistant: yes\n(session old goes on: 3 messages)"
        assert done.stdout.startswith(shown)
        for words in ("/reset", "16 characters go with", "no command /nothing", "(session old:"):
            assert words in done.stdout
        wait_for(lambda: "two\\nlines" in running.output())
        chats = [line for line in running.lines if line.startswith("chat ")]
        sent_now = [json.loads(line[5:]) for line in chats[-2:]]
        assert [one["content"] for one in sent_now[0]][:3] == ["be kind", "earlier", "yes"]
        assert sent_now[0][3]["content"] == "sent.txt:\n\na text of a file\n\nwhat\nis it"
        assert sent_now[1][-1]["content"] == "two\nlines"


LOST = DAEMON.replace("lambda c: make_fake()", "make").replace(
    "try:\n",
    """
import asyncio
def make(c):
    engine = FakeEngine()
    real = engine.start
    async def start(on_stage):
        await real(on_stage)
        if model.endswith("raises.gguf"):
            raise RuntimeError("boom")
        what = ("phase", "stopped") if "stops" in model else ("fatal", OSError(5, "ledger"))
        asyncio.get_running_loop().call_later(0.3, setattr, engine, *what)
    engine.start = start
    return engine
try:
""",
)


def test_an_engine_that_stops_by_itself_ends_the_daemon(tmp_path: Path) -> None:
    """Exit code 75 makes the service manager start it again."""
    for name, code in (("stops.gguf", 75), ("fatal.gguf", 75), ("raises.gguf", 1)):
        (tmp_path / name).write_bytes(b"GGUF")
        done = subprocess.run(
            [sys.executable, "-c", LOST, "1", "0", "0", str(tmp_path / "a.sock"),
             str(tmp_path / name)],
            cwd=ROOT, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert not (tmp_path / "a.sock").exists()
