"""Makes the files of `batchengine peers init` and `peers add`: authority, certificates, bundles.

Owns their names, modes and contents. An authority signs one certificate per daemon; its DNS name
is the peer's name. A bundle is one file with all that another host needs: its certificate and key,
and the authority's certificate. Nothing is overwritten.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from batchengine import errors
from batchengine.config.peers import NAME_RULE, is_peer_name
from batchengine.core import BatchEngineError
from batchengine.peers.identity import AUTHORITY, OWN, PEERS

AUTHORITY_KEY = "ca.key"
BUNDLES = "bundles"
VALID_DAYS = 3650
CLOCK_SKEW_DAYS = 1  # a host whose clock is behind may use a new certificate at once
BUNDLE_BYTES_MAX = 64 << 10
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\r?\n[^-]+-----END \1-----\r?\n?")


def create_authority(folder: Path, name: str) -> None:
    """Write a new authority and the certificate of `name`, this daemon.

    Raises PEER_FILES_EXIST, PEER_NAME, PEER_UNWRITABLE.
    """
    _check_name(name)
    for file in (AUTHORITY, AUTHORITY_KEY, OWN):
        if (folder / file).exists():
            fix = "add peers with `batchengine peers add NAME HOST:PORT`, or name another folder"
            raise errors.PEER_FILES_EXIST(path=folder / file, fix=fix)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"batchengine peers of {name}")])
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    authority = (
        _builder(subject, subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    _make_folder(folder)
    _make_folder(folder / PEERS)
    _write(folder / AUTHORITY_KEY, _key_pem(key))
    _write(folder / AUTHORITY, _pem(authority))
    _write(folder / OWN, _issue(authority, key, name))


def can_issue(folder: Path) -> bool:
    """Whether the authority's key is in this folder."""
    return (folder / AUTHORITY_KEY).exists()


def issue_bundle(folder: Path, name: str) -> Path:
    """Write the bundle of another daemon and return its path; one that is there is kept. Raises as
    `create_authority`, and PEER_IDENTITY for an authority that cannot be read."""
    _check_name(name)
    try:
        authority_pem = (folder / AUTHORITY).read_bytes()
        authority = x509.load_pem_x509_certificate(authority_pem)
        key = serialization.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    except (OSError, ValueError) as error:
        fix = "move the folder away, and begin with `batchengine peers init`"
        raise errors.PEER_IDENTITY(folder=folder, why=_reason(error), fix=fix) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise errors.PEER_IDENTITY(folder=folder, why=f"{AUTHORITY_KEY} is of another kind", fix="")
    path = folder / BUNDLES / f"{name}.pem"
    if path.exists():
        if not _is_bundle_of(path, name, authority_pem):
            raise errors.PEER_FILES_EXIST(path=path, fix="remove it to have a new one")
        return path
    _make_folder(folder / BUNDLES)
    _write(path, _issue(authority, key, name) + authority_pem)
    return path


def import_bundle(folder: Path, bundle: Path) -> None:
    """Write own certificate, key and authority from a bundle.

    Importing the same bundle again changes nothing. Raises PEER_BUNDLE, PEER_FILES_EXIST,
    PEER_UNWRITABLE.
    """
    own, authority, name = _read_bundle(bundle)
    for file, content in ((OWN, own), (AUTHORITY, authority)):
        path = folder / file
        if path.exists() and path.read_bytes() != content:
            fix = "to change its certificate, move the folder away first"
            if _is_of(folder, name, authority):
                fix = f"leave out --bundle: {name} has a certificate of this authority"
            raise errors.PEER_FILES_EXIST(path=path, fix=fix)
    _make_folder(folder)
    _make_folder(folder / PEERS)
    for file, content in ((AUTHORITY, authority), (OWN, own)):
        if not (folder / file).exists():
            _write(folder / file, content)


def bundle_name(bundle: Path) -> str:
    """The name of the daemon that a bundle is for. Raises PEER_BUNDLE."""
    return _read_bundle(bundle)[2]


