"""The hyper-parameters of a model, read from GGUF metadata and checked.

Owns `ModelSpec`, a tuple of layer kinds, and the meaning of the metadata keys (defaults included):
later stages use the spec and never the name of the architecture. Refuses every feature it would
otherwise ignore silently: experts that are chosen or summed in another way, unknown position
scalings, layers of different shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from batchengine import errors
from batchengine.gguf import GgufFile, StringArray
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.attention import AttentionSpec, read_attentions
from batchengine.weights.ffn import FfnSpec, MoeSpec, PairedSpec, read_ffns
from batchengine.weights.keys import count_of, flags_of, is_last_of, number_between, unsupported
from kv_store.layout import KvHeads, PageLayout

STATE_DIM_MAX = 256
CONV_KERNEL_MAX = 4

TABLE, LAYER_TABLE = "token_embd.weight", "per_layer_token_embd.weight"

SUPPRESSED, SUPPRESSED_MAX = "tokenizer.ggml.suppress_tokens", 1024

_COMPANIONS = ("adapter", "mmproj", "imatrix")  # values of general.type

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M",
    18: "Q6_K", 25: "IQ4_NL", 30: "IQ4_XS", 32: "BF16", 38: "MXFP4",
}  # fmt: skip


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
        """Bytes of the state of one layer, in whole cache lines (kernels.StateShape)."""
        values = self.value_width * self.head_dim + (self.conv_kernel - 1) * self.channels
        return -(-4 * values // 64) * 64


MixerSpec = AttentionSpec | DeltaNetSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: the part that mixes tokens, then the part that works on each token alone.

    Both are added to the residual stream. Options of a kind are fields of its class; further kinds
    are further classes for these fields.
    """

    mixer: MixerSpec
    ffn: FfnSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Hyper-parameters of one model, all with their final values.

    layers: one per block of the file, in order. tied = the head is the embedding matrix.
    embed_scale: what embeddings are multiplied by. logit_cap: the soft bound of logits, 0 = there
    is none. n_embd_layer: width of the embeddings of a token that each layer has of its own; 0 =
    none has. suppressed: tokens that no answer has, rising.
    """

    arch: str
    name: str
    quantisation: str
    n_embd: int
    n_vocab: int
    context_trained: int
    eps: float
    tied: bool
    layers: tuple[LayerSpec, ...]
    embed_scale: float = 1.0
    logit_cap: float = 0.0
    n_embd_layer: int = 0
    suppressed: tuple[int, ...] = ()

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_layer_whole(self) -> int:
        """How many layers attend to the whole context, not to a window of it."""
        return sum(mixer.window == 0 for mixer in self.attentions)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The layers with attention."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple([mixer for mixer in mixers if isinstance(mixer, AttentionSpec)])

    @property
    def attention(self) -> AttentionSpec:
        """The attention of the first layer that has some; that of others may differ."""
        return self.attentions[0]

    @property
    def n_layer_kv(self) -> int:
        """How many layers have rows in a KV page."""
        return len(self.page_layout.layers)

    @property
    def page_layout(self) -> PageLayout:
        """The layout of a KV page."""
        heads = [KvHeads(of.n_kv_head, of.head_dim) for of in self.attentions if of.has_kv]
        return PageLayout(tuple(heads))

    @property
    def tables(self) -> tuple[str, ...]:
        """Tensors of which a token reads one row: embeddings, unless they are the head too."""
        own = (LAYER_TABLE,) if self.n_embd_layer else ()
        return own if self.tied else (TABLE, *own)

    @property
    def is_whole(self) -> bool:
        """Whether no part of the layers is computed alone: some have recurrent state, read the KV
        of others, or have embeddings of their own."""
        return self.n_layer_kv < self.n_layer or self.n_embd_layer > 0

    @property
    def whole_kv_share(self) -> float:
        """The KV that a query of a long context reads, as a part of a page."""
        whole = [KvHeads(of.n_kv_head, of.head_dim) for of in self.attentions if of.window == 0]
        return sum(heads.layer_bytes for heads in whole) / self.page_layout.payload_bytes

    @property
    def whole_query_dims(self) -> int:
        """Values of the queries of one token in the layers that attend to the whole context."""
        return sum(of.q_rows for of in self.attentions if of.window == 0)

    @property
    def delta_net(self) -> DeltaNetSpec | None:
        """The recurrent layers of this model, all of one shape; None = it has none."""
        mixers = [layer.mixer for layer in self.layers]
        return next((mixer for mixer in mixers if isinstance(mixer, DeltaNetSpec)), None)

    @property
    def n_layer_recurrent(self) -> int:
        """How many layers have recurrent state."""
        return self.n_layer - len(self.attentions)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one session; 0 = the model has none."""
        net = self.delta_net
        return 0 if net is None else self.n_layer_recurrent * net.state_bytes

    @property
    def experts(self) -> MoeSpec | None:
        """The experts of this model, the same in all layers that have some; None = none has. Layers
        without are the first ones."""
        ffn = self.layers[-1].ffn
        if isinstance(ffn, PairedSpec):
            return ffn.experts
        return ffn if isinstance(ffn, MoeSpec) else None

    def __repr__(self) -> str:
        attention, experts = self.attention, self.experts
        mixture = f" experts={experts.n_used}/{experts.n_expert}" if experts else ""
        recurrent = f" recurrent={self.n_layer_recurrent}" if self.n_layer_recurrent else ""
        return (
            f"<ModelSpec {self.arch} layers={self.n_layer}{recurrent} embd={self.n_embd} "
            f"ff={self.layers[-1].ffn.n_ff}{mixture} heads={attention.n_head}/{attention.n_kv_head}"
            f"x{attention.head_dim} vocab={self.n_vocab} "
            f"{self.quantisation}{' tied' if self.tied else ''}>"
        )


