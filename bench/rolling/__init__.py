"""Three linked daemons under load are drained, stopped and started again, one after the other.

Each daemon has a client with short sessions; the first one also has a session whose KV no daemon
may keep alone. A client that is refused, or whose answer breaks off, sends its request again.
Counted are sessions that the ledger lacks or has with other turns than the client got, and answers
that differ from those of a daemon that is alone and is not disturbed. Both must be 0.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchengine.core import BatchEngineError, Kind
from bench import report
from service.admin.client import Client, admin
from service.cli import chat
from service.cli.local.child import ChildDaemon, stop_on_signals
from service.cli.local.cluster import Cluster, Node
from service.cli.options import POCKET

KV_PAGES, HOLD_PAGES = 24, 12
LONG_TURNS = 6  # in which the long session grows by four pages each
TURNS = {"long": 24, "short": 12}  # of one session
PAUSE_S = {"long": 1.0, "short": 0.3}  # between two turns
TURN_S_MAX = 60.0  # for one answer, through all refusals
DRAIN_S = 10.0
POLL_S = 0.1
OPTIONS = chat.Options(temperature=0.0, max_tokens=40)
NOTES = "Note: the blue kettle is on shelf number {}."


@dataclass
class Session:
    """The messages of one session as its client has them, and how many answers it got."""

    name: str
    node: Node
    history: list[chat.Message] = field(default_factory=list[chat.Message])
    turns: int = 0
    is_dropped: bool = False


@dataclass
class Load:
    """What the clients have done."""

    sessions: list[Session] = field(default_factory=list[Session])
    again: int = 0  # requests that were sent again
    stop: threading.Event = field(default_factory=threading.Event)
    failed: list[str] = field(default_factory=list[str])
    gone: list[str] = field(default_factory=list[str])
    lock: threading.Lock = field(default_factory=threading.Lock)


def questions(name: str) -> Iterator[str]:
    """The user's messages of a session: those of a long one are long at first."""
    for turn in itertools.count(1):
        if name.startswith("long") and turn <= LONG_TURNS:
            yield " ".join(NOTES.format(turn * 1000 + i) for i in range(75))
        else:
            yield f"Tell me something about the number {turn}."


def client(load: Load, node: Node, kind: str) -> None:
    """Has one session after the other until `load.stop`; a long one is dropped at its end."""
    model = node.client.models()[0]
    for number in itertools.count():
        session = Session(f"{kind}-{number}", node)
        load.sessions.append(session)
        for question in itertools.islice(questions(session.name), TURNS[kind]):
            if load.stop.wait(PAUSE_S[kind]):
                return
            history = [*session.history, {"role": "user", "content": question}]
            text = answer(load, session, model, history)
            if text is None:
                load.failed.append(f"{session.name} on {node.name}: turn {session.turns + 1}")
                return
            session.history = [*history, {"role": "assistant", "content": text}]
            session.turns += 1
        if kind == "long":
            load.gone += lost([session])  # before it makes room for the next one
            session.is_dropped = bool(operate(session, "drop"))


def answer(load: Load, session: Session, model: str, history: list[chat.Message]) -> str | None:
    """The whole answer, by as many requests as it takes; None if TURN_S_MAX was not enough."""
    deadline = time.monotonic() + TURN_S_MAX
    while time.monotonic() < deadline:
        try:
            reply = chat.read(session.node.client, model, history, session.name, OPTIONS)
        except BatchEngineError:
            reply = None
        if reply is not None and reply.finish_reason in ("stop", "length"):
            return reply.text
        with load.lock:
            load.again += 1
        time.sleep(POLL_S)
    return None


def restart(cluster: Cluster, node: Node) -> str:
    """Drains, stops and starts one daemon; returns what happened, as a line."""
    began = time.monotonic()
    found = admin(node.socket, "drain")["drain"]
    pages = sum(row["pages"] for row in found["given"])
    while not found["over"] and time.monotonic() < began + DRAIN_S:
        time.sleep(POLL_S)
        found = admin(node.socket, "drain", action="show")["drain"]
    left = sum(row["pages"] for row in found["given"])
    drained = time.monotonic()
    code = cluster.restart(node)
    cluster.wait_linked()
    if code:
        raise RuntimeError(f"{node.name} ended with exit code {code}")
    return (
        f"{node.name}: drained in {drained - began:.1f} s, {pages} pages of peers and {left} left,"
        f" {len(found['requests'])} requests left, again linked {time.monotonic() - drained:.1f} s"
        " later"
    )


