"""POST /v1/completions: prompts as text or token ids in, OpenAI text completions out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from batchengine import errors
from batchengine.core import FORM_TEXT, DoneEvent, SkippedEvent, TokenEvent, TokenLogprob
from service.protocols.formatter import Answer, SseEvent
from service.protocols.openai import formats, prompts
from service.protocols.openai.envelope import Chunk, OpenAIFormatter, error_object, logprob_number
from service.protocols.output import OutputPart, plain_text
from service.protocols.protocol import PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import NOTHING, HttpJob, Prompt
from service.protocols.schema import Common, CompletionRequest, openai_fields, tokens_asked

TOKENS_DEFAULT = 16  # what every client of this older API expects


class Repeated(msgspec.Struct, array_like=True, frozen=True):
    """Facts of the request that its answer needs: texts of the prompts that it begins with, how
    many of the choices of each prompt it has, and whether it hides their log-probabilities."""

    texts: list[str] = []
    kept: int = 0  # 0 = all
    hides_logprobs: bool = False


_decode = msgspec.json.Decoder(Repeated).decode


def check(body: CompletionRequest) -> None:
    """Raises 400 for fields that contradict each other."""
    drawn, kept = body.best_of, body.n or 1
    if drawn is not None and drawn < kept:
        what, fix = f"best_of {drawn} is less than n {kept}", "raise best_of"
        raise errors.INVALID_FIELD(param="best_of", what=what, fix=fix)
    if drawn is not None and drawn > kept and body.stream:
        what = "the best of several answers is known at their end, and cannot be streamed"
        raise errors.INVALID_FIELD(param="best_of", what=what, fix="leave out stream or best_of")
    if body.echo and body.logprobs is not None:
        what = "log-probabilities of the prompt, which echo would add, are not computed"
        raise errors.UNSUPPORTED_FIELD(param="echo", what=what, fix="leave out echo or logprobs")


def common(body: CompletionRequest) -> Common:
    """The common fields; as many choices as are drawn, not as are kept."""
    found = openai_fields(body)
    found.n = body.best_of or body.n
    return found


def read_prompt(body: CompletionRequest, text: PromptEncoder, limits: PromptLimits) -> Prompt:
    """The tokens of every prompt; raises 400."""
    context = limits.context_tokens
    tokens = prompts.encoded(body.prompt, body.suffix, text, limits)
    tokens_max = tokens_asked(body.max_tokens, body.n_predict)
    if tokens_max is None:  # the default must never be the reason for refusing a prompt that fits
        most = limits.tokens_max_default if _has_no_limit(body) else TOKENS_DEFAULT
        tokens_max = min(most, limits.tokens_max_default, *(context - len(one) for one in tokens))
    is_best = (body.best_of or 0) > (body.n or 1)
    repeated = Repeated(
        prompts.texts(body.prompt, tokens, text) if body.echo else [],
        (body.n or 1) if is_best else 0,
        body.logprobs is None,
    )
    logprobs = -1 if body.logprobs is None else body.logprobs
    return Prompt(
        tokens,
        tokens_max,
        max(0, logprobs) if is_best else logprobs,
        "prompt",
        constraint=formats.constraint_of(body),
        echo=msgspec.json.encode(repeated) if body.echo or is_best else NOTHING,
    )


def _has_no_limit(body: CompletionRequest) -> bool:
    """Whether the request says that it wants no limit, instead of none at all."""
    return body.max_tokens == -1 or body.n_predict == -1


class CompletionFormatter(OpenAIFormatter):
    """Text completion chunks and the whole object."""

    id_prefix = "cmpl-"
    chunk_object = whole_object = "text_completion"
    content_field = "text"
    logprob_lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    opening_content = empty_content = ""

    def __init__(self, job: HttpJob) -> None:
        super().__init__(job)
        self._repeated = Repeated() if job.echo == NOTHING else _decode(job.echo)
        choices = range(len(job.requests))
        self._offsets = [len(self._echo(index)) for index in choices]  # characters sent so far
        self._sums = [0.0] * len(choices)  # of log-probabilities

    def opening(self) -> list[SseEvent]:
        chunks = (self._chunk(index, self._echo(index)) for index in range(len(self.answers)))
        return [self._event(chunk) for chunk in chunks]

    def _echo(self, index: int) -> str:
        texts = self._repeated.texts
        return texts[index // self.job.choices_per_prompt] if texts else ""

    def _shown(self) -> list[int]:
        """The choices with the greatest mean log-probability of each prompt, the best first."""
        drawn, kept = self.job.choices_per_prompt, self._repeated.kept
        if not kept:
            return super()._shown()
        found: list[int] = []
        for first in range(0, len(self.answers), drawn):
            group = range(first, first + drawn)
            found += sorted(group, key=self._mean, reverse=True)[:kept]
        return found

    def _mean(self, index: int) -> float:
        return self._sums[index] / max(1, self.answers[index].usage.completion_tokens)

    def _shows_logprobs(self, index: int) -> bool:
        hidden = self._repeated.kept and self._repeated.hides_logprobs
        return not hidden and super()._shows_logprobs(index)

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
        if isinstance(event, TokenEvent) and event.logprob is not None:
            self._sums[index] += logprob_number(event.logprob.logprob)
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
            "text": self._echo(index) + plain_text(answer.parts),
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
    common=common,
)
