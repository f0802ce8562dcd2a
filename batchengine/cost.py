"""Step time of a lane: a linear model with five coefficients, fitted online from observed steps.

Owns the numbers behind every prediction: `StepCost` (frozen coefficients, what the scheduler
reads) and `CostModel` (the fit). Refuses clocks and policy: times come in as numbers, and what
to do about a slow lane is decided elsewhere.

    step_ms = fixed + prefill_token * prefill tokens + decode_entry * decode entries
            + decode_kv * attended KV tokens of decodes
            + prefill_pair * (query, key) pairs of prefill
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class StepCost:
    """Coefficients of one lane, milliseconds per unit; all finite and >= 0."""

    fixed_ms: float = 1.0
    prefill_token_ms: float = 1.0
    decode_entry_ms: float = 1.0
    decode_kv_ms: float = 1e-4
    prefill_pair_ms: float = 1e-5

    def predict_ms(self, work: StepWork) -> float:
        """Predicted duration of a step that does `work`."""
        return (
            self.fixed_ms
            + self.prefill_token_ms * work.prefill_tokens
            + self.decode_entry_ms * work.decode_entries
            + self.decode_kv_ms * work.decode_kv_tokens
            + self.prefill_pair_ms * work.prefill_pairs
        )


class StepWork(NamedTuple):
    """What one step computes, as counts."""

    prefill_tokens: int = 0
    decode_entries: int = 0
    decode_kv_tokens: int = 0
    prefill_pairs: float = 0.0


def work_of(entries: Iterable[tuple[int, int]]) -> StepWork:
    """Work of batch entries given as (frontier, n_tokens); an entry of one token is a decode."""
    prefill = decodes = kv = 0
    pairs = 0.0
    for frontier, n in entries:
        if n == 1:
            decodes += 1
            kv += frontier + 1
        else:
            prefill += n
            pairs += n * (frontier + n / 2)
    return StepWork(prefill, decodes, kv, pairs)
