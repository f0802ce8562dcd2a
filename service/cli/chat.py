"""A conversation in the terminal: lines in, streamed answers out, one session throughout."""

from __future__ import annotations

import contextlib
import io
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from batchengine.core import BatchEngineError
from service.admin.client import Client
from service.cli.local.child import ChildDaemon, stop_on_signals

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of every request of a conversation."""

    system: str | None = None
    session: str | None = None
    sla_class: str = "interactive"
    temperature: float = 0.7
    max_tokens: int | None = None
    ignore_eos: bool = False


@dataclass(slots=True)
class Reply:
    """One answer and the facts that came with it."""

    text: str
    usage: dict[str, Any]
    serving: dict[str, Any]
    timings: dict[str, Any]
    finish_reason: str

    def facts(self) -> str:
        """One line: where, how fast, what was reused."""
        details: dict[str, Any] = self.usage.get("prompt_tokens_details") or {}
        made: int = self.usage.get("completion_tokens", 0)
        return (
            f"{self.serving.get('lane') or self.serving.get('route', '?')} lane"
            f" · first token {self.serving.get('ttft_ms', 0.0):,.0f} ms"
            f" · {made} tokens at {self.timings.get('predicted_per_second', 0.0):,.0f} tokens/s"
            f" · {details.get('cached_tokens', 0)} of {self.usage.get('prompt_tokens', 0)}"
            " prompt tokens cached"
        )


def run(url: str, api_key: str, options: Options, model: Path | None) -> int:
    """The conversation; with `model` a daemon is started for it and stopped after it."""
    if model is None:
        return converse(Client(url, api_key), options)
    from batchengine.config import check_model_file  # loads psutil, which few commands need

    check_model_file(str(model))
    stop_on_signals()
    with ChildDaemon(model, lambda line: print(line, file=sys.stderr)) as daemon:
        return converse(Client(daemon.wait_ready()), options)


def converse(client: Client, options: Options) -> int:
    """Reads lines until end of input; errors of one turn do not end the conversation."""
    model = client.models()[0]
    asking = sys.stdin.isatty()
    lines = cast("object", sys.stdin)
    if isinstance(lines, io.TextIOWrapper):
        cast("io.TextIOWrapper", lines).reconfigure(errors="replace")  # a pipe may hold anything
    session = options.session or f"chat-{uuid.uuid4()}"
    history = _fresh(options)
    if asking:
        print(f"{model} at {client.url} · /reset starts anew, /quit leaves")
    failed = False
    while True:
        try:
            line = input("\n> " if asking else "").strip()
        except EOFError:
            print()
            return 1 if failed and not asking else 0
        except KeyboardInterrupt:
            print()
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/reset":
            history, session = _fresh(options), f"chat-{uuid.uuid4()}"
            print("(new session)")
            continue
        if not line:
            continue
        history.append({"role": "user", "content": line})
        turn = None
        try:
            turn = ask(client, model, history, session, options)
        except KeyboardInterrupt:
            print(" (stopped)")
        except BatchEngineError as error:
            failed = True
            print(f"\n{error}", file=sys.stderr)
        if turn is None:
            history.pop()
            continue
        history.append({"role": "assistant", "content": turn.text})
        if asking:
            print(f"\033[2m{turn.facts()}\033[0m")


def _fresh(options: Options) -> list[Message]:
    return [{"role": "system", "content": options.system}] if options.system else []


def ask(
    client: Client, model: str, history: list[Message], session: str, options: Options
) -> Reply:
    """Streams one answer to stdout and returns it."""
    turn = read(
        client, model, history, session, options, lambda text: print(text, end="", flush=True)
    )
    print()
    return turn


def read(
    client: Client,
    model: str,
    history: list[Message],
    session: str,
    options: Options,
    on_text: Callable[[str], object] = lambda text: None,
) -> Reply:
    """Streams one answer to its end and returns it; `on_text` gets each part as it comes."""
    body: dict[str, Any] = {
        "model": model,
        "messages": history,
        "temperature": options.temperature,
        "batchengine": {"session_id": session, "class": options.sla_class},
        "ignore_eos": options.ignore_eos,
    }
    if options.max_tokens is not None:
        body["max_tokens"] = options.max_tokens
    turn = Reply("", {}, {}, {}, "")
    texts: list[str] = []
    with contextlib.closing(client.stream_chat(body)) as chunks:
        for chunk in chunks:
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    texts.append(text)
                    on_text(text)
                turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
            if chunk.get("usage"):
                turn.usage = chunk["usage"]
                turn.serving = chunk.get("batchengine", {})
                turn.timings = chunk.get("timings", {})
    turn.text = "".join(texts)
    return turn
