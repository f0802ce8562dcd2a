"""Chat templates: their variables, and the limits of a faulty or hostile one.

Every hostile template must end in one named error within its limits, and the same object must
serve the next request.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchengine.core import BatchEngineError, Kind
from batchengine.text.frontend import TextFrontend
from batchengine.text.messages import prepare_messages
from batchengine.text.pool import TextLimits, TextWorker
from batchengine.text.renderer import CHATML, Renderer
from batchengine.text.vocab import TEXT_BYTES_MAX

USER: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
# Small limits keep hostile cases short; the address space must still hold an interpreter.
TIGHT = TextLimits(cpu_s=1, memory_bytes=256 << 20, output_chars_max=1 << 20)


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
START_CPU_S = 4.0  # of an interpreter with the model's vocabulary, on a slow machine


def children_cpu_s() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Template:
    """A chat template in a text process of its own; renders to the text of the tokens."""

    def __init__(self, path: Path, source: str | None, limits: TextLimits) -> None:
        self._runner = asyncio.Runner()
        today = datetime.date(2026, 2, 3)
        opening = TextFrontend.open(path, template=source, limits=limits, today=today)
        self.text = self._runner.run(opening)

    def render(
        self,
        messages: list[dict[str, object]],
        tools: list[dict[str, object]] | None = None,
        variables: dict[str, object] | None = None,
    ) -> str:
        tokens = self._runner.run(self.text.encode_chat(messages, tools, variables))
        return b"".join(map(self.text.piece, tokens)).decode()

    def encode(self, text: str) -> list[int]:
        return self._runner.run(self.text.encode(text))

    @property
    def worker(self) -> TextWorker:
        return max(self.text._pool._all, key=lambda worker: worker.is_running)

    def close(self) -> None:
        self._runner.run(self.text.close())
        self._runner.close()


@pytest.fixture
def make(pocket_path: Path) -> Iterator[Callable[..., Template]]:
    made: list[Template] = []

    def build(source: str | None, limits: TextLimits = TIGHT) -> Template:
        made.append(Template(pocket_path, source, limits))
        return made[-1]

    yield build
    for template in made:
        template.close()


def run(template: Template, messages: list[dict[str, object]] = USER, **variables: object) -> str:
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    return template.render(messages, None, {**specials, **variables})


# --- variables of a template ---------------------------------------------------------------------


def test_the_default_template_is_chatml_and_is_reported(
    pocket_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    bare = tmp_path / "bare.gguf"
    key = b"tokenizer.chat_template"
    data = pocket_path.read_bytes()
    assert data.count(key) == 1
    bare.write_bytes(data.replace(key, b"tokenizer.chat_nothing_"))
    for path, source, warnings in ((bare, None, 1), (bare, CHATML, 0), (pocket_path, None, 0)):
        caplog.clear()
        template = Template(path, source, TIGHT)
        try:
            assert run(template) == wanted
        finally:
            template.close()
        assert len([r for r in caplog.records if "using ChatML" in r.message]) == warnings


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ messages[0].content }}{{ bos_token }}{{ eos_token }}", "hi<s></s>"),
        ("{% if tools is none %}no tools{% endif %}", "no tools"),
        ("{% for x in [1] %}\n  {% if x %}\n  a\n  {% endif %}\n{% endfor %}", "  a\n"),
        ("{{ strftime_now('%d %b %Y') }}", "03 Feb 2026"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("a{% generation %}{{ messages[0].content }}{% endgeneration %}b", "ahib"),
        ("{{ messages[0].content.upper().strip() }}{{ 'a-b'.split('-')[1] }}", "HIb"),
        ("{{ lipsum is defined }}{{ cycler is defined }}{{ self is defined }}", "FalseFalseTrue"),
    ],
)
def test_supported_template_features_render(
    make: Callable[..., Template], source: str, wanted: str
) -> None:
    assert run(make(source)) == wanted


def test_json_is_written_as_transformers_does(make: Callable[..., Template]) -> None:
    value = {"b": "<é>&'\"", "a": [1, 2.5, None, True], "deep": {"x": "\n"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": value}}
    template = make("{{ tools[0] | tojson }}")
    assert template.render(USER, [tool]) == json.dumps(tool, ensure_ascii=False)
    indented = make("{{ tools[0] | tojson(indent=2) }}")
    assert indented.render(USER, [tool]) == json.dumps(tool, ensure_ascii=False, indent=2)


def test_allowed_variables_reach_the_template(make: Callable[..., Template]) -> None:
    template = make("{{ enable_thinking }} {{ reasoning_effort }} {{ add_generation_prompt }}")
    assert run(template, enable_thinking=False, reasoning_effort="low") == "False low True"
    assert run(template, add_generation_prompt=False) == "  False"
    assert run(make("{{ messages | length }}{{ tools is none }}"), tools=[1]) == "1True"


# --- requests that are refused ------------------------------------------------------------------


def test_a_tool_call_without_a_name_is_refused() -> None:
    for call in ({"function": {}}, {"function": "f"}, {"function": {"name": 1}}, {}):
        messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        with pytest.raises(BatchEngineError) as caught:
            prepare_messages(messages)
        assert caught.value.kind is Kind.INVALID
        assert caught.value.param == "messages[1].tool_calls[0]"


def test_tool_calls_are_converted_to_the_form_that_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    torn = {"type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    assistant, tool, idle = prepare_messages(
        [
            {"role": "assistant", "content": "", "tool_calls": [call, torn]},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "assistant", "content": "", "tool_calls": []},
        ]
    )
    calls: Any = assistant["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == [{"a": 1}, '{"a": ']
    assert calls[0]["id"] == "1"
    assert tool == {"role": "tool", "content": "3", "tool_call_id": "1"}
    assert "tool_calls" not in idle


def test_a_template_may_refuse_a_request(make: Callable[..., Template]) -> None:
    template = make("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BatchEngineError, match="roles must alternate") as caught:
        run(template)
    assert (caught.value.code, caught.value.kind) == ("BE1515", Kind.INVALID)


def test_lone_surrogates_and_huge_messages_are_refused(make: Callable[..., Template]) -> None:
    template = make("{{ messages[0].content }}", TIGHT)
    for content in ("\ud800", "x" * TEXT_BYTES_MAX):
        with pytest.raises(BatchEngineError) as caught:
            run(template, [{"role": "user", "content": content}])
        assert caught.value.kind is Kind.INVALID
    assert run(template) == "hi"


# --- hostile templates ------------------------------------------------------------------------

# Each attack runs for the message of its name only: the same template must serve the next one.
ATTACKS = {
    "endless loop": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "BE1513",
    ),
    "endless power": ("{{ (messages | length + 9) ** (10 ** 10) }}", "BE1513"),
    "1 GB by repetition": ("{{ messages[0].content * 250000000 }}", "BE1513"),
    "1 GB by pieces": (
        "{% for a in range(99999) %}{{ '%01000d' | format(a) }}{% endfor %}",
        "BE1513",
    ),
    "1 GB by padding": ("{{ '%1000000000d' | format(messages | length) }}", "BE1513"),
    "memory by lists": (
        "{% set n = namespace(l=[1]) %}{% for a in range(60) %}{% set n.l = n.l + n.l %}"
        "{% endfor %}",
        "BE1513",
    ),
    "endless recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "BE1512"),
    "class walk": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "BE1512"),
    "class walk by format": ("{{ '{0.__class__.__init__.__globals__}'.format(range) }}", "BE1512"),
    "class walk by attr": ("{{ '' | attr('__class__') }}", "BE1512"),
    "generator frames": ("{{ (messages | map('upper')).gi_frame.f_globals }}", "BE1512"),
    "function globals": ("{{ raise_exception.__globals__['os'].system('true') }}", "BE1512"),
    "environment": ("{{ self._TemplateReference__context.environment }}", "BE1512"),
    "include": ("{% include '/etc/passwd' %}", "BE1512"),
    "mutation": ("{{ messages.clear() }}", "BE1512"),
    "mutation of a value": ("{{ messages.append(1) }}{{ messages[0].clear() }}", "BE1512"),
    "mutation by another name": ("{% set f = messages.append %}{{ f(1) }}", "BE1512"),
    "huge range": ("{{ range(10 ** 12) | length }}", "BE1512"),
    "undefined": ("{{ nothing.here.at_all }}", "BE1512"),
    "lone surrogate": ("{{ '\\ud800' }}", "BE1512"),
}


# Those that end the process have a template each, and so does the one that a call of `append`
# beside it would permit.
ALONE = [
    name
    for name, (_, code) in ATTACKS.items()
    if code == "BE1513" or name == "mutation by another name"
]
TOGETHER = [name for name in ATTACKS if name not in ALONE]


@pytest.mark.parametrize("names", [*([name] for name in ALONE), TOGETHER])
def test_a_hostile_template_fails_one_request_only(
    make: Callable[..., Template], names: list[str]
) -> None:
    parts = "".join(
        "{% elif messages[0].content == '" + name + "' %}" + ATTACKS[name][0] for name in names
    )
    template = make("{% if messages[0].content == 'hi' %}fine" + parts + "{% endif %}")
    assert run(template) == "fine"
    for name in names:
        before_s = children_cpu_s()
        with pytest.raises(BatchEngineError) as caught:
            run(template, [{"role": "user", "content": name}])
        code = caught.value.code, caught.value.kind
        assert code == (ATTACKS[name][1], Kind.INTERNAL), f"{name}: {caught.value}"
        assert children_cpu_s() - before_s < 2 * START_CPU_S + TIGHT.cpu_s + 1
        assert "/etc" not in str(caught.value) or name == "include"
        assert run(template) == "fine"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for %}", "line 1"),
        ("{% if x %}", "line 1"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ""),
    ],
    ids=["syntax", "unclosed", "nesting"],
)
def test_templates_that_do_not_compile_are_refused(
    make: Callable[..., Template], source: str, why: str
) -> None:
    template = make(source)
    for _ in range(3):
        with pytest.raises(BatchEngineError) as caught:
            run(template)
        assert (caught.value.code, caught.value.kind) == ("BE1511", Kind.INTERNAL)
        assert why in str(caught.value)


def test_a_template_whose_compilation_never_ends_costs_only_chats(
    make: Callable[..., Template],
) -> None:
    template = make("{{ 10 ** (10 ** 10) }}")
    for _ in range(2):
        with pytest.raises(BatchEngineError, match="more processor time") as caught:
            run(template)
        assert caught.value.code == "BE1513"
        assert template.encode("the") != []


# --- the process --------------------------------------------------------------------------------


def test_a_killed_child_is_replaced(make: Callable[..., Template]) -> None:
    template = make("{{ messages[0].content }}")
    assert run(template) == "hi"
    first = template.worker.pid
    os.kill(first, signal.SIGKILL)
    for _ in range(3):
        assert run(template) == "hi"
    assert template.worker.pid != first


def test_one_child_serves_many_requests(make: Callable[..., Template]) -> None:
    template = make("{{ messages[0].content }}")
    run(template)
    first = template.worker.pid
    for number in range(50):
        text = f"{number} " * number * 50
        assert run(template, [{"role": "user", "content": text}]) == text
    assert template.worker.pid == first


def test_the_child_is_confined(
    make: Callable[..., Template], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "s3cr3t-value")
    template = make("{{ messages[0].content }}")
    run(template)
    template.encode("x")
    proc = Path("/proc") / str(template.worker.pid)
    assert b"s3cr3t-value" not in (proc / "environ").read_bytes()
    lines = (proc / "limits").read_text().splitlines()
    limits = {line[:26].strip(): line[26:].split()[0] for line in lines}
    assert 1 << 30 < int(limits["Max address space"]) < 4 << 30
    assert (limits["Max file size"], limits["Max processes"]) == ("0", "0")
    assert limits["Max open files"] == "3"
    assert int(limits["Max cpu time"]) < 200
    status = (proc / "status").read_text()
    assert "NoNewPrivs:\t1" in status
    links = {os.readlink(link) for link in (proc / "fd").iterdir()}
    assert len([link for link in links if link.startswith("socket:")]) == 1


def test_the_child_ends_with_its_parent(pocket_path: Path) -> None:
    code = (
        "import asyncio, os, signal; from batchengine.text.frontend import TextFrontend\n"
        "async def main():\n"
        f"    text = await TextFrontend.open({str(pocket_path)!r})\n"
        "    await text.encode('x')\n"
        "    print(max(w.pid for w in text._pool._all), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    stat = Path("/proc") / done.stdout.strip() / "stat"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        # Where no process reaps it, a zombie stays; the child has ended.
        if not stat.exists() or stat.read_text().rsplit(") ", 1)[1][0] == "Z":
            return
        time.sleep(0.02)
    pytest.fail("the child outlived its parent")


def test_the_import_loads_few_modules() -> None:
    code = "import sys, batchengine.text.frontend; assert 'jinja2' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_warm_rendering_is_fast(make: Callable[..., Template]) -> None:
    template = make(None)
    run(template)
    times: list[float] = []
    for _ in range(100):
        started = time.perf_counter()
        run(template)
        times.append(time.perf_counter() - started)
    # 0.1 ms on an idle core; the bound allows for a loaded machine.
    assert statistics.median(times) < 0.01


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ messages[0].content }}", ""),
        ("{% if %}", "does not compile: line 1"),
        ("{{ raise_exception('no') }}", "refuses these messages: no"),
        ("{{ messages.content.x }}", "failed"),
        ("{% set a = 1 %}", "an empty prompt"),
        ("{{ messages[0].text }} is asked", "does not show what a user writes"),
        ("{{ messages[0].content[0].text }}", ""),
        (ENDLESS, "was stopped: its process used more processor time"),
    ],
)
async def test_a_template_that_no_chat_can_use_is_found_by_the_shortest_chat(
    pocket_path: Path, source: str, why: str
) -> None:
    text = await TextFrontend.open(pocket_path, template=source, limits=TIGHT)
    try:
        found = await text.template_fault()
    finally:
        await text.close()
    assert why in found
    assert bool(found) == bool(why)


def test_lists_that_a_template_changes_are_copies() -> None:
    source = "{% set _ = messages.append(messages.pop(0)) %}{{ messages[0].content }}"
    renderer = Renderer(source, datetime.date(2026, 2, 3), 1 << 20)
    chat = {"messages": [{"role": "user", "content": content} for content in "ab"]}
    assert [renderer.render(chat) for _ in range(2)] == ["b", "b"]
    assert [one["content"] for one in chat["messages"]] == ["a", "b"]
