"""The catalogue of errors: one row per code, every template filled, an HTTP status per kind."""

from __future__ import annotations

import ast
import re
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, ContextBound, Kind
from batchengine.errors import CATALOGUE, Problem
from service.http.answers import STATUS, error_headers
from service.protocols.openai.envelope import ERROR_TYPES, error_object

ROOT = Path(__file__).resolve().parent.parent
CATALOGUE_FILE = ROOT / "batchengine" / "errors.py"
ROWS = {name: row for name, row in vars(errors).items() if isinstance(row, Problem)}
OPTIONAL = {"why", "fix"}
SETTINGS = {"param", "retry_ms"}
# names that clients get in more than one situation, each with its own kind
SHARED_NAMES = {"session_busy", "session_not_found", "store_unusable"}


class Call(NamedTuple):
    row: str  # "" = of a variable called `row`
    keywords: frozenset[str]
    where: str


def product() -> Iterator[tuple[Path, ast.Module]]:
    for package in ("batchengine", "kv_store", "kernels", "service"):
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text())


def name_of(node: ast.AST, path: Path) -> str | None:
    """NAME for `errors.NAME` (in the catalogue's own file for NAME); "" for `row`."""
    match node:
        case ast.Attribute(value=ast.Name(id="errors"), attr=name) if name in ROWS:
            return name
        case ast.Attribute(value=ast.Name(id="errors"), attr=name) if name.isupper():
            raise AssertionError(f"{path}:{node.lineno}: there is no row {name}")
        case ast.Name(id=name, ctx=ast.Load()) if path == CATALOGUE_FILE and name in ROWS:
            return name
        case ast.Name(id="row"):
            return ""
    return None


def uses() -> tuple[list[Call], set[str]]:
    """Every call of a row, and the names of rows that are passed on instead of called."""
    calls: list[Call] = []
    passed: set[str] = set()
    for path, tree in product():
        nodes = list(ast.walk(tree))
        inside: set[int] = set()  # nodes that are called, or of which only `.code` is read
        for node in nodes:
            if isinstance(node, ast.Call) and (name := name_of(node.func, path)) is not None:
                where = f"{path.relative_to(ROOT)}:{node.lineno} {name}"
                assert not node.args, f"{where}: values have names"
                assert all(k.arg for k in node.keywords), f"{where}: no **values"
                calls.append(Call(name, frozenset(k.arg or "" for k in node.keywords), where))
                inside.add(id(node.func))
            elif isinstance(node, ast.Attribute) and node.attr == "code":
                inside.add(id(node.value))
        passed |= {name for n in nodes if id(n) not in inside and (name := name_of(n, path))}
    return calls, passed


def fields(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name}


def misfit(row: Problem, given: frozenset[str]) -> str:
    """The defect of a call of `row` with these keywords, "" = none."""
    wanted = fields(row.what) | fields(row.why) | fields(row.fix) | set(row.details)
    free = {name for name in OPTIONAL if f"{{{name}}}" in (row.why, row.fix)}
    missing, unused = wanted - given - free, given - wanted - SETTINGS
    return f"missing {missing}" if missing else f"unused {unused}" if unused else ""


def test_codes_and_texts_of_rows_are_unique() -> None:
    rows = list(ROWS.values())
    codes = [row.code for row in rows]
    assert codes == sorted(codes)
    assert codes == list(CATALOGUE)  # a dict: unique
    assert all(re.fullmatch(r"BE[1-3]\d{3}", code) for code in codes)
    whats = Counter(row.what for row in rows if row.what != "{what}")
    assert whats.most_common(1)[0][1] == 1
    kinds: dict[str, set[Kind]] = {}
    for row in rows:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", row.name), row
        kinds.setdefault(row.name, set()).add(row.kind)
    assert {name for name, found in kinds.items() if len(found) > 1} == SHARED_NAMES


