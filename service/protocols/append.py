"""The tokens that new messages add behind a conversation whose earlier messages are not sent.

A template renders whole conversations only. The new messages are therefore rendered behind two
made-up beginnings, which differ in the assistant's text alone: what both have behind that text is
the end of the assistant's message, then the new messages.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from batchengine import errors
from batchengine.markup import FUNCTIONS, numbered_name
from service.protocols.markup import history
from service.protocols.protocol import PromptEncoder

BEGINNINGS = ("one", "two")  # no common character at either end


def appended(
    text: PromptEncoder,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    template: dict[str, Any],
) -> list[int]:
    """The tokens of `messages` behind an assistant's message, the token that ends that one first.

    Raises 400 where the template does not render messages one after the other, and for results of
    different tools where the template shows one call of an answer.
    """
    if not messages:
        raise errors.NOT_APPENDABLE(why="the request has no message")
    names = dict.fromkeys(result.get("name", "") for result in _results(messages))
    if len(names) > 1 and text.markup.writes == "channel":
        listed = ", ".join(f"{name[:64]!r}" for name in list(names)[:8])
        why = (
            f"they have results of several tools ({listed}), and this model's answers have one call"
        )
        raise errors.NOT_APPENDABLE(why=why)
    one, two = (
        text.encode_chat(_behind(messages, answer, text), tools, template) for answer in BEGINNINGS
    )
    common = 0
    for left, right in zip(reversed(one), reversed(two), strict=False):
        if left != right:
            break
        common += 1
    ends = range(len(one) - common, len(one))
    end = next((place for place in ends if text.ends_turn(one[place])), None)
    if end is None or common == len(one):
        raise errors.NOT_APPENDABLE(
            why="this model's chat template does not put messages one behind the other"
        )
    return one[end:]


def _behind(
    messages: list[dict[str, Any]], answer: str, text: PromptEncoder
) -> list[dict[str, Any]]:
    """The messages behind an answer."""
    beginning = _beginning(messages, answer)
    if text.markup.writes == "fields" and "tool_calls" in beginning[-1]:
        beginning[-1]["content"] = ""  # which would stand behind the results
    return history.with_inner_results([*beginning, *messages], text)


def _beginning(messages: list[dict[str, Any]], answer: str) -> list[dict[str, Any]]:
    """A user's message and the assistant's answer to it; with a call if its result follows."""
    asked = {"role": "user", "content": "?"}
    if messages[0]["role"] != "tool":
        return [asked, {"role": "assistant", "content": answer}]
    calls = [
        {
            "id": message.get("tool_call_id", f"call_{index}"),
            "type": "function",
            "function": {"name": _name_of(message), "arguments": {"x": answer}},
        }
        for index, message in enumerate(_results(messages))
    ]
    return [asked, {"role": "assistant", "content": answer, "tool_calls": calls}]


def _name_of(result: dict[str, Any]) -> str:
    """The name of the tool of a result, which stands in its id, too, where templates print ids."""
    call = str(result.get("tool_call_id", ""))
    own = numbered_name(call) if call.startswith(FUNCTIONS) else "f"
    return result.get("name") or own


def _results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of calls in the answer that the messages stand behind."""
    first = takewhile(lambda message: message["role"] != "assistant", messages)
    return [message for message in first if message["role"] == "tool"]
