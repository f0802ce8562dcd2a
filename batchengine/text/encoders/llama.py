"""llama.cpp as the encoder of vocabularies that no other encoder here is proven for.

Owns a llama.cpp model opened with `vocab_only` (no weights are read). The library is an extra of
this package. It never prints: its messages are caught, and become the `why` of the error when a
vocabulary cannot be loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any, Protocol, cast

from batchengine import errors
from batchengine.text.vocab_facts import VocabFacts, unusable

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
    def llama_tokenize(
        self, vocab: int, text: bytes, size: int, out: Any, most: int, add: bool, parse: bool, /
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


def _get_library(path: Path, why: str) -> _Library:
    global _library
    with _library_lock:
        if _library is None:
            if importlib.util.find_spec("llama_cpp") is None:
                raise errors.TOKENIZER_EXTRA(file=path.name, why=why)
            try:
                _library = _Library()
            except (ImportError, OSError, RuntimeError) as error:
                raise errors.TOKENIZER_LIBRARY(why=error) from error
        return _library


class LlamaEncoder:
    """Text to ids, special tokens included."""

    def __init__(self, facts: VocabFacts, why: str) -> None:
        """`why` no other encoder is used; VOCABULARY_UNUSABLE names the cause of a refusal."""
        library = _get_library(facts.path, why)
        self._api = library.api
        with library.load_lock:
            library.quiet()
            params = self._api.llama_model_default_params()
            params.vocab_only = True
            params.n_gpu_layers = 0
            model = self._api.llama_model_load_from_file(os.fsencode(facts.path), params)
            if not model:
                raise unusable(facts.path, library.cause() or "llama.cpp gave no reason")
        self._model = model
        self._vocab = self._api.llama_model_get_vocab(model)

    def close(self) -> None:
        """Free the vocabulary; idempotent."""
        model, self._model = self._model, 0
        if model:
            self._api.llama_model_free(model)

    def begin_request(self) -> None:
        """Nothing is kept: the library cuts texts itself."""

    def encode(self, text: str, *, control: bool) -> list[int]:
        """Ids of a text; `control` lets control tokens written in it count."""
        data = text.encode()
        # A token covers at least one byte; a vocabulary may put spaces of its own in front.
        room = len(data) + 64
        out = (ctypes.c_int32 * room)()
        count = self._api.llama_tokenize(self._vocab, data, len(data), out, room, False, control)
        if count < 0 and -count < (1 << 31) - 1:
            room = -count
            out = (ctypes.c_int32 * room)()
            count = self._api.llama_tokenize(
                self._vocab, data, len(data), out, room, False, control
            )
        if count < 0:
            raise errors.TOKENIZER_FAILED(why=f"llama.cpp answered {count}")
        tokens: list[int] = out[:count]
        if count and min(tokens) < 0:
            why = "the vocabulary has neither a token for a part of it nor one for unknown"
            raise errors.TOKENIZER_FAILED(why=why)
        return tokens
