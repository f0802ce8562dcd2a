"""Grammars of answers: compiled by llguidance against one vocabulary, a matcher per answer.

A hostile grammar may take memory and time up to the limits below, or end the process by a defect of
the library: use this in processes that may be killed. The masks are a function of the grammar, the
vocabulary and the tokens, so every process computes the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from batchengine import errors
from batchengine.core import BatchEngineError, Constraint
from batchengine.text.vocab import Tokenizer

GRAMMAR_BYTES_MAX = 4 << 20  # of a constraint's text
# Counts of steps, not times, so that they are reached at the same token on every machine. A mask
# stays below some 20 ms.
LIMITS = {
    "max_items_in_row": 2000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# Schemas of clients have keywords that do not constrain text, or that nothing can enforce.
# White space is at most one after a comma and a colon: a model that repeats it would never end.
JSON_OPTIONS = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
WHY_CHARS_MAX = 300


class GrammarCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made: LLTokenizer | None = None
        self.words = -(-tokenizer.vocab_size // 32)  # 32-bit words of a mask

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher before the first token. Raises GRAMMAR_REFUSED."""
        if len(constraint.text) > GRAMMAR_BYTES_MAX:
            raise errors.GRAMMAR_REFUSED(why=f"it has more than {GRAMMAR_BYTES_MAX >> 20} MiB")
        try:
            match constraint.kind:
                case "json_schema":
                    options = cast(Any, JSON_OPTIONS)
                    grammar = LLMatcher.grammar_from_json_schema(constraint.text, overrides=options)
                case "lark":
                    grammar = LLMatcher.grammar_from_lark(constraint.text)
                case "regex":
                    grammar = LLMatcher.grammar_from_regex(constraint.text)
            limits = LLParserLimits(**cast(Any, LIMITS))
            made = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        except (ValueError, UnicodeError) as error:
            raise errors.GRAMMAR_REFUSED(why=_line(str(error))) from None
        matcher = GrammarMatcher(made, self.words)
        matcher.check()
        return matcher

    def prepare(self) -> None:
        """Read the vocabulary now; else the first matcher does."""
        self._vocabulary()

    def check(self, constraint: Constraint) -> None:
        """Raise GRAMMAR_REFUSED unless the constraint compiles and allows a first token."""
        self.matcher(constraint).mask()

    def _vocabulary(self) -> LLTokenizer:
        if self._made is None:
            self._made = _Pieces(self._tokenizer).made
        return self._made


class GrammarMatcher:
    """The grammar of one answer after some of its tokens."""

    def __init__(self, made: LLMatcher, words: int) -> None:
        self._made = made
        self._words = words

    def accept(self, tokens: Sequence[int]) -> None:
        """Add tokens of the answer; those behind the end of the grammar change nothing. Raises
        GRAMMAR_REFUSED."""
        for token in tokens:
            if self._made.is_stopped():
                break
            self._made.consume_token(token)
        self.check()

    def mask(self) -> bytes:
        """A bit per token, the lowest first, in words of 32: whether it may come next; after the
        end of the grammar that is the tokens that end a generation. Raises GRAMMAR_REFUSED."""
        bits = self._made.compute_bitmask()[: 4 * self._words]
        self.check()
        if not any(bits):
            raise errors.GRAMMAR_REFUSED(why="it allows no token")
        return bits.ljust(4 * self._words, b"\0")

    def check(self) -> None:
        """Raise GRAMMAR_REFUSED if the library has given up."""
        if self._made.is_error():
            raise errors.GRAMMAR_REFUSED(why=_line(self._made.get_error()))


class _Pieces:
    """A vocabulary as llguidance reads it."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        ends = sorted(tokenizer.eog)
        if not ends:
            raise errors.GRAMMAR_REFUSED(why="this model has no token that ends an answer")
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos
        self.tokens = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.control)
        self.made = LLTokenizer(cast(Any, self), eos_token=ends)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that a grammar forces: any will do, since no token is forced."""
        return self.made.greedy_tokenize(
            text if isinstance(text, str) else text.decode("utf-8", "replace")
        )


def refusal(error: BaseException) -> BatchEngineError:
    """The error of a grammar at which the library has failed."""
    if isinstance(error, BatchEngineError):
        return error
    return errors.GRAMMAR_REFUSED(why=f"the grammar library failed: {type(error).__name__}")


def _line(text: str) -> str:
    """A message of the library, which may be a page long, as one line: its first, and behind a
    heading the last, which says what is wrong below a drawing of where."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it cannot be read"
    first = lines[0]
    if first.endswith(":") and len(lines) > 1:
        first = f"{first} {lines[-1].removeprefix('error: ')}"
    return first[:WHY_CHARS_MAX]
