"""The vocabulary of one GGUF file: text to ids, ids to bytes, what each token means.

Owns a llama.cpp model opened with `vocab_only` (no weights are read). llama.cpp is imported when
the first `Tokenizer` is made, never at import time, and never prints: its messages are caught,
and become the `why` of the error when a vocabulary cannot be loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from pathlib import Path
from typing import Any, Protocol, cast

from batchengine import errors
from batchengine.text.vocab_check import check_vocabulary, unusable

# One text may be this large. Far above any context window; below the C API's int32 lengths.
TEXT_BYTES_MAX = 64 << 20

# Bits of llama_token_attr.
ATTR_UNKNOWN = 1 << 0
ATTR_CONTROL = 1 << 3
ATTR_USER_DEFINED = 1 << 4
ATTR_LSTRIP = 1 << 7
ATTR_RSTRIP = 1 << 8

_LOG_WARN = 3  # ggml_log_level: 0 none, 1 debug, 2 info, 3 warn, 4 error, 5 continuation
_LOG_LINES_MAX = 200


class _Llama(Protocol):
    """The part of llama.cpp's C interface used here, with types."""

    def llama_backend_init(self) -> None: ...
    def llama_log_set(self, callback: Any, user_data: Any, /) -> None: ...
    def llama_log_callback(self, function: Any, /) -> Any: ...
    def llama_model_default_params(self) -> Any: ...
    def llama_model_load_from_file(self, path: bytes, params: Any, /) -> int | None: ...
    def llama_model_free(self, model: int, /) -> None: ...
    def llama_model_get_vocab(self, model: int, /) -> int: ...
    def llama_model_chat_template(self, model: int, name: None, /) -> bytes | None: ...
    def llama_model_meta_val_str(self, model: int, key: bytes, out: Any, size: int, /) -> int: ...
    def llama_vocab_n_tokens(self, vocab: int, /) -> int: ...
    def llama_vocab_get_attr(self, vocab: int, token: int, /) -> int: ...
    def llama_vocab_get_text(self, vocab: int, token: int, /) -> bytes | None: ...
    def llama_vocab_is_eog(self, vocab: int, token: int, /) -> bool: ...
    def llama_vocab_bos(self, vocab: int, /) -> int: ...
    def llama_vocab_eos(self, vocab: int, /) -> int: ...
    def llama_vocab_get_add_bos(self, vocab: int, /) -> bool: ...
    def llama_tokenize(
        self, vocab: int, text: bytes, size: int, out: Any, most: int, add: bool, parse: bool, /
    ) -> int: ...
    def llama_token_to_piece(
        self, vocab: int, token: int, out: Any, size: int, lstrip: int, special: bool, /
    ) -> int: ...


class _Library:
    """llama.cpp, imported once per process, with its log caught instead of printed."""

    def __init__(self) -> None:
        self.api = cast(_Llama, importlib.import_module("llama_cpp.llama_cpp"))
        self.load_lock = threading.Lock()  # the log is one per process: one load at a time
        self._lines: list[str] = []
        self._level = 0
        # Kept on self: the C side holds a bare pointer to it.
        self._callback = self.api.llama_log_callback(self._note)
        self.api.llama_log_set(self._callback, None)
        self.api.llama_backend_init()

    def _note(self, level: int, text: bytes | None, _user: object) -> None:
        if level != 5:
            self._level = level
        if text and self._level >= _LOG_WARN and len(self._lines) < _LOG_LINES_MAX:
            self._lines.append(text.decode("utf-8", "replace"))

    def quiet(self) -> None:
        """Clears the lines, and installs this log again if another user of the library set one."""
        self._lines.clear()
        self.api.llama_log_set(self._callback, None)

    def cause(self) -> str:
        """The first error since `quiet`, on one line."""
        for line in "".join(self._lines).splitlines():
            text = line.strip()
            if "error" in text and ":" in text:
                # "llama_model_load: error loading model: <cause>" -> the cause alone
                text = text.split("error loading model:", 1)[-1].strip()
                return text.removeprefix("error loading model vocabulary:").strip()[:400]
        return " ".join("".join(self._lines).split())[:400]


_library_lock = threading.Lock()
_library: _Library | None = None


def _get_library() -> _Library:
    global _library
    with _library_lock:
        if _library is None:
            try:
                _library = _Library()
            except (ImportError, OSError, RuntimeError) as error:
                raise errors.TOKENIZER_LIBRARY(why=error) from error
        return _library


