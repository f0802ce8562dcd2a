"""Commands about sessions: one per row of `service.operations`, and `sessions`, which lists them.

Each asks the daemon over its admin socket, where every session of every key can be named.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import Annotated, Any, cast

import cyclopts
from cyclopts import Parameter

from service import operations
from service.admin.client import Json as Answer
from service.admin.client import admin
from service.cli import render
from service.cli.options import (
    EXIT_FAILED,
    Debug,
    Json,
    KeyName,
    SessionId,
    Socket,
    admin_path,
    print_json,
    show,
    table_lines,
)
from service.operations import OPERATIONS, Operation

DONE = ("moved", "already there")  # results of a move
LISTS = ("tool_calls",)
# shown below, or in other words
UNSHOWN = (
    "turns", "why", "parked_since", "tool_call_id", "route", "waits_for", "pages_lost", "page_move",
)  # fmt: skip
LISTED = ("state", "class", "lane", "tokens", "reused", "reason")

sessions = cyclopts.App(name="sessions", help="Sessions: list them; show, why, park, fork, rm.")

RequestOrSession = Annotated[str, Parameter(name="ID", help="A request id (req_…) or a session.")]
Given = dict[str, str | None]  # the arguments of an operation


def add(app: cyclopts.App) -> None:
    """Adds the commands of this module to `app`."""
    for operation in OPERATIONS:
        *parents, name = operation.command
        if operation is not operations.DROP:  # `rm` takes several sessions
            (sessions if parents else app).command(_command(operation), name=name)
    app.command(sessions)


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
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """List sessions: where they are, how long, what their last turn reused."""
    rows: list[Answer] = admin(admin_path(admin_socket), "sessions", stored=all)["sessions"]
    has_keys = any(row.get("tenant") for row in rows)
    show(
        {"sessions": rows},
        json,
        lambda: table_lines([_listed(row, has_keys) for row in rows], "no sessions yet"),
    )
    return 0


def _listed(row: dict[str, Any], has_keys: bool) -> dict[str, Any]:
    """One row of the table, with the columns that it needs; `has_keys`: some session has a key."""
    shown = {"session": row["session_id"]}
    if has_keys:
        shown["key"] = row.get("tenant")
    prompt = row.get("tokens_prompt")
    reused = f"{row['tokens_reused']}/{prompt}" if prompt else None
    shown |= {name: row.get(name) for name in LISTED} | {"reused": reused}
    if (places := render.held_lines(row).get("pages with")) is not None:
        shown["pages with"] = places
    if (waits := render.parked(row, time.time())) is not None:
        shown["parked"] = waits
    return shown


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


# ------------------------------------------------------------------- answers as lines, per row


def _move_lines(found: Answer, _: Given) -> list[str]:
    return [f"{found['session_id']}  {render.move_line(found)}"]


def _show_lines(found: Answer, _: Given) -> list[str]:
    plain = {name: value for name, value in found.items() if name not in UNSHOWN}
    if (waits := render.parked(found, time.time())) is not None:
        plain["parked"] = waits
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
    return [f"{one['role']}: {render.plain(one['content'])}" for one in found["messages"]]


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
