"""Messages of the control link, between the engines of two daemons.

Both sides send Hello first. When both accept the other's, each sends a Heartbeat five times a
second, and any message of this module whenever it likes. The header's `incarnation` is the
sender's; `attempt` says whether a frame is a request or a reply, and then `step` is the number
that the asking side gave the request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from batchengine.core import LOGPROBS_MAX, Sampling, SlaClass
from batchengine.wire.frames import Frame, LinkSchema, Message

VERSION = 6
ONE_WAY, REQUEST, REPLY = 0, 1, 2  # of `attempt` in the header
TEXT_CHARS_MAX = 256
LAYERS_MAX = 4096
DESCRIPTOR_CHARS_MAX = 8192
HEADS_MAX = 1024

Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Difference = Annotated[int, msgspec.Meta(ge=1 - (1 << 63), le=(1 << 63) - 1)]
HOLD_PAGES_MAX = 1 << 20
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
PageDigest = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
TimelineLength = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
TURN_TOKENS_MAX = 16_384  # in one TurnTokens: 64 KiB
Microseconds = Count  # of the sender's monotonic clock


class PeerLoad(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a daemon does and could take, now. Bytes are of KV; a rate is 0 until it is measured.

    `pages_held`: pages that it keeps for sessions of other daemons. `leaves`: it takes no more of
    them, and the owners of those sessions are to take them back. `hold_bytes_free` is what it could
    keep in addition; below 0 its own sessions need so much of that room, and the owners are to take
    pages back. `other_bytes_free`: the same, of pages of other models, which get whole extents of
    the store and no room that its own sessions have, also at rest. `prefill_ms`: predicted time of
    prefill that its first lane has still to do, by class, with that of more urgent ones;
    `stage_ms`: of the stages of pipelines there, without those of the receiver. `hold_bytes_max`:
    pages of the receiver that it keeps at most, if it keeps no others.
    """

    requests_running: Count = 0
    requests_waiting: Count = 0
    kv_bytes: Count = 0
    kv_free_bytes: Count = 0
    pages_held: Count = 0
    prefill_tokens_per_s: Count = 0
    read_bytes_per_s: Count = 0
    leaves: bool = False
    hold_bytes_free: Difference = 0
    other_bytes_free: Difference = 0
    prefill_ms: tuple[Count, Count, Count, Count] = (0, 0, 0, 0)
    stage_ms: Count = 0
    hold_bytes_max: Count = 0


