"""`cluster demo`: several linked daemons on this host, in folders that go away at the end.

Each daemon has an authority's certificate and a KV budget of a few pages, and the cores of the host
are divided among them. Ends its daemons however it ends itself.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from batchengine import errors
from batchengine.core import PAGE_TOKENS, BatchEngineError
from service.admin.client import Client, admin
from service.cli import chat, render
from service.cli.local.child import ChildDaemon, new_scratch, remove_scratch, stop_on_signals
from service.cli.options import POCKET, Debug
from service.cli.tables import table_lines

NODES_MIN, NODES_MAX = 2, 8
KV_PAGES = 12  # of 256 tokens, that a daemon keeps
HOLD_PAGES = 12  # of them, for sessions of its peers at most: three super-pages
FREE_FLOOR_BYTES = 256 << 20  # of disk: what the demonstration adds is small
OPEN_PAGES = 6  # in addition, while they are computed
TURN_PAGES = 4  # by which the long conversation grows in a turn
NODE_BYTES = 256 << 20  # processes of one daemon, beside weights and KV
PEERS, CONFIG = "peers", "batchengine.toml"  # in the folder of a daemon
LINKED_S = 30.0  # until all links are up, once all daemons serve
WATCH_S = 0.5
PORTS = range(10_000, 32_768)
QUESTION = "Tell me a story."
OPTIONS = chat.Options(temperature=0.0, max_tokens=48)
NOTED = chat.Options(temperature=0.0, max_tokens=64, ignore_eos=True)  # time to move pages
LONG = "long"  # the session of the long conversation
PLACES = ("shelf", "garden", "cellar", "window", "kitchen", "station")
THINGS = ("parcel", "lamp", "letter", "bicycle", "map", "kettle", "coat")

cluster = cyclopts.App(name="cluster", help="Several daemons on this host: demo.")


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
    path = POCKET if model is None else model.absolute()
    check_model_file(str(path))
    stop_on_signals()
    with Cluster(path) as running:
        running.start(nodes, keep, port)
        running.wait_linked()
        print("\n".join(["", *running.table(), ""]), flush=True)
        running.ask_two()
        running.converse()
        if not once:
            print("\n".join(["", *running.hints()]), flush=True)
            running.watch()
        print("\nstopping")
        running.stop()
    print("cluster demo: done")
    return 0


@dataclass(eq=False, slots=True)
class Node:
    """One daemon of a cluster, which may be stopped and started again.

    `peer_port` and `port`, that of HTTP, stay the same. `keeps`: its folder stays at the end.
    """

    name: str
    port: int
    peer_port: int
    folder: Path
    keeps: bool
    daemon: ChildDaemon

    @property
    def client(self) -> Client:
        return Client(f"http://127.0.0.1:{self.port}/v1")

    @property
    def socket(self) -> str:
        """The daemon's admin socket."""
        return self.daemon.admin_socket

    def links(self) -> list[dict[str, Any]]:
        """The daemon's rows of its peers."""
        return admin(self.socket, "peers")["peers"]["peers"]


