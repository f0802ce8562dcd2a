"""llama.cpp as the reference runtime: greedy answers and how decided they were.

Used by the evaluation and the oracle only. One context, one sequence, plain settings (no flash
attention, f16 KV), so that a figure can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import llama_cpp
import numpy as np

from bench.models.llama import has_amx
from pocket.generate import Exchange, Turn, render


@dataclass(frozen=True)
class Greedy:
    """A greedy answer. `gap_min` = smallest difference of the two best logits on the way."""

    tokens: tuple[int, ...]  # without the end of turn
    text: str
    gap_min: float
    ended: bool


class Reference:
    """A loaded model."""

    def __init__(self, path: Path, context_tokens: int = 10_240, threads: int = 1) -> None:
        library, defaults = llama_cpp.llama_cpp, llama_cpp.llama_model_default_params

        def params() -> llama_cpp.llama_model_params:
            made = defaults()
            made.use_extra_bufts = not has_amx()
            return made

        with mock.patch.object(library, "llama_model_default_params", params):  # no argument of it
            self._llama = llama_cpp.Llama(
                str(path),
                n_ctx=context_tokens,
                n_batch=512,
                n_threads=threads,
                n_threads_batch=threads,
                flash_attn=False,
                verbose=False,
            )

    def encode(self, text: str) -> list[int]:
        """Token ids; control tokens in the text count."""
        return self._llama.tokenize(text.encode(), add_bos=False, special=True)

    def measure(self, exchange: Exchange) -> int:
        """Tokens of an exchange, without the beginning of an answer."""
        return len(self.encode(render([Turn(*turn) for turn in exchange]))) - 3

    def greedy(self, prompt: list[int], tokens_max: int = 160) -> Greedy:
        """The answer at temperature 0."""
        llama, end = self._llama, self._llama.token_eos()
        llama.reset()
        llama.eval(prompt)
        tokens: list[int] = []
        gaps: list[float] = []
        while len(tokens) < tokens_max:
            logits = self._logits()
            second, best = (int(index) for index in np.argpartition(logits, -2)[-2:])
            if logits[second] > logits[best]:
                second, best = best, second
            gaps.append(float(logits[best] - logits[second]))
            if best == end:
                break
            tokens.append(best)
            llama.eval([best])
        text = llama.detokenize(tokens, special=True).decode("utf-8", "replace")
        return Greedy(tuple(tokens), text, min(gaps), len(tokens) < tokens_max)

    def close(self) -> None:
        """Free the model."""
        self._llama.close()

    def _logits(self) -> np.ndarray:
        row = llama_cpp.llama_get_logits_ith(self._llama.ctx, -1)
        return np.ctypeslib.as_array(row, shape=(self._llama.n_vocab(),)).copy()
