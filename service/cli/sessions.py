"""Commands about sessions: one per row of `service.operations`, and `sessions`, which lists them.

Each asks the daemon over its admin socket, where every session of every key can be named.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal, cast

import cyclopts
from cyclopts import Parameter

from batchengine import errors
from service import operations
from service.admin.client import Json as Answer
from service.admin.client import admin
from service.cli import render
from service.cli.options import (
    AT_LEAST_0,
    EXIT_FAILED,
    PAUSE,
    Debug,
    Json,
    KeyName,
    SessionId,
    Socket,
    admin_path,
    print_json,
    show,
)
from service.cli.tables import Column, fitted, table_lines, width
from service.cli.tables import watch as repeat
from service.operations import OPERATIONS, Operation

SessionState = Literal[  # as rows of sessions have it
    "idle", "waiting", "running", "frozen", "parked", "interrupted", "on disk"
]
DONE = ("moved", "already there")  # results of a move
LISTS = ("tool_calls",)
# shown below, or in other words
UNSHOWN = (
    "turns", "why", "used_s", "parked_since", "tool_call_id", "route", "waits_for", "pages_lost",
    "page_move",
)  # fmt: skip
WIDE = 120  # columns of a terminal that shows whole ids

sessions = cyclopts.App(name="sessions", help="Sessions: list them; show, why, park, fork, rm.")

RequestOrSession = Annotated[str, Parameter(name="ID", help="A request id (req_…) or a session.")]
Given = dict[str, str | None]  # the arguments of an operation


def _ask(operation: Operation, socket: str | None, **arguments: str | None) -> Answer:
    path = admin_path(socket)
    found = admin(path, operation.name, patience_s=operation.seconds_max, **arguments)
    return found[operation.answer]


def _command(operation: Operation) -> Callable[..., int]:
    """The command of one row: its subject, its arguments as options, and the common options."""

    def command(
        subject: str,
        /,
        *,
        key_name: str | None = None,
        admin_socket: str | None = None,
        json: bool = False,
        debug: bool = False,
        **given: str | None,
    ) -> int:
        found = _ask(
            operation, admin_socket, **{operation.subject: subject}, tenant=key_name, **given
        )
        show(found, json, lambda: LINES[operation.name](found, given))
        return EXIT_FAILED if found.get("result", "moved") not in DONE else 0

    def option(name: str, kind: Any, default: object = None) -> inspect.Parameter:
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default
        )

    subject = inspect.Parameter(
        "session",
        inspect.Parameter.POSITIONAL_ONLY,
        annotation=RequestOrSession if operation.takes_requests else SessionId,
    )
    own = [
        option(one.name, Annotated[str | None, Parameter(name=one.flag, help=one.help)])
        for one in operation.arguments
    ]
    common = [
        option("key_name", KeyName),
        option("admin_socket", Socket),
        option("json", Json, False),
        option("debug", Debug, False),
    ]
    command.__name__, command.__doc__ = operation.name, operation.synopsis
    command.__annotations__ = {}
    vars(command)["__signature__"] = inspect.Signature([subject, *own, *common])
    return command


@sessions.default
def list_sessions(
    *,
    all: Annotated[
        bool, Parameter(name="--all", negative=(), help="Also those that are on disk only.")
    ] = False,
    sort: Annotated[
        Literal["used", "tokens", "name", "state", "key"], Parameter(help="Order of the rows.")
    ] = "used",
    state: Annotated[SessionState | None, Parameter(help="Only sessions in this state.")] = None,
    lane: Annotated[str | None, Parameter(help="Only sessions of this lane.")] = None,
    key_name: KeyName = None,
    match: Annotated[
        str | None, Parameter(help="Only sessions with this text in their name or id.")
    ] = None,
    limit: Annotated[int, Parameter(validator=AT_LEAST_0, help="Rows at most; 0 = all.")] = 100,
    watch: Annotated[
        float,
        Parameter(
            validator=PAUSE, help="Look again every so many seconds, until Ctrl-C; 0 = once."
        ),
    ] = 0.0,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List sessions, the last used first: names, where they are, how long, what was reused."""
    path = admin_path(admin_socket)
    none = "no sessions yet" if all else "no sessions in memory: --all lists those on disk, too"
    if any((state, lane, key_name, match)):
        none = "no session fits these options" + "; --all looks on disk, too" * (not all)

    if lane is not None:
        lanes: list[Answer] = admin(path, "status")["status"]["lanes"]
        if lane not in (names := [str(row["name"]) for row in lanes]):
            raise errors.UNKNOWN_LANE(given=lane, lanes=" or ".join(names), param="lane")

    def rows() -> list[Answer]:
        found: list[Answer] = admin(path, "sessions", stored=all)["sessions"]
        return [row for row in found if _is_wanted(row, state, lane, key_name, match)]

    def lines() -> list[str]:
        found = sorted(rows(), key=SORTS[sort])
        shown = found[:limit] if limit > 0 else found
        table = fitted(COLUMNS, [_listed(row) for row in shown], none)
        more = len(found) - len(shown)
        return [*table, f"and {more:,} more: --limit 0 shows all"] if more else table

    if watch > 0 and not json:
        repeat(lines, watch)
    else:
        show({"sessions": sorted(rows(), key=SORTS[sort])} if json else None, json, lines)
    return 0


