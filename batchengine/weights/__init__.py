"""Model weights: hyper-parameters, tensor roles, and the packed cache file that lanes map.

Reading order: spec (hyper-parameters), roles (of tensors in a layer), tensors (names and shapes),
packed (matrices for the kernels), cache (the file that lanes share).
"""

from __future__ import annotations

from batchengine.weights.attention import AttentionSpec, AttentionWidths, MlaSpec, RopeSpec
from batchengine.weights.ffn import DenseSpec, FfnSpec, MoeSpec, PairedSpec
from batchengine.weights.packed import (
    AttentionWeights,
    DenseWeights,
    FfnWeights,
    LayerEmbeddingWeights,
    LayerInputWeights,
    LayerWeights,
    MlaWeights,
    MoeWeights,
    PairedWeights,
    RecurrentWeights,
    Weights,
    open_weights,
    read_fingerprint,
)
from batchengine.weights.recurrent import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from batchengine.weights.roles import (
    AttentionRoles,
    DeltaNetRoles,
    DenseRoles,
    Mamba2Roles,
    MlaRoles,
    MoeRoles,
    PairedRoles,
)
from batchengine.weights.spec import ModelSpec, read_spec
from batchengine.weights.tensors import plan_tensors

__all__ = [
    "AttentionRoles",
    "AttentionSpec",
    "AttentionWeights",
    "AttentionWidths",
    "DeltaNetRoles",
    "DeltaNetSpec",
    "DenseRoles",
    "DenseSpec",
    "DenseWeights",
    "FfnSpec",
    "FfnWeights",
    "LayerEmbeddingWeights",
    "LayerInputWeights",
    "LayerWeights",
    "Mamba2Roles",
    "Mamba2Spec",
    "MlaRoles",
    "MlaSpec",
    "MlaWeights",
    "ModelSpec",
    "MoeRoles",
    "MoeSpec",
    "MoeWeights",
    "PairedRoles",
    "PairedSpec",
    "PairedWeights",
    "RecurrentSpec",
    "RecurrentWeights",
    "RopeSpec",
    "ShortConvSpec",
    "Weights",
    "open_weights",
    "plan_tensors",
    "read_fingerprint",
    "read_spec",
]
