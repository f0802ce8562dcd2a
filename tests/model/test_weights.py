"""Specs, tensor roles and the packed cache: refusals, rebuilds and sharing between processes."""

from __future__ import annotations

import errno
import gc
import hashlib
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import Weights, cache, open_weights, packed, plan_tensors, read_spec
from bench.models.synthetic import Shape, write_synthetic
from tests.hostile.rewrite import edited

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(n_layer=2, n_embd=64, n_ff=96, n_head=2, n_kv_head=1, head_dim=32, n_vocab=288)


@pytest.fixture(scope="module")
def pool() -> kernels.Pool:
    return kernels.Pool(1)


ORIGINAL: dict[str, Any] = {}
OPTIONAL = [
    "qwen3.attention.scale",
    "qwen3.expert_count",
    "qwen3.rope.scaling.type",
    "qwen3.rope.scaling.factor",
    "qwen3.rope.scale_linear",
    "qwen3.attention.causal",
    "qwen3.vocab_size",
    "split.count",
]


@pytest.fixture(scope="module")
def any_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GgufFile]:
    """A small model whose values a test may replace; ORIGINAL keeps the valid ones."""
    path = tmp_path_factory.mktemp("any") / "tiny.gguf"
    write_synthetic(path, TINY)
    with GgufFile(path) as file:
        ORIGINAL.update(file.values)
        yield file


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_synthetic(path, TINY)
    return path


U32 = [reference.GGUFValueType.UINT32]
F32 = [reference.GGUFValueType.FLOAT32]
TEXT = [reference.GGUFValueType.STRING]
COUNTS = [reference.GGUFValueType.ARRAY, reference.GGUFValueType.INT32]


def put(key: str, value: Any, types: list[Any]) -> Callable[..., None]:
    return lambda values, _: values.__setitem__(key, (value, types))


def drop(name: str) -> Callable[..., None]:
    return lambda values, tensors: (values.pop(name, None), tensors.pop(name, None))


def shaped(name: str, shape: tuple[int, ...]) -> Callable[..., None]:
    kind = reference.GGMLQuantizationType.F32
    return lambda _, tensors: tensors.__setitem__(name, (np.ones(shape, np.float32), kind))


