"""Random models of any shape in memory, made in seconds: a few rows are packed and repeated.

Matrices of one kind and shape have the same bytes on the host. On a GPU that they are uploaded to,
each has memory of its own, so that no cache holds what two layers read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernels
from batchengine.model import Model
from batchengine.weights import (
    AttentionSpec,
    AttentionWeights,
    DeltaNetRoles,
    DeltaNetSpec,
    DenseSpec,
    DenseWeights,
    FfnWeights,
    LayerWeights,
    MlaSpec,
    MlaWeights,
    ModelSpec,
    MoeRoles,
    MoeSpec,
    MoeWeights,
    RopeSpec,
    Weights,
)
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.roles import SharedRoles
from batchengine.weights.spec import LayerSpec, MixerSpec
from bench.models.synthetic import Shape, random_matrix
from bench.models.tensors import aligned

PACKED_ROWS = 256  # that are packed, and repeated
HEAD_KIND, NARROW_HEAD_KIND = "q6_k", "q8_0"  # a narrow one has no whole blocks of 256
SELECTOR_KIND = "f32"
EPS = 1e-6


class RandomMatrices:
    """Packed matrices, by kind and shape."""

    def __init__(self, pool: kernels.Pool) -> None:
        self._pool = pool
        self._rng = np.random.default_rng(11)
        self._packed: dict[tuple[str, int, int], NDArray[np.uint8]] = {}

    def make(self, kind: str, rows: int, cols: int) -> kernels.Matrix:
        """A matrix with the bytes of this kind and shape."""
        key = kind, rows, cols
        if key not in self._packed:
            self._packed[key] = self._pack(*key)
        return kernels.Matrix(kind, rows, cols, self._packed[key])

    def _pack(self, kind: str, rows: int, cols: int) -> NDArray[np.uint8]:
        few = min(PACKED_ROWS, rows)
        source: NDArray[Any] = random_matrix(self._rng, kind, few, cols, 1.0)
        part = aligned(kernels.packed_bytes(kind, few, cols))
        tensor = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        kernels.pack(self._pool, kind, few, cols, tensor, part)
        whole = aligned(kernels.packed_bytes(kind, rows, cols))
        whole[:] = np.resize(part, len(whole))
        return whole


def random_model(shape: Shape, pool: kernels.Pool) -> Model:
    """A model of matrices of `shape.base`, with a head of HEAD_KIND, and with experts, latent
    attention and delta networks if the shape has them. ValueError for other recurrent layers."""
    matrices, rng = RandomMatrices(pool), np.random.default_rng(12)
    architecture = ARCHITECTURES[shape.arch]
    if architecture.recurrent not in ("none", "delta"):
        raise ValueError(f"no random layers of {architecture.recurrent}")
    mla = MlaSpec(shape.q_rank, shape.kv_rank, shape.nope_dim, shape.value_dim)
    attention = AttentionSpec(
        n_head=shape.n_head,
        n_kv_head=shape.n_kv_head,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        has_qk_norm=not shape.kv_rank,
        rope=RopeSpec(
            "neox", shape.rope_base, shape.n_rot or shape.head_dim, 1.0, 1.0, has_factors=False
        ),
        has_gate=architecture.has_gate,
        mla=mla if shape.kv_rank else None,
    )
    net = DeltaNetSpec(shape.n_k_head, shape.n_v_head, shape.state_dim, shape.conv_kernel)
    every = shape.full_every or architecture.full_every
    if shape.n_expert:
        ffn = MoeSpec(
            shape.n_expert,
            shape.n_used,
            shape.n_ff,
            1.0,
            n_ff_shared=shape.n_ff_shared,
            has_shared_weight=shape.n_ff_shared > 0,
        )
    else:
        ffn = DenseSpec(shape.n_ff)

    def mixer_of(index: int) -> MixerSpec:
        return net if every and (index + 1) % every else attention

    mixers = [mixer_of(index) for index in range(shape.n_layer)]
    spec = ModelSpec(
        arch=shape.arch,
        name="random",
        quantisation=shape.base,
        n_embd=shape.n_embd,
        n_vocab=shape.n_vocab,
        context_trained=shape.context,
        eps=EPS,
        tied=shape.tied,
        layers=tuple([LayerSpec(mixer, ffn, i, i) for i, mixer in enumerate(mixers)]),
    )

    def matrix(rows: int, cols: int) -> kernels.Matrix:
        return matrices.make(shape.base, rows, cols)

    def ones(size: int) -> kernels.Vector:
        return kernels.Vector(np.ones(size, np.float32))

    def drawn(low: float, high: float, size: int) -> kernels.Vector:
        return kernels.Vector(rng.uniform(low, high, size).astype(np.float32))

    def attention_part() -> AttentionWeights:
        n, q, kv = shape.n_embd, attention.q_rows, attention.kv_rows
        return AttentionWeights(
            norm=ones(n),
            qkv=[matrix(q, n), matrix(kv, n), matrix(kv, n)],
            qkv_bias=[None] * 3,
            q_norm=ones(shape.head_dim),
            k_norm=ones(shape.head_dim),
            output=matrix(n, q),
            output_bias=None,
            gate=matrix(q, n) if attention.has_gate else None,
        )

    def latent_part() -> MlaWeights:
        n, heads, rank, n_rot = shape.n_embd, shape.n_head, mla.kv_rank, shape.n_rot
        source = mla.q_rank or n
        return MlaWeights(
            norm=ones(n),
            q_down=matrix(mla.q_rank, n) if mla.q_rank else None,
            q_norm=ones(mla.q_rank) if mla.q_rank else None,
            queries=[matrix(heads * mla.nope_dim, source), matrix(heads * n_rot, source)],
            kv=[matrix(n_rot, n), matrix(rank, n)],
            kv_norm=ones(rank),
            key_bank=matrix(heads * rank, mla.nope_dim),
            value_bank=matrix(heads * mla.value_dim, rank),
            output=matrix(n, heads * mla.value_dim),
        )

    def recurrent_part() -> DeltaNetRoles[kernels.Matrix, kernels.Vector]:
        n, width, heads = shape.n_embd, net.value_width, net.n_v_head
        return DeltaNetRoles(
            norm=ones(n),
            inputs=[matrix(net.channels, n), matrix(width, n), matrix(heads, n), matrix(heads, n)],
            conv=drawn(-0.5, 0.5, net.channels * net.conv_kernel),
            dt_bias=drawn(-4.0, -1.0, heads),
            a=drawn(-2.0, -0.2, heads),
            value_norm=ones(net.head_dim),
            output=matrix(n, width),
        )

    def layer(index: int) -> LayerWeights:
        if mixers[index] is not attention:
            return LayerWeights(recurrent_part(), ffn_part())
        mixer = latent_part() if attention.mla is not None else attention_part()
        return LayerWeights(mixer, ffn_part())

    def ffn_part() -> FfnWeights:
        n = shape.n_embd
        if shape.n_expert:
            return MoeWeights(
                norm=ones(n),
                selector=matrices.make(SELECTOR_KIND, shape.n_expert, n),
                gate=matrix(shape.n_expert * shape.n_ff, n),
                up=matrix(shape.n_expert * shape.n_ff, n),
                down=matrix(shape.n_expert * n, shape.n_ff),
                shared=shared_part() if shape.n_ff_shared else None,
            )
        return DenseWeights(
            norm=ones(n),
            gate=matrix(shape.n_ff, n),
            up=matrix(shape.n_ff, n),
            down=matrix(n, shape.n_ff),
            gate_bias=None,
            up_bias=None,
            down_bias=None,
        )

    def shared_part() -> SharedRoles[kernels.Matrix]:
        n, n_ff = shape.n_embd, shape.n_ff_shared
        selector = matrices.make(SELECTOR_KIND, 1, n)
        return SharedRoles(selector, matrix(n_ff, n), matrix(n_ff, n), matrix(n, n_ff))

    head_kind = NARROW_HEAD_KIND if shape.n_embd % 256 else HEAD_KIND
    head = matrices.make(head_kind, shape.n_vocab, shape.n_embd)
    embedding = head if shape.tied else matrix(shape.n_vocab, shape.n_embd)
    layers = {index: layer(index) for index in range(shape.n_layer)}
    weights = Weights(
        spec=spec,
        fingerprint=bytes(32),
        layers=range(shape.n_layer),
        embedding=embedding,
        output_norm=ones(shape.n_embd),
        head=head,
        head_bias=None,
        rope_factors=None,
        layer_embeddings=None,
        layer=layers,
        packed_bytes=0,
        cache_path=Path(),
    )
    return Model(weights)


def streamed_bytes(model: Model) -> int:
    """Bytes of the matrices that every step reads: all but experts, and an embedding of its own."""
    weights, banks = model.weights, _banks(model)
    matrices = [t for t in weights.tensors() if isinstance(t, kernels.Matrix) and t not in banks]
    is_read = [m for m in matrices if m is not weights.embedding or m is weights.head]
    return sum(m.bytes for m in is_read)


def expert_bytes(model: Model) -> int:
    """Bytes of one expert of a layer; 0: there are none."""
    experts = model.spec.experts
    return (
        sum(m.bytes for m in _banks(model)) // (experts.n_expert * len(model.layers))
        if experts
        else 0
    )


def token_parameters(model: Model) -> int:
    """Parameters of the matrices of layers that a token of a prefill is multiplied with."""
    ends, banks = (model.weights.embedding, model.weights.head), _banks(model)
    matrices = [t for t in model.weights.tensors() if isinstance(t, kernels.Matrix)]
    experts = model.spec.experts
    share = experts.n_used / experts.n_expert if experts else 1.0
    sizes = {m: m.rows * m.cols for m in matrices if m not in ends}
    return round(sum(size * (share if m in banks else 1.0) for m, size in sizes.items()))


def _banks(model: Model) -> set[kernels.Matrix]:
    ffns = [layer.ffn for layer in model.weights.layer.values()]
    return {bank for ffn in ffns if isinstance(ffn, MoeRoles) for bank in ffn.banks}
