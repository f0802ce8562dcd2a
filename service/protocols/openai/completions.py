"""POST /v1/completions: prompts as text or token ids in, OpenAI text completions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from batchengine import errors
from batchengine.core import FORM_TEXT, DoneEvent, SkippedEvent, TokenEvent, TokenLogprob
from service.protocols import requests
from service.protocols.formatter import Answer
from service.protocols.openai import formats
from service.protocols.openai.envelope import Chunk, OpenAIFormatter, error_object, logprob_number
from service.protocols.output import OutputPart, plain_text
from service.protocols.protocol import PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import HttpJob, Prompt
from service.protocols.schema import PROMPTS_MAX, CompletionRequest, openai_fields, tokens_asked

TOKENS_DEFAULT = 16  # what every client of this older API expects


def check(body: CompletionRequest) -> None:
    """Raises 400 for fields that would change the answer and are not implemented."""
    for name in ("echo", "suffix"):
        if getattr(body, name):
            what, fix = f"{name} is not supported", f"leave out {name}"
            raise errors.UNSUPPORTED_FIELD(param=name, what=what, fix=fix)
    if body.best_of is not None and body.best_of != (body.n or 1):
        what = "best_of other than n is not supported"
        raise errors.UNSUPPORTED_FIELD(param="best_of", what=what, fix="use n")


def read_prompt(body: CompletionRequest, text: PromptEncoder, limits: PromptLimits) -> Prompt:
    """The tokens of every prompt; raises 400."""
    context = limits.context_tokens
    prompts: list[list[int]] = []
    for prompt in _prompts(body.prompt, limits.vocab_size):
        if isinstance(prompt, str):
            requests.check_text_size(len(prompt.encode()), context, "prompt")
            tokens = text.encode(prompt, special=True)
        else:
            tokens = prompt
        requests.check_prompt(tokens, context, "prompt")
        prompts.append(tokens)
    tokens_max = tokens_asked(body.max_tokens, body.n_predict)
    if tokens_max is None:  # the default must never be the reason for refusing a prompt that fits
        tokens_max = min(
            TOKENS_DEFAULT, limits.tokens_max_default, *(context - len(p) for p in prompts)
        )
    return Prompt(
        prompts,
        tokens_max,
        -1 if body.logprobs is None else body.logprobs,
        "prompt",
        constraint=formats.constraint_of(body),
        unread=("min_tokens",) if body.min_tokens else (),
    )


def _prompts(value: object, vocab_size: int) -> list[str] | list[list[int]]:
    """The four forms of `prompt`: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        items = cast("list[object]", value)
        if all(isinstance(item, str) for item in items) and len(items) <= PROMPTS_MAX:
            return cast("list[str]", items)
        if all(type(item) is int for item in items):
            return [_token_ids(items, vocab_size)]
        if all(isinstance(item, list) for item in items) and len(items) <= PROMPTS_MAX:
            return [_token_ids(cast("list[object]", item), vocab_size) for item in items]
    raise errors.INVALID_FIELD(
        param="prompt",
        what="prompt has a wrong value",
        why=f"expected text, token ids, or a list of at most {PROMPTS_MAX} of either",
        fix="send a string",
    )


def _token_ids(items: list[object], vocab_size: int) -> list[int]:
    for index, item in enumerate(items):
        if type(item) is not int or not 0 <= item < vocab_size:
            raise errors.INVALID_FIELD(
                param=f"prompt[{index}]",
                what=f"prompt[{index}] is not a token id of this model",
                why=f"token ids are whole numbers from 0 to {vocab_size - 1:,}",
                fix="send text, or ids made with this model's tokenizer",
            )
    return cast("list[int]", items)


class CompletionFormatter(OpenAIFormatter):
    """Text completion chunks and the whole object."""

    id_prefix = "cmpl-"
    chunk_object = whole_object = "text_completion"
    content_field = "text"
    logprob_lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    opening_content = empty_content = ""

    def __init__(self, job: HttpJob) -> None:
        super().__init__(job)
        self._offsets = [0] * len(job.requests)  # characters sent so far, per choice

    def _token_chunks(
        self, index: int, event: TokenEvent, parts: Sequence[OutputPart]
    ) -> list[Chunk]:
        logprobs = self._token_logprobs(index, event)
        self._offsets[index] += len(event.text)
        return [self._chunk(index, plain_text(parts), logprobs=logprobs)]

    def _finish_chunks(self, index: int, parts: Sequence[OutputPart]) -> list[Chunk]:
        return [self._chunk(index, plain_text(parts), self.answers[index].finish_reason)]

    def collect(self, index: int, event: TokenEvent | DoneEvent) -> None:
        super().collect(index, event)
        self._offsets[index] += len(event.text)

    def skip(self, index: int, event: SkippedEvent) -> None:
        super().skip(index, event)
        self._offsets[index] += len(event.text)

    def _logprob_items(self, index: int, event: TokenEvent) -> tuple[object, ...]:
        assert event.logprob is not None  # callers look first
        return (
            _token_text(event.logprob),
            logprob_number(event.logprob.logprob),
            {_token_text(one): logprob_number(one.logprob) for one in event.top},
            self._offsets[index],
        )

    def _choice(self, index: int, answer: Answer) -> Chunk:
        return {
            "index": index,
            "text": plain_text(answer.parts),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }


def _token_text(one: TokenLogprob) -> str:
    """The token as text; half a character as `bytes:\\xe2`, so that two halves stay two keys."""
    try:
        return one.text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.text)


COMPLETIONS = Protocol(
    name=FORM_TEXT,
    routes=("/v1/completions",),
    body=CompletionRequest,
    check=check,
    read_prompt=read_prompt,
    formatter=CompletionFormatter,
    error=error_object,
    common=openai_fields,
)
