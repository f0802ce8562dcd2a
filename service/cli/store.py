"""`store`: numbers, verification and garbage collection of a running daemon's store; offline fsck.

Exit codes of fsck: 0 sound, or repaired and then found sound · 1 errors are left · 2 not a store,
or one of a newer program · 3 a daemon holds it.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from batchengine import errors
from service.admin.client import admin
from service.cli import render
from service.cli.options import (
    AT_LEAST_0,
    DAY_S,
    ConfigFile,
    Debug,
    Json,
    Socket,
    admin_path,
    print_json,
    show,
)
from service.cli.tables import table_lines

if TYPE_CHECKING:
    from kv_store.fsck import FsckReport

UNUSED_DAYS = 30  # packed weights that no start has used for so long may go
CHORE_S = 24 * 3600.0  # verifying a terabyte takes hours

store = cyclopts.App(
    name="store", help="The KV store: stat, verify, gc; fsck, weights without a daemon."
)


@store.command
def stat(*, admin_socket: Socket = None, json: Json = False, debug: Debug = False) -> int:
    """Show the store's size, speed and page counters."""
    found = _op(admin_socket, "stat")
    show(
        found,
        json,
        lambda: [
            _headline(found),
            "",
            *(f"{name:<26} {_number(name, found[name])}" for name in sorted(found)),
        ],
    )
    return 0


def _headline(found: dict[str, Any]) -> str:
    """The store in one line: what it uses of its budget, and whether it caches."""
    used, budget = found.get("used_bytes", 0), found.get("budget_bytes", 0)
    share = f" ({used / budget:.0%})" if budget else ""
    tier = found.get("page_tier", found.get("tier", "ok"))
    return f"{render.size(used)} of {render.size(budget)} used{share}, pages {tier}"


def _number(name: str, value: Any) -> str:
    if name.endswith("_bytes_per_s"):
        return f"{render.size(value)}/s" if value else "not measured yet"
    if "bytes" in name and isinstance(value, int | float):
        return render.size(value)
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) else value or "-"


@store.command
def verify(*, admin_socket: Socket = None, json: Json = False, debug: Debug = False) -> int:
    """Read every page and drop those that are damaged; serving goes on. Exit code 1 = some were."""
    found = _op(admin_socket, "verify")
    show(found, json, lambda: _verify_lines(found))
    return 1 if found["bad"] else 0


def _verify_lines(found: dict[str, Any]) -> list[str]:
    lines = [
        f"{found['total']:,} pages, {render.size(found['read_bytes'])} read in"
        f" {found['seconds']:,.1f} s: {found['good']:,} good, {found['bad']:,} damaged and"
        f" dropped, {found['gone']:,} evicted meanwhile"
    ]
    if found["bad"]:
        lines += ["sessions that had damaged pages compute them again; answers do not change"]
    return lines


@store.command
def gc(*, admin_socket: Socket = None, json: Json = False, debug: Debug = False) -> int:
    """Free space: drop pages beyond the target, other models' KV, the oldest history."""
    found = _op(admin_socket, "gc")
    show(
        found,
        json,
        lambda: [
            f"forgotten: {found['pages_evicted']:,} pages, {found['tails_superseded']:,} outgrown"
            f" tails, {found['extents_other_reprs']:,} extents of other models,"
            f" {found['sessions']:,} sessions",
            *_given_lines(found),
        ],
    )
    if found["left"]:
        fix = "free disk space where the store lies, then run `batchengine store gc` again"
        raise errors.STORE_FULL(what="the ledger is not smaller", why=found["left"], fix=fix)
    return 0


def _given_lines(found: dict[str, Any]) -> list[str]:
    n = found["extents_given"]
    return [f"{n:,} extents of KV were deleted to make room for the ledger"] if n else []


def _op(socket: str | None, op: str) -> dict[str, Any]:
    return admin(admin_path(socket), "store", op=op, patience_s=CHORE_S)["store"]


