"""The command line: serve, check, chat, version; each other command has a module.

Owns option names, exit codes and how errors read in a terminal: one line with code, cause and
fix; a traceback only with --debug. Imports heavy modules inside the commands that need them, so
`version` and `--help` stay instant.

Exit codes: 0 done · 1 failed, the reason is on stderr · 2 wrong usage or configuration ·
3 the store is in use by another daemon · 4 no daemon answers · 75 the engine stopped by itself,
start again · 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

import batchengine
from batchengine import errors
from batchengine.core import BatchEngineError
from service.cli import drain, peers, plan, sessions, status, store
from service.cli.agents import bench, connect
from service.cli.local import cluster, install
from service.cli.machine import doctor
from service.cli.machine.streams import drop_output, open_streams
from service.cli.options import (
    AT_LEAST_1,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_LOCKED,
    EXIT_NO_DAEMON,
    EXIT_USAGE,
    TEMPERATURE,
    URL_DEFAULT,
    ConfigFile,
    Debug,
    Json,
    Url,
    model_file,
    running_daemons,
    show,
)

EXIT_CODES = {
    "invalid_configuration": EXIT_USAGE,
    "no_daemon": EXIT_NO_DAEMON,
    "store_locked": EXIT_LOCKED,
}
LANES_MAX = 16
# options of llama-server, vLLM and Ollama for `serve` -> what stands for them here
OPTIONS_OF_PEERS = {
    **dict.fromkeys(("-m", "--model"), "MODEL.gguf"),
    **dict.fromkeys(
        ("-c", "--ctx-size", "--max-model-len", "--num-ctx"), "MODEL.gguf --ctx TOKENS"
    ),
    **dict.fromkeys(("-a", "--alias", "--served-model-name"), "MODEL.gguf --model-id NAME"),
    **dict.fromkeys(("-t", "--n-threads"), "MODEL.gguf --threads N"),
    "--api-key": "MODEL.gguf --api-key-file FILE",
    **dict.fromkeys(("-np", "--parallel", "--max-num-seqs"), "MODEL.gguf; it batches by itself"),
}

# commands of other programs -> what to do here
COMMANDS_OF_PEERS = {
    **dict.fromkeys(
        ("stop", "kill", "quit", "shutdown", "restart"),
        "press Ctrl-C where `serve` runs, or use systemctl; `batchengine drain` lets its work end"
        " before that, and `batchengine ps` shows its pid",
    ),
    **dict.fromkeys(("start", "server", "load"), "start a daemon with `batchengine serve`"),
    "run": "write `batchengine chat MODEL.gguf`, or `batchengine serve MODEL.gguf` for agents",
    **dict.fromkeys(
        ("status", "list", "ls"),
        "`batchengine ps` shows what is computed, `batchengine sessions` all sessions",
    ),
    **dict.fromkeys(
        ("pull", "download"), "give `serve` the path of a GGUF file; no model is downloaded"
    ),
    **dict.fromkeys(
        ("log", "logs"), "read them where `serve` runs, or with journalctl -u batchengine"
    ),
    **dict.fromkeys(("rm", "show", "park", "fork"), "it is a command of `batchengine sessions`"),
}

app = cyclopts.App(
    name="batchengine",
    help="Serves an open-weight LLM (GGUF) to fleets of agents, by the protocols of OpenAI and"
    " Anthropic.",
    version=batchengine.__version__,
    version_flags=["--version"],
    help_epilogue="Examples: batchengine serve MODEL.gguf · batchengine chat · batchengine connect"
    " claude · batchengine top · batchengine sessions --sort tokens. Exit codes: 0 done, 1 failed,"
    " 2 wrong usage or configuration, 3 store in use, 4 no daemon, 75 engine stopped,"
    " 130 interrupted.",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script: runs one command and exits with its code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """One command; returns the exit code, prints errors as one readable line."""
    debug, as_json = "--debug" in arguments, "--json" in arguments
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name of a session may be in no other encoding
            stream.reconfigure(errors="backslashreplace")
    try:
        result = app(
            list(arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        sys.stdout.flush()  # a full disk is an error here, not one that the interpreter drops
        return result if isinstance(result, int) else 0
    except cyclopts.CycloptsError as error:
        what, fix = _usage(error, arguments)
        _print_error(errors.WRONG_USAGE(what=what.removesuffix("."), fix=fix), as_json)
        return EXIT_USAGE
    except BatchEngineError as error:
        if debug:
            raise
        if error.code == errors.NO_DAEMON.code and (running := running_daemons()):
            error.fix = f"name one that answers: {', '.join(running)}; or {error.fix}"
        if error.code == errors.INVALID_API_KEY.code:
            error.fix = "set BATCHENGINE_API_KEY; chat has --api-key-file FILE, too"
        _print_error(error, as_json)
        return exit_code(error)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # `batchengine ps | head`
        drop_output()
        return 0
    except SystemExit as end:  # the same, of a page of help
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return 0
    except Exception as error:
        if debug:
            raise
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            drop_output()
            _print_error(errors.OUTPUT_LOST(why=str(error.strerror).lower()), as_json)
            return EXIT_FAILED
        defect = f"{type(error).__name__}: {error}"
        _print_error(errors.COMMAND_FAILED(defect=defect), as_json)
        return EXIT_FAILED


def _usage(error: cyclopts.CycloptsError, arguments: Sequence[str]) -> tuple[str, str]:
    """What is wrong with the arguments, and what to type or read instead."""
    text = " ".join(str(error).split())
    text = re.sub(r'unable to convert ("[^"]*") into (int|float)', r"\1 is no \2", text)
    text = re.sub(r"is no int\b", "is no whole number", text).replace("is no float", "is no number")
    if isinstance(error, cyclopts.UnusedCliTokensError):
        text = f"unexpected argument {' '.join(error.unused_tokens or [])!r}."
    command = _command_of(arguments)
    if isinstance(error, cyclopts.UnknownCommandError):
        if not command and (ours := COMMANDS_OF_PEERS.get(arguments[0])):
            return f'Unknown command "{arguments[0]}".', ours
        text = re.sub(r" Available commands: .*, \.\.\.$", "", text)
    if isinstance(error, cyclopts.UnknownOptionError):
        option = str(error.token.value or error.token.keyword).partition("=")[0]
        if command == " ps" and option == "--watch":
            return f"Unknown option: {option}.", "`batchengine top` looks again every second"
        if command == " serve" and (ours := OPTIONS_OF_PEERS.get(option)):
            return f"Unknown option: {option}.", f"write it as `batchengine serve {ours}`"
    if command == " sessions" and isinstance(error, cyclopts.UnusedCliTokensError):
        return text, "name a command, such as `batchengine sessions show SESSION`"
    named = "" if command == " help" else command
    return text, f"see `batchengine{named} --help`"


def _command_of(arguments: Sequence[str]) -> str:
    """The command that the arguments begin with, each of its words after a space."""
    found, words = app, ""
    for name in arguments:
        if name.startswith("-") or name not in found:
            break
        found, words = found[name], f"{words} {name}"
    return words


def _print_error(error: BatchEngineError, as_json: bool) -> None:
    """The error on stderr: a line, or the object that HTTP clients get, on one line."""
    if not as_json:
        print(f"batchengine: {error}", file=sys.stderr)
        return
    import json

    from service.protocols.openai.envelope import error_object

    print(json.dumps(error_object(error), ensure_ascii=False), file=sys.stderr)


def exit_code(error: BatchEngineError) -> int:
    """The documented exit code of an error."""
    return EXIT_CODES.get(error.name, EXIT_FAILED)


def serve(
    model: Annotated[
        Path | None,
        Parameter(help="The GGUF file to serve; `pocket` = the toy model of the installation."),
    ] = None,
    /,
    *,
    config: ConfigFile = None,
    host: Annotated[
        str | None, Parameter(help="Address to listen on; loopback by default.")
    ] = None,
    port: Annotated[
        int | None, Parameter(help="TCP port; 7717 by default, 0 = a free one.")
    ] = None,
    lanes: Annotated[
        int | None,
        Parameter(help="Divide the cores into so many CPU lanes: fast, bulk, bulk2, ..."),
    ] = None,
    threads: Annotated[
        int | None, Parameter(help="Compute threads of the CPU lane; with --lanes, of each.")
    ] = None,
    ctx: Annotated[int | None, Parameter(help="Tokens a session may hold.")] = None,
    model_id: Annotated[str | None, Parameter(help="The name clients use.")] = None,
    store: Annotated[Path | None, Parameter(help="Folder of KV pages and ledger.")] = None,
    allow_volatile_store: Annotated[
        bool | None, Parameter(negative=(), help="Accept a store that a reboot may empty.")
    ] = None,
    cache_dir: Annotated[Path | None, Parameter(help="Folder of packed weights.")] = None,
    api_key_file: Annotated[
        Path | None, Parameter(help="File with one API key per line; then clients need one.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, Parameter(negative=(), help="More names accepted in the Host header.")
    ] = None,
    peer_listen: Annotated[
        str | None,
        Parameter(help="HOST:PORT for links to other daemons; without it there are none."),
    ] = None,
    peers_dir: Annotated[
        Path | None, Parameter(help="Folder that `batchengine peers init` made.")
    ] = None,
    require: Annotated[
        Literal["gpu"] | None,
        Parameter(
            help="Refuse to start unless a lane on a GPU is up; one that fails later does not end"
            " the daemon."
        ),
    ] = None,
    instance: Annotated[
        str | None,
        Parameter(
            help="Name of one of several daemons: its store and admin socket are its own, its port"
            " the first free one from 7718 on, unless one is given."
        ),
    ] = None,
    admin_socket: Annotated[
        str | None, Parameter(env_var="BATCHENGINE_ADMIN_SOCKET", help="Path of its admin socket.")
    ] = None,
    debug: Debug = False,
) -> int:
    """Serve a model until SIGTERM or Ctrl-C (the second one does not wait)."""
    from service import daemon

    path = model_file(model)
    overrides: dict[str, object] = {
        "model.path": None if path is None else str(path),
        "model.id": model_id,
        "server.host": host,
        "server.port": port,
        "server.admin_socket": admin_socket,
        **_lane_overrides(lanes, threads),
        "limits.context_tokens": ctx,
        "store.dir": None if store is None else str(store.absolute()),
        "store.allow_volatile": allow_volatile_store,
        "cache_dir": None if cache_dir is None else str(cache_dir.absolute()),
        "peers.listen": peer_listen,
        "peers.dir": None if peers_dir is None else str(peers_dir.absolute()),
        "instance": instance,
        "require": require,
        "debug": debug or None,
    }
    if allow_host:
        overrides["server.allowed_hosts"] = ["localhost", "127.0.0.1", "[::1]", *allow_host]
    overrides.update(_key_overrides(api_key_file))
    return daemon.run(_load(config, overrides))


def _lane_overrides(count: int | None, threads: int | None) -> dict[str, object]:
    """Settings of one lane, or of a fast one and bulk ones that share the cores."""
    if count is None:
        return {"lane.threads": threads}
    if not 1 <= count <= LANES_MAX:
        raise errors.LANE_COUNT(count=count, most=LANES_MAX)
    names = ["fast", "bulk", *(f"bulk{i}" for i in range(2, count))][:count]
    tables: list[dict[str, object]] = [
        {"name": name, "tier": "fast" if name == "fast" else "bulk"} for name in names
    ]
    for table in tables if threads is not None else ():
        table["threads"] = threads
    return {"lane": tables if count > 1 else [{"threads": threads or 0}]}


def _key_overrides(path: Path | None) -> dict[str, object]:
    """Keys of a file, each named by its digest, so that tenants do not depend on line order."""
    import hashlib

    if path is None:
        return {}
    from batchengine.config import KEY_CHARS_MIN, is_key
    from service.http.access import key_lines

    keys = key_lines(path)
    fix = "write one key per line: openssl rand -hex 24 makes one"
    if not keys:
        raise errors.API_KEY_FILE(path=path, problem="holds no key", fix=fix)
    if not all(map(is_key, keys)):
        problem = (
            f"has a line that is no key of at least {KEY_CHARS_MIN} printable ASCII characters"
        )
        raise errors.API_KEY_FILE(path=path, problem=problem, fix=fix)
    return {
        f"auth.keys.key-{hashlib.sha256(key.encode()).hexdigest()[:12]}.key": key for key in keys
    }


def _load(path: Path | None, overrides: dict[str, object]) -> Any:
    """The configuration; the model's header and the folders are looked at here, before an address
    is taken."""
    from batchengine import config as configuration
    from service.cli.machine.check import check_folders, check_header

    loaded = configuration.load(None if path is None else str(path), overrides)
    if not loaded.model.path:
        raise errors.NO_MODEL()
    check_header(loaded.model.path)
    check_folders(loaded)
    return loaded


def check(
    model: Annotated[
        Path | None, Parameter(help="The GGUF file, or `pocket`; if no file names it.")
    ] = None,
    /,
    *,
    config: ConfigFile = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Find what `serve` would refuse: configuration, model, address, disk, rights."""
    from batchengine import config as configuration
    from service.cli.machine.check import check as check_all
    from service.protocols.openai.envelope import error_object

    given, path = None if config is None else str(config), model_file(model)
    overrides: dict[str, object] = {"model.path": None if path is None else str(path)}
    found = check_all(configuration.load(given, overrides, is_served=False))
    if model is None and config is None:  # the defaults alone name no model
        found.problems = [e for e in found.problems if e.code != errors.NO_MODEL.code]
    answer = {
        "ok": not found.problems,
        "problems": [error_object(error)["error"] for error in found.problems],
        "warnings": found.warnings,
        "model": found.facts,
    }
    if json:
        show(answer, json, lambda: [])
    else:
        print(
            "\n".join(f"warning: {text}" for text in found.warnings),
            end="\n" * bool(found.warnings),
        )
        for error in found.problems:
            print(f"batchengine: {error}", file=sys.stderr)
        if not found.problems:
            print(f"ok: {config or model or 'built-in defaults'}")
    return exit_code(found.problems[0]) if found.problems else 0


