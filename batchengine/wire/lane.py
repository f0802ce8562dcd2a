"""Messages of the lane link, between the engine and one worker process.

The engine sends Load, Attach and then Steps, one request at a time; the worker answers each with
Ready, Attached, StepDone or Failed, and reports Loading in between. No pointer and no address
travels here: pages are named by slot codes that the receiver checks.
"""

from __future__ import annotations

import msgspec

from batchengine.core import Sampling
from batchengine.wire.frames import Frame, LinkSchema, Message

VERSION = 3


class CpuResources(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag="cpu"
):
    """The processor as a lane's device. Threads are pinned to `cores` if any are named, and spin
    for `spin_us` before they sleep."""

    threads: int
    cores: tuple[int, ...]
    spin_us: int


class Load(Message, tag=1, frozen=True):
    """Engine -> worker, first frame: which model to map and how much a step may hold."""

    model_path: str
    cache_dir: str
    device: CpuResources
    tokens_max: int
    entries_max: int
    context_tokens: int


class Loading(Message, tag=2, frozen=True):
    """Worker -> engine: a load stage ended or advanced; progress is 0..1 over the whole load."""

    stage: str
    detail: str
    progress: float
    seconds: float


class ModelFacts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Facts of a loaded model on a device: its arithmetic and the form of its pages.

    `identity` holds the fields of the KV representation; lanes whose identities differ must not
    share pages.
    """

    arith_id: str
    isa: str
    threads: int
    n_layer: int
    n_kv_head: int
    head_dim: int
    payload_bytes: int
    vocab_size: int
    identity: dict[str, str | int | float]


class Ready(Message, tag=3, frozen=True):
    """Worker -> engine: the model is loaded."""

    facts: ModelFacts


class Attach(Message, tag=4, frozen=True):
    """Engine -> worker: map this arena read-write and serve extents of this folder read-only.

    `arenas_dir` holds the arenas that rows may be imported from; empty = none.
    """

    arena_path: str
    slots: int
    page_bytes: int
    extents_dir: str
    arenas_dir: str = ""


class Attached(Message, tag=5, frozen=True):
    """Worker -> engine: steps may start."""

    slots: int


class Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One sequence of a step: tokens at positions [start, start + n_tokens), n_pages slot codes.

    `sampling` None = no token wanted (a prefill chunk that does not reach the end). `history_len`
    tokens of the payload's history part are the window of the penalties.
    """

    session: int
    epoch: int
    start: int
    n_tokens: int
    n_pages: int
    sampling: Sampling | None
    history_len: int = 0


class ReserveSlot(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """An arena slot that now belongs to page `page` of a session: zero it, name its owner."""

    slot: int
    gen: int
    session: bytes
    epoch: int
    page: int


class Verify(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Read the page at `code` through the worker's own mapping; its sealed checksum must match."""

    code: int
    seed: int
    checksum: bytes


class Digest(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Digest the page in `slot`; with rows < 256, zero the rows from there on first."""

    slot: int
    rows: int


class Relabel(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Give the rows of an open slot another owner: its header and the records of rows [0, rows)
    are rewritten, records from `rows` on become invalid; page bytes do not change."""

    slot: int
    gen: int
    session: bytes
    epoch: int
    page: int
    rows: int


class FromArena(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=1):
    """Rows another worker wrote: a file of the arenas folder, and the slot's generation and
    epoch there. Each row is verified against its record."""

    arena: str
    slot: int
    gen: int
    epoch: int


class FromPage(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag=2):
    """Rows of a sealed page, which must have this sealed checksum."""

    code: int
    seed: int
    checksum: bytes


class ImportRows(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Reserve `to` and copy the leading rows of a source that are proven to hold the tokens
    given in the payload; at most `rows`. In a source arena, page and session are those of `to`."""

    to: ReserveSlot
    rows: int
    source: FromArena | FromPage


class Step(Message, tag=6, frozen=True):
    """Engine -> worker: one batch, and page chores around it.

    Order: poison, reserve, relabel, import, touch, forward + sample, digest, verify. Payload: slot
    codes u64 of all entries, then their tokens i32, then penalty histories i32, then the tokens
    i32 of every ImportRows (`rows` each). An empty `entries` is legal (chores only). `touch` holds
    codes of sealed pages to fault in, best effort.
    """

    entries: tuple[Entry, ...]
    poison: tuple[int, ...] = ()
    reserve: tuple[ReserveSlot, ...] = ()
    digest: tuple[Digest, ...] = ()
    verify: tuple[Verify, ...] = ()
    relabel: tuple[Relabel, ...] = ()
    import_rows: tuple[ImportRows, ...] = ()
    touch: tuple[int, ...] = ()


class SampledRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The token sampled for one entry; `top` = n best (token, logprob) if asked."""

    session: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class StepDone(Message, tag=7, frozen=True):
    """Worker -> engine: what a Step produced.

    `nonfinite` = indices of entries with NaN or Inf: no token, their new rows are unusable.
    `digests` answers Step.digest in order; `verified` answers Step.verify in order; `imported` =
    leading rows proven and copied per Step.import, in order.
    """

    rows: tuple[SampledRow, ...]
    nonfinite: tuple[int, ...]
    digests: tuple[bytes, ...]
    verified: tuple[bool, ...]
    elapsed_us: int
    imported: tuple[int, ...] = ()


class Failed(Message, tag=8, frozen=True):
    """Worker -> engine: a request is refused or failed. `fatal` = the process ends after this."""

    code: str
    what: str
    why: str
    fix: str
    fatal: bool


class Ping(Message, tag=9, frozen=True):
    """Either way; answered with Pong."""


class Pong(Message, tag=10, frozen=True):
    """Answer to Ping."""


class Shutdown(Message, tag=11, frozen=True):
    """Engine -> worker: end now; nothing is in flight."""


LaneMessage = (
    Load | Loading | Ready | Attach | Attached | Step | StepDone | Failed | Ping | Pong | Shutdown
)
LaneFrame = Frame[LaneMessage]
LANE_LINK = LinkSchema[LaneMessage](
    VERSION,
    Load, Loading, Ready, Attach, Attached, Step, StepDone, Failed, Ping, Pong, Shutdown,
)  # fmt: skip
