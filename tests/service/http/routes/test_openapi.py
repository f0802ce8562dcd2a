"""The OpenAPI document against what the routes answer."""

from __future__ import annotations

from typing import Any

import aiohttp

from tests.support.fake_engine import serving


def lacks(document: dict[str, Any], schema: dict[str, Any], value: Any) -> list[str]:
    """Names of required fields that `value` lacks, at any depth of references."""
    schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    missing = [name for name in schema["required"] if name not in value]
    for name, one in schema["properties"].items():
        if "$ref" in one and name in value:
            missing += lacks(document, one, value[name])
    return missing


async def test_an_error_of_every_route_has_the_documented_form() -> None:
    async with serving() as served, aiohttp.ClientSession(served.base) as client:
        async with client.get("/openapi.json") as reply:
            document = await reply.json()
        for path, methods in document["paths"].items():
            for method, row in methods.items():
                if "requestBody" not in row:
                    continue
                async with client.request(method, path.replace("{session}", "s"), json=[]) as reply:
                    assert reply.status >= 400, path
                    answer = await reply.json()
                schema = row["responses"]["default"]["content"]["application/json"]["schema"]
                assert not lacks(document, schema, answer), path


async def test_requests_that_generate_name_their_headers() -> None:
    async with (
        serving() as served,
        aiohttp.ClientSession(served.base) as client,
        client.get("/openapi.json") as reply,
    ):
        paths = (await reply.json())["paths"]

    def headers(path: str, method: str) -> set[str]:
        rows = paths[path][method].get("parameters", [])
        return {row["name"] for row in rows if row["in"] == "header"}

    expected = {"x-batchengine-session-id", "x-llm-d-inference-objective", "Idempotency-Key"}
    assert expected <= headers("/v1/messages", "post")
    assert not headers("/v1/models", "get")
