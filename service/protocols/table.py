"""The table of HTTP protocols, from which the application makes its generation routes."""

from __future__ import annotations

from typing import Any

from service.protocols.openai.chat import CHAT
from service.protocols.openai.completions import COMPLETIONS
from service.protocols.protocol import Protocol

PROTOCOLS: tuple[Protocol[Any], ...] = (CHAT, COMPLETIONS)  # Any: each row has its own body
BY_NAME = {protocol.name: protocol for protocol in PROTOCOLS}
BY_ROUTE = {route: protocol for protocol in PROTOCOLS for route in protocol.routes}