def chat(
    model: Annotated[
        Path | None,
        Parameter(help="A GGUF file, or `pocket`: start a daemon for this conversation only."),
    ] = None,
    /,
    *,
    url: Url = URL_DEFAULT,
    system: Annotated[
        str | None, Parameter(help='System message; "" = none. By default a short one.')
    ] = None,
    session: Annotated[
        str | None, Parameter(help="Session to go on with, its history included; or a new id.")
    ] = None,
    file: Annotated[
        list[Path] | None, Parameter(negative=(), help="Text file to send with the first message.")
    ] = None,
    sla_class: Annotated[
        Literal["interactive", "standard", "background", "batch"],
        Parameter(name="--class", help="How soon the answers are wanted."),
    ] = "interactive",
    temperature: Annotated[
        float, Parameter(validator=TEMPERATURE, help="From 0, always the likeliest token, to 2.")
    ] = 0.7,
    max_tokens: Annotated[
        int | None, Parameter(validator=AT_LEAST_1, help="Tokens per answer at most.")
    ] = None,
    api_key_file: Annotated[Path | None, Parameter(help="File with the API key.")] = None,
    debug: Debug = False,
) -> int:
    """Talk to a model in the terminal; /help lists what can be typed."""
    from service.cli import chat

    key = os.environ.get("BATCHENGINE_API_KEY", "")
    if api_key_file is not None:
        from service.http.access import key_lines

        key = next(iter(key_lines(api_key_file)), "")
    options = chat.Options(
        system=chat.SYSTEM if system is None else system,
        session=session,
        files=tuple(file or ()),
        sla_class=sla_class,
        temperature=temperature,
        max_tokens=max_tokens,
    )
    return chat.run(url, key, options, model_file(model))


