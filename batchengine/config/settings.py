"""Every setting of the daemon with its default and its bounds, as frozen dataclasses.

Owns names, defaults and limits; a field is a TOML key. Refuses rules between two values (those
are in `loading`) and facts of the machine (in `machine`): "" and 0 often mean derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchengine.core import SlaClass

ANSWER_TOKENS = 4096
CONTEXT_TOKENS_MIN = 256  # a page: lanes prove with one that they compute as others do
PATH: dict[str, Any] = {"path": True}  # relative ones are taken from the file's folder


def _within(low: float, high: float) -> dict[str, Any]:
    return {"low": low, "high": high}


def _size(low: int, high: int) -> dict[str, Any]:
    """Bytes: a whole number, or text with a unit such as "10GB"; 0 = derived."""
    return {"low": low, "high": high, "size": True, "zero": True}


def _one_of(*choices: str) -> dict[str, Any]:
    return {"choices": choices}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """[model]: the file and the names clients use. `id` "" = derived from the file name."""

    path: str = field(default="", metadata=PATH)
    id: str = ""
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """[server]: where the service listens and what it accepts."""

    host: str = "127.0.0.1"
    port: int = field(default=7717, metadata=_within(0, 65535))
    admin_socket: str = field(default="", metadata=PATH)  # "" = state or $RUNTIME_DIRECTORY
    allowed_hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    allowed_origins: tuple[str, ...] = ()
    # routes that need no key where keys exist: /health without details, /ready, /metrics
    keyless_routes: tuple[str, ...] = field(
        default=("/health", "/ready"), metadata=_one_of("/health", "/ready", "/metrics")
    )
    log_format: str = field(default="text", metadata=_one_of("text", "json"))
    log_level: str = field(default="info", metadata=_one_of("debug", "info", "warning", "error"))
    tls_terminated: bool = False  # a proxy in front speaks TLS
    strict_fields: bool = False  # unknown request fields are errors, not counted
    # of reasoning in answers of chat completions
    reasoning_field: str = field(
        default="reasoning_content", metadata=_one_of("reasoning_content", "reasoning", "both")
    )
    body_bytes_max: int = field(  # of it beside images: 1 MiB, and 128 for each token of context
        default=32 << 20, metadata={**_within(1 << 10, 1 << 30), "size": True}
    )
    keepalive_s: float = field(default=10.0, metadata=_within(0.1, 300))
    noop_event_s: float = field(default=60.0, metadata=_within(0.1, 300))
    drain_s: float = field(default=30.0, metadata=_within(0, 3600))
    reader_stall_s: float = field(default=60.0, metadata=_within(1, 3600))

    @property
    def address(self) -> str:
        """HOST:PORT, as a URL has it: an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """[auth.keys.NAME]: one caller. `key_file` names a file holding the key (credentials).

    `class` is the class of its requests, and the most urgent one that they may ask for unless
    `class_max` names that; without either, and with several keys, `sla.default_class` is both.
    `weight`: of its share of a lane beside other keys of a class. `queue_max`, `streams_max`: of
    the limits of that name, how much one key may take; 0 = as much as it leaves free to the others.
    `append`: its requests hold new messages only, behind those of their session.
    """

    name: str = ""
    key: str = field(default="", repr=False)
    key_file: str = field(default="", metadata=PATH)
    sla_class: SlaClass | None = field(default=None, metadata={"toml": "class"})
    class_max: SlaClass | None = None
    weight: float = field(default=1.0, metadata=_within(0.01, 100))
    queue_max: int = field(default=0, metadata=_within(0, 100_000))
    streams_max: int = field(default=0, metadata=_within(0, 100_000))
    append: bool = False


