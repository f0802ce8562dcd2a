"""Turns one HTTP request into generation requests of the engine.

Owns what all protocols share between a parsed body and `engine.submit`: model and size checks,
sampling parameters, derived seeds, and submitting several generations as one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from multidict import CIMultiDictProxy

from batchengine import errors
from batchengine.core import (
    PLAIN_OUTPUT,
    Constraint,
    ContextBound,
    GenerationRequest,
    ModelInfo,
    OutputForm,
    Sampling,
)
from service.engine_api import EngineApi, GenerationApi
from service.protocols import carriers
from service.protocols.carriers import Caller
from service.protocols.output import turns_of
from service.protocols.schema import (
    GENERATIONS_MAX,
    Common,
    Extension,
    binary32,
    stop_strings,
)
from service.session_ids import session_key

if TYPE_CHECKING:
    from batchengine.config import Config  # a text process, which reads bodies, has no settings

# No vocabulary averages this many bytes per token: a text beyond it cannot fit, and is refused
# before the tokenizer spends seconds on it.
BYTES_PER_TOKEN_MAX = 128
SCORES_MAX = 2 << 20  # log-probabilities of prompts in one answer: 30 bytes of JSON each
BODY_BYTES_MIN = 1 << 20  # room for tools and fields beside the prompt
SEED_MASK = (1 << 64) - 1
KEY_CHARS_MAX = 255


NOTHING = b"null"


@dataclass(frozen=True, slots=True)
class Prompt:
    """The part of a request that its protocol reads; all else is common to all protocols.

    `param` is the field that errors about the size name. `logprobs` as in `core.Sampling`.
    `tokens_max` 0 = only the KV of the prompt is wanted.
    `echo` is JSON of the request that the protocol's formatter repeats in its answer. `unread` are
    names of what was accepted and changes nothing. `append`: the tokens that go behind the
    session's timeline instead, if it has one; `append_bare`: without the instructions, which the
    turn `append_to` may have. `stored`: the answer is found by its id later, so it has a session.
    `constraint_param` is the field that an error about the constraint names. `digest` is of the
    body without its fields about streaming. `prompt_logprobs` and `predicted` as in
    `core.GenerationRequest`.
    """

    tokens: list[list[int]]  # of every prompt
    tokens_max: int
    logprobs: int
    param: str
    tool_call_ids: tuple[str, ...] = ()
    output: OutputForm = PLAIN_OUTPUT
    constraint: Constraint | None = None
    echo: bytes = NOTHING
    unread: tuple[str, ...] = ()
    append: list[int] = field(default_factory=list[int])
    append_bare: list[int] = field(default_factory=list[int])
    append_to: str = ""
    stored: bool = False
    constraint_param: str = "response_format"
    digest: str = ""
    prompt_logprobs: int = -1
    predicted: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class HttpJob:
    """The facts of one HTTP request that outlive its body.

    `asked` is what its generations have in common, without a prompt; of a stream that resumes a
    turn the request of that turn. `turn_of` returns the turn that a generation computes or repeats,
    by its index, for good once that turn is recorded; None = those of `requests`.
    """

    asked: GenerationRequest
    model: str  # as the client named it: echoed back
    stream: bool
    include_usage: bool
    route: str
    seed: int
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    service_tier: str | None = None
    fingerprint: str | None = None  # of model and arithmetic
    choices_per_prompt: int = 1
    predict: Callable[[], Mapping[str, Any] | None] = lambda: None
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)  # names of reasoning in chat answers
    echo: bytes = NOTHING  # as in `Prompt`
    requests: list[GenerationRequest] = field(default_factory=list[GenerationRequest])
    turn_of: Callable[[int], str] | None = None

    def turn_id(self, index: int = 0) -> str:
        """The turn of a generation, after which its calls and stored answers are named."""
        return self.requests[index].request_id if self.turn_of is None else self.turn_of(index)


def new_request_id() -> str:
    """A new request id; ids that clients send are never used."""
    return "req_" + secrets.token_hex(12)


def reasoning_fields(config: Config) -> tuple[str, ...]:
    """The names under which chat answers have reasoning."""
    both = ("reasoning_content", "reasoning")
    name = config.server.reasoning_field
    return both if name == "both" else (name,)


def route_name(engine: EngineApi) -> str:
    """The kinds of the engine's lanes, joined by "+"."""
    kinds = sorted({str(lane.get("kind", "cpu")) for lane in engine.lanes()})
    return "+".join(kinds) or "cpu"


