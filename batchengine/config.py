"""What `serve` can be told: frozen dataclasses, their bounds, and the TOML loader.

Owns every setting, its default and its limits. Refuses half-valid configuration: an unknown
key, a wrong type or a number out of bounds is an error that names the file, the key, the line
and the fix. Nothing changes after `load` returns; there is no second way to configure.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import itertools
import os
import re
import stat
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil

from batchengine.core import BatchEngineError, SlaClass

Table = dict[str, Any]  # parsed TOML: the one place where values have no type yet
CHUNK_TOKENS_MIN = 16  # a step must hold every decode and still this much prefill
KEY_CHARS_MIN = 8
SOCKET_PATH_BYTES_MAX = 107  # sun_path less its terminating zero
MIB = 1 << 20


def _within(low: float, high: float) -> dict[str, Any]:
    return {"low": low, "high": high}


def _one_of(*choices: str) -> dict[str, Any]:
    return {"choices": choices}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """[model]: the file and the names clients use. `id` "" = derived from the file name."""

    path: str = ""
    id: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """[server]: where the service listens and what it accepts."""

    host: str = "127.0.0.1"
    port: int = field(default=7717, metadata=_within(0, 65535))
    admin_socket: str = ""  # "" = state directory or $RUNTIME_DIRECTORY
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    allowed_origins: tuple[str, ...] = ()
    tls_terminated: bool = False  # a proxy in front speaks TLS
    strict_fields: bool = False  # unknown request fields are errors, not counted
    body_bytes_max: int = field(default=32 << 20, metadata=_within(1 << 10, 1 << 30))
    keepalive_s: float = field(default=10.0, metadata=_within(0.1, 300))
    noop_event_s: float = field(default=60.0, metadata=_within(0.1, 300))
    drain_s: float = field(default=30.0, metadata=_within(0, 3600))
    reader_stall_s: float = field(default=60.0, metadata=_within(1, 3600))


@dataclass(frozen=True, slots=True)
class ApiKey:
    """[auth.keys.NAME]: one caller. `key_file` names a file holding the key (credentials)."""

    name: str = ""
    key: str = field(default="", repr=False)
    key_file: str = ""
    sla_class: SlaClass | None = field(default=None, metadata={"toml": "class"})


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """[[lane]]: one compute resource. 0 or () = derived from the machine."""

    name: str = ""
    kind: str = field(default="cpu", metadata=_one_of("cpu"))
    threads: int = field(default=0, metadata=_within(0, 1024))
    cores: tuple[int, ...] = ()
    entries_max: int = field(default=64, metadata=_within(1, 1024))
    tokens_per_step: int = field(default=640, metadata=_within(32, 65536))
    chunk_tokens_max: int = field(default=512, metadata=_within(16, 32768))
    step_ms_max: float = field(default=1000.0, metadata=_within(1, 60_000))
    places: int = field(default=0, metadata=_within(0, 65536))  # 0 = by page size


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """[store]: where KV and the ledger live. `dir` "" and `budget_bytes` 0 = derived."""

    dir: str = ""
    budget_bytes: int = field(default=0, metadata=_within(0, 1 << 50))
    allow_volatile: bool = False
    durability: str = field(default="turn", metadata=_one_of("turn", "power"))


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """[sla.CLASS]: default targets of a class; ttft_ms is also its aging horizon."""

    ttft_ms: float = field(metadata=_within(1, 3_600_000))
    tpot_ms: float = field(metadata=_within(0.1, 600_000))


@dataclass(frozen=True, slots=True)
class SlaConfig:
    """[sla]: the class of a request that names none, and the targets of each class."""

    default_class: SlaClass = SlaClass.STANDARD
    interactive: ClassConfig = ClassConfig(500.0, 50.0)
    standard: ClassConfig = ClassConfig(2_000.0, 100.0)
    background: ClassConfig = ClassConfig(30_000.0, 500.0)
    batch: ClassConfig = ClassConfig(300_000.0, 2_000.0)

    def of(self, sla_class: SlaClass) -> ClassConfig:
        """Targets of one class."""
        return {
            SlaClass.INTERACTIVE: self.interactive,
            SlaClass.STANDARD: self.standard,
            SlaClass.BACKGROUND: self.background,
            SlaClass.BATCH: self.batch,
        }[sla_class]


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """[limits]: how much is accepted. `context_tokens` 0 = the model's own, capped by memory."""

    context_tokens: int = field(default=0, metadata=_within(0, 16 << 20))
    tokens_max_default: int = field(default=1024, metadata=_within(1, 1 << 20))
    queue_max: int = field(default=1024, metadata=_within(1, 100_000))
    streams_max: int = field(default=2048, metadata=_within(1, 100_000))


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `serve` takes. Build it with `load` so that derived values are filled in."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    auth: tuple[ApiKey, ...] = ()  # TOML: [auth.keys.NAME]
    lanes: tuple[LaneConfig, ...] = (LaneConfig(),)  # TOML: [[lane]]
    store: StoreConfig = StoreConfig()
    sla: SlaConfig = SlaConfig()
    limits: LimitsConfig = LimitsConfig()
    cache_dir: str = ""
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts that defaults are derived from; a parameter so that tests can be another machine."""

    cores: tuple[int, ...]  # one logical core per physical core this process may use
    memory_bytes: int
    is_root: bool
    env: Mapping[str, str]
    home: str

    @staticmethod
    def here() -> Machine:
        """This machine, through the affinity mask, the cpuset and the CPU quota."""
        return Machine(
            cores=_usable_cores(),
            memory_bytes=int(psutil.virtual_memory().total),
            is_root=os.geteuid() == 0,
            env=dict(os.environ),
            home=_home(),
        )


def load(
    path: str | None = None,
    overrides: Mapping[str, object] | None = None,
    machine: Machine | None = None,
) -> Config:
    """Configuration from a TOML file (or none) and dotted overrides such as {"server.port": 0}.

    An override of None counts as not given; "lane.threads" means the only lane. Relative paths
    in the file are relative to it. Raises BatchEngineError BE11xx naming file, key and line.
    """
    source = _Source.read(path)
    tree = source.tree
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _put(source, tree, dotted, value)
    config = _build_config(source, tree)
    _check_together(source, config)
    return _derive(source, config, machine or Machine.here())


def warnings(config: Config) -> list[str]:
    """Legal settings that a person should know about, as sentences for the start-up banner."""
    found: list[str] = []
    if config.store.allow_volatile:
        found.append("store.allow_volatile = true: sessions may not survive a reboot")
    if config.store.durability == "power":
        found.append(
            "store.durability = power is not built yet: as with turn, the tokens of the last 20 ms"
            " before a power loss are generated again"
        )
    return found


def check_model_file(path: str) -> None:
    """Raises BE1116 unless `path` names a regular file this user can see."""
    try:
        why = "" if stat.S_ISREG(os.stat(path).st_mode) else "it is not a regular file"
        found = not why
    except (OSError, ValueError) as error:
        why, found = (error.strerror if isinstance(error, OSError) else str(error)) or "", False
        why = why.lower()
    if found:
        return
    if path.startswith("/home"):
        why += "; a service may not see home directories (ProtectHome)"
    raise BatchEngineError(
        "BE1116",
        f"there is no model file {path[:200]}",
        why=why,
        fix="name an existing GGUF file",
        http_status=400,
        error_type="invalid_request_error",
        api_code="invalid_configuration",
    )


def is_loopback(host: str) -> bool:
    """True when only this machine can reach `host`; names other than localhost count as open."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# ---- the machine ----