def read_spec(gguf: GgufFile) -> ModelSpec:
    """The hyper-parameters of a model file; BatchEngineError naming the key that is wrong."""
    _refuse_other_files(gguf)
    arch = gguf.text("general.architecture")
    if arch not in ARCHITECTURES:
        raise unsupported(
            gguf,
            "general.architecture",
            arch,
            f"supported are {', '.join(ARCHITECTURES)}",
            "use a model of one of these architectures",
        )
    _refuse_unknown_features(gguf, arch)
    n_embd = count_of(gguf, f"{arch}.embedding_length")
    n_layer = _block_count(gguf, arch, n_embd)
    if n_embd % 32:
        raise unsupported(gguf, f"{arch}.embedding_length", n_embd, "a multiple of 32 is needed")
    row = ARCHITECTURES[arch]
    mixers: list[MixerSpec] = [*read_attentions(gguf, arch, n_embd, n_layer)]
    ffns = read_ffns(gguf, arch, n_embd, n_layer)
    if row.full_every:
        recurrent = _delta_net(gguf, arch)
        for index, is_recurrent in enumerate(_recurrent_layers(gguf, arch, n_layer)):
            mixers[index] = recurrent if is_recurrent else mixers[index]
    return ModelSpec(
        arch=arch,
        name=gguf.text("general.name", gguf.path.stem),
        quantisation=_FILE_TYPES.get(gguf.integer("general.file_type", -1), "mixed"),
        n_embd=n_embd,
        n_vocab=_vocab_size(gguf, arch),
        context_trained=count_of(gguf, f"{arch}.context_length"),
        eps=number_between(gguf, f"{arch}.attention.layer_norm_rms_epsilon", None, 1e-30, 1.0),
        tied="output.weight" not in gguf.tensors,
        layers=tuple(LayerSpec(*parts) for parts in zip(mixers, ffns, strict=True)),
        embed_scale=float(np.float32(math.sqrt(n_embd))) if row.scales_embedding else 1.0,
        logit_cap=_logit_cap(gguf, arch),
        n_embd_layer=_layer_embedding(gguf, arch),
        suppressed=_suppressed(gguf, _vocab_size(gguf, arch)),
    )


def _suppressed(gguf: GgufFile, n_vocab: int) -> tuple[int, ...]:
    """The tokens that the file keeps out of answers: those of images in a model that only reads
    them, say."""
    value = gguf.values.get(SUPPRESSED)
    if value is None:
        return ()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        why = "it must be an array of tokens"
        raise errors.KEY_VALUE(
            file=gguf.path.name, key=SUPPRESSED, value=type(value).__name__, why=why
        )
    tokens = sorted({int(token) for token in value.tolist()})
    if len(tokens) > SUPPRESSED_MAX or (tokens and not 0 <= tokens[0] <= tokens[-1] < n_vocab):
        why = f"{SUPPRESSED_MAX} tokens of the vocabulary at most"
        raise errors.KEY_VALUE(file=gguf.path.name, key=SUPPRESSED, value="an array", why=why)
    return tuple(tokens)


def _logit_cap(gguf: GgufFile, arch: str) -> float:
    """The soft bound of logits; 0 = there is none."""
    key = f"{arch}.final_logit_softcapping"
    if gguf.number(key, 0.0) == 0.0:
        return 0.0
    return number_between(gguf, key, None, 1e-3, 1e6)


def _layer_embedding(gguf: GgufFile, arch: str) -> int:
    """Width of the embeddings that each layer has of its own; 0 = none has."""
    key = f"{arch}.embedding_length_per_layer_input"
    if not ARCHITECTURES[arch].has_layer_embeddings or gguf.integer(key, 0) == 0:
        return 0
    if (width := count_of(gguf, key)) % 32:
        raise unsupported(gguf, key, width, "a multiple of 32 is needed")
    return width


