"""The hyper-parameters of a model, read from GGUF metadata and checked.

Owns `ModelSpec`, a tuple of layer kinds, and the meaning of the metadata keys (defaults included):
later stages use the spec and never the name of the architecture. Refuses every feature it would
otherwise ignore silently: experts that are chosen or summed in another way, unknown position
scalings, layers of different shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from batchengine import errors
from batchengine.gguf import GgufFile, StringArray
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.attention import AttentionSpec, read_attentions
from batchengine.weights.ffn import FfnSpec, MoeSpec, PairedSpec, read_ffns
from batchengine.weights.keys import count_of, number_between, unsupported
from batchengine.weights.recurrent import RecurrentSpec, read_recurrent, recurrent_layers
from kv_store.layout import PAGE_TOKENS, PageLayout

TABLE, LAYER_TABLE = "token_embd.weight", "per_layer_token_embd.weight"

SUPPRESSED, SUPPRESSED_MAX = "tokenizer.ggml.suppress_tokens", 1024

_COMPANIONS = ("adapter", "mmproj", "imatrix")  # values of general.type

_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 38: "MXFP4",
}  # fmt: skip


MixerSpec = AttentionSpec | RecurrentSpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: the part that mixes tokens, then the part that works on each token alone, if it
    has one.

    Both are added to the residual stream. Options of a kind are fields of its class; further kinds
    are further classes for these fields. block, ffn_block: the blocks of the file that have
    them; -1 = none has.
    """

    mixer: MixerSpec
    ffn: FfnSpec | None
    block: int
    ffn_block: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Hyper-parameters of one model, all with their final values.

    layers: in the order of the file. tied = the head is the embedding matrix. embed_scale: what
    embeddings are multiplied by; residual_scale: what each part of a layer adds; logit_scale:
    logits. logit_cap: the soft bound of logits, 0 = there
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
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    @property
    def n_block(self) -> int:
        """How many blocks of the file the layers are."""
        return 1 + max(max(layer.block, layer.ffn_block) for layer in self.layers)

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
    def has_equal_heads(self) -> bool:
        """Whether all layers with attention have as many query heads."""
        return len({of.n_head for of in self.attentions}) == 1

    @property
    def n_layer_kv(self) -> int:
        """How many layers have rows in a KV page."""
        return len(self.page_layout.layers)

    @property
    def page_layout(self) -> PageLayout:
        """The layout of a KV page."""
        return PageLayout(tuple([of.kv_heads for of in self.attentions if of.has_kv]))

    @property
    def tables(self) -> tuple[str, ...]:
        """Tensors of which a token reads one row: embeddings, unless they are the head too."""
        own = (LAYER_TABLE,) if self.n_embd_layer else ()
        return own if self.tied else (TABLE, *own)

    @property
    def is_whole(self) -> bool:
        """Whether no part of the layers is computed alone: some read the KV of others, or have
        embeddings of their own."""
        return self.n_layer_kv < len(self.attentions) or self.n_embd_layer > 0

    @property
    def has_rows(self) -> tuple[bool, ...]:
        """Whether each layer has rows in a KV page."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple([isinstance(mixer, AttentionSpec) and mixer.has_kv for mixer in mixers])

    @property
    def whole_kv_share(self) -> float:
        """The KV that a query of a long context reads, as a part of a page."""
        whole = [of.kv_heads for of in self.attentions if of.window == 0]
        return sum(heads.layer_bytes for heads in whole) / self.page_layout.payload_bytes

    @property
    def window_kv_share(self) -> float:
        """The part of a page that is of layers with a window."""
        owners = [of for of in self.attentions if of.window and of.has_kv]
        n_bytes = sum(of.kv_heads.layer_bytes for of in owners)
        return n_bytes / self.page_layout.payload_bytes

    @property
    def window(self) -> int:
        """Tokens that queries of layers with a window see; 0: there are no such layers."""
        return max([of.window for of in self.attentions], default=0)

    @property
    def window_pages(self) -> int:
        """Pages that a token sees at most in layers with a window."""
        return -(-(self.window - 1) // PAGE_TOKENS) + 1 if self.window else 0

    @property
    def whole_query_dims(self) -> int:
        """Values of the queries of one token in the layers that attend to the whole context."""
        return sum(of.q_rows for of in self.attentions if of.window == 0)

    @property
    def recurrent(self) -> RecurrentSpec | None:
        """The recurrent layers of this model, all of one shape; None = it has none."""
        mixers = [layer.mixer for layer in self.layers]
        return next((mixer for mixer in mixers if not isinstance(mixer, AttentionSpec)), None)

    @property
    def n_layer_recurrent(self) -> int:
        """How many layers have recurrent state."""
        return self.n_layer - len(self.attentions)

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one session; 0 = the model has none."""
        spec = self.recurrent
        return 0 if spec is None else self.n_layer_recurrent * spec.state_bytes

    @property
    def experts(self) -> MoeSpec | None:
        """The experts of the first layer that has some; those of others may differ in their limits.
        None = none has."""
        for layer in self.layers:
            ffn = layer.ffn.experts if isinstance(layer.ffn, PairedSpec) else layer.ffn
            if isinstance(ffn, MoeSpec):
                return ffn
        return None

    def __repr__(self) -> str:
        attention, experts = self.attention, self.experts
        mixture = f" experts={experts.n_used}/{experts.n_expert}" if experts else ""
        recurrent = f" recurrent={self.n_layer_recurrent}" if self.n_layer_recurrent else ""
        widths = [layer.ffn.n_ff for layer in self.layers if layer.ffn is not None]
        heads = f"{attention.n_head}/{attention.n_kv_head}x{attention.head_dim}"
        return (
            f"<ModelSpec {self.arch} layers={self.n_layer}{recurrent} embd={self.n_embd} "
            f"ff={widths[-1] if widths else 0}{mixture} heads={heads} vocab={self.n_vocab} "
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
    n_block = _block_count(gguf, arch, n_embd)
    if n_embd % 32:
        raise unsupported(gguf, f"{arch}.embedding_length", n_embd, "a multiple of 32 is needed")
    return ModelSpec(
        arch=arch,
        name=gguf.text("general.name", gguf.path.stem),
        quantisation=_FILE_TYPES.get(gguf.integer("general.file_type", -1), "mixed"),
        n_embd=n_embd,
        n_vocab=_vocab_size(gguf, arch),
        context_trained=count_of(gguf, f"{arch}.context_length"),
        eps=_eps(gguf, arch),
        tied="output.weight" not in gguf.tensors,
        layers=_read_layers(gguf, arch, n_embd, n_block),
        embed_scale=_embed_scale(gguf, arch, n_embd),
        logit_cap=_logit_cap(gguf, arch),
        n_embd_layer=_layer_embedding(gguf, arch),
        suppressed=_suppressed(gguf, _vocab_size(gguf, arch)),
        residual_scale=_scale(gguf, arch, "residual_scale"),
        logit_scale=float(np.float32(1.0 / _scale(gguf, arch, "logit_scale"))),
    )


def _read_layers(gguf: GgufFile, arch: str, n_embd: int, n_block: int) -> tuple[LayerSpec, ...]:
    """The layers, of one block each or, where a block is a mixer or a feed-forward part, of two."""
    mixers: list[MixerSpec] = [*read_attentions(gguf, arch, n_embd, n_block)]
    ffns = read_ffns(gguf, arch, n_embd, n_block)
    if ARCHITECTURES[arch].recurrent != "none":
        recurrent = read_recurrent(gguf, arch, n_embd)
        for index, is_recurrent in enumerate(recurrent_layers(gguf, arch, n_block)):
            mixers[index] = recurrent if is_recurrent else mixers[index]
    if not ARCHITECTURES[arch].splits_layers:
        pairs = zip(mixers, ffns, strict=True)
        return tuple([LayerSpec(*pair, i, i) for i, pair in enumerate(pairs)])
    layers, key = list[LayerSpec](), f"{arch}.feed_forward_length"
    for block, (mixer, ffn) in enumerate(zip(mixers, ffns, strict=True)):
        if ffn is None:
            layers.append(LayerSpec(mixer, None, block, -1))
        elif layers and layers[-1].ffn is None:
            layers[-1] = replace(layers[-1], ffn=ffn, ffn_block=block)
        else:
            why = f"in front of the feed-forward part of block {block} there must be a mixer"
            raise unsupported(gguf, key, "an array", why)
    if not any(isinstance(layer.mixer, AttentionSpec) for layer in layers):
        raise unsupported(gguf, key, "an array", "some blocks must have attention")
    return tuple(layers)


def _eps(gguf: GgufFile, arch: str) -> float:
    """What norms add to mean squares; files of nemotron_h may have the other key alone."""
    prefix = f"{arch}.attention.layer_norm"
    has_other = ARCHITECTURES[arch].splits_layers and f"{prefix}_rms_epsilon" not in gguf.values
    key = f"{prefix}_epsilon" if has_other else f"{prefix}_rms_epsilon"
    return number_between(gguf, key, None, 1e-30, 1.0)


def _embed_scale(gguf: GgufFile, arch: str, n_embd: int) -> float:
    """What embeddings are multiplied by."""
    if ARCHITECTURES[arch].scales_embedding:
        return float(np.float32(math.sqrt(n_embd)))
    return _scale(gguf, arch, "embedding_scale")


def _scale(gguf: GgufFile, arch: str, name: str) -> float:
    """A factor of an architecture that has some; 0 is the format's "not given"."""
    key = f"{arch}.{name}"
    if not ARCHITECTURES[arch].has_scales or gguf.number(key, 0.0) == 0.0:
        return 1.0
    return float(np.float32(number_between(gguf, key, None, 1e-4, 1e4)))


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
