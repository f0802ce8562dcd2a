"""What NVRTC makes of sources, kept in build/nvrtc: several tests, in several processes, want the
same. What none has wanted for KEPT_S is deleted when something new is made."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from kernels.cuda.compile import OPTIONS, Compiled, CompileUnit, compile_unit, texts

FOLDER = Path(__file__).resolve().parents[3] / "build/nvrtc"
COMPILER = "nvidia-cuda-nvrtc"
KEPT_S = 7 * 86400.0


def compiled(unit: CompileUnit, target: str, **changes: str | bool) -> Compiled:
    """As `compile_unit`: kept from an earlier call of any process, or waited for while another one
    compiles it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{unit.name}-{target}-{_key(unit, target, changes)}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            cubin, ptx, report = json.loads(path.read_text())
            os.utime(path)  # its last use
            return Compiled(bytes.fromhex(cubin), ptx, report)
        made = compile_unit(unit, target, **changes)
        part = path.with_suffix(".part")
        part.write_text(json.dumps([made.cubin.hex(), made.ptx, made.report]))
        os.replace(part, path)
    prune(FOLDER, time.time() - KEPT_S)
    return made


def prune(folder: Path, before: float) -> None:
    """Delete what was made and used last before a time. A process that waits for a lock of one
    goes on with it, and makes anew what is gone."""
    for path in folder.glob("*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < before:
                path.unlink()


def _key(unit: CompileUnit, target: str, changes: dict[str, str | bool]) -> str:
    """Texts, kind, options, target, compiler."""
    options = sorted((OPTIONS | changes).items())
    key = hashlib.sha256(repr((options, target, _version(), unit.source.name, unit.kind)).encode())
    for path in texts(unit.source):
        text = path.read_bytes()
        key.update(len(text).to_bytes(8, "little") + text)
    return key.hexdigest()[:32]


def _version() -> str:
    """Of NVRTC; one that is not a package of Python keeps nothing that another one has made."""
    try:
        return metadata.version(COMPILER)
    except metadata.PackageNotFoundError:
        return f"process {os.getpid()}"
