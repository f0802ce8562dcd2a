"""The markups that models write in their answers: around reasoning, and in calls of tools.

One row per markup. The rows are read by three parts: the text process, which chooses a markup for
a model, the detokeniser, which shows control tokens that are markers, and the parser of answers
(`service.protocols.markup`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

# What follows a marker that begins calls:
# object    JSON {"name", "arguments"} or <function=NAME>, closed by the markup's `closing`
# pairs     NAME, parameters as <arg_key>KEY</arg_key><arg_value>VALUE</arg_value>, closed likewise;
#           a marker of objects begins them, too
# function  NAME>, parameters as <parameter=KEY>VALUE</parameter>, closed by </function>, or
#           the same in other tags (`Tags`)
# objects   JSON {"name", "parameters"}, several with a semicolon between them
# list      a JSON list of such objects, or NAME[ARGS]{...}
# named     a head with the tool's name, SEP and JSON, between two marks (`Named`)
# channel   a message of its own: its head names channel and recipient, its body is JSON
# fields    call:NAME{KEY:VALUE,...}: keys without quotes, texts between two QUOTE, [...] and {...}
#           of values, all others as JSON, closed by FIELDS_END
# python    [NAME(KEY=VALUE, ...), ...] with values as Python writes them, or JSON as in a list
CallForm = Literal[
    "object", "pairs", "function", "objects", "list", "named", "channel", "fields", "python"
]

THINK = ("<think>", "</think>")
TAG, TAG_END = "<tool_call>", "</tool_call>"
SEED_TAG, SEED_TAG_END = "<seed:tool_call>", "</seed:tool_call>"
FUNCTION, PARAMETER, PARAMETER_END = "<function=", "<parameter=", "</parameter>"
MINIMAX_TAG, MINIMAX_TAG_END = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE = "<invoke name="
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NEMOTRON_BEGIN, NEMOTRON_END = "<TOOLCALL>", "</TOOLCALL>"
LIST_BEGIN, LIST_END = "<|tool_call|>", "<|/tool_call|>"  # Granite 3 has no end
PYTHON_BEGIN, PYTHON_END = "<|tool_call_start|>", "<|tool_call_end|>"
CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
CALL_SEP = "<｜tool▁sep｜>"
SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_ARGUMENTS = "<|tool_call_argument_begin|>"
# An answer of Harmony is messages, START ROLE HEAD MESSAGE text END, of which the prompt has the
# first START and ROLE. Calls end with CALL in place of END, the last message with another token.
START, CHANNEL, CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
MESSAGE, END, CALL = "<|message|>", "<|end|>", "<|call|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
FUNCTIONS = "functions."  # in front of a tool's name
_NUMBER = re.compile(r":[0-9]+\Z")  # behind it, in marks of Kimi
_NO_TOOLS = ("", FUNCTIONS, "assistant", "user", "all")  # other recipients of messages
# Gemma 4: a call of the form "fields", a mark around texts in it, a channel that has reasoning.
RESULT_MARKS = ("<|tool_response>", "<tool_response|>")  # around results, of the same templates
FIELDS, FIELDS_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
FIELDS_NAME = "call:"  # in front of the tool's name
CHANNEL_BEGIN, CHANNEL_END = "<|channel>", "<channel|>"
THOUGHT = f"{CHANNEL_BEGIN}thought"
# The detokeniser puts BREAK into each "<|" and "|>" that no token of a mark has written, so that a
# parser reads no text as a mark, and the parser takes it out again.
BREAK = "\ufdd0"


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of calls of the form "function": `call` NAME> `parameter` KEY>VALUE</parameter>...
    `call_end`. `quote` stands around names and keys, `line` around values.
    """

    call: str = FUNCTION
    call_end: str = "</function>"
    parameter: str = PARAMETER
    quote: str = ""
    line: str = "\n"


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts in calls of the form "python": between two `quote`, a backslash in front of a quote and
    of another backslash, and, if `in_lines` is False, `\\n` and `\\r` for ends of lines.
    """

    quote: str = "'"
    in_lines: bool = False


@dataclass(frozen=True, slots=True)
class Named:
    """Marks of calls of the form "named": `begin`, `call` HEAD `sep` JSON `call_end` for each call
    with `line` between two, `end`. HEAD is the tool's name; with `in_block` it is "function", and
    the name and a block of code stand behind `sep`; with `numbered` it is functions.NAME:NUMBER.
    """

    begin: str = CALLS_BEGIN
    end: str = CALLS_END
    call: str = CALL_BEGIN
    sep: str = CALL_SEP
    call_end: str = CALL_END
    line: str = ""
    in_block: bool = False
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Markup:
    """Marks and forms of one kind of answers.

    `forms`: the form of calls behind each marker that begins them. `bare`: an answer that begins
    with a JSON object of a call's fields is a call, or with [NAME(KEY=VALUE, ...)]. `writes`: the
    form in which a model is made to call. `reasoning`: pairs of markers around reasoning, which
    stands before all else. `inner`: further markers, inside calls; `closing`: that which may stand
    behind a call of the form "object", "pairs" or "function". `line`: what stands between the parts
    of calls of pairs, and between two of them. `tags`: of the form "function"; `joins`: several
    calls of that form stand between one marker and one `closing`. `end`: what stands behind a list
    of calls, of the form "list" or "python". `texts`: how texts stand in calls of the latter.
    `named`: marks of the form "named".
    `reasoning_key`: the name that templates have for reasoning beside "reasoning_content".
    """

    name: str
    writes: CallForm
    forms: Mapping[str, CallForm] = field(default_factory=dict[str, CallForm])
    reasoning: tuple[tuple[str, str], ...] = (THINK,)
    bare: bool = False
    inner: tuple[str, ...] = ()
    closing: str = TAG_END
    line: str = "\n"
    tags: Tags = Tags()
    joins: bool = False
    end: str = ""
    texts: Texts = Texts()
    named: Named = Named()
    reasoning_key: str = ""

    @property
    def opening(self) -> str:
        """The marker that begins calls as a model is made to write them."""
        return next(marker for marker, form in self.forms.items() if form == self.form)

    @property
    def form(self) -> CallForm:
        """The form behind `opening`."""
        return "object" if self.writes in ("function", "pairs") else self.writes

    @property
    def has_breaks(self) -> bool:
        """Whether its parser takes marks that are tokens apart from text that spells them."""
        return self.name in ("harmony", "gemma", "lfm", "kimi")

    @property
    def thinks_again(self) -> bool:
        """Whether reasoning may stand behind text, too."""
        return self.name in ("harmony", "gemma", "lfm")

    @property
    def has_bare_values(self) -> bool:
        """Whether text may stand without quotes in its calls."""
        return self.name in ("xml", "seed", "minimax", "glm", "glm_inline", "generic")

    @property
    def markers(self) -> frozenset[str]:
        """All markers that may be control tokens of a vocabulary."""
        pairs = (marker for pair in self.reasoning for marker in pair)
        return frozenset((*self.forms, *pairs, *self.inner))


_TAGGED: dict[str, CallForm] = {TAG: "object", FUNCTION: "function"}
_PAIRS = (TAG_END, KEY, KEY_END, VALUE, VALUE_END)
_BRACKETS = (ARGS, CALL_ID, "[/TOOL_CALLS]")
_DEEPSEEK: dict[str, CallForm] = {CALLS_BEGIN: "named", CALL_BEGIN: "named", **_TAGGED}
_DEEPSEEK_INNER = (TAG_END, CALL_SEP, CALL_END, CALLS_END)
_KIMI = Named(
    SECTION_BEGIN,
    SECTION_END,
    "<|tool_call_begin|>",
    CALL_ARGUMENTS,
    "<|tool_call_end|>",
    numbered=True,
)

MARKUPS = {
    markup.name: markup
    for markup in (
        Markup("hermes", "object", _TAGGED, inner=(TAG_END,)),
        Markup("xml", "function", _TAGGED, inner=(TAG_END,)),
        Markup(
            "seed",
            "function",
            {SEED_TAG: "object", FUNCTION: "function"},
            reasoning=(("<seed:think>", "</seed:think>"),),
            inner=(SEED_TAG_END,),
            closing=SEED_TAG_END,
        ),
        Markup(
            "minimax",
            "function",
            {MINIMAX_TAG: "object"},  # text about calls may have the other tags
            inner=(MINIMAX_TAG_END,),
            closing=MINIMAX_TAG_END,
            tags=Tags(INVOKE, "</invoke>", "<parameter name=", quote='"', line=""),
            joins=True,
        ),
        Markup("glm", "pairs", _TAGGED, inner=_PAIRS),
        Markup("glm_inline", "pairs", _TAGGED, inner=_PAIRS, line=""),
        Markup(
            "llama",
            "objects",
            {PYTHON_TAG: "objects", **_TAGGED},
            bare=True,
            inner=(TAG_END,),
        ),
        Markup(
            "mistral",
            "list",
            {TOOL_CALLS: "list", **_TAGGED},
            reasoning=(("[THINK]", "[/THINK]"), THINK),
            inner=(TAG_END, *_BRACKETS),
        ),
        Markup(
            "deepseek",
            "named",
            _DEEPSEEK,
            inner=_DEEPSEEK_INNER,
            named=Named(line="\n", in_block=True),
        ),
        Markup("deepseek_inline", "named", _DEEPSEEK, inner=_DEEPSEEK_INNER),
        Markup(
            "kimi",
            "named",
            {SECTION_BEGIN: "named", _KIMI.call: "named", **_TAGGED},
            inner=(TAG_END, _KIMI.sep, _KIMI.call_end, SECTION_END),
            named=_KIMI,
        ),
        Markup(
            "harmony",
            "channel",
            {CHANNEL: "channel"},
            reasoning=((ANALYSIS, END),),
            inner=(START, CONSTRAIN, MESSAGE),
        ),
        Markup(
            "gemma",
            "fields",
            {FIELDS: "fields", **_TAGGED},
            reasoning=((THOUGHT, CHANNEL_END),),
            inner=(TAG_END, FIELDS_END, QUOTE, CHANNEL_BEGIN),
        ),
        Markup(
            "nemotron",
            "list",
            {NEMOTRON_BEGIN: "list", **_TAGGED},
            inner=(TAG_END, NEMOTRON_END),
            end=NEMOTRON_END,
        ),
        Markup(
            "granite",
            "list",
            {LIST_BEGIN: "list", **_TAGGED},
            inner=(TAG_END,),
        ),
        Markup(
            "phi",
            "list",
            {LIST_BEGIN: "list", **_TAGGED},
            inner=(TAG_END, LIST_END),
            end=LIST_END,
        ),
        Markup(
            "lfm",
            "python",
            {PYTHON_BEGIN: "python", **_TAGGED},
            inner=(TAG_END, PYTHON_END),
            end=PYTHON_END,
            reasoning_key="thinking",
        ),
        Markup(
            "generic",
            "object",
            {**_TAGGED, PYTHON_TAG: "objects", TOOL_CALLS: "list"},
            bare=True,
            inner=(TAG_END, *_BRACKETS),
        ),
    )
}

_SIGNS = (
    ("gemma", re.compile(re.escape(FIELDS))),
    ("lfm", re.compile(r"<\|tool_(?:call|list|response)_start\|>")),
    ("nemotron", re.compile(re.escape(NEMOTRON_BEGIN))),
    ("harmony", re.compile(re.escape(CHANNEL))),
    ("kimi", re.compile(re.escape(SECTION_BEGIN))),
    ("deepseek_inline", re.compile(rf"\A(?!.*```json).*{re.escape(CALLS_BEGIN)}", re.DOTALL)),
    ("deepseek", re.compile(re.escape(CALLS_BEGIN))),
    ("seed", re.compile(re.escape(SEED_TAG))),
    ("minimax", re.compile(re.escape(MINIMAX_TAG))),
    ("glm_inline", re.compile(re.escape(KEY_END + VALUE))),
    ("glm", re.compile(re.escape(KEY))),
    ("xml", re.compile(r"<function=|<parameter=")),
    ("hermes", re.compile(re.escape(TAG))),
    ("mistral", re.compile(r"\[TOOL_CALLS\]|\[AVAILABLE_TOOLS\]")),
    ("llama", re.compile(r"<\|python_tag\|>|<\|start_header_id\|>")),
)
_TOKENS = (  # of a vocabulary, where the template shows no sign: the first that it has tells
    (SECTION_BEGIN, "kimi"),
    (PYTHON_BEGIN, "lfm"),
    (MINIMAX_TAG, "minimax"),
    (TAG, "hermes"),
    (TOOL_CALLS, "mistral"),
    (PYTHON_TAG, "llama"),
    (CHANNEL, "harmony"),
    (FIELDS, "gemma"),
    (LIST_END, "phi"),
    (LIST_BEGIN, "granite"),
)


def numbered_name(head: str) -> str:
    """The name of the tool in functions.NAME:NUMBER, of which the name alone need be there."""
    return _NUMBER.sub("", head.strip().removeprefix(FUNCTIONS))


def tool_of(recipient: str) -> str:
    """The tool that a message of Harmony is for; "" if it is for none."""
    return "" if recipient in _NO_TOOLS else recipient.removeprefix(FUNCTIONS)


def markup_of(template: str, has_token: Callable[[str], bool]) -> Markup:
    """The markup of a model, by its chat template, then by special tokens of its vocabulary."""
    for name, sign in _SIGNS:
        if sign.search(template):
            return MARKUPS[name]
    for token, name in _TOKENS:
        if has_token(token):
            return MARKUPS[name]
    return MARKUPS["generic"]
