"""Timelines as messages: what control tokens mark, and what they cannot."""

from __future__ import annotations

import asyncio

from batchengine.engine.sessions.transcript import messages_of, text_of

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
