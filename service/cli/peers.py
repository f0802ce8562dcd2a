"""`peers`: certificates and addresses of linked daemons, and the state of the links.

`init` and `add` write files that a running daemon notices within a second; they ask no daemon.
Each prints the command that comes next.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import Parameter

from batchengine import errors
from service.admin.client import admin
from service.cli import render
from service.cli.options import ConfigFile, Debug, Json, Socket, admin_path, show
from service.cli.tables import table_lines

MEASURE_S = 120.0  # bandwidth of every link, one after the other
PORT = 7718  # in examples

peers = cyclopts.App(name="peers", help="Links to other daemons: init, add, status.")

PeersDir = Annotated[
    Path | None,
    Parameter(name="--dir", help="Folder of the certificates; the default is where `serve` looks."),
]


@peers.command
def init(
    *,
    name: Annotated[
        str | None, Parameter(help="Name of this host among its peers; by default its host name.")
    ] = None,
    config: ConfigFile = None,
    dir: PeersDir = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Make a certificate authority, and this host's certificate. Once, on one host."""
    from batchengine.peers import certificates

    settings = _settings(config)
    folder = dir or Path(settings.dir)
    own = name or settings.name or _host_name()
    certificates.create_authority(folder, own)
    option = f" --dir {dir}" if dir else ""
    following = f"batchengine peers add NAME HOST:{PORT}{option}"
    lines = [
        f"{folder}: a certificate authority, and the certificate of {own}",
        "Next, for each other host, with its name and the address of its daemon:",
        f"  {following}",
    ]
    show({"name": own, "folder": str(folder), "next": [following]}, json, lambda: lines)
    return 0