class Tokenizer:
    """Encoder and piece table of one GGUF vocabulary.

    `encode` may run on one thread while `piece` is called on another: both only read the
    vocabulary. `close` must come last.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open `path`; VOCABULARY_UNUSABLE names the cause when llama.cpp refuses it."""
        self.path = Path(path)
        self._library = _get_library()
        self._api = self._library.api
        self._model = self._open()
        api, vocab = self._api, self._api.llama_model_get_vocab(self._model)
        self._vocab = vocab
        self.vocab_size = api.llama_vocab_n_tokens(vocab)
        if self.vocab_size <= 0:
            self.close()
            raise unusable(self.path, "the vocabulary is empty (tokenizer.ggml.model is none)")
        template = api.llama_model_chat_template(self._model, None)
        self.chat_template = template.decode("utf-8", "replace") if template else None
        self._pieces: list[bytes | None] = [None] * self.vocab_size
        self._attrs = self._special_attrs()
        self.bos = self._declared("bos", api.llama_vocab_bos(vocab))
        self.eos = self._declared("eos", api.llama_vocab_eos(vocab))
        self.add_bos = bool(api.llama_vocab_get_add_bos(vocab)) and self.bos is not None
        self.control = frozenset(
            token
            for token, attr in self._attrs.items()
            if attr & (ATTR_CONTROL | ATTR_UNKNOWN) and self.token_text(token)
        )
        self.special_ids = {self.token_text(t): t for t in sorted(self._attrs, reverse=True)}
        ends = {*self._attrs, *(t for t in (self.bos, self.eos) if t is not None)}
        self.eog = frozenset(t for t in ends if api.llama_vocab_is_eog(vocab, t))

    def __repr__(self) -> str:
        return (
            f"<Tokenizer {self.path.name} vocab={self.vocab_size} bos={self.bos} eos={self.eos} "
            f"control={len(self.control)} eog={len(self.eog)}>"
        )

    def close(self) -> None:
        """Free the vocabulary; idempotent."""
        model, self._model = self._model, 0
        if model:
            self._api.llama_model_free(model)

    def encode(self, text: str, *, special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`.

        `special` lets control tokens written in the text become control tokens: pass it for text
        the daemon itself made, never for text from a request. `add_bos` None = as the model's
        metadata asks. TEXT_NOT_UNICODE and TEXT_TOO_LARGE for text that cannot be encoded.
        """
        if not self._model:
            raise errors.TOKENIZER_FAILED(why="the tokenizer is closed")
        data = utf8(text)
        # A token covers at least one byte; a vocabulary may put spaces of its own in front.
        room = len(data) + 64
        out = (ctypes.c_int32 * room)()
        count = self._api.llama_tokenize(self._vocab, data, len(data), out, room, False, special)
        if count < 0 and -count < (1 << 31) - 1:
            room = -count
            out = (ctypes.c_int32 * room)()
            count = self._api.llama_tokenize(
                self._vocab, data, len(data), out, room, False, special
            )
        if count < 0:
            raise errors.TOKENIZER_FAILED(why=f"llama.cpp answered {count}")
        tokens: list[int] = out[:count]
        if count and min(tokens) < 0:
            why = "the vocabulary has neither a token for a part of it nor one for unknown"
            raise errors.TOKENIZER_FAILED(why=why)
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos is not None:
            tokens.insert(0, self.bos)
        return tokens

    def piece(self, token: int) -> bytes:
        """Bytes of one token; a control token gives its own text, as bytes."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token {token} is outside the vocabulary of {self.vocab_size}")
        known = self._pieces[token]
        if known is None:
            known = self._pieces[token] = self._read_piece(token)
        return known

    def token_text(self, token: int) -> str:
        """Text of a token as the vocabulary stores it ("<|im_end|>"); "" when it has none."""
        text = self._api.llama_vocab_get_text(self._vocab, token)
        return text.decode("utf-8", "replace") if text else ""

    def attr(self, token: int) -> int:
        """llama_token_attr bits of a control or user-defined token, 0 for a plain one."""
        return self._attrs.get(token, 0)

    def is_control(self, token: int) -> bool:
        """True for a token that steers the model and is not part of its answer."""
        return token in self.control

    def _open(self) -> int:
        if not self.path.is_file():
            raise unusable(self.path, "no such file")
        check_vocabulary(self.path)
        library = self._library
        with library.load_lock:
            library.quiet()
            params = self._api.llama_model_default_params()
            params.vocab_only = True
            params.n_gpu_layers = 0
            model = self._api.llama_model_load_from_file(os.fsencode(self.path), params)
            if not model:
                raise unusable(self.path, library.cause() or "llama.cpp gave no reason")
        return model

    def _declared(self, name: str, token: int) -> int | None:
        """`token` if it is special or the file declares it: llama.cpp has one for every file."""
        key = f"tokenizer.ggml.{name}_token_id".encode()
        named = self._api.llama_model_meta_val_str(self._model, key, None, 0) >= 0
        return token if token in self._attrs or (named and 0 <= token < self.vocab_size) else None

    def _special_attrs(self) -> dict[int, int]:
        """Attributes of the few tokens that are not plain text."""
        read, vocab = self._api.llama_vocab_get_attr, self._vocab
        wanted = ATTR_CONTROL | ATTR_UNKNOWN | ATTR_USER_DEFINED
        attrs = ((token, read(vocab, token)) for token in range(self.vocab_size))
        return {token: attr for token, attr in attrs if attr & wanted}

    def _read_piece(self, token: int) -> bytes:
        size = 64
        while True:
            out = ctypes.create_string_buffer(size)
            count = self._api.llama_token_to_piece(self._vocab, token, out, size, 0, True)
            if count >= 0:
                return out.raw[:count]
            size = -count


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
