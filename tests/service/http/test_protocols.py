"""The protocol table: output parsers, event names, fan-in, and streams compared byte by byte."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from batchengine import errors
from batchengine.core import (
    DoneEvent,
    ErrorEvent,
    GenerationRequest,
    TokenEvent,
    Usage,
)
from service.http import relay, sse
from service.protocols import requests
from service.protocols.formatter import EventIds, Formatter, SseEvent
from service.protocols.openai.chat import ChatFormatter
from service.protocols.openai.completions import CompletionFormatter
from service.protocols.openai.envelope import serving_object
from service.protocols.output import PlainText, Text
from service.protocols.table import BY_NAME, BY_ROUTE
from tests.support.fake_engine import FakeEngine, chat, post, serving


def job_of(choices: int = 1) -> requests.HttpJob:
    made = [GenerationRequest(f"req_{i}", (1, 2), 4) for i in range(choices)]
    return requests.HttpJob(
        asked=made[0], model="m", created=7, stream=True, include_usage=False, route="cpu", seed=1,
        requests=made,
    )  # fmt: skip


class Splitter:
    """Text is held back until a full stop."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, text: str) -> list[Text]:
        self.held += text
        head, stop, self.held = self.held.rpartition(".")
        return [Text(part + ".") for part in head.split(".")] if stop else []

    def flush(self, *, is_cut: bool = False) -> list[Text]:
        return [Text(self.held)] if self.held else []


@pytest.mark.parametrize("formatter", [ChatFormatter, CompletionFormatter])
def test_text_passes_the_parser_before_the_formatter(
    formatter: Callable[[requests.HttpJob], Formatter],
) -> None:
    made = formatter(job_of())
    made.answers[0].parser = Splitter()
    assert made.token(0, TokenEvent(1, "a.b.")) != []
    assert made.token(0, TokenEvent(2, "c")) == []
    out = b"".join(event.data for event in made.finish(0, DoneEvent("stop", Usage(), "d")))
    assert b"cd" in out
    assert made.is_done
    whole = formatter(job_of())
    whole.answers[0].parser = Splitter()
    for event in (TokenEvent(1, "a.b."), TokenEvent(2, "c"), DoneEvent("stop", Usage(), "d")):
        whole.collect(0, event)
    assert b"a.b.cd" in b"".join(whole.whole())


@pytest.mark.parametrize(
    ("asked", "used", "seed"), [(1, None, 1), (-1, (1 << 64) - 1, -1), (1, 9, 9)]
)
def test_the_seed_is_that_of_the_answer(asked: int, used: int | None, seed: int) -> None:
    """Another one than asked for where an earlier attempt went on; the client's own spelling."""
    job = job_of()
    job.seed = asked
    answers = ChatFormatter(job).answers
    answers[0].usage = Usage(seed=used)
    assert serving_object(job, answers)["seed"] == seed


def test_parts_of_one_token_share_a_chat_chunk() -> None:
    made = ChatFormatter(job_of())
    made.answers[0].parser = Splitter()
    texts = [
        re.findall(rb'"content":"([^"]*)"', e.data) for e in made.token(0, TokenEvent(1, "a.b."))
    ]
    assert texts == [[b"a.b."]]


def test_plain_text_is_passed_on_at_once_and_never_empty() -> None:
    parser = PlainText()
    assert parser.push("a <think> b") == [Text("a <think> b")]
    assert parser.push("") == []
    assert parser.flush() == []


def test_event_blocks_have_name_id_and_data_in_this_order() -> None:
    events = [SseEvent(b"{}"), SseEvent(b"1", id="t:1"), SseEvent(b"2", "error", "t:2")]
    assert sse.encode(events) == (
        b"data: {}\n\nid: t:1\ndata: 1\n\nevent: error\nid: t:2\ndata: 2\n\n"
    )
    assert sse.encode([]) == b""


def test_event_ids_begin_with_the_first_token() -> None:
    made = ChatFormatter(job_of())
    made.ids = EventIds(4, lambda: "turn")
    assert [event.id for event in made.opening()] == [""]
    assert made.noop()[0].id == ""
    assert made.token(0, TokenEvent(1, "")) == []
    assert made.token(0, TokenEvent(1, "x"))[0].id == "turn:6"
    closing = made.finish(0, DoneEvent("stop", Usage()))
    assert [event.id for event in closing] == ["turn:6.1", ""]
    assert closing[-1].data == b"[DONE]"
    assert made.failure(errors.STEP_MISMATCH(what="digests"))[0][1:] == ("error", "")


def test_only_the_last_choice_ends_the_stream() -> None:
    made = ChatFormatter(job_of(2))
    first = made.finish(1, DoneEvent("stop", Usage()))
    assert (len(first), made.is_done) == (1, False)
    assert b"batchengine" not in first[0].data
    last = made.finish(0, DoneEvent("length", Usage()))
    assert b'"batchengine"' in last[0].data
    assert last[1].data == b"[DONE]"


def test_every_row_is_found_by_name_and_route() -> None:
    assert {"chat", "text", "responses", "messages"} == set(BY_NAME)  # stored turns contain these
    versioned = {path for path in BY_ROUTE if path.startswith("/v1/")}
    routes = ("chat/completions", "completions", "responses", "messages")
    assert versioned == {f"/v1/{route}" for route in routes}
    assert BY_ROUTE["/v1/completions"] is BY_NAME["text"]


