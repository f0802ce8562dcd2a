"""Facts of a model file that the engine needs before a worker has loaded it, and what steps are
assumed to cost until some were measured."""

from __future__ import annotations

import hashlib
import math
from array import array
from pathlib import Path

from batchengine.config import Config, LaneConfig
from batchengine.core import (
    PAGE_TOKENS,
    ContextBound,
    ModelInfo,
    ModelShape,
)
from batchengine.gguf import GgufFile
from batchengine.policy import capacity
from batchengine.policy.cost import StepCost
from batchengine.weights import read_spec
from batchengine.wire import lane as wire


def inspect_model(config: Config) -> ModelInfo:
    """Read ModelInfo from the header of the model file. Raises BatchEngineError."""
    with GgufFile(config.model.path) as gguf:
        spec = read_spec(gguf)
        n_params = sum(math.prod(tensor.shape) for tensor in gguf.tensors.values())
        banks = [tensor for name, tensor in gguf.tensors.items() if "_exps." in name]
        tables = [gguf.tensors[name] for name in spec.tables if name in gguf.tensors]
        n_bytes, found = gguf.size_bytes, Path(config.model.path).stat()
    limit = config.limits.context_tokens or spec.context_trained
    bound = ContextBound.SETTING if limit < spec.context_trained else ContextBound.MODEL
    notes: list[str] = []
    if limit > spec.context_trained:
        notes.append(
            f"ctx is {spec.context_trained:,} instead of {limit:,}: the model was trained for no"
            " longer context"
        )
    return ModelInfo(
        model_id=config.model.id or Path(config.model.path).stem,
        path=config.model.path,
        arch=spec.arch,
        n_layer=spec.n_layer,
        n_params=n_params,
        file_bytes=n_bytes,
        context_tokens=min(limit, spec.context_trained),
        context_trained=spec.context_trained,
        context_bound=bound,
        vocab_size=spec.n_vocab,
        quantisation=spec.quantisation,
        shape=ModelShape(
            n_embd=spec.n_embd,
            n_head=spec.attention.n_head,
            n_kv_head=spec.attention.n_kv_head,
            head_dim=spec.attention.head_dim,
            v_first=spec.page_layout.layers[0].v_first,
            has_equal_heads=spec.has_equal_heads,
            is_whole=spec.is_whole,
            n_layer_whole=spec.n_layer_whole,
            whole_query_dims=spec.whole_query_dims,
            whole_kv_share=spec.whole_kv_share,
            page_payload_bytes=spec.page_layout.payload_bytes,
            state_bytes=spec.state_bytes,
            n_expert=spec.experts.n_expert if spec.experts else 0,
            n_expert_used=spec.experts.n_used if spec.experts else 0,
            expert_params=sum(math.prod(tensor.shape) for tensor in banks),
            expert_bytes=sum(tensor.n_bytes for tensor in banks),
            table_params=sum(math.prod(tensor.shape) for tensor in tables),
            table_bytes=sum(tensor.n_bytes for tensor in tables),
        ),
        created=int(found.st_mtime),
        notes=notes,
    )


def prior_cost(info: ModelInfo, config: LaneConfig, facts: wire.ModelFacts | None) -> StepCost:
    """What steps of a lane are assumed to cost; `facts` are its worker's, if it has loaded."""
    shape = info.shape
    n_unused = shape.n_expert - shape.n_expert_used
    unused_params = shape.expert_params * n_unused // max(1, shape.n_expert) + shape.table_params
    experts = capacity.Experts(shape.n_expert, shape.n_expert_used, shape.expert_bytes)
    size = capacity.ModelSize(
        info.file_bytes,
        info.file_bytes - shape.expert_bytes - shape.table_bytes,
        info.n_params - unused_params,
        shape.whole_query_dims,
        shape.page_payload_bytes,
        PAGE_TOKENS,
        info.context_tokens,
        experts if shape.n_expert else None,
        shape.whole_kv_share,
        shape.state_bytes,
    )
    gpu = None if facts is None else facts.gpu
    if gpu is None:
        return capacity.prior_cost(size, capacity.unmeasured_cpu(config.threads))
    found = capacity.found_gpu(gpu.name, gpu.multiprocessors, gpu.memory_bytes)
    return capacity.prior_cost(size, found)


def tokenizer_hash(path: str) -> str:
    """Hex SHA-256 of the vocabulary; if equal, each token id has the same bytes. "" = none."""
    digest = hashlib.sha256(b"batchengine vocabulary v1")
    with GgufFile(path) as gguf:
        if "tokenizer.ggml.tokens" not in gguf.values:
            return ""
        tokens = list(gguf.strings("tokenizer.ggml.tokens"))
    digest.update(array("I", map(len, tokens)).tobytes())
    digest.update(b"".join(tokens))
    return digest.hexdigest()