# name -> (code, words of the message, edit): one per way metadata or tensors can be wrong
WRONG: dict[str, tuple[str, tuple[str, ...], Callable[..., None]]] = {
    "architecture": (
        "BE1323",
        ("general.architecture", "mamba", "llama, mistral3", "one of these architectures"),
        put("general.architecture", "mamba", TEXT),
    ),
    "no_layers": ("BE1322", ("qwen3.block_count",), put("qwen3.block_count", 0, U32)),
    "no_width": ("BE1321", ("qwen3.embedding_length",), drop("qwen3.embedding_length")),
    "no_eps": (
        "BE1321",
        ("layer_norm_rms_epsilon",),
        drop("qwen3.attention.layer_norm_rms_epsilon"),
    ),
    "eps_zero": (
        "BE1322",
        ("layer_norm_rms_epsilon", "outside"),
        put("qwen3.attention.layer_norm_rms_epsilon", 0.0, F32),
    ),
    "eps_nan": (
        "BE1322",
        ("layer_norm_rms_epsilon", "finite"),
        put("qwen3.attention.layer_norm_rms_epsilon", float("nan"), F32),
    ),
    "scale_negative": (
        "BE1322",
        ("qwen3.attention.scale", "outside"),
        put("qwen3.attention.scale", -0.1, F32),
    ),
    "rope_base_zero": ("BE1322", ("freq_base", "outside"), put("qwen3.rope.freq_base", 0.0, F32)),
    "linear_factor_negative": (
        "BE1322",
        ("rope.scaling.factor", "outside"),
        put("qwen3.rope.scaling.factor", -4.0, F32),
    ),
    "width_text": (
        "BE1322",
        ("qwen3.embedding_length", "not an integer"),
        put("qwen3.embedding_length", "64", TEXT),
    ),
    "head_dim_48": ("BE1323", ("key_length = 48",), put("qwen3.attention.key_length", 48, U32)),
    "head_dim_608": (
        "BE1323",
        ("key_length = 608", "576 at most"),
        put("qwen3.attention.key_length", 608, U32),
    ),
    "value_dim": (
        "BE1323",
        ("value_length = 64", "key_length is 32"),
        put("qwen3.attention.value_length", 64, U32),
    ),
    "heads_do_not_divide": (
        "BE1323",
        ("head_count_kv = 3",),
        put("qwen3.attention.head_count_kv", 3, U32),
    ),
    "heads_per_layer": (
        "BE1323",
        ("head_count", "[2, 4]", "every layer"),
        put("qwen3.attention.head_count", [2, 4], COUNTS),
    ),
    "experts": (
        "BE1323",
        ("qwen3.expert_count = 8", "llama, qwen2moe", "use a dense model"),
        put("qwen3.expert_count", 8, U32),
    ),
    "longrope": (
        "BE1323",
        ("qwen3.rope.scaling.type = longrope", "linear and yarn", "without this feature"),
        put("qwen3.rope.scaling.type", "longrope", TEXT),
    ),
    "rope_odd": (
        "BE1323",
        ("rope.dimension_count = 31",),
        put("qwen3.rope.dimension_count", 31, U32),
    ),
    "huge_layers": (
        "BE1324",
        ("blk.2.",),
        put("qwen3.block_count", 1 << 24, U32),
    ),
    "missing_tensor": (
        "BE1324",
        ("blk.1.ffn_up.weight", "[64, 96]"),
        drop("blk.1.ffn_up.weight"),
    ),
    "missing_norm": ("BE1324", ("blk.0.attn_q_norm.weight",), drop("blk.0.attn_q_norm.weight")),
    "wrong_shape": (
        "BE1325",
        ("blk.0.attn_k.weight", "[64, 32]", "[32, 64]"),
        shaped("blk.0.attn_k.weight", (64, 32)),
    ),
    "vocabulary_differs": (
        "BE1325",
        ("token_embd.weight", "[64, 288]", "[64, 300]"),
        shaped("token_embd.weight", (300, 64)),
    ),
    "matrix_for_norm": (
        "BE1325",
        ("output_norm.weight", "[64]"),
        shaped("output_norm.weight", (2, 64)),
    ),
    "integer_norm": (
        "BE1326",
        ("output_norm.weight", "I32", "F32"),
        lambda _, t: t.__setitem__(
            "output_norm.weight", (np.ones(64, np.int32), reference.GGMLQuantizationType.I32)
        ),
    ),
    "unknown_role": (
        "BE1328",
        ("blk.0.attn_sinks.weight", "no role"),
        shaped("blk.0.attn_sinks.weight", (2,)),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_model_is_refused_with_the_key_or_tensor(name: str, tiny: Path) -> None:
    """Each defect of a model has its own error."""
    code, words, edit = WRONG[name]
    with GgufFile(edited(tiny, edit)) as file, pytest.raises(BatchEngineError) as caught:
        plan_tensors(file, read_spec(file))
    assert caught.value.code == code, str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_the_error_of_an_unknown_storage_type_names_tensor_and_types(tmp_path: Path) -> None:
    path = tmp_path / "k.gguf"
    write_synthetic(path, replace(TINY, n_embd=256))

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        kind = reference.GGMLQuantizationType.TQ2_0
        tensors["blk.0.ffn_gate.weight"] = (np.zeros((TINY.n_ff, 66), np.uint8), kind)

    with GgufFile(edited(path, edit)) as file, pytest.raises(BatchEngineError) as caught:
        plan_tensors(file, read_spec(file))
    assert caught.value.code == "BE1326"
    for word in ("blk.0.ffn_gate.weight", "the type TQ2_0", "Q5_0", "Q4_K, Q5_K", "llama-quantize"):
        assert word in str(caught.value)


def test_absent_keys_have_the_defaults_of_the_format(tiny: Path) -> None:
    """Also values that are derived from other keys."""

    def edit(values: dict[str, Any], _: Any) -> None:
        values.pop("qwen3.rope.freq_base")
        values.pop("qwen3.rope.dimension_count")
        values["qwen3.attention.head_count"] = ([2, 2], COUNTS)

    with GgufFile(edited(tiny, edit)) as file:
        spec = read_spec(file)
    attention = spec.attention
    assert attention.rope.base == 10000.0
    assert attention.rope.n_rot == attention.head_dim == 32
    assert attention.n_head == 2
    assert attention.scale == 1.0 / np.sqrt(32.0)
    assert attention.rope.position_scale == 1.0
    assert (spec.tied, attention.has_qk_norm, attention.rope.style) == (True, True, "neox")
    assert [layer.mixer for layer in spec.layers] == [attention] * 2
    assert repr(spec) == "<ModelSpec qwen3 layers=2 embd=64 ff=96 heads=2/1x32 vocab=288 Q4_0 tied>"


def test_linear_rope_scaling_and_rope_factors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "l.gguf"
    write_synthetic(path, replace(TINY, arch="llama", linear_factor=4.0, rope_factors=True))
    with GgufFile(path) as file:
        spec = read_spec(file)
        plan = plan_tensors(file, spec)
    assert spec.attention.rope.position_scale == 0.25
    assert spec.attention.rope.style == "norm"
    assert plan.rope_factors is not None
    assert plan.rope_factors.size == 16


def test_fused_qkv_is_one_matrix(tmp_path: Path) -> None:
    path = tmp_path / "f.gguf"
    write_synthetic(path, replace(TINY, arch="llama", fused=True, bias=0.1, k_bias=0.1))
    with GgufFile(path) as file:
        layer = plan_tensors(file, read_spec(file)).layers[0]
    assert [m.rows for m in layer.mixer.qkv] == [64 + 32 + 32]
    (bias,) = layer.mixer.qkv_bias
    assert bias is not None
    assert [size for _, size in bias.parts] == [64, 32, 32]


def test_rope_factors_must_be_positive(tmp_path: Path, pool: kernels.Pool) -> None:
    path = tmp_path / "l.gguf"
    write_synthetic(path, replace(TINY, arch="llama", rope_factors=True))

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"][0][3] = 0.0

    with pytest.raises(BatchEngineError) as caught:
        opened(edited(path, edit), pool, tmp_path / "c")
    assert caught.value.code == "BE1327"
    assert "rope_freqs.weight" in str(caught.value)


VALUES = st.one_of(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 300),
    st.floats(),
    st.booleans(),
    st.text(max_size=20),
    st.just("linear"),
    st.lists(st.integers(-5, 300), max_size=4).map(lambda v: np.array(v, np.int32)),
    st.lists(st.floats(width=32), max_size=4).map(lambda v: np.array(v, np.float32)),
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.integers(0, 30), VALUES, max_size=3), st.sampled_from(("qwen2", "")))
def test_any_metadata_is_accepted_or_refused(
    any_model: GgufFile, changes: dict[int, Any], arch: str
) -> None:
    """The result is a spec whose tensors all exist, or one named error."""
    keys = [*ORIGINAL, *OPTIONAL]
    any_model.values = dict(ORIGINAL)
    if arch:
        any_model.values["general.architecture"] = arch
    for index, value in changes.items():
        any_model.values[keys[index % len(keys)]] = value
    try:
        spec = read_spec(any_model)
        plan = plan_tensors(any_model, spec)
    except BatchEngineError as error:
        assert error.code.startswith("BE13")  # noqa: PT017
        assert error.fix  # noqa: PT017
        return
    assert len(plan.layers) == spec.n_layer
    assert 0.0 < spec.attention.scale < 1e4
    assert 0.0 < spec.attention.rope.position_scale < 1e4


