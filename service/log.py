"""The daemon's log on stderr: lines of text, or one JSON object per line.

Owns their form. A record of a request carries its facts in `record.facts` (`facts` below); the text
form appends them as name=value, the JSON form as fields. No record holds a prompt or an answer.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from batchengine.config import Config

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LIBRARIES = ("asyncio", "aiohttp")


def start_logging(config: Config) -> None:
    """Logs to stderr as `server.log_format` and `server.log_level` say."""
    level = "debug" if config.debug else config.server.log_level
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.server.log_format == "json" else TextLines(TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.INFO if config.debug else logging.WARNING)


def facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """The `extra` of a log call that carries facts; None = not known, left out."""
    return {"facts": {name: value for name, value in values.items() if value is not None}}


def _stamp(created_s: float) -> str:
    """Local time with milliseconds and the offset from UTC."""
    moment = time.localtime(created_s)
    zone = time.strftime("%z", moment)
    return time.strftime("%Y-%m-%dT%H:%M:%S", moment) + f".{int(created_s * 1000) % 1000:03d}{zone}"


class TextLines(logging.Formatter):
    """`TIME LEVEL NAME: MESSAGE name=value ...`"""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return _stamp(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:
        found: dict[str, Any] = getattr(record, "facts", {})
        tail = "".join(f" {name}={_word(value)}" for name, value in found.items())
        return super().formatMessage(record) + tail


def _word(value: object) -> str:
    """A value as one word, since a client's own name may hold anything printable."""
    text = str(value)
    return text if text.isalnum() or not (set(text) & set(" ='\"\\")) else json.dumps(text)


class JsonLines(logging.Formatter):
    """One object per record: time, level, logger, message, and the record's facts."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
