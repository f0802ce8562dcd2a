"""Layer kinds, one module each: the order of kernel calls for a spec of batchengine.weights."""

from __future__ import annotations

from batchengine.model.layers.attention import Attend, Attention, AttentionBuffers
from batchengine.model.layers.embeddings import LayerEmbeddings, LayerInputBuffers, LayerInputs
from batchengine.model.layers.ffn import DenseBuffers, DenseFfn
from batchengine.model.layers.mla import MlaAttention, MlaBuffers
from batchengine.model.layers.moe import MoeBuffers, MoeFfn
from batchengine.model.layers.paired import PairedBuffers, PairedFfn
from batchengine.model.layers.recurrent import Recurrent, RecurrentBuffers

__all__ = [
    "Attend",
    "Attention",
    "AttentionBuffers",
    "DenseBuffers",
    "DenseFfn",
    "LayerEmbeddings",
    "LayerInputBuffers",
    "LayerInputs",
    "MlaAttention",
    "MlaBuffers",
    "MoeBuffers",
    "MoeFfn",
    "PairedBuffers",
    "PairedFfn",
    "Recurrent",
    "RecurrentBuffers",
]
