"""Messages of the control link, between the engines of two daemons.

Both sides send Hello first. When both accept the other's, each sends a Heartbeat five times a
second, and any message of this module whenever it likes. The header's `incarnation` is the
sender's; `attempt` says whether a frame is a request or a reply, and then `step` is the number
that the asking side gave the request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from batchengine.wire.frames import Frame, LinkSchema, Message

VERSION = 2
ONE_WAY, REQUEST, REPLY = 0, 1, 2  # of `attempt` in the header
TEXT_CHARS_MAX = 256

Text = Annotated[str, msgspec.Meta(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Microseconds = Count  # of the sender's monotonic clock


class PeerLoad(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What a daemon does and could take, now. Bytes are of KV; a rate is 0 until it is measured.

    `pages_held`: pages that it keeps for sessions of other daemons. `leaves`: it takes no more of
    them, and the owners of those sessions are to take them back.
    """

    requests_running: Count = 0
    requests_waiting: Count = 0
    kv_bytes: Count = 0
    kv_free_bytes: Count = 0
    pages_held: Count = 0
    prefill_tokens_per_s: Count = 0
    read_bytes_per_s: Count = 0
    leaves: bool = False


class Hello(Message, tag=1, frozen=True):
    """First frame of each side: who it is, what it computes, and what it can do.

    `model_hash`, `arith_id` and `repr_id` are hex; two daemons with equal ones compute the same
    KV bytes. `features`: optional parts of the protocol that the sender has; the others are not
    used with it.
    """

    name: Text
    model_id: Text
    model_hash: Text
    arith_id: Text
    repr_id: Text
    features: Annotated[tuple[Text, ...], msgspec.Meta(max_length=32)]
    load: PeerLoad


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


PeerMessage = (
    Hello | Heartbeat | Declined | Bulk | BulkReceived
    | OpenData | DataExpected | DataRefused
)  # fmt: skip
PeerFrame = Frame[PeerMessage]
PEER_LINK = LinkSchema[PeerMessage](
    VERSION,
    Hello, Heartbeat, Declined, Bulk, BulkReceived,
    OpenData, DataExpected, DataRefused,
)  # fmt: skip
