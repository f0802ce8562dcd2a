"""Grammars of answers: compiled by llguidance against one vocabulary, a matcher per answer.

A hostile grammar may take memory and time up to the limits below, or end the process by a defect of
the library: use this in processes that may be killed. The masks are a function of the grammar, the
vocabulary and the tokens, so every process computes the same ones.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from batchengine import errors
from batchengine.core import SCHEMA_LOST, SCHEMA_TOOL, BatchEngineError, Constraint
from batchengine.text.vocab import Tokenizer

# Counts of steps, not times, so that they are reached at the same token on every machine. A mask
# stays below some 30 ms. A row has an item for each alternative, and four for each property of an
# object that may have others: objects of 1,200 properties pass.
LIMITS = {
    "max_items_in_row": 5000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
# Schemas of clients have keywords that do not constrain text, or that nothing can enforce: these
# are not refused, but named (see `GrammarMatcher.lost`).
# White space is at most one after a comma and a colon: a model that repeats it would never end.
JSON_OPTIONS = {
    "lenient": True,
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}
WHY_CHARS_MAX = 300
TOOL_CHARS_MAX = 64  # of its name
# A check follows answers for some tokens, since some grammars are too much for the parser behind
# the first ones only.
CHECK_CPU_S_MAX = 1.0  # 100 tools take 0.2 s
PARTS_CPU_S = 0.4  # no schema behind the longest once the check has taken this
WALKS = (32, 16, 16)  # masks: of a short answer, then of random ones
WALK_CPU_S = 0.05  # no further walk under one grammar once this was used
SHORT = b'"},]:{['  # a token of one such byte is part of a short answer
# names by which the library says that it allows no further token -> in plain words
NO_ANSWER = "no answer follows it: a part of it consists of itself, or excludes what it needs"
STOPS = {"NoExtension": NO_ANSWER, "NoExtensionBias": NO_ANSWER}
# attributes of Lark's rules under which llguidance cannot roll tokens back
_COUNTS = re.compile(r"\b(?:max_tokens|stop)\s*=")
_AT_SCHEMA = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: ")
_SCHEMA = re.compile(r"%json\s+(?=\{)")
# what the library says of a keyword that it leaves out -> its name, if the text does not have it
_LEFT_OUT = {"Unimplemented keys: ": "", "Unknown format: ": "format", "oneOf ": "oneOf"}
_LOST = re.compile(rf'"{SCHEMA_LOST}": ?\[([^\]]*)\]')
_NAME = re.compile(r'"([\w$]+)"', re.ASCII)
# The library computes bounds in binary64, so those of 2^53 and more may be off by some.
_LARGE_BOUND = re.compile(r'"((?:exclusiveM|m)(?:in|ax)imum|multipleOf)": ?-?(\d{16,})')
_EXACT_MAX = 1 << 53
# Two members of an object may have one key, which is one property to who reads it.
_TWO_PROPERTIES = re.compile(r'"minProperties": ?(?![01](?!\d))\d')


class GrammarCompiler:
    """Compiles constraints for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._made: LLTokenizer | None = None
        self._short: list[int] = []  # tokens of SHORT
        self.words = -(-tokenizer.vocab_size // 32)  # 32-bit words of a mask

    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        """A matcher before the first token. Raises GRAMMAR_REFUSED.

        Each is compiled anew: copies of one share the states of its lexer, so what one answer may
        use up would depend on others.
        """
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
        counts = constraint.kind == "lark" and _COUNTS.search(constraint.text) is not None
        matcher = GrammarMatcher(made, self.words, constraint.text, counts=counts)
        matcher.check()
        return matcher

    def prepare(self) -> None:
        """Read the vocabulary now; else the first matcher does."""
        self._vocabulary()

    def check(self, constraint: Constraint) -> list[str]:
        """The names of keywords that the constraint does not enforce. Raise GRAMMAR_REFUSED unless
        it compiles, in time, and some answers can begin under it and under the schemas in it: the
        longest one, others while time is left.

        What one of these schemas does not allow is said of its tool.
        """
        self.prepare()
        began = time.thread_time()
        schemas = sorted(_schemas_in(constraint), key=len, reverse=True)
        try:
            lost = self._follow(constraint)
        except BatchEngineError:
            self._check_schemas(schemas, self.matcher, began)  # the sooner, of many
            self._check_schemas(schemas, self._follow, began)
            raise
        self._check_schemas(schemas, self._follow, began)
        if time.thread_time() - began > CHECK_CPU_S_MAX:
            why = f"its compilation takes more than {CHECK_CPU_S_MAX:.0f} s"
            raise errors.GRAMMAR_REFUSED(why=why)
        return lost

    def _check_schemas(
        self, schemas: Sequence[str], check: Callable[[Constraint], object], began: float
    ) -> None:
        for schema in schemas:
            try:
                check(Constraint("json_schema", schema))
            except BatchEngineError as error:
                tool: object = json.loads(schema).get(SCHEMA_TOOL)
                if not isinstance(tool, str):
                    raise
                why = f"the schema of the tool {tool[:TOOL_CHARS_MAX]!r}: {error.why}"
                raise errors.GRAMMAR_REFUSED(why=why) from None
            if time.thread_time() - began > PARTS_CPU_S:
                break

    def _follow(self, constraint: Constraint) -> list[str]:
        """Compile a constraint, and follow some answers: a short one, then random ones. Returns
        what it does not enforce."""
        began, rng = time.thread_time(), random.Random(len(constraint.text))
        lost: list[str] = []
        for number, count in enumerate(WALKS):
            matcher = self.matcher(constraint)
            lost = lost or matcher.lost()
            self._walk(matcher, count, rng if number else None)
            if time.thread_time() - began > WALK_CPU_S:
                break
        return lost

    def _walk(self, matcher: GrammarMatcher, count: int, rng: random.Random | None) -> None:
        for _ in range(count):
            bits = int.from_bytes(matcher.mask(), "little")
            short = () if rng else (one for one in self._short if bits >> one & 1)
            token = next(iter(short), None)
            if token is None:
                first = rng.randrange(bits.bit_length()) if rng else 0
                above = bits >> first
                token = first + (above & -above).bit_length() - 1
            if token in self._tokenizer.eog:
                return
            matcher.accept([token])

    def _vocabulary(self) -> LLTokenizer:
        if self._made is None:
            pieces = _Pieces(self._tokenizer)
            found = {piece: token for token, piece in enumerate(pieces.tokens) if len(piece) == 1}
            self._short = [found[bytes([byte])] for byte in SHORT if bytes([byte]) in found]
            self._made = pieces.made
        return self._made


class GrammarMatcher:
    """The grammar of one answer after some of its tokens."""

    def __init__(self, made: LLMatcher, words: int, source: str, *, counts: bool = False) -> None:
        """counts: the grammar has bounds for which masks count, too, not tokens alone."""
        self._made = made
        self._words = words
        self._source = source
        self.counts = counts

    def lost(self) -> list[str]:
        """The names of keywords of its schemas that answers may break."""
        found: set[str] = set()
        for warning in self._made.get_grammar_warnings():
            for said, name in _LEFT_OUT.items():
                if warning.startswith(said):
                    found.update((name,) if name else _NAME.findall(warning))
        for names in _LOST.findall(self._source):
            found.update(_NAME.findall(names))
        for name, bound in _LARGE_BOUND.findall(self._source):
            found.update((name,) if int(bound) >= _EXACT_MAX else ())
        if _TWO_PROPERTIES.search(self._source):
            found.add("minProperties")
        return sorted(found)

    def accept(self, tokens: Sequence[int], *, again: bool = False) -> None:
        """Add tokens of the answer; those behind the end of the grammar change nothing. Raises
        GRAMMAR_REFUSED.

        The library is as if they had come one by one, with a mask before each: masks use up its
        limits. again: they did come so, and only what decides masks has to be the same.
        """
        needs_masks = self.counts or not again
        for index, token in enumerate(tokens):
            if self._made.is_stopped():
                break
            if needs_masks and (index or again):
                self.mask()
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

    def follow(self, draft: Sequence[int], is_in_time: Callable[[], bool]) -> list[bytes]:
        """The masks behind tokens that may come next, up to the first which may not, while there is
        time; the matcher is then where it was. Raises GRAMMAR_REFUSED."""
        masks: list[bytes] = []
        accepted = 0
        for token in draft:
            if self._made.is_stopped() or not is_in_time():
                break
            if not self._made.try_consume_tokens([token]):
                break
            accepted += 1
            masks.append(self.mask())
        if accepted and not self._made.rollback(accepted):
            raise errors.GRAMMAR_REFUSED(why="it cannot go back behind a draft")
        self.check()
        return masks

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
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        texts = {one for token, one in enumerate(pieces) if not tokenizer.is_byte(token)}
        # Of several tokens of one piece the library allows one, which has to be that of text.
        self.tokens = [
            b"" if tokenizer.is_byte(token) and one in texts else one
            for token, one in enumerate(pieces)
        ]
        self.special_token_ids = sorted(tokenizer.control)
        self.made = LLTokenizer(cast(Any, self), eos_token=ends)

    def __call__(self, text: str | bytes) -> list[int]:
        """Tokens of a text that a grammar forces: any will do, since no token is forced."""
        return self.made.greedy_tokenize(
            text if isinstance(text, str) else text.decode("utf-8", "replace")
        )


def _schemas_in(constraint: Constraint) -> list[str]:
    """The schemas in a grammar in Lark."""
    found: list[str] = []
    decode = json.JSONDecoder().raw_decode
    for begin in _SCHEMA.finditer(constraint.text if constraint.kind == "lark" else ""):
        with contextlib.suppress(ValueError, RecursionError):
            found.append(constraint.text[begin.end() : decode(constraint.text, begin.end())[1]])
    return found


def refusal(error: BaseException) -> BatchEngineError:
    """The error of a grammar at which the library has failed."""
    if isinstance(error, BatchEngineError):
        return error
    return errors.GRAMMAR_REFUSED(why=f"the grammar library failed: {type(error).__name__}")


def _line(text: str) -> str:
    """A message of the library, which may be a page long, as one line: its first, without the place
    of a schema, and behind a heading the one which says what is wrong below a drawing of where."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it cannot be read"
    first = lines[0]
    if first.endswith(":") and len(lines) > 1:
        said = next((line for line in lines if line.startswith("error: ")), lines[-1])
        first = f"{first} {said.removeprefix('error: ')}"
    return STOPS.get(first, _AT_SCHEMA.sub("", first)[:WHY_CHARS_MAX])
