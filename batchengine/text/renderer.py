"""Chat templates, in the text process: a Jinja sandbox, and the errors of faulty templates.

Owns one compiled template and its caps. Runs in a process that may be killed at any moment (see
`process`): a template can cost one request its time limit, and never sees the daemon's memory,
environment or files.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from batchengine import errors
from batchengine.core import BatchEngineError

# The template of files without one.
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_RANGE_MAX = 100_000
# What templates may do to a list: those of Kimi count results of calls with one.
_OF_LISTS = ("append", "pop")
_CHANGES_LISTS = re.compile(rf"\.\s*(?:{'|'.join(_OF_LISTS)})\s*\(")
# Random, or tied to HTML; a prompt must be a function of the request alone.
_FILTERS_OFF = ("random", "pprint", "urlize", "xmlattr", "forceescape", "attr")


class OutputTooLong(Exception):
    """The output passed its cap."""


class _Refusal(Exception):
    """The template called raise_exception: the request, not the template, is at fault."""


class GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's part for trainers; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a class attribute of this name)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ListSandbox(ImmutableSandboxedEnvironment):
    """Templates change no value but lists, which are copies."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use an attribute."""
        if type(obj) is list and attr in _OF_LISTS:
            return True
        return super().is_safe_attribute(obj, attr, value)


def build_environment(
    today: datetime.date, *, changes_lists: bool = False
) -> ImmutableSandboxedEnvironment:
    """The sandbox: no loader, few globals, JSON as transformers writes it."""
    environment = (ListSandbox if changes_lists else ImmutableSandboxedEnvironment)(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        loader=None,
        cache_size=0,
        extensions=[LoopControlExtension, GenerationBlock],
    )
    allowed: dict[str, Any] = {
        "raise_exception": _raise_exception,
        "strftime_now": today.strftime,
        "namespace": Namespace,
        "range": _range,
        "dict": dict,
    }
    environment.globals.clear()
    environment.globals.update(allowed)
    environment.filters["tojson"] = _tojson
    for name in _FILTERS_OFF:
        environment.filters.pop(name, None)
    return environment


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _range(*bounds: int) -> range:
    result = range(*bounds)
    if len(result) > _RANGE_MAX:
        raise OverflowError(f"range of {len(result)} numbers; at most {_RANGE_MAX}")
    return result


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class Renderer:
    """The template of chats, and that of chats with tools if they have one of their own; each is
    compiled at its first rendering, so that a hostile one costs only chats."""

    def __init__(
        self,
        source: str | None,
        today: datetime.date,
        output_chars_max: int,
        for_tools: str | None = None,
    ) -> None:
        """`source` None = ChatML. `today` is what templates see as the date."""
        self._plain = _Template(CHATML if source is None else source, today)
        self._for_tools = self._plain if for_tools is None else _Template(for_tools, today)
        self._output_chars_max = output_chars_max

    @property
    def sources(self) -> list[str]:
        """The text of every template."""
        return list(dict.fromkeys([self._plain.source, self._for_tools.source]))

    def render(
        self, chat: Mapping[str, object], variables: Mapping[str, object] | None = None
    ) -> str:
        """The prompt of `chat`, which holds messages and perhaps tools; `variables` are others.

        TEMPLATE_BROKEN when the template does not compile, MESSAGES_REFUSED when it refuses the
        messages, TEMPLATE_FAILED when it fails; OutputTooLong and MemoryError pass through.
        """
        defaults = {"add_generation_prompt": True, "documents": None}
        values = {**defaults, **(variables or {}), "tools": None, **chat}
        chosen = self._for_tools if _has_tools(values) else self._plain
        template = chosen.compiled()
        try:
            if chosen.changes_lists:
                values = copy.deepcopy(values)
            text = self._generate(template, values)
            text.encode("utf-8")
        except _Refusal as error:
            raise errors.MESSAGES_REFUSED(why=str(error)[:2000]) from error
        except (MemoryError, OutputTooLong):
            raise
        except RecursionError as error:
            raise errors.TEMPLATE_FAILED(why="the template calls itself without end") from error
        except Exception as error:  # any other exception is an error of the template
            why = f"{type(error).__name__}: {error}"[:2000]
            raise errors.TEMPLATE_FAILED(why=why) from error
        return text

    def _generate(self, template: jinja2.Template, variables: dict[str, object]) -> str:
        pieces: list[str] = []
        room = self._output_chars_max
        for piece in template.generate(variables):
            room -= len(piece)
            if room < 0:
                raise OutputTooLong
            pieces.append(piece)
        return "".join(pieces)


class _Template:
    """A template that is compiled once, or is found to be broken once."""

    def __init__(self, source: str, today: datetime.date) -> None:
        self.source = source
        self.changes_lists = _CHANGES_LISTS.search(source) is not None
        self._today = today
        self._template: jinja2.Template | None = None
        self._broken: BatchEngineError | None = None

    def compiled(self) -> jinja2.Template:
        """The template; raises TEMPLATE_BROKEN."""
        if self._broken is not None:
            raise self._broken
        if self._template is None:
            try:
                self._template = build_environment(
                    self._today, changes_lists=self.changes_lists
                ).from_string(self.source)
            except MemoryError:
                raise
            except jinja2.TemplateSyntaxError as error:
                self._broken = _broken(f"line {error.lineno}: {error.message}")
                raise self._broken from error
            except Exception as error:  # RecursionError among them
                self._broken = _broken(f"{type(error).__name__}: {error}")
                raise self._broken from error
        return self._template


def _has_tools(chat: Mapping[str, object]) -> bool:
    """Whether a chat has tools, or calls and results of some."""
    messages = cast("list[dict[str, object]]", chat["messages"])
    return bool(chat["tools"]) or any(
        one.get("tool_calls") or one.get("role") == "tool" for one in messages
    )


def _broken(why: str) -> BatchEngineError:
    return errors.TEMPLATE_BROKEN(why=why[:2000])


def warm_up() -> None:
    """Has Python and Jinja do their late imports while files can still be opened."""
    environment = build_environment(datetime.date(2000, 1, 1))
    source = "{% for x in [1] %}{{ '\\n\\u00e4' + strftime_now('%d %b %Y') }}{% endfor %}"
    for text in (source + "{{ {'a': 1} | tojson }}{{ 1 // 0 }}", "{% for %}"):
        with contextlib.suppress(jinja2.TemplateSyntaxError, ZeroDivisionError):
            environment.from_string(text).render()
