"""Messages of the lane link, between the engine and one worker process.

The engine sends Load, Attach and then Steps, one request at a time, except that a Step may follow
before the Step before it is answered; the worker takes them in order and answers each with Ready,
Attached, StepDone or Failed, and reports Loading in between. No pointer and no address travels
here: pages are named by slot codes that the receiver checks.

Messages about data links, holds and pipelines (OpenLink, CloseLink, Hold, Release, OpenStage,
CloseStage, Gather, GatherPages, GatherState) and Masks are no requests: they may be sent at any
time after Attach, take effect while a step runs too, and have no answer but the events LinkChanged,
HoldChanged, StageChanged and GatherChanged. Their frames have step 0.
"""

from __future__ import annotations

import msgspec

from batchengine.core import Sampling
from batchengine.wire.frames import Frame, LinkSchema, Message
from kv_store.layout import KvHeads

VERSION = 19
SELF = 0  # the link of a segment that this worker holds itself
LINK_MAX = (1 << 30) - 1
ARENA_BIT = 1 << 63  # of a page code: set = index of an arena slot, else (extent << 32) | slot
HELD_BIT = 1 << 62  # without ARENA_BIT: the page lies with a peer, see Entry


class CpuResources(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag="cpu"
):
    """The processor as a lane's device. Threads are pinned to `cores` if any are named, and spin
    for `spin_us` before they sleep."""

    threads: int
    cores: tuple[int, ...]
    spin_us: int


class CudaResources(
    msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, tag="cuda"
):
    """A GPU as a lane's device: its index, and how much of its memory and how many of its
    multiprocessors (0 = all) the lane may take. What the processor does for it has `threads`, as
    those of CpuResources."""

    index: int
    vram_bytes: int
    multiprocessors_max: int
    threads: int
    cores: tuple[int, ...]
    spin_us: int


Resources = CpuResources | CudaResources


