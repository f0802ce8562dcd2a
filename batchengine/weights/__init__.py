"""Model weights: hyper-parameters, tensor roles, and the packed cache file lanes map.

Reading order: spec (what the model is), tensors (what it consists of), packed (what the
kernels get), cache (the file they share).
"""

from __future__ import annotations

from batchengine.weights.cache import default_cache_dir
from batchengine.weights.packed import (
    AttentionWeights,
    DenseWeights,
    LayerWeights,
    Weights,
    model_fingerprint,
    open_weights,
    read_fingerprint,
)
from batchengine.weights.spec import (
    ARCHITECTURES,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    read_spec,
)
from batchengine.weights.tensors import TensorPlan, plan_tensors

__all__ = [
    "ARCHITECTURES",
    "AttentionSpec",
    "AttentionWeights",
    "DenseSpec",
    "DenseWeights",
    "LayerSpec",
    "LayerWeights",
    "ModelSpec",
    "RopeSpec",
    "TensorPlan",
    "Weights",
    "default_cache_dir",
    "model_fingerprint",
    "open_weights",
    "plan_tensors",
    "read_fingerprint",
    "read_spec",
]