@store.command
def fsck(
    path: Annotated[Path, Parameter(help="The store's folder; no daemon may use it.")],
    /,
    *,
    repair: Annotated[
        bool, Parameter(negative=(), help="Repair what is found; without it nothing changes.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Check a store that no daemon uses, page by page. Exit codes: 0 sound or repaired, 1 errors
    left or unreadable, 2 not a store, or a newer program's, 3 in use."""
    found = _check(path, repair, quiet=json)
    left = found
    if repair and not found.ok:
        left = _check(path, False, quiet=True)  # the result is what is on disk
    if json:
        print_json(_plain(found) | {"ok_now": left.ok})
    else:
        _print_report(found)
        if repair and not found.ok:
            print("repaired, and sound now" if left.ok else "errors are left after the repair")
        elif any(one.severity == "error" and one.is_repairable for one in found.findings):
            print(f"Fix: batchengine store fsck {path} --repair")
        elif not found.ok:
            print(
                f"Fix: restore {path} from a copy, or move it away: the next start makes a new one"
            )
    return 0 if left.ok else 1


@store.command
def weights(
    *,
    remove: Annotated[
        bool, Parameter(negative=(), help="Remove those that were not used for --days.")
    ] = False,
    days: Annotated[
        float, Parameter(validator=AT_LEAST_0, help="Days without a use after which one may go.")
    ] = UNUSED_DAYS,
    config: ConfigFile = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List the packed copies of models; the next start of a model makes a removed one again."""
    from batchengine import config as configuration
    from batchengine.weights.cache import list_uses, remove_unused

    folder = configuration.load(None if config is None else str(config), is_served=False).cache_dir
    now_s = time.time()
    rows: list[dict[str, Any]] = []
    for use in list_uses(Path(folder)):
        state = "in use" if use.is_mapped else "unused"
        if remove and not use.is_mapped and now_s - use.used_s >= days * DAY_S:
            state = "removed" if remove_unused(use.path) else "in use"
        facts = {"file": use.path.name, "bytes": use.size_bytes, "used_s": round(use.used_s)}
        rows.append({**facts, "state": state})
    answer = {"folder": folder, "files": rows}
    show(answer, json, lambda: _weights_lines(folder, rows, now_s))
    return 0


def _weights_lines(folder: str, rows: list[dict[str, Any]], now_s: float) -> list[str]:
    table = [
        {
            "file": row["file"],
            "size": render.size(row["bytes"]),
            "used": render.ago(now_s - row["used_s"]),
            "state": row["state"],
        }
        for row in rows
    ]
    total = render.size(sum(row["bytes"] for row in rows if row["state"] != "removed"))
    return [f"{folder}: {total} of packed weights", *table_lines(table, "none")]


def _check(path: Path, repair: bool, *, quiet: bool) -> FsckReport:
    from kv_store.errors import StoreError, StoreLocked, StoreMissing, StoreVersion
    from kv_store.fsck import fsck as check_store

    def progress(done: int, total: int) -> None:
        if not quiet and sys.stderr.isatty():
            print(f"\r{done:,} of {total:,} pages", end="", file=sys.stderr, flush=True)

    try:
        report = check_store(path, repair=repair, progress=progress)
    except (StoreError, OSError) as error:
        row = errors.STORE_UNUSABLE
        if isinstance(error, StoreLocked):
            row = errors.STORE_LOCKED
        elif isinstance(error, StoreMissing | StoreVersion):
            row = errors.NOT_A_STORE
        what = error.what if isinstance(error, StoreError) else f"cannot check {path}"
        why = error.why if isinstance(error, StoreError) else error.strerror or str(error)
        fix = error.fix if isinstance(error, StoreError) else ""
        if _is_denied(path):
            row, what, fix = errors.STORE_UNUSABLE, f"cannot read the store {path}", ""
            why = "permission denied"
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            fix = "free disk space where the store lies: the check copies the ledger"
        if isinstance(error, StoreLocked):
            fix = "stop that daemon first, or have it check itself: `batchengine store verify`"
        fix = fix or "name the folder given to serve --store, as the user who runs the daemon"
        raise row(what=what, why=why, fix=fix) from None
    if not quiet and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return report


def _is_denied(path: Path) -> bool:
    """Whether this user may not look into the folder."""
    try:
        os.listdir(path)
        os.lstat(path / "meta.db")
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def _print_report(report: FsckReport) -> None:
    print(f"store {report.path}")
    counts = ", ".join(
        f"{count:,} {name.replace('_', ' ')}"
        for name, count in sorted(report.counts.items())
        if name not in ("errors", "warnings", "infos")
    )
    print(f"  {'' if report.clean else 'not '}closed in order; {counts or 'empty'}")
    for finding in report.findings:
        print(f"  {finding.severity:<8} {finding.what}: {finding.why}")
        print(f"           {'done' if report.repaired else 'repair'}: {finding.repair}")
    warned = f", with {n:,} warning{'s' * (n != 1)}" if (n := report.counts["warnings"]) else ""
    failed = f"{(n := report.counts['errors']):,} error{'s' * (n != 1)}"
    print(f"  sound{warned}" if report.ok else f"  {failed}")


def _plain(report: FsckReport) -> dict[str, Any]:
    fields = ("path", "ok", "repaired", "store_uuid", "epoch", "clean")
    of_finding = ("severity", "what", "why", "repair")
    return {
        **{name: getattr(report, name) for name in fields},
        "counts": dict(report.counts),
        "findings": [{name: getattr(one, name) for name in of_finding} for one in report.findings],
    }
