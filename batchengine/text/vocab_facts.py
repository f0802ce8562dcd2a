"""What a GGUF file says of its vocabulary: tokens, their kinds, special ids, ends of a turn.

Owns nothing but values read once. Files that leave a choice are read as llama.cpp reads them:
texts that are known to end a turn do so whatever the file says of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile, StringArray, Value

TOKENS = "tokenizer.ggml.tokens"
MERGES = "tokenizer.ggml.merges"  # of BPE
SCORES = "tokenizer.ggml.scores"  # of SentencePiece; 0 without
SPM = "llama"  # values of tokenizer.ggml.model
BPE = "gpt2"
GEMMA4 = "gemma4"  # BPE of characters, with bytes and spaces as SentencePiece has them

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = frozenset((UNKNOWN, CONTROL, USER_DEFINED))

# Ids that a SentencePiece file need not declare.
_SPM_DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}
# Pre-tokenizers whose models begin a text with `bos` unless the file says otherwise.
_ADD_BOS = frozenset(
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
        *("lfm2", "jina-v5-nano", "tekken", "chameleon"),
    )
)
# Texts that end a turn wherever they occur.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "[e~["),
)
# Marks of GLM that begin the message behind an answer, and so end it.
_NEXT_MESSAGE = (b"<|user|>", b"<|observation|>")
# Marks of fill-in-the-middle: by role, the texts that stand for it. The last three end a turn.
_FILL = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Marks that belong to the template and the answer, never to text, whatever kinds a file gives them:
# those of Harmony and of Gemma 4, each behind the marks that tell such a vocabulary.
_MARKS = (
    (
        (b"<|start|>", b"<|channel|>", b"<|message|>"),
        (b"<|constrain|>",),
    ),
    (
        (b"<|turn>", b"<turn|>", b'<|"|>'),
        (
            *(b"<|channel>", b"<channel|>", b"<|think|>", b"<|tool>", b"<tool|>"),
            *(b"<|tool_call>", b"<tool_call|>", b"<|tool_response>", b"<tool_response|>"),
        ),
    ),
)
_FILL_ENDS = ("fim_pad", "fim_rep", "fim_sep")


@dataclass(frozen=True, slots=True)
class VocabFacts:
    """One vocabulary. `kinds` has the tokens that are not plain text, `special_ids` by name.

    ends: tokens after which no more are sampled. closes: those, and the one that stands behind an
    answer in the prompts of later turns where the answer ended with another.
    strips: special tokens that take the white space after them along. tool_template: that of chats
    with tools, None if `template` is for them, too.
    """

    path: Path
    model: str
    pre: str
    tokens: list[bytes]
    kinds: dict[int, int]
    special_ids: dict[str, int]
    ends: frozenset[int]
    closes: frozenset[int]
    add_bos: bool
    add_space_prefix: bool
    strips: frozenset[int]
    template: str | None
    tool_template: str | None

    def text(self, token: int) -> str:
        """A token as the file has it."""
        return self.tokens[token].decode("utf-8", "replace")


def read_facts(path: Path) -> VocabFacts:
    """Raises VOCABULARY_UNUSABLE; errors of the GGUF reader pass."""
    if not path.is_file():
        raise unusable(path, "no such file")
    with GgufFile(path) as file:
        values = file.values
        listed = values.get(TOKENS)
        if not isinstance(listed, StringArray) or not len(listed):
            model = values.get("tokenizer.ggml.model")
            raise unusable(path, f"there is no vocabulary (tokenizer.ggml.model is {model})")
        tokens = list(listed)
        model = file.text("tokenizer.ggml.model", "")
        ids = {token: index for index, token in enumerate(tokens) if token}
        if len(ids) + tokens.count(b"") < len(tokens):
            raise unusable(path, _find_twice(tokens))
        if model in (BPE, GEMMA4) and not isinstance(values.get(MERGES), StringArray):
            raise unusable(path, f"there are no {MERGES}")
        if model == SPM:
            missing = [byte for byte in range(256) if not _spells(ids, byte)]
            if missing:
                why = f"{TOKENS} has no token <0x{missing[0]:02X}>, nor {len(missing) - 1} others"
                raise unusable(path, why)
            _check_scores(path, values.get(SCORES), len(tokens))
        kinds = _read_kinds(path, values.get("tokenizer.ggml.token_type"), len(tokens))
        pre = file.text("tokenizer.ggml.pre", "default") if model == BPE else ""
        special = _special_ids(values, len(tokens), _SPM_DEFAULTS if model == SPM else {})
        ends, closes = _ends(special, ids, kinds)
        for needed, others in _MARKS:
            if all(mark in ids for mark in needed):
                kinds.update({ids[mark]: CONTROL for mark in (*needed, *others) if mark in ids})
        asked = values.get("tokenizer.ggml.add_bos_token", model == SPM or pre in _ADD_BOS)
        return VocabFacts(
            path=path,
            model=model,
            pre=pre,
            tokens=tokens,
            kinds=kinds,
            special_ids=special,
            ends=ends,
            closes=closes,
            add_bos=(bool(asked) or model == GEMMA4) and "bos" in special,
            add_space_prefix=bool(values.get("tokenizer.ggml.add_space_prefix", model == SPM)),
            strips=_strips(values.get("general.name"), ids, kinds),
            template=_template(values.get("tokenizer.chat_template")),
            tool_template=_template(values.get("tokenizer.chat_template.tool_use")),
        )


def unusable(path: Path, why: str) -> BatchEngineError:
    """The file's vocabulary cannot be used."""
    return errors.VOCABULARY_UNUSABLE(file=path.name, why=why)