@dataclass(frozen=True, slots=True)
class LaneConfig:
    """[[lane]]: one compute resource. 0 or () = derived from the machine.

    device, vram_bytes: of a lane of kind cuda, its GPU's index and what it takes of its memory.
    multiprocessors_max: how many of the GPU's it uses, so that another process or lane has the
    others; rounded up to what the driver can part (8 on an H100).
    steps_in_flight: 2 = a step is planned and sent while the worker computes the one before; 3 =
    two are, if they are short.
    draft_tokens_max: the longest draft: tokens that a step computes of a session besides its next
    one, looked up in its own text. Those that turn out right come at once, and tokens are the same
    with and without. 0 = none; -1 = by kind: 15 on cpu, none on cuda, where it was not measured.
    step_ms_max: the longest step, which is what a request waits for that arrives while another
    key's prompt is computed.
    """

    name: str = ""  # small letters, digits, - and _; "" = by kind
    kind: str = field(default="cpu", metadata=_one_of("cpu", "cuda"))
    device: int = field(default=0, metadata=_within(0, 63))
    vram_bytes: int = field(default=0, metadata=_size(1 << 20, 1 << 50))
    multiprocessors_max: int = field(default=0, metadata=_within(0, 4096))
    threads: int = field(default=0, metadata=_within(0, 1024))
    cores: tuple[int, ...] = ()
    entries_max: int = field(default=64, metadata=_within(1, 1024))
    tokens_per_step: int = field(default=640, metadata=_within(32, 65536))
    chunk_tokens_max: int = field(default=512, metadata=_within(16, 32768))
    step_ms_max: float = field(default=250.0, metadata=_within(1, 60_000))
    open_pages: int = field(default=0, metadata=_within(0, 65536))  # open pages; 0 = by page size
    tier: str = field(default="", metadata=_one_of("fast", "bulk", "any"))  # "" = by kind
    pool: str = ""  # lanes of one pool are variants of one another: same tier, other limits
    queue_max: int = field(default=0, metadata=_within(0, 100_000))  # 0 = limits.queue_max
    steps_in_flight: int = field(default=0, metadata=_within(0, 3))  # 0 = by kind
    draft_tokens_max: int = field(default=-1, metadata=_within(-1, 15))  # -1 = by kind; 0 = none

    @property
    def draft_tokens(self) -> int:
        """The longest draft of this lane."""
        by_kind = 15 if self.kind == "cpu" else 0
        return by_kind if self.draft_tokens_max < 0 else self.draft_tokens_max


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """[store]: where KV and the ledger live. `dir` "" and `budget_bytes` 0 = derived.

    durability: what is synced before it is sent. turn = the turn before its first token and all
    of it before its end; power = every token. full_disk: a turn whose tokens the ledger cannot
    take any more ends with an error (fail), or as it would have, marked `durable: false` (finish).
    free_floor_bytes: pages leave so much of the disk to others; 0 = by its size
    (`kv_store.pages.core.derived_floor_bytes`). sessions_max, ledger_bytes_max (of tokens and
    turns): beyond them, garbage collection forgets the longest unused sessions of those keys that
    have more than an equal share.
    """

    dir: str = field(default="", metadata=PATH)
    budget_bytes: int = field(default=0, metadata=_size(1, 1 << 50))
    allow_volatile: bool = False
    durability: str = field(default="turn", metadata=_one_of("turn", "power"))
    full_disk: str = field(default="fail", metadata=_one_of("fail", "finish"))
    free_floor_bytes: int = field(default=0, metadata=_size(1, 1 << 50))
    sessions_max: int = field(default=10_000, metadata=_within(1, 10_000_000))
    ledger_bytes_max: int = field(
        default=1 << 30, metadata={**_within(1 << 20, 1 << 50), "size": True}
    )


@dataclass(frozen=True, slots=True)
class ClassConfig:
    """[sla.CLASS]: default targets of a class; ttft_ms is also its aging horizon.

    A request that would wait longer than `patience_s` for its first token is refused with the
    time to come back; 0 = never.
    """

    ttft_ms: float = field(metadata=_within(1, 3_600_000))
    tpot_ms: float = field(metadata=_within(0.1, 600_000))
    patience_s: float = field(default=0.0, metadata=_within(0, 86_400))


