"""Messages as the chat template of a model takes them.

Templates refuse or lose what they were not made for: a second system message, two messages of the
user in a row, calls of tools. Such messages are joined, or written as text, so that nothing that a
client sends is lost; messages that the template takes stay as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from itertools import chain
from typing import Any, cast
from urllib.parse import unquote

from batchengine.markup import FUNCTIONS, TAG, TAG_END, Markup, Named
from batchengine.text.messages import call_arguments
from service.protocols.markup.rules import schema_at
from service.protocols.output import turns_of
from service.protocols.protocol import PromptEncoder
from service.protocols.strict_json import object_of

Message = dict[str, Any]

EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # that Harmony lacks
DECLARED_SCHEMAS_MAX = 4096  # of one tool that a template of Gemma 4 gets with their types
DECLARED_DEPTH_MAX = 32  # of those, one in another
MISTRAL_ID_CHARS = 9  # of a call's id, which its templates insist on
TOOLS_TEXT = "You can call these tools:\n<tools>\n{tools}\n</tools>\n{how}"
OBJECT_TEXT = (
    "To call one, write a JSON object with its name and arguments like this:\n"
    f'{TAG}\n{{"name": "NAME", "arguments": {{}}}}\n{TAG_END}'
)
NAMED_TEXT = "To call one, write its name and a JSON object of its arguments like this:\n"


class MissingNames(Exception):
    """A template wants the name of the tool of a call; `turns`: the turn that has it, if known."""

    def __init__(self, call: str) -> None:
        super().__init__(call)
        self.call = call
        self.turns = turns_of([call])


def prepare(
    messages: list[Message], tools: list[dict[str, Any]] | None, text: PromptEncoder
) -> tuple[list[Message], list[dict[str, Any]] | None]:
    """The messages and tools for the template of `text`."""
    if not messages:
        return [], tools
    made = _with_calls(messages, text)
    if tools and not text.takes("tools"):
        made.insert(0, _listed(tools, text.markup))
        tools = None
    if tools and text.markup.writes == "channel":
        tools = [_described(tool) for tool in tools]
    elif tools and text.markup.writes == "fields":
        tools = [_declared(tool) for tool in tools]
    if made[0]["role"] == "system" and not text.takes("system"):
        made[0]["role"] = "user"
    return alternating(made), tools


def prepare_later(
    messages: list[Message],
    heading: list[Message],
    tools: list[dict[str, Any]] | None,
    text: PromptEncoder,
    called: Mapping[str, str],
) -> list[Message]:
    """The messages for the template of `text` behind others; `heading` and `tools` are new to the
    conversation, and stand as text in front of them, but behind the results of its last calls.

    `called`: names of tools by calls. Raises MissingNames for results of others where a template
    wants the tool's name.
    """
    first = next((i for i, one in enumerate(messages) if one["role"] != "tool"), len(messages))
    results = messages[:first]
    if text.markup.writes in ("channel", "fields"):
        results = [_named(result, called) for result in results]
    elif text.markup.named.numbered:
        names = [_named(result, called)["name"] for result in results]
        results = [
            {**result, "tool_call_id": f"{FUNCTIONS}{name}:{number}"}
            for number, (result, name) in enumerate(zip(results, names, strict=True))
        ]
    new = [*heading, _listed(tools, text.markup)] if tools else heading
    made = _with_calls([*results, *new, *messages[first:]], text, has_call=bool(results))
    return alternating(made, begins=False)


def variables(template: dict[str, Any], text: PromptEncoder) -> dict[str, Any]:
    """The variables of the template of `text`: of Harmony, which always reasons, an effort that it
    has, the lowest one where no reasoning is asked for; of Gemma 4, which reasons only if asked,
    that it does where there is an effort."""
    made = dict(template)
    effort = made.get("reasoning_effort")
    if text.markup.writes == "fields" and effort is not None:
        made.setdefault("enable_thinking", effort != "none")
    if text.markup.writes != "channel":
        return made
    if effort is None and made.get("enable_thinking") is False:
        effort = "none"
    if effort is not None:
        made["reasoning_effort"] = EFFORTS.get(effort, effort)
    return made


def _described(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with a description, and texts where templates of Harmony join texts."""
    function: Message = {**tool["function"]}
    function["description"] = function.get("description") or ""
    parameters = object_of(function.get("parameters"))
    if fields := object_of(parameters.get("properties")):
        named = {name: _with_text(one) for name, one in fields.items()}
        function["parameters"] = {**parameters, "properties": named}
    return {**tool, "function": function}


