"""One file and a few overrides become one `Config`: rules between values, then derived defaults.

Owns `load`. Refuses half-valid configuration: every error names the key, where it stands and
the fix. Nothing changes after `load` returns; there is no second way to configure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import itertools
import os
import re
import resource
import secrets
import socket
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from batchengine import errors
from batchengine.config.machine import (
    MIB,
    Machine,
    budget_bytes,
    directory,
    disk_bytes,
    folder_of,
    free_port,
    model_hint,
)
from batchengine.config.peers import build_peers, is_loopback
from batchengine.config.settings import (
    ApiKey,
    Config,
    LaneConfig,
)
from batchengine.config.toml import Source, Table, build, put, table
from batchengine.core import SlaClass

CHUNK_TOKENS_MIN = 16  # a step must hold every decode and still this much prefill
KEY_CHARS_MIN = 8
ADDRESSES_BYTES = 4 << 30  # of children beside the store's pages
CREDENTIALS = "/run/credentials/"  # of systemd
SOCKET_PATH_BYTES_MAX = 107  # sun_path less its terminating zero
POOL_CHARS_MAX = 64
MODEL_NAME_CHARS_MAX = 244  # with ":interactive" it is the longest `model` of a request
FILE_NAME_BYTES_MAX = 255  # of file systems
STEPS_IN_FLIGHT = {"cpu": 1, "cuda": 3}  # by kind of lane
GPU_LANE_THREADS_MAX, GPU_LANE_SHARE = 4, 4  # of a GPU lane, by default: one core of so many
INSTANCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_ORIGIN = re.compile(r"null|[a-z][a-z0-9+.-]*://[^/\s*?#@]+/?", re.IGNORECASE)
_HOST_HEADER = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s*]+)(:[0-9]{0,5})?")


def load(
    path: str | None = None,
    overrides: Mapping[str, object] | None = None,
    machine: Machine | None = None,
    *,
    is_served: bool = True,
) -> Config:
    """Configuration from a TOML file (or none) and dotted overrides such as {"server.port": 0}.

    An override of None counts as not given; "lane.threads" means the only lane. Relative paths
    in the file are relative to it. Raises BatchEngineError naming file, key and line.
    `is_served`: False = it is only looked at, and a credential, which systemd makes while the
    service runs, may be missing: its key is a random one.
    """
    source = Source.read(path)
    tree = source.tree
    for dotted, value in (overrides or {}).items():
        if value is not None:
            put(source, tree, dotted, value)
    config = _build_config(source, tree, is_served)
    _check_together(source, config)
    has_port = "port" in table(source, tree.get("server", {}), "server")
    derived = _derive(source, config, machine or Machine.here(), has_port)
    _check_paths(source, derived)
    return derived


def warnings(config: Config) -> list[str]:
    """Legal settings worth a warning, as sentences for the start-up banner."""
    found: list[str] = []
    if config.store.allow_volatile:
        found.append("store.allow_volatile = true: sessions may not survive a reboot")
    if config.store.durability == "power" and config.store.full_disk == "finish":
        found.append(
            "store.full_disk = finish has no effect with durability = power: no token is sent"
            " before it is durable"
        )
    found += _lane_warnings(config.lanes)
    found += [
        f"auth.keys.{key.name}.key_file = {key.key_file} is not there: LoadCredential= in the unit"
        " makes it when the service starts"
        for key in config.auth
        if _is_absent_credential(key.key_file)
    ]
    return found


def limit_warnings(config: Config) -> list[str]:
    """A warning where a limit of this process may keep children from starting: they map the weights
    and the store, and a text process reserves 2 GiB."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if not 0 <= limit < config.store.budget_bytes + ADDRESSES_BYTES:
        return []
    return [
        f"the address space is limited to {limit / MIB:,.0f} MiB (ulimit -v), which may be too"
        " little for workers and text processes: limit memory by MemoryMax= or a cgroup instead"
    ]


