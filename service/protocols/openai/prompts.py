"""Prompts of plain completions: text or token ids, and text with a gap to fill."""

from __future__ import annotations

from typing import cast

from batchengine import errors
from service.protocols import requests
from service.protocols.protocol import PromptEncoder, PromptLimits
from service.protocols.schema import PROMPTS_MAX

# Control tokens of vocabularies that can fill a gap: in front of the text before it, in front of
# the text behind it, and at the end of the prompt.
GAP_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)


def encoded(
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


def texts(value: object, tokens: list[list[int]], text: PromptEncoder) -> list[str]:
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