@dataclass(frozen=True, slots=True)
class SlaConfig:
    """[sla]: the class of a request that names none, and the targets of each class."""

    default_class: SlaClass = SlaClass.STANDARD
    interactive: ClassConfig = ClassConfig(500.0, 50.0, 120.0)
    standard: ClassConfig = ClassConfig(2_000.0, 100.0, 300.0)
    background: ClassConfig = ClassConfig(30_000.0, 500.0, 3_600.0)
    batch: ClassConfig = ClassConfig(300_000.0, 2_000.0)

    def of(self, sla_class: SlaClass) -> ClassConfig:
        """Targets of one class."""
        return getattr(self, sla_class.value)


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """[limits]: how much is accepted. `context_tokens` 0 = the model's own, capped by memory.

    `tokens_max_default`: tokens of a chat answer at most whose request names no limit; 0 = the rest
    of the context, or ANSWER_TOKENS where lanes differ in what fits them. `canary_s`: how often a
    lane that rests proves that it computes as the others do; 0 = never.
    """

    context_tokens: int = field(
        default=0, metadata={**_within(CONTEXT_TOKENS_MIN, 16 << 20), "zero": True}
    )
    tokens_max_default: int = field(default=0, metadata=_within(0, 1 << 20))
    queue_max: int = field(default=1024, metadata=_within(1, 100_000))
    streams_max: int = field(default=2048, metadata=_within(1, 100_000))
    canary_s: float = field(default=600.0, metadata=_within(0, 86_400))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """[router]: which lane serves whom, and when a session moves; see
    `batchengine.policy.router`."""

    promote_auto: bool = True  # interactive requests move their sessions to a fast lane
    demote_idle_s: float = field(default=60.0, metadata=_within(0, 86_400))  # then it moves back
    dwell_s: float = field(default=5.0, metadata=_within(0, 3_600))  # least time between moves
    long_prompt_tokens: int = field(default=2048, metadata=_within(1, 16 << 20))
    tolerance: float = field(default=0.25, metadata=_within(0, 10))  # by which it may be slower
    loaded_ratio: float = field(default=0.5, metadata=_within(0.01, 1))  # of a lane's seats


@dataclass(frozen=True, slots=True)
class PeerConfig:
    """[peers.NAME] or peers.d/NAME.toml: where another daemon listens for links, HOST:PORT."""

    name: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class PeersConfig:
    """[peers]: links to other daemons; off unless `listen` (HOST:PORT) is set.

    `dir` "" = below the state folder; it holds the certificates and the folder `peers.d`. `name`
    is needed only without TLS, which is refused unless every address is a loopback one.
    `hold_bytes`: KV that is kept for sessions of peers; 0 = half of the store's budget. KV of other
    models counts by the extents that it takes.
    """

    listen: str = ""
    name: str = ""
    dir: str = field(default="", metadata=PATH)
    tls: bool = True
    hold_bytes: int = field(default=0, metadata=_size(1, 1 << 50))
    known: tuple[PeerConfig, ...] = ()  # TOML: [peers.NAME]


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of `serve`. `load` makes it, with derived values filled in.

    instance: name of one of several daemons of this user; "" = the one of default paths and port.
    require: what must be up for the daemon to start; gpu = a lane of kind cuda, "" = a CPU lane, if
    there is one. A GPU that fails later never ends the daemon: it serves on, `degraded`.
    """

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    auth: tuple[ApiKey, ...] = ()  # TOML: [auth.keys.NAME]
    lanes: tuple[LaneConfig, ...] = field(default=(LaneConfig(),), metadata={"toml": "lane"})
    store: StoreConfig = StoreConfig()
    sla: SlaConfig = SlaConfig()
    limits: LimitsConfig = LimitsConfig()
    router: RouterConfig = RouterConfig()
    peers: PeersConfig = PeersConfig()
    cache_dir: str = field(default="", metadata=PATH)
    instance: str = ""
    require: str = field(default="", metadata=_one_of("gpu"))
    debug: bool = False

    @property
    def answer_tokens_max(self) -> int:
        """`limits.tokens_max_default`, derived; 0 = the rest of the context.

        The longest answer decides where a session fits: beside a GPU's memory or the store of a
        linked daemon, the rest of the context would never fit.
        """
        differ = bool(self.peers.listen) or any(lane.kind != "cpu" for lane in self.lanes)
        return self.limits.tokens_max_default or (ANSWER_TOKENS if differ else 0)