def disk_warnings(config: Config) -> list[str]:
    """A warning where the store's disk is too full for pages; `warnings` reads no disk."""
    from kv_store.pages.core import derived_floor_bytes  # not needed to read a file

    found = disk_bytes(config.store.dir)
    if found is None:
        return []
    free_bytes, total_bytes = found
    floor_bytes = config.store.free_floor_bytes or derived_floor_bytes(total_bytes)
    if free_bytes > floor_bytes:
        return []
    return [
        f"the disk of {config.store.dir} has {free_bytes / MIB:,.0f} MiB free and"
        f" {floor_bytes / MIB:,.0f} MiB must stay free: KV is cached only where the store has room"
        " already; free disk space or set store.free_floor_bytes"
    ]


def _lane_warnings(lanes: tuple[LaneConfig, ...]) -> list[str]:
    found: list[str] = []
    tiers = {lane.tier for lane in lanes}
    for tier, users in (("fast", "interactive requests and long prompts"), ("bulk", "the rest")):
        if len(lanes) > 1 and not tiers & {tier, "any", ""}:
            found.append(f"no lane has tier {tier}: {users} share the lanes of the other tier")
    for one, other in itertools.combinations(lanes, 2):
        shared = sorted(set(one.cores) & set(other.cores))
        if shared:
            found.append(
                f"lanes {one.name} and {other.name} share the cores {shared}: both are slower"
                " while both compute"
            )
    return found


def check_model_file(path: str) -> None:
    """Raises NO_MODEL_FILE unless `path` names a regular file, and MODEL_UNREADABLE for one that
    this user cannot read."""
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            if os.access(path, os.R_OK):
                return
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        why = "it is a folder" if os.path.isdir(path) else "it is not a regular file"
    except PermissionError as error:
        raise errors.MODEL_UNREADABLE(path=path, why=(error.strerror or "").lower()) from None
    except (OSError, ValueError) as error:
        why = ((error.strerror if isinstance(error, OSError) else str(error)) or "").lower()
    if path.startswith("/home"):
        why += "; a service may not see home directories (ProtectHome)"
    raise errors.NO_MODEL_FILE(path=path, why=why, fix=model_hint(path))


def is_key(text: str) -> bool:
    """Whether a text can be an API key, which goes into a header."""
    return len(text) >= KEY_CHARS_MIN and text.isascii() and text.isprintable()


def is_lane_name(name: str) -> bool:
    """Whether a lane may have this name, which is a part of its files' names."""
    from kv_store.arenas.arena import LANE_NAME  # needed only where lanes are named

    return LANE_NAME.fullmatch(name) is not None


def openness(path: str) -> str:
    """Why users other than this one can read or replace a file with secrets, or "".

    A group may read a file of root: so service managers hand credentials to a daemon.
    """
    info = os.stat(path)
    if info.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {info.st_uid}"
    allowed = 0o640 if info.st_uid == 0 and os.geteuid() != 0 else 0o600
    mode = stat.S_IMODE(info.st_mode)
    return f"its mode is {mode:04o}" if mode & 0o077 & ~allowed else ""


# ---- TOML to Config ----


def _build_config(source: Source, tree: Table, is_served: bool) -> Config:
    lanes = tree.get("lane", [{}])
    if not isinstance(lanes, list) or not lanes:
        raise source.error(errors.CONFIG_TYPE, "lane", "must be written as [[lane]]")
    auth = _build_auth(source, tree.pop("auth", {}), is_served)
    peers = build_peers(source, tree.pop("peers", {}))
    return dataclasses.replace(build(source, Config, tree, "", Config()), auth=auth, peers=peers)


def _build_auth(source: Source, value: object, is_served: bool) -> tuple[ApiKey, ...]:
    auth = table(source, value, "auth")
    for key in auth:
        if key != "keys":
            raise source.unknown(f"auth.{key}", ["keys"])
    found: list[ApiKey] = []
    for name, entry in table(source, auth.get("keys", {}), "auth.keys").items():
        dotted = f"auth.keys.{name}"
        key = build(source, ApiKey, entry, dotted, ApiKey(name=name))
        if key.key and key.key_file:
            raise source.error(errors.CONFIG_KEYS, dotted, "has both key and key_file")
        if _is_absent_credential(key.key_file) and not is_served:
            key = dataclasses.replace(key, key=secrets.token_hex(KEY_CHARS_MIN))
        elif key.key_file:
            key = dataclasses.replace(key, key=_read_key(source, key.key_file, dotted))
        found.append(key)
    return tuple(found)


