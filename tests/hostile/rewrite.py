"""Copies a GGUF model with some keys and tensors changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Edit = Callable[[dict[str, Any], dict[str, Any]], Any]


def split(path: Path, tensors_max: int) -> list[Path]:
    """Writes a model as files of so many tensors each, as llama.cpp splits it, beside `path`."""
    _write(path, path.with_name("split.gguf"), lambda *_: None, tensors_max)
    return sorted(path.parent.glob("split-*-of-*.gguf"))


def edited(path: Path, edit: Edit) -> Path:
    """Writes edited.gguf beside `path` after edit(values, tensors) changed them in place.

    values: key -> (value, types); tensors: name -> (array of bytes or numbers, tensor type).
    """
    return _write(path, path.with_name("edited.gguf"), edit)


def _write(path: Path, out: Path, edit: Edit, tensors_max: int = 0) -> Path:
    source = gguf.GGUFReader(path)
    values = {
        k: (f.contents(), f.types) for k, f in source.fields.items() if not k.startswith("GGUF.")
    }
    tensors = {t.name: (np.array(t.data), t.tensor_type) for t in source.tensors}
    edit(values, tensors)
    arch = values.pop("general.architecture")[0]
    writer = gguf.GGUFWriter(out, arch, split_max_tensors=tensors_max)
    for key, (value, types) in values.items():
        writer.add_key_value(key, value, types[0], types[1] if len(types) > 1 else None)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
