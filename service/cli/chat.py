"""A conversation in the terminal: lines in, streamed answers out, one session throughout.

Owns its history, which is sent whole with every turn; that of a session that exists already comes
from the daemon first.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from batchengine import errors
from batchengine.core import BatchEngineError
from service.admin.client import Client
from service.cli import render
from service.cli.local.child import ChildDaemon, stop_on_signals
from service.cli.options import EXIT_INTERRUPTED

Message = dict[str, str]

SYSTEM = "You are a helpful assistant."
TOY_PARAMETERS = 50_000_000  # of a model that cannot be asked for facts
TOY = 'a toy that can chat and count: try "Who are you?" or "What is 3 plus 4?"'
FILE_BYTES_MAX = 8 << 20
INPUTS_MAX = 1000  # that the file of earlier inputs keeps
QUOTE = '"""'
HELP = """\
/help            this text
/reset           a new session
/session [ID]    this session's id; with ID go on with that session
/file PATH       ask about a text file: it is added to the next message
/system TEXT     another system message, in a new session
/quit, Ctrl-D    leave; Ctrl-C stops an answer, or drops a typed line
A line that ends with \\ goes on in the next one.
\"\"\" begins and ends a text of several lines."""


@dataclass(frozen=True, slots=True)
class Options:
    """The parameters of every request of a conversation. `system` "" = no system message."""

    system: str = SYSTEM
    session: str | None = None
    sla_class: str = "interactive"
    temperature: float = 0.7
    max_tokens: int | None = None
    ignore_eos: bool = False
    files: tuple[Path, ...] = ()


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
            f" prompt tokens cached{self._end()}"
        )

    def _end(self) -> str:
        """What cut the answer short, if anything did."""
        if cut := self.serving.get("cut"):
            return f" · cut short: {cut}"
        return " · cut at its longest (--max-tokens)" * (self.finish_reason == "length")


def run(url: str, api_key: str, options: Options, model: Path | None) -> int:
    """The conversation; with `model` a daemon is started for it and stopped after it."""
    if model is None:
        return converse(Client(url, api_key), options)
    from service.cli.machine.check import check_header  # loads psutil, which few commands need

    check_header(str(model))
    stop_on_signals()
    with ChildDaemon(model, lambda line: print(line, file=sys.stderr)) as daemon:
        return converse(Client(daemon.wait_ready()), options, keeps=False)


