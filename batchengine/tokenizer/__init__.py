"""Text to token ids and back, for one model.

Owns the vocabulary of the loaded GGUF (through llama.cpp, loaded lazily and without weights), the
streaming decoder, stop strings, and the one thread on which all text work runs. It refuses to
know templates: a chat renderer is handed in (`ChatRenderer`), and to let text that came from a
request turn into a control token (see `guard`).
"""

from __future__ import annotations

from batchengine.tokenizer.frontend import ChatRenderer, TextFrontend
from batchengine.tokenizer.guard import ControlGuard
from batchengine.tokenizer.stream import Detokeniser, StopMatcher
from batchengine.tokenizer.vocab import TEXT_BYTES_MAX, Tokenizer

__all__ = [
    "TEXT_BYTES_MAX",
    "ChatRenderer",
    "ControlGuard",
    "Detokeniser",
    "StopMatcher",
    "TextFrontend",
    "Tokenizer",
]
