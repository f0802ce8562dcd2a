"""`cluster demo`: several linked daemons on this host, in folders that go away at the end.

Each daemon has an authority's certificate and a KV budget of a few pages, and the cores of the host
are divided among them. Ends its daemons however it ends itself.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from batchengine import errors
from batchengine.child.command import ROOT
from batchengine.core import PAGE_TOKENS, BatchEngineError
from service.admin.client import Client, admin
from service.cli import chat, render
from service.cli.child import ChildDaemon, new_scratch, remove_scratch, stop_on_signals
from service.cli.options import Debug, table_lines

MODEL = ROOT / "pocket" / "pocket-q4_0.gguf"
NODES_MIN, NODES_MAX = 2, 8
KV_PAGES = 12  # of 256 tokens, that a daemon keeps
HOLD_PAGES = 8  # of them, for sessions of its peers at most
TURN_PAGES = 4  # by which the long conversation grows in a turn
NODE_BYTES = 256 << 20  # processes of one daemon, beside weights and KV
READY_S = 300.0  # until all daemons serve
PEERS = "peers"  # the folder of certificates in that of a daemon
LINKED_S = 30.0  # and then until all links are up
WATCH_S = 0.5
QUESTION = "Tell me a story."
OPTIONS = chat.Options(temperature=0.0, max_tokens=48)
LONG = "long"  # the session of the long conversation
PLACES = ("shelf", "garden", "cellar", "window", "kitchen", "station")
THINGS = ("parcel", "lamp", "letter", "bicycle", "map", "kettle", "coat")

cluster = cyclopts.App(name="cluster", help="Several daemons on this host: demo.")


def add(app: cyclopts.App) -> None:
    """Adds the commands of this module to `app`."""
    app.command(cluster)


@cluster.command
def demo(
    *,
    nodes: Annotated[int, Parameter(help="How many daemons: 2 to 8.")] = 3,
    model: Annotated[
        Path | None, Parameter(help="The GGUF file that all serve; by default the bundled one.")
    ] = None,
    port: Annotated[
        int | None,
        Parameter(help="HTTP port of the first daemon, the next ones follow; else free ones."),
    ] = None,
    keep: Annotated[
        Path | None, Parameter(help="Folder for stores and logs; it stays, and can be used again.")
    ] = None,
    once: Annotated[
        bool,
        Parameter(negative=(), help="End after the conversation: exit code 0 = all went well."),
    ] = False,
    debug: Debug = False,
) -> int:
    """Start linked daemons on this host, talk to them, and leave them to you until Ctrl-C."""
    from batchengine.config import check_model_file

    if not NODES_MIN <= nodes <= NODES_MAX:
        raise errors.NODE_COUNT(count=nodes, least=NODES_MIN, most=NODES_MAX)
    path = MODEL if model is None else model.absolute()
    check_model_file(str(path))
    stop_on_signals()
    page_bytes = _page_bytes(path)
    _check_memory(path, nodes, page_bytes)
    with contextlib.ExitStack() as stack:
        running = _Cluster(path, page_bytes, stack)
        running.start(_places(nodes), keep, port)
        running.wait_linked()
        print("\n".join(["", *running.table(), ""]))
        running.ask_two()
        running.converse()
        if not once:
            print("\n".join(["", *running.hints()]))
            running.watch()
        print("\nstopping")
        running.stop()
    print("cluster demo: done")
    return 0


@dataclass(frozen=True, slots=True)
class _Place:
    """The name of one daemon, and where it listens for peers."""

    name: str
    peer_port: int


@dataclass(frozen=True, slots=True)
class _Node:
    """One daemon of the cluster."""

    name: str
    daemon: ChildDaemon
    client: Client

    def links(self) -> list[dict[str, Any]]:
        """Its row of every peer."""
        return admin(self.daemon.admin_socket, "peers")["peers"]["peers"]


class _Cluster:
    """The daemons, and what is said about them."""

    def __init__(self, model: Path, page_bytes: int, stack: contextlib.ExitStack) -> None:
        """`stack` stops every daemon that was started."""
        self._model = model
        self._page_bytes = page_bytes
        self._stack = stack
        self.nodes: list[_Node] = []

    def start(self, places: Sequence[_Place], keep: Path | None, port: int | None) -> None:
        """Starts all daemons: the first one packs the weights, which the others then map, too.

        Their folders are those of `keep`, or new ones, which go with them.
        """
        first: Path | None = None
        started: list[tuple[_Place, ChildDaemon]] = []
        for index, place in enumerate(places):
            folder = new_scratch() if keep is None else _made(keep.absolute() / place.name)
            if keep is None:
                self._stack.callback(remove_scratch, folder)
            first = first or folder
            _certify(first / PEERS, place.name, folder / PEERS)
            config = folder / "batchengine.toml"
            config.write_text(self._settings(index, places))
            options = ["--config", str(config), "--cache-dir", str(first / "cache")]
            options += ["--peer-listen", f"127.0.0.1:{place.peer_port}"]
            options += ["--peers-dir", str(folder / PEERS)]
            options += [] if port is None else ["--port", str(port + index)]
            daemon = ChildDaemon(
                self._model, _shown(place.name), *options, scratch=folder, keeps=keep is not None
            )
            started.append((place, self._stack.enter_context(daemon)))
            if index == 0:
                daemon.wait_ready(READY_S)
        for place, daemon in started:
            client = Client(daemon.url or daemon.wait_ready(READY_S))
            self.nodes.append(_Node(place.name, daemon, client))

    def _settings(self, index: int, places: Sequence[_Place]) -> str:
        """The configuration file of one daemon: cores, KV budget, and where its peers are."""
        from batchengine.config.machine import Machine

        cores = Machine.here().cores
        share = max(1, len(cores) // len(places))
        own = [cores[(index * share + i) % len(cores)] for i in range(share)]
        lines = ["[[lane]]", f"cores = {own}", "[store]"]
        lines += [f"budget_bytes = {KV_PAGES * self._page_bytes}"]
        lines += ["[peers]", f"hold_bytes = {HOLD_PAGES * self._page_bytes}"]
        for place in places:
            if place is not places[index]:
                lines += [f"[peers.{place.name}]", f'address = "127.0.0.1:{place.peer_port}"']
        return "\n".join(lines) + "\n"

    def wait_linked(self) -> None:
        """Waits until every link is up and was measured; raises DEMO_FAILED with what is not."""
        deadline = time.monotonic() + LINKED_S
        while True:
            missing = [
                f"{node.name} to {row['name']}: {row['why'] or row['state']}"
                for node in self.nodes
                for row in node.links()
                if row["state"] != "up" or row["rtt_ms"] is None
            ]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise errors.DEMO_FAILED(what=f"not all links are up: {'; '.join(missing)}")
            time.sleep(0.05)

    def table(self) -> list[str]:
        """One row per daemon."""
        rows: list[dict[str, Any]] = []
        for node in self.nodes:
            links = node.links()
            trips = [row["rtt_ms"] for row in links if row["rtt_ms"] is not None]
            rows.append(
                {
                    "node": node.name,
                    "pid": node.daemon.pid,
                    "address": node.client.url,
                    "kv": render.size(KV_PAGES * self._page_bytes),
                    "links": f"{sum(r['state'] == 'up' for r in links)} of {len(links)} up",
                    "round trip": f"{max(trips):.3f} ms" if trips else None,
                }
            )
        return table_lines(rows, "")

    def ask_two(self) -> None:
        """Asks the first and the last daemon the same; raises DEMO_FAILED if answers differ."""
        model = self.nodes[0].client.models()[0]
        answers: list[str] = []
        for node in (self.nodes[0], self.nodes[-1]):
            print(f"{node.name}  {QUESTION}\n  ", end="", flush=True)
            history = [{"role": "user", "content": QUESTION}]
            turn = chat.ask(node.client, model, history, "demo", OPTIONS)
            if not turn.text.strip():
                raise errors.DEMO_FAILED(what=f"{node.name} answered nothing")
            print(f"  [{turn.facts()}]\n")
            answers.append(turn.text)
        if answers[0] != answers[-1]:
            raise errors.DEMO_FAILED(what="two daemons gave different answers")
        print("the same question has the same answer on both\n")

    def converse(self) -> None:
        """Has a conversation whose KV is more than any one daemon keeps, and says after each turn
        which daemon has how many of its pages. Raises DEMO_FAILED if some have none at the end."""
        first = self.nodes[0]
        model, context = first.client.models()[0], first.client.context_tokens()
        wanted = KV_PAGES + HOLD_PAGES * (len(self.nodes) - 2)
        print(
            f"a conversation on {first.name} of about {wanted * PAGE_TOKENS:,} tokens of KV; a"
            f" daemon keeps {KV_PAGES * PAGE_TOKENS:,}"
        )
        if context < (wanted + TURN_PAGES) * PAGE_TOKENS:
            raise errors.DEMO_FAILED(what=f"a session may have {context:,} tokens only")
        history: list[chat.Message] = []
        tokens, n_notes = 0, 64
        while tokens < wanted * PAGE_TOKENS:
            history.append({"role": "user", "content": _notes(len(history), n_notes)})
            turn = chat.read(first.client, model, history, LONG, OPTIONS)
            history.append({"role": "assistant", "content": turn.text})
            before, tokens = tokens, turn.usage["total_tokens"]
            n_notes = max(1, n_notes * TURN_PAGES * PAGE_TOKENS // max(1, tokens - before))
            print(f"  {tokens:>6,} tokens  {self._places()}  [{turn.facts()}]", flush=True)
        found = {one["peer"] for one in self._route()}
        missing = [node.name for node in self.nodes[1:] if node.name not in found]
        if missing:
            raise errors.DEMO_FAILED(what=f"{', '.join(missing)} keep no page of it")

    def _route(self) -> list[dict[str, Any]]:
        """Which daemon has how many pages of the long conversation, in the order of its tokens."""
        first = self.nodes[0]
        found = admin(first.daemon.admin_socket, "session", session=LONG)["session"]
        return found.get("route", [{"peer": "", "pages": found["pages"]}])

    def _places(self) -> str:
        own = self.nodes[0].name
        return ", ".join(f"{one['peer'] or own}: {one['pages']} pages" for one in self._route())

    def hints(self) -> list[str]:
        """Commands to play with."""
        first, other = self.nodes[0], self.nodes[1]
        body = '{"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64}'
        sock = f"--admin-socket {first.daemon.admin_socket}"
        return [
            "The daemons run until Ctrl-C. In another terminal:",
            f"  batchengine chat --url {first.client.url}",
            f"  curl -s {first.client.url}/chat/completions -H 'Content-Type: application/json' \\",
            f"    -d '{body}'",
            f"  batchengine ps {sock}",
            f"  batchengine sessions show {LONG} {sock}",
            f"  batchengine peers status {sock}",
            f"  kill -9 {other.daemon.pid}        # {other.name} dies: what the others say of it"
            " comes here",
        ]

    def watch(self) -> None:
        """Prints which daemons end and which links change, until Ctrl-C or until none is left."""
        seen: dict[tuple[str, str], str] = {}
        alive = list(self.nodes)
        with contextlib.suppress(KeyboardInterrupt):
            while alive:
                for node in list(alive):
                    if (code := node.daemon.exit_code) is not None:
                        alive.remove(node)
                        node.daemon.stop()  # removes its folder
                        print(f"{node.name} has ended: {_end(code)}", flush=True)
                        continue
                    with contextlib.suppress(BatchEngineError):  # it ends just now
                        for row in node.links():
                            self._say_change(seen, node.name, row)
                time.sleep(WATCH_S)

    def stop(self) -> None:
        """Stops all daemons at once. Raises DEMO_FAILED for one that does not end well."""
        alive = [node for node in self.nodes if node.daemon.exit_code is None]
        for node in alive:
            node.daemon.begin_stop()
        for node in alive:
            if (code := node.daemon.stop()) != 0:
                raise errors.DEMO_FAILED(what=f"{node.name} ended badly: {_end(code)}")

    def _say_change(self, seen: dict[tuple[str, str], str], name: str, row: dict[str, Any]) -> None:
        state = "down" if row["state"] in ("dialling", "greeting") else row["state"]
        before, seen[name, row["name"]] = seen.get((name, row["name"]), "up"), state
        if before != state:
            why = f": {row['why']}" if row["why"] else ""
            print(f"{name} sees {row['name']} {state}{why}", flush=True)


def _notes(seed: int, count: int) -> str:
    """A message of so many short sentences."""
    lines = [
        f"Note {seed * 1000 + i}: the {THINGS[(seed + i) % len(THINGS)]} is in the"
        f" {PLACES[(seed * 5 + i * 3) % len(PLACES)]}."
        for i in range(count)
    ]
    return " ".join([*lines, "Where is the lamp?"])


def _shown(name: str) -> Callable[[str], None]:
    """Prints the lines of a daemon's start, of those after the first one only the last."""

    def show(line: str) -> None:
        words = line.strip()
        if words.startswith("ready") or (name == "node-1" and words.startswith("[")):
            print(f"{name}  {words}", flush=True)

    return show


