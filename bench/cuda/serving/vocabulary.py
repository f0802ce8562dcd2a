"""A vocabulary of token ids without texts, in place of llama.cpp where an engine needs none.

Requests of these benches are token ids and no text is read, so that a machine without llama.cpp
can run them. It replaces llama.cpp in the whole process.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

from batchengine.gguf import GgufFile, StringArray

PIECE = b"x"  # of every token


class Vocabulary(ModuleType):
    """The functions of llama.cpp that a vocabulary is read through."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self._n_tokens = 0

    def llama_backend_init(self) -> None: ...
    def llama_log_set(self, callback: Any, user_data: Any) -> None: ...
    def llama_model_free(self, model: int) -> None: ...

    def llama_log_callback(self, function: Any) -> Any:
        return function

    def llama_model_default_params(self) -> Any:
        return SimpleNamespace()

    def llama_model_load_from_file(self, path: bytes, params: Any) -> int:
        with GgufFile(os.fsdecode(path)) as gguf:
            tokens = gguf.values["tokenizer.ggml.tokens"]
            assert isinstance(tokens, StringArray)
            self._n_tokens = len(tokens)
        return 1

    def llama_model_get_vocab(self, model: int) -> int:
        return 1

    def llama_model_chat_template(self, model: int, name: None) -> None:
        return None

    def llama_model_meta_val_str(self, model: int, key: bytes, out: Any, size: int) -> int:
        return -1

    def llama_vocab_n_tokens(self, vocab: int) -> int:
        return self._n_tokens

    def llama_vocab_get_attr(self, vocab: int, token: int) -> int:
        return 0

    def llama_vocab_get_text(self, vocab: int, token: int) -> bytes:
        return PIECE

    def llama_vocab_is_eog(self, vocab: int, token: int) -> bool:
        return False

    def llama_vocab_bos(self, vocab: int) -> int:
        return -1

    def llama_vocab_eos(self, vocab: int) -> int:
        return -1

    def llama_vocab_get_add_bos(self, vocab: int) -> bool:
        return False

    def llama_token_to_piece(
        self, vocab: int, token: int, out: Any, size: int, lstrip: int, special: bool
    ) -> int:
        out[: len(PIECE)] = PIECE
        return len(PIECE)


def install() -> None:
    """Use token ids alone, unless llama.cpp has been imported."""
    names = ("llama_cpp", "llama_cpp.llama_cpp")
    if not any(name in sys.modules for name in names):
        sys.modules.update({name: Vocabulary(name) for name in names})
