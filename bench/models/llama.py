"""llama.cpp as reference and rival, through the C interface that llama-cpp-python binds.

Owns `LlamaModel` and `LlamaContext`: tokens in, logits out as numpy, with every setting that
changes speed or results given explicitly. Used by tests (tolerances) and benches (ratios);
the daemon never imports it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp
import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from llama_cpp import llama_cpp as C

from bench.models.llama_state import SequenceState

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}
FLASH_OFF, FLASH_ON = 0, 1


@C.llama_log_callback
def _quiet(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Drops llama.cpp's log; errors come back as return codes."""


def has_amx() -> bool:
    """Whether llama.cpp, compiled here, would use the tiles of AMX."""
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def quantise(path: Path, to: Path, file_type: int) -> None:
    """Write a file of floats as llama-quantize does, with its mix of types for `file_type`."""
    C.llama_log_set(_quiet, ctypes.c_void_p(0))
    params = C.llama_model_quantize_default_params()
    params.ftype, params.nthread = file_type, 1
    if C.llama_model_quantize(os.fsencode(path), os.fsencode(to), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantise {path}")


def _ggml() -> ctypes.CDLL:
    """Its library of tensors."""
    return ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))


def blocks_of(values: F32, kind: GGMLQuantizationType) -> U8:
    """Rows of floats as its quantiser writes them; every weight is as important as any other."""
    rows, cols = values.shape
    items, n_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.empty((rows, cols // items * n_bytes), np.uint8)
    importance = np.ones(cols, np.float32)
    quantise_chunk = _ggml().ggml_quantize_chunk
    quantise_chunk.restype = ctypes.c_size_t
    counts = [ctypes.c_int64(n) for n in (0, rows, cols)]
    source, to, weights = (a.ctypes.data_as(ctypes.c_void_p) for a in (values, blocks, importance))
    written = quantise_chunk(ctypes.c_int(kind), source, to, *counts, weights)
    if written != blocks.size:
        raise RuntimeError(f"{written} bytes of {kind.name}, not {blocks.size}")
    return blocks


def values_of(blocks: U8, kind: GGMLQuantizationType) -> F32:
    """Rows of blocks as floats, as it reads them."""
    items, n_bytes = GGML_QUANT_SIZES[kind]
    values = np.empty((len(blocks), blocks.shape[1] // n_bytes * items), np.float32)
    read = getattr(_ggml(), f"dequantize_row_{kind.name.lower()}")
    given = [a.ctypes.data_as(ctypes.c_void_p) for a in (blocks, values)]
    read(*given, ctypes.c_int64(values.size))
    return values


class LlamaModel:
    """A model file loaded by llama.cpp on the CPU. Close it after its contexts."""

    def __init__(self, path: str | os.PathLike[str], *, repack: bool = True) -> None:
        """`repack` lets llama.cpp rearrange weights for the CPU, its faster setting; not on a CPU
        with AMX, where llama.cpp 0.3.36 of llama-cpp-python ended with an illegal instruction (a
        tile load, 2026-11-26): `has_amx` says so to benches."""
        C.llama_log_set(_quiet, ctypes.c_void_p(0))
        C.llama_backend_init()
        params = C.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack and not has_amx()
        self._model = C.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = C.llama_model_get_vocab(self._model)
        self.n_vocab: int = C.llama_vocab_n_tokens(self._vocab)

    @property
    def handle(self) -> object:
        """The C pointer."""
        return self._model

    def tokenize(self, text: str, *, special: bool = True, bos: bool = False) -> list[int]:
        """Token ids of a text."""
        raw = text.encode()
        out = (C.llama_token * (len(raw) + 8))()
        n = C.llama_tokenize(self._vocab, raw, len(raw), out, len(out), bos, special)
        if n < 0:
            raise RuntimeError(f"llama.cpp cannot tokenize {text[:40]!r}")
        return list(out[:n])

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are no UTF-8 are replaced."""
        raw = (C.llama_token * len(tokens))(*tokens)
        out = ctypes.create_string_buffer(32 * len(tokens) + 32)
        n = C.llama_detokenize(self._vocab, raw, len(tokens), out, len(out), False, True)
        if n < 0:
            raise RuntimeError("llama.cpp cannot detokenize these tokens")
        return out.raw[:n].decode(errors="replace")

    def close(self) -> None:
        """Frees the model."""
        if self._model:
            C.llama_model_free(self._model)
            self._model = None

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes(data: npt.NDArray[np.uint8]) -> object:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class LlamaContext:
    """One context: KV memory for up to `n_seq_max` sequences, and one batch to fill."""

    def __init__(
        self,
        model: LlamaModel,
        *,
        n_ctx: int = 2048,
        threads: int = 2,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        flash: bool = False,
        kv_type: str = "f16",
        n_seq_max: int = 1,
        kv_unified: bool = True,
    ) -> None:
        """n_ctx counts the tokens of all sequences together. Quantised V needs `flash`.

        kv_unified: sequences share n_ctx; otherwise it is split evenly between them.
        """
        params = C.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_batch = n_batch
        params.n_ubatch = n_ubatch
        params.n_seq_max = n_seq_max
        params.n_threads = threads
        params.n_threads_batch = threads
        params.flash_attn_type = FLASH_ON if flash else FLASH_OFF
        params.type_k = KV_TYPES[kv_type]
        params.type_v = KV_TYPES[kv_type]
        params.kv_unified = kv_unified
        params.no_perf = True
        self._context = C.llama_init_from_model(model.handle, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot create this context")
        self.n_vocab = model.n_vocab
        self.n_batch = n_batch
        self._streams = 1 if kv_unified else n_seq_max
        self._memory = C.llama_get_memory(self._context)
        self._batch = C.llama_batch_init(n_batch, 0, 1)

    def __enter__(self) -> LlamaContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the context."""
        if self._context:
            C.llama_batch_free(self._batch)
            C.llama_free(self._context)
            self._context = None

    def clear(self) -> None:
        """Forgets every sequence."""
        C.llama_memory_clear(self._memory, True)

    def save_sequence(self, sequence: int) -> SequenceState:
        """The KV of a sequence, for any context with the same KV type and flash setting."""
        size = C.llama_state_seq_get_size(self._context, sequence)
        data = np.empty(size, np.uint8)
        if C.llama_state_seq_get_data(self._context, _bytes(data), size, sequence) != size:
            raise RuntimeError("llama.cpp cannot save this sequence")
        return SequenceState.parse(data)

    def load_sequence(self, sequence: int, state: SequenceState) -> None:
        """Gives `sequence` KV of its own with the bytes of `state`."""
        data = state.data(sequence if self._streams > 1 else 0, self._streams)
        if not C.llama_state_seq_set_data(self._context, _bytes(data), len(data), sequence):
            raise RuntimeError("llama.cpp cannot restore this sequence")
        if C.llama_memory_seq_pos_max(self._memory, sequence) != state.cells - 1:
            raise RuntimeError("llama.cpp restored another length")

    def save_file(self, sequence: int, path: Path) -> None:
        """Writes the KV of a sequence to a file by llama.cpp's own function."""
        none = (C.llama_token * 0)()
        if not C.llama_state_seq_save_file(self._context, os.fsencode(path), sequence, none, 0):
            raise RuntimeError("llama.cpp cannot save this sequence")

    def load_file(self, sequence: int, path: Path) -> None:
        """Loads what `save_file` of a context with the same KV type and flash setting wrote."""
        tokens, count = (C.llama_token * 1)(), ctypes.c_size_t(0)
        if not C.llama_state_seq_load_file(
            self._context, os.fsencode(path), sequence, tokens, 1, ctypes.byref(count)
        ):
            raise RuntimeError("llama.cpp cannot restore this sequence")

    def cut(self, sequence: int, position: int) -> None:
        """Forgets positions [position, end) of a sequence."""
        if not C.llama_memory_seq_rm(self._memory, sequence, position, -1):
            raise RuntimeError("llama.cpp cannot cut this sequence")

    def decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One call of llama_decode; rows of (token, position, sequence, wants logits)."""
        batch = self._batch
        for i, (token, position, sequence, wants) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wants
        batch.n_tokens = len(rows)
        code = C.llama_decode(self._context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        C.llama_synchronize(self._context)

    def logits(self, row: int) -> F32:
        """Logits (n_vocab,) of row `row` of the last decode, copied."""
        pointer = C.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def prefill(self, tokens: Sequence[int], *, sequence: int = 0, start: int = 0) -> F32:
        """Appends tokens; logits after the last one."""
        last = len(tokens) - 1
        for first in range(0, len(tokens), self.n_batch):
            part = range(first, min(first + self.n_batch, len(tokens)))
            self.decode([(tokens[i], start + i, sequence, i == last) for i in part])
        return self.logits(-1)

    def all_logits(self, tokens: Sequence[int]) -> F32:
        """Logits (n_tokens, n_vocab) after every token of a fresh sequence 0."""
        self.clear()
        out = np.empty((len(tokens), self.n_vocab), np.float32)
        for first in range(0, len(tokens), self.n_batch):
            part = range(first, min(first + self.n_batch, len(tokens)))
            self.decode([(tokens[i], i, 0, True) for i in part])
            for i in part:
                out[i] = self.logits(i - first)
        return out

    def step(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Decodes one token for each of the sequences 0, 1, ...; logits(i) is sequence i's."""
        self.decode(
            [(t, p, i, True) for i, (t, p) in enumerate(zip(tokens, positions, strict=True))]
        )
