"""Defects of linked daemons, put in on purpose: seeds of several daemons must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

from batchengine.engine.linked.holds_server import HoldServer
from batchengine.engine.linked.holds_taken import HoldsTaken
from batchengine.peers.link import PeerLink
from batchengine.wire.peer import ReleaseHold
from kv_store import keys
from kv_store.pages.seal import PageSealer
from tests.simulation.linked.world import LinkedWorld
from tests.simulation.world import simulate


class Defect(NamedTuple):
    """How it is put in, and the faults that bring it out."""

    plant: Callable[[], AbstractContextManager[Any]]
    faults: Mapping[str, float]


def _not_released() -> AbstractContextManager[Any]:
    """An owner forgets to say that it needs a hold no more."""
    send = PeerLink.send

    def forgetful(link: PeerLink, message: Any, payload: bytes = b"") -> None:
        if not isinstance(message, ReleaseHold):
            send(link, message, payload)

    return mock.patch.object(PeerLink, "send", forgetful)


def _lost_taken_as_held() -> AbstractContextManager[Any]:
    """An owner counts on holds whose link was lost."""
    return mock.patch.object(HoldsTaken, "peer_down", return_value=None)


def _served_after_its_end() -> AbstractContextManager[Any]:
    """A holder's worker goes on to serve a hold that has ended, and whose pages are unpinned."""

    def forgetful(server: Any, names: list[Any]) -> None:
        for name in names:
            server._served.pop(name, None)

    return mock.patch.object(HoldServer, "_end", forgetful)


def _wrong_bytes_accepted() -> AbstractContextManager[Any]:
    """A holder takes whatever bytes a page comes with."""
    seal = PageSealer.seal_bytes

    def credulous(sealer: PageSealer, ticket: Any, data: Any, digest: bytes) -> Any:
        return seal(sealer, ticket, data, keys.payload_digest(data))

    return mock.patch.object(PageSealer, "seal_bytes", credulous)


DEFECTS = {
    "hold not released": Defect(_not_released, {}),
    "lost range taken as held": Defect(_lost_taken_as_held, {"reset": 2.0}),
    "served after its end": Defect(_served_after_its_end, {"reset": 4.0}),
    "wrong bytes accepted": Defect(_wrong_bytes_accepted, {"flip": 0.5}),
}


def seeds_until_found(name: str, seeds: range) -> int:
    """How many of these seeds it takes to find a defect. Raises AssertionError if none does."""
    defect = DEFECTS[name]
    world = type("Planted", (LinkedWorld,), {"only": defect.faults})
    with defect.plant():
        for count, seed in enumerate(seeds, 1):
            if simulate(seed, world=world).error:
                return count
    raise AssertionError(f"{len(seeds)} seeds do not find: {name}")