def open_job(
    protocol: str,
    body: Common,
    headers: CIMultiDictProxy[str],
    caller: Caller,
    engine: EngineApi,
    config: Config,
    request_id: str,
) -> HttpJob:
    """The job of a request, with names, class and session; raises 400 or 404."""
    served = carriers.model_names(engine.info.model_id, config.model.aliases)
    model = body.model if body.model is not None else engine.info.model_id
    if model not in served:
        raise errors.UNKNOWN_MODEL(asked=model, served=", ".join(served))
    sla = carriers.sla_of(body, headers, caller, config)
    session_id = carriers.session_of(body, headers, caller.tenant)
    extension = body.batchengine or Extension()
    hints = body.nvext.agent_hints if body.nvext else None
    is_final = extension.final or headers.get(carriers.HEADER_FINAL, "").strip().lower() == "true"
    asked = GenerationRequest(
        request_id=request_id,
        prompt=(),
        tokens_max=0,
        stop=stop_strings(body.stop),
        ignore_eos=bool(body.ignore_eos),
        sla=sla,
        session_id=session_id,
        tenant=caller.tenant,
        park=bool(extension.park or is_final),
        idempotency_key=_idempotency_key(headers),
        promote=bool(extension.promote),
        expected_output_tokens=extension.expected_output_tokens or (hints.osl if hints else None),
        has_seed=body.seed is not None,
        form=protocol,
        patience_ms=None if body.stream else carriers.patience_ms(headers),
        client_name=carriers.client_name(body, headers) if session_id is not None else "",
        in_family=session_id is not None,
        parent_id=carriers.parent_of(body, headers, caller.tenant),
        is_retry=carriers.is_retry(headers),
    )
    options = body.stream_options
    return HttpJob(
        asked=asked,
        model=model,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        route=route_name(engine),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        service_tier=None if body.service_tier is None else carriers.SERVED_TIER[sla.sla_class],
        fingerprint=engine.info.fingerprint,
        choices_per_prompt=body.n or 1,
        reasoning_fields=reasoning_fields(config),
        predict=lambda: engine.predicted(request_id),
    )


def job_again(
    asked: GenerationRequest, engine: EngineApi, config: Config, *, include_usage: bool = True
) -> HttpJob:
    """The job of a turn of the ledger, whose answer is sent again; `asked` is its request."""
    return HttpJob(
        asked=asked,
        model=engine.info.model_id,
        stream=True,
        include_usage=include_usage,
        route=route_name(engine),
        seed=asked.sampling.seed,
        fingerprint=engine.info.fingerprint,
        reasoning_fields=reasoning_fields(config),
        predict=lambda: engine.predicted(asked.request_id),
        echo=asked.echo.encode() or NOTHING,
        requests=[asked],
    )


def _idempotency_key(headers: CIMultiDictProxy[str]) -> str:
    key = headers.get(carriers.HEADER_KEY, "").strip()
    if len(key) > KEY_CHARS_MAX or not key.isprintable():
        raise errors.INVALID_FIELD(
            param=carriers.HEADER_KEY,
            what=f"{carriers.HEADER_KEY} is not usable",
            why=f"it must be printable and at most {KEY_CHARS_MAX} characters",
            fix="send a UUID",
        )
    return key


