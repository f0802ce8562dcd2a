"""[peers] in the configuration, and the watched folder `peers.d`."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchengine.config import PeerConfig, PeersConfig, load
from batchengine.config.peers import split_address
from batchengine.core import BatchEngineError
from batchengine.peers.folder import PEERS_MAX, PeersFolder
from batchengine.peers.identity import OWN, PEERS
from tests.peers.scene import certify


def config_of(tmp_path: Path, text: str) -> PeersConfig:
    path = tmp_path / "c.toml"
    path.write_text(text)
    return load(str(path)).peers


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(BatchEngineError) as caught:
        config_of(tmp_path, text)
    return str(caught.value)


def test_links_are_off_by_default(tmp_path: Path) -> None:
    assert load(None, {"store.dir": str(tmp_path)}).peers.listen == ""


def test_peers_are_read_with_their_settings(tmp_path: Path) -> None:
    text = """
[peers]
listen = "10.0.0.1:7718"
dir = "certs"
[peers.b]
address = "10.0.0.2:7718"
[peers.c]
address = "[fd00::3]:7718"
"""
    found = config_of(tmp_path, text)
    assert found.listen == "10.0.0.1:7718"
    assert found.dir == str(tmp_path / "certs")
    assert found.tls
    assert found.known == (PeerConfig("b", "10.0.0.2:7718"), PeerConfig("c", "[fd00::3]:7718"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[peers]\nlisten = 5", "peers.listen must be text"),
        ("[peers]\nlisten = '10.0.0.1'", "line 2. Fix: HOST:PORT"),
        ("[peers]\nknown = []", "unknown key peers.known"),
        ("[peers]\nlissten = 'a:1'", "Did you mean peers.listen?"),
        ("[peers]\nname = 'A B'", "is not a name for a peer"),
        ("[peers.b]\n", "peers.b.address is missing"),
        ("[peers.b]\naddress = 'host:0'", "is not an address"),
        ("[peers.b]\naddress = 'host:1'\nport = 3", "unknown key peers.b.port"),
        ("[peers.'b.c']\naddress = 'host:1'", "is not a name for a peer"),
        ("peers = 3", "peers must be a table"),
        ("[peers]\ntls = false\nlisten = '127.0.0.1:1'", "peers.name is missing"),
        ("[peers]\ntls = false\nname = 'a'\nlisten = '0.0.0.0:1'", "needs TLS"),
        (
            "[peers]\ntls = false\nname = 'a'\nlisten = '127.0.0.1:1'\n[peers.b]\naddress = 'h:1'",
            "peers.b.address = 'h:1' needs TLS",
        ),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host:1", ("host", 1)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[::1]:7718", ("::1", 7718)),
        ("::1:7718", None),
        ("[host]:1", None),
        ("host", None),
        (":1", None),
        ("host:", None),
        ("host:-1", None),
        ("host:65536", None),
        ("ho st:1", None),
        ("host:١", None),
    ],
)
def test_addresses(text: str, expected: tuple[str, int] | None) -> None:
    assert split_address(text) == expected


def test_the_folder_is_read_when_a_file_changes(tmp_path: Path) -> None:
    certify(tmp_path, "a")
    files = tmp_path / "a" / PEERS
    config = PeersConfig(listen="h:1", dir=str(tmp_path / "a"), known=(PeerConfig("x", "h:1"),))
    folder = PeersFolder(config)
    first = folder.changed()
    assert first is not None
    assert first.identity is not None
    assert (first.identity.name, list(first.peers), first.broken) == ("a", ["x"], {})
    assert folder.changed() is None
    (files / "b.toml").write_text('address = "h:2"')
    (files / "c.toml").write_text("address = 2")
    (files / "d.toml").write_bytes(b"\xff\xfe")
    (files / "e.toml").write_text("x" * 100_000)
    (files / "Not-a-name.toml").write_text('address = "h:2"')
    (files / "x.toml").write_text('address = "h:2"')
    (files / "a.toml").write_text('address = "h:2"')
    (files / "f.toml").mkdir()
    (files / "notes.txt").write_text("not read")
    found = folder.changed()
    assert found is not None
    assert found.peers == {"x": PeerConfig("x", "h:1"), "b": PeerConfig("b", "h:2")}
    assert {name: text[:6] for name, text in found.broken.items()} == {
        "c.toml": "BE1103", "d.toml": "BE1101", "e.toml": "BE1100", "Not-a-name.toml": "BE1105",
        "x.toml": "x is a", "a.toml": "a is t", "f.toml": "BE1100",
    }  # fmt: skip
    for path in files.glob("*.toml"):
        path.rmdir() if path.is_dir() else path.unlink()
    gone = folder.changed()
    assert gone is not None
    assert (list(gone.peers), gone.broken) == (["x"], {})


def test_a_certificate_that_breaks_takes_the_peers_along_until_it_is_back(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    folder = PeersFolder(PeersConfig(listen="h:1", dir=str(tmp_path / "b")))
    own = tmp_path / "b" / OWN
    assert folder.changed() is not None
    content = own.read_bytes()
    own.write_text("broken")
    found = folder.changed()
    assert found is not None
    assert found.identity is None
    assert "BE2501" in found.trouble
    own.write_bytes(content)
    found = folder.changed()
    assert found is not None
    assert found.identity is not None
    other = PeersFolder(PeersConfig(listen="h:1", name="z", dir=str(tmp_path / "b"))).changed()
    assert other is not None
    assert "peers.name is z" in other.trouble


def test_the_number_of_peers_is_bounded(tmp_path: Path) -> None:
    certify(tmp_path, "a")
    for index in range(PEERS_MAX + 3):
        (tmp_path / "a" / PEERS / f"p{index:03}.toml").write_text('address = "h:1"')
    found = PeersFolder(PeersConfig(listen="h:1", dir=str(tmp_path / "a"))).changed()
    assert found is not None
    assert (len(found.peers), len(found.broken)) == (PEERS_MAX, 3)