def _delta_net(gguf: GgufFile, arch: str) -> DeltaNetSpec:
    """The recurrent layers of an architecture that has some."""
    head_dim = count_of(gguf, f"{arch}.ssm.state_size")
    n_k_head = count_of(gguf, f"{arch}.ssm.group_count")
    n_v_head = count_of(gguf, f"{arch}.ssm.time_step_rank")
    conv_kernel = count_of(gguf, f"{arch}.ssm.conv_kernel")
    inner = count_of(gguf, f"{arch}.ssm.inner_size")
    for name, value, fits, why in (
        ("state_size", head_dim, head_dim % 32 == 0 and head_dim <= STATE_DIM_MAX,
         f"a multiple of 32 up to {STATE_DIM_MAX} is needed"),
        ("time_step_rank", n_v_head, n_v_head % n_k_head == 0, f"no multiple of {n_k_head} heads"),
        ("inner_size", inner, inner == n_v_head * head_dim, f"{n_v_head} heads of {head_dim}"),
        ("conv_kernel", conv_kernel, 2 <= conv_kernel <= CONV_KERNEL_MAX,
         f"2 to {CONV_KERNEL_MAX} are supported"),
    ):  # fmt: skip
        if not fits:
            raise unsupported(gguf, f"{arch}.ssm.{name}", value, why)
    key_run = n_v_head // n_k_head if ARCHITECTURES[arch].groups_values else 1
    return DeltaNetSpec(n_k_head, n_v_head, head_dim, conv_kernel, key_run)


def _recurrent_layers(gguf: GgufFile, arch: str, n_layer: int) -> list[bool]:
    """Whether each layer is recurrent: by a flag per layer, or all but the last of a run."""
    every = ARCHITECTURES[arch].full_every
    if not every:
        return [False] * n_layer
    key = f"{arch}.attention.recurrent_layers"
    if key in gguf.values:
        found, value = flags_of(gguf, key, n_layer), "an array"
    else:
        key = f"{arch}.full_attention_interval"
        value = every = count_of(gguf, key, every)
        found = [not is_last_of(every, index) for index in range(n_layer)]
    if all(found) or not any(found):
        why = "some layers must be recurrent, and some must have attention"
        raise unsupported(gguf, key, value, why)
    return found


def _refuse_other_files(gguf: GgufFile) -> None:
    """Raises for files that belong to a model; they lack most of its keys."""
    kind = gguf.values.get("general.type")
    if kind in _COMPANIONS:
        why, fix = "it belongs to a model and is none", "name the GGUF file of the model itself"
        raise unsupported(gguf, "general.type", kind, why, fix)


def _refuse_unknown_features(gguf: GgufFile, arch: str) -> None:
    key = f"{arch}.nextn_predict_layers"  # the last layers, which are no part of the model then
    if (n_mtp := gguf.integer(key, 0)) > 0 and not ARCHITECTURES[arch].has_mtp:
        raise unsupported(gguf, key, n_mtp, "layers that predict further tokens are not supported")
    if gguf.values.get(f"{arch}.attention.causal", True) is not True:
        raise unsupported(gguf, f"{arch}.attention.causal", "false", "not a text generator")
    has_cap = ARCHITECTURES[arch].caps_logits
    for key in (
        f"{arch}.attn_logit_softcapping",
        *([] if has_cap else [f"{arch}.final_logit_softcapping"]),
    ):
        if (cap := gguf.number(key, 0.0)) != 0.0:
            raise unsupported(gguf, key, cap, "logits with a soft bound are not supported")
    kind = gguf.text(f"{arch}.rope.scaling.type", "linear")
    others = ("longrope",) if ARCHITECTURES[arch].rope_factors == "long" else ()
    if kind not in ("linear", "yarn", "none", *others):
        why = "linear and yarn are supported"
        raise unsupported(gguf, f"{arch}.rope.scaling.type", kind, why)


def _block_count(gguf: GgufFile, arch: str, n_embd: int) -> int:
    """The number of layers, without those that predict further tokens; a spec is made for each, so
    an absurd number is refused here."""
    count = count_of(gguf, f"{arch}.block_count")
    if count > len(gguf.tensors):  # every layer has tensors, so one of the first has none
        names = (f"blk.{i}.attn_norm.weight" for i in range(count))
        missing = next(name for name in names if name not in gguf.tensors)
        raise errors.TENSOR_MISSING(file=gguf.path.name, tensor=missing, shape=[n_embd])
    n_mtp = gguf.integer(f"{arch}.nextn_predict_layers", 0)
    if not 0 <= n_mtp < count:
        key, why = f"{arch}.nextn_predict_layers", f"the file has {count} blocks"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=n_mtp, why=why)
    return count - n_mtp


def _vocab_size(gguf: GgufFile, arch: str) -> int:
    """The tokenizer's size, against which the embedding is checked later; else the key's."""
    tokens = gguf.values.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray):
        if not len(tokens):
            key, why = "tokenizer.ggml.tokens", "no model has an empty vocabulary"
            raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="empty", why=why)
        return len(tokens)
    info = gguf.tensors.get(TABLE)
    rows = info.shape[1] if info is not None and len(info.shape) == 2 else None
    return count_of(gguf, f"{arch}.vocab_size", rows)
