"""One HTTP request as work for the engine: checked parameters in, generation requests out.

Owns what chat and plain completions share between a parsed body and `engine.submit`: model and
size checks, sampling parameters, derived seeds, and submitting several generations as one.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from multidict import CIMultiDictProxy

from batchengine.config import Config
from batchengine.core import (
    FORM_CHAT,
    FORM_TEXT,
    GenerationRequest,
    Sampling,
    Sla,
)
from service import errors, sessions, sla
from service.auth import Caller
from service.door import Engine, Generation
from service.schema import (
    GENERATIONS_MAX,
    ChatRequest,
    CompletionRequest,
    Extension,
    binary32,
    stop_strings,
)

# No vocabulary averages this many bytes per token: a text beyond it cannot fit, and is refused
# before the tokenizer spends seconds on it.
BYTES_PER_TOKEN_MAX = 128
BODY_BYTES_MIN = 1 << 20  # room for tools and fields beside the prompt
SEED_MASK = (1 << 64) - 1
HEADER_KEY = "Idempotency-Key"
KEY_CHARS_MAX = 255
HEADER_FINAL = "x-dynamo-session-final"


@dataclass(slots=True)
class Wishes:
    """What a client wants for the session beside an answer."""

    promote: bool = False
    park: bool = False
    expected_output_tokens: int | None = None
    idempotency_key: str = ""
    tool_call_ids: tuple[str, ...] = ()


@dataclass(slots=True)
class Job:
    """Everything about one HTTP request that outlives its body."""

    request_id: str
    caller: Caller
    model: str  # as the client named it: echoed back
    created: int  # seconds since the epoch
    stream: bool
    include_usage: bool
    sla: Sla
    session: sessions.SessionName | None
    route: str
    service_tier: str | None
    seed: int
    choices_per_prompt: int = 1
    body_bytes: int = 0
    wishes: Wishes = field(default_factory=lambda: Wishes())
    predict: Callable[[], Mapping[str, Any] | None] = lambda: None
    requests: list[GenerationRequest] = field(default_factory=list[GenerationRequest])


def new_request_id() -> str:
    """Made here, never taken from a client (RELIABILITY R10)."""
    return "req_" + secrets.token_hex(12)


def route_name(engine: Engine) -> str:
    """The kind of lane that serves today."""
    kinds = sorted({str(lane.get("kind", "cpu")) for lane in engine.lanes()})
    return "+".join(kinds) or "cpu"


def check_serving(engine: Engine) -> None:
    """Raises 503 while the engine loads or drains."""
    if engine.state == "loading":
        raise errors.still_loading(engine.progress)
    if engine.state in ("draining", "stopped"):
        raise errors.draining()


def open_job(
    body: ChatRequest | CompletionRequest,
    headers: CIMultiDictProxy[str],
    caller: Caller,
    engine: Engine,
    config: Config,
    request_id: str,
) -> Job:
    """Names, class and session of a request; raises 400 or 404."""
    served = sla.model_names(engine.info.model_id, config.model.aliases)
    model = body.model if body.model is not None else engine.info.model_id
    if model not in served:
        raise errors.unknown_model(model, served)
    _refuse_unbuilt(body)
    promised = sla.resolve(body, headers, caller, config)
    options = body.stream_options
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return Job(
        request_id=request_id,
        caller=caller,
        model=model,
        created=int(time.time()),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        sla=promised,
        session=sessions.resolve(body, headers, caller.tenant),
        route=route_name(engine),
        service_tier=None if body.service_tier is None else sla.SERVED_TIER[promised.sla_class],
        seed=seed,
        choices_per_prompt=body.n or 1,
        wishes=_wishes(body, headers),
        predict=lambda: engine.predicted(request_id),
    )


def _wishes(body: ChatRequest | CompletionRequest, headers: CIMultiDictProxy[str]) -> Wishes:
    """Everything but tool calls, which only chat messages carry; raises 400."""
    asked = body.batchengine or Extension()
    key = headers.get(HEADER_KEY, "").strip()
    if len(key) > KEY_CHARS_MAX or not key.isprintable():
        raise errors.invalid_field(
            HEADER_KEY,
            f"{HEADER_KEY} is not usable",
            why=f"it must be printable and at most {KEY_CHARS_MAX} characters",
            fix="send a UUID",
        )
    hints = body.nvext.agent_hints if body.nvext else None
    expected = asked.expected_output_tokens or (hints.osl if hints else None)
    ends = asked.final or headers.get(HEADER_FINAL, "").strip().lower() == "true"
    return Wishes(
        promote=bool(asked.promote),
        park=bool(asked.park or ends),
        expected_output_tokens=expected,
        idempotency_key=key,
    )


def _refuse_unbuilt(body: ChatRequest | CompletionRequest) -> None:
    """What would change the answer and is not implemented must not be ignored."""
    form = body.response_format
    if form is not None and form.get("type") != "text":
        raise errors.unsupported_field(
            "response_format", "response_format must be of type text", "ask for JSON in the prompt"
        )
    if isinstance(body, CompletionRequest):
        for name in ("echo", "suffix"):
            if getattr(body, name):
                raise errors.unsupported_field(
                    name, f"{name} is not supported", f"leave out {name}"
                )
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise errors.unsupported_field(
                "best_of", "best_of other than n is not supported", "use n"
            )
        return
    if not (body.tool_choice is None or body.tool_choice in ("auto", "none")):
        raise errors.unsupported_field(
            "tool_choice", "a forced tool choice is not supported", 'use "auto" or "none"'
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise errors.invalid_field(
            "top_logprobs", "top_logprobs needs logprobs: true", fix="set logprobs to true"
        )


def sampling_of(body: ChatRequest | CompletionRequest, seed: int, vocab_size: int) -> Sampling:
    """Sampling parameters with OpenAI's defaults (temperature 1, everything else off)."""
    if isinstance(body, ChatRequest):
        logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    else:
        logprobs = -1 if body.logprobs is None else body.logprobs

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
        seed=seed & SEED_MASK,
        logprobs=logprobs,
        logit_bias=_bias_of(body.logit_bias, vocab_size),
    )


