"""Converts sampling parameters to those of the kernel."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine.core import Sampling


def sample_spec(
    sampling: Sampling,
    *,
    position: int,
    history: NDArray[np.int32] | None,
    mask: NDArray[np.uint32] | None = None,
    banned: tuple[int, ...] = (),
) -> kernels.SampleSpec:
    """Parameters for the token at `position`; `history`: tokens that penalties see, None = none;
    `mask`: a bit for each token that it may be, None = any; `banned`: tokens that it is not, unless
    the mask allows no other."""
    return kernels.SampleSpec(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        position=position,
        history=history,
        bias=[*sampling.logit_bias, *((token, -math.inf) for token in banned)],
        logprobs=sampling.logprobs,
        mask=mask,
    )