@dataclass(slots=True)
class Talk:
    """One session and its messages, as the next request sends them."""

    client: Client
    options: Options
    keeps: bool = True  # the daemon outlives the conversation
    session: str = ""
    history: list[Message] = field(default_factory=list[Message])
    attached: list[str] = field(default_factory=list[str])  # texts of files for the next message

    def begin(self, session: str | None = None) -> None:
        """Starts a session, new or with this id."""
        self.session = session or f"chat-{uuid.uuid4()}"
        system = self.options.system
        self.history = [{"role": "system", "content": system}] if system else []

    def go_on(self, session: str) -> str:
        """Takes up the session of this id with its history; returns what to print about it. Raises
        SESSION_NOT_CHAT for one whose messages cannot be recognised."""
        try:
            found = self.client.history(session)
        except BatchEngineError as error:
            if error.code != errors.UNKNOWN_SESSION.code:
                raise
            self.begin(session)
            return f"(new session {session})"
        messages: list[Message] = found["messages"]
        if not messages and found["tokens"]:
            raise errors.SESSION_NOT_CHAT(session=session)
        self.begin(session)
        self.history = messages or self.history
        shown = render.message_lines(messages)
        return "\n".join([*shown, f"(session {session} goes on: {len(messages)} messages)"])

    def attach(self, path: Path) -> str:
        """Adds a text file to the next message; raises FILE_UNUSABLE."""
        try:
            if path.stat().st_size > FILE_BYTES_MAX:
                raise ValueError(f"it is above {FILE_BYTES_MAX:,} bytes")
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            raise errors.FILE_UNUSABLE(path=path, why="it is not UTF-8 text") from None
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise errors.FILE_UNUSABLE(path=path, why=(why or "").lower()) from None
        self.attached.append(f"{path.name}:\n\n{text}\n")
        return f"({path.name}: {len(text):,} characters go with the next message)"

    def say(self, model: str, line: str) -> Reply:
        """One turn; its messages stay in the history only if it has an answer."""
        content = "\n".join([*self.attached, line])
        self.history.append({"role": "user", "content": content})
        try:
            turn = ask(self.client, model, self.history, self.session, self.options)
        except BaseException:
            self.history.pop()
            raise
        self.attached.clear()
        self.history.append({"role": "assistant", "content": turn.text})
        return turn

    def command(self, line: str) -> str:
        """One line that begins with a slash; returns what to print. Raises BatchEngineError."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help" | "/?":
                return HELP
            case "/reset" | "/new":
                self.begin()
                return "(new session)"
            case "/session" if rest:
                return self.go_on(rest)
            case "/session" if not self.keeps:
                return (
                    f"(session {self.session}: it ends with this conversation, as its daemon does)"
                )
            case "/session":
                return f"(session {self.session}: go on later with chat --session {self.session})"
            case "/file" if rest:
                return self.attach(Path(rest).expanduser())
            case "/system":
                self.options = replace(self.options, system=rest)
                self.begin()
                return "(new session)"
            case _:
                return f"there is no command {name}; /help lists them"


def converse(client: Client, options: Options, *, keeps: bool = True) -> int:
    """Reads lines until end of input; errors of one turn do not end the conversation. `keeps`:
    the daemon outlives it."""
    row = client.model()
    model, asking = str(row["id"]), sys.stdin.isatty()
    lines = cast("object", sys.stdin)
    if isinstance(lines, io.TextIOWrapper):
        cast("io.TextIOWrapper", lines).reconfigure(errors="replace")  # a pipe may hold anything
    talk = Talk(client, options, keeps)
    if asking:
        print(f"{model} at {client.url} · /help lists commands, /quit leaves")
        parameters: int = row.get("meta", {}).get("n_params", 0)
        if 0 < parameters < TOY_PARAMETERS:
            print(f"{parameters / 1e6:,.1f} M parameters: {TOY}")
    talk.begin()
    if options.session:
        print(talk.go_on(options.session))
    for path in options.files:
        print(talk.attach(path))
    with _line_editing(asking):
        return _talk(talk, model, asking)


def _talk(talk: Talk, model: str, asking: bool) -> int:
    failed = False
    while True:
        try:
            line = _message(asking)
        except KeyboardInterrupt:
            print()
            if not asking:
                return EXIT_INTERRUPTED
            continue
        except EOFError:
            print()
            return 1 if failed and not asking else 0
        if line in ("/quit", "/exit", "/bye"):
            return 0
        try:
            if line.startswith("/"):
                print(talk.command(line))
            elif line:
                turn = talk.say(model, line)
                if asking:
                    print(f"\033[2m{turn.facts()}\033[0m")
        except KeyboardInterrupt:
            print(" (stopped)")
        except BatchEngineError as error:
            failed = True
            print(f"\n{error}", file=sys.stderr)


def _message(asking: bool) -> str:
    """One message: a line, lines that end with a backslash, or a text between QUOTEs."""
    line = input("\n> " if asking else "")
    more = "… " if asking else ""
    if line.strip().startswith(QUOTE):
        text = [line.strip().removeprefix(QUOTE)]
        while not text[-1].rstrip().endswith(QUOTE):
            text.append(input(more))
        text[-1] = text[-1].rstrip().removesuffix(QUOTE)
        return "\n".join(text).strip()
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(more)
    return line.strip()


@contextlib.contextmanager
def _line_editing(asking: bool) -> Generator[None]:
    """Arrow keys, and inputs of earlier conversations, which a file of this user keeps."""
    if not asking or importlib.util.find_spec("readline") is None:  # a Python without it
        yield
        return
    import readline

    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    file = os.path.join(state, "batchengine", "chat_inputs")
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(INPUTS_MAX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(file), mode=0o700, exist_ok=True)
            os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
            readline.write_history_file(file)


def ask(
    client: Client, model: str, history: list[Message], session: str, options: Options
) -> Reply:
    """Streams one answer to stdout and returns it."""

    def show(text: str) -> None:
        print(render.plain(text), end="", flush=True)

    turn = read(client, model, history, session, options, show)
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
