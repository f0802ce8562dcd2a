"""Unmodified clients against a daemon: agents from npm and libraries from PyPI.

Every client gets one prompt that makes the model call a tool, runs the tool, sends its result and
gets a text; agents are then asked once more in the same conversation, in a new process. The daemon
serves the bundled model with a longer context. That model cannot follow an agent's prompt, so a
proxy makes every request name the only text that its answer may have (`structured_outputs`): the
daemon decodes, parses and streams it as it would a capable model's.

`reused_second_turn`: of the prompt of an agent's second question, the share that had KV. The first
run installs the clients into `build/clients` and needs a network; later ones need none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.clients import install
from bench.clients.agents import AGENTS, CONTEXT_TOKENS, MODEL, Agent
from bench.clients.libraries import LIBRARIES, PROMPT, RESULT
from bench.clients.long_model import long_model
from bench.clients.proxy import Exchange, Proxy, Script
from service.cli.local.child import ChildDaemon

SECONDS_MAX = 300.0  # of one question
TEXT = "pong"
SECOND = "Say pong."
POCKET = Path(__file__).resolve().parents[2] / "pocket" / "pocket-q4_0.gguf"


@dataclass
class Outcome:
    """How one client fared; `why` "" = it passed."""

    name: str
    why: str = ""
    reused: float | None = None
    requests: int = 0
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


async def try_agent(agent: Agent, daemon: str, folder: Path) -> Outcome:
    """Both questions of one agent."""
    home, work = folder / agent.name, folder / agent.name / "work"
    (home / "tmp").mkdir(parents=True)
    work.mkdir()
    (work / RESULT).write_text("a file\n")
    outcome = Outcome(agent.name)
    async with Proxy(daemon, script_of(agent.tool, agent.arguments)) as proxy:
        env = install.environment(home, agent.configure(home, proxy.url))

        async def ask(command: tuple[str, ...], prompt: str) -> tuple[str, list[Exchange]]:
            before = len(proxy.exchanges)
            words = {"prompt": prompt, "home": str(home), "folder": str(work)}
            program, *rest = (part.format(**words) for part in command)
            code, output = await run([str(install.program(program)), *rest], work, env)
            made = proxy.exchanges[before:]
            return fault(made, code, output), made

        outcome.why, made = await ask(agent.first, PROMPT)
        if not outcome.why and not any(RESULT in json.dumps(e.body) for e in made):
            outcome.why = "the tool's result never came back"
        if not outcome.why:
            outcome.why, made = await ask(agent.second, SECOND)
            asked = [e for e in made if e.body.get("tools") and e.prompt_tokens]
            if asked:
                outcome.reused = round(asked[0].cached_tokens / asked[0].prompt_tokens, 4)
        outcome.requests = len(proxy.exchanges)
    return outcome


async def try_library(name: str, daemon: str, folder: Path) -> Outcome:
    """One library's call of a tool and the answer after it."""
    home = folder / name
    (home / "tmp").mkdir(parents=True)
    async with Proxy(daemon, script_of("list_files", {"command": "ls"})) as proxy:
        program = Path(__file__).with_name("libraries.py")
        command = [str(install.python(name)), "-P", str(program), name, proxy.url]
        extra = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        code, output = await run(command, home, install.environment(home, extra))
        why = fault(proxy.exchanges, code, output)
        if not why and not any(RESULT in json.dumps(e.body) for e in proxy.exchanges):
            why = "the tool's result never came back"
        return Outcome(name, why, requests=len(proxy.exchanges))


async def try_all(names: list[str], daemon: str, folder: Path) -> list[Outcome]:
    """Every client, one after the other."""
    agents = {agent.name: agent for agent in AGENTS}
    outcomes: list[Outcome] = []
    for name in names:
        began = asyncio.get_running_loop().time()
        if name in agents:
            outcome = await try_agent(agents[name], daemon, folder)
        else:
            outcome = await try_library(name, daemon, folder)
        outcome.seconds = round(asyncio.get_running_loop().time() - began, 1)
        outcomes.append(outcome)
        reused = "" if outcome.reused is None else f", {outcome.reused:.1%} of turn 2 reused"
        state = outcome.why or f"passed ({outcome.requests} requests{reused})"
        print(f"  {name:<18}{outcome.seconds:>6.1f} s  {state}", flush=True)
    return outcomes


def main(argv: list[str]) -> int:
    every = [*LIBRARIES, *(agent.name for agent in AGENTS)]
    parser = argparse.ArgumentParser(prog="bench clients", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    parser.add_argument("--no-install", action="store_true", help="use what is installed")
    parser.add_argument("--verbose", action="store_true", help="the daemon's output on stderr")
    parser.add_argument("--json", help="write the outcomes to this file")
    args = parser.parse_args(argv)
    if not args.no_install:
        install.install()

    def show(line: str) -> None:
        if args.verbose:
            print(line, file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="batchengine-clients-") as scratch:
        folder = Path(scratch)
        model = long_model(POCKET, folder / "long.gguf", CONTEXT_TOKENS)
        with ChildDaemon(model, show, "--model-id", MODEL) as daemon:
            url = daemon.wait_ready().removesuffix("/v1")
            outcomes = asyncio.run(try_all(args.only, url, folder))
    passed = [outcome for outcome in outcomes if not outcome.why]
    result = {
        "clients": len(outcomes),
        "passed": len(passed),
        "reused_second_turn": {o.name: o.reused for o in outcomes if o.reused is not None},
    }
    report.finish(result, details={"outcomes": [vars(o) for o in outcomes]}, json_path=args.json)
    return 0 if len(passed) == len(outcomes) else 1
