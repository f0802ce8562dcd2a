"""Style that can be executed: what the code may not contain, and what the repository must hold.

Each check names the offending line and what to do instead; `test_checks_can_fail` proves that
every pattern still catches the mistake it is there for.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess

import pytest

from tests.rules.code import PACKAGES, ROOT, source_files, tracked_files

# pattern, where it is forbidden, what to do instead, a line that must be caught
BANNED = [
    (r"\bpickle\b|\bmarshal\b|\bshelve\b|\bdill\b", PACKAGES, "msgspec structs", "import pickle"),
    (r"torch\.load|yaml\.load|torch\.distributed", PACKAGES, "fixed formats", "torch.load(f)"),
    (r"(?<![\w.\"'])eval\(", PACKAGES, "a parser", "x = eval(text)"),
    (r"\btime\.time\(\)", ("batchengine", "kv_store"), "a monotonic clock", "now = time.time()"),
    (r"\bos\.fork\(", PACKAGES, "spawn by exec", "os.fork()"),
    (r"sys\.executable", ("batchengine", "service", "bench"), "python_command", "[sys.executable]"),
    (r"-ffast-math|-Ofast", ("kernels",), "-ffp-contract=off", "flags: -ffast-math"),
    (r"\bFIXME\b|\bTODO\b|\bXXX\b", PACKAGES, "an issue, or the work", "# TODO later"),
]
HOSTS = "|".join(("py" + "pi", "files." + "pythonhosted", "registry." + "npmjs"))


@pytest.mark.parametrize(("pattern", "folders", "instead", "example"), BANNED)
def test_banned_words(pattern: str, folders: tuple[str, ...], instead: str, example: str) -> None:
    hits: list[str] = []
    for path in source_files(folders):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            is_comment_rule = "FIXME" in pattern
            code = line.split("#", 1)[0] if path.suffix == ".py" and not is_comment_rule else line
            code = re.sub(r"//.*", "", code) if path.suffix in (".cpp", ".h") else code
            is_owner = instead == "python_command" and path.parent.name == "child"
            if re.search(pattern, code) and '"""' not in line and "`" not in line and not is_owner:
                hits.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()} -> use {instead}")
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(("pattern", "folders", "instead", "example"), BANNED)
def test_checks_can_fail(
    pattern: str, folders: tuple[str, ...], instead: str, example: str
) -> None:
    assert re.search(pattern, example)


def test_no_file_outgrows_a_reader() -> None:
    long = [
        f"{p.relative_to(ROOT)}: {n} lines"
        for p in source_files((*PACKAGES, "tests", "bench", "pocket"))
        if (n := len(p.read_text().splitlines())) > 750
    ]
    assert not long, "split by reason to change: " + ", ".join(long)


def test_no_registry_host_is_named() -> None:
    hits = [
        str(p.relative_to(ROOT))
        for p in tracked_files()
        if p.suffix not in (".gguf", ".png")
        and re.search(rf"\b({HOSTS})\.org", p.read_text("utf-8", "replace"))
    ]
    assert not hits, hits


def test_no_other_distribution_provides_our_import_names() -> None:
    """Another distribution also has a package `kernels`: both installed would mix files."""
    owners = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        others = set(owners.get(name, [])) - {"batchengine"}
        assert not others, f"{name} is also provided by {others}: uninstall it"


def test_heavy_packages_stay_out_of_the_cpu_path() -> None:
    """torch and transformers may be imported by the trainer only."""
    hits = [
        f"{p.relative_to(ROOT)}:{number}"
        for p in source_files(PACKAGES)
        if p.suffix == ".py"
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if re.match(r"\s*(import|from) (torch|transformers)\b", line)
    ]
    assert not hits, hits


def test_one_way_to_native_code() -> None:
    """Only kernels/__init__.py names the native module; import-linter cannot see compiled files."""
    hits = [
        f"{p.relative_to(ROOT)}:{number}"
        for p in source_files((*PACKAGES, "bench", "pocket"))
        if p.suffix == ".py" and p != ROOT / "kernels" / "__init__.py"
        for number, line in enumerate(p.read_text().splitlines(), 1)
        if re.search(r"kernels\._native|from kernels import _native", line)
    ]
    assert not hits, hits


def test_floors() -> None:
    """The import contracts of pyproject.toml hold."""
    lint = ROOT / ".venv" / "bin" / "lint-imports"
    if not lint.exists():
        pytest.skip("import-linter is not installed in .venv")
    done = subprocess.run([lint], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
