"""POST /v1/completions: prompts as text or token ids in, OpenAI text completions out."""

from __future__ import annotations

from typing import cast

from batchengine.core import DoneEvent, TokenEvent, TokenLogprob
from service import errors, work
from service.door import Engine
from service.schema import PROMPTS_MAX, CompletionRequest
from service.shape import Answer, Shape, logprob_number
from service.strict_json import off_loop
from service.work import Job

TOKENS_DEFAULT = 16  # what every client of this older API expects


async def prepare(
    job: Job, body: CompletionRequest, engine: Engine, tokens_max_default: int
) -> CompletionShape:
    """Tokens of every prompt into `job.requests`; raises 400."""
    info = engine.info
    prompts: list[list[int]] = []
    forms = await off_loop(job.body_bytes, _prompts, body.prompt, info.vocab_size)
    for prompt in forms:
        if isinstance(prompt, str):
            work.check_text_size(len(prompt.encode()), info.context_tokens, "prompt")
            tokens = await engine.text.encode(prompt, special=True)
        else:
            tokens = prompt
        work.check_prompt(tokens, info.context_tokens, "prompt")
        prompts.append(tokens)
    wanted = body.max_tokens
    if wanted is None:  # the default must never be the reason for refusing a prompt that fits
        wanted = min(
            TOKENS_DEFAULT, tokens_max_default, *(info.context_tokens - len(p) for p in prompts)
        )
    work.fill(job, body, prompts, wanted, engine)
    return CompletionShape(job)


def _prompts(value: object, vocab_size: int) -> list[str | list[int]]:
    """The four forms of `prompt`: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        items = cast("list[object]", value)
        if all(isinstance(item, str) for item in items) and len(items) <= PROMPTS_MAX:
            return list(cast("list[str]", items))
        if all(type(item) is int for item in items):
            return [_token_ids(items, vocab_size)]
        if all(isinstance(item, list) for item in items) and len(items) <= PROMPTS_MAX:
            return [_token_ids(cast("list[object]", item), vocab_size) for item in items]
    raise errors.invalid_field(
        "prompt",
        "prompt has a wrong value",
        why=f"expected text, token ids, or a list of at most {PROMPTS_MAX} of either",
        fix="send a string",
    )


def _token_ids(items: list[object], vocab_size: int) -> list[int]:
    for index, item in enumerate(items):
        if type(item) is not int or not 0 <= item < vocab_size:
            raise errors.invalid_field(
                f"prompt[{index}]",
                f"prompt[{index}] is not a token id of this model",
                why=f"token ids are whole numbers from 0 to {vocab_size - 1:,}",
                fix="send text, or ids made with this model's tokenizer",
            )
    return cast("list[int]", items)


class CompletionShape(Shape):
    """Text completion chunks and the whole object; both have `object` "text_completion"."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "cmpl-" + job.request_id.removeprefix("req_"))
        self._offsets = [0] * len(job.requests)  # characters sent so far, per choice

    def _chunk(
        self,
        index: int,
        text: str,
        finish_reason: str | None = None,
        logprobs: dict[str, object] | None = None,
    ) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self.envelope("text_completion", [choice])

    def first(self, index: int) -> dict[str, object]:
        return self._chunk(index, "")

    def noop(self) -> dict[str, object]:
        return self._chunk(0, "")

    def token(self, index: int, event: TokenEvent) -> dict[str, object] | None:
        if not event.text and event.logprob is None:
            return None
        logprobs = None
        if event.logprob is not None:
            logprobs = _logprobs([event], [self._offsets[index]])
        self._offsets[index] += len(event.text)
        return self._chunk(index, event.text, logprobs=logprobs)

    def finish(self, index: int, event: DoneEvent) -> list[dict[str, object]]:
        return [self._chunk(index, event.text, event.finish_reason)]

    def usage_chunk(self, answers: list[Answer]) -> dict[str, object]:
        return self.envelope("text_completion", [])

    def whole(self, answers: list[Answer]) -> dict[str, object]:
        choices: list[dict[str, object]] = []
        for index, answer in enumerate(answers):
            logprobs = None
            if self.job.requests[index].sampling.logprobs >= 0:
                offsets: list[int] = []
                offset = 0
                for event in answer.events:
                    offsets.append(offset)
                    offset += len(event.text)
                logprobs = _logprobs(answer.events, offsets)
            choices.append(
                {
                    "index": index,
                    "text": answer.text,
                    "logprobs": logprobs,
                    "finish_reason": answer.finish_reason,
                }
            )
        return self.with_facts(self.envelope("text_completion", choices), answers)


def _logprobs(events: list[TokenEvent], offsets: list[int]) -> dict[str, object]:
    """Parallel lists, one entry per token."""
    tokens: list[str] = []
    numbers: list[float] = []
    tops: list[dict[str, float]] = []
    starts: list[int] = []
    for event, offset in zip(events, offsets, strict=True):
        if event.logprob is None:
            continue
        tokens.append(_token_text(event.logprob))
        numbers.append(logprob_number(event.logprob.logprob))
        tops.append({_token_text(one): logprob_number(one.logprob) for one in event.top})
        starts.append(offset)
    return {
        "tokens": tokens,
        "token_logprobs": numbers,
        "top_logprobs": tops,
        "text_offset": starts,
    }


def _token_text(one: TokenLogprob) -> str:
    """The token as text; half a character as `bytes:\\xe2`, so that two halves stay two keys."""
    try:
        return one.text.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.text)