def _template(value: Value | None) -> str | None:
    return value if isinstance(value, str) and value else None


def _read_kinds(path: Path, types: Value | None, count: int) -> dict[int, int]:
    if types is None:
        return {}
    if not isinstance(types, np.ndarray) or len(types) < count:
        raise unusable(path, "tokenizer.ggml.token_type does not have one number for each token")
    return {
        int(token): int(types[token]) for token in np.flatnonzero(types != NORMAL) if token < count
    }


def _check_scores(path: Path, scores: Value | None, count: int) -> None:
    if scores is not None and (not isinstance(scores, np.ndarray) or len(scores) < count):
        raise unusable(path, f"{SCORES} does not have one for each token")


def _special_ids(
    values: Mapping[str, Value], count: int, defaults: Mapping[str, int]
) -> dict[str, int]:
    found = {name: token for name, token in defaults.items() if token < count}
    for name in ("bos", "eos", "eot", "eom", "unknown", *_FILL):
        token = values.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(token, int) and not isinstance(token, bool) and 0 <= token < count:
            found[name] = token
    return found


def _ends(
    special: dict[str, int], ids: dict[bytes, int], kinds: dict[int, int]
) -> tuple[frozenset[int], frozenset[int]]:
    """`VocabFacts.ends` and `closes`; known texts become control tokens in `kinds`."""
    ends: set[int] = set()
    for role, texts in _FILL.items():
        named = [ids[text.encode()] for text in texts if text.encode() in ids]
        if role not in special and named:
            special[role] = named[0]
            kinds[named[0]] = CONTROL
        if role in _FILL_ENDS and role in special:
            ends.add(special[role])
    for text in _ENDS:
        token = ids.get(text.encode())
        if token is not None:
            ends.add(token)
            kinds[token] = CONTROL
    if {b"<|tool_response>", b"</s>"} <= ids.keys():  # of Gemma 4, whose </s> is text
        ends.discard(ids[b"</s>"])
        kinds.pop(ids[b"</s>"])
    ends.update(special[name] for name in ("eos", "eot", "eom") if name in special)
    if all(mark in ids for mark in _NEXT_MESSAGE):
        ends.update(ids[mark] for mark in _NEXT_MESSAGE)
        kinds.update((ids[mark], CONTROL) for mark in _NEXT_MESSAGE)
    closes = frozenset(ends)
    if _named(ids, "<|return|>", "<|call|>") or _named(ids, "<|calls|>", "<|flush|>"):
        ends.discard(ids.get(b"<|end|>", -1))
    return frozenset(ends), closes


def _strips(name: Value | None, ids: dict[bytes, int], kinds: dict[int, int]) -> frozenset[int]:
    """Those of Phi 3, which files tell by the model's name alone."""
    if not isinstance(name, str) or not any(mark in name.lower() for mark in ("phi-3", "phi3")):
        return frozenset()
    kept = {ids.get(text) for text in (b"<unk>", b"<s>", b"<|endoftext|>")}
    return frozenset(t for t, kind in kinds.items() if kind in SPECIAL and t not in kept)


def _named(ids: dict[bytes, int], *texts: str) -> bool:
    return all(text.encode() in ids for text in texts)


def _spells(known: Mapping[bytes, int], byte: int) -> bool:
    return f"<0x{byte:02X}>".encode() in known or bytes([byte]) in known


def _find_twice(tokens: list[bytes]) -> str:
    first: dict[bytes, int] = {}
    for index, token in enumerate(tokens):
        if token and token in first:
            text = token[:40].decode("utf-8", "replace")
            return f"{TOKENS} holds {text!r} twice, at {first[token]} and {index}"
        first[token] = index
    return f"{TOKENS} holds a token twice"