def _is_absent_credential(path: str) -> bool:
    return path.startswith(CREDENTIALS) and not os.path.lexists(path)


def _read_key(source: Source, path: str, dotted: str) -> str:
    dotted = f"{dotted}.key_file"
    try:
        key = Path(path).read_text("utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or "").lower() if isinstance(error, OSError) else "it is not text"
        fix = "name a file with the key alone that the daemon's user can read"
        if path.startswith(CREDENTIALS):
            fix = "LoadCredential= in the unit makes it, while the service runs"
        raise source.error(
            errors.CONFIG_KEYS, dotted, f"= {path} cannot be read: {why}", fix=fix
        ) from None
    if len(key.splitlines()) > 1:
        raise source.error(
            errors.CONFIG_KEYS,
            dotted,
            f"= {path} has {len(key.splitlines())} lines",
            fix="leave the key of this entry alone in it, and give each other one an entry",
        )
    return key


# ---- rules between values ----


def _check_together(source: Source, config: Config) -> None:
    for index, lane in enumerate(config.lanes):
        floor = lane.entries_max + CHUNK_TOKENS_MIN
        if lane.tokens_per_step < floor:
            raise source.contradiction(
                f"lane.{index}.tokens_per_step",
                f"= {lane.tokens_per_step} leaves prefill no room beside "
                f"entries_max = {lane.entries_max} decodes",
                fix=f"at least {floor}",
            )
        if lane.kind == "cuda" and not lane.vram_bytes:
            raise source.contradiction(
                f"lane.{index}.vram_bytes",
                "is needed for a lane of kind cuda",
                fix="how much memory of the GPU the lane may take",
            )
        if len(set(lane.cores)) != len(lane.cores):
            raise source.contradiction(f"lane.{index}.cores", "names a core twice")
    if config.peers.listen and config.lanes[0].kind == "cuda":
        raise source.contradiction(
            "lane.0.kind",
            "= cuda, and the first lane is the one that links to other daemons",
            fix="put a CPU lane first",
        )
    if config.require and all(lane.kind != "cuda" for lane in config.lanes):
        raise source.contradiction(
            "require",
            f"= {config.require}, and no lane is on a GPU",
            fix='add a [[lane]] with kind = "cuda" and vram_bytes, or leave require out',
        )
    if config.instance and not INSTANCE.fullmatch(config.instance):
        raise source.contradiction(
            "instance",
            f"= {config.instance[:40]!r} is no name of a daemon",
            fix="1 to 32 letters, digits, - and _, a letter or digit first",
        )
    _check_lane_names(source, config)
    _check_model_names(source, config)
    _check_hosts(source, config)
    _check_origins(source, config)
    _check_routing(source, config)
    targets = [(c, config.sla.of(c)) for c in SlaClass]
    for (urgent, a), (patient, b) in itertools.pairwise(targets):
        if a.ttft_ms > b.ttft_ms or a.tpot_ms > b.tpot_ms:
            raise source.contradiction(
                f"sla.{patient.value}",
                f"has a tighter target than the more urgent class {urgent.value}",
                fix="targets may only grow from interactive to batch",
            )
    _check_auth(source, config)


def _check_lane_names(source: Source, config: Config) -> None:
    names: set[str] = set()
    for index, lane in enumerate(config.lanes):
        if lane.name in names:
            raise source.contradiction(
                f"lane.{index}.name",
                f"= {lane.name!r} is the name of another lane, too",
                fix="give each [[lane]] a name of its own, or none",
            )
        if lane.name and not is_lane_name(lane.name):
            raise source.contradiction(
                f"lane.{index}.name",
                f"= {lane.name[:80]!r} is no name of a lane",
                fix="1 to 32 of the small letters, digits, - and _, a letter or digit first",
            )
        names |= {lane.name} - {""}


def _check_model_names(source: Source, config: Config) -> None:
    named = [("model.id", config.model.id or _model_id(config.model.path))]
    named += [("model.aliases", alias) for alias in config.model.aliases]
    seen: set[str] = set()
    for dotted, name in named:
        if name in seen or (dotted == "model.aliases" and not name.strip()):
            raise source.contradiction(
                dotted,
                f"has {name[:80]!r}, " + ("which is a name already" if name in seen else "no name"),
                fix="a name for each alias, other than model.id, or no aliases",
            )
        seen.add(name)
        is_usable = len(name) <= MODEL_NAME_CHARS_MAX and name.isprintable()
        is_of_file = dotted == "model.id" and not config.model.id
        is_refused_later = is_of_file and len(name) > FILE_NAME_BYTES_MAX  # with the path
        if not is_usable and not is_refused_later:
            raise source.contradiction(
                dotted,
                f"= {name[:80]!r} is no name that a request can have",
                fix=f"up to {MODEL_NAME_CHARS_MAX} printable characters; model.id names a file of"
                " another name",
            )
        if name.rpartition(":")[2] in {*SlaClass}:
            raise source.contradiction(
                dotted,
                f"= {name[:80]!r} ends as NAME:CLASS does, by which clients ask for a class",
                fix="another name; clients can add the class to every name themselves",
            )


def _check_hosts(source: Source, config: Config) -> None:
    """Raises CONFIG_CONTRADICTION for an entry that no Host header can have."""
    for host in config.server.allowed_hosts:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)  # IPv6 without brackets, too
            continue
        if host and not _HOST_HEADER.fullmatch(host):
            raise source.contradiction(
                "server.allowed_hosts",
                f"has {host[:80]!r}, which is the host of no request",
                fix="a name or an address alone, as be.example; each is named, since * would allow"
                " every one",
            )


