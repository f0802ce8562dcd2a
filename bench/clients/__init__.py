"""Unmodified clients against a daemon: agents from npm and libraries from PyPI.

Every client gets one prompt that makes the model call a tool, runs the tool, sends its result and
gets a text; agents are then asked once more in the same conversation, in a new process. The daemon
serves the bundled model with a longer context. That model cannot follow an agent's prompt, so a
proxy makes every request name the only text that its answer may have (`structured_outputs`): the
daemon decodes, parses and streams it as it would a capable model's.

`--versions` names a set of `versions.toml`: `pinned`, which the figures in `bench/results` are of,
`newest`, and earlier ones.

`reused_second_turn`: of the prompt of an agent's second question, the share that had KV. The first
run installs the clients into `build/clients` and needs a network; later ones need none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchengine.child.command import python_command
from batchengine.engine.sessions.directory import family_of
from bench import report
from bench.clients.agents import AGENTS, CONTEXT_TOKENS, MODEL, Agent
from bench.clients.install import PINNED, SETS, Installation, environment
from bench.clients.libraries import LIBRARIES, PACKAGES, PROMPT, RESULT
from bench.clients.long_model import long_model
from bench.clients.proxy import Exchange, Proxy, Script
from service.cli.local.child import ChildDaemon

SECONDS_MAX = 300.0  # of one question
TEXT = "pong"
SECOND = "Say pong."
KEY = "bench-clients-key"  # the only one that the daemon takes
ROOT = Path(__file__).resolve().parents[2]
POCKET = ROOT / "pocket" / "pocket-q4_0.gguf"


@dataclass(frozen=True)
class Scene:
    """What all clients of a run have in common."""

    daemon: str  # its origin
    folder: Path
    clients: Installation
    record: Path | None = None  # a folder for their requests

    def proxy(self, client: str, tool: str, arguments: dict[str, Any]) -> Proxy:
        script = script_of(tool, arguments)
        return Proxy(self.daemon, script, self.record and self.record / client)


@dataclass
class Outcome:
    """How one client fared; `why` "" = it passed."""

    name: str
    version: str
    why: str = ""
    reused: float | None = None
    requests: int = 0
    sessions: list[str] = field(default_factory=list[str])
    seconds: float = 0.0


def call_text(tool: str, arguments: dict[str, Any]) -> str:
    """A call as the bundled model's template writes it."""
    call = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def script_of(tool: str, arguments: dict[str, Any]) -> Script:
    return Script("USETOOL", RESULT.removesuffix(".txt"), call_text(tool, arguments), TEXT)


async def run(command: list[str], folder: Path, env: dict[str, str]) -> tuple[int, str]:
    """Exit code and output of a client; a client that takes too long is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(SECONDS_MAX):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return 124, f"not done after {SECONDS_MAX:g} s"
    return process.returncode or 0, output.decode("utf-8", "replace")


def fault(exchanges: list[Exchange], code: int, output: str) -> str:
    """Why a question failed; "" = it did not."""
    refused = next((e for e in exchanges if e.status != 200 or e.error), None)
    if refused is not None:
        return f"{refused.path}: {refused.status} {refused.error}"
    if code:
        return f"exit code {code}: {output.strip()[-600:]}"
    if not exchanges:
        return f"it sent nothing: {output.strip()[-600:]}"
    return "" if TEXT in output else f"its output has no {TEXT!r}: {output.strip()[-600:]}"


async def connect(agent: Agent, url: str, env: dict[str, str]) -> tuple[str, list[str]]:
    """Lets `batchengine connect` write the agent's configuration: "" or why it could not, and the
    options with which it says to start the agent."""
    program = python_command("service.cli", "connect", agent.name, "--url", url)
    code, output = await run([*program, "--write", "--yes", "--json"], ROOT, env)
    if code:
        return f"connect: exit code {code}: {output}", []
    words = shlex.split(json.loads(output)["start"])
    return "", words[words.index(agent.name) + 1 :]


async def try_agent(agent: Agent, scene: Scene) -> Outcome:
    """Both questions of one agent, with the configuration that `connect` writes."""
    home = scene.folder / agent.name
    work = home / "work"
    (home / "tmp").mkdir(parents=True)
    work.mkdir()
    outcome = Outcome(agent.name, scene.clients.version(agent.package))
    async with scene.proxy(agent.name, agent.tool, agent.arguments) as proxy:
        given = {name: text.format(url=proxy.url, key=KEY) for name, text in agent.env.items()}
        env = environment(home, given | {"BATCHENGINE_API_KEY": KEY})

        async def ask(command: tuple[str, ...], prompt: str) -> tuple[str, list[Exchange]]:
            before = len(proxy.exchanges)
            words = [part.format(prompt=prompt) for part in command]
            program = str(scene.clients.program(agent.name))
            code, output = await run([program, *options, *words], work, env)
            made = proxy.exchanges[before:]
            return fault(made, code, output), made

        options: list[str] = []
        if agent.connects:
            outcome.why, options = await connect(agent, proxy.url, env)
        if not outcome.why:
            outcome.why, made = await ask(agent.first, PROMPT)
        if not outcome.why and not any(RESULT in json.dumps(e.body) for e in proxy.exchanges):
            outcome.why = "the tool's result never came back"
        if not outcome.why:
            outcome.why, made = await ask(agent.second, SECOND)
            asked = [e for e in made if e.body.get("tools") and e.prompt_tokens]
            if asked:
                outcome.reused = round(asked[0].cached_tokens / asked[0].prompt_tokens, 4)
        outcome.requests = len(proxy.exchanges)
        outcome.sessions = sorted({family_of(e.session_id) for e in proxy.exchanges} - {""})
    return outcome


async def try_library(name: str, scene: Scene) -> Outcome:
    """One library's call of a tool and the answer after it."""
    home = scene.folder / name
    (home / "tmp").mkdir(parents=True)
    async with scene.proxy(name, "list_files", {"command": "ls"}) as proxy:
        program = Path(__file__).with_name("libraries.py")
        command = [str(scene.clients.python(name)), "-P", str(program), name, proxy.url, KEY]
        extra = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        code, output = await run(command, home, environment(home, extra))
        why = fault(proxy.exchanges, code, output)
        if not why and not any(RESULT in json.dumps(e.body) for e in proxy.exchanges):
            why = "the tool's result never came back"
        version = scene.clients.version(PACKAGES.get(name, name), name)
        return Outcome(name, version, why, requests=len(proxy.exchanges))


