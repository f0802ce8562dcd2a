"""Recurrent layers: what the keys of a file say of them.

Such a layer mixes tokens by a state of fixed size in place of KV: a gated delta network, Mamba-2,
or a short convolution. All recurrent layers of a model have one shape. Refuses shapes that kernels
do not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.keys import count_of, each_layer, flags_of, is_last_of, unsupported

STATE_DIM_MAX = 256
CONV_KERNEL_MAX = 4


@dataclass(frozen=True, slots=True)
class DeltaNetSpec:
    """A mixer with recurrent state: a gated delta network, with a causal convolution before it.

    Each of n_v_head heads has a state of head_dim keys by head_dim values; head h uses the keys and
    queries of head (h / key_run) mod n_k_head. conv_kernel: inputs that the convolution sees, the
    present one included.
    """

    n_k_head: int
    n_v_head: int
    head_dim: int
    conv_kernel: int
    key_run: int = 1

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.n_v_head * self.head_dim

    @property
    def channels(self) -> int:
        """Width of the convolution: queries, keys and values."""
        return 2 * self.n_k_head * self.head_dim + self.value_width

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one layer (kernels.StateShape)."""
        values = self.value_width * self.head_dim
        return _state_bytes(values, self.conv_kernel, self.channels)


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """A mixer with recurrent state: Mamba-2, with a causal convolution before it.

    Each of n_head heads has a state of state_dim by head_dim values. n_head / n_group neighbouring
    heads share what is written to states and what they are read with (B and C), and the norm of the
    output is over the values of such a group.
    """

    n_group: int
    n_head: int
    head_dim: int
    state_dim: int
    conv_kernel: int

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.n_head * self.head_dim

    @property
    def channels(self) -> int:
        """Width of the convolution: values, B and C."""
        return self.value_width + 2 * self.n_group * self.state_dim

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one layer (kernels.StateShape)."""
        values = self.value_width * self.state_dim
        return _state_bytes(values, self.conv_kernel, self.channels)


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """A mixer whose state is the last inputs of a causal convolution, `width` values each, which
    is gated before and behind."""

    width: int
    conv_kernel: int

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one layer (kernels.StateShape)."""
        return _state_bytes(0, self.conv_kernel, self.width)


RecurrentSpec = DeltaNetSpec | Mamba2Spec | ShortConvSpec


def _state_bytes(values: int, conv_kernel: int, channels: int) -> int:
    """Bytes of so many values and the inputs of a convolution, in whole cache lines."""
    return -(-4 * (values + (conv_kernel - 1) * channels) // 64) * 64


def read_recurrent(gguf: GgufFile, arch: str, n_embd: int) -> RecurrentSpec:
    """The recurrent layers of an architecture that has some."""
    kind = ARCHITECTURES[arch].recurrent
    if kind == "mamba2":
        return _mamba2(gguf, arch)
    if kind == "conv":
        key = f"{arch}.shortconv.l_cache"
        return ShortConvSpec(n_embd, _conv_kernel(gguf, key))
    return _delta_net(gguf, arch)


def recurrent_layers(gguf: GgufFile, arch: str, n_layer: int) -> list[bool]:
    """Whether each layer is recurrent: by a flag per layer, or all but the last of a run; or those
    without KV heads."""
    row = ARCHITECTURES[arch]
    if row.recurrent == "none":
        return [False] * n_layer
    if row.recurrent == "delta":
        key, value, found = _flagged_layers(gguf, arch, n_layer, row.full_every)
    else:
        key, value = f"{arch}.attention.head_count_kv", "an array"
        found = [count == 0 for count in each_layer(gguf, key, None, n_layer, least=0)]
    if all(found) or not any(found):
        why = "some layers must be recurrent, and some must have attention"
        raise unsupported(gguf, key, value, why)
    return found


def _flagged_layers(
    gguf: GgufFile, arch: str, n_layer: int, every: int
) -> tuple[str, object, list[bool]]:
    """The key that says which layers are recurrent, its value, and what it says."""
    key = f"{arch}.attention.recurrent_layers"
    if key in gguf.values:
        return key, "an array", flags_of(gguf, key, n_layer)
    key = f"{arch}.full_attention_interval"
    every = count_of(gguf, key, every)
    return key, every, [not is_last_of(every, index) for index in range(n_layer)]


def _delta_net(gguf: GgufFile, arch: str) -> DeltaNetSpec:
    head_dim = _state_dim(gguf, arch)
    n_k_head = count_of(gguf, f"{arch}.ssm.group_count")
    n_v_head = count_of(gguf, f"{arch}.ssm.time_step_rank")
    inner = count_of(gguf, f"{arch}.ssm.inner_size")
    if n_v_head % n_k_head:
        raise _wrong(gguf, arch, "time_step_rank", n_v_head, f"no multiple of {n_k_head} heads")
    if inner != n_v_head * head_dim:
        raise _wrong(gguf, arch, "inner_size", inner, f"{n_v_head} heads of {head_dim}")
    key_run = n_v_head // n_k_head if ARCHITECTURES[arch].groups_values else 1
    conv_kernel = _conv_kernel(gguf, f"{arch}.ssm.conv_kernel")
    return DeltaNetSpec(n_k_head, n_v_head, head_dim, conv_kernel, key_run)


def _mamba2(gguf: GgufFile, arch: str) -> Mamba2Spec:
    state_dim = _state_dim(gguf, arch)
    n_group = count_of(gguf, f"{arch}.ssm.group_count")
    n_head = count_of(gguf, f"{arch}.ssm.time_step_rank")
    inner = count_of(gguf, f"{arch}.ssm.inner_size")
    head_dim = inner // n_head
    if n_head % n_group:
        raise _wrong(gguf, arch, "time_step_rank", n_head, f"no multiple of {n_group} groups")
    if inner != n_head * head_dim or head_dim % 16 or not 0 < head_dim <= STATE_DIM_MAX:
        why = f"{n_head} heads of a multiple of 16 up to {STATE_DIM_MAX} are needed"
        raise _wrong(gguf, arch, "inner_size", inner, why)
    if inner % 32:
        raise _wrong(gguf, arch, "inner_size", inner, "a multiple of 32 is needed")
    conv_kernel = _conv_kernel(gguf, f"{arch}.ssm.conv_kernel")
    return Mamba2Spec(n_group, n_head, head_dim, state_dim, conv_kernel)


def _state_dim(gguf: GgufFile, arch: str) -> int:
    value = count_of(gguf, f"{arch}.ssm.state_size")
    if value % 32 or value > STATE_DIM_MAX:
        why = f"a multiple of 32 up to {STATE_DIM_MAX} is needed"
        raise _wrong(gguf, arch, "state_size", value, why)
    return value


def _conv_kernel(gguf: GgufFile, key: str) -> int:
    value = count_of(gguf, key)
    if not 2 <= value <= CONV_KERNEL_MAX:
        raise unsupported(gguf, key, value, f"2 to {CONV_KERNEL_MAX} are supported")
    return value


def _wrong(gguf: GgufFile, arch: str, name: str, value: int, why: str) -> BatchEngineError:
    return unsupported(gguf, f"{arch}.ssm.{name}", value, why)
