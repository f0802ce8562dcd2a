"""Grammars of answers: reasoning, then text, calls of tools in the model's markup, or a format.

Owns the translation of a tool choice and a response format to one `core.Constraint`, in the variant
of Lark that llguidance reads. A call that a grammar forces is written exactly as the chat templates
of its markup write it, so that the next turn's prompt begins with the tokens of this answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from batchengine import errors
from batchengine.core import CONSTRAINT_CHARS_MAX, SCHEMA_LOST, SCHEMA_TOOL, Constraint
from batchengine.markup import (
    ARGS,
    CALL,
    CALL_BEGIN,
    CALL_END,
    CALL_SEP,
    CALLS_BEGIN,
    CALLS_END,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    KEY,
    KEY_END,
    MESSAGE,
    START,
    TOOL_CALLS,
    VALUE,
    VALUE_END,
    Markup,
)

ANY = r"/(.|\n)*/"
# As `tojson` of the templates writes it, and never white space without end.
EXACT = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": True,
}
COMPACT = EXACT | {"item_separator": ", ?", "key_separator": ": ?"}


PATTERN = "input_pattern"  # field of a tool beside its function: what its only text must match
# what an empty list of another language became, and the name of a form of schemas
NOT_READ = re.compile(r'"(?:required|properties)": ?null|"\$schema"')
DIALECT = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?"
    r"|https://json-schema\.org/draft/20(?:19-09|20-12)/schema#?"
)
LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")


@dataclass(frozen=True, slots=True)
class Calls:
    """Tools that an answer may call. `required`: it must call at least one, else it may be text."""

    tools: Sequence[dict[str, Any]]
    required: bool
    parallel: bool


@dataclass(slots=True)
class _Rules:
    """Rules of a grammar; `control_id` as in `PromptEncoder`."""

    markup: Markup
    control_id: Callable[[str], int | None]
    lines: list[str] = field(default_factory=list[str])
    param: str = "tools"  # that an error names
    size: int = 0

    def add(self, name: str, body: str) -> str:
        self.size += len(body)
        if self.size > CONSTRAINT_CHARS_MAX:  # before it is too much for memory
            why = f"it becomes a grammar of more than {CONSTRAINT_CHARS_MAX} characters"
            raise errors.GRAMMAR_REFUSED(why=why, param=self.param)
        self.lines.append(f"{name}: {body}")
        return name

    def marker(self, text: str) -> str:
        """A marker as the vocabulary has it: one control token, or text."""
        token = self.control_id(text)
        return _literal(text) if token is None else f"<[{token}]>"

    def up_to(self, name: str, marker: str) -> str:
        """A rule of any text up to `marker`, and it."""
        if self.control_id(marker) is not None:
            return self.add(name, f"{ANY} {self.marker(marker)}")
        return self.add(f"{name}[suffix={_literal(marker)}]", ANY).partition("[")[0]


def constraint_of(
    markup: Markup,
    control_id: Callable[[str], int | None],
    *,
    in_reasoning: bool,
    may_reason: bool,
    calls: Calls | None,
    response: Constraint | None,
    refuses: bool = False,
    continues: bool = False,
) -> Constraint | None:
    """The grammar of a whole answer; None = any text.

    `calls` None = no call has to be forced or checked; `response` is the form of text. `refuses`:
    the answer must not call, though the prompt has tools. `continues`: the prompt has the beginning
    of the answer's text.
    """
    reasons = in_reasoning or may_reason
    refuses = refuses and response is None
    if response is not None and response.kind == "json_schema":
        response = Constraint("json_schema", enforceable(response.text))
    has_channels = markup.writes == "channel"
    is_bare = not (reasons or has_channels)
    if calls is None and not refuses and (response is None or is_bare):
        return response
    rules = _Rules(markup, control_id, param="tools" if response is None else "response_format")
    if has_channels:
        messages = _Messages(rules, calls, response)
        start = messages.begun() if continues else messages.answer(in_reasoning, may_reason)
        return Constraint("lark", "\n".join([f"start: {start}", *rules.lines, ""]))
    choices: list[str] = []
    if response is not None:
        choices.append(_format(rules, response))
    if calls is not None:
        if calls.required or response is not None:
            choices.append(_calls(rules, calls))
        else:
            choices += _text_or_calls(rules, calls)
    if refuses:
        choices.append(_no_call(rules))
    answer = rules.add("answer", " | ".join(choices))
    start = answer
    if reasons:
        opening, closing = markup.reasoning[0]
        thought = rules.up_to("thought", closing)
        rules.add("BLANK", r"/[ \n]*/")
        lead = f"{thought} BLANK"
        # Templates of pairs in lines have a line end in front of reasoning, too.
        line = f"{_line(rules)}? " if markup.writes == "pairs" and markup.line else ""
        lead = lead if in_reasoning else f"({line}{rules.marker(opening)} {lead})?"
        start = f"{lead} {answer}"
    return Constraint("lark", "\n".join([f"start: {start}", *rules.lines, ""]))


def _format(rules: _Rules, response: Constraint) -> str:
    match response.kind:
        case "json_schema":
            return rules.add("format", _json(json.loads(response.text), COMPACT))
        case "lark":
            return rules.add("format", "%lark {\n" + response.text + "\n}")
        case "regex":
            return rules.add("FORMAT", f"/{_slashed(response.text)}/")


def _calls(rules: _Rules, calls: Calls) -> str:
    """Rules of one call or several."""
    marker, body, between = _forms(rules, calls)
    first = f"{marker} {body}".strip()
    more = f" ({between} {first})*" if calls.parallel else ""
    return rules.add("calls", first + more)


def _no_call(rules: _Rules) -> str:
    """A rule of any text without the marker that begins calls; a control token is none of text."""
    marker = re.escape(rules.markup.opening).replace("/", "\\/")
    return rules.add("TEXT", rf"{ANY} & ~/(.|\n)*{marker}(.|\n)*/")


def _text_or_calls(rules: _Rules, calls: Calls) -> list[str]:
    """Rules of text that may go over to calls, which are as their schemas say."""
    marker, body, between = _forms(rules, calls)
    if not marker:  # a call begins the answer
        more = f" ({between} {body})*" if calls.parallel else ""
        return [rules.add("calls", body + more), rules.add("text", r"/([^{\[ \n](.|\n)*)?/")]
    head = rules.up_to("head", rules.markup.opening)
    more = f" ({between} {marker} {body})*" if calls.parallel else ""
    return [rules.add("calls", f"{head} {body}{more}"), rules.add("text", ANY)]


def _forms(rules: _Rules, calls: Calls) -> tuple[str, str, str]:
    """(marker, call behind it, what stands between two calls) as the markup has them."""
    markup, bodies = rules.markup, list[str]()
    writes = markup.writes
    if writes == "channel":
        raise AssertionError("calls in messages with heads are made by _Messages")
    for number, tool in enumerate(calls.tools):
        name, schema = tool["function"]["name"], _schema(tool)
        match writes:
            case "object":
                body = _object(rules, number, name, schema, "arguments")
                end = rules.marker(markup.closing)
                body = f"{_literal(chr(10))} {body} {_literal(chr(10))} {end}"
            case "function":
                body = _function(rules, number, tool)
            case "pairs":
                body = _pairs(rules, number, tool)
            case "objects":
                body = _object(rules, number, name, schema, "parameters")
            case "list" if rules.control_id(ARGS) is not None:
                args = rules.add(f"args{number}", _json(schema, EXACT, name))
                body = f"{_literal(name)} {rules.marker(ARGS)} {args}"
            case "named":
                args = rules.add(f"args{number}", _json(schema, EXACT, name))
                head = f"{_literal('function')} {rules.marker(CALL_SEP)}"
                head += f" {_literal(name + chr(10) + '```json' + chr(10))}"
                body = f"{head} {args} {_literal(chr(10) + '```')} {rules.marker(CALL_END)}"
            case "list":
                body = _object(rules, number, name, schema, "arguments")
        bodies.append(rules.add(f"call{number}", body))
    body = rules.add("call", " | ".join(bodies))
    match writes:
        case "object" | "function":
            return rules.marker(markup.opening), body, _literal("\n")
        case "pairs":
            return rules.marker(markup.opening), body, _line(rules)
        case "objects":
            return "", body, _literal("; ")
        case "named":
            begin = rules.marker(CALL_BEGIN)
            several = f" ({_literal(chr(10))} {begin} {body})*" if calls.parallel else ""
            end = rules.marker(CALLS_END)
            named = rules.add("named", f"{begin} {body}{several} {end}")
            return rules.marker(CALLS_BEGIN), named, ""
        case "list" if rules.control_id(ARGS) is not None:
            return rules.marker(TOOL_CALLS), body, ""
        case "list":
            several = f" ({_literal(', ')} {body})*" if calls.parallel else ""
            listed = rules.add("listed", f"{_literal('[')} {body}{several} {_literal(']')}")
            return rules.marker(TOOL_CALLS), listed, ""


class _Messages:
    """Rules of answers in Harmony: a message of reasoning, then one that is text or a call.

    A call that is forced has its recipient in the role, as templates write it. Where the answer may
    be text, a message of text may stand in front of the call, whose recipient may stand behind the
    channel. An answer has one call, which ends it.
    """

    def __init__(self, rules: _Rules, calls: Calls | None, response: Constraint | None) -> None:
        self._rules = rules
        self._calls = calls
        self._response = response
        body = rules.up_to("body", END)
        self._rest = f"{body} {rules.marker(START)} {_literal('assistant')}"

    def answer(self, in_reasoning: bool, may_reason: bool) -> str:
        """A whole answer; `in_reasoning`: the prompt has the head of its reasoning."""
        answer, lead = self._rules.add("answer", " | ".join(self._choices())), ""
        if in_reasoning:
            lead = f"{self._rest} "
        elif may_reason:
            lead = f"({self._head('analysis')} {self._rest})? "
        return lead + answer

    def begun(self) -> str:
        """The rest of an answer of which the prompt has the beginning of the text."""
        text = [] if self._calls and self._calls.required else [self._rules.add("text", ANY)]
        more = f"{self._rest} {self._called()}" if self._calls else ""
        return self._rules.add("answer", " | ".join([*text, *filter(None, [more])]))

    def _choices(self) -> list[str]:
        rules, calls, response = self._rules, self._calls, self._response
        choices = [self._called()] if calls else []
        if response is not None:
            choices.append(f"{self._head('final')} {_format(rules, response)}")
        elif calls is None or not calls.required:
            choices.append(f"{self._head('final')} {rules.add('text', ANY)}")
        return choices

    def _head(self, channel: str) -> str:
        marker = self._rules.marker
        return f"{marker(CHANNEL)} {_literal(channel)} {marker(MESSAGE)}"

    def _called(self) -> str:
        """A call, behind text if the answer need not call."""
        calls, rules = self._calls, self._rules
        assert calls is not None
        channel, constrain, body = map(rules.marker, (CHANNEL, CONSTRAIN, MESSAGE))
        end = "" if rules.control_id(CALL) is None else rules.marker(CALL)
        bodies = list[str]()
        for number, tool in enumerate(calls.tools):
            name = tool["function"]["name"]
            to = f"to={FUNCTIONS}{name}"
            head = f"{_literal(' ' + to)} {channel} {_literal('commentary json')}"
            if not calls.required:
                late = f"{channel} {_literal(f'commentary {to} ')} {constrain} {_literal('json')}"
                head = f"({head} | {late})"
            args = rules.add(f"args{number}", _json(_schema(tool), EXACT, name))
            bodies.append(rules.add(f"call{number}", f"{head} {body} {args} {end}"))
        call = rules.add("call", " | ".join(bodies))
        if calls.required:
            return call
        return f"({self._head('commentary')} {self._rest})? {call}"


def _object(rules: _Rules, number: int, name: str, schema: dict[str, Any], key: str) -> str:
    args = rules.add(f"args{number}", _json(schema, EXACT, name))
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f"{_literal(head)} {args} {_literal('}')}"


def _function(rules: _Rules, number: int, tool: dict[str, Any]) -> str:
    """<function=NAME> with its parameters."""
    name = tool["function"]["name"]
    body = _parameters(
        rules,
        number,
        tool,
        head=lambda key: _literal(f"<parameter={key}>\n"),
        end="\n</parameter>\n",
    )
    closing = rules.marker(rules.markup.closing)
    return " ".join([_literal(f"\n<function={name}>\n"), *body, _literal("</function>\n"), closing])


def _pairs(rules: _Rules, number: int, tool: dict[str, Any]) -> str:
    """NAME with its parameters as pairs of keys and values."""
    line, marker = _line(rules), rules.marker
    between = f"{marker(KEY_END)} {line} {marker(VALUE)}"
    body = _parameters(
        rules,
        number,
        tool,
        head=lambda key: f"{line} {marker(KEY)} {_literal(key)} {between}",
        end=VALUE_END,
    )
    return " ".join([_literal(tool["function"]["name"]), *body, line, marker(rules.markup.closing)])


def _line(rules: _Rules) -> str:
    return _literal(rules.markup.line) if rules.markup.line else ""


def _parameters(
    rules: _Rules, number: int, tool: dict[str, Any], *, head: Callable[[str], str], end: str
) -> list[str]:
    """The parameters in the order of the schema, each behind its `head`, up to `end`."""
    name, schema = tool["function"]["name"], _schema(tool)
    listed: object = schema.get("properties")
    fields = cast("dict[str, Any]", listed) if isinstance(listed, dict) else {}
    required: object = schema.get("required")
    needed = cast("list[object]", required) if isinstance(required, list) else []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    close, is_token = rules.marker(end), rules.control_id(end) is not None
    body: list[str] = []
    for slot, (key, given) in enumerate(fields.items()):
        if given is False:  # no value may be given
            continue
        value = cast("dict[str, Any]", given) if isinstance(given, dict) else {}  # true: any value
        rule = f"value{number}x{slot}"
        kind, options = value.get("type"), value.get("enum")
        if kind == "string" and options and all(isinstance(one, str) for one in options):
            made = rules.add(rule, " | ".join(_literal(one) for one in options)) + f" {close}"
        elif kind == "string" and PATTERN in tool:
            # One terminal with text behind it: either may begin with a line end.
            pattern = value["pattern"][1:-1] + ("" if is_token else end)
            made = rules.add(f"VALUE{number}", f"/{_slashed(pattern)}/")
            made += f" {close}" if is_token else ""
        elif kind == "string":
            made = rules.up_to(rule, end)
        else:
            made = rules.add(rule, _json(value | shared, EXACT, name)) + f" {close}"
        parameter = f"{head(key)} {made}"
        body.append(parameter if key in needed else f"({parameter})?")
    return body


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are an object whatever it says."""
    given = tool["function"].get("parameters")
    schema = dict(cast("dict[str, Any]", given)) if isinstance(given, dict) else {}
    schema["type"] = "object"
    if PATTERN in tool:
        fields = {name: {"type": "string", "pattern": tool[PATTERN]} for name in schema["required"]}
        schema["properties"] = fields
    return schema