def sampling_of(body: Common, logprobs: int, vocab_size: int) -> Sampling:
    """Sampling parameters but the seed; defaults are OpenAI's (temperature 1, all else off)."""

    def number(value: float | None, default: float) -> float:
        return default if value is None else binary32(value)

    return Sampling(
        temperature=number(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),  # -1 means "off" to vLLM clients
        top_p=number(body.top_p, 1.0),
        min_p=number(body.min_p, 0.0),
        repetition_penalty=number(body.repetition_penalty, 1.0),
        presence_penalty=number(body.presence_penalty, 0.0),
        frequency_penalty=number(body.frequency_penalty, 0.0),
        logprobs=logprobs,
        logit_bias=_bias_of(body.logit_bias, vocab_size),
        tokens_min=body.min_tokens or 0,
    )


def _bias_of(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for name, value in (bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 10) or (
            int(name) >= vocab_size
        ):
            raise errors.INVALID_FIELD(
                param="logit_bias",
                what=f"logit_bias names {name[:20]!r}",
                why=f"a token id is a whole number below {vocab_size:,}",
                fix="use token ids of this model",
            )
        pairs[int(name)] = binary32(value)
    return tuple(sorted(pairs.items()))


def derived_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the client's own for 0, independent ones after it."""
    if index == 0:
        return seed & SEED_MASK
    text = f"batchengine choice {seed & SEED_MASK} {index}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def body_bytes_max(context_tokens: int) -> int:
    """The most bytes, apart from images and files, of a body with a prompt of this context."""
    return BODY_BYTES_MIN + BYTES_PER_TOKEN_MAX * context_tokens


def check_text_size(byte_count: int, context_tokens: int, bound: ContextBound, param: str) -> None:
    """Raises 400 for a text that cannot fit however well it tokenises."""
    least = byte_count // BYTES_PER_TOKEN_MAX
    if least > context_tokens:
        raise errors.PROMPT_TOO_LONG(
            asked=f"at least {least:,} tokens",
            n_prompt_tokens=least,
            n_ctx=context_tokens,
            longer=bound,
            param=param,
        )


def check_prompt(tokens: list[int], context_tokens: int, bound: ContextBound, param: str) -> None:
    """Raises 400 for an empty prompt and for one that leaves no room for a single token."""
    if not tokens:
        what, fix = "the prompt is empty", "send at least one token"
        raise errors.INVALID_FIELD(param=param, what=what, fix=fix)
    if len(tokens) >= context_tokens:
        n = len(tokens)
        raise errors.PROMPT_TOO_LONG(
            asked=f"{n:,} tokens",
            n_prompt_tokens=n,
            n_ctx=context_tokens,
            longer=bound,
            param=param,
        )


def fill(job: HttpJob, body: Common, prompt: Prompt, info: ModelInfo) -> None:
    """Writes `job.requests`: prompts x choices; raises 400."""
    _check_counts(job, prompt)
    job.echo = prompt.echo
    named = job.asked.session_id or ""
    if prompt.stored and (prompt.append_to or job.asked.session_id is None):
        name = job.asked.session_of_key or session_key(job.asked.tenant, job.asked.request_id)
        job.asked = dataclasses.replace(job.asked, session_id=name)
    elif prompt.append_to:
        job.asked = dataclasses.replace(job.asked, session_id=None)
    sampling = sampling_of(body, prompt.logprobs, info.vocab_size)
    _check_lengths(prompt, sampling.tokens_min, info)
    for tokens in prompt.tokens:
        first = _request_of(job, prompt, tokens)
        for choice in range(job.choices_per_prompt):
            seeded = msgspec.structs.replace(sampling, seed=derived_seed(job.seed, choice))
            attempt = _attempt(job, prompt, named)
            request = dataclasses.replace(first, sampling=seeded, attempt=attempt)
            job.requests.append(_of_choice(request, len(job.requests)))


def _check_counts(job: HttpJob, prompt: Prompt) -> None:
    """Raises 400 for too many generations, or log-probabilities of prompts, of one request."""
    n_generations = len(prompt.tokens) * job.choices_per_prompt
    if n_generations > GENERATIONS_MAX:
        raise errors.INVALID_FIELD(
            param="n",
            what=f"{len(prompt.tokens)} prompts x n {job.choices_per_prompt} is more than"
            f" {GENERATIONS_MAX}",
            fix="send fewer at once",
        )
    best = prompt.prompt_logprobs
    numbers = (1 + best) * sum(map(len, prompt.tokens)) * job.choices_per_prompt
    if numbers > SCORES_MAX and n_generations > 1:
        raise errors.INVALID_FIELD(
            param="logprobs",
            what=f"the prompts have {numbers:,} log-probabilities",
            why=f"of several prompts or choices, at most {SCORES_MAX:,} are computed at once",
            fix="send fewer prompts at once",
        )


def _check_lengths(prompt: Prompt, tokens_min: int, info: ModelInfo) -> None:
    """Raises 400 for answers that can have no such length."""
    if tokens_min > max(1, prompt.tokens_max):
        raise errors.INVALID_FIELD(
            param="min_tokens",
            what=f"min_tokens is {tokens_min}, and the answer has at most"
            f" {prompt.tokens_max} tokens",
            fix="lower min_tokens, or raise max_tokens",
        )
    for n in map(len, prompt.tokens):
        if n + prompt.tokens_max > info.context_tokens:
            raise errors.PROMPT_TOO_LONG(
                asked=f"{n:,} tokens + max {prompt.tokens_max:,}",
                n_prompt_tokens=n,
                n_ctx=info.context_tokens,
                longer=info.context_bound,
                param=prompt.param,
            )


def _request_of(job: HttpJob, prompt: Prompt, tokens: list[int]) -> GenerationRequest:
    """The request of one prompt, without what its choices differ in."""
    request = dataclasses.replace(
        job.asked,
        prompt=tuple(tokens),
        tokens_max=prompt.tokens_max,
        tool_call_ids=(*prompt.tool_call_ids, *turns_of(prompt.tool_call_ids)),
        output=prompt.output,
        constraint=prompt.constraint,
        append=tuple(prompt.append),
        append_to=prompt.append_to,
        echo="" if prompt.echo == NOTHING else prompt.echo.decode(),
        streams=job.stream,
        prompt_logprobs=prompt.prompt_logprobs,
        predicted=tuple(prompt.predicted),
        choices=len(prompt.tokens) * job.choices_per_prompt,
    )
    if prompt.tokens_max and prompt.prompt_logprobs < 0:
        return request
    return dataclasses.replace(  # without an answer one token is computed, which no timeline holds
        request,
        tokens_max=max(1, prompt.tokens_max),
        session_id=None,
        tool_call_ids=(),
        idempotency_key="",
        is_retry=False,
    )


def _attempt(job: HttpJob, prompt: Prompt, session_id: str) -> str:
    """What requests that ask the same in the session that they name have in common; "" = not
    known."""
    common = session_id, job.asked.form, str(len(job.requests)), prompt.digest
    return " ".join(common) if prompt.digest else ""


def _of_choice(request: GenerationRequest, index: int) -> GenerationRequest:
    """The request of one choice: all but the first are anonymous, as one timeline cannot grow in
    two directions, and each is a turn of its own."""
    if index == 0:
        return request
    key = request.idempotency_key
    return dataclasses.replace(
        request,
        request_id=f"{request.request_id}-{index}",
        session_id=None,
        append=(),
        append_to="",
        tool_call_ids=(),
        client_name="",
        idempotency_key=f"{key}#{index}" if key else "",
    )


async def submit_all(engine: EngineApi, job: HttpJob) -> list[GenerationApi]:
    """Submits all generations of a job, or none: a failure cancels those before it.

    Other tasks run between two of them: each looks a whole prompt up.
    """
    import asyncio  # only an engine has an event loop

    made: list[GenerationApi] = []
    try:
        for request in job.requests:
            if made:
                await asyncio.sleep(0)
            if made and job.requests[0].append:  # the other choices have the same prompt
                request = dataclasses.replace(request, prompt=made[0].request.prompt)
            made.append(await engine.begin(request))
    except BaseException:
        for generation in made:
            generation.cancel()
        raise
    job.requests = [generation.request for generation in made]
    job.turn_of = lambda index: made[index].turn_id
    return made
