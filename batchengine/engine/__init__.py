"""The engine: requests in, events out. See `engine.Engine`.

Reading order: engine (what the service calls), generation (what a reader gets), turn and loop
(how a lane computes), journal (what is durable), start (how everything comes up).
"""

from __future__ import annotations

from batchengine.engine.engine import Engine
from batchengine.engine.turns.stream import Generation

__all__ = ["Engine", "Generation"]