def _check_origins(source: Source, config: Config) -> None:
    """Raises CONFIG_CONTRADICTION for an entry that no browser sends as the origin of a page."""
    for origin in config.server.allowed_origins:
        if not _ORIGIN.fullmatch(origin):
            raise source.contradiction(
                "server.allowed_origins",
                f"has {origin[:80]!r}, which is the origin of no page",
                fix="SCHEME://HOST or SCHEME://HOST:PORT, as http://localhost:3000; each page is"
                " named, since * would allow every one",
            )


def _check_routing(source: Source, config: Config) -> None:
    pools: dict[str, LaneConfig] = {}
    for index, lane in enumerate(config.lanes):
        if not lane.pool:
            continue
        if len(lane.pool) > POOL_CHARS_MAX or not lane.pool.isprintable():
            raise source.contradiction(
                f"lane.{index}.pool",
                f"= {lane.pool[:POOL_CHARS_MAX]!r} is not a name",
                fix=f"up to {POOL_CHARS_MAX} printable characters",
            )
        first = pools.setdefault(lane.pool, lane)
        if first.tier != lane.tier:
            raise source.contradiction(
                f"lane.{index}.pool",
                f"= {lane.pool!r} has lanes of tier {first.tier or 'unset'} and of tier"
                f" {lane.tier or 'unset'}",
                fix="give all lanes of a pool the same tier, or this lane another pool",
            )
    router = config.router
    if router.dwell_s > router.demote_idle_s:
        raise source.contradiction(
            "router.dwell_s",
            f"= {router.dwell_s:g} is longer than router.demote_idle_s = {router.demote_idle_s:g}:"
            " an idle session could not be demoted when it is due",
            fix="dwell_s <= demote_idle_s",
        )


def _check_auth(source: Source, config: Config) -> None:
    keys = [k.key for k in config.auth]
    for key in config.auth:
        dotted = f"auth.keys.{key.name}"
        if not is_key(key.key):
            raise source.error(
                errors.CONFIG_KEYS,
                dotted,
                f"needs a key of at least {KEY_CHARS_MIN} printable ASCII characters",
                fix='key = "..." or key_file = "/path"; openssl rand -hex 24 makes one',
            )
    if len(set(keys)) != len(keys):
        raise source.error(errors.CONFIG_KEYS, "auth.keys", "has the same key under two names")
    for key in config.auth:
        dotted = f"auth.keys.{key.name}"
        path = key.key_file or (source.path if source.where(f"{dotted}.key") else "")
        if path and not _is_absent_credential(path) and (why := openness(path)):
            raise source.error(
                errors.CONFIG_KEYS,
                dotted,
                f"has its key in {path}, which is open to other users ({why})",
                fix=f"chmod 600 {path}; or chmod 640, owned by root and the daemon's group",
            )
    if is_loopback(config.server.host):
        return
    _check_host(source, config.server.host)
    if not config.auth:
        raise source.error(
            errors.CONFIG_EXPOSED,
            "server.host",
            f"= {config.server.host!r} would let anyone on the network use the model",
            fix="give keys with --api-key-file FILE or [auth.keys.NAME] and put a TLS proxy in "
            "front (keys travel in clear text), or listen on 127.0.0.1",
        )
    if not config.server.tls_terminated:
        raise errors.HOST_EXPOSED(host=config.server.host)


