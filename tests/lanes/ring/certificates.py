"""Certificates of a test: an authority, and one for each daemon, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from batchengine.wire.lane import LinkIdentity


class Authority:
    """A certificate authority in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates need the openssl command")
        self._folder = folder
        self.certificate, self._key = folder / f"{name}.crt", folder / f"{name}.key"
        self._new_key(self._key)
        _openssl("req", "-x509", "-new", "-key", self._key, "-subj", f"/CN={name}", "-days", "2",
                 "-out", self.certificate)  # fmt: skip

    def identity(self, name: str, certified: str = "", trusts: Path | None = None) -> LinkIdentity:
        """The files of a daemon; `certified`: another name in its certificate."""
        base = self._folder / f"{name}-{certified}-{self.certificate.stem}"
        key, asked, out, ext = (base.with_suffix(s) for s in (".key", ".csr", ".crt", ".ext"))
        self._new_key(key)
        _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", asked)
        ext.write_text(f"subjectAltName=DNS:{certified or name}\n")
        _openssl("x509", "-req", "-in", asked, "-CA", self.certificate, "-CAkey", self._key,
                 "-CAcreateserial", "-days", "2", "-extfile", ext, "-out", out)  # fmt: skip
        return LinkIdentity(name, str(out), str(key), str(trusts or self.certificate))

    def _new_key(self, path: Path) -> None:
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def _openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)
