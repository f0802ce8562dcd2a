"""The form of an answer's text, by every name that OpenAI's, vLLM's and llama.cpp's clients use."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from batchengine import errors
from batchengine.core import BatchEngineError, Constraint
from service.protocols.openai import gbnf
from service.protocols.schema import OpenAIBody
from service.protocols.strict_json import list_of, object_of

CHOICES_MAX = 1024
_NAMES = (
    *("response_format", "structured_outputs", "json_schema", "grammar"),
    *("guided_json", "guided_regex", "guided_grammar", "guided_choice"),
)
_ANY_OBJECT = Constraint("json_schema", '{"type":"object"}')


def constraint_of(body: OpenAIBody) -> Constraint | None:
    """The form that a body asks for; None = any text. Raises 400, also for two forms."""
    asked: dict[str, Constraint] = {}
    for name in _NAMES:
        value: object = getattr(body, name)
        if value is not None and (found := _read(name, value)) is not None:
            asked[name] = found
    _check_one(list(asked))
    return next(iter(asked.values()), None)


def _read(name: str, value: object) -> Constraint | None:
    match name:
        case "response_format":
            return _response_format(cast("dict[str, Any]", value))
        case "structured_outputs":
            return structured_outputs(cast("dict[str, Any]", value))
        case "guided_json" | "json_schema" | "structured_outputs.json":
            return _schema(value, name)
        case "guided_choice" | "structured_outputs.choice":
            return _choice(value, name)
        case "guided_regex" | "structured_outputs.regex":
            return Constraint("regex", _text(value, name))
        case "structured_outputs.json_object":
            return _ANY_OBJECT
        case _:
            return _grammar(_text(value, name), name)


def _response_format(given: dict[str, Any]) -> Constraint | None:
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            schema: object = given.get("schema")  # llama-server's addition
            return _ANY_OBJECT if schema is None else _schema(schema, "response_format.schema")
        case "json_schema":
            is_named = isinstance(given.get("json_schema"), dict)
            fields = object_of(given["json_schema"]) if is_named else given
            return _schema(fields.get("schema"), "response_format.json_schema.schema")
        case _:
            raise _wrong("response_format.type", "must be text, json_object or json_schema")


def structured_outputs(given: dict[str, Any] | None) -> Constraint | None:
    """The form that vLLM's field of this name asks for; None = any text. Raises 400, also for two
    forms and for none that is known."""
    if given is None:
        return None
    known = ("json", "regex", "choice", "grammar", "json_object")
    names = (*known, "structural_tag")
    asked = [name for name in names if given.get(name) not in (None, False)]
    _check_one([f"structured_outputs.{name}" for name in asked])
    if not asked or asked[0] not in known:
        raise _wrong("structured_outputs", "must have one of " + ", ".join(known))
    return _read(f"structured_outputs.{asked[0]}", given[asked[0]])


def _check_one(asked: list[str]) -> None:
    """Raises 400 if more than one of the forms of an answer is asked for."""
    if len(asked) > 1:
        what = f"{' and '.join(asked)} ask for two forms of one answer"
        raise errors.INVALID_FIELD(param=asked[1], what=what, fix="send one of them")


def _schema(value: object, param: str) -> Constraint:
    if isinstance(value, str):  # vLLM takes JSON text too
        try:
            value = cast("object", msgspec.json.decode(value))
        except (msgspec.DecodeError, RecursionError):
            raise _wrong(param, "is text, and no JSON") from None
    if not isinstance(value, dict | bool):
        raise _wrong(param, "must be a JSON Schema: an object")
    return Constraint("json_schema", msgspec.json.encode(value).decode())


def _choice(value: object, param: str) -> Constraint:
    texts = list_of(value)
    if not 0 < len(texts) <= CHOICES_MAX or not all(isinstance(one, str) and one for one in texts):
        raise _wrong(param, f"must be a list of 1 to {CHOICES_MAX} texts")
    choices = " | ".join(msgspec.json.encode(one).decode() for one in texts)
    return Constraint("lark", f"start: {choices}\n")


def _grammar(text: str, param: str) -> Constraint | None:
    """A grammar in llama.cpp's GBNF, or in Lark."""
    if not text.strip():
        return None
    if "::=" not in text:
        return Constraint("lark", text)
    try:
        return Constraint("lark", gbnf.lark_of(text))
    except ValueError as error:
        raise _wrong(param, f"cannot be read as GBNF: {error}") from None


def _text(value: object, param: str) -> str:
    if not isinstance(value, str):
        raise _wrong(param, "must be text")
    return value


def _wrong(param: str, why: str) -> BatchEngineError:
    return errors.INVALID_FIELD(param=param, what=f"{param} {why}", fix="correct it")