def _home() -> str:
    """The home directory; "" where there is none (a user id that no user database knows)."""
    try:
        return str(Path.home())
    except RuntimeError:
        return ""


def _usable_cores() -> tuple[int, ...]:
    """The lowest logical core of every physical core in the affinity mask, within the quota."""
    allowed = sorted(os.sched_getaffinity(0))
    first_of: dict[str, int] = {}
    for core in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        try:
            first_of.setdefault(siblings.read_text().strip(), core)
        except OSError:
            first_of.setdefault(str(core), core)
    cores = sorted(first_of.values())
    return tuple(cores[: max(1, _quota_cores(len(cores)))])


def _quota_cores(cores: int) -> int:
    """Cores a cgroup v2 CPU quota leaves: spinning threads beyond it would be throttled."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        return cores


def _directory(machine: Machine, systemd: str, system: str, xdg: str, under_home: str) -> str:
    """A directory in the order: systemd's variable, system path for root, XDG, home."""
    if machine.env.get(systemd):
        return machine.env[systemd].split(":")[0]
    if machine.is_root:
        return f"{system}/batchengine"
    known = under_home and machine.home
    base = machine.env.get(xdg) or (f"{machine.home}/{under_home}" if known else "")
    return f"{base}/batchengine" if base else ""


def _derive(source: _Source, config: Config, machine: Machine) -> Config:
    """Fill every value that was left to the machine."""
    state = _directory(machine, "STATE_DIRECTORY", "/var/lib", "XDG_STATE_HOME", ".local/state")
    cache = _directory(machine, "CACHE_DIRECTORY", "/var/cache", "XDG_CACHE_HOME", ".cache")
    run = _directory(machine, "RUNTIME_DIRECTORY", "/run", "XDG_RUNTIME_DIR", "") or state
    for option, given, found in (
        ("--store", config.store.dir, state),
        ("--admin-socket", config.server.admin_socket, run),
        ("--cache-dir", config.cache_dir, cache),
    ):
        if not given and not found:
            raise source.error(
                "BE1107",
                option,
                "has no default: this user has no home directory",
                fix="set HOME to a directory of this user, or give --store, --cache-dir and"
                " --admin-socket",
            )
    admin_socket = config.server.admin_socket or f"{run}/admin.sock"
    if len(os.fsencode(admin_socket)) > SOCKET_PATH_BYTES_MAX:
        raise source.error(
            "BE1107",
            "server.admin_socket",
            f"is longer than the {SOCKET_PATH_BYTES_MAX} bytes a unix socket path may have",
            fix="choose a shorter path with --admin-socket",
        )
    store_dir = config.store.dir or f"{state}/kv"
    model = config.model
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, id=model.id or _model_id(model.path)),
        server=dataclasses.replace(config.server, admin_socket=admin_socket),
        lanes=_derive_lanes(source, config.lanes, machine),
        store=dataclasses.replace(
            config.store,
            dir=store_dir,
            budget_bytes=config.store.budget_bytes or _budget_bytes(store_dir, machine),
        ),
        cache_dir=config.cache_dir or cache,
    )


