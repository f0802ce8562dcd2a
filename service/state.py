"""State of the HTTP side, and what a request carries from the checks to its handler.

Owns the one `Service` object and the keys under which aiohttp keeps things. No behaviour but
cancelling: routes are in `service.api` and `service.session_routes`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from batchengine.config import Config
from service import errors, work
from service.auth import Caller, Doorkeeper, Keyring
from service.door import Engine, Generation

log = logging.getLogger("batchengine.service")

BODIES_BYTES_MAX = 256 << 20  # of all requests that are being read, parsed and tokenised


@dataclass(slots=True)
class Live:
    """One HTTP request that has generations running: what `cancel` and `requests` look at."""

    job: work.Job
    generations: list[Generation]
    began: float


@dataclass(slots=True)
class Service:
    """State of the HTTP side: the engine, the settings, and the requests in flight."""

    engine: Engine
    config: Config
    keyring: Keyring
    doorkeeper: Doorkeeper
    live: dict[str, Live] = field(default_factory=dict[str, Live])
    accepting: bool = True
    preparing: int = 0  # requests on their way to `live`
    bodies_bytes: int = 0  # of their bodies

    @classmethod
    def create(cls, engine: Engine, config: Config) -> Service:
        return cls(engine, config, Keyring(config.auth), Doorkeeper(config))

    def __repr__(self) -> str:
        return f"<Service {self.engine.state} live={len(self.live)} accepting={self.accepting}>"

    def cancel(self, request_id: str) -> bool:
        """Calls off one request; False if it is not running."""
        live = self.live.get(request_id)
        if live is None:
            return False
        for generation in live.generations:
            generation.cancel()
        return True

    @contextmanager
    def place(self) -> Generator[Place, None, None]:
        """A place for a request from before its body until it is live or refused; raises 429.

        Bodies and tokenising cost as much as streams do: `streams_max` bounds both together.
        """
        busy, limit = len(self.live) + self.preparing, self.config.limits.streams_max
        if busy >= limit:
            raise errors.shed(busy, limit)
        place = Place(self)
        self.preparing += 1
        try:
            yield place
        finally:
            self.preparing -= 1
            self.bodies_bytes -= place.body_bytes

    def enter(self, live: Live) -> Live:
        """The request runs. One that is resumed takes the place of the stream it takes over."""
        self.live[live.job.request_id] = live
        return live

    def leave(self, live: Live, outcome: str) -> None:
        """It is over: one line in the log, without a word of the prompt or the answer."""
        job = live.job
        if self.live.get(job.request_id) is live:
            del self.live[job.request_id]
        log.info(
            "%s %s class=%s session=%s choices=%d prompt_tokens=%d %.0f ms",
            job.request_id,
            outcome,
            job.sla.sla_class,
            live.generations[0].session_id or "-",
            len(job.requests),
            len(job.requests[0].prompt) if job.requests else 0,
            1000 * (time.monotonic() - live.began),
        )


@dataclass(slots=True)
class Place:
    """What a request that is being prepared holds of the service."""

    service: Service
    body_bytes: int = 0

    def hold(self, byte_count: int) -> None:
        """So much more of its body has come; raises 503 when all bodies together are too many."""
        self.body_bytes += byte_count
        self.service.bodies_bytes += byte_count
        bytes_max = max(BODIES_BYTES_MAX, self.service.config.server.body_bytes_max)
        if self.service.bodies_bytes > bytes_max:
            raise errors.too_many_bodies(bytes_max)


SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)
HEADERS = web.RequestKey("headers", dict[str, str])  # for the reply, whatever it will be
CALLER = web.RequestKey("caller", Caller)