def enforceable(schema: str) -> str:
    """A JSON Schema without what cannot be compiled: patterns that no automaton can follow,
    those that look around or back; unknown names of a dialect; and lists that are null.

    Schemas made from JavaScript's validators and Go's structures have them; the rest still holds,
    and SCHEMA_LOST names the patterns.
    """
    looks_around = '"pattern' in schema and LOOKS_AROUND.search(schema)
    if not looks_around and not NOT_READ.search(schema):
        return schema
    return json.dumps(_enforceable(json.loads(schema)), separators=(",", ":"))


def _enforceable(schema: object) -> object:
    if isinstance(schema, list):
        return [_enforceable(one) for one in cast("list[object]", schema)]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, object] = {}
    lost: list[str] = []
    for key, value in cast("dict[str, object]", schema).items():
        if key == "pattern" and isinstance(value, str) and LOOKS_AROUND.search(value):
            lost.append(key)
            continue
        if key in ("required", "properties") and value is None:
            continue
        if key == "$schema" and not (isinstance(value, str) and DIALECT.fullmatch(value)):
            continue
        if key == "patternProperties" and isinstance(value, dict):
            found = cast("dict[str, object]", value)
            value = {name: one for name, one in found.items() if not LOOKS_AROUND.search(name)}
            lost += [key] * (len(value) < len(found))
        made[key] = _enforceable(value)
    return made | ({SCHEMA_LOST: lost} if lost else {})


def _json(schema: object, options: dict[str, Any], tool: str = "") -> str:
    """A schema inside a grammar. `tool`: the one whose schema it is, for errors."""
    if isinstance(schema, dict):
        schema = cast("dict[str, Any]", schema) | {"x-guidance": options}
        schema |= {SCHEMA_TOOL: tool} if tool else {}
    return "%json " + enforceable(json.dumps(schema))


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashed(pattern: str) -> str:
    """A regular expression between slashes."""
    out: list[str] = []
    escaped = False
    for character in pattern:
        if character == "/" and not escaped:
            out.append("\\")
        out.append("\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)
