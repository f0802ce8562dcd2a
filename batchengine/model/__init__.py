"""The model: forward passes over the kernels, and an in-process runner for tests and benches."""

from __future__ import annotations

from batchengine.model.forward import CpuOps, Model, Scratch, Stepper
from batchengine.model.local import LocalRunner, Sequence

__all__ = ["CpuOps", "LocalRunner", "Model", "Scratch", "Sequence", "Stepper"]
