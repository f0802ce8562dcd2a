"""Writes a pocket model as GGUF: weights as named arrays in, a file llama.cpp loads out.

Owns the metadata, the chat template, and a written-out Q4_0 quantiser whose
bytes must equal those of the gguf package before anything is written.

    python -m pocket.export CHECKPOINT.pt OUT.gguf [--float]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from pocket.shape import BLOCK, Shape, tensor_shapes

BLOCK_BYTES = 18

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def quantise_q4_0(weights: np.ndarray) -> np.ndarray:
    """Q4_0 bytes of a (rows, columns) fp32 matrix; (rows, columns / 32 * 18) uint8.

    The scale is the value of largest magnitude over -8, so that this value is exact; the others
    round half up, as the reference quantiser truncates x / scale + 8.5.
    """
    rows, columns = weights.shape
    blocks = np.ascontiguousarray(weights, np.float32).reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
    scale = largest / np.float32(-8)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale)
    levels = np.clip(np.trunc(blocks * inverse + np.float32(8.5)), 0, 15).astype(np.uint8)
    packed = np.empty((len(blocks), BLOCK_BYTES), np.uint8)
    packed[:, :2] = scale.astype(np.float16).view(np.uint8)
    # Low nibbles hold weights 0-15 of the block, high nibbles 16-31.
    packed[:, 2:] = levels[:, :16] | levels[:, 16:] << 4
    return packed.reshape(rows, columns // BLOCK * BLOCK_BYTES)


def write(
    path: Path,
    shape: Shape,
    weights: Mapping[str, np.ndarray],
    tokens: list[str],
    kinds: list[int],
    merges: list[str],
    *,
    quantised: bool = True,
) -> None:
    """Write the file. ValueError for a missing, surplus or misshapen tensor."""
    wanted = tensor_shapes(shape)
    if set(weights) != set(wanted):
        raise ValueError(f"tensors differ: {sorted(set(weights) ^ set(wanted))}")
    writer = gguf.GGUFWriter(path, "qwen3")
    _write_keys(writer, shape, quantised)
    _write_vocabulary(writer, tokens, kinds, merges)
    for name, size in wanted.items():
        array = np.ascontiguousarray(weights[name], np.float32)
        if array.shape != size:
            raise ValueError(f"{name} is {array.shape}, not {size}")
        if array.ndim == 1 or not quantised:
            writer.add_tensor(name, array)
            continue
        packed = quantise_q4_0(array)
        if not np.array_equal(packed, gguf.quants.quantize(array, Kind.Q4_0)):
            raise ValueError(f"{name}: Q4_0 bytes differ from those of the gguf package")
        writer.add_tensor(name, packed, raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: gguf.GGUFWriter, shape: Shape, quantised: bool) -> None:
    writer.add_name("pocket")
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab)
    kind = gguf.LlamaFileType.MOSTLY_Q4_0 if quantised else gguf.LlamaFileType.ALL_F32
    writer.add_file_type(kind)


def _write_vocabulary(
    writer: gguf.GGUFWriter, tokens: list[str], kinds: list[int], merges: list[str]
) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def main() -> None:
    """Export a checkpoint of `pocket.train`."""
    from pocket.train import load_weights

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--float", action="store_true", help="F32 instead of Q4_0")
    options = parser.parse_args()
    shape, weights, vocabulary = load_weights(options.checkpoint)
    write(
        options.out,
        shape,
        weights,
        vocabulary.tokens,
        vocabulary.kinds,
        vocabulary.merges,
        quantised=not options.float,
    )
    print(f"{options.out}: {options.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