def operate(session: Session, command: str) -> dict[str, Any]:
    """Runs a command on a session, once its daemon answers. Raises BatchEngineError."""
    deadline = time.monotonic() + TURN_S_MAX
    while True:
        try:
            return admin(session.node.socket, command, session=session.name, patience_s=TURN_S_MAX)
        except BatchEngineError as error:
            if error.kind is Kind.NOT_FOUND or time.monotonic() > deadline:
                raise
        time.sleep(POLL_S)


def lost(sessions: Iterable[Session]) -> list[str]:
    """Sessions that their daemon does not know, or with other turns than the client got."""
    found: list[str] = []
    for session in sessions:
        if not session.turns or session.is_dropped:
            continue
        try:
            detail = operate(session, "session")["session"]
        except BatchEngineError as error:
            found.append(f"{session.name} on {session.node.name}: {error}")
            continue
        ended = [turn for turn in detail["turns"] if turn["status"] == "done"]
        if len(ended) < session.turns:
            found.append(
                f"{session.name} on {session.node.name}: {len(ended)} of {session.turns} turns"
            )
    return found


def wrong(load: Load, model_path: Path) -> list[str]:
    """Answers that differ from those of an undisturbed daemon."""
    found: list[str] = []
    known: dict[str, str] = {}
    with ChildDaemon(model_path, lambda _: None) as alone:
        asked = Client(alone.wait_ready())
        model = asked.models()[0]
        for session in load.sessions:
            history: list[chat.Message] = []
            for question, got in zip(session.history[::2], session.history[1::2], strict=True):
                history.append(question)
                key = repr(history)
                if key not in known:
                    name = f"{session.name}-{session.node.name}"
                    known[key] = chat.read(asked, model, history, name, OPTIONS).text
                if known[key] != got["content"]:
                    found.append(f"{session.name} on {session.node.name}: {got['content']!r:.80}")
                    break
                history.append(got)
    return found


def run(rounds: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All rounds; returns the numbers of the RESULT line."""
    load = Load()
    with Cluster(POCKET, KV_PAGES, HOLD_PAGES) as cluster:
        cluster.start(3, folder)
        cluster.wait_linked()
        first = cluster.nodes[0]
        kinds = [(first, "long"), *((node, "short") for node in cluster.nodes)]
        clients = [
            threading.Thread(target=client, args=(load, node, kind), daemon=True)
            for node, kind in kinds
        ]
        for thread in clients:
            thread.start()
        try:
            for _ in range(rounds):
                wait_for_pages(first)
                for node in cluster.nodes:
                    say(restart(cluster, node))
        finally:
            load.stop.set()
            for thread in clients:
                thread.join(TURN_S_MAX)
        gone = [*load.gone, *lost(load.sessions)]
        cluster.stop()
    bad = wrong(load, POCKET)
    for line in [*load.failed, *gone, *bad]:
        say(f"FAILED {line}")
    return {
        "restarts": rounds * 3,
        "sessions": len(load.sessions),
        "turns": sum(session.turns for session in load.sessions),
        "sent_again": load.again,
        "unanswered": len(load.failed),
        "lost": len(gone),
        "wrong": len(bad),
    }


def wait_for_pages(node: Node) -> None:
    """Waits until peers keep pages of the long session."""
    deadline = time.monotonic() + TURN_S_MAX
    while not admin(node.socket, "status")["status"]["stats"]["pages_taken"]:
        if time.monotonic() > deadline:
            raise RuntimeError("no page of the long session has gone to a peer")
        time.sleep(POLL_S)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench rolling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="each restarts every daemon once")
    parser.add_argument("--json")
    args = parser.parse_args(arguments)
    stop_on_signals()
    with tempfile.TemporaryDirectory(prefix="be-") as folder:
        found = run(args.rounds, Path(folder), print)
    report.finish(found, details={}, json_path=args.json)
    return int(bool(found["unanswered"] or found["lost"] or found["wrong"]))
