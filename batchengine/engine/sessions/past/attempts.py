"""Attempts whose clients left before the end, for the same request when it is sent again.

Owns what that request takes over: the seed, since a client that sends none gets a new one each
time, and the tokens of an answer that no session holds. The KV of both is found by content.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from batchengine.core import Found, GenerationRequest, TimelineUse
from batchengine.engine.turns.stream import Continuation, Generation

ATTEMPTS_MAX = 256
OF_TENANT_MAX = 64
KEPT_S = 60.0  # after its client left; libraries send a request again within 10 s

Key = tuple[str, str]  # the tenant, and what names a request apart from its stream


@dataclasses.dataclass(slots=True)
class Attempt:
    """A request that was cancelled; `tokens` of its answer are complete once it is `over`."""

    request_id: str
    turn_id: str
    streams: bool
    seed: int
    until_s: float
    session_id: str | None  # which has its tokens
    tokens: array[int]
    over: asyncio.Event


def _in_session(request: GenerationRequest, attempt: Attempt) -> GenerationRequest:
    """Return the request as a retry. One whose session was made for it alone goes on with the turn
    that it repeats, under the id of that; others find their session by their own rules."""
    request = dataclasses.replace(request, is_retry=True)
    is_own = not (request.in_family or request.append or request.idempotency_key)
    if not is_own or attempt.session_id is None:
        return request
    return dataclasses.replace(request, session_id=attempt.session_id, request_id=attempt.turn_id)


def is_again(request: GenerationRequest, streams: bool) -> bool:
    """Whether a request that asks the same as an earlier one is that one, sent again: its client
    says so, or only the earlier one `streams`. Others may want another answer."""
    return request.is_retry or (streams and not request.streams)


class LeftAttempts:
    """The attempts of one engine, the oldest first. All methods run on its event loop."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._of: dict[Key, Attempt] = {}

    def __repr__(self) -> str:
        return f"<LeftAttempts {len(self._of)}>"

    def __len__(self) -> int:
        return len(self._of)

    def left(self, generation: Generation) -> None:
        """Note a request that ends before its time: its client left, unless it was aborted."""
        request = generation.request
        if not request.attempt or not generation.cancelled:
            return
        key, now_s = (request.tenant, request.attempt), self._now_s()
        self._drop(key)
        over = asyncio.Event()
        if request.session_id is not None:  # requests of a session wait for each other
            over.set()
        self._of[key] = Attempt(
            request.request_id, generation.turn_id, request.streams, request.sampling.seed,
            now_s + KEPT_S, request.session_id, array("i"), over,
        )  # fmt: skip
        for old in [one for one, attempt in self._of.items() if attempt.until_s < now_s]:
            self._drop(old)
        tenants = Counter(tenant for tenant, _ in self._of)
        if tenants[request.tenant] > OF_TENANT_MAX:
            self._drop(next(one for one in self._of if one[0] == request.tenant))
        elif len(self._of) > ATTEMPTS_MAX:
            self._drop(next(iter(self._of)))

    def keep(self, generation: Generation, timeline: Sequence[int]) -> bool:
        """Keep the answer of a request that has no session; whether its client left."""
        attempt = self._attempt(generation)
        if attempt is None or attempt.session_id is not None:
            return False
        attempt.tokens = array("i", timeline[len(generation.request.prompt) :])
        return True

    def end(self, generation: Generation) -> None:
        """Note that nothing more of a request is computed."""
        if (attempt := self._attempt(generation)) is not None:
            attempt.over.set()

    async def taken(
        self, request: GenerationRequest
    ) -> tuple[GenerationRequest, Continuation | None]:
        """Return the request as it goes on with an attempt that its client left, if it repeats one.

        One whose client reads is not taken: of requests without a session, which is which is not
        known.
        """
        key = request.tenant, request.attempt
        attempt = self._of.get(key) if request.attempt else None
        if attempt is None or attempt.until_s < self._now_s():
            return request, None
        if not is_again(request, attempt.streams):
            return request, None
        await attempt.over.wait()
        if self._of.get(key) is not attempt:
            return request, None  # another one was faster
        del self._of[key]
        if attempt.session_id is not None or request.session_id is not None:
            return _in_session(request, attempt), None
        sampling = msgspec.structs.replace(request.sampling, seed=attempt.seed)
        found = Found(TimelineUse.CONTINUED, shared=len(request.prompt))
        request = dataclasses.replace(request, sampling=sampling, found=found)
        has_logprobs = sampling.logprobs >= 0 or request.prompt_logprobs >= 0
        if not attempt.tokens or has_logprobs:  # none is kept
            return request, None
        tokens = attempt.tokens.tolist()
        return request, Continuation("", tokens, is_last=True, is_done=False)

    def _attempt(self, generation: Generation) -> Attempt | None:
        request = generation.request
        found = self._of.get((request.tenant, request.attempt))
        return found if found is not None and found.request_id == request.request_id else None

    def _drop(self, key: Key) -> None:
        if (attempt := self._of.pop(key, None)) is not None:
            attempt.over.set()
