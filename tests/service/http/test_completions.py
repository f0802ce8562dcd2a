"""Plain completions: echo, the best of several, gaps, formats; and words of errors about fields."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest

from batchengine.core import (
    ContextBound,
    DoneEvent,
    GenerationRequest,
    PromptTokenEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from service.http.app import HEADER_IGNORED
from service.protocols import requests
from service.protocols.openai import completions
from service.protocols.openai.completions import CompletionFormatter, Repeated
from tests.support.fake_engine import FakeEngine, FakeText, chat, serving

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


class Gaps(FakeText):
    """A vocabulary that can fill a gap."""

    def control_id(self, text: str) -> int | None:
        names = {"<|fim_prefix|>": 260, "<|fim_suffix|>": 261, "<|fim_middle|>": 262}
        return names.get(text)


async def post(path: str, body: dict[str, Any], engine: FakeEngine | None = None) -> Any:
    """(status, answer, headers, requests of the engine)."""
    async with (
        serving(engine) as served,
        aiohttp.ClientSession() as http,
        http.post(served.base + path, json=body) as answer,
    ):
        found = await (answer.text() if body.get("stream") else answer.json())
    made = [one.request for one in served.engine.generations]
    return answer.status, found, answer.headers, made


@pytest.mark.parametrize(
    ("prompt", "echoed"), [("Say", ["Say"]), ([72, 105], ["Hi"]), (["a", "b"], ["a", "b"])]
)
async def test_echo(prompt: Any, echoed: list[str]) -> None:
    status, body, _, _ = await post(TEXT, {"prompt": prompt, "echo": True})
    assert status == 200, body
    assert [choice["text"] for choice in body["choices"]] == [f"{one}Hello wörld" for one in echoed]
    status, text, _, _ = await post(TEXT, {"prompt": prompt, "echo": True, "stream": True})
    assert all(f'"text":"{one}"' in text for one in echoed)


SCORED = {
    "tokens": ["S", "a", "y"],
    "token_logprobs": [None, -0.25, -0.5],
    "top_logprobs": [None, {"a": -0.25}, {"y": -0.5}],
    "text_offset": [0, 1, 2],
}


@pytest.mark.parametrize("prompt", ["Say", [83, 97, 121]])
@pytest.mark.parametrize("most", [0, 1])
async def test_log_probabilities_of_a_prompt(prompt: Any, most: int) -> None:
    """As harnesses that compare continuations ask for them: with one token, or none."""
    asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": most, "session_id": "s"}
    status, body, _, made = await post(TEXT, asked)
    assert status == 200, body
    assert [(one.prompt_logprobs, one.tokens_max, one.session_id) for one in made] == [(1, 1, None)]
    (choice,) = body["choices"]
    more = {
        "tokens": ["Hel"],
        "token_logprobs": [-0.25],
        "top_logprobs": [{"Hel": -0.25}],
        "text_offset": [3],
    }
    assert choice["logprobs"] == {name: [*SCORED[name], *more[name][:most]] for name in more}
    assert choice["text"] == "Say" + "Hel" * most
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == most
    status, text, _, _ = await post(TEXT, {**asked, "stream": True})
    assert status == 200
    found, lists = "", {name: list[Any]() for name in SCORED}
    for line in text.splitlines():
        if line.startswith("data: {"):
            for part in msgspec.json.decode(line[6:])["choices"]:
                found += part["text"]
                for name, items in (part["logprobs"] or {}).items():
                    lists[name] += items
    assert (found, lists) == (choice["text"], choice["logprobs"])
    assert '"finish_reason":"length"' in text


async def test_log_probabilities_of_several_prompts() -> None:
    asked = {"prompt": ["ab", "c", "déf"], "echo": True, "logprobs": 2, "max_tokens": 0, "n": 2}
    status, body, _, made = await post(TEXT, asked)
    assert status == 200, body
    assert len(made) == 6
    assert [one["text"] for one in body["choices"]] == ["ab", "ab", "c", "c", "déf", "déf"]
    last = body["choices"][-1]["logprobs"]
    assert last["tokens"] == ["d", "bytes:\\xc3", "bytes:\\xa9", "f"]
    assert last["text_offset"] == [0, 1, 1, 2]
    assert last["top_logprobs"][1] == {"bytes:\\xc3": -0.25, "bytes:\\xf0\\x9f": -9999.0}


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 2}])
@pytest.mark.parametrize("best", [0, 1, 2])
async def test_log_probabilities_of_a_prompt_as_a_list(fields: dict[str, Any], best: int) -> None:
    asked = {"prompt": ["Say", "é"], "max_tokens": 0, "prompt_logprobs": best, **fields}
    status, body, _, made = await post(TEXT, asked)
    assert status == 200, body
    assert {one.prompt_logprobs for one in made} == {max(best, fields.get("logprobs", 0))}
    first, second = body["choices"]
    assert [one and next(iter(one)) for one in first["prompt_logprobs"]] == [None, "97", "121"]
    own = first["prompt_logprobs"][1]["97"]
    rank = 1 if best or "logprobs" in fields else None
    assert own == {"logprob": -0.25, "rank": rank, "decoded_token": "a"}
    assert [len(one) for one in first["prompt_logprobs"][1:]] == [max(1, best)] * 2
    assert second["prompt_logprobs"][1]["169"]["decoded_token"] == "\ufffd"
    assert first["text"] == ("Say" if fields else "")
    if "logprobs" in fields:
        assert first["logprobs"]["token_logprobs"] == SCORED["token_logprobs"]
        assert [len(one) for one in first["logprobs"]["top_logprobs"][1:]] == [2, 2]
    else:
        assert first["logprobs"] is None


async def test_a_list_of_log_probabilities_beside_the_answers() -> None:
    asked = {"prompt": "Say", "prompt_logprobs": 1, "logprobs": 0, "n": 2}
    status, body, _, made = await post(TEXT, asked | {"session_id": "s"})
    assert (status, [one.session_id for one in made]) == (200, [None, None])
    for choice in body["choices"]:
        assert choice["text"] == "Hello wörld"
        assert len(choice["prompt_logprobs"]) == 3
        assert "S" not in choice["logprobs"]["tokens"]
    for field, value in (("stream", True), ("prompt_logprobs", -1), ("prompt_logprobs", 21)):
        status, error, _, _ = await post(TEXT, asked | {field: value})
        assert status == 400
        assert "prompt_logprobs" in (error if field == "stream" else error["error"]["param"])


async def test_log_probabilities_of_too_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[65] * 200] * 3
    asked = {"echo": True, "max_tokens": 1, "logprobs": 20}
    monkeypatch.setattr(requests, "SCORES_MAX", 3 * 200 * 21)
    status, _, _, made = await post(TEXT, {**asked, "prompt": prompts})
    assert (status, len(made)) == (200, 3)
    monkeypatch.setattr(requests, "SCORES_MAX", 3 * 200 * 21 - 1)
    status, body, _, _ = await post(TEXT, {**asked, "prompt": prompts})
    assert (status, body["error"]["param"]) == (400, "logprobs")
    monkeypatch.setattr(completions, "LISTED_MAX", 200 * 4 * 2 - 1)
    listed = {"prompt": prompts[0], "n": 2, "prompt_logprobs": 3}
    status, body, _, _ = await post(TEXT, listed)
    assert (status, body["error"]["param"]) == (400, "prompt_logprobs")
    status, _, _, _ = await post(TEXT, listed | {"prompt_logprobs": 2})
    assert status == 200
    monkeypatch.setattr(requests, "SCORES_MAX", 1)
    status, _, _, _ = await post(TEXT, {**asked, "prompt": prompts[0]})
    assert status == 200  # what one prompt may be is bounded by the context


def test_places_of_tokens_in_the_text() -> None:
    """A token that begins a sequence is not in the text, nor is the space in front of its first
    word, which some vocabularies add."""
    asked = GenerationRequest("req_1", (1, 2, 3), 1, prompt_logprobs=0)
    job = requests.HttpJob(
        asked=asked, model="m", stream=False, include_usage=False, route="cpu", seed=1,
        requests=[asked], echo=msgspec.json.encode(Repeated(["Hello you"], echoed_best=0)),
    )  # fmt: skip
    formatter = CompletionFormatter(job)
    for token, piece in enumerate((b"<s>", b" Hello", b" you")):
        formatter.collect_prompt(0, PromptTokenEvent(token, piece, -1.0 if token else None))
    formatter.collect(0, TokenEvent(7, "!", TokenLogprob(7, b"!", -2.0)))
    formatter.collect(0, DoneEvent("stop", Usage()))
    (choice,) = msgspec.json.decode(b"".join(formatter.whole()))["choices"]
    assert choice["logprobs"] is None  # no request asked for any
    kept = formatter.answers[0].logprobs
    assert kept["text_offset"] == [b"0", b"0", b"5", b"9"]
    assert kept["token_logprobs"] == [b"null", b"-1.0", b"-1.0", b"-2.0"]


async def test_text_around_a_gap() -> None:
    engine = FakeEngine()
    engine.text = Gaps()
    status, body, _, made = await post(TEXT, {"prompt": "ab", "suffix": "cd"}, engine)
    assert status == 200, body
    assert made[0].prompt == (260, *b"ab", 261, *b"cd", 262)
    status, body, _, _ = await post(TEXT, {"prompt": [1, 2], "suffix": "cd"}, engine)
    assert (status, body["error"]["param"]) == (400, "suffix")


async def test_the_best_of_several() -> None:
    status, body, _, made = await post(TEXT, {"prompt": "x", "best_of": 3, "n": 2})
    assert status == 200, body
    assert len(made) == 3
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert all(request.sampling.logprobs == 0 for request in made)
    status, body, _, _ = await post(TEXT, {"prompt": "x", "best_of": 3, "stream": True})
    assert status == 400


def test_the_best_has_the_greatest_mean() -> None:
    made = [GenerationRequest(f"req_{i}", (1, 2), 4) for i in range(3)]
    job = requests.HttpJob(
        asked=made[0], model="m", stream=False, include_usage=False, route="cpu", seed=1,
        requests=made, choices_per_prompt=3, echo=msgspec.json.encode(Repeated(kept=2)),
    )  # fmt: skip
    formatter = CompletionFormatter(job)
    for index, values in enumerate([(-1.0, -3.0), (-0.5, -0.5, -0.5), (-9.0,)]):
        for value in values:
            one = TokenLogprob(7, b"x", value)
            formatter.collect(index, TokenEvent(7, str(index), one))
        formatter.collect(index, DoneEvent("stop", Usage(completion_tokens=len(values))))
    whole = msgspec.json.decode(b"".join(formatter.whole()))
    assert [(one["index"], one["text"]) for one in whole["choices"]] == [(0, "111"), (1, "00")]
    assert whole["usage"]["completion_tokens"] == 6


async def test_no_limit_is_not_the_default_of_sixteen() -> None:
    _, _, _, made = await post(TEXT, {"prompt": "x"})
    assert made[0].tokens_max == 16
    _, _, _, made = await post(TEXT, {"prompt": "x", "max_tokens": -1})
    assert made[0].tokens_max > 16


async def test_formats_of_completions() -> None:
    _, _, _, made = await post(TEXT, {"prompt": "x", "guided_regex": "[ab]"})
    assert made[0].constraint.kind == "regex"


async def test_fields_without_effect_are_named() -> None:
    body = chat(mirostat=2) | {"a\nb": 1}
    status, _, headers, _ = await post(CHAT, body)
    assert status == 200
    assert set(headers[HEADER_IGNORED].split(", ")) == {"mirostat"}


@pytest.mark.parametrize(
    ("field", "value", "why", "fix"),
    [
        ("messages", "hi", "it must be a list, not text", "correct messages"),
        (
            "temperature",
            "x",
            "it must be a number, not text",
            "correct temperature or leave it out",
        ),
        ("n", 1.5, "it must be a whole number, not a fraction", "correct n or leave it out"),
        (
            "reasoning_effort",
            "lots",
            "there is no value 'lots'",
            "use none, minimal, low, medium, high, xhigh, max",
        ),
        ("n", 9, "it must be a whole number of at most 8", "correct n or leave it out"),
        ("n", 0, "it must be a whole number of at least 1", "correct n or leave it out"),
        ("store", "yes", "it must be true or false, not text", "correct store or leave it out"),
        ("messages", [], "it must be a list with a length of at least 1", "correct messages"),
    ],
)
async def test_errors_have_no_words_of_the_parser(
    field: str, value: Any, why: str, fix: str
) -> None:
    _, body, _, _ = await post(CHAT, chat() | {field: value})
    assert (body["error"]["why"], body["error"]["fix"]) == (why, fix)


async def test_the_smallest_top_p_is_taken() -> None:
    status, _, _, made = await post(CHAT, chat(top_p=0))
    assert (status, made[0].sampling.top_p) == (200, 0.0)


async def test_a_template_argument_is_named() -> None:
    _, body, _, _ = await post(CHAT, chat(chat_template_kwargs={"foo": 1}))
    assert "'foo'" in body["error"]["what"]


async def test_context_overflow_in_the_words_that_clients_look_for() -> None:
    _, body, _, _ = await post(TEXT, {"prompt": "x" * 3000})
    assert "maximum context length is 2048 tokens" in body["error"]["message"]
    assert body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "x" * 3000}),
        (TEXT, {"prompt": "xy", "max_tokens": 2048}),
        (TEXT, {"prompt": "x" * 300_000}),
        (CHAT, chat("x" * 3000)),
        (CHAT, chat("x" * 300_000)),
    ],
    ids=["prompt", "answer", "bytes", "chat", "bytes of a chat"],
)
async def test_a_prompt_that_is_too_long_for_the_store_says_so(
    path: str, body: dict[str, Any]
) -> None:
    engine = FakeEngine()
    engine.info.context_bound = ContextBound.STORE
    _, answer, _, _ = await post(path, body, engine)
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "store.budget_bytes" in answer["error"]["fix"]
    assert "--ctx" not in answer["error"]["fix"]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([65, -1], "prompt[1]"),
        ([[65], [65, 66, "x"]], "prompt[1][2]"),
        ([[65], [], [66]], "prompt[1]"),
        (["a", "x" * 3000], "prompt[1]"),
        (["a", "x" * 300_000], "prompt[1]"),
        (["x" * 3000], "prompt"),
    ],
)
async def test_the_one_of_several_prompts_that_is_wrong_is_named(prompt: Any, param: str) -> None:
    status, body, _, _ = await post(TEXT, {"prompt": prompt})
    assert (status, body["error"]["param"]) == (400, param)
