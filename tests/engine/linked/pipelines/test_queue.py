"""Prompts that wait for the pipeline count until they are done, or their requests end."""

from __future__ import annotations

import pytest

from batchengine.engine.linked.pipelines import PipelineQueue, QueuedPrompt
from batchengine.engine.turns.stream import Generation
from batchengine.policy.cost import StepCost, prefill_ms
from batchengine.text.detokeniser import Detokeniser
from tests.support.engines import request

COST = StepCost(1.0, 1.0, 1.0, 1e-4, 1e-3)


def generation(name: str) -> Generation:
    def ignore(_: Generation) -> None:
        pass

    def silent() -> Detokeniser:
        return Detokeniser(lambda _: b"", lambda _: False)

    return Generation(request([1], 4), name, silent, 0.0, ignore, ignore)


def test_prompts_count_with_what_is_not_done() -> None:
    queue, first, second = PipelineQueue(), generation("1"), generation("2")
    assert (queue.queue_ms("a"), queue.lane_ms(COST)) == ((0.0, 0.0), 0.0)
    queue.begin(first, QueuedPrompt("a", 1000, 0.5, 800.0))
    queue.begin(second, QueuedPrompt("b", 500, 0.25, 300.0))
    assert first in queue
    assert queue.queue_ms("a") == (1100.0, 800.0)
    whole = [prefill_ms(COST, 0, n) for n in (1000, 500)]
    assert queue.lane_ms(COST) == pytest.approx(0.5 * whole[0] + 0.25 * whole[1])
    before = queue.changes
    queue.advance(first, 750)
    queue.advance(first, 750)
    assert queue.changes == before + 1
    assert queue.queue_ms("b") == (500.0, 300.0)
    assert queue.lane_ms(COST) == pytest.approx(0.125 * whole[0] + 0.25 * whole[1])
    queue.end(first)
    queue.end(first)
    queue.advance(first, 800)
    assert first not in queue
    assert queue.queue_ms("") == (300.0, 0.0)
    assert queue.changes == before + 2


def test_a_prompt_whose_request_has_ended_does_not_count() -> None:
    queue, gone, failed = PipelineQueue(), generation("1"), generation("2")
    queue.begin(gone, QueuedPrompt("a", 1000, 0.5, 800.0))
    queue.begin(failed, QueuedPrompt("a", 1000, 0.5, 800.0))
    gone.cancelled = True
    assert queue.queue_ms("a") == (800.0, 800.0)
    failed.finished = True
    assert queue.lane_ms(COST) == 0.0
    assert gone not in queue
    assert failed not in queue