class Batches:
    """A generation that has one batch after the other ready."""

    request_id = "req_1"

    def __init__(self, *batches: list[Any] | Exception) -> None:
        self.batches = list(batches)
        self.is_cancelled = False

    async def events(self) -> list[Any]:
        await asyncio.sleep(0)
        if not self.batches:
            await asyncio.sleep(3600)
        found = self.batches.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize("count", [1, 3])
async def test_sources_keep_batches_together_and_end_with_one_last_event(count: int) -> None:
    token, done = TokenEvent(1, "x"), DoneEvent("stop", Usage())
    refusal = errors.STEP_MISMATCH(what="digests")

    async def everything(*batches: Any) -> dict[int, list[Any]]:
        generations: Any = [Batches(*batches) for _ in range(count)]
        source = relay.source_of(generations)
        found: dict[int, list[Any]] = {index: [] for index in range(count)}
        while not all(e and isinstance(e[-1], DoneEvent | ErrorEvent) for e in found.values()):
            for index, event in await source.next(5.0):
                found[index].append(event)
        assert await source.next(0.01) == []
        source.close()
        assert all(generation.is_cancelled for generation in generations)
        return found

    assert await everything([token, token], [token, done]) == {
        index: [token, token, token, done] for index in range(count)
    }
    for fault, code in (
        (refusal, refusal.code),
        (RuntimeError("secret"), "BE1719"),
        ([], "BE1724"),
    ):
        for events in (await everything([token], fault)).values():
            assert events[0] is token
            assert (len(events), events[1].error.code) == (2, code)


async def test_a_schema_that_is_refused_is_named_by_the_field_of_its_protocol() -> None:
    schema = {"type": "wat"}
    form = {"type": "json_schema", "name": "x", "schema": schema}
    hi = [{"role": "user", "content": "hi"}]
    chat_form = {"type": "json_schema", "json_schema": form}
    async with serving() as served:
        wrong = errors.GRAMMAR_REFUSED(why="wat")
        with mock.patch.object(served.engine.text, "check", side_effect=wrong):
            for path, body, param in (
                ("chat/completions", {"response_format": chat_form}, "response_format"),
                ("responses", {"text": {"format": form}, "input": "x"}, "text.format"),
                ("messages", {"output_config": {"format": form}}, "output_config.format"),
            ):
                body = body if "input" in body else {**body, "messages": hi, "max_tokens": 5}
                status, answer, _ = await post(served, f"/v1/{path}", body)
                assert (status, answer["error"]["param"]) == (400, param)


async def test_one_choice_needs_no_task_of_its_own() -> None:
    engine = FakeEngine(delay_s=0.2)
    async with serving(engine) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true, "n": %d}'
        counts: list[int] = []
        for choices in (1, 2):
            data = body % choices
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
            )
            await reader.readuntil(b"\r\n\r\n")
            names = [task.get_coro() for task in asyncio.all_tasks()]
            counts.append(sum("_pump" in repr(coro) for coro in names))
            await reader.readuntil(b"data: [DONE]\n\n")
            await reader.readuntil(b"0\r\n\r\n")
        writer.close()
        assert counts == [0, 2]


async def test_streams_equal_the_recorded_bytes() -> None:
    """The chunks of both protocols, with the fields that vary replaced."""

    async def stream(served: Any, path: str, body: dict[str, Any]) -> str:
        import aiohttp

        async with (
            aiohttp.ClientSession() as client,
            client.post(served.base + path, json=body) as reply,
        ):
            text = await reply.text()
        text = re.sub(r"req_[0-9a-f]+", "REQ", text)
        text = re.sub(r'"id":"(chatcmpl|cmpl)-[0-9a-f]+"', r'"id":"\1"', text)
        text = re.sub(r'"created":\d+', '"created":0', text)
        return re.sub(r'"timings":.*\}', "FACTS", text)

    async with serving(FakeEngine(["a", "", "b"])) as served:
        fingerprint = '"system_fingerprint":"be-fadefadefade-cafecafecafe"'
        head = (
            '{"id":"chatcmpl","object":"chat.completion.chunk","created":0,"model":"fake",'
            + fingerprint
        )
        chunk = 'data: %s,"choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s}]'
        whole = await stream(served, "/v1/chat/completions", chat(stream=True, session_id="s"))
        assert whole == (
            chunk % (head, '{"role":"assistant","content":""}', "null") + "}\n\n"
            "id: REQ:1\n" + chunk % (head, '{"content":"a"}', "null") + "}\n\n"
            "id: REQ:3\n" + chunk % (head, '{"content":"b"}', "null") + "}\n\n"
            "id: REQ:3.1\n" + chunk % (head, "{}", '"stop"') + ",FACTS\n\n"
            "data: [DONE]\n\n"
        )
        head = '{"id":"cmpl","object":"text_completion","created":0,"model":"fake",' + fingerprint
        chunk = 'data: %s,"choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":%s}]'
        body = {"prompt": "x", "stream": True}
        assert await stream(served, "/v1/completions", body) == (
            chunk % (head, "", "null") + "}\n\n" + chunk % (head, "a", "null") + "}\n\n"
            + chunk % (head, "b", "null") + "}\n\n" + chunk % (head, "", '"stop"')
            + ",FACTS\n\ndata: [DONE]\n\n"
        )  # fmt: skip
