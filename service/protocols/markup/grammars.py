"""Grammars of answers: reasoning, then text, calls of tools in the model's markup, or a format.

Owns the translation of a tool choice and a response format to one `core.Constraint`, in the variant
of Lark that llguidance reads. A call that a grammar forces is written exactly as the chat templates
of its markup write it, so that the next turn's prompt begins with the tokens of this answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from batchengine.core import Constraint
from batchengine.markup import (
    ARGS,
    CALL,
    CHANNEL,
    CONSTRAIN,
    END,
    FUNCTIONS,
    KEY,
    KEY_END,
    MESSAGE,
    PARAMETER_END,
    START,
    TOOL_CALLS,
    VALUE,
    VALUE_END,
    Markup,
)
from service.protocols.markup.fields import FieldRules
from service.protocols.markup.python_rules import python_call
from service.protocols.markup.rules import (
    ANY,
    COMPACT,
    EXACT,
    OF_ARGUMENTS,
    PATTERN,
    Rules,
    enforceable,
    json_rule,
    literal,
    schema_of,
    slashed,
)
from service.protocols.markup.values import is_tag_name
from service.protocols.strict_json import list_of, object_of

# What no rule of a text between tags says.
_LINE = "\n"
_OF_TEXTS = {"pattern", "minLength", "maxLength", "format"}


@dataclass(frozen=True, slots=True)
class Calls:
    """Tools that an answer may call. `required`: it must call at least one, else it may be text."""

    tools: Sequence[dict[str, Any]]
    required: bool
    parallel: bool


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
    rules = Rules(markup, control_id, param="tools" if response is None else "response_format")
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
        # A thought of fields is known by its name, which a line end stands behind.
        opening += "\n" if markup.writes == "fields" else ""
        lead = lead if in_reasoning else f"({line}{rules.marker(opening)} {lead})?"
        start = f"{lead} {answer}"
    return Constraint("lark", "\n".join([f"start: {start}", *rules.lines, ""]))


def _format(rules: Rules, response: Constraint) -> str:
    match response.kind:
        case "json_schema":
            return rules.add("format", json_rule(json.loads(response.text), COMPACT))
        case "lark":
            return rules.add("format", "%lark {\n" + response.text + "\n}")
        case "regex":
            return rules.add("FORMAT", f"/{slashed(response.text)}/")


def _calls(rules: Rules, calls: Calls) -> str:
    """Rules of one call or several."""
    marker, body, between = _forms(rules, calls)
    first = f"{marker} {body}".strip()
    more = f" ({between} {first})*" if calls.parallel else ""
    return rules.add("calls", first + more)


def _no_call(rules: Rules) -> str:
    """A rule of any text without the marker that begins calls; a control token is none of text."""
    marker = re.escape(rules.markup.opening).replace("/", "\\/")
    return rules.add("TEXT", rf"{ANY} & ~/(.|\n)*{marker}(.|\n)*/")


def _text_or_calls(rules: Rules, calls: Calls) -> list[str]:
    """Rules of text that may go over to calls, which are as their schemas say."""
    marker, body, between = _forms(rules, calls)
    if not marker:  # a call begins the answer
        more = f" ({between} {body})*" if calls.parallel else ""
        return [rules.add("calls", body + more), rules.add("text", r"/([^{\[ \n](.|\n)*)?/")]
    head = rules.up_to("head", rules.markup.opening)
    more = f" ({between} {marker} {body})*" if calls.parallel else ""
    return [rules.add("calls", f"{head} {body}{more}"), rules.add("text", ANY)]


def _forms(rules: Rules, calls: Calls) -> tuple[str, str, str]:
    """(marker, call behind it, what stands between two calls) as the markup has them."""
    markup, bodies, fields = rules.markup, list[str](), FieldRules(rules)
    writes = markup.writes
    if writes == "channel":
        raise AssertionError("calls in messages with heads are made by _Messages")
    for number, tool in enumerate(calls.tools):
        name, schema = tool["function"]["name"], schema_of(tool)
        match writes:
            case "object":
                body = _object(rules, number, name, schema, "arguments")
                end = rules.marker(markup.closing)
                body = f"{literal(chr(10))} {body} {literal(chr(10))} {end}"
            case "function":
                body = _function(rules, number, tool)
                if not markup.joins:
                    body = f"{literal(chr(10))} {body} {rules.marker(markup.closing)}"
            case "pairs":
                body = _pairs(rules, number, tool)
            case "objects":
                body = _object(rules, number, name, schema, "parameters")
            case "list" if _has_args(rules):
                args = rules.add(f"args{number}", json_rule(schema, EXACT, name))
                body = f"{literal(name)} {rules.marker(ARGS)} {args}"
            case "named":
                body = _named(rules, number, name, schema)
            case "list":
                body = _object(rules, number, name, schema, "arguments")
            case "fields":
                body = fields.call(tool)
            case "python":
                body = python_call(rules, number, tool)
                body = body or _object(rules, number, name, schema, "arguments")
        bodies.append(rules.add(f"call{number}", body))
    body = rules.add("call", " | ".join(bodies))
    match writes:
        case "function" if markup.joins:
            several = f" ({body})*" if calls.parallel else ""
            line, end = literal("\n"), rules.marker(markup.closing)
            joined = rules.add("joined", f"{line} {body}{several} {end}")
            return f"{line}? {rules.marker(markup.opening)}", joined, ""
        case "object" | "function":
            return rules.marker(markup.opening), body, literal("\n")
        case "pairs":
            return rules.marker(markup.opening), body, _line(rules)
        case "objects":
            return "", body, literal("; ")
        case "fields":
            return rules.marker(markup.opening), body, ""
        case "named":
            marks = markup.named
            begin, end = rules.marker(marks.call), rules.marker(marks.end)
            line = f"{literal(marks.line)} " if marks.line else ""
            several = f" ({line}{begin} {body})*" if calls.parallel else ""
            named = rules.add("named", f"{begin} {body}{several} {end}")
            return rules.marker(marks.begin), named, ""
        case "list" if _has_args(rules):
            return rules.marker(TOOL_CALLS), body, ""
        case "list" | "python":
            several = f" ({literal(', ')} {body})*" if calls.parallel else ""
            end = f" {rules.marker(markup.end)}" if markup.end else ""
            listed = rules.add("listed", f"{literal('[')} {body}{several} {literal(']')}{end}")
            return rules.marker(markup.opening), listed, ""


class _Messages:
    """Rules of answers in Harmony: a message of reasoning, then one that is text or a call.

    A call that is forced has its recipient in the role, as templates write it. Where the answer may
    be text, a message of text may stand in front of the call, whose recipient may stand behind the
    channel. An answer has one call, which ends it.
    """

    def __init__(self, rules: Rules, calls: Calls | None, response: Constraint | None) -> None:
        self._rules = rules
        self._calls = calls
        self._response = response
        body = rules.up_to("body", END)
        self._rest = f"{body} {rules.marker(START)} {literal('assistant')}"

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
        return f"{marker(CHANNEL)} {literal(channel)} {marker(MESSAGE)}"

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
            head = f"{literal(' ' + to)} {channel} {literal('commentary json')}"
            if not calls.required:
                late = f"{channel} {literal(f'commentary {to} ')} {constrain} {literal('json')}"
                head = f"({head} | {late})"
            args = rules.add(f"args{number}", json_rule(schema_of(tool), EXACT, name))
            bodies.append(rules.add(f"call{number}", f"{head} {body} {args} {end}"))
        call = rules.add("call", " | ".join(bodies))
        if calls.required:
            return call
        return f"({self._head('commentary')} {self._rest})? {call}"


def _object(rules: Rules, number: int, name: str, schema: dict[str, Any], key: str) -> str:
    args = rules.add(f"args{number}", json_rule(schema, EXACT, name))
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f"{literal(head)} {args} {literal('}')}"


def _named(rules: Rules, number: int, name: str, schema: dict[str, Any]) -> str:
    """A call between two marks, behind the first. Its number is the model's: templates count the
    calls of a whole conversation, or those of an answer."""
    marks = rules.markup.named
    args = rules.add(f"args{number}", json_rule(schema, EXACT, name))
    sep, end = rules.marker(marks.sep), rules.marker(marks.call_end)
    if marks.in_block:
        head = f"{literal('function')} {sep} {literal(f'{name}{_LINE}```json{_LINE}')}"
        return f"{head} {args} {literal(f'{_LINE}```')} {end}"
    if not marks.numbered:
        return f"{literal(name)} {sep} {args} {end}"
    if not number:
        rules.add("NUMBER", r"/0|[1-9][0-9]{0,4}/")
    return f"{literal(f'{FUNCTIONS}{name}:')} NUMBER {sep} {args} {end}"


def _function(rules: Rules, number: int, tool: dict[str, Any]) -> str:
    """A tag with the tool's name, its parameters, and the end of the call, in lines. Where a tag
    cannot have the name of a parameter, all of them are a JSON object."""
    tags = rules.markup.tags

    def named(tag: str, name: str) -> str:
        return f"{tag}{tags.quote}{name}{tags.quote}>"

    head = literal(named(tags.call, tool["function"]["name"]) + "\n")
    schema = schema_of(tool)
    if not all(map(is_tag_name, object_of(schema.get("properties")))):
        args = rules.add(f"args{number}", json_rule(schema, EXACT, tool["function"]["name"]))
        return " ".join([head, args, literal(f"\n{tags.call_end}\n")])
    body = _parameters(
        rules,
        number,
        tool,
        head=lambda key: literal(named(tags.parameter, key) + tags.line),
        end=tags.line + PARAMETER_END,
        behind=literal("\n"),
    )
    return " ".join([head, *body, literal(f"{tags.call_end}\n")])


def _pairs(rules: Rules, number: int, tool: dict[str, Any]) -> str:
    """NAME with its parameters as pairs of keys and values."""
    line, marker = _line(rules), rules.marker
    between = f"{marker(KEY_END)} {line} {marker(VALUE)}"
    body = _parameters(
        rules,
        number,
        tool,
        head=lambda key: f"{line} {marker(KEY)} {literal(key)} {between}",
        end=VALUE_END,
    )
    return " ".join([literal(tool["function"]["name"]), *body, line, marker(rules.markup.closing)])


def _has_args(rules: Rules) -> bool:
    """Whether calls of the form "list" are NAME[ARGS]{...}."""
    return ARGS in rules.markup.inner and rules.control_id(ARGS) is not None


def _line(rules: Rules) -> str:
    return literal(rules.markup.line) if rules.markup.line else ""


def _parameters(
    rules: Rules,
    number: int,
    tool: dict[str, Any],
    *,
    head: Callable[[str], str],
    end: str,
    behind: str = "",
) -> list[str]:
    """The parameters in the order of the schema, each behind its `head`, up to `end`, and what
    stands `behind` that."""
    name, schema = tool["function"]["name"], schema_of(tool)
    fields, needed = object_of(schema.get("properties")), list_of(schema.get("required"))
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for keyword in sorted(schema.keys() - OF_ARGUMENTS):
        rules.lose(keyword)
    close, is_token = rules.marker(end), rules.control_id(end) is not None
    body: list[str] = []
    for slot, (key, given) in enumerate(fields.items()):
        if given is False:  # no value may be given
            continue
        value = object_of(given)  # true: any value
        rule = f"value{number}x{slot}"
        kind, options = value.get("type"), value.get("enum")
        if kind == "string" and options and all(isinstance(one, str) for one in options):
            made = rules.add(rule, " | ".join(literal(one) for one in options)) + f" {close}"
        elif kind == "string" and PATTERN in tool:
            # One terminal with text behind it: either may begin with a line end.
            pattern = value["pattern"][1:-1] + ("" if is_token else end)
            made = rules.add(f"VALUE{number}", f"/{slashed(pattern)}/")
            made += f" {close}" if is_token else ""
        elif kind == "string":
            for keyword in sorted(_OF_TEXTS & value.keys()):
                rules.lose(keyword)
            made = rules.up_to(rule, end)
        else:
            made = rules.add(rule, json_rule(value | shared, EXACT, name)) + f" {close}"
        parameter = " ".join(filter(None, (head(key), made, behind)))
        body.append(parameter if key in needed else f"({parameter})?")
    return body
