"""YaRN: the position scaling of models that were trained further for a longer context.

Slow pairs of a head are interpolated, fast ones are left alone, and those between are blended
(Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023). Every
operation here is exact or correctly rounded, so all machines make the same table.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext

_DIGITS = 40
_TAU = Decimal("6.283185307179586476925286766559005768394")


def frequency_divisors(
    n_rot: int, base: float, factor: float, trained: int, beta_fast: float, beta_slow: float
) -> tuple[float, ...]:
    """What the frequency of each of the n_rot / 2 pairs is divided by, 1 to `factor`.

    trained: positions of the first training. A pair that turns beta_fast times or more within
    them is left alone, one that turns beta_slow times or less is interpolated.
    """
    low = max(0, math.floor(_pair_that_turns(n_rot, base, trained, beta_fast)))
    high = min(n_rot - 1, math.ceil(_pair_that_turns(n_rot, base, trained, beta_slow)))
    divisors: list[float] = []
    for pair in range(n_rot // 2):
        ramp = min(max((pair - low) / max(0.001, high - low), 0.0), 1.0)
        divisors.append(1.0 / (ramp / factor + (1.0 - ramp)))
    return tuple(divisors)


def magnitude(factor: float, log_multiplier: float = 0.0) -> float:
    """The factor of cos and sin, by which attention stays as sharp over more tokens:
    (1 + ln(factor) / 10) / (1 + log_multiplier · ln(factor) / 10)."""
    with localcontext(prec=_DIGITS):
        tenth = Decimal(factor).ln() / 10
        return float((1 + tenth) / (1 + Decimal(log_multiplier) * tenth))


def log_growth(factor: float, multiplier: float) -> float:
    """1 + multiplier · ln(factor), the growth of queries and keys of models with MLA."""
    with localcontext(prec=_DIGITS):
        return float(1 + Decimal(multiplier) * Decimal(factor).ln())


def _pair_that_turns(n_rot: int, base: float, trained: int, turns: float) -> Decimal:
    """The pair, as a number with a fraction, that turns so often within `trained` positions."""
    with localcontext(prec=_DIGITS):
        return n_rot * (trained / (_TAU * Decimal(turns))).ln() / (2 * Decimal(base).ln())