def _check_host(source: Source, host: str) -> None:
    """Raises CONFIG_CHOICE for a host that is neither an address nor a name that resolves."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.strip("[]"))
        return
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise source.error(
            errors.CONFIG_CHOICE,
            "server.host",
            f"= {host[:80]!r} is no address, and no host of that name is known",
            fix="127.0.0.1 (this machine only), or an address of this machine",
        ) from None


# ---- values derived from the machine ----


def _derive(source: Source, config: Config, machine: Machine, has_port: bool) -> Config:
    """Fill every value that was left to the machine."""
    state = directory(machine, "STATE_DIRECTORY", "/var/lib", "XDG_STATE_HOME", ".local/state")
    cache = directory(machine, "CACHE_DIRECTORY", "/var/cache", "XDG_CACHE_HOME", ".cache")
    run = directory(machine, "RUNTIME_DIRECTORY", "/run", "XDG_RUNTIME_DIR", "") or state
    state, run = folder_of(config.instance, state), folder_of(config.instance, run)
    for option, given, found in (
        ("--store", config.store.dir, state),
        ("--admin-socket", config.server.admin_socket, run),
        ("--cache-dir", config.cache_dir, cache),
        ("peers.dir", config.peers.dir or not config.peers.listen, state),
    ):
        if not given and not found:
            raise source.contradiction(
                option,
                "has no default: this user has no home directory",
                fix="set HOME to a directory of this user, or give --store, --cache-dir and"
                " --admin-socket",
            )
    admin_socket = config.server.admin_socket or f"{run}/admin.sock"
    if len(os.fsencode(admin_socket)) > SOCKET_PATH_BYTES_MAX:
        raise source.contradiction(
            "server.admin_socket",
            f"is longer than the {SOCKET_PATH_BYTES_MAX} bytes a unix socket path may have",
            fix="choose a shorter path with --admin-socket",
        )
    server = dataclasses.replace(config.server, host=config.server.host.strip("[]"))
    if config.instance and not has_port:
        server = dataclasses.replace(server, port=free_port(server.host, server.port + 1))
    store_dir = config.store.dir or f"{state}/kv"
    model = config.model
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, id=model.id or _model_id(model.path)),
        server=dataclasses.replace(server, admin_socket=admin_socket),
        lanes=_derive_lanes(source, config.lanes, machine),
        store=dataclasses.replace(
            config.store,
            dir=store_dir,
            budget_bytes=config.store.budget_bytes or budget_bytes(store_dir, machine),
        ),
        peers=dataclasses.replace(config.peers, dir=config.peers.dir or f"{state}/peers"),
        cache_dir=config.cache_dir or cache,
    )


def _check_paths(source: Source, config: Config) -> None:
    """Raises CONFIG_CHOICE for a path that is not text: messages between processes and answers
    over HTTP name it."""
    for dotted, path in (
        ("model.path", config.model.path),
        ("server.admin_socket", config.server.admin_socket),
        ("store.dir", config.store.dir),
        ("cache_dir", config.cache_dir),
        ("peers.dir", config.peers.dir),
    ):
        try:
            path.encode()
        except UnicodeEncodeError:
            raise source.error(
                errors.CONFIG_CHOICE,
                dotted,
                f"= {path[:200]!r} holds bytes that are not UTF-8",
                fix="rename the file or folder, or name another one",
            ) from None


def _model_id(path: str) -> str:
    """The name of a model file, without the number of its part if it is split."""
    name = Path(path).name.removesuffix(".gguf").lower() if path else ""
    return re.sub(r"-00001-of-\d{5}$", "", name)


def _derive_lanes(
    source: Source, lanes: tuple[LaneConfig, ...], machine: Machine
) -> tuple[LaneConfig, ...]:
    """What lanes left open: names, tiers, cores, steps in flight."""
    derived: list[LaneConfig] = []
    # A GPU lane needs the processor to store and hash rows: less than a step of the GPU takes, if
    # enough cores share it.
    own = max(1, min(GPU_LANE_THREADS_MAX, len(machine.cores) // GPU_LANE_SHARE))
    lanes = tuple(
        dataclasses.replace(lane, threads=lane.threads or len(lane.cores) or own)
        if lane.kind == "cuda"
        else lane
        for lane in lanes
    )
    for index, lane in enumerate(lanes):
        _check_cores(source, index, lane, machine)
    names = {lane.name for lane in lanes if lane.name}
    cores_of = _share_cores(lanes, machine.cores)
    for index, lane in enumerate(lanes):
        cores = cores_of[index]
        threads = lane.threads or len(cores)
        if lane.cores and threads > len(lane.cores):
            raise source.contradiction(
                f"lane.{index}.threads",
                f"= {threads} but lane.cores lists {len(lane.cores)}",
                fix="list one core per thread, or leave threads out",
            )
        name = lane.name or _free_name(lane.kind, index, names)
        names.add(name)
        tier = lane.tier or _default_tier(lane, lanes)
        derived.append(
            dataclasses.replace(
                lane,
                name=name,
                threads=threads,
                cores=cores,
                tier=tier,
                steps_in_flight=lane.steps_in_flight or STEPS_IN_FLIGHT[lane.kind],
            )
        )
    return tuple(derived)


def _check_cores(source: Source, index: int, lane: LaneConfig, machine: Machine) -> None:
    """Raises CONFIG_CONTRADICTION for cores that this process may not use, or has not so many."""
    allowed = machine.allowed or machine.cores
    if missing := [core for core in lane.cores if core not in allowed]:
        raise source.contradiction(
            f"lane.{index}.cores",
            f"= {list(lane.cores)}, and this process may not run on core {missing[0]}",
            fix=f"use cores of {_numbers(allowed)}, or leave cores out",
        )
    if not lane.cores and lane.threads > len(machine.cores) and lane.kind == "cpu":
        raise source.contradiction(
            f"lane.{index}.threads",
            f"= {lane.threads}, and this process may use {len(machine.cores)} physical core"
            + "s" * (len(machine.cores) != 1),
            fix=f"1 to {len(machine.cores)}, or leave threads out",
        )


def _numbers(cores: Sequence[int]) -> str:
    """Cores as in a cpuset: 0-3,8."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1][1:] = [core]
        else:
            runs.append([core])
    return ",".join("-".join(map(str, run)) for run in runs)