def _declared(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of Gemma 4, whose templates show the type of most schemas and nothing else."""
    function: Message = {**tool["function"]}
    function["description"] = function.get("description") or ""
    if isinstance(function.get("parameters"), dict):
        function["parameters"] = _Declaration(function["parameters"]).typed(function["parameters"])
    return {**tool, "function": function}


class _Declaration:
    """The schema of one tool, in which each schema has a type; references, and the first of several
    choices, stand for themselves. What a few thousand schemas leave stays as it is."""

    def __init__(self, root: Message) -> None:
        self._root: object = root
        self._room = DECLARED_SCHEMAS_MAX
        self._inside: list[str] = []  # references that are followed

    def typed(self, given: object, depth: int = 0) -> object:
        """A schema with its type, and those in it."""
        self._room -= 1
        if not isinstance(given, dict) or self._room < 0 or depth > DECLARED_DEPTH_MAX:
            return cast("object", given)
        schema = cast("Message", given)
        reference: object = schema.get("$ref")
        if not isinstance(reference, str):
            return self._with_parts(schema, depth + 1)
        if reference in self._inside:
            target = self._target(reference)
            return {**schema, "type": _type_of(target) or _kind(target)}
        self._inside.append(reference)
        rest = {key: one for key, one in schema.items() if key != "$ref"}
        made = self.typed({**self._target(reference), **rest}, depth + 1)
        self._inside.pop()
        return made

    def _with_parts(self, schema: Message, depth: int) -> Message:
        made = dict(schema)
        kinds: object = made.get("type")
        if isinstance(kinds, list):
            names = [one for one in cast("list[object]", kinds) if one != "null"]
            is_null = {"nullable": True} if len(names) < len(cast("list[object]", kinds)) else {}
            made = {**made, "type": names[0] if names else "null", **is_null}
        for key in ("anyOf", "oneOf", "allOf"):
            listed: object = made.get(key)
            if "type" in made or not isinstance(listed, list):
                continue
            choices = [self.typed(one, depth) for one in cast("list[object]", listed)]
            some = [one for one in choices if _type_of(one) not in ("", "null")]
            if some:
                is_null = {"nullable": True} if "null" in map(_type_of, choices) else {}
                made = {**cast("Message", some[0]), **made, **is_null}
        if fields := object_of(made.get("properties")):
            made["properties"] = {name: self.typed(one, depth) for name, one in fields.items()}
        if isinstance(made.get("items"), dict):
            made["items"] = self.typed(made["items"], depth)
        return made if made.get("type") else {**made, "type": _kind(made)}

    def _target(self, reference: str) -> Message:
        """The part of the schema with this path; an empty schema where there is none."""
        place = unquote(reference.removeprefix("#"))
        is_path = reference.startswith("#") and (not place or place.startswith("/"))
        found = schema_at(self._root, place) if is_path else None
        return object_of(found)


def _type_of(schema: object) -> str:
    kind: object = object_of(schema).get("type")
    return kind if isinstance(kind, str) else ""


def _kind(schema: Message) -> str:
    """The type of a schema that does not say it."""
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    listed: object = schema.get("enum")
    options = cast("list[object]", listed) if isinstance(listed, list) else [schema.get("const")]
    return "string" if all(isinstance(one, str) for one in options) else "any"


def _with_text(given: object) -> object:
    schema = object_of(given)
    if isinstance(schema.get("default", ""), str) or not (
        schema.get("enum") or schema.get("oneOf")
    ):
        return given
    return {**schema, "default": json.dumps(schema["default"])}


def _listed(tools: list[dict[str, Any]], markup: Markup) -> Message:
    """A message with the tools, and how the model calls them."""
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    how = NAMED_TEXT + _named_call(markup.named) if markup.writes == "named" else OBJECT_TEXT
    return {"role": "system", "content": TOOLS_TEXT.format(tools=listed, how=how)}


def _named_call(marks: Named) -> str:
    head = f"{FUNCTIONS}NAME:0" if marks.numbered else "NAME"
    call = f"{head}{marks.sep}{{}}"
    if marks.in_block:
        call = f"function{marks.sep}NAME\n```json\n{{}}\n```"
    return f"{marks.begin}{marks.call}{call}{marks.call_end}{marks.end}"


def _named(result: Message, called: Mapping[str, str]) -> Message:
    """A result of a call with the name of its tool."""
    call = result.get("tool_call_id", "")
    name = result.get("name") or called.get(call)
    if not name:
        raise MissingNames(call)
    return {**result, "name": name}


def _with_calls(
    given: list[Message], text: PromptEncoder, *, has_call: bool = False
) -> list[Message]:
    messages = [dict(message) for message in given]
    if text.markup.writes == "channel":
        messages = _one_call_each(messages, has_call=has_call)
    if key := text.markup.reasoning_key:
        messages = [
            one | {key: one["reasoning_content"]} if one.get("reasoning_content") else one
            for one in messages
        ]
    if text.markup.writes == "fields":
        messages = _beside_calls(messages, has_call=has_call)
        users = [at for at, message in enumerate(messages) if message["role"] == "user"]
        asked = users[-1] if users else -1  # templates drop thoughts in front of it
        if text.takes("thoughts"):
            messages[asked + 1 :] = [_in_thought(message) for message in messages[asked + 1 :]]
    if not any("tool_calls" in one or one["role"] == "tool" for one in messages):
        return messages
    if text.markup.name == "mistral":
        for message in messages:
            _shorten_ids(message)
    if text.markup.named.numbered:
        messages = _numbered(messages, in_each=not text.takes("call ids"))
    takes, takes_cut = text.takes("calls"), text.takes("cut calls")
    for message in messages:
        for call in message.pop("tool_calls", None) or ():
            if takes and (takes_cut or _is_whole(call)):
                message.setdefault("tool_calls", []).append(call)
            else:
                message["content"] = _lines(message["content"], _call_text(call))
    if not text.takes("results"):
        messages = [_response(one) if one["role"] == "tool" else one for one in messages]
    elif not text.takes("lone results"):
        messages = _behind_calls(messages, has_call=has_call)
    return with_inner_results(messages, text)


def _beside_calls(given: list[Message], *, has_call: bool) -> list[Message]:
    """The messages with each result directly behind the message that has its call: most templates
    of Gemma 4 show no others. One of no call becomes a message of the user; `has_call`: there may
    be one in front of these messages."""
    made: list[Message] = []
    results: dict[int, list[Message]] = {-1: []}  # by the number of their message; -1: in front
    by_id: dict[str, int] = {}
    calling = -1 if has_call else None  # the message behind which nothing but results has come
    for message in given:
        if message["role"] != "tool":
            calling = None
            if calls := message.get("tool_calls"):
                calling = len(made)
                by_id |= {str(call.get("id")): calling for call in calls}
                results[calling] = []
            made.append(message)
            continue
        known = by_id.get(str(message.get("tool_call_id")), calling)
        if known is None and has_call:
            known = -1
        if known is None:
            made.append(_response(message))
        else:
            results[known].append(message)
    ordered = [[one, *results.get(at, [])] for at, one in enumerate(made)]
    return [*results[-1], *chain.from_iterable(ordered)]


def _in_thought(message: Message) -> Message:
    """A message whose text in front of calls is reasoning: templates of Gemma 4 show such text
    behind the results of the calls."""
    if not message.get("tool_calls") or not message["content"]:
        return message
    reasoning = _lines(message.get("reasoning_content", ""), message["content"])
    return {**message, "content": "", "reasoning_content": reasoning}


def with_inner_results(messages: list[Message], text: PromptEncoder) -> list[Message]:
    """The messages with results in those of their calls, where a template of Gemma 4 shows them
    there: older ones show messages of tools as turns of their own."""
    if text.markup.writes != "fields" or not text.takes("inner results"):
        return messages
    made: list[Message] = []
    for message in messages:
        calls: list[Message] = made[-1].get("tool_calls") or [] if made else []
        if message["role"] != "tool" or not calls:
            made.append(message)
            continue
        names = {str(call.get("id")): call["function"]["name"] for call in calls}
        name = names.get(str(message.get("tool_call_id"))) or message.get("name") or "unknown"
        results = made[-1].get("tool_responses", ())
        result = {"name": name, "response": message["content"]}
        made[-1] = {**made[-1], "tool_responses": [*results, result]}
    return made


def _response(result: Message) -> Message:
    """A result of a call as a message of the user."""
    body = f"<tool_response>\n{result['content']}\n</tool_response>"
    kept = {key: value for key, value in result.items() if key != "tool_call_id"}
    return {**kept, "role": "user", "content": body}


def _behind_calls(messages: list[Message], *, has_call: bool) -> list[Message]:
    """The messages with each result of no call of the last answer as a message of the user: some
    templates refuse such results, as of a call that was cut off and is text. `has_call`: there may
    be one in front of these messages."""
    made: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            has_call = "tool_calls" in message
        is_lone = message["role"] == "tool" and not has_call
        made.append(_response(message) if is_lone else message)
    return made


def _one_call_each(given: list[Message], *, has_call: bool) -> list[Message]:
    """The messages as templates of Harmony take them: reasoning under their name for it, and each
    call in a message of its own with its results behind it.

    Those templates have one text in front of a call, which is reasoning. They refuse a result with
    no call before it since the last text of the assistant, which becomes a message of the user;
    `has_call`: there is one in front of these messages.
    """
    made: list[Message] = []
    calling: list[list[Message]] = []  # calls of one answer, each with its results
    by_id: dict[str, list[Message]] = {}  # the same, the first one of each id
    for message in given:
        if message["role"] == "tool" and calling:
            by_id.get(str(message.get("tool_call_id")), calling[-1]).append(message)
            continue
        if message["role"] == "tool" and not has_call:
            message = _response(message)
        made += chain.from_iterable(calling)
        calls: list[Message] = message.pop("tool_calls", None) or []
        reasoning = message.get("reasoning_content", "")
        if calls:
            reasoning, message["content"] = _lines(reasoning, message["content"]), ""
        if reasoning:
            message["thinking"] = reasoning
        calling = [[{"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls]
        if calls:
            calling[0][0] = {**message, "tool_calls": calls[:1]}
            by_id = {str(one[0]["tool_calls"][0].get("id")): one for one in reversed(calling)}
        else:
            made.append(message)
        has_call = bool(calls) or (has_call and message["role"] != "assistant")
    return [*made, *chain.from_iterable(calling)]


def _is_whole(call: dict[str, Any]) -> bool:
    """Whether the arguments of a call are an object; one that was cut has text that is no JSON."""
    function: Any = call.get("function") or {}
    return isinstance(call_arguments(function.get("arguments")), dict)


def _call_text(call: dict[str, Any]) -> str:
    function: Any = call.get("function") or {}
    name, arguments = function.get("name"), function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    head = json.dumps(name, ensure_ascii=False)
    return f'{TAG}\n{{"name": {head}, "arguments": {arguments}}}\n{TAG_END}'


def _shorten_ids(message: Message) -> None:
    if isinstance(message.get("tool_call_id"), str):
        message["tool_call_id"] = _short(message["tool_call_id"])
    if message.get("tool_calls"):
        message["tool_calls"] = [
            {**call, "id": _short(str(call.get("id", "")))} for call in message["tool_calls"]
        ]


def _numbered(given: list[Message], *, in_each: bool) -> list[Message]:
    """The messages with ids of calls as models of Kimi write them, functions.NAME:NUMBER, and those
    of their results, which stand in the order of the calls: templates print ids, or count results.
    in_each: a template that prints no ids of calls counts those of each message."""
    made: list[Message] = []
    places: dict[str, tuple[int, str]] = {}  # by ids as they came: places among all calls, new ids
    results: list[tuple[int, Message]] = []
    first = 0
    for message in given:
        if message["role"] == "tool":
            call = str(message.get("tool_call_id"))
            place, known = places.get(call, (first, call))
            results.append((place, {**message, "tool_call_id": known}))
            continue
        made += _sorted(results)
        results = []
        calls: list[Message] = message.get("tool_calls") or []
        numbered: list[Message] = []
        for place, call in enumerate(calls, first):
            number = place - first if in_each else place
            own = f"{FUNCTIONS}{call['function']['name']}:{number}"
            places[str(call.get("id"))] = place, own
            numbered.append({**call, "id": own})
        first += len(calls)
        made.append({**message, "tool_calls": numbered} if calls else message)
    return [*made, *_sorted(results)]


def _sorted(results: list[tuple[int, Message]]) -> list[Message]:
    return [message for _, message in sorted(results, key=lambda one: one[0])]


def _short(call_id: str) -> str:
    if len(call_id) == MISTRAL_ID_CHARS and call_id.isalnum() and call_id.isascii():
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:MISTRAL_ID_CHARS]


def alternating(messages: list[Message], *, begins: bool = True) -> list[Message]:
    """The messages as templates take them: one system message at most, which is the first, and no
    two of users in a row.

    Templates skip or refuse others. Later system messages become text of the user, marked as the
    system's; so all tokens before them stay as they were. `begins` False = other messages stand in
    front of these.
    """
    made: list[Message] = []
    texts: list[str] = []  # of the last message in `made`
    for message in messages:
        role, text = message["role"], message["content"]
        is_first = begins and (not made or (len(made) == 1 and made[0]["role"] == "system"))
        if role == "system" and not is_first:
            message, role, text = {"role": "user"}, "user", f"<system>\n{text}\n</system>"
        if made and role == made[-1]["role"] and role in ("system", "user"):
            texts.append(text)
        else:
            made.append(dict(message))
            texts = [text]
        made[-1]["content"] = texts
    for message in made:
        message["content"] = "\n\n".join(message["content"])
    return made


def _lines(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