def test_every_call_fills_exactly_its_templates() -> None:
    calls, passed = uses()
    for call in calls:
        if call.row:
            assert not misfit(ROWS[call.row], call.keywords), call
    by_variable = [call.keywords for call in calls if not call.row]
    by_variable.append(frozenset({"why"}))  # exceptions with a class of their own: WireError
    for name in passed:
        assert any(not misfit(ROWS[name], given) for given in by_variable), name


def test_every_row_is_raised() -> None:
    calls, passed = uses()
    assert {call.row for call in calls if call.row} | passed == set(ROWS)


def test_codes_are_written_in_the_catalogue_only() -> None:
    hits = [
        f"{path.relative_to(ROOT)}: {node.value!r}"
        for path, tree in product()
        if path != CATALOGUE_FILE
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.search(r"\bBE\d{4}\b", node.value)
    ]
    assert not hits, hits


def test_every_kind_has_a_status() -> None:
    assert set(STATUS) == set(Kind) == {row.kind for row in ROWS.values()}
    answers = {(STATUS[kind], ERROR_TYPES.get(kind, "invalid_request_error")) for kind in Kind}
    assert len(answers) == len(Kind)  # no two kinds have the same status and type


def test_a_row_fills_its_templates() -> None:
    error = errors.PROMPT_TOO_LONG(
        asked="9,000 tokens", n_prompt_tokens=9000, n_ctx=4096, longer=ContextBound.SETTING
    )
    assert str(error) == (
        "BE1203 prompt does not fit: 9,000 tokens, this model's maximum context length is 4096"
        " tokens: neither prompts nor answers are truncated. Fix: shorten the prompt or max_tokens,"
        " or start the daemon with a larger --ctx, at most what the model was trained for"
    )
    body = error_object(error)["error"]
    assert isinstance(body, dict)
    assert body["param"] == "prompt"
    assert body["type"] == "invalid_request_error"
    assert (body["code"], body["batchengine_code"]) == ("context_length_exceeded", "BE1203")
    assert (body["n_prompt_tokens"], body["n_ctx"]) == (9000, 4096)
    hostile = errors.INVALID_FIELD(param="{param}", what="{what} {0}", fix="{fix.__class__}")
    assert (hostile.what, hostile.why) == ("{what} {0}", "")
    assert hostile.fix == "{fix.__class__}"
    with pytest.raises(KeyError):
        errors.SESSION_BUSY()


def test_headers_give_whether_and_when_to_retry() -> None:
    assert error_headers(errors.INVALID_JSON(why="no")) == {"x-should-retry": "false"}
    assert error_headers(
        errors.OVERLOADED(waiting=1, setting="limits.queue_max", retry_ms=1200)
    ) == {
        "Retry-After": "2",
        "retry-after-ms": "1200",
        "x-should-retry": "true",
        "x-llm-d-request-dropped-reason": "rejected-saturated",
    }
    assert "x-llm-d-request-dropped-reason" not in error_headers(errors.DRAINING())
    assert error_headers(errors.NOT_DURABLE(why="full"))["retry-after-ms"] == "1000"
    method = errors.WRONG_METHOD(method="PUT", usable="GET", allowed="GET, HEAD")
    assert error_headers(method)["Allow"] == "GET, HEAD"
    keyless = errors.INVALID_API_KEY(problem="missing")
    assert "WWW-Authenticate" in error_headers(keyless)
    assert "routes of server.keyless_routes need none" in keyless.why


def test_an_error_of_another_process_keeps_its_kind() -> None:
    sent = errors.SESSION_BUSY(queued=3)
    got = errors.received(sent.code, sent.what, sent.why, sent.fix)
    assert (got.kind, got.name, str(got)) == (sent.kind, sent.name, str(sent))
    unknown = errors.received("BE9999", "what", "why", "fix")
    assert (unknown.kind, unknown.name) == (Kind.INTERNAL, "internal_error")
    assert errors.of_request(sent) is sent
    defect = errors.of_request(ZeroDivisionError("secret"))
    assert isinstance(defect, BatchEngineError)
    assert "secret" not in str(defect)
    assert STATUS[defect.kind] == 500
