"""Files of `peers init` and `peers add`: their modes, what is refused, and hostile bundles."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.peers import certificates
from batchengine.peers.identity import AUTHORITY, OWN, read_identity
from tests.peers.scene import certify


def code_of(call: object, *arguments: object) -> str:
    with pytest.raises(BatchEngineError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.code


def test_every_file_is_private_and_every_folder_too(tmp_path: Path) -> None:
    certify(tmp_path / "deep" / "er", "a", "b")
    certificates.write_peer(tmp_path / "deep" / "er" / "a", "b", "10.0.0.2:7718")
    paths = list((tmp_path / "deep").rglob("*"))
    assert len([p for p in paths if p.is_file()]) == 7
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700), path


def test_the_daemon_reads_what_the_commands_wrote(tmp_path: Path) -> None:
    certify(tmp_path, "host-a", "host-b")
    for name in ("host-a", "host-b"):
        assert read_identity(tmp_path / name).name == name
        assert certificates.own_name(tmp_path / name) == name
    assert certificates.can_issue(tmp_path / "host-a")
    assert not certificates.can_issue(tmp_path / "host-b")


@pytest.mark.parametrize(
    ("constant", "days", "why"),
    [
        ("VALID_DAYS", -0.5, "certificate has expired"),
        ("CLOCK_SKEW_DAYS", -2, "certificate is not yet valid"),
    ],
)
def test_a_certificate_out_of_date_names_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constant: str, days: float, why: str
) -> None:
    """`peers init`, which an absent certificate asks for, refuses a folder that has one."""
    monkeypatch.setattr(certificates, constant, days)
    certify(tmp_path, "a", "b")
    with pytest.raises(BatchEngineError, match=why) as caught:
        read_identity(tmp_path / "b")
    assert caught.value.fix.startswith("correct this host's clock, or move the folder away")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    certify(tmp_path, "a", "b")
    a, exists = tmp_path / "a", errors.PEER_FILES_EXIST.code
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert code_of(certificates.create_authority, a, "a") == exists
    assert code_of(certificates.create_authority, tmp_path / "b", "b") == exists
    assert certificates.issue_bundle(a, "b") == a / "bundles" / "b.pem"  # as it is
    certificates.import_bundle(tmp_path / "b", a / "bundles" / "b.pem")  # the same: nothing
    other = certificates.issue_bundle(a, "c")
    assert code_of(certificates.import_bundle, tmp_path / "b", other) == exists
    assert code_of(certificates.import_bundle, a, other) == exists
    certificates.write_peer(a, "b", "10.0.0.2:1")
    assert code_of(certificates.write_peer, a, "b", "10.0.0.3:1") == exists
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_peer_that_was_removed_is_added_again(tmp_path: Path) -> None:
    """Its bundle is used again, if it is one of this authority; where a new one was made, the other
    host needs none, and `peers add` says so."""
    certify(tmp_path, "a", "b")
    certify(tmp_path / "others", "a", "b")
    a, b = tmp_path / "a", tmp_path / "b"
    bundle = certificates.issue_bundle(a, "b")
    bundle.unlink()
    with pytest.raises(BatchEngineError) as caught:
        certificates.import_bundle(b, certificates.issue_bundle(a, "b"))
    assert caught.value.fix == "leave out --bundle: b has a certificate of this authority"
    for stranger in (tmp_path / "others" / "a" / "bundles" / "b.pem", a / OWN):
        bundle.write_bytes(stranger.read_bytes())
        with pytest.raises(BatchEngineError, match="exists already"):
            certificates.issue_bundle(a, "b")
        with pytest.raises(BatchEngineError) as caught:
            certificates.import_bundle(b, tmp_path / "others" / "a" / "bundles" / "b.pem")
        assert caught.value.fix == "to change its certificate, move the folder away first"


@pytest.mark.parametrize("name", ["", "A", "a.b", "-a", "a-", "a/b", "../a", "a" * 64, "ä", "a\n"])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    certify(tmp_path, "a")
    for call, *more in (
        (certificates.create_authority, tmp_path / "x", name),
        (certificates.issue_bundle, tmp_path / "a", name),
        (certificates.write_peer, tmp_path / "a", name, "h:1"),
    ):
        assert code_of(call, *more) == errors.PEER_NAME.code


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    certify(folder, "a", "b")
    certify(folder / "other", "a", "b")
    return folder / "a" / "bundles" / "b.pem"


@given(st.data())
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_damaged_bundle_is_refused_and_writes_nothing(
    bundle: Path, tmp_path: Path, data: st.DataObject
) -> None:
    whole = bundle.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 30))
    damaged = data.draw(
        st.sampled_from([whole[:cut], whole[cut:], whole + whole, b"", bytes(100_000)])
        if cut
        else st.binary(max_size=200)
    )
    path = tmp_path / "damaged.pem"
    path.write_bytes(damaged)
    assert code_of(certificates.import_bundle, tmp_path / "new", path) == errors.PEER_BUNDLE.code
    assert not (tmp_path / "new").exists()


def test_a_bundle_whose_parts_do_not_belong_together(bundle: Path, tmp_path: Path) -> None:
    def blocks(path: Path) -> list[bytes]:
        return [m[0] for m in certificates._BLOCK.finditer(path.read_bytes())]

    mine = blocks(bundle)
    theirs = blocks(bundle.parents[2] / "other" / "a" / "bundles" / "b.pem")
    for mixed in ((theirs[0], *mine[1:]), (mine[0], theirs[1], mine[2]), (*mine[:2], theirs[2])):
        path = tmp_path / "mixed.pem"
        path.write_bytes(b"".join(mixed))
        assert code_of(certificates.import_bundle, tmp_path / "n", path) == errors.PEER_BUNDLE.code


def test_a_certificate_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    def why(folder: Path) -> str:
        with pytest.raises(BatchEngineError) as caught:
            read_identity(folder)
        assert caught.value.code == errors.PEER_IDENTITY.code
        return caught.value.why

    assert "does not exist" in why(tmp_path / "nowhere")
    certify(tmp_path, "a", "b")
    certify(tmp_path / "other", "c")
    (tmp_path / "a" / OWN).chmod(0o644)
    assert "other users can read" in why(tmp_path / "a")
    (tmp_path / "b" / AUTHORITY).write_bytes((tmp_path / "other" / "c" / AUTHORITY).read_bytes())
    assert "certificate is refused" in why(tmp_path / "b")
    (tmp_path / "b" / AUTHORITY).write_text("no certificate")
    assert why(tmp_path / "b")
    (tmp_path / "b" / OWN).write_text("")
    assert why(tmp_path / "b")
