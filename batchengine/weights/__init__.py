"""Model weights: hyper-parameters, tensor roles, and the packed cache file that lanes map.

Reading order: spec (hyper-parameters), tensors (roles and shapes), packed (matrices for the
kernels), cache (the file that lanes share).
"""

from __future__ import annotations

from batchengine.weights.packed import (
    AttentionWeights,
    DenseWeights,
    Weights,
    open_weights,
    read_fingerprint,
)
from batchengine.weights.spec import (
    AttentionSpec,
    DenseSpec,
    ModelSpec,
    read_spec,
)
from batchengine.weights.tensors import plan_tensors

__all__ = [
    "AttentionSpec",
    "AttentionWeights",
    "DenseSpec",
    "DenseWeights",
    "ModelSpec",
    "Weights",
    "open_weights",
    "plan_tensors",
    "read_fingerprint",
    "read_spec",
]
