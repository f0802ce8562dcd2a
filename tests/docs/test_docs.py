"""README and docs: every command runs as written, links lead somewhere, references are current."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from service.cli.local.cluster import free_ports
from tests.docs import commands
from tools import make_docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUN = [page for page in PAGES if commands.blocks(page)]
LANGUAGES = {"sh", "sh elsewhere", "text", "toml", "json", "python", "ini", "yaml", ""}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUN, ids=name_of)
def test_commands_run_as_written(page: Path, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "pocket").symlink_to(ROOT / "pocket")
    home = tmp_path / "home"
    for folder in ("state", "run", "cache"):
        (home / folder).mkdir(parents=True)
    env = {
        "HOME": str(home),
        "PATH": os.pathsep.join([str(ROOT / ".venv" / "bin"), os.environ["PATH"]]),
        "STATE_DIRECTORY": str(home / "state"),  # root's are those of the system
        "RUNTIME_DIRECTORY": str(home / "run"),
        "CACHE_DIRECTORY": str(home / "cache"),
        "BATCHENGINE_URL": f"http://127.0.0.1:{port}/v1",
        "LANG": "C.UTF-8",
    }
    done = subprocess.run(
        ["bash", "-c", commands.script(page, port)],
        cwd=tmp_path,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


def test_a_page_has_commands() -> None:
    assert ROOT / "README.md" in RUN


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_names_a_known_language(page: Path) -> None:
    assert commands.languages(page) <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    links = [link for link, _ in _LINK.findall(page.read_text()) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


def test_reference_pages_are_those_of_the_code() -> None:
    assert not make_docs.outdated(), "run make docs"
