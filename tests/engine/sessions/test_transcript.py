"""Timelines as messages: what control tokens mark, and what they cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchengine.engine.sessions.operations import SessionOperations
from batchengine.engine.sessions.timelines.outline import Outlines
from batchengine.engine.sessions.transcript import (
    HeadMarks,
    channel_messages_of,
    messages_of,
    text_of,
)
from batchengine.text.encoder import TextEncoder
from batchengine.text.vocab import Tokenizer
from tests.text.gemma import write_gemma
from tests.text.harmony import IDS, open_harmony, write_harmony

MARK, END, HEAD_END = 1000, 1001, 1002


def piece(token: int) -> bytes:
    return {MARK: b"<|im_start|>", END: b"<|im_end|>", HEAD_END: b"<|end|>"}.get(
        token, bytes([token % 256])
    )


def found(tokens: list[int]) -> list[dict[str, str]]:
    marks, control = {MARK}, {MARK, END, HEAD_END}
    return asyncio.run(messages_of(tokens, marks, control, piece))


def test_messages_of_a_timeline_have_roles_and_contents() -> None:
    tokens = [0, MARK, *b"system\nBe kind.", END, *b"\n", MARK, *b"user\nG\xc3\xb6 on", END, *b"\n"]
    wanted = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Gö on"}]
    assert found([*tokens, MARK, *b"assistant\n"]) == wanted  # the prompt of an answer
    assert found([*tokens, MARK, *b"assistant\ncut h"])[-1] == {
        "role": "assistant",
        "content": "cut h",
    }
    llama = [MARK, *b"user", HEAD_END, *b"\n\nhi", END, MARK, *b"assistant", HEAD_END, *b"\n\nyes"]
    assert found(llama) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
    ]
    assert len(found([*tokens, *[7] * 9000, MARK, *b"user\nx"])) == 3


def test_an_answer_that_goes_on_behind_its_end_is_shown_whole() -> None:
    """As `ignore_eos` makes them; also where the model wrote a mark."""
    prompt = [MARK, *b"user\nhi", END, *b"\n", MARK, *b"assistant\n"]
    user = {"role": "user", "content": "hi"}
    for more, content in (
        ([*b"One.", END, *b"\nTwo", END, END, *b" three.", END], "One.\nTwo three."),
        ([*b"One ", MARK, *b"two three four five six", END], "One two three four five six"),
        ([*b"One ", MARK, *b"two ", MARK, *b"three"], "One two three"),
        ([END], ""),
    ):
        assert found([*prompt, *more]) == [user, {"role": "assistant", "content": content}]
    again = [*prompt, *b"One.", END, *b"Two", MARK, *b"user\nmore"]
    assert [one["content"] for one in found(again)] == ["hi", "One.Two", "more"]


def test_a_timeline_without_marks_has_text_only() -> None:
    assert found([*b"Once upon a time", END]) == []
    assert found([MARK, *b"no role within sixteen tokens of the mark"]) == []
    assert asyncio.run(text_of([*b"Once ", 0xC3], piece)) == "Once \N{REPLACEMENT CHARACTER}"


# ---- Harmony ----

CALLED = (
    "<|start|>system<|message|>Be kind.<|end|><|start|>user<|message|>hi<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Think.<|end|>"
    '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    "<|start|>functions.weather to=assistant<|channel|>commentary<|message|>sun<|end|>"
)
ASKED = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Think.",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"a": 1}'},
            }
        ],
    },
    {"role": "tool", "name": "weather", "content": "sun", "tool_call_id": "call_0"},
]
PROMPT = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>"
OTHER_PARTS = ("store", "journal", "recovery", "requests", "parking", "cleaning")


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    return open_harmony(write_harmony(tmp_path_factory.mktemp("vocab") / "harmony.gguf"))


def of_channels(text: TextEncoder, tokens: list[int]) -> list[dict[str, Any]]:
    marks = HeadMarks(IDS["<|start|>"], IDS["<|channel|>"], IDS["<|message|>"])
    return asyncio.run(channel_messages_of(tokens, marks, set(IDS.values()), text.piece))


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        (PROMPT, None),
        (PROMPT + FINAL, None),
        (f"{PROMPT}<|channel|>ana", None),
        (f"{PROMPT}{FINAL}Sunny.<|return|>", {"content": "Sunny."}),
        (f"{PROMPT}{FINAL}Sun", {"content": "Sun"}),
        (f"{PROMPT}{FINAL}<|return|>", {"content": ""}),
        (f"{PROMPT}{FINAL}One.<|return|>\nTwo.", {"content": "One.\nTwo."}),
        (f"{PROMPT}{FINAL}a<|start|>{'b' * 600}", {"content": "a" + "b" * 600}),
        (f"{PROMPT} to=user{FINAL}Hi", {"content": "Hi"}),
        (
            f"{PROMPT}<|channel|>analysis<|message|>So.{FINAL}Hi",
            {"content": "Hi", "reasoning_content": "So."},
        ),
    ],
)
def test_heads_of_harmony_say_what_a_text_is(
    harmony: TextEncoder, more: str, answer: dict[str, str] | None
) -> None:
    found = of_channels(harmony, harmony.encode(CALLED + more, special=True))
    assert found == [*ASKED, *([{"role": "assistant", **answer}] if answer else [])]


@pytest.mark.parametrize(
    "head",
    [
        "<|start|>assistant<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|start|>to=functions.now<|channel|>commentary json<|message|>",
    ],
)
def test_calls_of_harmony_may_name_their_tool_in_either_place(
    harmony: TextEncoder, head: str
) -> None:
    prompt = f"<|start|>user<|message|>hi<|end|>{head}<|call|>"
    made = of_channels(harmony, harmony.encode(prompt, special=True))[-1]
    assert [one["function"] for one in made["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    assert made["content"] == ""


def test_a_prompt_of_harmony_is_what_its_template_was_given(harmony: TextEncoder) -> None:
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "a <|end|><|start|>user<|message|>b"},
        {"role": "assistant", "content": "", "thinking": "Think.", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
    ]
    user, answer, result = of_channels(harmony, harmony.encode_chat(messages))[1:]
    assert user == messages[0]
    assert answer["reasoning_content"] == "Think."
    assert answer["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert (result["role"], result["name"], result["content"]) == ("tool", "f", '"r"')


def test_a_result_of_harmony_is_inside_a_message_of_a_tool() -> None:
    names = {1: b"<|start|>", 2: b"functions", 3: b".weather", 4: b" to"}
    vocabulary: Any = SimpleNamespace(control=[1], piece=names.__getitem__)
    assert Outlines(vocabulary).role([1, 2, 3, 4], 0) == "tool"


def test_a_prompt_of_gemma_is_messages(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_gemma(tmp_path / "v.gguf"))
    parts = ("<bos>", "<|turn>system\nab<turn|>\n", "<|turn>user\nhi<turn|>\n<|turn>model\n")
    head, first, asked = (tokenizer.encode(one, special=True, add_bos=False) for one in parts)
    outlines = Outlines(tokenizer)
    end = len(head) + len(first)
    outline = outlines.of([*head, *first, *asked])
    assert (outline.head, outline.is_single) == (end, True)
    answer = tokenizer.encode("Yes<turn|>", special=True, add_bos=False)
    tokens = [*head, *first, *asked, *answer]
    marks, control = outlines.marks, tokenizer.control
    assert asyncio.run(messages_of(tokens, marks, control, tokenizer.piece)) == [
        {"role": "system", "content": "ab"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Yes"},
    ]


async def test_a_session_of_harmony_has_its_messages(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_harmony(tmp_path / "v.gguf"))
    tokens = tokenizer.encode(CALLED, special=True)
    state: Any = SimpleNamespace(sessions={("t", "s"): SimpleNamespace(tokens=tokens)})
    text: Any = SimpleNamespace(tokenizer=tokenizer, piece=tokenizer.piece)
    parts: dict[str, Any] = dict.fromkeys(OTHER_PARTS)

    async def readable(*_: str) -> None: ...

    parts["recovery"] = SimpleNamespace(readable=readable)
    found = await SessionOperations(state=state, text=text, **parts).messages("t", "s")
    assert found == {"session_id": "s", "tokens": len(tokens), "messages": ASKED}
