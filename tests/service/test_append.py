"""The `append` mode: new messages as tokens behind a session, in a body, a header or a key."""

from __future__ import annotations

import dataclasses
import datetime
from pathlib import Path
from typing import Any

import pytest

from batchengine.config import ApiKey
from batchengine.core import BatchEngineError
from batchengine.text.encoder import TextEncoder
from batchengine.text.encoders.bpe import BpeEncoder
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from service.protocols import append, conversation
from service.protocols.conversation import Conversation
from service.protocols.protocol import PromptLimits
from service.protocols.requests import Prompt
from tests.support.fake_engine import FakeEngine, FakeText, chat, fake_config, post, serving

USER, CALL, RESULT = (
    {"role": "user", "content": "And now?"},
    {
        "role": "assistant", "content": "",
        "tool_calls": [{"id": "c", "type": "function",
                        "function": {"name": "ls", "arguments": {"path": "."}}}],
    },
    {"role": "tool", "tool_call_id": "c", "name": "ls", "content": "a.txt"},
)  # fmt: skip
# what templates of the Qwen3 kind do: earlier answers lose their reasoning, the last one has some
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(pocket_path: Path) -> Tokenizer:
    return Tokenizer(pocket_path)


def encoder_of(tokenizer: Tokenizer, template: str | None) -> TextEncoder:
    return TextEncoder(tokenizer, Renderer(template, datetime.date(2026, 1, 1), 1 << 20))


@pytest.mark.parametrize("added", [[USER], [RESULT], [USER, CALL, RESULT]])
@pytest.mark.parametrize("which", ["own", "chatml", "thinking"])
def test_new_messages_are_what_the_whole_conversation_has_more(
    tokenizer: Tokenizer, added: list[dict[str, Any]], which: str
) -> None:
    template = {"own": tokenizer.chat_template, "chatml": None, "thinking": THINKING}[which]
    text = encoder_of(tokenizer, template)
    before = [{"role": "user", "content": "Hello"}, {**CALL, "content": "so"}]
    whole = text.encode_chat([*before, *added])
    tokens = append.appended(text, added, None, {})
    assert text.ends_turn(tokens[0])
    assert whole[-len(tokens) :] == tokens
    head = text.encode_chat([*before, USER], kwargs={"add_generation_prompt": False})
    assert len(tokens) < len(whole) - 4
    assert whole[: len(whole) - len(tokens)] == head[: len(whole) - len(tokens)]


def test_a_template_that_shows_one_message_only_is_refused(tokenizer: Tokenizer) -> None:
    text = encoder_of(tokenizer, "{{ messages[-1].content }}")
    with pytest.raises(BatchEngineError) as caught:
        append.appended(text, [USER], None, {})
    assert caught.value.name == "not_appendable"


async def test_a_body_a_header_or_a_key_asks_for_it() -> None:
    engine, config = FakeEngine(), fake_config()
    added = tuple(b"\nuser: hi\n")
    async with serving(engine, config) as served:
        await post(served, "/v1/chat/completions", chat())
        await post(served, "/v1/chat/completions", chat(batchengine={"append": True}))
        headers = {"x-batchengine-append": "true"}
        await post(served, "/v1/chat/completions", chat(), headers=headers)
        found = [generation.request.append for generation in engine.generations]
        assert found == [(), added, added]
        body = {"prompt": "x", "batchengine": {"append": True}}
        status, answer, _ = await post(served, "/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "not_appendable")
        for given, appends in (("1", True), (" True ", True), ("0", False), ("false", False)):
            headers = {"x-batchengine-append": given}
            await post(served, "/v1/chat/completions", chat(), headers=headers)
            assert engine.generations[-1].request.append == (added if appends else ())
        for given in ("yes", "on", "maybe", "2"):
            headers = {"x-batchengine-append": given}
            for path in ("/v1/chat/completions", "/v1/chat/completions/input_tokens"):
                status, answer, _ = await post(served, path, chat(), headers=headers)
                assert (status, answer["error"]["param"]) == (400, "x-batchengine-append")
    keys = (ApiKey("a", "sk-aaaaaaaaaaaaaaaaaaaa", append=True), ApiKey("b", "sk-bbbbbbbbbbbbbb"))
    engine = FakeEngine()
    async with serving(engine, dataclasses.replace(config, auth=keys)) as served:
        for key, more in ((keys[0], {}), (keys[0], {"append": False}), (keys[1], {})):
            bearer = {"Authorization": f"Bearer {key.key}"}
            body = chat(batchengine=more)
            await post(served, "/v1/chat/completions", body, headers=bearer)
        assert [g.request.append for g in engine.generations] == [added, (), ()]


def test_text_that_a_request_has_several_times_is_encoded_once(
    pocket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer(pocket_path)
    text = encoder_of(tokenizer, None)
    expected = append.appended(text, [USER, CALL, RESULT], None, {})
    encoder = tokenizer.prepare()
    assert isinstance(encoder, BpeEncoder)
    encoded: list[str] = []
    encode_text = encoder._encode_text

    def counted(piece: str) -> list[int]:
        encoded.append(piece)
        return encode_text(piece)

    monkeypatch.setattr(encoder, "_encode_text", counted)
    for _ in range(2):
        text.begin_request()
        assert append.appended(text, [USER, CALL, RESULT], None, {}) == expected
        assert "user\nAnd now?" in encoded
        assert len(encoded) == len(set(encoded))
        encoded.clear()


def test_an_answer_that_goes_on_with_the_last_message_goes_on_with_it_behind_a_session() -> None:
    def read(**options: Any) -> Prompt:
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "We"}]
        asked = Conversation(messages, continues=True, append=True, **options)
        return conversation.read(asked, FakeText(), PromptLimits(1000, 300, 10))

    assert read().append == list(b"\nuser: hi\nWe")
    assert read().tokens == [list(b"user: hi\nWe")]
    behind = read(append_to="turn")  # nothing else is sent of the conversation
    assert (behind.append, behind.tokens) == (list(b"\nuser: hi\nWe"), [behind.append])