def _is_wanted(
    row: Answer, state: str | None, lane: str | None, key: str | None, match: str | None
) -> bool:
    pairs = (("state", state), ("lane", lane), ("tenant", key))
    if any(wanted is not None and row.get(name) != wanted for name, wanted in pairs):
        return False
    return match is None or match in (row.get("name") or "") or match in row["session_id"]


SORTS: dict[str, Callable[[Answer], Any]] = {
    "used": lambda row: -(row.get("used_s") or 0),
    "tokens": lambda row: -row["tokens"],
    "name": lambda row: (row.get("name") is None, row.get("name")),
    "state": lambda row: row["state"],
    "key": lambda row: row.get("tenant") or "",
}
ID_CHARS = 15  # of an id in a narrow table: enough for every command
COLUMNS = (
    Column("session", flexible=True),
    Column("name", 1, flexible=True),
    Column("key", 4),
    Column("state"),
    Column("class", 5),
    Column("lane", 3),
    Column("tokens", right=True),
    Column("reused", 6, right=True),
    Column("used", 2, right=True),
    Column("parked", 7, flexible=True),
    Column("pages with", 8, flexible=True),
    Column("reason", 9, flexible=True),
)


def _listed(row: dict[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    prompt, used = row.get("tokens_prompt"), row.get("used_s")
    session = row["session_id"]
    return {
        **row,
        "session": session[:ID_CHARS] if 0 < width() < WIDE else session,
        "key": row.get("tenant"),
        "reused": f"{row['tokens_reused']}/{prompt}" if prompt else None,
        "used": render.age(max(0.0, time.time() - used)) if used else None,
        "parked": render.parked(row, time.time()),
        "pages with": render.held_lines(row).get("pages with"),
    }


@sessions.command
def rm(
    session: SessionId,
    /,
    *more: SessionId,
    key_name: KeyName = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    gone: list[Answer] = []
    try:
        for name in (session, *more):
            gone.append(_ask(operations.DROP, admin_socket, session=name, tenant=key_name))
            if not json:
                print(f"{gone[-1]['session_id']}  dropped, {gone[-1]['tokens']:,} tokens")
    finally:  # what is gone is printed even when the next name is refused
        if json and gone:
            print_json({"dropped": gone})
    return 0


rm.__doc__ = operations.DROP.synopsis


OUTSIDE: dict[str, Callable[..., int]] = {}  # commands that do not begin with `sessions`
for _row in OPERATIONS:
    *_parents, _name = _row.command
    if not _parents:
        OUTSIDE[_name] = _command(_row)
    elif _row is not operations.DROP:  # `rm` takes several sessions
        sessions.command(_command(_row), name=_name)


# ------------------------------------------------------------------- answers as lines, per row


def _move_lines(found: Answer, _: Given) -> list[str]:
    return [f"{found['session_id']}  {render.move_line(found)}"]


def _show_lines(found: Answer, _: Given) -> list[str]:
    plain = {name: value for name, value in found.items() if name not in UNSHOWN}
    if (waits := render.parked(found, time.time())) is not None:
        plain["parked"] = waits
    if used := found.get("used_s"):
        plain["used"] = render.ago(time.time() - used)
    plain |= render.held_lines(found)
    lines: list[str] = []
    for name, value in plain.items():
        shown = ", ".join(map(str, cast("list[object]", value))) if name in LISTS else value
        lines.append(f"{name:<18} {'-' if shown in ('', None) else shown}")
    lines += ["", *table_lines(found["turns"], "no turns")]
    return [*lines, "", *render.why_lines(found["why"])] if found.get("why") else lines


def _park_lines(found: Answer, _: Given) -> list[str]:
    return [f"{found['session_id']}  {found['state']}, {found['tokens']:,} tokens kept"]


def _fork_lines(found: Answer, given: Given) -> list[str]:
    new_id = given.get("new_id")
    name = f" (clients may call it {new_id!r})" if new_id else ""
    return [
        f"{found['session_id']}{name}  {found['tokens']:,} tokens,"
        f" {found['pages_shared']:,} pages shared with {found['forked_from']}"
    ]


def _message_lines(found: Answer, _: Given) -> list[str]:
    if not found["messages"]:
        return [found.get("text") or "the session has no history"]
    return render.message_lines(found["messages"])


LINES: dict[str, Callable[[Answer, Given], list[str]]] = {
    operations.PROMOTE.name: _move_lines,
    operations.DEMOTE.name: _move_lines,
    operations.EXPLAIN.name: lambda found, _: render.explain_lines(found),
    operations.SHOW.name: _show_lines,
    operations.WHY.name: lambda found, _: render.why_lines(found),
    operations.MESSAGES.name: _message_lines,
    operations.PARK.name: _park_lines,
    operations.FORK.name: _fork_lines,
}
