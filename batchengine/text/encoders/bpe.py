"""Byte-level BPE with the `tokenizers` library: vocabulary and merges of the file, and the way in
which its model splits text into words.

Only splits whose ids were compared with llama.cpp's are here (`bench tokenizer`).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, cast

from batchengine.gguf import GgufFile
from batchengine.text.encoders.special import SpecialTokens
from batchengine.text.vocab_facts import MERGES, TOKENS, VocabFacts, unusable

_ENDINGS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
# llama.cpp takes letters beyond ASCII as both upper and lower case
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_SIGNS}"
_O200K = rf"{_CASED[0]}{_ENDINGS}?|{_CASED[1]}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS}"
# Kimi: characters of Chinese are words of their own. Ranges, which have code points without a
# meaning yet, too.
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
)
# DeepSeek: llama.cpp takes white space beyond ASCII out of ranges.
_EAST_ASIAN = r"[一-龥\x{800}-一가-\x{D7FF}&&[^\s]]+"
_CJK = r"[一-龥\x{3040}-ゟ゠-ヿ]+"
_DEEPSEEK3 = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACE}"
)
_SPARK = (
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
)
# letters with a case; those of a few scripts and forms are left out
_CASED_LETTERS = (
    "A-Za-zµ\u00c0-\u00d6Ø-\u00f6ø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿ\u0386\u0388-\u038a\u038c\u038e-Ρ"
    "Σ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚ\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc"
    "\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d"
    "\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟、。]+",
    r"\s+\z",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_YOUTU = (
    rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_CJK}",
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_ENDINGS}?|\p{{N}}|{_SIGNS}",
)

# The words of a text by tokenizer.ggml.pre: each pattern splits what the one before it left.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais"), (_GPT2,)),
    **dict.fromkeys(("granite-docling", "gigachat"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", _GPT2)),
    **dict.fromkeys(("qwen2", "hunyuan", "deepseek-r1-qwen", "stablelm2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), (_LLAMA3,)),
    **dict.fromkeys(("glm4", "glm5", "chatglm-bpe", "dbrx"), (_LLAMA3,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2", "kanana2"), (_O200K,)),
    "kimi-k2": (_KIMI,),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"),
        (r"\p{N}{1,3}", _CJK, _DEEPSEEK3),
    ),
    "spark2_5": (r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}"),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "youtu": _YOUTU,
}
# Words that are tokens stay whole, whatever the merges say.
_WHOLE_WORDS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken"),
        *("glm4", "glm5", "youtu"),
    )
)

_PART_CHARS = 1 << 16
# Splits that leave letters without a case, with white space in front of them, where they stand.
_LEAVES_LETTERS = frozenset(("deepseek-llm",))


def byte_characters() -> list[str]:
    """The character that stands for each byte in a token of a byte-level vocabulary."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


class _Encoding(Protocol):
    ids: list[int]


class BpeLibrary(Protocol):
    """The part of the library used here, with types."""

    def encode_batch_fast(
        self, texts: list[str], *, add_special_tokens: bool
    ) -> Sequence[_Encoding]: ...


class BpeEncoder:
    """Text to ids; the library gets the text between special tokens, in parts."""

    def __init__(self, facts: VocabFacts) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a text process may start no thread
        self._special = SpecialTokens(facts)
        cased = re.compile(f"[{_CASED_LETTERS}]").fullmatch
        self._begins = cased if facts.pre in _LEAVES_LETTERS else str.isalpha
        self._library = _build(facts)
        self._known: dict[str, list[int]] | None = None  # text of this request

    def begin_request(self) -> None:
        """Forget text of the last request; from now on, text that recurs is encoded once."""
        self._known = {}

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Ids of a text; `control` lets control tokens written in it count."""
        ids: list[int] = []
        for piece in self._special.cut(text, control=control):
            if isinstance(piece, int):
                ids.append(piece)
                continue
            found = None if self._known is None else self._known.get(piece)
            if found is None:
                found = self._encode_text(piece)
                if self._known is not None:
                    self._known[piece] = found
            ids += found
        return ids

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _parts(text, self._begins):
            ids += self._library.encode_batch_fast([part], add_special_tokens=False)[0].ids
        return ids

    def close(self) -> None:
        """Nothing is held that the interpreter does not free."""


def why_unknown(facts: VocabFacts) -> str:
    """Why ids of this vocabulary may not be those of llama.cpp, "" if they are."""
    if facts.pre not in SPLITS:
        return f"tokenizer.ggml.pre is {facts.pre!r}"
    if importlib.util.find_spec("tokenizers") is None:
        return "the package tokenizers is not installed"
    known = set(facts.tokens)
    missing = [byte for byte, char in enumerate(byte_characters()) if char.encode() not in known]
    return f"it has no token for byte {missing[0]}" if missing else ""


def listed_merges(file: GgufFile, known: Container[str]) -> list[tuple[str, str]]:
    """The merges of a file, those of tokens that are `known`, the first of pairs listed twice."""
    pairs = dict.fromkeys(_pair(merge) for merge in file.strings(MERGES))
    return [
        (left, right)
        for left, right in pairs
        if left in known and right in known and left + right in known
    ]


def _build(facts: VocabFacts) -> BpeLibrary:
    # by name, so that neither the engine nor a machine with llama.cpp alone needs the package
    package: Any = importlib.import_module("tokenizers")
    vocab: dict[str, int] = {}
    for index, token in enumerate(facts.tokens):
        with contextlib.suppress(UnicodeDecodeError):  # no word of a text is such a token
            vocab[token.decode()] = index
    with GgufFile(facts.path) as file:
        merges = listed_merges(file, vocab)
    try:
        model = package.models.BPE(vocab, merges, ignore_merges=facts.pre in _WHOLE_WORDS)
    except Exception as error:  # the library has no class of its own
        raise unusable(facts.path, f"{TOKENS}: {error}") from error
    library = package.Tokenizer(model)
    words = package.pre_tokenizers
    splits = [words.Split(package.Regex(split), "isolated") for split in SPLITS[facts.pre]]
    as_bytes = words.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = words.Sequence([*splits, as_bytes])
    return cast(BpeLibrary, library)


def _pair(merge: bytes) -> tuple[str, str]:
    text = merge.decode("utf-8", "replace")
    space = text.find(" ", 1)
    return (text[:space], text[space + 1 :]) if space > 0 else ("", "")


def _parts(text: str, begins: Callable[[str], object]) -> list[str]:
    """The text in parts whose ids are those of the whole: no word of any split goes on after
    something that is not white space when a space and a letter follow. begins: whether a letter is
    one that begins a word of the split."""
    parts: list[str] = []
    start = 0
    while (cut := _find_cut(text, start + _PART_CHARS, begins)) > 0:
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]]


def _find_cut(text: str, start: int, begins: Callable[[str], object]) -> int:
    """The first place from `start` on where a part may begin, 0 if there is none."""
    at = text.find(" ", start)
    while at > 0:
        if begins(text[at + 1 : at + 2]) and not text[at - 1].isspace():
            return at
        at = text.find(" ", at + 1)
    return 0
