"""What the daemon gets of a body: small, however large the body, since it is read on the loop."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.protocols import reading
from service.protocols.protocol import PromptLimits
from tests.support.fake_engine import FakeText

LIMITS = PromptLimits(context_tokens=4096, vocab_size=300, tokens_max_default=64)
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "text": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
}
MANY = 20_000


def read(protocol: str, **fields: Any) -> reading.Reading:
    question = reading.encode(reading.Question(protocol, LIMITS))
    body = json.dumps(BODIES[protocol] | fields).encode()
    return reading.decode_reading(reading.read(FakeText(), question, body))


@pytest.mark.parametrize("protocol", BODIES)
def test_large_metadata_stays_in_the_text_process(protocol: str) -> None:
    few = read(protocol, metadata={"session_id": "s", "user_id": "u", "n": 1})
    many = read(protocol, metadata={"session_id": "s", "user_id": "u", "n": [{"a": []}] * MANY})
    assert many.fields == few.fields
    assert many.fields.metadata == {"session_id": "s", "user_id": "u"}


@pytest.mark.parametrize("protocol", BODIES)
def test_integers_beyond_64_bits_are_read(protocol: str) -> None:
    found = read(protocol, metadata={"a": 10**39, "b": -(1 << 63) - 1})
    assert found.fields.metadata == {}


@pytest.mark.parametrize("protocol", BODIES)
def test_of_many_unknown_fields_the_first_are_named(protocol: str) -> None:
    found = read(protocol, **{f"unknown{number}": 0 for number in range(MANY)})
    assert found.ignored == [f"unknown{number}" for number in range(reading.IGNORED_MAX)]
