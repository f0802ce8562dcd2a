"""Options that many commands take, and how a command prints its answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from batchengine.core import BatchEngineError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_LOCKED = 3
EXIT_NO_DAEMON = 4
EXIT_INTERRUPTED = 130
DAY_S = 86_400

# bounds of numbers
AT_LEAST_0 = Number(gte=0)
AT_LEAST_1 = Number(gte=1)
PAUSE = Number(gte=0, lte=DAY_S)  # seconds
TEMPERATURE = Number(gte=0, lte=2)

Json = Annotated[bool, Parameter(name="--json", negative=(), help="Print JSON.")]
Debug = Annotated[bool, Parameter(name="--debug", negative=(), help="Tracebacks and debug log.")]
URL_DEFAULT = "http://127.0.0.1:7717/v1"


def _socket_of(_: object, tokens: Sequence[Token]) -> str:
    """The path of an admin socket, given as such or as the name of an instance."""
    given = tokens[-1]
    return instance_socket(given.value) if given.keyword == "--instance" else given.value


def _url_of(_: object, tokens: Sequence[Token]) -> str:
    """The address of a daemon, given as such or as the name of an instance that runs."""
    given = tokens[-1]
    if given.keyword != "--instance":
        return given.value
    from service.admin.client import admin

    status: dict[str, str] = admin(instance_socket(given.value), "status")["status"]
    return f"http://{status['address']}/v1"


Socket = Annotated[
    str | None,
    Parameter(
        name=["--admin-socket", "--instance"],
        env_var="BATCHENGINE_ADMIN_SOCKET",
        converter=_socket_of,
        help="Admin socket of the daemon, or the name that `serve --instance` gave it; the default"
        " is where `serve` puts the socket.",
    ),
]
Url = Annotated[
    str,
    Parameter(
        name=["--url", "--instance"],
        env_var="BATCHENGINE_URL",
        converter=_url_of,
        help="Address of a running daemon, or the name that `serve --instance` gave it.",
    ),
]
ConfigFile = Annotated[
    Path | None, Parameter(name="--config", help="TOML file; options win over it.")
]
SessionId = Annotated[
    str,
    Parameter(help="A session: its id, a unique beginning of it, or the id its client uses."),
]
KeyName = Annotated[
    str | None,
    Parameter(
        name=["--key-name", "--tenant"],
        help="The API key the session belongs to, where ids of several keys look alike.",
    ),
]


SHARED = Path(__file__).resolve().parents[2]  # beside `service`: in a checkout, and in a wheel
POCKET = SHARED / "pocket" / "pocket-q4_0.gguf"


def model_file(given: Path | None) -> Path | None:
    """A model's file; `pocket` is the one of this installation, unless there is such a file."""
    return POCKET if given is not None and str(given) == "pocket" and not given.is_file() else given


def admin_path(given: str | None) -> str:
    """The admin socket to talk to."""
    if given:
        return given
    from batchengine import config as configuration

    return configuration.load(None, {}).server.admin_socket


def instance_socket(name: str) -> str:
    """The admin socket of an instance; "" = of the daemon without a name."""
    from batchengine import config as configuration

    return configuration.load(None, {"instance": name}).server.admin_socket


def instance_of(path: str) -> str:
    """The name of the instance whose admin socket this is; "" = of none."""
    name = Path(path).parent.name
    with contextlib.suppress(BatchEngineError):
        return name if instance_socket(name) == path else ""
    return ""


def running_daemons() -> list[str]:
    """The options that name this user's daemons that answer, each with its address."""
    from batchengine.config import INSTANCES
    from service.admin.client import admin

    first = Path(instance_socket(""))
    sockets = {"": first, **{path.parent.name: path for path in _sockets(first, INSTANCES)}}
    found: list[str] = []
    for name, path in sockets.items():
        with contextlib.suppress(BatchEngineError):
            status = admin(str(path), "status", patience_s=2.0)["status"]
            option = (
                f"--instance {name}"
                if name
                else f"--admin-socket {path} or --url http://{status['address']}/v1"
            )
            found.append(f"{option} ({status['model'] or 'loading'} at {status['address']})")
    return found


def _sockets(first: Path, folder: str) -> Iterable[Path]:
    return sorted((first.parent / folder).glob(f"*/{first.name}"))


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def show(value: object, json: bool, lines: Callable[[], Iterable[str]]) -> None:
    """Prints the answer of a command as JSON or as lines, which are made only then."""
    if json:
        print_json(value)
    else:
        print("\n".join(lines()))
