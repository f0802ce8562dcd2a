"""The vocabulary of one GGUF file: text to ids, ids to bytes, what each token means.

What the file says is read at once (`vocab_facts`). The encoder is made when it is first needed, in
a text process: BPE of bytes or of characters and SentencePiece here, and llama.cpp, if it is
installed, for vocabularies whose ids were not compared with its own.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol

from batchengine import errors
from batchengine.text.encoders import bpe, character_bpe
from batchengine.text.encoders.bpe import BpeEncoder
from batchengine.text.encoders.character_bpe import CharacterBpeEncoder
from batchengine.text.encoders.llama import LlamaEncoder
from batchengine.text.encoders.spm import SpmEncoder
from batchengine.text.vocab_facts import (
    BPE,
    BYTE,
    CONTROL,
    GEMMA4,
    NORMAL,
    SPECIAL,
    SPM,
    UNKNOWN,
    VocabFacts,
    read_facts,
)

# One text may be this large. Far above any context window; below the C API's int32 lengths.
TEXT_BYTES_MAX = 64 << 20

_BYTES = {char: byte for byte, char in enumerate(bpe.byte_characters())}


class Encoder(Protocol):
    """Text to ids; `control` lets control tokens written in the text count."""

    def begin_request(self) -> None: ...
    def encode(self, text: str, *, control: bool) -> list[int]: ...
    def close(self) -> None: ...


class Tokenizer:
    """Encoder and piece table of one GGUF vocabulary.

    `encode` may run on one thread while `piece` is called on another: both only read the
    vocabulary. `close` must come last.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read `path`; VOCABULARY_UNUSABLE names the cause when it cannot be used."""
        self.path = Path(path)
        self._facts = facts = read_facts(self.path)
        self.vocab_size = len(facts.tokens)
        self.chat_template, self.tool_template = facts.template, facts.tool_template
        self.bos = facts.special_ids.get("bos")
        self.eos = facts.special_ids.get("eos")
        self.add_bos = facts.add_bos
        self.control = frozenset(
            token
            for token, kind in facts.kinds.items()
            if kind in (CONTROL, UNKNOWN) and facts.tokens[token]
        )
        marked = (token for token, kind in facts.kinds.items() if kind in SPECIAL)
        self.special_ids = {self.token_text(t): t for t in sorted(marked, reverse=True)}
        self.eog, self.closes = facts.ends, facts.closes
        self.strips = facts.strips
        self._encoder: Encoder | None = None
        self._encoder_lock = threading.Lock()
        self._is_closed = False
        if _why_unknown(facts):
            self.prepare()  # llama.cpp is there and reads the file, or this is an error now

    def __repr__(self) -> str:
        return (
            f"<Tokenizer {self.path.name} vocab={self.vocab_size} bos={self.bos} eos={self.eos} "
            f"control={len(self.control)} eog={len(self.eog)}>"
        )

    def close(self) -> None:
        """Free the vocabulary; idempotent."""
        self._is_closed = True
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            encoder.close()

    def prepare(self) -> Encoder:
        """Makes the encoder, which takes as long as a long text."""
        with self._encoder_lock:
            if self._is_closed:
                raise errors.TOKENIZER_FAILED(why="the tokenizer is closed")
            if self._encoder is None:
                self._encoder = _make_encoder(self._facts)
            return self._encoder

    def begin_request(self) -> None:
        """Note that what is encoded from now on is of another request."""
        (self._encoder or self.prepare()).begin_request()

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        `special` lets control tokens written in the text become control tokens: pass it for text
        the daemon itself made, never for text from a request. `add_bos` None = as the model's
        metadata asks. TEXT_NOT_UNICODE and TEXT_TOO_LARGE for text that cannot be encoded.
        """
        encoder = self._encoder or self.prepare()
        utf8(text)
        tokens = encoder.encode(text, control=special)
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos is not None:
            tokens.insert(0, self.bos)
        return tokens

    def piece(self, token: int) -> bytes:
        """Bytes of one token; a control token gives its own text, as bytes."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        text = self._facts.tokens[token]
        kind = self._facts.kinds.get(token, NORMAL)
        if kind in SPECIAL:
            return text
        if self._facts.model in (SPM, GEMMA4):
            if kind == BYTE:
                return bytes([int(text[3:-1], 16)]) if len(text) == 6 else text
            return text.replace("▁".encode(), b" ") if kind == NORMAL else b""
        if self._facts.model == BPE and kind == NORMAL:
            return _spelt(text)
        return b""

    def token_text(self, token: int) -> str:
        """Text of a token as the vocabulary stores it ("<|im_end|>"); "" when it has none."""
        return self._facts.text(token)

    def is_byte(self, token: int) -> bool:
        """True for a token that stands for one byte of a character that is no token."""
        return self._facts.kinds.get(token) == BYTE

    def is_control(self, token: int) -> bool:
        """True for a token that steers the model and is not part of its answer."""
        return token in self.control


def _why_unknown(facts: VocabFacts) -> str:
    """Why no encoder of this package is used, "" if one is."""
    if facts.model == BPE:
        return bpe.why_unknown(facts)
    if facts.model == GEMMA4:
        return character_bpe.why_unknown(facts)
    if facts.model == SPM:
        return ""
    return f"tokenizer.ggml.model is {facts.model!r}"


def _make_encoder(facts: VocabFacts) -> Encoder:
    if why := _why_unknown(facts):
        return LlamaEncoder(facts, why)
    if facts.model == GEMMA4:
        return CharacterBpeEncoder(facts)
    return SpmEncoder(facts) if facts.model == SPM else BpeEncoder(facts)


def _spelt(text: bytes) -> bytes:
    """The bytes of a token of a byte-level vocabulary."""
    try:
        return bytes(map(_BYTES.__getitem__, text.decode()))
    except (KeyError, UnicodeDecodeError):  # the file's own text, not made of the 256 characters
        return text


def utf8(text: str) -> bytes:
    """The text as UTF-8; raises TEXT_TOO_LARGE or TEXT_NOT_UNICODE."""
    if len(text) > TEXT_BYTES_MAX:
        raise errors.TEXT_TOO_LARGE(mib=TEXT_BYTES_MAX >> 20)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        surrogate = ord(text[error.start])
        raise errors.TEXT_NOT_UNICODE(surrogate=surrogate, position=error.start) from error
    if len(data) > TEXT_BYTES_MAX:
        raise errors.TEXT_TOO_LARGE(mib=TEXT_BYTES_MAX >> 20)
    return data