def _model_id(path: str) -> str:
    return Path(path).name.removesuffix(".gguf").lower() if path else ""


def _derive_lanes(
    source: _Source, lanes: tuple[LaneConfig, ...], machine: Machine
) -> tuple[LaneConfig, ...]:
    """Names, and cores: given cores win, else `threads` of the machine's, else all of them."""
    derived: list[LaneConfig] = []
    for index, lane in enumerate(lanes):
        cores = lane.cores or machine.cores[: lane.threads or len(machine.cores)]
        threads = lane.threads or len(cores)
        if lane.cores and threads > len(lane.cores):
            raise source.error(
                "BE1107",
                f"lane.{index}.threads",
                f"= {threads} but lane.cores lists {len(lane.cores)}",
                fix="list one core per thread, or leave threads out",
            )
        name = lane.name or (lane.kind if index == 0 else f"{lane.kind}{index}")
        derived.append(dataclasses.replace(lane, name=name, threads=threads, cores=cores))
    return tuple(derived)


def _budget_bytes(store_dir: str, machine: Machine) -> int:
    """Half of memory (the page cache is the tier that serves), at most half of the free disk."""
    free_bytes = disk_free_bytes(store_dir) or 0
    return max(64 * MIB, min(machine.memory_bytes // 2, free_bytes // 2))


def disk_free_bytes(path: str) -> int | None:
    """Free bytes of the disk where `path` lies or would be made; None when nothing of it is seen.

    Whether the path can be used is found out by whoever opens it, with a better error.
    """
    probe = Path(path).absolute()
    while True:
        try:
            return int(psutil.disk_usage(str(probe)).free)
        except OSError:  # not there yet, not ours to see, too long a name
            if probe == probe.parent:
                return None
            probe = probe.parent


# ---- rules that need more than one value ----


def _check_together(source: _Source, config: Config) -> None:
    for index, lane in enumerate(config.lanes):
        floor = lane.entries_max + CHUNK_TOKENS_MIN
        if lane.tokens_per_step < floor:
            raise source.error(
                "BE1107",
                f"lane.{index}.tokens_per_step",
                f"= {lane.tokens_per_step} leaves prefill no room beside "
                f"entries_max = {lane.entries_max} decodes",
                fix=f"at least {floor}",
            )
        if len(set(lane.cores)) != len(lane.cores):
            raise source.error("BE1107", f"lane.{index}.cores", "names a core twice")
    names = [lane.name for lane in config.lanes if lane.name]
    if len(set(names)) != len(names):
        raise source.error("BE1107", "lane", "two lanes have the same name")
    targets = [(c, config.sla.of(c)) for c in SlaClass]
    for (urgent, a), (patient, b) in itertools.pairwise(targets):
        if a.ttft_ms > b.ttft_ms or a.tpot_ms > b.tpot_ms:
            raise source.error(
                "BE1107",
                f"sla.{patient.value}",
                f"has a tighter target than the more urgent class {urgent.value}",
                fix="targets may only grow from interactive to batch",
            )
    _check_auth(source, config)


def _check_auth(source: _Source, config: Config) -> None:
    keys = [k.key for k in config.auth]
    for key in config.auth:
        dotted = f"auth.keys.{key.name}"
        if len(key.key) < KEY_CHARS_MIN or not (key.key.isascii() and key.key.isprintable()):
            raise source.error(
                "BE1108",
                dotted,
                f"needs a key of at least {KEY_CHARS_MIN} printable ASCII characters",
                fix='key = "..." or key_file = "/path"; openssl rand -hex 24 makes one',
            )
    if len(set(keys)) != len(keys):
        raise source.error("BE1108", "auth.keys", "has the same key under two names")
    if not is_loopback(config.server.host) and not config.auth:
        raise source.error(
            "BE1106",
            "server.host",
            f"= {config.server.host!r} would let anyone on the network use the model",
            fix="give keys with --api-key-file FILE or [auth.keys.NAME] and put a TLS proxy in "
            "front (keys travel in clear text), or listen on 127.0.0.1",
        )


# ---- TOML to dataclasses ----


@dataclass(frozen=True, slots=True)
class _Source:
    """The parsed file and its text, for line numbers in errors."""

    path: str
    text: str
    tree: Table

    @staticmethod
    def read(path: str | None) -> _Source:
        if path is None:
            return _Source("", "", {})
        try:
            text = Path(path).read_bytes().decode()
            return _Source(path, text, tomllib.loads(text))
        except OSError as error:
            raise BatchEngineError(
                "BE1100", f"cannot read {path}", why=error.strerror or "", http_status=400
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise BatchEngineError(
                "BE1101", f"{path} is not TOML", why=str(error), http_status=400
            ) from None

    def error(self, code: str, dotted: str, problem: str, *, fix: str = "") -> BatchEngineError:
        """`KEY PROBLEM in FILE line N`, with the fix after it."""
        return BatchEngineError(
            code,
            f"{_shown(dotted)} {problem}{self.where(dotted)}.",
            fix=fix,
            http_status=400,
            error_type="invalid_request_error",
            api_code="invalid_configuration",
        )

    def unknown(self, dotted: str, known: list[str]) -> BatchEngineError:
        """BE1102, with the nearest known key when there is one."""
        parent, _, key = _shown(dotted).rpartition(".")
        near = difflib.get_close_matches(key, known, 1, 0.5)
        prefix = parent + "." if parent else ""
        hint = f"Did you mean {prefix}{near[0]}?" if near else f"Known: {', '.join(known)}"
        return BatchEngineError(
            "BE1102",
            f"unknown key {_shown(dotted)}{self.where(dotted)}. {hint}",
            http_status=400,
            error_type="invalid_request_error",
            api_code="invalid_configuration",
        )

    def where(self, dotted: str) -> str:
        """` in FILE line N`, or nothing when the value did not come from the file."""
        line = _line_of(self.text, dotted)
        return f" in {self.path} line {line}" if line else ""

    def file_path(self, value: str, dotted: str) -> str:
        """`~` expanded; a relative path from the file is taken from the file's folder."""
        expanded = Path(value).expanduser()
        if self.path and not expanded.is_absolute() and _line_of(self.text, dotted):
            expanded = Path(self.path).resolve().parent / expanded
        return str(expanded)


def _shown(dotted: str) -> str:
    """lane.0.threads is written lane.threads by people."""
    return re.sub(r"^lane\.\d+", "lane", dotted)


def _line_of(text: str, dotted: str) -> int:
    """Line of a dotted key in TOML text; 0 when it is not there. Reads headers and bare keys."""
    table: list[str] = []
    arrays: dict[str, int] = {}
    parent_line = 0
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]", line)
        pair = re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if header:
            name = re.sub(r"[\"'\s]", "", header[2])
            if header[1] == "[[":
                arrays[name] = arrays.get(name, -1) + 1
                name = f"{name}.{arrays[name]}"
            table, here = name.split("."), name
        elif pair:
            here = ".".join([*table, re.sub(r"[\"']", "", pair[1])])
        else:
            continue
        if here == dotted:
            return number
        if dotted.startswith(here + ".") or here.startswith(dotted + "."):
            parent_line = parent_line or number
    return parent_line


def _put(source: _Source, tree: Table, dotted: str, value: object) -> None:
    """Set one override; "lane.x" sets it on the only lane."""
    *parents, last = dotted.split(".")
    node = tree
    for name in parents:
        child = node.setdefault(name, [{}] if name == "lane" else {})
        if isinstance(child, list):
            lanes = cast("list[Table]", child)
            if len(lanes) != 1:
                raise source.error(
                    "BE1107", dotted, f"is ambiguous: the file has {len(lanes)} lanes"
                )
            child = lanes[0]
        if not isinstance(child, dict):
            raise source.error("BE1103", name, "must be a table")
        node = cast("Table", child)
    node[last] = value


def _build_config(source: _Source, tree: Table) -> Config:
    known = ["model", "server", "auth", "lane", "store", "sla", "limits", "cache_dir", "debug"]
    for key in tree:
        if key not in known:
            raise source.unknown(key, known)
    default = Config()
    lanes = tree.get("lane", [{}])
    if not isinstance(lanes, list) or not lanes:
        raise source.error("BE1103", "lane", "must be written as [[lane]]")
    return Config(
        model=_build(source, ModelConfig, tree.get("model", {}), "model"),
        server=_build(source, ServerConfig, tree.get("server", {}), "server"),
        auth=_build_auth(source, tree.get("auth", {})),
        lanes=tuple(
            _build(source, LaneConfig, lane, f"lane.{i}")
            for i, lane in enumerate(cast("list[object]", lanes))
        ),
        store=_build(source, StoreConfig, tree.get("store", {}), "store"),
        sla=_build(source, SlaConfig, tree.get("sla", {}), "sla", default.sla),
        limits=_build(source, LimitsConfig, tree.get("limits", {}), "limits"),
        cache_dir=_value(source, str, tree.get("cache_dir", ""), "cache_dir", {"path": True}),
        debug=_value(source, bool, tree.get("debug", False), "debug", {}),
    )


def _build_auth(source: _Source, value: object) -> tuple[ApiKey, ...]:
    auth = _table(source, value, "auth")
    for key in auth:
        if key != "keys":
            raise source.unknown(f"auth.{key}", ["keys"])
    found: list[ApiKey] = []
    for name, entry in _table(source, auth.get("keys", {}), "auth.keys").items():
        dotted = f"auth.keys.{name}"
        key = _build(source, ApiKey, entry, dotted, ApiKey(name=name))
        if key.key and key.key_file:
            raise source.error("BE1108", dotted, "has both key and key_file")
        if key.key_file:
            key = dataclasses.replace(key, key=_read_key(source, key.key_file, dotted))
        found.append(key)
    return tuple(found)


def _read_key(source: _Source, path: str, dotted: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise source.error(
            "BE1108", f"{dotted}.key_file", f"= {path} cannot be read ({error})"
        ) from None


def _table(source: _Source, value: object, dotted: str) -> Table:
    if not isinstance(value, dict):
        raise source.error("BE1103", dotted, f"must be a table, not {_kind(value)}")
    return cast("Table", value)


def _build(
    source: _Source, cls: type[_T], value: object, dotted: str, base: _T | None = None
) -> _T:
    """A dataclass from a table; missing keys come from `base` or the field defaults."""
    table = _table(source, value, dotted)
    hints = typing.get_type_hints(cls)
    fields = {f.metadata.get("toml", f.name): f for f in dataclasses.fields(cast("Any", cls))}
    if base is not None:
        fields.pop("name", None)  # the table's own name is not a key in it
    given: Table = {}
    for key, item in table.items():
        if key not in fields:
            raise source.unknown(f"{dotted}.{key}", list(fields))
        spec = fields[key]
        metadata = dict(spec.metadata)
        metadata["path"] = (cls, spec.name) in PATHS
        inner = getattr(base, spec.name, None) if base is not None else None
        path = f"{dotted}.{key}"
        given[spec.name] = _value(source, hints[spec.name], item, path, metadata, inner)
    return dataclasses.replace(cast("Any", base), **given) if base is not None else cls(**given)


def _value(
    source: _Source, kind: Any, value: Any, dotted: str, rule: Table, base: object = None
) -> Any:
    """One value of the declared type, checked against its bounds or choices."""
    if dataclasses.is_dataclass(kind):
        return _build(source, cast("type[Any]", kind), value, dotted, base)
    if isinstance(kind, types.UnionType):  # X | None: TOML has no null
        kind = next(k for k in typing.get_args(kind) if k is not type(None))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise source.error("BE1103", dotted, f"must be a list, not {_kind(value)}")
        inner = typing.get_args(kind)[0]
        return tuple(_value(source, inner, v, dotted, rule) for v in cast("list[object]", value))
    if kind is SlaClass:
        rule = {"choices": tuple(c.value for c in SlaClass)}
    wanted = str if kind is SlaClass else kind
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted and not (wanted is str and isinstance(value, str)):
        raise source.error("BE1103", dotted, f"must be {KINDS[wanted]}, not {_kind(value)}")
    _check_rule(source, value, dotted, rule)
    if rule.get("path") and value:
        return source.file_path(value, dotted)
    return SlaClass(value) if kind is SlaClass else value


def _check_rule(source: _Source, value: Any, dotted: str, rule: Table) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = rule.get("low", 0), rule.get("high", 1 << 31)
        if not low <= value <= high:  # also refuses NaN
            raise source.error(
                "BE1104", dotted, f"= {value} is out of bounds", fix=f"{low:,} to {high:,}"
            )
    choices = cast("tuple[str, ...]", rule.get("choices", ()))
    if choices and value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(choices)}"
        raise source.error("BE1105", dotted, f"= {value!r} is not known", fix=fix)
    if isinstance(value, str) and "\0" in value:
        raise source.error("BE1105", dotted, "holds a zero byte")


def _kind(value: object) -> str:
    return KINDS.get(type(value), type(value).__name__)


_T = typing.TypeVar("_T")
KINDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "a table",
}
PATHS = {
    (ModelConfig, "path"),
    (ServerConfig, "admin_socket"),
    (ApiKey, "key_file"),
    (StoreConfig, "dir"),
}
