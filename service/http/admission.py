"""State of the HTTP side: admission of requests, their bodies, and running requests.

Owns the one `Service` object, the reading of bodies within their limits, and the keys under which
aiohttp keeps a request's data. Routes are in `service.http.app` and `service.http.sessions`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from batchengine import errors
from batchengine.config import Config, keys
from batchengine.core import Usage
from service.engine_api import EngineApi, Facts, GenerationApi
from service.http.access import Attempts, Keyring, OriginPolicy, check_content
from service.http.fair_admission import FairAdmission
from service.log import facts
from service.protocols import requests
from service.protocols.carriers import Caller
from service.protocols.protocol import PromptLimits

log = logging.getLogger("batchengine.service")

BODY_SECONDS_MAX = 60.0  # a body that takes longer is an attack or a dead link
ROWS_FRESH_S = 0.5
BODIES_BYTES_MAX = 256 << 20  # of all requests that are being read, parsed and tokenised


@dataclass(slots=True)
class Live:
    """One HTTP request that has generations running. `outcome` is for the log; `begun` is set once
    a generation that has no reader has a token."""

    job: requests.HttpJob
    generations: list[GenerationApi]
    began: float
    outcome: str = "disconnected"
    usage: Usage | None = None  # of the first choice that ended
    begun: asyncio.Event | None = None


@dataclass(slots=True)
class Service:
    """State of the HTTP side: the engine, the settings, and the requests that run."""

    engine: EngineApi
    config: Config
    keyring: Keyring
    origin_policy: OriginPolicy
    folders: tuple[bytes, ...] = ()  # of the daemon, which answers leave out
    attempts: Attempts = field(default_factory=Attempts)
    fair_admission: FairAdmission = field(default_factory=FairAdmission)
    live: dict[int, Live] = field(default_factory=dict[int, Live])
    background: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])
    accepting: bool = True
    # by tenant: requests on their way to `live`, and the bytes of their bodies
    preparing: Counter[str] = field(default_factory=Counter[str])
    body_bytes: Counter[str] = field(default_factory=Counter[str])
    _rows: dict[tuple[str, int], tuple[float, Sequence[Facts]]] = field(
        default_factory=dict[tuple[str, int], tuple[float, Sequence[Facts]]]
    )

    @classmethod
    def create(cls, engine: EngineApi, config: Config) -> Service:
        return cls(engine, config, Keyring(config.auth), OriginPolicy(config), folders_of(config))

    def __repr__(self) -> str:
        return f"<Service {self.engine.phase} live={len(self.live)} accepting={self.accepting}>"

    def hide(self, answer: bytes) -> bytes:
        """An answer that may hold a path of this machine, with the name of the file only."""
        for folder in self.folders:
            answer = answer.replace(folder, b"")
        return answer

    def cancel(self, request_id: str) -> bool:
        """Cancels one request, and those that repeat its turn; False if none is running."""
        found = [
            live
            for live in self.live.values()
            if request_id in (live.job.asked.request_id, live.generations[0].turn_id)
        ]
        for live in found:
            for generation in live.generations:
                generation.cancel()
        return bool(found)

    def request_rows(self, tenant: str, count_max: int) -> Sequence[Facts]:
        """One row per request of the tenant that has not ended, `count_max` of them at most; up to
        ROWS_FRESH_S old, so that what watching costs does not grow with the watchers."""
        made, rows = self._rows.get((tenant, count_max), (0.0, ()))
        now = time.monotonic()
        if now - made > ROWS_FRESH_S:
            rows = self.engine.requests(tenant, count_max)
            self._rows[tenant, count_max] = now, rows
        return rows

    def requests_of(self, tenant: str) -> int:
        """How many requests of this tenant run or wait."""
        return sum(live.job.asked.tenant == tenant for live in self.live.values())

    @contextmanager
    def admit(self, tenant: str) -> Generator[Admission, None, None]:
        """Counts a request from before its body until it is live or refused; raises 503, or 429
        where the key has its share.

        `streams_max` bounds requests that are prepared and streams together; one key may take a
        share of it.
        """
        busy, limit = len(self.live) + self.preparing.total(), self.config.limits.streams_max
        if busy >= limit:
            self._shed("streams")
            raise errors.TOO_MANY_REQUESTS(running=busy, what="requests", limit=limit)
        if not keys.is_alone(self.config, tenant):
            own = self.preparing[tenant] + self.requests_of(tenant)
            own_max = keys.key_of(self.config, tenant).streams_max
            if not keys.may_take(self.config, tenant, own, limit, busy, own_max):
                self._shed("key_streams")
                raise errors.TOO_MANY_OF_KEY(running=own, limit=limit)
        admission = Admission(self, tenant)
        self.preparing[tenant] += 1
        try:
            yield admission
        finally:
            self.preparing[tenant] -= 1
            self.body_bytes[tenant] -= admission.body_bytes

    def _shed(self, reason: str) -> None:
        """Counts a refusal, whose class is not known before its body."""
        self.engine.metrics.shed_total.labels("", reason).inc()

    def enter(self, live: Live) -> Live:
        """Registers a request that runs; streams of one turn count one by one."""
        self.live[id(live)] = live
        return live

    def leave(self, live: Live, outcome: str) -> None:
        """Ends a request: one line in the log, without any of the prompt or the answer."""
        asked, first = live.job.asked, live.generations[0]
        del self.live[id(live)]
        usage, made = live.usage or Usage(), live.job.requests
        log.info(
            "%s %s", asked.request_id, outcome,
            extra=facts(
                {
                    "class": str(asked.sla.sla_class),
                    "key": asked.tenant or None,
                    "session": first.request.session_id,
                    "client_session": asked.client_name or None,
                    "choices": len(made) if len(made) > 1 else None,
                    "prompt_tokens": len(made[0].prompt),
                    "cached_tokens": None if live.usage is None else usage.cached_tokens,
                    "output_tokens": None if live.usage is None else usage.completion_tokens,
                    "lane": usage.lane or None,
                    "queue_ms": None if live.usage is None else round(usage.queue_ms, 1),
                    "ttft_ms": None if live.usage is None else round(usage.ttft_ms, 1),
                    "tpot_ms": usage.tpot_ms,
                    "total_ms": round(1000 * (time.monotonic() - live.began), 1),
                }
            ),
        )  # fmt: skip


def folders_of(config: Config) -> tuple[bytes, ...]:
    """The folders of the configuration's files with a slash behind each, the longest first."""
    files = (config.model.path, config.server.admin_socket)
    named = {config.store.dir, config.cache_dir, *map(os.path.dirname, files)}
    named |= {os.path.dirname(name.rstrip("/")) for name in (config.store.dir, config.cache_dir)}
    found = {os.path.join(name, "").encode() for name in named if os.path.isabs(name)}
    return tuple(sorted(found - {b"/"}, key=len, reverse=True))