class KvFormat(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a daemon that serves another model needs to keep pages of the sender: the descriptor of
    its KV as JSON, and its number of query heads."""

    descriptor: Annotated[str, msgspec.Meta(max_length=DESCRIPTOR_CHARS_MAX)]
    n_head: Annotated[int, msgspec.Meta(ge=1, le=HEADS_MAX)]


class Hello(Message, tag=1, frozen=True):
    """First frame of each side: who it is, what it computes, and what it can do.

    `model_hash`, `arith_id` and `repr_id` are hex; two daemons with equal ones compute the same
    KV bytes. `features`: optional parts of the protocol that the sender has; the others are not
    used with it. `kv`: of the pages that a daemon with another model may keep for it.
    """

    name: Text
    model_id: Text
    model_hash: Text
    arith_id: Text
    repr_id: Text
    features: Annotated[tuple[Text, ...], msgspec.Meta(max_length=32)]
    load: PeerLoad
    kv: KvFormat | None = None


class Heartbeat(Message, tag=2, frozen=True):
    """The sender is alive: its clock, and the load it has.

    `echo_us` is `sent_us` of the last Heartbeat that the sender got (0 = none yet), `held_us` how
    long ago it got that one: the receiver subtracts it from the time of the round trip.
    """

    sent_us: Microseconds
    echo_us: Microseconds
    held_us: Microseconds
    load: PeerLoad


class Declined(Message, tag=3, frozen=True):
    """Last frame of a link that the sender will not use, instead of Hello."""

    why: Annotated[str, msgspec.Meta(max_length=1024)]


class Bulk(Message, tag=4, frozen=True):
    """A payload of zeros whose speed is measured; the last one of a series is a request."""


class BulkReceived(Message, tag=5, frozen=True):
    """Reply to the last Bulk: how many payload bytes arrived since the first one."""

    n_bytes: Count


class OpenData(Message, tag=6, frozen=True):
    """Request of the side that dials: it will connect for the data link between the two workers.

    An earlier data link, and an earlier token, are void.
    """


class DataExpected(Message, tag=7, frozen=True):
    """Reply to OpenData: the token to begin the connection with, once and soon."""

    token: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class DataRefused(Message, tag=8, frozen=True):
    """Reply to OpenData: there can be no data link now."""

    why: Text


class DataReady(Message, tag=9, frozen=True):
    """To the side that dials: there can be a data link from now on, so it need not wait to ask."""


class ReserveHold(Message, tag=10, frozen=True):
    """Request of a session's owner: promise room for pages at the end of a hold, new or not."""

    hold: Count
    n_pages: Annotated[int, msgspec.Meta(ge=1, le=HOLD_PAGES_MAX)]


class HoldReserved(Message, tag=11, frozen=True):
    """Reply: the index of the first promised page, or why there is no room."""

    first: Count
    why: Text = ""


class OfferPage(Message, tag=12, frozen=True):
    """Request: put a page into a reserved place of a hold. Payload: its token ids, as in a key.

    Its key follows from `parent`, the tokens and `salt`; `digest` is that of its bytes.
    """

    hold: Count
    index: Count
    parent: Key
    digest: PageDigest
    salt: Annotated[bytes, msgspec.Meta(max_length=1024)]


class PageAnswer(Message, tag=13, frozen=True):
    """Reply: the holder has the page already, or it is to be sent, or `why` it cannot be held."""

    is_wanted: bool
    why: Text = ""


class PagePart(Message, tag=14, frozen=True):
    """The next bytes of a page, in order: of one that was offered and is wanted, or that was asked
    for. The last part of an offered page is a request."""

    hold: Count
    index: Count
    offset: Count


class PageStored(Message, tag=15, frozen=True):
    """Reply to the last part: the page is in the hold, or `why` not."""

    why: Text = ""


class ServeHold(Message, tag=16, frozen=True):
    """Request: have the worker answer queries for the pages of a hold, as far as they are there."""

    hold: Count


class HoldServed(Message, tag=17, frozen=True):
    """Reply: so many pages, from the first one of the hold on, are attended to."""

    n_pages: Count
    why: Text = ""


class ReleaseHold(Message, tag=18, frozen=True):
    """The owner needs only the first `kept` pages of a hold any more; 0 = the hold ends."""

    hold: Count
    kept: Count


class HoldGone(Message, tag=19, frozen=True):
    """The holder has ended a hold, such as for a page that became invalid."""

    hold: Count
    why: Text


class ReadPage(Message, tag=20, frozen=True):
    """Request: send a page of a hold back, as parts; PageSent follows them."""

    hold: Count
    index: Count


class PageSent(Message, tag=21, frozen=True):
    """Reply, after the parts: the page was sent, or `why` not."""

    why: Text = ""


class ErasePages(Message, tag=22, frozen=True):
    """Request: erase the pages of a timeline after its first `kept` tokens, and the states behind
    them. Payload: its token ids.

    A session of it was dropped; pages that sessions of the receiver share stay.
    """

    salt: Annotated[bytes, msgspec.Meta(max_length=1024)]
    kept: Count


class OfferState(Message, tag=24, frozen=True):
    """Request: keep the recurrent state behind a page. Payload: the page's token ids, as in a key.

    Its key follows from `parent`, the tokens and `salt`; `digest` is the checksum of its bytes,
    seeded by the key. The reply is PageAnswer; it ends an offer before whose bytes have not come.
    """

    parent: Key
    digest: PageDigest
    salt: Annotated[bytes, msgspec.Meta(max_length=1024)]


class StateBytes(Message, tag=25, frozen=True):
    """The next bytes of the state that was offered last and is wanted. Those at its end are a
    request, with the reply PageStored."""


class PagesErased(Message, tag=23, frozen=True):
    """Reply: so many pages are overwritten."""

    n_pages: Count
    why: Text = ""


HoldReplies = HoldReserved | PageAnswer | PageStored | HoldServed | PageSent | PagesErased


class OpenPipeline(Message, tag=30, frozen=True):
    """Request of a pipeline's owner: be its stage of layers [first, end).

    `run` is not to be guessed. Rows come from the worker of `previous` ("" = this is the first
    stage) and go to that of `following` ("" = the last one), tiles to that of the sender, at most
    `chunk_tokens` tokens at a time. A model with recurrent state has a `state_interval`: states go
    to the sender behind every so many tokens and behind the last one. Payload: for the first stage
    the tokens i32, else nothing.
    """

    run: Count
    first: Annotated[int, msgspec.Meta(ge=0, lt=LAYERS_MAX)]
    end: Annotated[int, msgspec.Meta(ge=1, le=LAYERS_MAX)]
    n_tokens: Annotated[int, msgspec.Meta(ge=256, le=1 << 24, multiple_of=256)]
    chunk_tokens: Annotated[int, msgspec.Meta(ge=32, le=1024)]
    previous: Text
    following: Text
    state_interval: Annotated[int, msgspec.Meta(ge=0, le=1 << 24, multiple_of=256)]


class PipelineOpened(Message, tag=31, frozen=True):
    """Reply to OpenPipeline: the stage is open, or `why` it is not."""

    why: Text = ""


class PipelineGo(Message, tag=32, frozen=True):
    """To the first stage: the owner has room for the pages of tokens before `until`."""

    run: Count
    until: Count


class PipelineEnded(Message, tag=33, frozen=True):
    """Either way: the pipeline is over for the sender, `why` if it failed."""

    run: Count
    why: Text = ""


class RunTurn(Message, tag=40, frozen=True):
    """Request: compute a turn of the sender's too, from the end of `n_tokens` tokens, which follow
    as TurnTokens, for at most `tokens_max` tokens.

    `run` is above those of earlier requests. `salt` is that of the content keys of its pages. The
    sender decides which token is the last one.
    """

    run: Count
    n_tokens: TimelineLength
    tokens_max: TimelineLength
    sampling: Sampling
    sla_class: SlaClass
    salt: Annotated[bytes, msgspec.Meta(max_length=1024)]


class TurnAccepted(Message, tag=41, frozen=True):
    """Reply to RunTurn: the turn is computed there too, or `why` it is not."""

    why: Text = ""


class TokenChoice(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The logprob of a sampled token, and the `top` best (token, logprob) if asked."""

    logprob: float
    top: Annotated[tuple[tuple[Count, float], ...], msgspec.Meta(max_length=LOGPROBS_MAX)] = ()


class TurnTokens(Message, tag=42, frozen=True):
    """Either way: tokens of the turn's timeline from position `first` on. Payload: token ids i32.

    `is_of_owner`: it is a turn of the sender. `choices`: one for each token if the turn has
    logprobs and they come to its owner, else none.
    """

    run: Count
    is_of_owner: bool
    first: Count
    choices: Annotated[tuple[TokenChoice, ...], msgspec.Meta(max_length=TURN_TOKENS_MAX)] = ()


class TurnGo(Message, tag=43, frozen=True):
    """Of the owner: tokens before position `until` may be sent."""

    run: Count
    until: Count


class TurnEnded(Message, tag=44, frozen=True):
    """Either way: the turn is not computed there any more, or need not be; `why` if it failed.

    `is_of_owner`: it is a turn of the sender.
    """

    run: Count
    is_of_owner: bool
    why: Text = ""


PeerMessage = (
    Hello | Heartbeat | Declined | Bulk | BulkReceived
    | OpenData | DataExpected | DataRefused | DataReady
    | ReserveHold | OfferPage | PagePart | ServeHold | ReleaseHold | HoldGone | ReadPage
    | ErasePages | OfferState | StateBytes | HoldReplies
    | OpenPipeline | PipelineOpened | PipelineGo | PipelineEnded
    | RunTurn | TurnAccepted | TurnTokens | TurnGo | TurnEnded
)  # fmt: skip
PeerFrame = Frame[PeerMessage]
PEER_LINK = LinkSchema[PeerMessage](
    VERSION,
    Hello, Heartbeat, Declined, Bulk, BulkReceived,
    OpenData, DataExpected, DataRefused, DataReady,
    ReserveHold, HoldReserved, OfferPage, PageAnswer, PagePart, PageStored, ServeHold, HoldServed,
    ReleaseHold, HoldGone, ReadPage, PageSent, ErasePages, PagesErased, OfferState, StateBytes,
    OpenPipeline, PipelineOpened, PipelineGo, PipelineEnded,
    RunTurn, TurnAccepted, TurnTokens, TurnGo, TurnEnded,
)  # fmt: skip
