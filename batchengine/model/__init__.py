"""The model: forward passes of any layer range over the kernels."""

from __future__ import annotations

from batchengine.model.forward import Model, Stepper, nonfinite_entries
from batchengine.model.ops import CpuOps, Ops
from batchengine.model.sampling import sample_spec

__all__ = ["CpuOps", "Model", "Ops", "Stepper", "nonfinite_entries", "sample_spec"]