class Cluster:
    """Linked daemons, and what is said about them; a context manager that ends them."""

    def __init__(self, model: Path, kv_pages: int = KV_PAGES, hold_pages: int = HOLD_PAGES) -> None:
        """`kv_pages`: of 256 tokens, that each daemon keeps, `hold_pages` of them for its peers.

        Raises BatchEngineError for a file that is no model.
        """
        self._model = model
        self._page_bytes = page_bytes(model)
        self._kv_pages = kv_pages
        self._hold_pages = hold_pages
        self.nodes: list[Node] = []

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.daemon.begin_stop()
        for node in self.nodes:
            node.daemon.stop()

    # --------------------------------------------------------------------------- start and end

    def start(self, count: int, keep: Path | None = None, port: int | None = None) -> None:
        """Starts all daemons: the first one packs the weights, which the others then map, too.

        Their folders are in `keep`, or new ones, which go with them. HTTP ports are `port` and the
        following ones, or free ones.
        """
        _check_memory(self._model, count, self._kv_pages * self._page_bytes)
        free = free_ports(2 * count)
        places = {f"node-{index + 1}": free[index] for index in range(count)}
        for index, (name, peer_port) in enumerate(places.items()):
            folder = new_scratch() if keep is None else _made(keep.absolute() / name)
            http = free[count + index] if port is None else port + index
            try:
                first = self.nodes[0].folder if self.nodes else folder
                _certify(first / PEERS, name, folder / PEERS)
                (folder / CONFIG).write_text(self._settings(index, places))
                daemon = self._daemon(folder, peer_port, http, keep is not None, name)
            except BaseException:
                if keep is None:
                    remove_scratch(folder)
                raise
            self.nodes.append(Node(name, http, peer_port, folder, keep is not None, daemon))
            if index == 0:
                daemon.wait_ready()
        for node in self.nodes[1:]:
            node.daemon.wait_ready()

    def restart(self, node: Node) -> int:
        """Stops a daemon whose folder stays, and starts it again; returns its exit code."""
        code = node.daemon.stop()
        node.daemon = self._daemon(node.folder, node.peer_port, node.port, node.keeps, node.name)
        node.daemon.wait_ready()
        return code

    def _daemon(
        self, folder: Path, peer_port: int, port: int, keeps: bool, name: str
    ) -> ChildDaemon:
        cache = (self.nodes[0].folder if self.nodes else folder) / "cache"
        options = ["--config", str(folder / CONFIG), "--cache-dir", str(cache)]
        options += ["--peer-listen", f"127.0.0.1:{peer_port}", "--peers-dir", str(folder / PEERS)]
        options += ["--port", str(port)]
        return ChildDaemon(self._model, _shown(name), *options, scratch=folder, keeps=keeps)

    def _settings(self, index: int, places: Mapping[str, int]) -> str:
        """The configuration file of one daemon: cores, KV budget, and where its peers are."""
        from batchengine.config.machine import Machine

        cores = Machine.here().cores
        share = max(1, len(cores) // len(places))
        own = [cores[(index * share + i) % len(cores)] for i in range(share)]
        lines = ["[[lane]]", f"cores = {own}", f"open_pages = {OPEN_PAGES}", "[store]"]
        lines += [f"budget_bytes = {self._kv_pages * self._page_bytes}"]
        lines += [f"free_floor_bytes = {FREE_FLOOR_BYTES}"]
        lines += ["[peers]", f"hold_bytes = {self._hold_pages * self._page_bytes}"]
        for other, (name, peer_port) in enumerate(places.items()):
            if other != index:
                lines += [f"[peers.{name}]", f'address = "127.0.0.1:{peer_port}"']
        return "\n".join(lines) + "\n"

    def stop(self) -> None:
        """Stops all daemons at once. Raises DEMO_FAILED for one that does not end well."""
        alive = [node for node in self.nodes if node.daemon.exit_code is None]
        for node in alive:
            node.daemon.begin_stop()
        for node in alive:
            if (code := node.daemon.stop()) != 0:
                raise errors.DEMO_FAILED(what=f"{node.name} ended badly: {_end(code)}")

    def wait_linked(self) -> None:
        """Waits until every link, also for data, is up and measured.

        Raises DEMO_FAILED with what is not.
        """
        deadline = time.monotonic() + LINKED_S
        while True:
            missing = [
                f"{node.name} to {row['name']}: {row['why'] or row['data_why'] or row['state']}"
                for node in self.nodes
                for row in node.links()
                if row["state"] != "up" or row["data"] != "up" or row["rtt_ms"] is None
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
                    "kv": render.size(self._kv_pages * self._page_bytes),
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
            print(f"  [{turn.facts()}]\n", flush=True)
            answers.append(turn.text)
        if answers[0] != answers[-1]:
            raise errors.DEMO_FAILED(what="two daemons gave different answers")
        print("the same question has the same answer on both\n")

    def converse(self) -> None:
        """Has a conversation whose KV is more than any one daemon keeps, and says after each turn
        which daemon has how many of its pages. Raises DEMO_FAILED if only the first one has any at
        the end. A daemon whose steps took long beside other programs is given none for a while, and
        short turns may pass between two looks of the first daemon at its pages: then the
        conversation goes on until a turn cannot be computed with the pages of the first one."""
        first = self.nodes[0]
        model, context = first.client.models()[0], first.client.context_tokens()
        wanted = self._kv_pages + self._hold_pages * (len(self.nodes) - 2)
        print(
            f"a conversation on {first.name} of about {wanted * PAGE_TOKENS:,} tokens of KV; the"
            f" budget of a daemon is {self._kv_pages * PAGE_TOKENS:,}"
        )
        most = wanted + OPEN_PAGES + TURN_PAGES  # none of them has room for it alone
        if context < (most + 1) * PAGE_TOKENS:
            raise errors.DEMO_FAILED(what=f"a session may have {context:,} tokens only")
        history: list[chat.Message] = []
        tokens, n_notes, missing = 0, 64, list[str]()
        while tokens < wanted * PAGE_TOKENS or (missing and tokens < most * PAGE_TOKENS):
            if tokens >= wanted * PAGE_TOKENS:
                n_notes = 8
            history.append({"role": "user", "content": _notes(len(history), n_notes)})
            turn = chat.read(first.client, model, history, LONG, NOTED)
            history.append({"role": "assistant", "content": turn.text})
            before, tokens = tokens, turn.usage["total_tokens"]
            n_notes = max(1, n_notes * TURN_PAGES * PAGE_TOKENS // max(1, tokens - before))
            route = self._route()
            places = ", ".join(
                f"{one['peer'] or first.name}: {one['pages']} pages" for one in route
            )
            print(f"  {tokens:>6,} tokens  {places}  [{turn.facts()}]", flush=True)
            found = {one["peer"] for one in route}
            missing = [node.name for node in self.nodes[1:] if node.name not in found]
        if len(missing) == len(self.nodes) - 1:
            raise errors.DEMO_FAILED(what="no other daemon keeps a page of it")
        if missing:
            print(
                f"  no page lies with {', '.join(missing)}: see `batchengine explain`", flush=True
            )

    def _route(self) -> list[dict[str, Any]]:
        """Which daemon has how many pages of the long conversation, in the order of its tokens."""
        first = self.nodes[0]
        found = admin(first.socket, "session", session=LONG)["session"]
        return found.get("route", [{"peer": "", "pages": found["pages"]}])

    def hints(self) -> list[str]:
        """Commands to play with."""
        first, other = self.nodes[0], self.nodes[1]
        body = '{"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 64}'
        sock = f"--admin-socket {first.socket}"
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
                alive = [node for node in alive if self._look_at(node, seen)]
                time.sleep(WATCH_S)

    def _look_at(self, node: Node, seen: dict[tuple[str, str], str]) -> bool:
        """Prints what has changed at a daemon; False: it has ended."""
        if (code := node.daemon.exit_code) is not None:
            node.daemon.stop()  # removes its folder, unless that is kept
            print(f"{node.name} has ended: {_end(code)}", flush=True)
            return False
        with contextlib.suppress(BatchEngineError):  # it ends just now
            for row in node.links():
                self._say_change(seen, node.name, row)
        return True

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


def free_ports(count: int) -> list[int]:
    """TCP ports of loopback that nothing listens on now.

    They are below those that the kernel gives to programs which ask for any: one of those could be
    taken before its daemon listens.
    """
    found: list[int] = []
    with contextlib.ExitStack() as stack:
        for port in random.sample(PORTS, len(PORTS)):
            if len(found) == count:
                break
            with contextlib.suppress(OSError):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(port)
    return found


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


def page_bytes(model: Path) -> int:
    """Bytes of one KV page of a model file. Raises BatchEngineError for one that is none."""
    from batchengine.gguf import GgufFile
    from batchengine.weights import read_spec

    with GgufFile(str(model)) as gguf:
        spec = read_spec(gguf)
    return spec.page_layout.page_bytes


def _check_memory(model: Path, nodes: int, kv_bytes: int) -> None:
    """Raises TOO_LITTLE_MEMORY unless daemons with so many bytes of KV each fit beside what runs
    already."""
    import psutil

    weights = model.stat().st_size
    needed = weights + nodes * (NODE_BYTES + 2 * kv_bytes)  # again for open pages and buffers
    free = int(psutil.virtual_memory().available)
    if free < needed:
        raise errors.TOO_LITTLE_MEMORY(
            nodes=nodes, needed=render.size(needed), free=render.size(free)
        )
