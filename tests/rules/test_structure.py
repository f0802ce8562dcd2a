"""The structure that must not rot: sizes, folders, circles, names; each rule is shown to fail."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.rules.code import (
    PACKAGES,
    ROOT,
    SOURCE_SUFFIXES,
    circles,
    classes,
    cpp_prose,
    identifiers,
    imports,
    lines_with_bases,
    prose,
    python_sources,
    source_files,
    tracked_files,
    words_of,
)

CLASS_LINES_MAX = 400  # counting the bases: what a reader must hold in mind at once
FOLDER_FILES_MAX = 12  # a room that holds more is two rooms
VOCABULARY = tomllib.loads((Path(__file__).parent / "vocabulary.toml").read_text())
BANNED: dict[str, str] = VOCABULARY["banned"]
ALLOWED: frozenset[str] = frozenset(VOCABULARY["names"]["allowed"])
MODULE_WORDS: dict[str, str] = VOCABULARY["modules"]
DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs")


def too_long(sources: dict[str, str]) -> list[str]:
    """Classes above CLASS_LINES_MAX lines with their bases."""
    sizes = lines_with_bases(classes(sources))
    return [f"{name}: {n} lines" for name, n in sizes.items() if n > CLASS_LINES_MAX]


def named_twice(sources: dict[str, str]) -> list[str]:
    """Public class names that stand for two classes."""
    count = Counter(c.name for c in classes(sources) if not c.name.startswith("_"))
    return [name for name, n in count.items() if n > 1]


def crowded(paths: Iterable[Path]) -> list[str]:
    """Folders with more than FOLDER_FILES_MAX sources."""
    count = Counter(p.parent for p in paths if p.suffix in SOURCE_SUFFIXES and "__" not in p.name)
    return [f"{folder}: {n} files" for folder, n in count.items() if n > FOLDER_FILES_MAX]


def with_banned_letters() -> Iterator[tuple[Path, str]]:
    """Sources that hold the letters of a banned word anywhere; reading tokens of all takes long."""
    for path in source_files((*PACKAGES, "tests", "bench")):
        text = path.read_text()
        letters = text.lower()
        if any(word in letters for word in BANNED):
            yield path, text


def banned_names(text: str) -> Iterator[str]:
    """Identifiers with a banned word in them."""
    for line, name in identifiers(text):
        if name not in ALLOWED:
            for word in set(words_of(name)) & BANNED.keys():
                yield f"{line}: {name} -> {BANNED[word]}"


def banned_prose(lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    """Lines of prose with a banned word outside backquotes."""
    for line, text in lines:
        plain = re.sub(r"`[^`]*`", "", text)
        for allowed in ALLOWED:
            plain = plain.replace(allowed, "")
        for word in BANNED.keys() & {w.lower() for w in re.findall(r"[A-Za-z]+", plain)}:
            yield f"{line}: {word} -> {BANNED[word]}"


def unknown_modules(modules: Iterable[str]) -> list[str]:
    """Module names with a word that the vocabulary does not list."""
    return [
        f"{module}: {word}"
        for module in modules
        for word in words_of(module.rsplit(".", 1)[-1])
        if word not in MODULE_WORDS
    ]


def test_no_class_outgrows_a_reader() -> None:
    assert not too_long(python_sources(PACKAGES))


def test_no_class_name_is_used_twice() -> None:
    assert not named_twice(python_sources(PACKAGES))


def test_no_folder_is_crowded() -> None:
    assert not crowded(source_files((*PACKAGES, "bench", "tests")))


def test_no_module_is_imported_by_a_circle() -> None:
    assert not circles(imports(python_sources((*PACKAGES, "bench", "pocket"))))


def test_module_names_are_words_of_the_vocabulary() -> None:
    assert not unknown_modules(python_sources(PACKAGES))


def test_every_word_of_the_vocabulary_is_used() -> None:
    used = {w for m in python_sources(PACKAGES) for w in words_of(m.rsplit(".", 1)[-1])}
    assert not MODULE_WORDS.keys() - used
    assert not MODULE_WORDS.keys() & BANNED.keys()


def test_no_banned_word_in_names() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{hit}"
        for path, text in with_banned_letters()
        if path.suffix == ".py"
        for hit in banned_names(text)
    ]
    assert not hits, "\n".join(hits)


def test_no_banned_word_in_prose() -> None:
    hits: list[str] = []
    for path, text in with_banned_letters():
        read = prose if path.suffix == ".py" else cpp_prose
        hits += [f"{path.relative_to(ROOT)}:{hit}" for hit in banned_prose(read(text))]
    for path in tracked_files():
        if path.suffix == ".md" and path.relative_to(ROOT).parts[0] in DOCUMENTS:
            lines = enumerate(path.read_text().splitlines(), 1)
            hits += [f"{path.relative_to(ROOT)}:{hit}" for hit in banned_prose(lines)]
    assert not hits, "\n".join(hits)


def test_the_rules_can_fail() -> None:
    body = "\n".join(f"    x{i} = {i}" for i in range(CLASS_LINES_MAX // 2 + 1))
    tower = {"a": f"class Base:\n{body}\n", "b": f"from a import Base\nclass Top(Base):\n{body}\n"}
    assert too_long(tower) == [f"Top: {CLASS_LINES_MAX + 4} lines"]
    assert named_twice({"a": "class A: ...", "b": "class A: ..."}) == ["A"]
    assert crowded([Path(f"a/{i}.py") for i in range(FOLDER_FILES_MAX + 1)]) == ["a: 13 files"]
    ring = {"p": "", "p.a": "from p import b", "p.b": "def f():\n    import p.a"}
    assert circles(imports(ring)) == [["p.a", "p.b"]]
    assert list(banned_names("JuryOf = 1")) == ["1: JuryOf -> audit"]
    word, instead = next(iter(BANNED.items()))
    assert list(banned_prose(prose(f"# a {word}\n"))) == [f"1: {word} -> {instead}"]
    assert list(banned_prose(cpp_prose(f"int x;  // {word}\n")))
    assert not list(banned_prose([(1, f"the file `{word}` and BALLAST")]))
    assert unknown_modules(["batchengine.zork"]) == ["batchengine.zork: zork"]


def named_paths(text: str) -> list[str]:
    """Paths of this repository that a document names in backquotes."""
    tops = "|".join((*PACKAGES, "tests", "bench", "systemd", "tools", "pocket"))
    found = re.findall(rf"`((?:{tops})/[^`\s]*)`", text)
    return [path for path in found if re.fullmatch(r"[\w./*-]+", path)]


def test_documents_name_files_that_exist() -> None:
    for document in ("README.md", "ARCHITECTURE.md"):
        paths = named_paths((ROOT / document).read_text())
        assert paths, document
        assert not [path for path in paths if not list(ROOT.glob(path))], document
