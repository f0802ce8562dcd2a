"""A grammar is compiled in the text process that reads its request: what it refuses is a 400."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, Constraint, Kind
from batchengine.text.encoder import TextEncoder
from batchengine.text.frontend import TextFrontend


def read_constraint(encoder: TextEncoder, _question: bytes, body: bytes) -> bytes:
    if body == b"defect":
        raise KeyboardInterrupt  # as a panic of the library: no Exception
    encoder.check_constraint(msgspec.json.decode(body, type=Constraint))
    return b"good"


async def test_a_text_process_checks_a_grammar(pocket_path: Path) -> None:
    """It is confined by then, and serves the next request after a refusal."""
    reader = "tests.text.test_grammar_check:read_constraint"
    text = await TextFrontend.open(pocket_path, reader=reader)

    async def check(kind: str, grammar: str) -> bytes:
        return await text.read(b"", msgspec.json.encode({"kind": kind, "text": grammar}))

    try:
        assert await check("json_schema", '{"type": "object"}') == b"good"
        for kind, bad in (("lark", "start: missing"), ("regex", "("), ("json_schema", "[")):
            with pytest.raises(BatchEngineError) as caught:
                await check(kind, bad)
            assert caught.value.code == errors.GRAMMAR_REFUSED.code
            assert caught.value.kind is Kind.INVALID
        with pytest.raises(BatchEngineError, match="regex parse error: unclosed character class"):
            await check("json_schema", '{"type": "string", "pattern": "["}')
        assert await check("regex", "a+") == b"good"
    finally:
        await text.close()


async def test_a_defect_of_the_library_is_a_refusal_by_a_process_that_goes_on(
    pocket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = await TextFrontend.open(
        pocket_path, reader="tests.text.test_grammar_check:read_constraint"
    )
    try:
        with pytest.raises(BatchEngineError, match="it failed: KeyboardInterrupt") as caught:
            await text.read(b"", b"defect")
        assert caught.value.kind is Kind.INVALID
        assert not [one for one in caplog.records if one.name == "batchengine.text"]
    finally:
        await text.close()