def install_service(
    *,
    dry_run: Annotated[
        bool, Parameter(negative=(), help="Show what would change, and write nothing.")
    ] = False,
    root: Annotated[Path, Parameter(help="Folder below which files are written.")] = Path("/"),
    debug: Debug = False,
) -> int:
    """Install the systemd service of this program: unit, user, folders, sample configuration,
    completion and manual. Can be repeated; starts nothing."""
    return install.install(app, root, dry_run=dry_run)


def version(*, json: Json = False, debug: Debug = False) -> int:
    """Show the version of this installation."""
    import platform

    facts = {
        "batchengine": batchengine.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    line = f"batchengine {facts['batchengine']}  python {facts['python']}  {facts['machine']}"
    show(facts, json, lambda: [line])
    return 0


def show_help(*command: str) -> int:
    """Show the commands, or the options of one."""
    app([*command, "--help"], result_action="return_value")
    return 0


COMMANDS = {  # in the order in which a day needs them, not of the alphabet
    "serve": serve,
    "chat": chat,
    "connect": connect.connect,
    "plan": plan.plan,
    "check": check,
    "doctor": doctor.doctor,
    "ps": status.ps,
    "top": status.top,
    "sessions": sessions.sessions,
    **sessions.OUTSIDE,
    "drain": drain.drain,
    "store": store.store,
    "peers": peers.peers,
    "cluster": cluster.cluster,
    "bench": bench.bench,
    "install-service": install_service,
    "version": version,
    "help": show_help,
}
for _number, (_name, _command) in enumerate(COMMANDS.items()):
    app.command(_command, name=_name)
    app[_name].sort_key = _number


if __name__ == "__main__":
    main()