def _free_name(kind: str, index: int, names: set[str]) -> str:
    """cpu, cpu1, ...: never one that another lane was given."""
    wanted = (kind if i == 0 else f"{kind}{i}" for i in itertools.count(index))
    return next(name for name in wanted if name not in names)


def _default_tier(lane: LaneConfig, lanes: tuple[LaneConfig, ...]) -> str:
    """The tier of a lane that names none: fast for an accelerator, bulk for a CPU lane beside a
    fast lane, else any."""
    if lane.kind != "cpu":
        return "fast"
    others = (other.tier or ("any" if other.kind == "cpu" else "fast") for other in lanes)
    return "bulk" if "fast" in others else "any"


def _share_cores(
    lanes: tuple[LaneConfig, ...], machine_cores: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The cores of every lane: those given to it; lanes without any divide the rest, or share all
    cores where the rest is too small."""
    taken = {core for lane in lanes for core in lane.cores}
    left = [core for core in machine_cores if core not in taken]
    open_lanes = [lane for lane in lanes if not lane.cores]
    asked = sum(lane.threads for lane in open_lanes)
    undecided = sum(not lane.threads for lane in open_lanes)
    fair = max(1, (len(left) - asked) // max(1, undecided))
    enough = sum(lane.threads or fair for lane in open_lanes) <= len(left)
    found: list[tuple[int, ...]] = []
    for lane in lanes:
        count = lane.threads or (fair if enough else len(machine_cores))
        if lane.cores:
            found.append(lane.cores)
        elif enough:
            found.append(tuple(left[:count]))
            del left[:count]
        else:
            found.append(machine_cores[:count])
    return found
