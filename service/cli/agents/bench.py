"""`bench`: speeds of the running daemon as a client sees them, in a few seconds.

Sends prompts that no session has, so that nothing is found in the store. The benches of the
repository (`python -m bench`) measure more, and without HTTP.
"""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from service.admin.client import Client
from service.cli.options import AT_LEAST_1, URL_DEFAULT, Debug, Json, Url, show
from service.cli.tables import Column, fitted

COLUMNS = (
    Column("streams", right=True),
    Column("tokens/s", right=True),
    Column("each", right=True),
    Column("first token ms", right=True),
    Column("prompt tokens", 2, right=True),
    Column("prefill/s", right=True),
)
WORDS = 300  # of the prompt
STREAMS = Number(gte=1, lte=1000)


def bench(
    *,
    streams: Annotated[
        int, Parameter(validator=STREAMS, help="Answers at once, besides one alone.")
    ] = 8,
    tokens: Annotated[int, Parameter(validator=AT_LEAST_1, help="Tokens of each answer.")] = 64,
    url: Url = URL_DEFAULT,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Measure the running daemon: tokens per second of one answer, and of several at once."""
    import os

    client = Client(url, os.environ.get("BATCHENGINE_API_KEY", ""))
    model = client.models()[0]
    rows = [_measure(client, model, n, tokens) for n in dict.fromkeys((1, streams))]
    shown = ({c.name: row[key] for c, key in zip(COLUMNS, row, strict=True)} for row in rows)
    show({"model": model, "rows": rows}, json, lambda: [model, *fitted(COLUMNS, [*shown], "")])
    return 0


def _measure(client: Client, model: str, streams: int, tokens: int) -> dict[str, Any]:
    """One row, in the order of `COLUMNS`."""
    began = time.monotonic()
    with ThreadPoolExecutor(streams) as pool:
        asked = [pool.submit(_ask, client, model, tokens) for _ in range(streams)]
        found = [one.result() for one in asked]
    seconds = time.monotonic() - began
    timings = [one["timings"] for one in found]
    return {
        "streams": streams,
        "tokens_per_s": round(sum(one["predicted_n"] for one in timings) / seconds, 1),
        "tokens_per_s_each": round(
            sum(one["predicted_per_second"] for one in timings) / streams, 1
        ),
        "first_token_ms": round(max(one["batchengine"]["ttft_ms"] for one in found)),
        "prompt_tokens": sum(one["prompt_n"] for one in timings),
        "prefill_per_s": round(max(one["prompt_per_second"] for one in timings), 1),
    }


def _ask(client: Client, model: str, tokens: int) -> dict[str, Any]:
    """The facts in the last chunk of one answer."""
    text = " ".join([uuid.uuid4().hex, *("word" for _ in range(WORDS))])
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.0,
    }
    last: dict[str, Any] = {}
    for chunk in client.stream_chat(body):
        if "timings" in chunk:
            last = chunk
    return last