TOOL = {
    "type": "function",
    "function": {"name": "ls", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("which", ["own", "chatml", "thinking"])
def test_instructions_and_tools_reach_a_prompt_that_has_others(
    tokenizer: Tokenizer, which: str
) -> None:
    template = {"own": tokenizer.chat_template, "chatml": None, "thinking": THINKING}[which]
    text = encoder_of(tokenizer, template)
    messages = [{"role": "system", "content": "Be rude."}, USER]
    asked = Conversation(messages, tools=[TOOL], append_to="turn", append=True, heading=1)
    prompt = conversation.read(asked, text, PromptLimits(1000, 300, 10))
    shown = b"".join(map(text.piece, prompt.append)).decode()
    assert shown.count("<system>\nBe rude.\n</system>") == 1
    assert shown.count('"name": "ls"') == 1
    bare = append.appended(text, [USER], None, {})
    assert prompt.append_bare == bare
    assert all(prompt.output.heading)


async def test_a_session_gets_its_system_text_and_its_tools_once() -> None:
    engine = FakeEngine()

    def made(system: str, *names: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, USER] if system else [USER]
        tools = [{**TOOL, "function": {**TOOL["function"], "name": name}} for name in names]
        extension = {"session_id": "s", "append": True}
        return {"messages": messages, "tools": tools, "batchengine": extension, "max_tokens": 5}

    async with serving(engine) as served:
        for path in ("/v1/chat/completions", "/v1/messages"):
            for system, names, new in (
                ("kind", ("ls",), True), ("kind", ("ls",), False), ("", ("ls",), False),
                ("rude", ("ls",), True), ("", (), False), ("rude", ("ls",), False),
                ("rude", ("cat",), True), ("rude", ("cat",), False),
            ):  # fmt: skip
                body = made(system, *names)
                if path == "/v1/messages":
                    body["messages"] = [USER]
                    body |= {"system": system} if system else {}
                    schema = {"type": "object"}
                    body["tools"] = [{"name": name, "input_schema": schema} for name in names]
                    body["batchengine"]["session_id"] = "m"
                status, answer, _ = await post(served, path, body)
                assert status == 200, answer
                appended = bytes(engine.generations[-1].request.append).decode()
                assert (f"<system>\n{system}\n" in appended) is new, (path, system, names)
                assert all(f'"name": "{name}"' in appended for name in names) or not new


@pytest.mark.parametrize(
    ("path", "count_path"),
    [
        ("/v1/chat/completions", "/v1/chat/completions/input_tokens"),
        ("/v1/messages", "/v1/messages/count_tokens"),
        ("/v1/responses", "/v1/responses/input_tokens"),
    ],
)
async def test_the_count_of_a_prompt_has_the_session_that_it_goes_behind(
    path: str, count_path: str
) -> None:
    engine = FakeEngine()
    headers = {"x-batchengine-append": "true"}
    body: dict[str, Any] = {"batchengine": {"session_id": "s"}}
    body |= {"input": "hi"} if path == "/v1/responses" else {"messages": [USER], "max_tokens": 9}
    async with serving(engine) as served:
        await post(served, path, body)
        whole = engine.generations[-1].request.prompt
        counted = (await post(served, count_path, body))[1]
        assert counted["input_tokens"] == len(whole)
        counted = (await post(served, count_path, body, headers=headers))[1]
        answer, end = len(engine.reply), 1
        assert counted["input_tokens"] == len(whole) + answer + len(b"\n") + len(whole) - end
        body["batchengine"] |= {"append": True, "session_id": "other"}
        counted = (await post(served, count_path, body))[1]
        assert counted["input_tokens"] == len(whole)


async def test_a_retry_of_the_turn_that_got_new_instructions_repeats_them() -> None:
    """The engine recognises it by its tokens."""
    engine = FakeEngine()
    body = chat(batchengine={"session_id": "s", "append": True})
    body["messages"].insert(0, {"role": "system", "content": "rude"})
    async with serving(engine) as served:
        await post(served, "/v1/chat/completions", body)
        (name,) = engine.known
        asked = engine.generations[-1].request
        behind = dataclasses.replace(asked, prompt=(1, 2, *asked.append[1:]))
        engine.known[name] = engine.generations[-1].request = behind
        headers = {"x-stainless-retry-count": "1"}
        await post(served, "/v1/chat/completions", body, headers=headers)
        assert engine.generations[-1].request.append == asked.append
        body["messages"][-1]["content"] = "more"
        await post(served, "/v1/chat/completions", body)
        assert bytes(engine.generations[-1].request.append) == b"\nuser: more\n"


def test_messages_are_needed() -> None:
    with pytest.raises(BatchEngineError, match="cannot be appended"):
        append.appended(FakeText(), [], None, {})
