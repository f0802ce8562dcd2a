"""Model weights: hyper-parameters, tensor roles, and the packed cache file that lanes map.

Reading order: spec (hyper-parameters), tensors (roles and shapes), packed (matrices for the
kernels), cache (the file that lanes share).
"""

from __future__ import annotations

from batchengine.weights.ffn import DenseSpec, FfnSpec, MoeSpec
from batchengine.weights.packed import (
    AttentionWeights,
    DeltaNetWeights,
    DenseWeights,
    FfnWeights,
    MoeWeights,
    Weights,
    open_weights,
    read_fingerprint,
)
from batchengine.weights.spec import (
    AttentionSpec,
    DeltaNetSpec,
    ModelSpec,
    read_spec,
)
from batchengine.weights.tensors import DeltaNetRoles, MoeRoles, plan_tensors

__all__ = [
    "AttentionSpec",
    "AttentionWeights",
    "DeltaNetRoles",
    "DeltaNetSpec",
    "DeltaNetWeights",
    "DenseSpec",
    "DenseWeights",
    "FfnSpec",
    "FfnWeights",
    "ModelSpec",
    "MoeRoles",
    "MoeSpec",
    "MoeWeights",
    "Weights",
    "open_weights",
    "plan_tensors",
    "read_fingerprint",
    "read_spec",
]
