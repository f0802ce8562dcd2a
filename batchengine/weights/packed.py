"""Packed weights of one model: made once, mapped read-only by every lane that computes with it.

Owns `Weights` (matrices and vectors by role, ready for the kernels) and `open_weights`, which
finds or builds the cache file. The model fingerprint is SHA-256 over the GGUF header (which
holds the tensor table, the tokenizer, the template and the RoPE keys) and a digest of every
tensor; it is kept in the cache under the identity of the model file (device, inode, size,
times), so that a second start reads only the header of the model.
Refuses weights with a NaN or an infinite scale, and a model file that changes while it is read.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import numpy as np

import kernels
from batchengine import errors
from batchengine.gguf import GgufFile, Identity, model_identity
from batchengine.weights import cache
from batchengine.weights.attention import ROPE_FACTORS_LONG, ROPE_FREQS
from batchengine.weights.roles import (
    AttentionRoles,
    DeltaNetRoles,
    DenseRoles,
    LayerEmbeddingRoles,
    LayerInputRoles,
    LayerRoles,
    Mamba2Roles,
    MlaRoles,
    MoeRoles,
    PairedRoles,
    ShortConvRoles,
)
from batchengine.weights.spec import ModelSpec, read_spec
from batchengine.weights.tensors import (
    DECAYS,
    EveryRows,
    MatrixPlan,
    SinksPlan,
    TensorPlan,
    VectorPlan,
    plan_tensors,
)

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 22
ROPE_FACTOR_MIN = 2.0**-7  # a RopeTable has frequencies up to 256
FINGERPRINT_DOMAIN = b"batchengine model fingerprint 1\0"
_VECTOR_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

Progress = Callable[[float], None]


# The tensors of a layer, ready for the kernels.
AttentionWeights = AttentionRoles[kernels.Matrix, kernels.Vector, kernels.Sinks]
MlaWeights = MlaRoles[kernels.Matrix, kernels.Vector]
RecurrentWeights = (
    DeltaNetRoles[kernels.Matrix, kernels.Vector]
    | Mamba2Roles[kernels.Matrix, kernels.Vector]
    | ShortConvRoles[kernels.Matrix, kernels.Vector]
)
DenseWeights = DenseRoles[kernels.Matrix, kernels.Vector]
MoeWeights = MoeRoles[kernels.Matrix, kernels.Vector]
PairedWeights = PairedRoles[kernels.Matrix, kernels.Vector]
FfnWeights = DenseWeights | MoeWeights | PairedWeights
LayerInputWeights = LayerInputRoles[kernels.Matrix, kernels.Vector]
LayerEmbeddingWeights = LayerEmbeddingRoles[kernels.Matrix, kernels.Vector]
LayerWeights = LayerRoles[kernels.Matrix, kernels.Vector, kernels.Sinks]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of the layers in `layers`, and the two ends of the model.

    fingerprint: 32 bytes, equal for equal model bytes wherever the file lies.
    """

    spec: ModelSpec
    fingerprint: bytes
    layers: range
    embedding: kernels.Matrix
    output_norm: kernels.Vector
    head: kernels.Matrix
    head_bias: kernels.Vector | None
    rope_factors: kernels.Vector | None
    layer_embeddings: LayerEmbeddingWeights | None
    layer: dict[int, LayerWeights]
    packed_bytes: int
    cache_path: Path

    def tensors(self) -> list[kernels.Matrix | kernels.Vector | kernels.Sinks]:
        """Every tensor that a forward pass reads; a tied head is not repeated."""
        ends = [self.embedding, self.output_norm, self.head_bias, self.layer_embeddings]
        if self.head is not self.embedding:
            ends.append(self.head)
        return _tensors_of([*ends, *self.layer.values()])

    def __repr__(self) -> str:
        return (
            f"<Weights {self.spec.name} {self.fingerprint.hex()[:12]} layers={self.layers.start}.."
            f"{self.layers.stop} packed={self.packed_bytes >> 20} MiB>"
        )


