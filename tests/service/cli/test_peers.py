"""`peers init` and `peers add`: three commands link two hosts, and each names the next."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from batchengine.peers.identity import PEERS, read_identity
from service.cli.main import run


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(arguments) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_each_command_prints_the_next_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    text = out_of(capsys, "peers", "init", "--name", "host-a", "--dir", str(a))
    command = re.search(r"batchengine (peers add .*)", text)
    assert command is not None
    second = command[1].replace("NAME", "host-b").replace("HOST:7718", "127.0.0.1:7001")
    text = out_of(capsys, *shlex.split(second))
    copy = re.search(r"scp (\S+) \S+:(\S+)", text)
    assert copy is not None
    monkeypatch.chdir(tmp_path)
    shutil.copy(copy[1], copy[2])
    command = re.search(r"batchengine (peers add .*)", text)
    assert command is not None
    assert "host-a 127.0.0.1:7718 --bundle host-b.pem" in command[1]
    text = out_of(capsys, *shlex.split(command[1]), "--dir", str(b))
    assert "serve MODEL.gguf --peer-listen 0.0.0.0:7718" in text
    assert "peers status" in text
    assert read_identity(a).name == "host-a"
    assert read_identity(b).name == "host-b"
    assert (a / PEERS / "host-b.toml").read_text() == 'address = "127.0.0.1:7001"\n'
    assert (b / PEERS / "host-a.toml").read_text() == 'address = "127.0.0.1:7718"\n'


def test_wrong_uses_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "a")
    for arguments, said in (
        (("init", "--name", "Host A"), "BE2503"),
        (("add", "b", "10.0.0.2:7718"), "peers init"),
    ):
        assert said in out_of(capsys, "peers", *arguments, "--dir", folder, code=2)
    out_of(capsys, "peers", "init", "--name", "a", "--dir", folder)
    for arguments, said in (
        (("init",), "BE2502"),
        (("add", "b", "10.0.0.2"), "HOST:PORT"),
        (("add", "a", "10.0.0.2:1"), "this host's own name"),
        (("add", "b", "10.0.0.2:1", "--bundle", "/nowhere"), "BE2505"),
    ):
        assert said in out_of(capsys, "peers", *arguments, "--dir", folder, code=2)


def test_answers_are_json_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "a")
    found = json.loads(out_of(capsys, "peers", "init", "--dir", folder, "--json"))
    assert re.fullmatch(r"[a-z0-9-]+", found["name"])
    found = json.loads(
        out_of(capsys, "peers", "add", "zz", "10.0.0.2:7718", "--dir", folder, "--json")
    )
    assert Path(found["bundle"]).is_file()
    assert len(found["next"]) == 2