def _end(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"


def _places(nodes: int) -> list[_Place]:
    """A name and a free port for each daemon."""
    with contextlib.ExitStack() as stack:
        open_ports = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            for _ in range(nodes)
        ]
    return [_Place(f"node-{index}", port) for index, port in enumerate(open_ports, 1)]


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise errors.PEER_UNWRITABLE(path=folder, why=why) from None
    return folder


def _certify(authority: Path, name: str, folder: Path) -> None:
    """As `peers init` and `peers add` do, unless the daemon has a certificate already."""
    from batchengine.peers import certificates
    from batchengine.peers.identity import OWN

    if (folder / OWN).exists():
        return
    if folder == authority:
        certificates.create_authority(folder, name)
        return
    bundle = certificates.issue_bundle(authority, name)
    certificates.import_bundle(folder, bundle)
    bundle.unlink()


def _page_bytes(model: Path) -> int:
    """Bytes of one KV page of a model file. Raises BatchEngineError for one that is none."""
    from batchengine.gguf import GgufFile
    from batchengine.weights import read_spec
    from kv_store.layout import PageLayout

    with GgufFile(str(model)) as gguf:
        spec = read_spec(gguf)
    return PageLayout(spec.n_layer, spec.attention.n_kv_head, spec.attention.head_dim).page_bytes


def _check_memory(model: Path, nodes: int, page_bytes: int) -> None:
    """Raises TOO_LITTLE_MEMORY unless the daemons fit beside what runs already."""
    import psutil

    weights = model.stat().st_size
    needed = weights + nodes * (NODE_BYTES + 2 * KV_PAGES * page_bytes)
    free = int(psutil.virtual_memory().available)
    if free < needed:
        raise errors.TOO_LITTLE_MEMORY(
            nodes=nodes, needed=render.size(needed), free=render.size(free)
        )
