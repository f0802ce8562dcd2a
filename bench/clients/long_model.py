"""A copy of a GGUF file that says it was trained for a longer context."""

from __future__ import annotations

from pathlib import Path

import gguf


def long_model(source: Path, target: Path, context_tokens: int) -> Path:
    """Writes `target`, which differs from `source` in the context length alone."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = field.contents()
        if name == f"{architecture}.context_length":
            value = context_tokens
        kinds = field.types
        writer.add_key_value(name, value, kinds[0], kinds[1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
