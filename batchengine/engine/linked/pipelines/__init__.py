"""Pipelines that this daemon has a part in: those of its own prompts, and stages for peers."""

from __future__ import annotations

from batchengine.engine.linked.pipelines.pipelines import Pipelines
from batchengine.engine.linked.pipelines.queue import PipelineQueue, QueuedPrompt
from batchengine.engine.linked.pipelines.stages import ServedStages

__all__ = ["PipelineQueue", "Pipelines", "QueuedPrompt", "ServedStages"]
