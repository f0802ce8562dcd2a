"""POST /v1/completions: prompts as text or token ids in, OpenAI text completions out."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec

from batchengine import errors
from batchengine.core import (
    FORM_TEXT,
    DoneEvent,
    PromptTokenEvent,
    SkippedEvent,
    TokenEvent,
    TokenLogprob,
)
from service.protocols import requests
from service.protocols.formatter import CUT, Answer, SseEvent
from service.protocols.openai import formats
from service.protocols.openai.envelope import (
    LATER,
    Chunk,
    OpenAIFormatter,
    error_object,
    logprob_number,
)
from service.protocols.output import OutputPart, plain_text
from service.protocols.protocol import PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import NOTHING, HttpJob, Prompt
from service.protocols.schema import (
    PROMPTS_MAX,
    Common,
    CompletionRequest,
    openai_fields,
    tokens_asked,
)

LISTED = "prompt_logprobs"  # list of a choice
LISTED_MAX = 1 << 20  # log-probabilities in these lists of one answer: 75 bytes of JSON each
TOKENS_DEFAULT = 16  # what every client of this older API expects
# Control tokens of vocabularies that can fill a gap: in front of the text before it, in front of
# the text behind it, and at the end of the prompt.
GAP_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


class Repeated(msgspec.Struct, array_like=True, frozen=True):
    """Facts of the request that its answer needs: texts of the prompts that it begins with, how
    many of the choices of each prompt it has, whether it hides their log-probabilities, and whether
    nothing follows the prompts. Of each token of a prompt, how many of the best ones are in
    `logprobs`, and in the list `prompt_logprobs`; -1 = not even its own."""

    texts: list[str] = []
    kept: int = 0  # 0 = all
    hides_logprobs: bool = False
    is_prompt_only: bool = False
    echoed_best: int = -1
    listed_best: int = -1


_decode = msgspec.json.Decoder(Repeated).decode
_utf8 = codecs.getincrementaldecoder("utf-8")


def check(body: CompletionRequest) -> None:
    """Raises 400 for fields that contradict each other."""
    drawn, kept = body.best_of, body.n or 1
    if drawn is not None and drawn < kept:
        what, fix = f"best_of {drawn} is less than n {kept}", "raise best_of"
        raise errors.INVALID_FIELD(param="best_of", what=what, fix=fix)
    if drawn is not None and drawn > kept and body.stream:
        what = "the best of several answers is known at their end, and cannot be streamed"
        raise errors.INVALID_FIELD(param="best_of", what=what, fix="leave out stream or best_of")
    if body.prompt_logprobs is not None and body.stream:
        what = "prompt_logprobs are not available when stream is true"
        fix = "leave out stream, or send echo and logprobs"
        raise errors.INVALID_FIELD(param="prompt_logprobs", what=what, fix=fix)


def common(body: CompletionRequest) -> Common:
    """The common fields; as many choices as are drawn, not as are kept."""
    found = openai_fields(body)
    found.n = body.best_of or body.n
    return found


def read_prompt(body: CompletionRequest, text: PromptEncoder, limits: PromptLimits) -> Prompt:
    """The tokens of every prompt; raises 400."""
    context = limits.context_tokens
    tokens = _encoded(body.prompt, body.suffix, text, limits)
    listed_best = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    listed = (1 + listed_best) * sum(map(len, tokens)) * (body.best_of or body.n or 1)
    if listed > LISTED_MAX:
        raise errors.INVALID_FIELD(
            param=LISTED,
            what=f"the lists have {listed:,} log-probabilities",
            why=f"an answer has at most {LISTED_MAX:,}",
            fix="lower prompt_logprobs, or send fewer prompts at once",
        )
    least = 0 if body.echo or listed_best >= 0 else 1
    tokens_max = tokens_asked(body.max_tokens, body.n_predict, least=least)
    if tokens_max is None:  # the default must never be the reason for refusing a prompt that fits
        most = limits.tokens_max_default if _has_no_limit(body) else TOKENS_DEFAULT
        tokens_max = min(most, limits.tokens_max_default, *(context - len(one) for one in tokens))
    is_best = (body.best_of or 0) > (body.n or 1)
    logprobs = -1 if body.logprobs is None else body.logprobs
    echoed_best = logprobs if body.echo else -1
    needs = body.echo or is_best or listed_best >= 0
    repeated = Repeated(
        _texts(body.prompt, tokens, text) if body.echo else [],
        (body.n or 1) if is_best else 0,
        body.logprobs is None,
        tokens_max == 0,
        echoed_best,
        listed_best,
    )
    return Prompt(
        tokens,
        tokens_max,
        max(0, logprobs) if is_best else logprobs,
        "prompt",
        constraint=formats.constraint_of(body),
        echo=msgspec.json.encode(repeated) if needs else NOTHING,
        prompt_logprobs=max(echoed_best, listed_best),
    )


def _has_no_limit(body: CompletionRequest) -> bool:
    """Whether the request says that it wants no limit, instead of none at all."""
    return body.max_tokens == -1 or body.n_predict == -1


def _encoded(
    value: object, suffix: str | None, text: PromptEncoder, limits: PromptLimits
) -> list[list[int]]:
    """The token ids of every prompt; raises 400, naming the one of several that is wrong."""
    context, bound = limits.context_tokens, limits.context_bound
    found: list[list[int]] = []
    given = _prompts(value, limits.vocab_size)
    for index, prompt in enumerate(given):
        param = f"prompt[{index}]" if len(given) > 1 else "prompt"
        if isinstance(prompt, str):
            size_bytes = len((prompt + (suffix or "")).encode())
            requests.check_text_size(size_bytes, context, bound, param)
            tokens = _around(prompt, suffix, text) if suffix else text.encode(prompt, special=True)
        else:
            if suffix:
                what, fix = "suffix needs a prompt of text", "send the prompt as text"
                raise errors.INVALID_FIELD(param="suffix", what=what, fix=fix)
            tokens = prompt
        requests.check_prompt(tokens, context, bound, param)
        found.append(tokens)
    return found


def _texts(value: object, tokens: list[list[int]], text: PromptEncoder) -> list[str]:
    """The texts of prompts, as an answer repeats them."""
    given = [value] if isinstance(value, str) else cast("list[object]", value)
    if all(isinstance(one, str) for one in given):
        return cast("list[str]", given)
    return [b"".join(map(text.piece, one)).decode("utf-8", "replace") for one in tokens]


def _around(prompt: str, suffix: str, text: PromptEncoder) -> list[int]:
    """The tokens of a text with a gap in it."""
    for names in GAP_TOKENS:
        before, behind, end = map(text.control_id, names)
        if before is not None and behind is not None and end is not None:
            first = text.encode("", special=False)  # the begin-of-sequence token, if there is one
            parts = (text.encode(one, special=False)[len(first) :] for one in (prompt, suffix))
            head, tail = parts
            return [*first, before, *head, behind, *tail, end]
    raise errors.UNSUPPORTED_FIELD(
        param="suffix",
        what="this model has no tokens with which it fills a gap",
        fix="leave out suffix",
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
            return [_token_ids(items, vocab_size, "prompt")]
        if all(isinstance(item, list) for item in items) and len(items) <= PROMPTS_MAX:
            lists = enumerate(cast("list[list[object]]", items))
            return [_token_ids(item, vocab_size, f"prompt[{index}]") for index, item in lists]
    raise errors.INVALID_FIELD(
        param="prompt",
        what="prompt has a wrong value",
        why=f"expected text, token ids, or a list of at most {PROMPTS_MAX} of either",
        fix="send a string",
    )


def _token_ids(items: list[object], vocab_size: int, name: str) -> list[int]:
    for index, item in enumerate(items):
        if type(item) is not int or not 0 <= item < vocab_size:
            param = f"{name}[{index}]"
            raise errors.INVALID_FIELD(
                param=param,
                what=f"{param} is not a token id of this model",
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
        self._repeated = Repeated() if job.echo == NOTHING else _decode(job.echo)
        choices = range(len(job.requests))
        self._offsets = [len(self._echo(index)) for index in choices]  # characters sent so far
        self._echoed = [0] * len(choices)  # characters of the echo whose tokens were sent
        self._decoders = [_utf8("replace") for _ in choices]  # of tokens of the echo
        self._sums = [0.0] * len(choices)  # of log-probabilities

    def opening(self) -> list[SseEvent]:
        is_rest = self.ids is not None and self.ids.is_rest  # its reader has the echo
        echoes = ["" if is_rest else self._echo(index) for index in range(len(self.answers))]
        chunks = (self._chunk(index, echo) for index, echo in enumerate(echoes))
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

    def token(self, index: int, event: TokenEvent) -> list[SseEvent]:
        return [] if self._repeated.is_prompt_only else super().token(index, event)

    def prompt_token(self, index: int, event: PromptTokenEvent) -> list[SseEvent]:
        items = self._items_object(self._prompt_items(index, event))
        return [self._event(self._chunk(index, "", logprobs=items))]

    def collect_prompt(self, index: int, event: PromptTokenEvent) -> None:
        if self._repeated.echoed_best >= 0:
            self._keep_items(index, self._prompt_items(index, event))
        if self._repeated.listed_best >= 0:
            kept = self.answers[index].logprobs.setdefault(LISTED, [])
            kept.append(msgspec.json.encode(_listed(event, self._repeated.listed_best)))

    def _prompt_items(self, index: int, event: PromptTokenEvent) -> tuple[object, ...]:
        """The items of a token of the prompt; there is nothing in front of the first one."""
        text, echo = self._decoders[index].decode(event.text), self._echo(index)
        offset = self._echoed[index]
        if echo.startswith(text, offset):
            self._echoed[index] += len(text)
        elif text[:1] == " " and echo.startswith(text[1:], offset):
            self._echoed[index] += len(text) - 1  # the space in front of a text is the tokenizer's
        if event.logprob is None:
            return _text_of(event.text), None, None, offset
        one = TokenLogprob(event.token, event.text, event.logprob)
        return *_numbers(one, event.top[: self._repeated.echoed_best]), offset

    def _token_chunks(
        self, index: int, event: TokenEvent, parts: Sequence[OutputPart]
    ) -> list[Chunk]:
        logprobs = self._token_logprobs(index, event)
        self._offsets[index] += len(event.text)
        return [self._chunk(index, plain_text(parts), logprobs=logprobs)]

    def _finish_chunks(self, index: int, parts: Sequence[OutputPart]) -> list[Chunk]:
        return [self._chunk(index, plain_text(parts), self.answers[index].finish_reason)]

    def _end(self, index: int, event: DoneEvent) -> list[OutputPart]:
        if self._repeated.is_prompt_only:
            reason = event.finish_reason if event.finish_reason in CUT else "length"
            usage = replace(event.usage, completion_tokens=0)
            event = replace(event, finish_reason=reason, usage=usage, text="")
        return super()._end(index, event)

    def collect(self, index: int, event: TokenEvent | DoneEvent) -> None:
        if self._repeated.is_prompt_only and isinstance(event, TokenEvent):
            return
        super().collect(index, event)
        if isinstance(event, TokenEvent) and event.logprob is not None:
            self._sums[index] += logprob_number(event.logprob.logprob)
        self._offsets[index] += len(event.text)

    def skip(self, index: int, event: SkippedEvent) -> None:
        super().skip(index, event)
        self._offsets[index] += len(event.text)

    def _logprob_items(self, index: int, event: TokenEvent) -> tuple[object, ...]:
        assert event.logprob is not None  # callers look first
        return *_numbers(event.logprob, event.top), self._offsets[index]

    def _choice(self, index: int, answer: Answer) -> Chunk:
        choice: Chunk = {
            "index": index,
            "text": self._echo(index) + plain_text(answer.parts),
            "logprobs": None,
            "finish_reason": answer.finish_reason,
        }
        return choice | ({LISTED: LATER} if self._repeated.listed_best >= 0 else {})


def _listed(event: PromptTokenEvent, best: int) -> Chunk | None:
    """A token of the prompt and the best ones in its place, as vLLM lists them. The rank of one
    that is not among these is not known; there is nothing in front of the first one."""
    if event.logprob is None:
        return None
    top = event.top[:best]
    ranks = {one.token: rank for rank, one in enumerate(event.top, 1)}
    own = TokenLogprob(event.token, event.text, event.logprob)
    return {
        str(one.token): {
            "logprob": logprob_number(one.logprob),
            "rank": ranks.get(one.token),
            "decoded_token": one.text.decode("utf-8", "replace"),
        }
        for one in (own, *top)
    }


def _numbers(one: TokenLogprob, top: Sequence[TokenLogprob]) -> tuple[object, ...]:
    """A token, its log-probability, and those of the best ones and of itself."""
    best = {_text_of(each.text): logprob_number(each.logprob) for each in top}
    text, logprob = _text_of(one.text), logprob_number(one.logprob)
    best.setdefault(text, logprob)
    return text, logprob, best


def _text_of(piece: bytes) -> str:
    """A token as text; half a character as `bytes:\\xe2`, so that two halves stay two keys."""
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


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