class LinkIdentity(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The daemon's name among its peers, and the PEM files with which its data links prove it.

    Without files, links are in the clear.
    """

    name: str
    certificate: str = ""
    key: str = ""
    authority: str = ""


class Load(Message, tag=1, frozen=True):
    """Engine -> worker, first frame: which model to map and how much a step may hold.

    Only a worker with `links` takes part in data links. `steps_in_flight` may be under way at once.
    """

    model_path: str
    cache_dir: str
    device: Resources
    tokens_max: int
    entries_max: int
    context_tokens: int
    links: LinkIdentity | None = None
    steps_in_flight: int = 1


MAP_WEIGHTS = "map weights"  # the first stage of a load, on lanes of every kind


class Loading(Message, tag=2, frozen=True):
    """Worker -> engine: a load stage ended or advanced; progress is 0..1 over the whole load."""

    stage: str
    detail: str
    progress: float
    seconds: float


class GpuFacts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The GPU of a lane, as its driver describes it."""

    name: str
    multiprocessors: int
    memory_bytes: int


class ModelFacts(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Facts of a loaded model on a device: its arithmetic and the form of its pages.

    `identity` holds the fields of the KV representation; lanes whose identities differ must not
    share pages. `gpu` is what computes, None = the processor. `state_bytes`: size of the recurrent
    state of one sequence; 0 = the model has none. `layers`: the heads of those with rows in a page.
    `has_rows`: whether each layer of the model has; one that has not has recurrent state.
    `is_whole`: no part of its layers is computed alone.
    """

    arith_id: str
    isa: str
    threads: int
    layers: tuple[KvHeads, ...]
    payload_bytes: int
    vocab_size: int
    identity: dict[str, str | int | float]
    gpu: GpuFacts | None = None
    state_bytes: int = 0
    is_whole: bool = False
    has_rows: tuple[bool, ...] = ()

    @property
    def n_layer(self) -> int:
        """How many layers have rows in a page."""
        return len(self.layers)

    def bytes_of(self, first: int, end: int) -> tuple[int, int]:
        """Bytes of a page and of a state that layers [first, end) of the model have."""
        before, within = sum(self.has_rows[:first]), sum(self.has_rows[first:end])
        of_pages = sum(heads.layer_bytes for heads in self.layers[before : before + within])
        n_recurrent = len(self.has_rows) - self.n_layer
        of_state = self.state_bytes // n_recurrent if n_recurrent else 0
        return of_pages, of_state * (end - first - within)


class Ready(Message, tag=3, frozen=True):
    """Worker -> engine: the model is loaded. `unconfined` is why the kernel refuses the filter of
    system calls, or ""."""

    facts: ModelFacts
    unconfined: str = ""


class Attach(Message, tag=4, frozen=True):
    """Engine -> worker: map this arena read-write and serve extents of this folder read-only.

    `arenas_dir` holds the arenas that rows may be imported from; empty = none. A worker whose model
    has recurrent state keeps `state_slots` states of `state_bytes` in memory of its own, and saves
    to and loads from files of `states_dir`.
    """

    arena_path: str
    slots: int
    page_bytes: int
    extents_dir: str
    arenas_dir: str = ""
    state_slots: int = 0
    state_bytes: int = 0
    states_dir: str = ""


class Attached(Message, tag=5, frozen=True):
    """Worker -> engine: steps may start."""

    slots: int


class Segment(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Pages of an entry that a peer holds: `n_pages` pages of a hold, from its page `first_page`.

    `link` is the number of the data link to the peer, or SELF for a hold of this worker. `n_pages`
    is of whole super-pages.
    """

    link: int
    hold: int
    first_page: int
    n_pages: int


class Entry(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One sequence of a step: tokens at positions [start, start + n_tokens), n_pages slot codes.

    `sampling` None = no token wanted (a prefill chunk that does not reach the end). `history_len`
    tokens of the payload's history part are the window of the penalties. `segments`, in order, are
    the leading pages, which lie elsewhere; the code of such a page is
    `HELD_BIT | link << 32 | index in the hold`. `takes_sample`: the only token, and the last one of
    the history, is what the Step before has sampled for this session, and 0 in the payload.
    `masked`: a Mask says which tokens it may be, and another one those behind each token of the
    draft; they may come after the Step. `banned`: tokens that it is not, unless the mask allows no
    other. `scored`: for so many of its leading tokens the log-probability of the token that follows
    is wanted, which is in the payload, and the `scored_best` best ones there. `state_read` is the
    slot with the recurrent state at `start`, -1 at position 0; the state behind the tokens is
    written to `state_written`, another slot. Both are -1 for a model without. With `drafts`
    the tokens are one and so many of a draft behind it: a token is sampled behind each of them, up
    to the first that differs from the draft. `state_written` is the state behind those that do not.
    """

    session: int
    epoch: int
    start: int
    n_tokens: int
    n_pages: int
    sampling: Sampling | None
    history_len: int = 0
    segments: tuple[Segment, ...] = ()
    takes_sample: bool = False
    masked: bool = False
    banned: tuple[int, ...] = ()
    scored: int = 0
    scored_best: int = 0
    state_read: int = -1
    state_written: int = -1
    drafts: int = 0


LOGITS_ROWS_MIN = 16  # each round of logits reads the matrix of the vocabulary


def logits_rows_max(entries_max: int) -> int:
    """Rows for which a step of a lane with so many seats may want logits: one of each entry that
    samples, and one of each token of a draft."""
    return max(entries_max, LOGITS_ROWS_MIN)


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


class StateFile(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A recurrent state in `slot`, and its file `name` in the folder of states; `seed` is that of
    the file's checksum."""

    slot: int
    name: str
    seed: int


class Step(Message, tag=6, frozen=True):
    """Engine -> worker: one batch, and page chores around it.

    Order: poison, reserve, relabel, import, touch, save and load states, forward + sample, digest,
    verify. Payload: slot
    codes u64 of all entries, then their tokens i32, then penalty histories i32, then the tokens
    i32 of every ImportRows (`rows` each), then the tokens i32 of every Entry.scored. An empty
    `entries` is legal (chores only). `touch` holds codes of sealed pages to fault in, best effort,
    and of open pages whose rows another lane is about to read;
    `freed` the codes of pages of the store that have been freed, for a device with copies of pages;
    `deleted` the numbers of extents that have been deleted, which are unmapped first.
    An entry whose attention to the pages of a peer takes longer for a message than `lap_ms`, or a
    limit of the worker's, or for all layers than a small multiple of `lap_ms`, is unreachable.
    """

    entries: tuple[Entry, ...]
    poison: tuple[int, ...] = ()
    reserve: tuple[ReserveSlot, ...] = ()
    digest: tuple[Digest, ...] = ()
    verify: tuple[Verify, ...] = ()
    relabel: tuple[Relabel, ...] = ()
    import_rows: tuple[ImportRows, ...] = ()
    touch: tuple[int, ...] = ()
    lap_ms: int = 2000
    freed: tuple[int, ...] = ()
    deleted: tuple[int, ...] = ()
    save_states: tuple[StateFile, ...] = ()
    load_states: tuple[StateFile, ...] = ()


class SampledRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The token sampled for one entry; `top` = n best (token, logprob) if asked."""

    session: int
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class ScoredRows(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What Entry.scored asks for: the log-probabilities, f32, and for each of these the best tokens
    i32 and their log-probabilities f32, the same number of them for each."""

    session: int
    logprobs: bytes
    best: bytes
    best_logprobs: bytes


class StepDone(Message, tag=7, frozen=True):
    """Worker -> engine: what a Step produced.

    `rows`: one for each entry that samples, in order; of an entry with a draft, one for each token
    that was sampled. `nonfinite` = indices of entries with NaN or Inf: no token, their new rows are
    unusable. `digests` answers Step.digest in order; `verified` answers Step.verify in order;
    `imported` = leading rows proven and copied per Step.import, in order. `unreachable` = indices
    of entries that a peer did not serve: as those of `nonfinite`. `unmasked`: so are those whose
    Mask had not come when the step was computed. `elapsed_us` is without `waited_us`, in which the
    worker had nothing to do until a peer answered. `scores`: of the other entries with
    Entry.scored, in order. `states`: whether each of Step.save_states, then of Step.load_states,
    was saved or loaded.
    """

    rows: tuple[SampledRow, ...]
    nonfinite: tuple[int, ...]
    digests: tuple[bytes, ...]
    verified: tuple[bool, ...]
    elapsed_us: int
    imported: tuple[int, ...] = ()
    unreachable: tuple[int, ...] = ()
    waited_us: int = 0
    unmasked: tuple[int, ...] = ()
    scores: tuple[ScoredRows, ...] = ()
    states: tuple[bool, ...] = ()


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
    """Answer to Ping. `counts`: frames of data links since the start, by what became of them."""

    counts: dict[str, int] = msgspec.field(default_factory=dict[str, int])


class Shutdown(Message, tag=11, frozen=True):
    """Engine -> worker: end now; nothing is in flight."""


class OpenLink(Message, tag=12, frozen=True):
    """Engine -> worker: serve the connected socket that has come with `token`, as link `number`.

    `number` is 1 to LINK_MAX and not that of an open link. `peer` is the name that the other end
    must prove; `dials`: this end connected, and begins the TLS handshake.
    """

    number: int
    peer: str
    token: bytes
    dials: bool


class CloseLink(Message, tag=13, frozen=True):
    """Engine -> worker: close a data link; LinkChanged follows if it was open."""

    number: int


class HeadShape(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The attention of a model: its layers, KV heads, dimensions of a head, query heads, and
    `KvHeads.v_first`."""

    n_layer: int
    n_kv_head: int
    head_dim: int
    n_head: int
    v_first: int = 0


class Hold(Message, tag=14, frozen=True):
    """Engine -> worker: answer queries for these pages until Release; the engine keeps them.

    `hold` is not to be guessed: any peer that knows it may attend to the pages. A second Hold of it
    replaces the pages. `shape`: of the model that they are of; None = of the worker's own.
    """

    hold: int
    codes: tuple[int, ...]
    shape: HeadShape | None = None


class Release(Message, tag=15, frozen=True):
    """Engine -> worker: answer no more queries for this hold."""

    hold: int


class LinkChanged(Message, tag=16, frozen=True):
    """Worker -> engine: a data link is up (its handshake is done), or has ended: `why`."""

    number: int
    is_up: bool
    why: str = ""


class HoldChanged(Message, tag=17, frozen=True):
    """Worker -> engine: queries for this hold are answered, or not: `why`."""

    hold: int
    is_served: bool
    why: str = ""


class OpenStage(Message, tag=18, frozen=True):
    """Engine -> worker: be a stage of pipeline `run`: compute layers [first, end) of its tokens.

    `run` is not to be guessed. The timeline has `n_tokens` tokens, of whole pages. Rows of the
    residual stream come from the peer `previous` ("" = this is the first stage) and go on to
    `following` ("" = the last one), tiles of full pages to `owner`; links to them are open. These
    layers' KV is kept in memory of the worker until CloseStage. StageChanged follows. A model with
    recurrent state has a `state_interval`, of whole pages: the state of these layers behind every
    so many tokens and behind the last one goes to `owner`, too. Else it is 0.
    """

    run: int
    first: int
    end: int
    n_tokens: int
    previous: str
    following: str
    owner: str
    state_interval: int = 0


class CloseStage(Message, tag=19, frozen=True):
    """Engine -> worker: forget this pipeline, as a stage of it and as its owner. Of an owner that
    gathers, GatherChanged says how far it has come."""

    run: int


class StageStep(Message, tag=20, frozen=True):
    """Engine -> worker, a request: compute tokens [start, start + n_tokens) of a stage.

    They follow those computed before, and their rows have arrived; no position whose state is sent
    lies between them. Payload: for the first stage the tokens i32, else nothing.
    """

    run: int
    start: int
    n_tokens: int


class StageDone(Message, tag=21, frozen=True):
    """Worker -> engine: what a StageStep did; `why`: the stage has ended, "" = it goes on."""

    run: int
    elapsed_us: int
    why: str = ""


class StageChanged(Message, tag=22, frozen=True):
    """Worker -> engine: rows of the stage's first `arrived` tokens have come; or it has ended
    without a CloseStage: `why`."""

    run: int
    arrived: int
    why: str = ""


class Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Layers [first, end) of a pipeline, which `peer` computes (own name: this worker)."""

    peer: str
    first: int
    end: int


class Gather(Message, tag=23, frozen=True):
    """Engine -> worker: take the tiles of pipeline `run`; `parts` are all layers in order.

    GatherChanged follows.
    """

    run: int
    parts: tuple[Part, ...]


class GatherPages(Message, tag=24, frozen=True):
    """Engine -> worker: the next pages of the timeline are gathered in these arena slots.

    The slots are reserved, and nothing else writes to them until the page is gathered or
    CloseStage. GatherChanged follows.
    """

    run: int
    slots: tuple[int, ...]


class GatherChanged(Message, tag=25, frozen=True):
    """Worker -> engine: of the timeline's leading pages, `accepted` have a slot and `complete` have
    all their tiles, and the first `states` of those that GatherState has named are done; or the
    gathering has ended: `why`."""

    run: int
    accepted: int
    complete: int
    why: str = ""
    states: int = 0


class GatherState(Message, tag=27, frozen=True):
    """Engine -> worker: gather the recurrent state behind `position` tokens, and save it to the
    file `name` of the folder of states, with a checksum of this seed; "": leave it out.

    It comes behind the one named before. GatherChanged follows once it is there.
    """

    run: int
    position: int
    name: str
    seed: int


class Mask(Message, tag=26, frozen=True):
    """Engine -> worker: the tokens that a session may have at a position: a bit each, the lowest
    first, in words of 32. It is sent after the Step with such an entry, whose number its frame has:
    behind the same position of another step there may be other tokens. Empty: there is none.

    The mask is no payload, so that the payload of a step that runs stays.
    """

    session: int
    position: int
    bits: bytes


StageNote = OpenStage | CloseStage | Gather | GatherPages | GatherState
LinkNote = OpenLink | CloseLink | Hold | Release | StageNote
StageEvent = StageChanged | GatherChanged
LaneEvent = LinkChanged | HoldChanged | StageEvent
LaneMessage = (
    Load | Loading | Ready | Attach | Attached | Step | StepDone | Failed | Ping | Pong | Shutdown
    | LinkNote | LaneEvent | StageStep | StageDone | Mask
)  # fmt: skip
LaneFrame = Frame[LaneMessage]
LANE_LINK = LinkSchema[LaneMessage](
    VERSION,
    Load, Loading, Ready, Attach, Attached, Step, StepDone, Failed, Ping, Pong, Shutdown,
    OpenLink, CloseLink, Hold, Release, LinkChanged, HoldChanged,
    OpenStage, CloseStage, StageStep, StageDone, StageChanged, Gather, GatherPages, GatherChanged,
    Mask, GatherState,
)  # fmt: skip