async def try_all(names: list[str], scene: Scene) -> list[Outcome]:
    """Every client, one after the other."""
    agents = {agent.name: agent for agent in AGENTS}
    outcomes: list[Outcome] = []
    for name in names:
        began = asyncio.get_running_loop().time()
        if name in agents:
            outcome = await try_agent(agents[name], scene)
        else:
            outcome = await try_library(name, scene)
        outcome.seconds = round(asyncio.get_running_loop().time() - began, 1)
        outcomes.append(outcome)
        reused = "" if outcome.reused is None else f", {outcome.reused:.1%} of turn 2 reused"
        named = f", {len(outcome.sessions)} sessions" if outcome.sessions else ""
        state = outcome.why or f"passed ({outcome.requests} requests{named}{reused})"
        print(f"  {name:<18}{outcome.version:<12}{outcome.seconds:>6.1f} s  {state}", flush=True)
    return outcomes


def in_set(names: list[str], clients: Installation) -> list[str]:
    """Those of `names` that the set of versions has: not every agent is in each."""
    missing = {agent.name for agent in AGENTS if agent.package not in clients.packages}
    return [name for name in names if name not in missing]


def main(argv: list[str]) -> int:
    every = [*LIBRARIES, *(agent.name for agent in AGENTS)]
    parser = argparse.ArgumentParser(prog="bench clients", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--versions", choices=SETS, default=PINNED, help="a set of versions.toml")
    parser.add_argument("--no-install", action="store_true", help="use what is installed")
    parser.add_argument("--verbose", action="store_true", help="the daemon's output on stderr")
    parser.add_argument("--record", type=Path, help="write each request to this folder")
    parser.add_argument("--json", help="write the outcomes to this file")
    args = parser.parse_args(argv)
    clients = Installation(args.versions)
    if not args.no_install:
        clients.install()

    def show(line: str) -> None:
        if args.verbose:
            print(line, file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="batchengine-clients-") as scratch:
        folder = Path(scratch)
        model = long_model(POCKET, folder / "long.gguf", CONTEXT_TOKENS)
        keys = folder / "keys"
        keys.write_text(KEY)
        keys.chmod(0o600)
        options = ("--model-id", MODEL, "--api-key-file", str(keys))
        with ChildDaemon(model, show, *options) as daemon:
            url = daemon.wait_ready().removesuffix("/v1")
            scene = Scene(url, folder, clients, args.record)
            outcomes = asyncio.run(try_all(in_set(args.only, clients), scene))
    passed = [outcome for outcome in outcomes if not outcome.why]
    result = {
        "clients": len(outcomes),
        "passed": len(passed),
        "reused_second_turn": {o.name: o.reused for o in outcomes if o.reused is not None},
    }
    details = {"versions": args.versions, "outcomes": [vars(o) for o in outcomes]}
    report.finish(result, details=details, json_path=args.json)
    return 0 if len(passed) == len(outcomes) else 1
