"""`doctor`: what is wrong with this machine, the configuration, the daemon and its peers, each with
its fix."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from batchengine.core import BatchEngineError
from service.admin.client import admin
from service.cli import render
from service.cli.machine.proxies import proxy_trouble
from service.cli.options import (
    URL_DEFAULT,
    ConfigFile,
    Debug,
    Json,
    Socket,
    admin_path,
    instance_of,
    show,
)
from service.cli.store import DAY_S, UNUSED_DAYS

FILES_WANTED = 4096
OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Diagnosis(NamedTuple):
    """One thing that was looked at. `fix` is empty where nothing has to be done."""

    state: str
    about: str
    text: str
    fix: str = ""


def doctor(
    *,
    config: ConfigFile = None,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Look for what is wrong with machine, configuration, daemon and peers, and say the fix."""
    path = admin_path(admin_socket)
    found = [*_machine(), *_configuration(None if config is None else str(config), path)]
    found += _daemon(path)
    answer = {"ok": all(one.state != PROBLEM for one in found)}
    rows = [one._asdict() for one in found]
    show({**answer, "findings": rows}, json, lambda: map(_line, found))
    return 0 if answer["ok"] else 1


def _line(one: Diagnosis) -> str:
    return f"{one.state:<8} {one.about:<7} {one.text}" + (f". Fix: {one.fix}" if one.fix else "")


def _of(about: str, error: BatchEngineError) -> Diagnosis:
    why = f"{error.what}: {error.why}" if error.why else error.what
    return Diagnosis(PROBLEM, about, f"{error.code} {why}", error.fix)


def _machine() -> Iterator[Diagnosis]:
    """The kernels of this processor, and the limits of this user."""
    try:
        import kernels

        yield Diagnosis(OK, "machine", f"kernels for {kernels.isa()}")
    except ImportError as error:
        yield Diagnosis(PROBLEM, "machine", f"no kernels: {error}", "build them: make native")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < FILES_WANTED:
        fix = f"LimitNOFILE=65536 in the unit, or ulimit -Hn {FILES_WANTED}"
        yield Diagnosis(WARNING, "machine", f"{hard} open files at most: few streams", fix)
    if trouble := proxy_trouble(URL_DEFAULT):
        yield Diagnosis(WARNING, "machine", *trouble)


def _configuration(path: str | None, admin_socket: str) -> Iterator[Diagnosis]:
    """What `serve` would refuse. The daemon that runs keeps its address: that is no finding."""
    from batchengine import config as configuration
    from batchengine import errors
    from service.cli.machine.check import check

    try:
        name = instance_of(admin_socket)
        own = {"instance": name} if name else {}
        given = {"server.admin_socket": admin_socket, **own}
        loaded = configuration.load(path, given, is_served=False)
        found = check(loaded, may_run=True)
    except BatchEngineError as error:
        yield _of("config", error)
        return
    problems = [e for e in found.problems if path or e.code != errors.NO_MODEL.code]
    for error in problems:
        yield _of("config", error)
    for text in found.warnings:
        yield Diagnosis(WARNING, "config", text)
    if not problems:
        yield Diagnosis(OK, "config", path or "built-in defaults")
    yield from _weights(loaded.cache_dir)


def _weights(folder: str) -> Iterator[Diagnosis]:
    """Packed copies of models that were not served for long."""
    from batchengine.weights.cache import list_uses

    before_s = time.time() - UNUSED_DAYS * DAY_S
    old = [use for use in list_uses(Path(folder)) if use.used_s < before_s and not use.is_mapped]
    if old:
        models = f"{len(old)} packed model" + "s" * (len(old) != 1)
        size = render.size(sum(use.size_bytes for use in old))
        text = f"{folder}: {models}, {size}, unused for {UNUSED_DAYS} days"
        yield Diagnosis(WARNING, "disk", text, "batchengine store weights --remove")


def _daemon(path: str) -> Iterator[Diagnosis]:
    """The running daemon: its state, its lanes, its troubles, its peers."""
    try:
        status: dict[str, Any] = admin(path, "status")["status"]
    except BatchEngineError as error:
        yield Diagnosis(WARNING, "daemon", f"{error.what}: {error.why}", error.fix)
        return
    facts = f"{status['state']}, {status['model'] or 'loading'} at {status['address']}"
    fix = "batchengine drain --undo, or stop it" if status["state"] == "leaving" else ""
    if fix:
        facts += ": it was drained, and takes no new sessions"
    yield Diagnosis(OK if status["state"] == "ready" else WARNING, "daemon", facts, fix)
    for trouble in status["stats"].get("troubles", ()):
        yield Diagnosis(PROBLEM, "daemon", str(trouble), "see the daemon's log")
    if status["stats"].get("peers"):
        for row in admin(path, "peers")["peers"]["peers"]:
            is_up = row["state"] == "up"
            why = f"{row['name']} is {row['state']}" + (f": {row['why']}" if row["why"] else "")
            fix = "" if is_up else "see `batchengine peers status` on both sides"
            yield Diagnosis(OK if is_up else WARNING, "peers", why, fix)