@dataclass(slots=True)
class Admission:
    """The memory that a request holds while it is prepared: the bytes of its body."""

    service: Service
    tenant: str
    body_bytes: int = 0

    def hold(self, byte_count: int) -> None:
        """Adds bytes of its body; raises 503 when those of all requests are too many, or those of
        its key's other requests are more than that key's share."""
        service, config = self.service, self.service.config
        self.body_bytes += byte_count
        service.body_bytes[self.tenant] += byte_count
        bytes_max = max(BODIES_BYTES_MAX, config.server.body_bytes_max)
        others = service.body_bytes[self.tenant] - self.body_bytes
        fits = others == 0 or keys.is_alone(config, self.tenant)
        taken = service.body_bytes.total()
        if taken > bytes_max or not (
            fits or keys.may_take(config, self.tenant, others, bytes_max, taken, 0)
        ):
            raise errors.TOO_MANY_BODIES(bytes_max=bytes_max)


async def read_body(
    request: web.Request, bytes_max: int, seconds_max: float, admission: Admission | None = None
) -> bytearray:
    """The bytes of a body, never more than allowed; raises 408, 413, or 503 from `admission`."""
    if (request.content_length or 0) > bytes_max:
        raise errors.BODY_TOO_LARGE(bytes_max=bytes_max)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds_max):
            while part := await request.content.readany():  # a chunked body has no Content-Length
                if admission is not None:
                    admission.hold(len(part))
                body += part
                if len(body) > bytes_max:
                    raise errors.BODY_TOO_LARGE(bytes_max=bytes_max)
    except TimeoutError:
        raise errors.BODY_TOO_SLOW(seconds=seconds_max) from None
    return body


async def read_json_body(request: web.Request, admission: Admission) -> bytearray:
    """The bytes of a POST, never more than allowed; raises 400, 408, 413, 415 or 503."""
    check_content(request.headers, request.content_type, request.charset)
    bytes_max = request.app[SERVICE].config.server.body_bytes_max
    return await read_body(request, bytes_max, BODY_SECONDS_MAX, admission)


def prompt_limits(service: Service) -> PromptLimits:
    """What bounds a prompt now; the engine has loaded."""
    info, config = service.engine.info, service.config
    tokens_max = config.answer_tokens_max or info.context_tokens
    return PromptLimits(
        info.context_tokens, info.vocab_size, tokens_max, context_bound=info.context_bound
    )


SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)
HEADERS = web.RequestKey("headers", dict[str, str])  # for the reply, whatever it will be
CALLER = web.RequestKey("caller", Caller)