# -- the cache


def opened(path: Path, pool: kernels.Pool, folder: Path, **more: Any) -> Weights:
    with GgufFile(path) as file:
        return open_weights(file, pool, cache_dir=folder, **more)


def count_packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the matrices packed from now on."""
    packs: list[str] = []
    real = packed._pack_matrix

    def spy(gguf: Any, pool: Any, matrix: Any, out: Any) -> None:
        packs.append(matrix.name)
        real(gguf, pool, matrix, out)

    monkeypatch.setattr(packed, "_pack_matrix", spy)
    return packs


def test_a_second_start_packs_and_hashes_nothing(
    tiny: Path, tmp_path: Path, pool: kernels.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    packs = count_packs(monkeypatch)
    first = opened(tiny, pool, tmp_path / "c")
    assert len(packs) == 1 + 2 * 7
    packs.clear()
    monkeypatch.setattr(packed, "_tensor_digest", None)  # a second start must not read tensors
    second = opened(tiny, pool, tmp_path / "c")
    assert packs == []
    assert second.fingerprint == first.fingerprint
    assert second.cache_path == first.cache_path
    assert [p.name for p in (tmp_path / "c").iterdir() if p.suffix == ".tmp"] == []
    assert os.stat(first.cache_path).st_mode & 0o777 == 0o600
    assert os.stat(tmp_path / "c").st_mode & 0o777 == 0o700


def test_packed_weights_in_use_are_never_removed(
    tiny: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    weights = opened(tiny, pool, tmp_path / "c")
    path = weights.cache_path
    lock = path.with_suffix(".lock")
    for file in (path, lock):
        os.utime(file, (1000, 1000))
    (use,) = cache.list_uses(tmp_path / "c")
    assert (use.path, use.size_bytes, use.used_s) == (path, path.stat().st_size, 1000)
    assert use.is_mapped
    assert not cache.remove_unused(path)
    del weights
    gc.collect()
    assert not cache.list_uses(tmp_path / "c")[0].is_mapped
    weights = opened(tiny, pool, tmp_path / "c")  # a use, which leaves the file's own times
    assert cache.list_uses(tmp_path / "c")[0].used_s > 1000
    assert path.stat().st_mtime == 1000
    del weights
    gc.collect()
    assert cache.remove_unused(path)
    assert list((tmp_path / "c").iterdir()) == []
    assert not cache.remove_unused(path)


def test_progress_grows_to_one(tiny: Path, tmp_path: Path, pool: kernels.Pool) -> None:
    for _ in range(2):  # packing, then mapping
        seen: list[float] = []
        opened(tiny, pool, tmp_path / "c", progress=seen.append)
        assert len(seen) > 3
        assert seen[-1] == 1.0
        assert all(0.0 <= f <= 1.0 for f in seen)
        assert seen == sorted(seen)


def test_the_fingerprint_depends_on_content_not_on_the_path(
    tiny: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    copy = tmp_path / "other name.gguf"
    copy.write_bytes(tiny.read_bytes())
    one, two = opened(tiny, pool, tmp_path / "c"), opened(copy, pool, tmp_path / "c")
    assert one.fingerprint == two.fingerprint
    assert one.cache_path != two.cache_path

    def flip(_: Any, tensors: dict[str, Any]) -> None:
        tensors["blk.1.ffn_down.weight"][0].reshape(-1)[-1] ^= 1  # one bit of one nibble

    assert opened(edited(tiny, flip), pool, tmp_path / "c").fingerprint != one.fingerprint
    base = put("qwen3.rope.freq_base", 20000.0, F32)
    assert opened(edited(tiny, base), pool, tmp_path / "c").fingerprint != one.fingerprint
    template = put("tokenizer.chat_template", "{{ 1 }}", TEXT)
    assert opened(edited(tiny, template), pool, tmp_path / "c").fingerprint != one.fingerprint


def test_overwriting_the_model_in_place_is_detected(
    tiny: Path, tmp_path: Path, pool: kernels.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    """Same inode, same size, even the same mtime: ctime still differs."""
    first = opened(tiny, pool, tmp_path / "c")
    before = tiny.stat()
    with tiny.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(tiny, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tiny.stat().st_mtime_ns == before.st_mtime_ns
    with caplog.at_level(logging.WARNING):
        second = opened(tiny, pool, tmp_path / "c")
    assert second.fingerprint != first.fingerprint
    assert "replaced or written" in caplog.text


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        raw = bytearray(path.read_bytes())
        raw[position] ^= 0x10
        path.write_bytes(raw)

    return damage


def _replace_by_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def _replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {
    "empty": ("cut short", lambda p: os.truncate(p, 0)),
    "half": ("cut short", _truncate),
    "longer": ("cut short", lambda p: os.truncate(p, p.stat().st_size + 1)),
    "magic": ("another format", _flip(0)),
    "format_version": ("another format", _flip(8)),
    "table_offset": ("cut short", _flip(17)),
    "table": ("table is corrupt", _flip(-1)),
    "matrix": ("token_embd.weight is corrupt", _flip(64)),
    "foreign": ("another format", lambda p: p.write_bytes(b"GIF89a" * 100) and None),
    "writable_by_others": ("others can write", lambda p: p.chmod(0o666)),
    "folder_link": ("cannot be opened", _replace_by_link),
    "fifo": ("not a regular file", _replace_by_fifo),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_unusable_cache_is_rebuilt_and_the_reason_reported(
    name: str, tiny: Path, tmp_path: Path, pool: kernels.Pool, caplog: pytest.LogCaptureFixture
) -> None:
    reason, damage = DAMAGE[name]
    first = opened(tiny, pool, tmp_path / "c")
    good = first.cache_path.read_bytes()
    damage(first.cache_path)
    with caplog.at_level(logging.WARNING):
        second = opened(tiny, pool, tmp_path / "c")
    assert reason in caplog.text
    assert second.fingerprint == first.fingerprint
    assert second.cache_path.read_bytes() == good


def test_a_table_of_another_packing_is_rebuilt(
    tiny: Path, tmp_path: Path, pool: kernels.Pool, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    opened(tiny, pool, tmp_path / "c")
    monkeypatch.setattr(kernels, "PACK_VERSION", kernels.PACK_VERSION + 1)
    with caplog.at_level(logging.WARNING):
        opened(tiny, pool, tmp_path / "c")
    assert "another version" in caplog.text


def test_an_entry_outside_the_file_is_refused(tmp_path: Path) -> None:
    """A table with a right checksum and wrong contents: bounds are checked."""
    for offset, size in ((64, 1 << 40), (1 << 63, 64), (0, 64), (65, 1), (64, 2**64 - 1)):
        path = tmp_path / "t.weights"
        entry = cache.CacheEntry("x", "q4_0", 1, 32, offset, size, bytes(16))
        table = cache.CacheTable(1, (0, 0, 0, 0, 0), b"", bytes(32), (entry,))
        encoded = cache.msgspec.msgpack.encode(table)
        digest = hashlib.sha256(encoded).digest()
        head = cache.PROLOGUE.pack(cache.MAGIC, 1, 0, 192, len(encoded), digest)
        path.write_bytes(head + bytes(128) + encoded)
        path.chmod(0o600)
        with pytest.raises(cache.CacheMismatch, match="outside the file"):
            cache.open_cache(path, lambda _: None, lambda _: None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_is_reported_and_leaves_no_file(
    call: str, number: int, tiny: Path, tmp_path: Path, pool: kernels.Pool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def full(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(BatchEngineError) as caught:
        opened(tiny, pool, tmp_path / "c")
    assert caught.value.code == "BE1331"
    assert str(tmp_path / "c") in str(caught.value)
    assert "cache" in caught.value.fix
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix != ".lock"]


LIMITED = """
import resource, sys
from pathlib import Path
import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import open_weights
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
with GgufFile(sys.argv[1]) as file:
    try:
        open_weights(file, kernels.Pool(1), cache_dir=Path(sys.argv[2]))
    except BatchEngineError as error:
        print(error.code)