def open_weights(
    gguf: GgufFile,
    pool: kernels.Pool,
    *,
    cache_dir: Path,
    layers: range | None = None,
    progress: Progress = lambda _: None,
) -> Weights:
    """Maps the packed weights of a model, packing them first if there is no valid cache file.

    `progress` receives fractions from 0 to 1, several a minute unless the disk or a core hangs:
    the engine ends a worker that reports none for a minute. `layers` limits which layers get a
    role here (the file always holds all). The GGUF file may be closed afterwards.
    """
    spec = read_spec(gguf)
    plan = plan_tensors(gguf, spec)
    cache.make_cache_dir(cache_dir)
    path = cache.cache_path(cache_dir, gguf.path)
    packing = _Packing(gguf, plan, path, hashlib.sha256(gguf.header()).digest())
    try:
        file = cache.open_cache(path, packing.check, progress)
    except cache.CacheMismatch as first:
        with cache.starter_lock(path, lambda: progress(0.0)):
            file = packing.open_or_pack(pool, progress, first)
    progress(1.0)
    return _assemble(spec, plan, file, layers or range(spec.n_layer))


def model_fingerprint(header_digest: bytes, tensor_digests: Sequence[tuple[str, bytes]]) -> bytes:
    """SHA-256 identity of a model: header, then every tensor's name and digest in file order."""
    total = hashlib.sha256(FINGERPRINT_DOMAIN)
    total.update(header_digest)
    for name, digest in tensor_digests:
        raw = name.encode()
        total.update(len(raw).to_bytes(4, "little") + raw + digest)
    return total.digest()


def read_fingerprint(path: Path, is_cancelled: Callable[[], bool]) -> tuple[Identity, bytes] | None:
    """Identity and fingerprint of a file as it is now; None = cancelled, or it changed meanwhile.

    Reads the whole file. Tensors are read, not mapped: a file that is cut short under a mapping
    would end the process. Raises OSError, and BatchEngineError if it is no GGUF file any more.
    """
    digests: list[tuple[str, bytes]] = []
    with GgufFile(path) as gguf:
        for name, tensor in gguf.tensors.items():
            digest, done = hashlib.sha256(), 0
            while done < tensor.n_bytes and not is_cancelled():
                data = gguf.read(name, done, min(tensor.n_bytes - done, READ_BYTES))
                if not data:
                    return None
                digest.update(data)
                done += len(data)
            digests.append((name, digest.digest()))
        if is_cancelled() or not gguf.is_unchanged():
            return None
        header_digest = hashlib.sha256(gguf.header()).digest()
        return gguf.identity, model_fingerprint(header_digest, digests)


