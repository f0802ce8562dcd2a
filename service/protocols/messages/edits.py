"""`context_management.edits`: old thinking and old results of tools leave the conversation.

Owns what each edit clears, as a pure function of the messages, and the report of it. The cleared
prompt differs from the one before, so its KV is computed from the first cleared block on.
"""

from __future__ import annotations

import msgspec

from service.protocols.messages.body import Amount, Edit, MessagesRequest, Object, PromptCount
from service.protocols.strict_json import list_of

CLEAR_THINKING = "clear_thinking_20251015"
CLEAR_TOOL_USES = "clear_tool_uses_20250919"
EDITS = (CLEAR_THINKING, CLEAR_TOOL_USES)
THINKING = ("thinking", "redacted_thinking")
CLEARED = "[This result was cleared to save context.]"
TRIGGER = Amount("input_tokens", 100_000)
USES_KEPT = 3
TURNS_KEPT = 1


def unread(body: MessagesRequest) -> list[str]:
    """Names of edits that are accepted and change nothing."""
    kinds = (edit.type for edit in edits_of(body) if edit.type not in EDITS)
    return [f"context_management.edits.{kind[:64]}" for kind in kinds]


def edits_of(body: MessagesRequest) -> list[Edit]:
    """The edits that a request asks for."""
    return [] if body.context_management is None else body.context_management.edits


def edited(body: MessagesRequest, count: PromptCount) -> tuple[MessagesRequest, list[Object]]:
    """The request after its edits, and what each that changed something has cleared."""
    applied: list[Object] = []
    before = -1  # tokens of `body`, once they are counted
    for edit in edits_of(body):
        if edit.type not in EDITS:
            continue
        if edit.type == CLEAR_THINKING:
            messages, cleared = _without_thinking(body.messages, _turns_kept(edit))
            report: Object = {"type": edit.type, "cleared_thinking_turns": cleared}
        else:
            trigger = edit.trigger or TRIGGER
            if trigger.type == "input_tokens":
                before = count(body) if before < 0 else before
                if before <= trigger.value:
                    continue
            elif len(_calls(body.messages, edit)) <= trigger.value:
                continue
            messages, cleared = _without_results(body.messages, edit)
            report = {"type": edit.type, "cleared_tool_uses": cleared}
        if not cleared:
            continue
        shorter = msgspec.structs.replace(body, messages=messages)
        before, after = count(body) if before < 0 else before, count(shorter)
        if edit.clear_at_least is not None and before - after < edit.clear_at_least.value:
            continue
        applied.append({**report, "cleared_input_tokens": max(0, before - after)})
        body, before = shorter, after
    return body, applied


# ---- thinking ----


def _turns_kept(edit: Edit) -> int | None:
    if isinstance(edit.keep, str):
        return None
    return TURNS_KEPT if edit.keep is None else edit.keep.value


def _without_thinking(messages: list[Object], kept: int | None) -> tuple[list[Object], int]:
    """The messages without the thinking of all but the last `kept` turns that have some, and how
    many turns lost it. A turn goes on while results of tools are all that the user adds."""
    turns: list[list[int]] = []  # places of messages with thinking, by turn
    begins = True
    for index, message in enumerate(messages):
        blocks = _blocks(message)
        if message.get("role") == "user":
            begins = begins or not blocks or any(b.get("type") != "tool_result" for b in blocks)
        elif any(block.get("type") in THINKING for block in blocks):
            if begins or not turns:
                turns.append([])
            turns[-1].append(index)
            begins = False
    cleared = [] if kept is None else turns[: max(0, len(turns) - kept)]
    places = {index for turn in cleared for index in turn}
    made = [
        message | {"content": [b for b in _blocks(message) if b.get("type") not in THINKING]}
        if index in places
        else message
        for index, message in enumerate(messages)
    ]
    return made, len(cleared)


# ---- results of tools ----


def _calls(messages: list[Object], edit: Edit) -> list[str]:
    """The ids of the calls of tools that the edit does not leave out, in their order."""
    left_out = set(edit.exclude_tools or ())
    return [
        str(block.get("id"))
        for message in messages
        for block in _blocks(message)
        if block.get("type") == "tool_use" and block.get("name") not in left_out
    ]


def _without_results(messages: list[Object], edit: Edit) -> tuple[list[Object], int]:
    """The messages with the results of all but the last calls cleared, and how many results."""
    calls = _calls(messages, edit)
    kept = edit.keep.value if isinstance(edit.keep, Amount) else USES_KEPT
    old, inputs = set(calls[: max(0, len(calls) - kept)]), edit.clear_tool_inputs
    cleared = 0

    def without(block: Object) -> Object:
        nonlocal cleared
        if block.get("type") == "tool_result" and block.get("tool_use_id") in old:
            cleared += block.get("content") != CLEARED
            return block | {"content": CLEARED}
        if block.get("type") == "tool_use" and block.get("id") in old:
            is_named = inputs is True or (inputs and block.get("name") in inputs)
            return block | {"input": {}} if is_named else block
        return block

    made = [
        message | {"content": [without(block) for block in blocks]} if blocks else message
        for message, blocks in ((message, _blocks(message)) for message in messages)
    ]
    return made, cleared


def _blocks(message: Object) -> list[Object]:
    """The blocks of a message; none of a text, nor of contents that are no blocks."""
    blocks = list_of(message.get("content"))
    return blocks if all(isinstance(block, dict) for block in blocks) else []
