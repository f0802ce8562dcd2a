"""The routes about the model, and those by which clients of llama-server probe it."""

from __future__ import annotations

import datetime

from aiohttp import web

import batchengine
from batchengine import errors
from batchengine.core import ModelInfo
from batchengine.markup import CHANNEL
from service.engine_api import check_serving
from service.http.admission import CALLER, SERVICE, Service
from service.http.answers import json_answer
from service.http.routes.route import Route
from service.protocols import carriers
from service.protocols.messages.protocol import VERSION
from service.session_ids import printable

THINKING = ("enable_thinking", "reasoning_effort")  # variables of templates of such models
SEATS_SHOWN = 200  # whose requests are named


def _row(service: Service, name: str) -> dict[str, object]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": info.created,
        "owned_by": "batchengine",
        "context_length": info.context_tokens,
        "max_model_len": info.context_tokens,
        "meta": {
            "n_ctx": info.context_tokens,
            "n_ctx_train": info.context_trained,
            "n_params": info.n_params,
            "n_vocab": info.vocab_size,
            "size": info.file_bytes,
            "architecture": info.arch,
            "quantisation": info.quantisation,
        },
        "capabilities": _capabilities(info),
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "status": {"value": "loaded"},
        "class": str(carriers.alias_class(name) or service.config.sla.default_class),
    }


def _described(service: Service, name: str) -> dict[str, object]:
    """The row of a model as Anthropic's SDK reads it."""
    info = service.engine.info
    created = datetime.datetime.fromtimestamp(info.created, datetime.UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": info.context_tokens,
        "max_tokens": info.context_tokens,
    }


def _page(request: web.Request, names: list[str]) -> dict[str, object]:
    """The page of models that the query asks for, as Anthropic's SDK reads it."""
    limit = request.query.get("limit", "20")
    if not (limit.isascii() and limit.isdecimal() and 1 <= len(limit) <= 4 and int(limit)):
        what = "limit has a wrong value"
        raise errors.INVALID_FIELD(param="limit", what=what, fix="send 1 to 1000, or leave it out")
    after, before = request.query.get("after_id"), request.query.get("before_id")
    if after in names:
        names = names[names.index(after) + 1 :]
    if before in names:
        names = names[: names.index(before)]
        shown = names[-int(limit) :]
    else:
        shown = names[: int(limit)]
    return {
        "data": [_described(request.app[SERVICE], name) for name in shown],
        "has_more": len(shown) < len(names),
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }


def _served(service: Service) -> list[str]:
    if service.engine.phase == "loading":
        raise errors.LOADING(progress=service.engine.progress)
    return carriers.model_names(service.engine.info.model_id, service.config.model.aliases)


