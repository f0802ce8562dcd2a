"""Prompts that pipelines of this daemon compute, or will once they have their turn.

Owns how long they still keep the pipeline and the lane of this daemon, for the router. A prompt is
one from its decision on, so that those which come at the same moment know of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from batchengine.engine.turns.stream import Generation
from batchengine.policy.cost import StepCost, prefill_ms


@dataclass(eq=False, slots=True)
class QueuedPrompt:
    """One prompt, of whose tokens the `n_done` leading ones are in the store.

    `layer_share`: of the layers, on the lane of this daemon; `alone_ms`: for which all of it keeps
    the pipeline, if its daemons are idle.
    """

    tenant: str
    n_tokens: int
    layer_share: float
    alone_ms: float
    n_done: int = 0

    @property
    def share_left(self) -> float:
        """Of its tokens, those that are not done."""
        return max(0.0, 1.0 - self.n_done / self.n_tokens)


class PipelineQueue:
    """The prompts of one daemon, by the generation. `changes` counts changes of the times."""

    def __init__(self) -> None:
        self.changes = 0
        self._prompts: dict[Generation, QueuedPrompt] = {}

    def __contains__(self, generation: Generation) -> bool:
        return generation in self._prompts

    def begin(self, generation: Generation, prompt: QueuedPrompt) -> None:
        """Add a prompt; one whose generation ends is left out from then on."""
        self._prompts[generation] = prompt
        self.changes += 1

    def advance(self, generation: Generation, n_done: int) -> None:
        """Note that the first `n_done` tokens of a prompt are in the store."""
        if (prompt := self._prompts.get(generation)) is not None and prompt.n_done != n_done:
            prompt.n_done = n_done
            self.changes += 1

    def end(self, generation: Generation) -> None:
        """Remove a prompt; the lane computes the rest of it."""
        if self._prompts.pop(generation, None) is not None:
            self.changes += 1

    def queue_ms(self, tenant: str) -> tuple[float, float]:
        """Return for how long prompts still keep the pipeline: all, and those of a tenant."""
        all_ms = own_ms = 0.0
        for prompt in self._current():
            ms = prompt.alone_ms * prompt.share_left
            all_ms += ms
            own_ms += ms * (prompt.tenant == tenant)
        return all_ms, own_ms

    def lane_ms(self, cost: StepCost) -> float:
        """Return how long prompts still keep the lane of this daemon, in its stages."""
        return sum(
            [
                prompt.layer_share * prompt.share_left * prefill_ms(cost, 0, prompt.n_tokens)
                for prompt in self._current()
            ]
        )

    def _current(self) -> Iterator[QueuedPrompt]:
        for generation, prompt in list(self._prompts.items()):
            if generation.is_over:
                self.end(generation)
            else:
                yield prompt
