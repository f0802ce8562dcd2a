"""The tensors of a model by role: which matrix or vector a layer uses for what.

A role is planned (`weights.tensors`) or packed for the kernels (`weights.packed`); which of them
the type parameters say. Fields without a tensor are None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

M = TypeVar("M")  # a matrix: planned, or packed for the kernels
V = TypeVar("V")  # a vector: planned, or packed
S = TypeVar("S")  # sinks: planned, or packed


@dataclass(frozen=True)
class AttentionRoles(Generic[M, V, S]):
    """The tensors of an AttentionSpec by role. qkv has one fused matrix or three, or that of q."""

    norm: V | None
    qkv: list[M]
    qkv_bias: list[V | None]
    q_norm: V | None
    k_norm: V | None
    output: M
    output_bias: V | None
    sinks: S | None = None
    post_norm: V | None = None
    gate: M | None = None
    v_norm: V | None = None

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row."""
        return self.qkv if self.gate is None else [*self.qkv, self.gate]


@dataclass(frozen=True)
class MlaRoles(Generic[M, V]):
    """The tensors of an AttentionSpec with MLA by role.

    q_down, q_norm: what queries are made of, if it is not the normed row. queries: the matrices of
    the values of all heads that are not rotated, then of those that are. kv: those of the rotated
    values of K, then of the latent row, which kv_norm norms. key_bank maps queries of each head to
    latent rows, value_bank maps such rows to outputs of heads.
    """

    norm: V
    q_down: M | None
    q_norm: V | None
    queries: list[M]
    kv: list[M]
    kv_norm: V
    key_bank: M
    value_bank: M
    output: M

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row."""
        return [*([self.q_down] if self.q_down is not None else self.queries), *self.kv]


@dataclass(frozen=True)
class DeltaNetRoles(Generic[M, V]):
    """The tensors of a DeltaNetSpec by role. inputs: the matrices of q, k and v, as one or three,
    then those of the output's gate, of beta and of alpha."""

    norm: V
    inputs: list[M]
    conv: V
    dt_bias: V
    a: V
    value_norm: V
    output: M

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row."""
        return self.inputs


@dataclass(frozen=True)
class Mamba2Roles(Generic[M, V]):
    """The tensors of a Mamba2Spec by role. inputs: the matrices of what the convolution reads, of
    the output's gate, and of the step sizes; d: what of each value goes to the output at once."""

    norm: V
    inputs: list[M]
    conv: V
    conv_bias: V | None
    dt_bias: V
    a: V
    d: V
    value_norm: V
    output: M

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row."""
        return self.inputs


@dataclass(frozen=True)
class ShortConvRoles(Generic[M, V]):
    """The tensors of a ShortConvSpec by role. inputs: one matrix, of the first gate, the second
    one, and what both are applied to."""

    norm: V
    inputs: list[M]
    conv: V
    output: M

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row."""
        return self.inputs


@dataclass(frozen=True)
class DenseRoles(Generic[M, V]):
    """The tensors of a DenseSpec by role; there is no gate where the activation has none."""

    norm: V | None
    gate: M | None
    up: M
    down: M
    gate_bias: V | None
    up_bias: V | None
    down_bias: V | None
    post_norm: V | None = None

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row."""
        return [self.up] if self.gate is None else [self.gate, self.up]

    @property
    def banks(self) -> list[M]:
        """The matrices of which a token uses a part."""
        return []


@dataclass(frozen=True)
class SharedRoles(Generic[M]):
    """The expert that every token uses; selector, of one row, gives its weight if it has one. There
    is no gate where the activation has none."""

    selector: M | None
    gate: M | None
    up: M
    down: M

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row."""
        found = self.selector, self.gate, self.up
        return [matrix for matrix in found if matrix is not None]


@dataclass(frozen=True)
class MoeRoles(Generic[M, V]):
    """The tensors of a MoeSpec by role; gate, up and down are banks, and so are their biases: a
    value for each row of each expert. There is no gate where the activation has none. choice_bias:
    what is added to what experts are chosen by; scales: of the output of each expert.
    selector_norm: of the row that the selector reads, unless it is the one that experts read;
    post_norm: of the sum of experts. latent_down, latent_up: what projects the row that experts
    read, and what projects their sum back, if they have these."""

    norm: V
    selector: M
    gate: M | None
    up: M
    down: M
    selector_bias: V | None = None
    gate_bias: V | None = None
    up_bias: V | None = None
    down_bias: V | None = None
    shared: SharedRoles[M] | None = None
    choice_bias: V | None = None
    scales: V | None = None
    selector_norm: V | None = None
    post_norm: V | None = None
    latent_down: M | None = None
    latent_up: M | None = None

    @property
    def readers(self) -> list[M]:
        """The matrices that read the normed row: experts read a copy of those that chose them."""
        found = [self.selector, *(self.shared.readers if self.shared else [])]
        return found if self.latent_down is None else [*found, self.latent_down]

    @property
    def banks(self) -> list[M]:
        """The matrices of which a token uses a part."""
        rest = [self.up, self.down]
        return rest if self.gate is None else [self.gate, *rest]


@dataclass(frozen=True)
class PairedRoles(Generic[M, V]):
    """The tensors of a PairedSpec by role; post_norm is that of the sum."""

    dense: DenseRoles[M, V]
    experts: MoeRoles[M, V]
    post_norm: V

    @property
    def readers(self) -> list[M]:
        """The matrices that read a normed row."""
        return [*self.dense.readers, *self.experts.readers]

    @property
    def banks(self) -> list[M]:
        """The matrices of which a token uses a part."""
        return self.experts.banks


@dataclass(frozen=True)
class LayerInputRoles(Generic[M, V]):
    """What a layer makes of its own embedding of a token: output(gelu(gate·x) * embedding), normed
    and added to the residual stream x."""

    gate: M
    output: M
    post_norm: V


RecurrentRoles = DeltaNetRoles[M, V] | Mamba2Roles[M, V] | ShortConvRoles[M, V]


@dataclass(frozen=True)
class LayerRoles(Generic[M, V, S]):
    """The tensors of one layer; ffn is None where it has no feed-forward part. scale: one value, by
    which the residual stream is multiplied behind it."""

    mixer: AttentionRoles[M, V, S] | MlaRoles[M, V] | RecurrentRoles[M, V]
    ffn: DenseRoles[M, V] | MoeRoles[M, V] | PairedRoles[M, V] | None
    inputs: LayerInputRoles[M, V] | None = None
    scale: V | None = None


@dataclass(frozen=True)
class LayerEmbeddingRoles(Generic[M, V]):
    """The embeddings of a token that layers have of their own, those of layer 0 first: rows of
    `table`, and of `projection` of the token's embedding, each layer's part normed."""

    table: M
    projection: M
    norm: V
