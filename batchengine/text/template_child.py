"""The process in which a model's chat template runs: `python -m batchengine.text.template_child`.

Owns the Jinja sandbox and this process's limits. Its one channel is a socket on file descriptor 0;
frames are a 4-byte little-endian length and JSON. It holds no secrets, reads no files after start,
and may be killed at any moment: its whole state can be sent again by the parent.

                                                  child: {"ok": "ready"} when limits are in place
    parent: {"load": source, "limits": {…}}       child: {"ok": ""} or {"error": kind, "text": …}
    parent: {"render": variables}                 child: {"ok": prompt} or {"error": …}
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_RANGE_MAX = 100_000
# Random, or tied to HTML; a prompt must be a function of the request alone.
_FILTERS_OFF = ("random", "pprint", "urlize", "xmlattr", "forceescape", "attr")


class Refused(Exception):
    """The template called raise_exception: the request, not the template, is at fault."""


class TooLong(Exception):
    """The output passed its cap."""


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for trainers; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a class attribute of this name)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def build_environment(today: datetime.date) -> ImmutableSandboxedEnvironment:
    """The sandbox: no loader, few globals, JSON as transformers writes it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        loader=None,
        cache_size=0,
        extensions=[LoopControlExtension, GenerationBlock],
    )
    allowed: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": today.strftime,
        "namespace": Namespace,
        "range": _range,
        "dict": dict,
    }
    environment.globals.clear()
    environment.globals.update(allowed)
    environment.filters["tojson"] = _tojson
    for name in _FILTERS_OFF:
        environment.filters.pop(name, None)
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise Refused(str(message))


def _range(*bounds: int) -> range:
    result = range(*bounds)
    if len(result) > _RANGE_MAX:
        raise OverflowError(f"range of {len(result)} numbers; at most {_RANGE_MAX}")
    return result


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Renderer:
    """One compiled template and its output cap."""

    def __init__(self, source: str, limits: dict[str, Any]) -> None:
        self._cpu_s = int(limits["cpu_s"])
        self._output_characters_max = int(limits["output_bytes_max"])
        today = datetime.date.fromisoformat(limits["today"])
        self._budget()
        self._template = build_environment(today).from_string(source)

    def render(self, variables: dict[str, Any]) -> str:
        """The prompt; raises TooLong as soon as the pieces pass the cap."""
        self._budget()
        pieces: list[str] = []
        room = self._output_characters_max
        for piece in self._template.generate(variables):
            room -= len(piece)
            if room < 0:
                raise TooLong
            pieces.append(piece)
        return "".join(pieces)

    def _budget(self) -> None:
        """CPU limits count from process start; each request gets its own share."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + 1 + self._cpu_s
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        soft = soft if hard == resource.RLIM_INFINITY else min(soft, hard)
        resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _answer(work: Callable[[], str]) -> dict[str, str]:
    try:
        return {"ok": work()}
    except Refused as error:
        return {"error": "refused", "text": str(error)[:2000]}
    except TooLong:
        return {"error": "output", "text": ""}
    except MemoryError:
        return {"error": "memory", "text": ""}
    except RecursionError:
        return {"error": "fault", "text": "the template calls itself without end"}
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "text": f"line {error.lineno}: {error.message}"[:2000]}
    except Exception as error:  # any other exception is an error of the template
        return {"error": "fault", "text": f"{type(error).__name__}: {error}"[:2000]}


def confine(parent: int, address_bytes: int) -> None:
    """Limits this process: it ends with its parent, has bounded memory, and gets no files,
    processes, privileges or core dumps."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the line above
        sys.exit(0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 3)
    _limit(resource.RLIMIT_AS, address_bytes)


def _limit(kind: int, value: int) -> None:
    """Lower a limit for good; one that is lower already stays."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def warm_up() -> None:
    """Has Python and Jinja do their late imports while files can still be opened."""
    environment = build_environment(datetime.date(2000, 1, 1))
    source = "{% for x in [1] %}{{ '\\n\\u00e4' + strftime_now('%d %b %Y') }}{% endfor %}"
    for text in (source + "{{ {'a': 1} | tojson }}{{ 1 // 0 }}", "{% for %}"):
        _answer(lambda text=text: environment.from_string(text).render())


def _read(channel: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            sys.exit(0)
        data += part
    return bytes(data)


def _send(channel: socket.socket, body: bytes) -> None:
    channel.sendall(LENGTH.pack(len(body)))
    channel.sendall(body)


def serve(channel: socket.socket) -> NoReturn:
    """Answer frames until the parent goes away."""
    renderer: Renderer | None = None

    def handle(frame: dict[str, Any]) -> str:
        nonlocal renderer
        if "load" in frame:
            renderer = Renderer(frame["load"], frame["limits"])
            return ""
        if renderer is None:
            raise RuntimeError("no template loaded")
        return renderer.render(frame["render"])

    _send(channel, b'{"ok": "ready"}')
    while True:
        (size,) = LENGTH.unpack(_read(channel, LENGTH.size))
        try:
            body = _read(channel, size)
            frame = json.loads(body)
            answer = _answer(lambda frame=frame: handle(frame))
            reply = json.dumps(answer, ensure_ascii=False).encode("utf-8")
        except (MemoryError, UnicodeEncodeError) as error:
            kind = "memory" if isinstance(error, MemoryError) else "fault"
            reply = json.dumps({"error": kind, "text": str(error)}).encode()
        _send(channel, reply)


if __name__ == "__main__":
    warm_up()
    confine(parent=int(sys.argv[1]), address_bytes=int(sys.argv[2]))
    serve(socket.socket(fileno=0))