async def _models(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    names = _served(service)
    if VERSION in request.headers:
        return json_answer(_page(request, names))
    rows = [_row(service, name) for name in names]
    return json_answer({"object": "list", "data": rows})


async def _model(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    asked = request.match_info["model"]
    names = _served(service)
    if asked not in names:
        asked = printable(asked)
        raise errors.UNKNOWN_MODEL(asked=asked, served=", ".join(names))
    describe = _described if VERSION in request.headers else _row
    return json_answer(describe(service, asked))


def _seats(service: Service) -> list[tuple[str, int]]:
    """(lane, sessions that it computes at a time) of each lane."""
    return [(lane.name, lane.entries_max) for lane in service.config.lanes]


def _template_features(info: ModelInfo) -> dict[str, bool]:
    """What chats can hold; calls of tools are parsed in every markup."""
    has_tools = info.template_reads("tools")
    has_channels = CHANNEL in f"{info.chat_template}{info.tool_template}"  # one call of an answer
    return {
        "supports_system_role": bool(info.chat_template),
        "supports_string_content": True,
        "supports_typed_content": True,
        "supports_tools": has_tools,
        "supports_tool_calls": has_tools,
        "supports_parallel_tool_calls": has_tools and not has_channels,
        "supports_reasoning_effort": info.template_reads("reasoning_effort"),
    }


def _capabilities(info: ModelInfo) -> list[str]:
    """What the model is served for, by the names of Ollama and LM Studio."""
    return [
        "completion",
        *(["chat"] if info.chat_template else []),
        *(["tools"] if info.template_reads("tools") else []),
        *(["thinking"] if any(map(info.template_reads, THINKING)) else []),
    ]


async def _props(request: web.Request) -> web.Response:
    """The properties that llama-server clients read: context size and template features."""
    service = request.app[SERVICE]
    _served(service)
    info = service.engine.info
    tokens_max = service.config.answer_tokens_max or -1  # -1: the rest of the context
    return json_answer(
        {
            "default_generation_settings": {
                "n_ctx": info.context_tokens,
                "params": {
                    "max_tokens": tokens_max,
                    "n_predict": tokens_max,
                    "temperature": 1.0,
                    "top_p": 1.0,
                },
            },
            "total_slots": sum(count for _, count in _seats(service)),
            "model_alias": info.model_id,
            "model_path": info.path.rpartition("/")[2],  # the name, not where it lies
            "modalities": {"vision": False, "audio": False},
            "chat_template": info.chat_template,
            **({"chat_template_tool_use": info.tool_template} if info.tool_template else {}),
            "chat_template_caps": _template_features(info),
            "endpoint_slots": True,
            "endpoint_props": False,  # nothing can be changed
            "endpoint_metrics": True,
            "is_sleeping": False,
            "build_info": f"batchengine {batchengine.__version__}",
            "system_fingerprint": info.fingerprint,
        }
    )


async def _slots(request: web.Request) -> web.Response:
    """One row per seat of each lane; of the requests in them only the caller's own are named."""
    service, tenant = request.app[SERVICE], request[CALLER].tenant
    check_serving(service.engine)
    seated = {str(lane["name"]): int(lane.get("running", 0)) for lane in service.engine.lanes()}
    own = service.request_rows(tenant, SEATS_SHOWN)
    rows: list[dict[str, object]] = []
    for lane, count in _seats(service):
        named = [row for row in own if row.get("lane") == lane and row.get("position") is None]
        for seat in range(count):
            row: dict[str, object] = {
                "id": len(rows),
                "lane": lane,
                "n_ctx": service.engine.info.context_tokens,
                "speculative": False,
                "is_processing": seat < seated.get(lane, 0),
            }
            if seat < min(len(named), seated.get(lane, 0)):
                found = named[seat]
                row |= {
                    "id_task": found["request_id"],
                    "session_id": found.get("session_id"),
                    "n_prompt_tokens": found.get("prompt_tokens", 0),
                    "n_prompt_tokens_cache": found.get("cached_tokens", 0),
                    "next_token": [{"n_decoded": found.get("completion_tokens", 0)}],
                }
            rows.append(row)
    return json_answer(rows)


async def _hello(request: web.Request) -> web.Response:
    """What Claude Code asks for before its first request."""
    return json_answer({})


async def _version(request: web.Request) -> web.Response:
    """The program's version and, once it is loaded, what the answers are a function of."""
    engine = request.app[SERVICE].engine
    found: dict[str, object] = {"version": batchengine.__version__}
    if engine.phase != "loading":
        info = engine.info
        found |= {
            "model": info.model_id,
            "system_fingerprint": info.fingerprint,
            "arith_id": info.arith_id,
            "model_hash": info.model_hash,
        }
    return json_answer(found)


ROUTES = (
    Route("GET", "/v1/models", _models, "The model under each of its names.", "models"),
    Route("GET", "/models", _models, "The same, without the prefix.", "models"),
    Route("GET", "/v1/models/{model:.+}", _model, "The model under one name.", "models"),
    Route("GET", "/props", _props, "Context size and capabilities, as llama-server.", "models"),
    Route("GET", "/slots", _slots, "The seats of all lanes, as llama-server.", "operation"),
    Route("GET", "/api/hello", _hello, "200 = the daemon answers.", "operation"),
    Route("GET", "/version", _version, "Version, arithmetic and model.", "operation"),
)