def own_name(folder: Path) -> str:
    """The name in this daemon's certificate. Raises PEER_IDENTITY."""
    try:
        return _name_of(x509.load_pem_x509_certificate((folder / OWN).read_bytes()))
    except (OSError, ValueError) as error:
        fix = "run `batchengine peers init` on the first host, on others `batchengine peers add"
        fix += " NAME HOST:PORT --bundle FILE`"
        raise errors.PEER_IDENTITY(folder=folder, why=_reason(error), fix=fix) from None


def write_peer(folder: Path, name: str, address: str) -> Path:
    """Write `peers.d/NAME.toml` and return its path. Raises as `create_authority`."""
    _check_name(name)
    path = folder / PEERS / f"{name}.toml"
    if path.exists():
        raise errors.PEER_FILES_EXIST(path=path, fix="edit its address, or remove it first")
    _make_folder(folder / PEERS)
    _write(path, f'address = "{address}"\n'.encode())
    return path


# ---- contents ----


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=CLOCK_SKEW_DAYS))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _issue(authority: x509.Certificate, signer: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """Certificate and key of one daemon as PEM: it may be the client or the server of a link."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
    certificate = (
        _builder(subject, authority.subject, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(both, critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    return _pem(certificate) + _key_pem(key)


def _read_bundle(path: Path) -> tuple[bytes, bytes, str]:
    """(own certificate and key, the authority's certificate, name) of a bundle."""
    try:
        with path.open("rb") as file:
            content = file.read(BUNDLE_BYTES_MAX + 1)
        blocks = [match[0] for match in _BLOCK.finditer(content)]
        if len(content) > BUNDLE_BYTES_MAX or len(blocks) != 3:
            raise ValueError("it is not certificate, key and authority")
        own, key, authority = blocks
        certificate = x509.load_pem_x509_certificate(own)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        private = serialization.load_pem_private_key(key, None)
        if private.public_key() != certificate.public_key():
            raise ValueError("its key is not that of its certificate")
        return own + key, authority, _name_of(certificate)
    except (OSError, ValueError, TypeError, InvalidSignature) as error:
        raise errors.PEER_BUNDLE(path=path, why=_reason(error)) from None


def _is_bundle_of(path: Path, name: str, authority: bytes) -> bool:
    """Whether a file is a bundle for that daemon, of that authority."""
    try:
        _, found, found_name = _read_bundle(path)
    except BatchEngineError:
        return False
    return (found, found_name) == (authority, name)


def _is_of(folder: Path, name: str, authority: bytes) -> bool:
    """Whether the certificate in a folder is of that daemon and authority."""
    try:
        return (folder / AUTHORITY).read_bytes() == authority and own_name(folder) == name
    except (OSError, BatchEngineError):
        return False


def _name_of(certificate: x509.Certificate) -> str:
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    except x509.ExtensionNotFound:
        raise ValueError("its certificate has no name") from None
    names = found.value.get_values_for_type(x509.DNSName)
    if len(names) != 1 or not is_peer_name(names[0]):
        raise ValueError("its certificate does not have one peer's name")
    return names[0]


def _check_name(name: str) -> None:
    if not is_peer_name(name):
        raise errors.PEER_NAME(given=name, why="", fix=f"use {NAME_RULE}")


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    if isinstance(error, InvalidSignature):
        return "its certificate is not of its authority"
    return str(error).partition("\n")[0]


# ---- files ----


def _make_folder(folder: Path) -> None:
    """Make a folder of mode 0700, and those above it."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        for one in reversed(missing):
            one.mkdir(mode=0o700)
            _give_away(one)
    except OSError as error:
        raise errors.PEER_UNWRITABLE(path=folder, why=_reason(error)) from None


def _write(path: Path, content: bytes) -> None:
    """Write a new file of mode 0600, whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    try:
        part.unlink(missing_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        _give_away(part)
        part.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise errors.PEER_UNWRITABLE(path=path, why=_reason(error)) from None


def _give_away(path: Path) -> None:
    """What root makes below a service's state folder belongs to the service's user."""
    if os.geteuid() == 0:
        above = path.parent.stat()
        os.chown(path, above.st_uid, above.st_gid)