"""


def test_a_file_size_limit_of_the_kernel_is_reported(tiny: Path, tmp_path: Path) -> None:
    """No patched calls: the kernel refuses to let the file grow past 4 KiB."""
    command = [sys.executable, "-c", LIMITED, str(tiny), str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == "BE1331\n", done.stderr
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix != ".lock"]


def test_a_cache_folder_that_cannot_be_made_is_reported(
    tiny: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BatchEngineError) as caught:
        opened(tiny, pool, tmp_path / "file" / "c")
    assert caught.value.code == "BE1330"


@pytest.mark.parametrize("bits", [0x7C00, 0x7E01, 0xFC00])
def test_the_error_of_a_nonfinite_scale_names_tensor_row_and_block(
    bits: int, tiny: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    """An infinite or NaN fp16 scale of one block of row 5."""

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        data = tensors["blk.1.attn_output.weight"][0]
        data[5, 18:20] = np.frombuffer(struct.pack("<H", bits), np.uint8)

    with pytest.raises(BatchEngineError) as caught:
        opened(edited(tiny, edit), pool, tmp_path / "c")
    assert caught.value.code == "BE1327"
    assert "blk.1.attn_output.weight" in str(caught.value)
    assert "row 5" in str(caught.value)
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix != ".lock"]


# kind -> byte offset inside row 3 of a block's scale (or of a number) that becomes infinite
SCALE_AT = {
    "q4_1": 2, "q5_0": 22, "q5_1": 2, "q8_0": 34, "iq4_nl": 18, "q4_k": 2, "q5_k": 0, "q6_k": 208,
    "mxfp4": 17, "iq4_xs": 0, "q3_k": 108, "q2_k": 82, "iq3_xxs": 0, "iq2_s": 0, "f16": 10,
    "bf16": 10, "f32": 12,
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALE_AT)
def test_nonfinite_numbers_are_refused_in_every_storage_type(
    kind: str, tmp_path: Path, pool: kernels.Pool
) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(TINY, n_embd=256, kinds={"ffn_up": kind}))
    of_kind = {"f32": b"\x00\x00\x80\x7f", "bf16": b"\x80\x7f", "mxfp4": b"\xff"}
    bits = of_kind.get(kind, b"\x00\x7c")

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        rows = tensors["blk.0.ffn_up.weight"][0].view(np.uint8)
        rows[3, SCALE_AT[kind] : SCALE_AT[kind] + len(bits)] = np.frombuffer(bits, np.uint8)

    with pytest.raises(BatchEngineError) as caught:
        opened(edited(path, edit), pool, tmp_path / "c")
    assert caught.value.code == "BE1327"
    assert "blk.0.ffn_up.weight" in str(caught.value)
    assert "row 3" in str(caught.value)


def test_a_scale_that_is_too_large_in_a_bank_of_experts_is_refused(
    tmp_path: Path, pool: kernels.Pool
) -> None:
    path = tmp_path / "m.gguf"
    shape = replace(TINY, arch="qwen3moe", n_expert=4, n_used=2, kinds={"ffn_up": "mxfp4"})
    write_synthetic(path, shape)

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        tensors["blk.0.ffn_up_exps.weight"][0][2, 5, 17] = 161

    with pytest.raises(BatchEngineError) as caught:
        opened(edited(path, edit), pool, tmp_path / "c")
    assert caught.value.code == "BE1327"
    row = 2 * shape.n_ff + 5
    assert "blk.0.ffn_up_exps.weight" in str(caught.value)
    assert f"row {row}, block 1: the scale is NaN or above 2^32" in str(caught.value)


def test_the_error_of_a_nan_in_a_norm_names_the_tensor(
    tiny: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    def edit(_: Any, tensors: dict[str, Any]) -> None:
        tensors["blk.0.ffn_norm.weight"][0][7] = np.nan

    with pytest.raises(BatchEngineError) as caught:
        opened(edited(tiny, edit), pool, tmp_path / "c")
    assert caught.value.code == "BE1327"
    assert "blk.0.ffn_norm.weight" in str(caught.value)
    assert "element 7" in str(caught.value)


def test_a_model_that_changes_while_it_is_packed_is_refused(
    tiny: Path, tmp_path: Path, pool: kernels.Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = packed._pack_matrix

    def change_model(gguf: Any, pool: Any, matrix: Any, out: Any) -> None:
        real(gguf, pool, matrix, out)
        os.utime(tiny)

    monkeypatch.setattr(packed, "_pack_matrix", change_model)
    with pytest.raises(BatchEngineError) as caught:
        opened(tiny, pool, tmp_path / "c")
    assert caught.value.code == "BE1332"


def test_vectors_of_half_precision_are_converted_exactly(
    tiny: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    """Norms stored as F16 or BF16 become the same float32 numbers."""
    values = np.linspace(-2, 2, 64, dtype=np.float32)
    half = values.astype(np.float16)
    brain = (values.view(np.uint32) >> 16).astype(np.uint16)

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        kinds = reference.GGMLQuantizationType
        tensors["blk.0.attn_norm.weight"] = (half, kinds.F16)
        tensors["blk.0.ffn_norm.weight"] = (brain.view(np.uint8), kinds.BF16)

    with GgufFile(edited(tiny, edit)) as file:
        plan = plan_tensors(file, read_spec(file)).layers[0]
        first = np.frombuffer(packed._vector_bytes(file, plan.mixer.norm), np.float32)
        second = np.frombuffer(packed._vector_bytes(file, plan.ffn.norm), np.float32)
    assert np.array_equal(first, half.astype(np.float32))
    assert np.array_equal(second, (brain.astype(np.uint32) << 16).view(np.float32))


STARTER = """
import sys, time
from pathlib import Path
import kernels
from batchengine.gguf import GgufFile
from batchengine.weights import open_weights, packed
real = packed._pack_matrix
packs = []
def slow(*args):
    packs.append(1); time.sleep(0.01); real(*args)