@dataclass(frozen=True, slots=True)
class _Packing:
    """One model file and its cache file at `path`."""

    gguf: GgufFile
    plan: TensorPlan
    path: Path
    header_digest: bytes

    def check(self, table: cache.CacheTable) -> None:
        """Raises CacheMismatch unless a cache file holds exactly what packing would produce."""
        if table.pack_version != kernels.PACK_VERSION:
            raise cache.CacheMismatch("it was packed by another version")
        if table.identity != self.gguf.identity or table.header_digest != self.header_digest:
            raise cache.CacheMismatch("the model file was replaced or written to")
        wanted = [(m.name, m.kind, m.rows, m.cols, _matrix_bytes(m)) for m in self.plan.matrices]
        wanted += [(v.name, "vector", v.size, 1, 4 * v.size) for v in self.plan.vectors]
        held = [(e.name, e.kind, e.rows, e.cols, e.n_bytes) for e in table.entries]
        if held != wanted or len(table.fingerprint) != 32:
            raise cache.CacheMismatch("it holds other tensors")

    def open_or_pack(
        self, pool: kernels.Pool, report: Progress, first: cache.CacheMismatch
    ) -> cache.CacheFile:
        """The cache file, packed now unless another process did during the wait for the lock."""
        try:
            return cache.open_cache(self.path, self.check, report)
        except cache.CacheMismatch as reason:
            level = logging.INFO if isinstance(reason, cache.CacheAbsent) else logging.WARNING
            text = "packing the weights of %s into %s: %s"
            logger.log(level, text, self.gguf.path, self.path, reason)
        self._pack(pool, report)
        try:
            return cache.open_cache(self.path, self.check, lambda _: report(1.0))
        except cache.CacheMismatch as reason:
            why = f"{reason}; before packing: {first}"
            raise errors.CACHE_UNREADABLE(path=self.path, why=why) from reason

    def _writer(self, data_bytes: int, report: Progress) -> cache.CacheWriter:
        return cache.CacheWriter(self.path, data_bytes, lambda: report(0.0))

    def _pack(self, pool: kernels.Pool, report: Progress) -> None:
        gguf, plan = self.gguf, self.plan
        total = cache.PROLOGUE.size
        for size in [_matrix_bytes(m) for m in plan.matrices] + [4 * v.size for v in plan.vectors]:
            total = cache.align(total + size)
        done = 0
        # One thread hashes the model while the pool packs it: both read the same mapping.
        with ThreadPoolExecutor(1) as hasher, self._writer(total, report) as writer:
            digests = [(name, hasher.submit(_tensor_digest, gguf, name)) for name in gguf.tensors]
            try:
                for matrix in plan.matrices:
                    packed = memoryview(mmap.mmap(-1, _matrix_bytes(matrix)))  # page-aligned
                    _pack_matrix(gguf, pool, matrix, packed)
                    writer.add(matrix.name, matrix.kind, matrix.rows, matrix.cols, packed)
                    done += len(packed)
                    report(0.99 * done / total)
                for vector in plan.vectors:
                    writer.add(vector.name, "vector", vector.size, 1, _vector_bytes(gguf, vector))
                results: list[tuple[str, bytes]] = []
                for name, future in digests:
                    results.append((name, future.result()))
                    report(0.99)
                fingerprint = model_fingerprint(self.header_digest, results)
                _refuse_changed(gguf)
            except BaseException:
                hasher.shutdown(wait=True, cancel_futures=True)
                raise
            writer.commit(
                pack_version=kernels.PACK_VERSION,
                identity=gguf.identity,
                header_digest=self.header_digest,
                fingerprint=fingerprint,
            )


def _tensor_digest(gguf: GgufFile, name: str) -> bytes:
    return hashlib.sha256(gguf.data(name)).digest()


def _matrix_bytes(matrix: MatrixPlan) -> int:
    return kernels.packed_bytes(matrix.kind, matrix.rows, matrix.cols)


