"""Checks of a GGUF vocabulary that must come before llama.cpp sees it.

llama.cpp answers most defects of a file with an error, but ends the whole process for a few: tokens
that appear twice, and SentencePiece vocabularies without a token for every byte. Those are refused
here, by name.
"""

from __future__ import annotations

from pathlib import Path

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile, StringArray

_TOKENS = "tokenizer.ggml.tokens"


def check_vocabulary(path: Path) -> None:
    """Raises VOCABULARY_UNUSABLE where llama.cpp would abort; errors of the GGUF reader pass."""
    with GgufFile(path) as file:
        tokens = file.values.get(_TOKENS)
        if not isinstance(tokens, StringArray):
            return  # llama.cpp reports what is wrong with it
        known = set(tokens)
        if len(known) < len(tokens):
            raise unusable(path, _find_twice(tokens))
        if file.values.get("tokenizer.ggml.model") == "llama":
            missing = [byte for byte in range(256) if not _spells(known, byte)]
            if missing:
                why = f"{_TOKENS} has no token <0x{missing[0]:02X}>, nor {len(missing) - 1} others"
                raise unusable(path, why)


def unusable(path: Path, why: str) -> BatchEngineError:
    """The file's vocabulary cannot be used."""
    return errors.VOCABULARY_UNUSABLE(file=path.name, why=why)


def _spells(known: set[bytes], byte: int) -> bool:
    return f"<0x{byte:02X}>".encode() in known or bytes([byte]) in known


def _find_twice(tokens: StringArray) -> str:
    first: dict[bytes, int] = {}
    for index, token in enumerate(tokens):
        if token in first:
            text = token[:40].decode("utf-8", "replace")
            return f"{_TOKENS} holds {text!r} twice, at {first[token]} and {index}"
        first[token] = index
    return f"{_TOKENS} holds a token twice"
