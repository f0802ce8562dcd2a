"""`drain`: the daemon takes no new sessions, and nothing more for its peers, until it is undone.

Waits for what is still there, and says at the end what is left and why. The daemon goes on either
way: stop it afterwards, as its service manager does.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from cyclopts import Parameter

from service.admin.client import admin
from service.cli import render
from service.cli.options import (
    AT_LEAST_0,
    EXIT_FAILED,
    Debug,
    Json,
    Socket,
    admin_path,
    show,
)
from service.cli.tables import table_lines

POLL_S = 0.2
TIMEOUT_S = 60.0
REQUEST_COLUMNS = ("request_id", "session_id", "class", "state", "lane", "completion_tokens")


def drain(
    *,
    undo: Annotated[bool, Parameter(negative=(), help="Take new sessions again.")] = False,
    timeout: Annotated[
        float,
        Parameter(
            validator=AT_LEAST_0,
            help="Seconds to wait for the end of what is there; 0 = do not wait.",
        ),
    ] = TIMEOUT_S,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Take no new sessions, let the others end, and give peers their pages back. Exit code 1 =
    something is left after the timeout."""
    path = admin_path(admin_socket)
    if undo:
        found = admin(path, "drain", action="undo")["drain"]
        show(found, json, lambda: ["new sessions are taken again"])
        return 0
    deadline = time.monotonic() + timeout
    found = admin(path, "drain", action="begin")["drain"]
    said = ""
    while not found["over"] and time.monotonic() < deadline:
        if not json and (line := waiting_line(found)) != said:
            said = line
            print(line, flush=True)
        time.sleep(POLL_S)
        found = admin(path, "drain", action="show")["drain"]
        if not found["leaving"]:
            show(found, json, lambda: ["it was undone meanwhile: new sessions are taken again"])
            return EXIT_FAILED
    show(found, json, lambda: end_lines(found, timeout))
    return 0 if found["over"] else EXIT_FAILED


def waiting_line(found: dict[str, Any]) -> str:
    """What the daemon waits for, in one line."""
    count = len(found["requests"])
    parts = [f"{count:,} request{'s' * (count != 1)}"] if count else []
    parts += [f"a stage computed for {row['owner']}" for row in found["stages"]]
    parts += [f"{row['pages']:,} pages kept for {row['peer']}" for row in found["given"]]
    return f"waits for {', '.join(parts)}"


def end_lines(found: dict[str, Any], timeout: float) -> list[str]:
    """The answer of a drain: nothing is left, or what is left when the time was over."""
    if found["over"]:
        return [
            "drained: no request is left, and no page of a peer. Stop the daemon, or"
            " `batchengine drain --undo`"
        ]
    lines = [f"left after {timeout:g} s; no new session is taken until `batchengine drain --undo`"]
    rows = [{name: row.get(name) for name in REQUEST_COLUMNS} for row in found["requests"]]
    lines += table_lines(rows, "") if rows else []
    lines += [f"a stage for {row['owner']}: {_computed(row)}" for row in found["stages"]]
    return [*lines, *(_given_line(row) for row in found["given"])]


def _computed(row: dict[str, Any]) -> str:
    return f"{row['tokens_computed']:,} of {row['tokens']:,} tokens are computed"


def _given_line(row: dict[str, Any]) -> str:
    """Why pages of a peer's sessions are still here, as far as the peer has said."""
    line = (
        f"{row['pages']:,} pages are kept for sessions of {row['peer']}, which has not taken them"
    )
    if row["state"] != "up":
        return f"{line}: its link is {row['state']}"
    free = render.size(row["kv_free_bytes"])
    return f"{line}: it has {free} of KV free, and runs {row['requests_running']:,} requests"
