"""What was promised to a request: class, targets and priority out of eight possible carriers.

For each value the first carrier of API 1.6 that sets it wins. Model aliases carry a class for
clients that can set nothing else, and are rows of /v1/models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from multidict import CIMultiDictProxy

from batchengine.config import Config
from batchengine.core import Sla, SlaClass
from service import errors
from service.auth import Caller
from service.schema import ChatRequest, CompletionRequest, binary32

Body = ChatRequest | CompletionRequest

ALIAS_CLASSES = (SlaClass.INTERACTIVE, SlaClass.BACKGROUND, SlaClass.BATCH)
MILLIS_MAX = 86_400_000.0
PRIORITY_MAX = 1 << 31

# service_tier -> class; None = whatever the key or the configuration says
TIERS: dict[str, SlaClass | None] = {
    "priority": SlaClass.INTERACTIVE,
    "fast": SlaClass.INTERACTIVE,
    "ultrafast": SlaClass.INTERACTIVE,
    "auto": None,
    "default": None,
    "standard": None,
    "scale": None,
    "standard_only": SlaClass.STANDARD,
    "flex": SlaClass.BACKGROUND,
    "batch": SlaClass.BATCH,
}
SERVED_TIER = {
    SlaClass.INTERACTIVE: "priority",
    SlaClass.STANDARD: "default",
    SlaClass.BACKGROUND: "flex",
    SlaClass.BATCH: "flex",
}
HEADER_CLASS = "x-llm-d-inference-objective"
HEADERS_TTFT = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
HEADERS_TPOT = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
HEADERS_TTLT = ("x-batchengine-ttlt-ms",)
HEADERS_PRIORITY = ("x-dynamo-request-priority", "x-dynamo-request-strict-priority")


def model_names(model_id: str, aliases: tuple[str, ...]) -> list[str]:
    """Every id that /v1/models lists: the model, its aliases, and each with its class suffixes."""
    names: list[str] = []
    for name in dict.fromkeys((model_id, *aliases)):
        names.append(name)
        names.extend(f"{name}:{sla_class}" for sla_class in ALIAS_CLASSES)
    return names


def alias_class(model: str | None) -> SlaClass | None:
    """The class in a model id such as `qwen:background`."""
    suffix = (model or "").rpartition(":")[2]
    return next((c for c in ALIAS_CLASSES if suffix == c and model != suffix), None)


def resolve(body: Body, headers: CIMultiDictProxy[str], caller: Caller, config: Config) -> Sla:
    """The SLA of one request; raises 400 naming the carrier that holds nonsense."""
    extension = body.batchengine
    sla_class = next(
        _classes(body, headers, caller),
        config.sla.default_class,
    )
    ttft = extension.ttft_ms if extension else None
    tpot = extension.tpot_ms if extension else None
    ttlt = extension.ttlt_ms if extension else None
    return Sla(
        sla_class=sla_class,
        ttft_ms=_target(ttft, headers, HEADERS_TTFT),
        tpot_ms=_target(tpot, headers, HEADERS_TPOT),
        ttlt_ms=_target(ttlt, headers, HEADERS_TTLT),
        priority=next(_priorities(body, headers), 0),
    )


def _classes(body: Body, headers: CIMultiDictProxy[str], caller: Caller) -> Iterator[SlaClass]:
    """Classes in order of precedence; generated lazily, so a later carrier is not even parsed."""
    if body.batchengine is not None and body.batchengine.sla_class is not None:
        yield _class_of(body.batchengine.sla_class, "batchengine.class")
    if HEADER_CLASS in headers:
        yield _class_of(headers[HEADER_CLASS], HEADER_CLASS)
    if body.service_tier is not None:
        tier = body.service_tier
        if tier not in TIERS:
            raise errors.invalid_field(
                "service_tier",
                f"service_tier {tier[:40]!r} is unknown",
                fix="use one of " + ", ".join(TIERS),
            )
        if (mapped := TIERS[tier]) is not None:
            yield mapped
    if body.speed == "fast":
        yield SlaClass.INTERACTIVE
    if (alias := alias_class(body.model)) is not None:
        yield alias
    if caller.sla_class is not None:
        yield caller.sla_class


def _class_of(text: str, param: str) -> SlaClass:
    name = text.strip().lower()
    if name not in set(SlaClass):
        raise errors.invalid_field(
            param, f"{param} {name[:40]!r} is unknown", fix="use one of " + ", ".join(SlaClass)
        )
    return SlaClass(name)


def _target(
    given: float | None, headers: CIMultiDictProxy[str], names: tuple[str, ...]
) -> float | None:
    if given is not None:
        return binary32(given)
    for name in names:
        if name in headers:
            return binary32(_number(headers[name], name, 0.001, MILLIS_MAX))
    return None


def _priorities(body: Body, headers: CIMultiDictProxy[str]) -> Iterator[int]:
    """Higher = sooner. The top-level field has vLLM's polarity and is turned around."""
    if body.batchengine is not None and body.batchengine.priority is not None:
        yield body.batchengine.priority
    hints = body.nvext.agent_hints if body.nvext else None
    if hints is not None:
        for value in (hints.priority, hints.strict_priority):
            if value is not None:
                yield value
    for name in HEADERS_PRIORITY:
        if name in headers:
            yield int(_number(headers[name], name, -PRIORITY_MAX, PRIORITY_MAX))
    if body.priority is not None:
        yield -body.priority


def _number(text: str, param: str, low: float, high: float) -> float:
    try:
        value = float(text) if len(text) <= 32 and text.isascii() else math.nan
    except ValueError:
        value = math.nan
    if not low <= value <= high:  # also refuses NaN
        raise errors.invalid_field(
            param,
            f"{param} has a wrong value",
            why=f"expected a number from {low:g} to {high:g}",
            fix=f"correct the header {param} or leave it out",
        )
    return value