def _bias_of(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    pairs: dict[int, float] = {}
    for name, value in (bias or {}).items():
        if not (name.isascii() and name.isdecimal() and len(name) <= 10) or (
            int(name) >= vocab_size
        ):
            raise errors.invalid_field(
                "logit_bias",
                f"logit_bias names {name[:20]!r}",
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
    """The largest body that can hold a prompt of this context: more is refused unread (F59)."""
    return BODY_BYTES_MIN + BYTES_PER_TOKEN_MAX * context_tokens


def check_text_size(byte_count: int, context_tokens: int, param: str) -> None:
    """Raises 400 for a text that cannot fit however well it tokenises."""
    least = byte_count // BYTES_PER_TOKEN_MAX
    if least > context_tokens:
        raise errors.prompt_too_long(least, context_tokens, param, counted=False)


def check_prompt(tokens: list[int], context_tokens: int, param: str) -> None:
    """Raises 400 for an empty prompt and for one that leaves no room for a single token."""
    if not tokens:
        raise errors.invalid_field(param, "the prompt is empty", fix="send at least one token")
    if len(tokens) >= context_tokens:
        raise errors.prompt_too_long(len(tokens), context_tokens, param, counted=True)


def fill(
    job: Job,
    body: ChatRequest | CompletionRequest,
    prompts: list[list[int]],
    tokens_max: int,
    engine: Engine,
) -> None:
    """Writes `job.requests`: prompts x choices."""
    if len(prompts) * job.choices_per_prompt > GENERATIONS_MAX:
        raise errors.invalid_field(
            "n",
            f"{len(prompts)} prompts x n {job.choices_per_prompt} is more than {GENERATIONS_MAX}",
            fix="send fewer at once",
        )
    stop, context = stop_strings(body.stop), engine.info.context_tokens
    wishes = job.wishes
    for prompt_index, prompt in enumerate(prompts):
        if len(prompt) + tokens_max > context:
            param = "messages" if isinstance(body, ChatRequest) else "prompt"
            raise errors.answer_too_long(len(prompt), tokens_max, context, param)
        for choice in range(job.choices_per_prompt):
            index = prompt_index * job.choices_per_prompt + choice
            job.requests.append(
                GenerationRequest(
                    request_id=job.request_id if index == 0 else f"{job.request_id}-{index}",
                    prompt=tuple(prompt),
                    tokens_max=tokens_max,
                    sampling=sampling_of(
                        body, derived_seed(job.seed, choice), engine.info.vocab_size
                    ),
                    stop=stop,
                    ignore_eos=bool(body.ignore_eos),
                    sla=job.sla,
                    # one timeline cannot grow in two directions: other choices are anonymous
                    session_id=job.session.session_id if job.session and index == 0 else None,
                    tenant=job.caller.tenant,
                    tool_call_ids=wishes.tool_call_ids if index == 0 else (),
                    park=wishes.park,
                    idempotency_key=_key_of_choice(wishes.idempotency_key, index),
                    promote=wishes.promote,
                    expected_output_tokens=wishes.expected_output_tokens,
                    form=FORM_CHAT if isinstance(body, ChatRequest) else FORM_TEXT,
                )
            )


def _key_of_choice(key: str, index: int) -> str:
    """Every choice is a turn of its own, so a repetition finds each of them."""
    return f"{key}#{index}" if key and index else key


def submit_all(engine: Engine, job: Job) -> list[Generation]:
    """All generations of a job, or none: whatever goes wrong half-way calls off the others."""
    made: list[Generation] = []
    try:
        for request in job.requests:
            made.append(engine.submit(request))
    except BaseException:
        for generation in made:
            generation.cancel()
        raise
    return made
