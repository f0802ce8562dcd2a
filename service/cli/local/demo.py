"""`make demo`: the bundled pocket model, served, asked twice, stopped.

Starts a real daemon as a child, shows its stages, streams one chat completion, prints which lane
served it and how fast, and asks a second turn whose prompt is mostly found in the KV store.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from batchengine import errors
from batchengine.core import BatchEngineError
from service.admin.client import Client
from service.cli import chat
from service.cli.local.child import ChildDaemon, stop_on_signals
from service.cli.options import POCKET

FIRST = "Hello! Who are you?"
SECOND = "Thank you. What can you do?"
OPTIONS = chat.Options(temperature=0.0, max_tokens=96)


def main() -> int:
    """Returns the exit code; every failure is one readable line."""
    stop_on_signals()
    try:
        return demo(POCKET)
    except BatchEngineError as error:
        print(f"demo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        return 130
    return 1


def demo(model: Path) -> int:
    """Serves the model, asks twice and stops; raises BatchEngineError when a part of it fails."""
    if not model.is_file():
        why, fix = "it is part of the repository", "clone the repository anew"
        raise errors.NO_MODEL_FILE(path=model.name, why=why, fix=fix)
    began = time.monotonic()
    with ChildDaemon(model, print) as daemon:
        client = Client(daemon.wait_ready())
        print(f"\nready after {time.monotonic() - began:.1f} s\n")
        _converse(client)
        print("\nstopping")
        code = daemon.stop()
        for line in daemon.rest():
            if line.startswith(("  drain", "  stopped", "batchengine:")):
                print(line)
    if code != 0:
        raise errors.DEMO_ENDED_BADLY(status=code)
    print("demo: done")
    return 0


def _converse(client: Client) -> None:
    model = client.models()[0]
    history: list[chat.Message] = [{"role": "system", "content": chat.SYSTEM}]
    cached = 0
    for question in (FIRST, SECOND):
        print(f"user       {question}\nassistant  ", end="", flush=True)
        history.append({"role": "user", "content": question})
        turn = chat.ask(client, model, history, "demo", OPTIONS)
        if not turn.text.strip():
            raise errors.DEMO_FAILED(what="the model answered nothing")
        history.append({"role": "assistant", "content": turn.text})
        print(f"           [{turn.facts()}]\n")
        details: dict[str, Any] = turn.usage["prompt_tokens_details"]
        cached = details["cached_tokens"]
    health = client.get("/health")
    for lane in health["lanes"]:
        print(
            f"served by  {lane['name']} lane: {lane.get('threads', '?')} threads,"
            f" {lane.get('isa', '?')} kernels, {lane.get('steps', '?')} steps"
        )
    if cached == 0:
        raise errors.DEMO_FAILED(what="the second turn found nothing in the KV store")


if __name__ == "__main__":
    sys.exit(main())
