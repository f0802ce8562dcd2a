"""The table of HTTP protocols, from which the application makes its generation routes.

Each route under /v1 has an alias without it, as llama-server has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.protocols.messages.protocol import MESSAGES, VERSION
from service.protocols.openai.chat import CHAT
from service.protocols.openai.completions import COMPLETIONS
from service.protocols.protocol import Protocol
from service.protocols.responses.responses import RESPONSES

PROTOCOLS: tuple[Protocol[Any], ...] = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
BY_NAME = {protocol.name: protocol for protocol in PROTOCOLS}


def _with_aliases(routes: dict[str, Protocol[Any]]) -> dict[str, Protocol[Any]]:
    return routes | {path.removeprefix("/v1"): protocol for path, protocol in routes.items()}


BY_ROUTE = _with_aliases({route: one for one in PROTOCOLS for route in one.routes})
BY_COUNT_ROUTE = _with_aliases({one.count_route: one for one in PROTOCOLS if one.count_route})


def protocol_of(path: str, headers: Mapping[str, str]) -> Protocol[Any]:
    """The protocol whose error object answers on `path`; of other paths that of the SDK that asks,
    if it says so, else OpenAI's."""
    other = MESSAGES if VERSION in headers else CHAT
    return BY_ROUTE.get(path) or BY_COUNT_ROUTE.get(path) or other