packed._pack_matrix = slow
with GgufFile(sys.argv[1]) as file:
    weights = open_weights(file, kernels.Pool(1), cache_dir=Path(sys.argv[2]))
mapped = [l for l in open("/proc/self/maps") if ".weights" in l]
print(len(packs), weights.fingerprint.hex(), all(l.split()[1].startswith("r--") for l in mapped))
"""


def test_concurrent_starters_share_one_file(tiny: Path, tmp_path: Path) -> None:
    """Four processes at once: one packs, the others wait for it, all map it read-only."""
    command = [sys.executable, "-c", STARTER, str(tiny), str(tmp_path / "c")]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(4)
    ]
    results = [process.communicate(timeout=60)[0].split() for process in running]
    assert sorted(int(r[0]) for r in results) == [0, 0, 0, 15]
    assert len({r[1] for r in results}) == 1
    assert all(r[2] == "True" for r in results)


def test_a_killed_starter_leaves_no_lock_and_its_file_is_removed(
    tiny: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    stuck = STARTER.replace("time.sleep(0.01)", "print('packing', flush=True); time.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-c", stuck, str(tiny), str(tmp_path / "c")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    with process.stdout as out:
        assert out.readline() == "packing\n"
        process.kill()
        process.wait()
    assert [p for p in (tmp_path / "c").iterdir() if p.suffix == ".tmp"]
    start = time.process_time()
    opened(tiny, pool, tmp_path / "c")
    assert time.process_time() - start < 5.0
    assert not [p for p in (tmp_path / "c").iterdir() if p.suffix == ".tmp"]


def test_a_second_start_of_the_pocket_model_is_fast(
    pocket_path: Path, tmp_path: Path, pool: kernels.Pool
) -> None:
    opened(pocket_path, pool, tmp_path)
    best = 1e9
    for _ in range(3):
        start = time.process_time()
        opened(pocket_path, pool, tmp_path)
        best = min(best, time.process_time() - start)
    assert best < 0.25  # about 10 ms on idle cores
