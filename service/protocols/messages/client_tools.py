"""Tools of Anthropic's whose type alone says what they take: clients run them as they run others.

Owns their parameters and descriptions. Tools that a provider runs are none of these, nor is the one
whose results are pictures of a screen.
"""

from __future__ import annotations

import re

from service.protocols.messages.body import Object

KNOWN = re.compile(r"(?P<kind>bash|text_editor|memory)_(?P<date>\d{8})")
UNDO_UNTIL = "20250124"  # later editors cannot undo, and insert `insert_text`

_TEXT, _LINE = {"type": "string"}, {"type": "integer", "minimum": 0}
_PATH = {"type": "string", "description": "An absolute path."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view: the first and the last line, from 1; -1 is the end.",
}
_REPLACED = {"type": "string", "description": "For str_replace: the text, which must occur once."}


def with_parameters(tool: Object) -> Object:
    """A tool with its parameters if its type implies them, as one of the client's own; others stay
    as they are."""
    kind = tool.get("type")
    found = KNOWN.fullmatch(kind) if isinstance(kind, str) else None
    if found is None:
        return tool
    match found["kind"]:
        case "bash":
            said, schema = _bash()
        case "memory":
            said, schema = _memory()
        case _:
            said, schema = _editor(undoes=found["date"] <= UNDO_UNTIL)
    return {**tool, "type": "custom", "description": said, "input_schema": schema}


def _schema(required: list[str], properties: Object) -> Object:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _bash() -> tuple[str, Object]:
    restart = {"type": "boolean", "description": "Begin a new shell instead."}
    said = "Runs a command in a shell that stays open, and returns its output."
    return said, _schema([], {"command": _TEXT, "restart": restart})


def _editor(*, undoes: bool) -> tuple[str, Object]:
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if undoes else [])]
    inserted: Object = {} if undoes else {"insert_text": _TEXT}
    properties = {
        "command": {"type": "string", "enum": commands},
        "path": _PATH,
        "view_range": _RANGE,
        "file_text": {"type": "string", "description": "For create: the whole file."},
        "old_str": _REPLACED,
        "new_str": _TEXT,
        "insert_line": {**_LINE, "description": "For insert: the line behind which it goes."},
        **inserted,
    }
    said = "Views and edits text files, and lists folders."
    return said, _schema(["command", "path"], properties)


def _memory() -> tuple[str, Object]:
    commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
    properties = {
        "command": {"type": "string", "enum": commands},
        "path": {"type": "string", "description": "A path below /memories; not for rename."},
        "view_range": _RANGE,
        "file_text": {"type": "string", "description": "For create: the whole file."},
        "old_str": _REPLACED,
        "new_str": _TEXT,
        "insert_line": {**_LINE, "description": "For insert: the line behind which it goes."},
        "insert_text": _TEXT,
        "old_path": {"type": "string", "description": "For rename."},
        "new_path": {"type": "string", "description": "For rename."},
    }
    said = (
        "Keeps notes in files below /memories from one conversation to the next. View that folder"
        " before other work, and write down there what will be needed later."
    )
    return said, _schema(["command"], properties)
