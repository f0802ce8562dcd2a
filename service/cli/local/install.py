"""`batchengine install-service`: unit, user, folders, configuration and shell completion of this
installation, written below a root folder or shown as a diff.

Nothing is started and no other program is called: the last lines say which commands do that. A
configuration that exists is kept.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import cyclopts

from batchengine import errors
from service.cli.options import SHARED

if TYPE_CHECKING:
    from batchengine.config import Config  # loads psutil, which few commands need

SAMPLES = SHARED / "systemd"
UNITS = Path("etc/systemd/system")
CONFIG = Path("etc/batchengine/batchengine.toml")
PROGRAM_IN_UNIT = "/usr/bin/batchengine"
HIDDEN = ("/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/")  # by ProtectHome, PrivateTmp
NAMES = {
    "batchengine.service": UNITS / "batchengine.service",
    "batchengine.socket": UNITS / "batchengine.socket",
    "batchengine.sysusers.conf": Path("etc/sysusers.d/batchengine.conf"),
    "batchengine.tmpfiles.conf": Path("etc/tmpfiles.d/batchengine.conf"),
    "batchengine.toml.example": CONFIG,
    "lan.conf.example": UNITS / "batchengine.service.d" / "lan.conf.example",
    "keys.conf.example": UNITS / "batchengine.service.d" / "keys.conf.example",
}
NO_DEVICES = (  # and those of a lane of kind cuda
    "PrivateDevices=yes\nDevicePolicy=closed\n",
    "PrivateDevices=no\nDevicePolicy=closed\nDeviceAllow=char-nvidia* rw\n",
)
COMPLETIONS: dict[Literal["bash", "zsh", "fish"], Path] = {
    "bash": Path("usr/local/share/bash-completion/completions/batchengine"),
    "zsh": Path("usr/local/share/zsh/site-functions/_batchengine"),
    "fish": Path("usr/local/share/fish/vendor_completions.d/batchengine.fish"),
}
MANUAL = Path("usr/local/share/man/man1/batchengine.1")
NEXT = (
    "systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload",
    "install -o batchengine -m 0400 MODEL.gguf /var/lib/batchengine/model.gguf",
    "{program} check --config /etc/batchengine/batchengine.toml",
    "systemctl enable --now batchengine",
)


@dataclass(frozen=True, slots=True)
class File:
    """One file of the service: where it goes, what it holds, and what is there now, if anything."""

    path: Path
    text: str
    there: str | None
    is_kept: bool  # a change of it is the operator's own

    @property
    def state(self) -> str:
        if self.there is None:
            return "new"
        if self.there == self.text:
            return "same"
        return "kept" if self.is_kept else "changed"

    def diff(self) -> Iterator[str]:
        """What writing it would change."""
        before = (self.there or "").splitlines()
        name = str(self.path)
        yield from difflib.unified_diff(before, self.text.splitlines(), name, name, lineterm="")


def install(app: cyclopts.App, root: Path, *, dry_run: bool) -> int:
    """Writes the files that are new or changed, or shows them; returns the exit code."""
    program = find_program()
    for file in service_files(app, root, program):
        if file.state in ("new", "changed"):
            if dry_run:
                print("\n".join(file.diff()))
            else:
                _write(file)
        print(f"{file.state:<8} {file.path}")
    for hint in hints(program):
        print(f"hint     {hint}")
    if not dry_run:
        print("next", *(f"  {line.format(program=program)}" for line in NEXT), sep="\n")
    return 0


def find_program() -> str:
    """The console script of this installation."""
    beside = Path(sys.prefix) / "bin" / "batchengine"
    return str(beside if beside.exists() else Path(sys.argv[0]).absolute())


def service_files(app: cyclopts.App, root: Path, program: str) -> list[File]:
    """Everything that the service is made of, with what is there now."""
    config = _read_config(root / CONFIG)
    texts = {path: (SAMPLES / name).read_text() for name, path in NAMES.items()}
    texts[UNITS / "batchengine.service"] = unit_text(
        texts[UNITS / "batchengine.service"], program, config
    )
    texts[UNITS / "batchengine.socket"] = re.sub(
        r"(?m)^ListenStream=.*$",
        f"ListenStream={_address(config)}",
        texts[UNITS / "batchengine.socket"],
    )
    texts |= shell_files(app)
    return [
        File(root / path, text, _read(root / path), is_kept=path == CONFIG)
        for path, text in texts.items()
    ]


def shell_files(app: cyclopts.App) -> dict[Path, str]:
    """Completion for each shell, and the manual page."""
    texts = {
        path: app.generate_completion(prog_name="batchengine", shell=shell)
        for shell, path in COMPLETIONS.items()
    }
    return {**texts, MANUAL: manual(app)}


def unit_text(sample: str, program: str, config: Config | None) -> str:
    """The unit of this installation: its program, and the networks and devices its configuration
    needs."""
    text = sample.replace(PROGRAM_IN_UNIT, program)
    if config and any(lane.kind == "cuda" for lane in config.lanes):
        text = text.replace(*NO_DEVICES)
    lines = text.splitlines()
    allowed = [f"IPAddressAllow={network}" for network in networks(config)] if config else []
    at = lines.index("IPAddressAllow=localhost") + 1
    return "\n".join([*lines[:at], *allowed, *lines[at:]]) + "\n"


def networks(config: Config) -> list[str]:
    """What IPAddressAllow needs beside localhost: a daemon that others reach cannot know who they
    are, unless it is only its peers."""
    from batchengine.config.peers import is_loopback  # not for every command

    if not is_loopback(config.server.host):
        return ["any"]
    hosts = {peer.address.rpartition(":")[0].strip("[]") for peer in config.peers.known}
    if config.peers.listen and not hosts:
        return ["any"]
    try:
        found = sorted(str(ipaddress.ip_address(host)) for host in hosts)
    except ValueError:  # a name, which may get another address at any time
        return ["any"]
    return [host for host in found if not is_loopback(host)]


def hints(program: str) -> Iterator[str]:
    """What keeps the unit from working, as far as it can be seen."""
    for path in sorted({program, str(Path(program).resolve()), sys.prefix}):
        if path.startswith(HIDDEN):
            yield (
                f"{path} is hidden from the unit (ProtectHome, PrivateTmp): install the program"
                " elsewhere, e.g. python3 -m venv /opt/batchengine &&"
                " /opt/batchengine/bin/pip install batchengine-*.whl (the wheel that `make wheel`"
                " puts into dist/)"
            )
            break


def manual(app: cyclopts.App) -> str:
    """The manual page of the command line, from its own help."""
    lines = [
        '.TH BATCHENGINE 1 "" "" "batchengine"', ".SH NAME",
        "batchengine \\- serves an open-weight LLM to fleets of agents", ".SH COMMANDS",
    ]  # fmt: skip
    run, sys.argv[0] = sys.argv[0], "batchengine"  # a module that was run is named in each usage
    try:
        text = app.generate_docs(output_format="markdown", recursive=True)
    finally:
        sys.argv[0] = run
    _, _, commands = text.partition("\n## batchengine ")
    in_code = False
    for line in f"## batchengine {commands}".splitlines():
        if line.startswith("```"):
            in_code = not in_code
            lines.append(".nf" if in_code else ".fi")
        elif line.startswith("#"):
            lines.append(f'.SS "{_roff(line.lstrip("# "))}"')
        elif line.startswith("* "):
            term, _, rest = line[2:].partition(": ")
            lines += [".TP", f".B {_roff(term)}", _roff(rest)]
        elif line:
            lines += [".PP" if not in_code else "", _roff(line)]
    return "\n".join(line for line in lines if line) + "\n"


def _roff(text: str) -> str:
    plain = re.sub(r"\[`?([^\]`]*)`?\]\([^)]*\)", r"\1", text).replace("**", "").replace("`", "")
    plain = re.sub(r"\*(\[[^\]]*\])\*", r"\1", plain)
    plain = plain.replace("…", "...")  # not every terminal of a manual has it
    escaped = plain.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


def _address(config: Config | None) -> str:
    return "127.0.0.1:7717" if config is None else config.server.address


def _read_config(path: Path) -> Config | None:
    """The configuration that is there, if any; it must be right before a unit is made for it."""
    from batchengine import config as configuration

    return configuration.load(str(path), {}, is_served=False) if path.is_file() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise errors.SERVICE_FILE(path=path, why=error) from error


def _write(file: File) -> None:
    """By rename, so that no half of a file is ever read."""
    temporary = file.path.with_name(f".{file.path.name}.new")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        temporary.write_text(file.text)
        temporary.chmod(0o644)
        os.replace(temporary, file.path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise errors.SERVICE_FILE(path=file.path, why=error.strerror) from error