def _pack_matrix(
    gguf: GgufFile, pool: kernels.Pool, matrix: MatrixPlan, packed: memoryview
) -> None:
    source, part, at = gguf.data(matrix.tensor), matrix.part, ""
    if part is not None:
        source = _rows_of(source, matrix.rows // part.n_rows, part)
        at = f"of rows {part.first} to {part.first + part.n_rows - 1} in each {part.every}: "
    try:
        kernels.pack(pool, matrix.kind, matrix.rows, matrix.cols, source, packed)
    except ValueError as error:
        file, why = gguf.path.name, f"{at}{error}"
        raise errors.TENSOR_NUMBERS(tensor=matrix.tensor, file=file, why=why) from error


def _rows_of(source: memoryview, n_runs: int, part: EveryRows) -> memoryview:
    """The bytes of a part of a tensor, of as many runs of rows."""
    runs = np.frombuffer(source, np.uint8).reshape(n_runs, part.every, -1)
    chosen = runs[:, part.first : part.first + part.n_rows]
    return memoryview(chosen.tobytes())


def _vector_bytes(gguf: GgufFile, vector: VectorPlan) -> memoryview:
    """The joined parts of a vector as float32."""
    parts = [
        np.full(size, vector.absent, np.float32) if name is None else _read_vector(gguf, name)
        for name, size in vector.parts
    ]
    joined = np.concatenate(parts) * np.float32(vector.factor)
    if not np.isfinite(joined).all():
        index = int(np.flatnonzero(~np.isfinite(joined))[0])
        why = f"element {index} is not finite"
        raise errors.TENSOR_NUMBERS(tensor=vector.name, file=gguf.path.name, why=why)
    if vector.name in (ROPE_FREQS, ROPE_FACTORS_LONG) and not (joined >= ROPE_FACTOR_MIN).all():
        why = f"a frequency is divided by each of them, so all must be {ROPE_FACTOR_MIN:g} at least"
        raise errors.TENSOR_NUMBERS(tensor=vector.name, file=gguf.path.name, why=why)
    if DECAYS.match(vector.name) and (joined > 0.0).any():
        why = "recurrent state would grow with each token, so none may be positive"
        raise errors.TENSOR_NUMBERS(tensor=vector.name, file=gguf.path.name, why=why)
    if isinstance(vector, SinksPlan):
        try:
            kernels.Sinks(joined.data)
        except ValueError as error:
            file = gguf.path.name
            raise errors.TENSOR_NUMBERS(tensor=vector.name, file=file, why=error) from error
    return memoryview(joined.tobytes())


def _read_vector(gguf: GgufFile, name: str) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    kind = gguf.tensors[name].type.name
    raw = np.frombuffer(gguf.data(name), _VECTOR_DTYPES[kind])
    if kind == "BF16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


def _refuse_changed(gguf: GgufFile) -> None:
    """Raises MODEL_FILE_MOVED if the file changed while it was read."""
    try:
        identity = model_identity(gguf.path)
    except OSError as error:
        raise errors.MODEL_FILE_MOVED(path=gguf.path, change="vanished", why=error) from error
    if identity != gguf.identity:
        why = "another program is writing it"
        raise errors.MODEL_FILE_MOVED(path=gguf.path, change="changed", why=why)


def _assemble(spec: ModelSpec, plan: TensorPlan, file: cache.CacheFile, layers: range) -> Weights:
    made = dict[str, Any]()
    embedding = _packed(plan.embedding, file, made)
    return Weights(
        spec=spec,
        fingerprint=file.table.fingerprint,
        layers=layers,
        embedding=embedding,
        output_norm=_packed(plan.output_norm, file, made),
        head=embedding if spec.tied else _packed(plan.head, file, made),
        head_bias=_packed(plan.head_bias, file, made),
        rope_factors=_packed(plan.rope_factors, file, made),
        layer_embeddings=_packed(plan.layer_embeddings, file, made),
        layer={index: _packed(plan.layers[index], file, made) for index in layers},
        packed_bytes=file.size_bytes,
        cache_path=file.path,
    )


def _packed(plan: Any, file: cache.CacheFile, made: dict[str, Any]) -> Any:
    """The tensors of a plan as the kernels read them, each made once; a group of tensors keeps its
    class."""
    if isinstance(plan, MatrixPlan | VectorPlan):
        if plan.name not in made:
            made[plan.name] = _from_file(plan, file)
        return made[plan.name]
    if plan is None:
        return None
    if isinstance(plan, list):
        return [_packed(part, file, made) for part in cast(list[Any], plan)]
    parts = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return type(plan)(**{name: _packed(part, file, made) for name, part in parts.items()})


def _from_file(
    plan: MatrixPlan | VectorPlan, file: cache.CacheFile
) -> kernels.Matrix | kernels.Vector | kernels.Sinks:
    data = file.entry(plan.name)
    if isinstance(plan, MatrixPlan):
        return kernels.Matrix(plan.kind, plan.rows, plan.cols, data)
    return kernels.Sinks(data) if isinstance(plan, SinksPlan) else kernels.Vector(data)


def _tensors_of(group: Any) -> list[kernels.Matrix | kernels.Vector | kernels.Sinks]:
    """The tensors of a group of `_packed`, and of the groups in it."""
    if isinstance(group, kernels.Matrix | kernels.Vector | kernels.Sinks):
        return [group]
    if group is None:
        return []
    parts = (
        cast(list[Any], group)
        if isinstance(group, list)
        else [getattr(group, field.name) for field in fields(group)]
    )
    return [tensor for part in parts for tensor in _tensors_of(part)]
