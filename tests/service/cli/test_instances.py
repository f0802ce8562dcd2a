"""Several daemons of one user: what a name decides, and how commands find a named daemon."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from batchengine.config import load
from batchengine.core import BatchEngineError
from service.cli import main
from tests.service.cli.test_cli import daemon


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name, for sockets in folders of instances."""
    return tmp_path_factory.mktemp("i")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("STATE", "RUNTIME", "CACHE"):
        monkeypatch.setenv(f"{kind}_DIRECTORY", str(tmp_path / kind.lower()))
    for name in ("BATCHENGINE_ADMIN_SOCKET", "BATCHENGINE_URL"):
        monkeypatch.delenv(name, raising=False)


def test_a_named_daemon_has_paths_and_a_port_of_its_own(tmp_path: Path) -> None:
    first, second = load(), load(None, {"instance": "two"})
    assert first.server.port == 7717
    assert second.server.admin_socket == str(tmp_path / "runtime/instances/two/admin.sock")
    assert second.store.dir == str(tmp_path / "state/instances/two/kv")
    assert second.cache_dir == first.cache_dir
    assert second.server.port > 7717
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", second.server.port))
        taken.listen()
        assert load(None, {"instance": "two"}).server.port > second.server.port
    given = load(None, {"instance": "two", "server.port": 7717, "store.dir": "/kv"})
    assert (given.server.port, given.store.dir) == (7717, "/kv")


@pytest.mark.parametrize("name", ["../x", ".", "a/b", "-x", "x" * 33, "a b", "x\n"])
def test_a_name_is_no_path(name: str) -> None:
    with pytest.raises(BatchEngineError, match="no name of a daemon"):
        load(None, {"instance": name})


def test_doctor_looks_at_the_places_of_the_named_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "state/instances/two/kv"
    store.parent.mkdir(parents=True)
    store.touch()  # no folder can be made there
    for path, given in (
        ("", ["--instance", "two"]),
        ("", ["--admin-socket", str(tmp_path / "runtime/instances/two/admin.sock")]),
        (str(tmp_path / "c.toml"), ["--instance", "two", "--config", str(tmp_path / "c.toml")]),
    ):
        if path:
            Path(path).write_text("[server]\nport = 0\n")
        assert main.run(["doctor", *given]) == 1
        assert str(store) in capsys.readouterr().out
    main.run(["doctor"])
    assert str(store) not in capsys.readouterr().out


def test_commands_find_a_daemon_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runtime/instances/two"
    folder.mkdir(parents=True)
    (tmp_path / "runtime/instances/gone").mkdir()
    (tmp_path / "runtime/instances/gone/admin.sock").touch()
    with daemon(tmp_path) as running:
        (folder / "admin.sock").symlink_to(running.admin)
        assert main.run(["ps", "--instance", "two", "--json"]) == 0
        address = json.loads(capsys.readouterr().out)["status"]["address"]
        assert address in running.url
        assert main.run(["bench", "--instance", "two", "--streams", "1", "--json"]) == 0
        capsys.readouterr()
        for words in (["ps"], ["ps", "--instance", "three"], ["bench", "--instance", "three"]):
            assert main.run(words) == 4
            error = capsys.readouterr().err
            assert "name one that answers: --instance two (" in error
            assert f" at {address}); or start" in error
        (tmp_path / "runtime/admin.sock").symlink_to(running.admin)
        assert main.run(["bench", "--instance", "three"]) == 4
        assert (
            f"--url http://{address}/v1 (" in capsys.readouterr().err
        )  # bench has no admin socket
        (tmp_path / "runtime/admin.sock").unlink()
    assert main.run(["ps", "--instance", "two"]) == 4
    assert "that answers" not in capsys.readouterr().err
