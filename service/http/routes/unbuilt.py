"""What to say on paths that other servers have and this one does not: why, and what to use.

They are 404 as any unknown path is; agents send a 501 again dozens of times. A path that is close
to a route is answered with its name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

from batchengine import errors
from batchengine.core import BatchEngineError

_CHAT = "POST /v1/chat/completions"
_TEXT_ONLY = "the model reads and writes text only"
PATH_CHARS_MAX = 64  # of paths that are compared with routes

# The first segments of a path without /v1, why there is nothing, and what to use instead.
UNBUILT: dict[str, tuple[str, str]] = {
    "embeddings": (
        "it generates text, and its models make no embeddings",
        "name another server for embeddings in the client, such as llama-server --embeddings",
    ),
    "rerank": ("its models do not rank texts", "name another server for ranking in the client"),
    "moderations": ("its models do not classify texts", f"leave moderation out, or ask by {_CHAT}"),
    "batches": (
        "there are no batch files",
        'send each request at once with the model NAME:batch, or "service_tier": "batch":'
        " it is computed when nothing urgent waits",
    ),
    "files": ("no files are kept", f"put their text into the messages of {_CHAT}"),
    "vector_stores": ("no files are kept", f"put what is found into the messages of {_CHAT}"),
    "assistants": (
        "conversations are sessions here",
        f"use {_CHAT} with one x-batchengine-session-id per conversation",
    ),
    "stored_completions": (
        "chat completions are not stored",
        "use POST /v1/responses, whose answers can be fetched by their ids",
    ),
    "fine_tuning": ("it does not train", "serve a GGUF file of the tuned model"),
    "audio": (_TEXT_ONLY, "name another server for speech in the client"),
    "images": (_TEXT_ONLY, "name another server for images in the client"),
    "videos": (_TEXT_ONLY, "name another server for videos in the client"),
    "realtime": ("there are no WebSockets", f'use {_CHAT} with "stream": true'),
    "completion": ("llama-server's own form is not built", "use POST /v1/completions"),
    "infill": ("it fills no gaps in text", "use POST /v1/completions"),
    "lora-adapters": ("it serves one model without adapters", "serve a GGUF file that is merged"),
    "docs": ("pages about the API come with the program", "GET /openapi.json has every route"),
    "api": ("Ollama's API is not built", "use OpenAI's: base URL http://HOST:PORT/v1"),
    "v1beta": ("Gemini's API is not built", "use OpenAI's: base URL http://HOST:PORT/v1"),
    "v1": ("the base URL ends in /v1 already", "leave one /v1 out of it"),
}
SAME = {
    "embedding": "embeddings", "reranking": "rerank", "uploads": "files", "threads": "assistants",
    "conversations": "assistants", "redoc": "docs", "swagger": "docs", "containers": "files",
    "evals": "fine_tuning",
}  # fmt: skip


def refusal(method: str, path: str, routes: Collection[str]) -> BatchEngineError:
    """The error of a path without a route; `routes` are the paths of all routes."""
    if path.startswith("//") and f"/{path.lstrip('/')}" in routes:
        fix = "leave the / at the end of the base URL out"
        return errors.UNKNOWN_ROUTE(method=method, path=path, fix=fix)
    word, _, rest = _without_version(path).lstrip("/").partition("/")
    if word == "messages" and rest.startswith("batches"):
        word = "batches"
    if word == "chat" and rest.startswith("completions/chatcmpl-"):
        word = "stored_completions"
    found = UNBUILT.get(SAME.get(word, word))
    if found is not None:
        why, fix = found
        return errors.NOT_SUPPORTED(path=path, why=why, fix=fix)
    near: list[str] = []
    if len(path) <= PATH_CHARS_MAX:
        near = difflib.get_close_matches(path, routes, n=1, cutoff=0.7)
    fix = f"did you mean {near[0]}? " if near else ""
    fix += "GET /openapi.json lists all routes; the base URL of OpenAI clients ends in /v1"
    return errors.UNKNOWN_ROUTE(method=method, path=path, fix=fix)


def _without_version(path: str) -> str:
    return path[3:] if path == "/v1" or path.startswith("/v1/") else path
