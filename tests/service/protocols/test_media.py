"""Images and files in the results of tools, in every chat protocol."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from service.protocols import requests
from tests.support.fake_engine import CONTEXT_TOKENS, Served, post, serving

CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
LARGE = requests.body_bytes_max(CONTEXT_TOKENS) + 1
PARTS = {
    "chat": ("/v1/chat/completions", "image_url", "tool.image_url"),
    "messages": ("/v1/messages", "image", "tool_result.image"),
    "responses": ("/v1/responses", "input_image", "input.function_call_output.input_image"),
}


def body_of(protocol: str, result: Any, says: Any = "look") -> dict[str, Any]:
    match protocol:
        case "chat":
            called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
            answer = {"role": "tool", "tool_call_id": "c", "content": result}
            return {"messages": [{"role": "user", "content": says}, called, answer]}
        case "messages":
            use = {"type": "tool_use", "id": "c", "name": "look", "input": {}}
            answer = {"type": "tool_result", "tool_use_id": "c", "content": result}
            return {
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": says},
                    {"role": "assistant", "content": [use]},
                    {"role": "user", "content": [answer]},
                ],
            }
        case _:
            use = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
            answer = {"type": "function_call_output", "call_id": "c", "output": result}
            return {"input": [{"role": "user", "content": says}, use, answer]}


@pytest.mark.parametrize("protocol", PARTS)
async def test_a_result_with_an_image_is_its_text_and_what_stands_for_the_image(
    protocol: str,
) -> None:
    """A session whose agent has looked at an image goes on."""
    path, kind, named = PARTS[protocol]
    text = "input_text" if protocol == "responses" else "text"
    image = {"type": kind, "source": {}, "image_url": {}}
    said = f"[{kind} omitted: this model reads text only]"
    async with serving() as served:
        status, _, headers = await post(
            served, path, body_of(protocol, [{"type": text, "text": "a cat:"}, image])
        )
        assert status == 200
        assert headers["x-batchengine-ignored-fields"] == named
        status, _, headers = await post(served, path, body_of(protocol, f"a cat:\n{said}"))
        assert (status, headers.get("x-batchengine-ignored-fields")) == (200, None)
        with_image, with_text = (one.request.prompt for one in served.engine.generations)
    assert with_image == with_text


async def send(served: Served, path: str, body: Any) -> tuple[int, dict[str, Any], Any]:
    """`post` of a large body."""
    data, headers = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
    return await post(served, path, data=data, headers=headers)


@pytest.mark.parametrize("protocol", PARTS)
async def test_an_image_may_be_larger_than_any_prompt(protocol: str) -> None:
    """It is left out of the prompt. Bytes elsewhere are bounded as in a body without images."""
    path, kind, _ = PARTS[protocol]
    image = {"type": kind, "source": {"data": "A" * LARGE}, "image_url": {}}
    async with serving() as served:
        assert (await send(served, path, body_of(protocol, [image])))[0] == 200
        for field in ({"tools": [image]}, {"metadata": {"content": [image]}}):
            status, answer, _ = await send(served, path, body_of(protocol, [image]) | field)
            assert (status, answer["error"]["code" if protocol != "messages" else "type"]) == (
                413,
                "request_too_large",
            )


@pytest.mark.parametrize("protocol", PARTS)
async def test_a_users_image_is_refused(protocol: str) -> None:
    path, kind, _ = PARTS[protocol]
    async with serving() as served:
        status, answer, _ = await post(served, path, body_of(protocol, "x", [{"type": kind}]))
    assert status == 400
    assert "reads text only" in answer["error"]["message"]
