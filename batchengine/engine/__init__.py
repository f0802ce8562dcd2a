"""The engine takes requests and returns streams of events. See `engine.Engine`.

Reading order: `engine` (what the service calls), `sessions.requests` (one request as one
coroutine), `lane.loop` (how a lane computes), `turns.journal` (what is durable), `boot` (how the
parts are started).
"""

from __future__ import annotations

from batchengine.engine.engine import Engine
from batchengine.engine.turns.stream import Generation

__all__ = ["Engine", "Generation"]