@peers.command(name="add")
def add_peer(
    name: Annotated[str, Parameter(help="The other host's name: a-z, 0-9 and -.")],
    address: Annotated[str, Parameter(help="HOST:PORT on which its daemon listens for peers.")],
    /,
    *,
    bundle: Annotated[
        Path | None,
        Parameter(help="The file that `peers add` made for this host where `init` was run."),
    ] = None,
    config: ConfigFile = None,
    dir: PeersDir = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Add a peer. Where `init` was run this also makes the bundle to copy to that host."""
    from batchengine.config.peers import ADDRESS_RULE, split_address
    from batchengine.peers import certificates

    settings = _settings(config)
    folder = dir or Path(settings.dir)
    found = split_address(address)
    if found is None or found[1] == 0:
        raise errors.PEER_ADDRESS(given=address, rule=ADDRESS_RULE)
    own = certificates.own_name(folder) if bundle is None else certificates.bundle_name(bundle)
    if own == name:
        fix = f"this host is {own}: name the other one"
        raise errors.PEER_NAME(given=name, why="it is this host's own name", fix=fix)
    if bundle is not None:
        certificates.import_bundle(folder, bundle)
    made = None
    if bundle is None and certificates.can_issue(folder):
        made = certificates.issue_bundle(folder, name)
    path = certificates.write_peer(folder, name, address)
    lines = [f"{path}: peer {name} at {address}"]
    if made is not None:
        here = _own_address(found, settings.listen)
        following = [
            f"scp {made} {found[0]}:{made.name}",
            f"batchengine peers add {own} {here} --bundle {made.name}",
        ]
        lines += [
            f"{made}: certificate and key of {name}: keep it secret, remove it once copied",
            f"Next, copy it to {name}, and there add this host:",
            *(f"  {line}" for line in following),
        ]
    else:
        folder_option = f" --peers-dir {dir}" if dir else ""
        following = [f"batchengine serve MODEL.gguf --peer-listen 0.0.0.0:{PORT}{folder_option}"]
        lines += [
            "Next, on both hosts (a daemon that runs with --peer-listen has noticed already):",
            f"  {following[0]}",
            "  batchengine peers status",
        ]
    shown = {"name": own, "peer": name, "bundle": made and str(made), "next": following}
    show(shown, json, lambda: lines)
    return 0


@peers.command
def status(
    *,
    bandwidth: Annotated[
        bool, Parameter(negative=(), help="First send at most 16 MiB to each peer, and time it.")
    ] = False,
    admin_socket: Socket = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show every peer: its link, why it is not up, speeds, and whether it computes the same."""
    path = admin_path(admin_socket)
    found = admin(path, "peers", bandwidth=bandwidth or None, patience_s=MEASURE_S)["peers"]
    show(found, json, lambda: status_lines(found))
    return 0


def status_lines(found: dict[str, Any]) -> list[str]:
    """This daemon, its peers with what is wrong with their links, and pipelines under way."""
    tls = "TLS" if found["tls"] else "no TLS"
    lines = [f"{found['name'] or '(no name)'}  listens on {found['listen']}  {tls}"]
    if found["trouble"]:
        lines.append(f"warning  {found['trouble']}")
    if found["connections_refused"]:
        lines.append(
            f"warning  {found['connections_refused']:,} connections came to nothing, the last from"
            f" {found['last_refused']}"
        )
    rows = found["peers"]
    lines += table_lines([_row(row) for row in rows], "no peers: `batchengine peers add` adds one")
    lines += [f"{row['name']}: {row['why']}" for row in rows if row["why"]]
    lines += [_pipeline_line(row) for row in found.get("pipelines", ())]
    lines += [
        f"{row['name']}: no data link: {row['data_why']}"
        for row in rows
        if row.get("data_why") and not row["why"]
    ]
    return lines


def _pipeline_line(row: dict[str, Any]) -> str:
    """A pipeline of this daemon with the layers of each, or a stage for a peer."""
    if row["role"] == "stage":
        done, tokens = row["tokens_computed"], row["tokens"]
        return f"a stage for {row['owner']}: {done:,} of {tokens:,} tokens"
    stages = ", ".join(
        f"{peer or 'here'} layers {first} to {end - 1}" for peer, first, end in row["stages"]
    )
    return f"pipeline {row['state']}: {row['pages_gathered']} of {row['pages']} pages; {stages}"


def _row(row: dict[str, Any]) -> dict[str, Any]:
    rate = row.get("bandwidth_bytes_per_s")
    read = row.get("read_bytes_per_s")
    kv = row.get("kv_bytes")
    other = ", ".join(row.get("differs", ()))
    computes = f"other {other}" if other else "the same" if "model" in row else None
    if other and row["state"] in ("up", "suspect"):
        computes = "another model: keeps pages only"
    return {
        "name": row["name"],
        "state": row["state"],
        "data": row.get("data"),
        "since": render.age(row["since_s"]) if "since_s" in row else None,
        "address": row.get("address"),
        "rtt_ms": None if row.get("rtt_ms") is None else f"{row['rtt_ms']:.3f}",
        "bandwidth": rate and f"{render.size(rate)}/s",
        "model": row.get("model"),
        "computes": computes,
        "prefill_tok/s": row.get("prefill_tokens_per_s") or None,
        "read": read and f"{render.size(read)}/s",
        "kv_free": kv and f"{render.size(row['kv_free_bytes'])} of {render.size(kv)}",
        "keeps_for_us": row.get("pages_taken"),
        "we_keep": row.get("pages_given"),
        "leaves": "yes" if row.get("leaves") else None,
    }


def _settings(config: Path | None) -> Any:
    from batchengine import config as configuration

    return configuration.load(None if config is None else str(config), {}, is_served=False).peers


def _host_name() -> str:
    """The first part of the host name, in letters that a peer's name may have."""
    first = socket.gethostname().partition(".")[0].lower()
    return re.sub(r"[^a-z0-9-]+", "-", first).strip("-")[:63] or "host"


def _own_address(peer: tuple[str, int], listen: str) -> str:
    """This host's address as `peer` may reach it: a guess from the route there."""
    from batchengine.config.peers import split_address

    host, port = split_address(listen) or ("0.0.0.0", PORT)
    if host in ("0.0.0.0", "::"):
        family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((peer[0], peer[1]))  # sends nothing
                host = probe.getsockname()[0]
        except OSError:
            host = "HOST"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
