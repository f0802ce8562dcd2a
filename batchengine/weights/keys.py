"""Values of a model file's keys, checked, and the errors for those that no model here has."""

from __future__ import annotations

import numpy as np

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile

COUNT_MAX = 1 << 24  # of anything a model counts; keeps products far below 2**63


def unsupported(
    gguf: GgufFile,
    key: str,
    value: object,
    why: str,
    fix: str = "use another model, or a file converted without this feature",
) -> BatchEngineError:
    """The error for a sound file with a feature that this version does not compute."""
    return errors.MODEL_UNSUPPORTED(file=gguf.path.name, key=key, value=value, why=why, fix=fix)


def count_of(gguf: GgufFile, key: str, default: int | None = None) -> int:
    value = gguf.integer(key, default)
    if not 1 <= value <= COUNT_MAX:
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=value, why="out of range")
    return value


def number_between(
    gguf: GgufFile, key: str, default: float | None, least: float, most: float
) -> float:
    """A float in the range in which binary32 arithmetic with it makes sense."""
    value = gguf.number(key, default)
    if not least <= value <= most:
        why = f"outside {least:g} to {most:g}"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=value, why=why)
    return value


def same_for_all_layers(gguf: GgufFile, key: str, default: int | None, n_layer: int) -> int:
    """A count that may be given per layer; layers that differ are refused."""
    value = gguf.values.get(key)
    if not isinstance(value, np.ndarray):
        return count_of(gguf, key, default)
    n_block = gguf.integer(f"{key.split('.')[0]}.block_count", n_layer)
    if len(value) not in (n_layer, n_block):
        why = f"it has {len(value)} numbers for {n_layer} layers"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="an array", why=why)
    distinct = (
        sorted({int(v) for v in value[:n_layer].tolist()}) if value.dtype.kind in "iu" else []
    )
    if len(distinct) != 1:
        raise unsupported(gguf, key, distinct[:8], "every layer must have the same value")
    if not 1 <= distinct[0] <= COUNT_MAX:
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=distinct, why="out of range")
    return distinct[0]


def each_layer(
    gguf: GgufFile, key: str, default: int | None, n_layer: int, least: int = 1
) -> list[int]:
    """A count for each layer, `least` or more: one for all, or an array; of further blocks it may
    have some, too."""
    value = gguf.values.get(key)
    if not isinstance(value, np.ndarray):
        return [count_of(gguf, key, default)] * n_layer
    if value.dtype.kind not in "iu":
        why = "it must be an array of integers"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="an array", why=why)
    counts = [int(count) for count in value.tolist()]
    if len(counts) < n_layer:
        why = f"it has {len(counts)} numbers for {n_layer} layers"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="an array", why=why)
    for count in counts[:n_layer]:
        if not least <= count <= COUNT_MAX:
            raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=count, why="out of range")
    return counts[:n_layer]


def numbers_of(gguf: GgufFile, key: str, n_layer: int) -> list[float]:
    """A number for each layer, 0 without the key: one for all, or an array; of further blocks it
    may have some, too."""
    value = gguf.values.get(key)
    if not isinstance(value, np.ndarray):
        return [gguf.number(key, 0.0)] * n_layer
    if value.dtype.kind not in "fiu":
        why = "it must be an array of numbers"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="an array", why=why)
    if len(value) < n_layer:
        why = f"it has {len(value)} numbers for {n_layer} layers"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="an array", why=why)
    return [float(number) for number in value[:n_layer].tolist()]


def flags_of(gguf: GgufFile, key: str, n_layer: int) -> list[bool]:
    """One flag per layer; those of further blocks are left out."""
    flags = gguf.values.get(key)
    if flags is None:
        raise errors.KEY_MISSING(file=gguf.path.name, key=key, wanted="an array of flags")
    if not isinstance(flags, np.ndarray) or flags.dtype.kind not in "biu":
        why = "it must be an array of flags"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value=type(flags).__name__, why=why)
    if len(flags) < n_layer:
        why = f"it has {len(flags)} flags for {n_layer} layers"
        raise errors.KEY_VALUE(file=gguf.path.name, key=key, value="an array", why=why)
    return [bool(flag) for flag in flags[:n_layer].tolist()]


def is_last_of(every: int, layer: int) -> bool:
    """Whether a layer is the last one of a run of `every`; 0 = there are no runs."""
    return every > 0 and (layer + 1) % every == 0
