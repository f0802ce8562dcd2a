"""Reads the repository's own Python sources as syntax: classes, imports, names, prose."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("batchengine", "kv_store", "kernels", "service")
SOURCE_SUFFIXES = (".py", ".cpp", ".h", ".cu")


@cache
def tracked_files() -> tuple[Path, ...]:
    """Files git knows; in an export without git, every file outside the build folders."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
        ).stdout.decode()
        paths = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in ROOT.rglob("*") if not {".venv", "build"} & set(p.parts)]
    return tuple(p for p in paths if p.is_file())


def source_files(folders: tuple[str, ...]) -> list[Path]:
    """Python, C++ and CMake files below the given top-level folders."""
    return [
        p
        for p in tracked_files()
        if p.relative_to(ROOT).parts[0] in folders
        and (p.suffix in SOURCE_SUFFIXES or p.name == "CMakeLists.txt")
    ]


def python_sources(folders: tuple[str, ...]) -> dict[str, str]:
    """Module name -> source text."""
    found: dict[str, str] = {}
    for path in source_files(folders):
        if path.suffix == ".py":
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            found[".".join(parts)] = path.read_text()
    return found


@dataclass(frozen=True, slots=True)
class ClassSize:
    """A class definition: its own lines, and the names of its bases as written."""

    module: str
    name: str
    lines: int
    bases: tuple[str, ...]


def classes(sources: dict[str, str]) -> list[ClassSize]:
    """Every class of these modules, nested ones too."""
    found: list[ClassSize] = []
    for module, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                bases = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
                names = tuple(
                    b.attr if isinstance(b, ast.Attribute) else b.id
                    for b in bases
                    if isinstance(b, ast.Attribute | ast.Name)
                )
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append(ClassSize(module, node.name, lines, names))
    return found


def lines_with_bases(all_classes: list[ClassSize]) -> dict[str, int]:
    """Class name -> its lines and those of every base of this repository."""
    by_name = {c.name: c for c in all_classes}

    def chain(name: str, seen: frozenset[str]) -> set[str]:
        if name not in by_name or name in seen:
            return set()
        bases = [chain(base, seen | {name}) for base in by_name[name].bases]
        return {name}.union(*bases)

    return {c.name: sum(by_name[n].lines for n in chain(c.name, frozenset())) for c in all_classes}


def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> modules of these sources that it imports, at any level, for type checking too.

    A package is its `__init__`; `from package import module` is an import of the module alone.
    """
    edges: dict[str, set[str]] = {}
    for module, text in sources.items():
        targets: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                targets.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    targets.add(inner if inner in sources else node.module)
        edges[module] = {t for t in targets if t in sources and t != module}
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in edges[node]:
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return found


def words_of(identifier: str) -> list[str]:
    """`RowImport_max2` -> row, import, max."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier)
    return [word.lower() for word in re.split(r"[^A-Za-z]+", spaced) if word]


def identifiers(text: str) -> Iterator[tuple[int, str]]:
    """(line, name) of every name token of a Python source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            yield token.start[0], token.string


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every comment and docstring of a Python source."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            if doc is not None:
                yield node.body[0].lineno, doc


def cpp_prose(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of every line comment of a C++ source."""
    for number, line in enumerate(text.splitlines(), 1):
        if (start := line.find("//")) >= 0:
            yield number, line[start:]
