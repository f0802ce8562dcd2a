"""`connect AGENT`: the configuration with which an agent uses this daemon, shown or written.

Asks the daemon for its model and its context, so that no agent assumes another. Nothing is written
without `--write`, which shows the difference first and keeps the old file beside the new one.
"""

from __future__ import annotations

import difflib
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from batchengine import errors
from service.admin.client import Client
from service.cli.agents.recipes import KEY_DEFAULT, Endpoint, Recipe, recipes
from service.cli.machine.proxies import proxy_trouble
from service.cli.options import URL_DEFAULT, Debug, Json, Url, print_json

Agent = Literal[
    "claude", "codex", "opencode", "openclaw", "pi", "kilo", "qwen", "litellm", "llm", "aider"
]


def connect(
    agent: Annotated[Agent, Parameter(help="The program that will use the daemon.")],
    /,
    *,
    write: Annotated[
        bool, Parameter(negative=(), help="Write its configuration, after showing the change.")
    ] = False,
    yes: Annotated[bool, Parameter(negative=(), help="Do not ask before writing.")] = False,
    url: Url = URL_DEFAULT,
    file: Annotated[
        Path | None, Parameter(help="The agent's file, if it is not at its usual place.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Show or write the configuration with which an agent uses this daemon."""
    recipe = recipes()[agent]
    key = os.environ.get("BATCHENGINE_API_KEY", "")
    client = Client(url, key)
    row = client.model()
    endpoint = Endpoint(
        client.url.removesuffix("/v1"), row["id"], row["context_length"], key or KEY_DEFAULT
    )
    trained = row["meta"]["n_ctx_train"]
    path = file or Path(recipe.path)
    start = recipe.start.format(
        model=shlex.quote(endpoint.model),
        context=endpoint.context,
        key="$BATCHENGINE_API_KEY" if key else KEY_DEFAULT,
    )
    old, new = _texts(path, recipe, endpoint)
    diff = _diff(path, old, new)
    if json:
        print_json({"agent": agent, "path": str(path), "content": new, "start": start})
    elif old == new:
        print(f"{path} has this configuration already")
    elif not write:
        print(f"{path} would be:\n\n{new}")
    if write and old != new:
        if not json:
            print("\n".join(diff))
        if not (yes or json or _agreed(path)):
            why = "" if sys.stdin.isatty() else ": there is no terminal to ask; --yes writes"
            print(f"nothing was written{why}")
            return 1
        _write(path, old, new)
    if not json:
        _say_next(recipe, start, endpoint, trained, write)
    return 0


def _texts(path: Path, recipe: Recipe, endpoint: Endpoint) -> tuple[str, str]:
    """The file as it is, and as it would be. Raises FILE_UNUSABLE."""
    try:
        old = path.read_text("utf-8") if path.exists() else ""
        return old, recipe.merge(old, endpoint)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it cannot be read ({error})"
        raise errors.AGENT_FILE(path=path, why=(why or "").lower()) from None


def _diff(path: Path, old: str, new: str) -> list[str]:
    return [
        line.rstrip("\n")
        for line in difflib.unified_diff(
            old.splitlines(True), new.splitlines(True), f"{path} (now)", f"{path} (then)"
        )
    ]


def _agreed(path: Path) -> bool:
    """Whether the user says yes; without a terminal the answer is no."""
    if not sys.stdin.isatty():
        return False
    return input(f"write {path}? [y/N] ").strip().lower() in ("y", "yes")


def _write(path: Path, old: str, new: str) -> None:
    """Replaces the file in one step; the old one stays as NAME.before-batchengine. The new one may
    hold a key: mode 600."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = path.with_name(path.name + ".before-batchengine")
        if old and not kept.exists():
            _put(kept, old)
        made = path.with_name(path.name + ".new")
        _put(made, new)
        made.replace(path)
    except OSError as error:
        raise errors.AGENT_FILE(path=path, why=(error.strerror or "").lower()) from None


def _put(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _say_next(recipe: Recipe, start: str, endpoint: Endpoint, trained: int, written: bool) -> None:
    facts: list[tuple[str, Any]] = [
        ("daemon", f"{endpoint.v1}  model {endpoint.model}  context {endpoint.context:,}"),
        ("start", start),
    ]
    if recipe.note:
        facts.append(("note", recipe.note))
    if endpoint.context < recipe.context_min:
        fix = "serve with a larger --ctx, and a store.budget_bytes that holds as much"
        if trained < recipe.context_min:
            fix = f"serve another model, this one was trained for {trained:,}"
        why = f"it needs {recipe.context_min:,} tokens of context"
        facts.append(("warning", f"{why}: {fix}"))
    if trouble := proxy_trouble(endpoint.base):
        facts.append(("warning", ". Fix: ".join(trouble)))
    if not written:
        facts.append(("write", "the same command with --write"))
    print("\n".join(f"{name:<8}{text}" for name, text in facts))
