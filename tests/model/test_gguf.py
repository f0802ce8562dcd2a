"""The GGUF reader: values it reads, and that any file is either read or refused with a reason."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchengine import gguf as reader
from batchengine.core import BatchEngineError
from batchengine.gguf import TENSOR_TYPES, GgufFile, StringArray, parse
from tests.hostile.gguf_bytes import ARRAY, HOSTILE, STRING, File, Tensor, array, text

HONEST = File().encode()


def written(tmp_path: Path, raw: bytes) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    return path


def test_keys_and_tensors_are_read_as_written(tmp_path: Path) -> None:
    with GgufFile(written(tmp_path, HONEST)) as file:
        assert file.text("general.architecture") == "llama"
        assert file.integer("llama.block_count") == 1
        assert file.number("llama.rope.freq_base") == 10000.0
        assert file.values["tokenizer.ggml.add_bos_token"] is True
        tokens = file.strings("tokenizer.ggml.tokens")
        assert list(tokens) == list(tokens) == [b"a", b"bc", b"\xff"]
        assert len(tokens) == 3
        assert file.values["tokenizer.ggml.scores"].tolist() == [0.5] * 3
        assert bytes(file.data("a.weight")) == bytes(range(32))
        assert file.tensors["b.weight"].shape == (32, 4)
        assert file.tensors["b.weight"].type.name == "Q4_0"
        assert file.tensors["b.weight"].n_bytes == 4 * 18
        assert repr(file) == f"<GgufFile model.gguf v3 keys=7 tensors=2 bytes={len(HONEST)}>"


def test_the_reader_agrees_with_the_reference_reader(pocket_path: Path) -> None:
    """Names, shapes, types, offsets and bytes of a real model, against an independent reader."""
    theirs = gguf.GGUFReader(pocket_path)
    with GgufFile(pocket_path) as ours:
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for tensor in theirs.tensors:
            info = ours.tensors[tensor.name]
            assert info.shape == tuple(int(d) for d in tensor.shape)
            assert info.type.name == tensor.tensor_type.name
            assert info.offset == tensor.data_offset
            assert bytes(ours.data(tensor.name)) == tensor.data.tobytes()
        for key, field in theirs.fields.items():
            if key.startswith("GGUF."):
                continue
            expected, value = field.contents(), ours.values[key]
            if isinstance(value, StringArray):
                assert [v.decode() for v in value] == expected
            elif isinstance(value, np.ndarray):
                assert value.tolist() == expected
            else:
                assert value == expected


def test_storage_types_agree_with_the_reference() -> None:
    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    for number, kind in TENSOR_TYPES.items():
        assert (kind.block_items, kind.block_bytes) == sizes[number], kind.name
        assert gguf.GGMLQuantizationType(number).name == kind.name


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused(name: str, tmp_path: Path) -> None:
    """Each defect has one code, and the message names the key, tensor or number that is wrong."""
    code, word, build = HOSTILE[name]
    with pytest.raises(BatchEngineError) as caught:
        GgufFile(written(tmp_path, build()))
    assert caught.value.code == code, str(caught.value)
    assert word in str(caught.value)
    assert caught.value.fix


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(len(HONEST) - 55):  # the data has 56 bytes of padding at its end
        with pytest.raises(BatchEngineError):
            parse(memoryview(HONEST[:length]), "cut")


CUT_WHILE_READ = """
import os, sys
from batchengine.gguf import GgufFile
with GgufFile(sys.argv[1]) as file:
    os.truncate(sys.argv[1], 24)
    print(len(bytes(file.header())) == file.data_start, len(set(file.strings(sys.argv[2]))))
    try:
        file.data("output_norm.weight")
    except Exception as error:
        print(error.code)
"""


def test_a_file_cut_short_after_it_was_opened_does_not_end_the_process(
    pocket_path: Path, tmp_path: Path
) -> None:
    """The engine reads the header of the model file: it must not be a mapping."""
    path = written(tmp_path, pocket_path.read_bytes())
    command = [sys.executable, "-c", CUT_WHILE_READ, str(path), "tokenizer.ggml.tokens"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True 2048\nBE1301\n"), done.stderr


def test_a_header_longer_than_the_first_read_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, HONEST)
    with GgufFile(path) as file:
        whole = file.data_start
    for first in (1, 24, 100, whole - 1, whole):
        monkeypatch.setattr(reader, "HEADER_BYTES", (first, 1 << 20))
        with GgufFile(path) as file:
            assert bytes(file.header()) == HONEST[:whole]
            assert list(file.strings("tokenizer.ggml.tokens")) == [b"a", b"bc", b"\xff"]
    monkeypatch.setattr(reader, "HEADER_BYTES", (1, whole - 1))
    with pytest.raises(BatchEngineError) as caught:
        GgufFile(path)
    assert caught.value.code == "BE1304"


def test_a_value_of_a_wrong_type_is_refused_with_its_key(tmp_path: Path) -> None:
    with GgufFile(written(tmp_path, HONEST)) as file:
        for read, key, code in (
            (file.integer, "no.such.key", "BE1321"),
            (file.integer, "general.architecture", "BE1322"),
            (file.integer, "tokenizer.ggml.add_bos_token", "BE1322"),
            (file.number, "general.architecture", "BE1322"),
            (file.text, "llama.block_count", "BE1322"),
            (file.strings, "tokenizer.ggml.scores", "BE1322"),
        ):
            with pytest.raises(BatchEngineError) as caught:
                read(key)
            assert caught.value.code == code
            assert key in str(caught.value)
        assert file.integer("no.such.key", 7) == 7


def test_number_refuses_infinity(tmp_path: Path) -> None:
    raw = File().with_key("x.y", 6, struct.pack("<f", float("inf"))).encode()
    with GgufFile(written(tmp_path, raw)) as file, pytest.raises(BatchEngineError, match="finite"):
        file.number("x.y")


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "device", "nul"])
def test_a_path_that_is_not_a_file_is_refused(kind: str, tmp_path: Path) -> None:
    """None of these may hang: opening a FIFO would wait for a writer for ever."""
    path = tmp_path / "x.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "nul":
        path = tmp_path / "a\0b"
    with pytest.raises(BatchEngineError) as caught:
        GgufFile(path)
    assert caught.value.code == "BE1301"


def test_a_large_vocabulary_is_read_quickly() -> None:
    """152k tokens and as many merges: a second start must not be slow."""
    words = [text(f"token{i}") for i in range(151936)]
    raw = File()
    raw.with_key("t", ARRAY, array(STRING, words)).with_key("m", ARRAY, array(STRING, words))
    encoded = memoryview(raw.encode())
    best = 1e9
    for _ in range(3):
        start = time.thread_time()
        values = parse(encoded, "large").values
        best = min(best, time.thread_time() - start)
    assert len(values["t"]) == 151936  # type: ignore[arg-type]
    assert best < 0.6  # 0.07 s alone; other processes may use the cores


def test_declared_sizes_cost_no_memory() -> None:
    """A sparse file may have the declared length: the limits still bound the memory used."""
    lies = [
        File().with_key("k", ARRAY, array(0, [], 1 << 40)),
        File().with_key("k", ARRAY, array(STRING, [], 1 << 22)),
        File(n_tensors=1 << 16),
    ]
    for lie in lies:
        raw = lie.encode() + bytes(1 << 20)
        tracemalloc.start()
        with pytest.raises(BatchEngineError):
            parse(memoryview(raw), "liar")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 16 << 20


def check_total(raw: bytes) -> None:
    """The reader's contract on arbitrary bytes: a value or a BatchEngineError."""
    try:
        parsed = parse(memoryview(raw), "fuzz")
    except BatchEngineError as error:
        assert error.code.startswith("BE13")  # noqa: PT017
        return
    end = 0
    for info in sorted(parsed.tensors.values(), key=lambda t: t.offset):
        assert info.offset >= max(end, parsed.data_start)
        assert info.offset % parsed.alignment == 0
        end = info.offset + info.n_bytes
        assert end <= len(raw)
    for value in parsed.values.values():
        if isinstance(value, StringArray):
            assert sum(map(len, value)) <= len(raw)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=512))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    check_total(raw)
    check_total(HONEST[:24] + raw)


@settings(max_examples=600, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, len(HONEST) - 9),
            st.sampled_from((1, 2, 4, 8)),
            st.integers(0, 2**64 - 1),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, len(HONEST)),
)
def test_mutations_of_a_valid_file_are_read_or_refused(
    edits: list[tuple[int, int, int]], cut: int
) -> None:
    """Bytes, words and counts are overwritten anywhere, and the file is truncated anywhere."""
    raw = bytearray(HONEST)
    for position, size, value in edits:
        raw[position : position + size] = (value % (1 << (8 * size))).to_bytes(size, "little")
    check_total(bytes(raw))
    check_total(bytes(raw[:cut]))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            Tensor,
            name=st.text(max_size=70),
            shape=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 300), max_size=6).map(tuple),
            kind=st.integers(0, 45) | st.integers(0, 2**32 - 1),
            offset=st.integers(0, 2**64 - 1) | st.integers(0, 40).map(lambda n: n * 32),
        ),
        max_size=4,
    )
)
def test_any_tensor_table_is_read_or_refused(tensors: list[Tensor]) -> None:
    check_total(File(tensors=tensors, data=bytes(4096)).encode())


def test_the_fuzz_oracle_detects_unchecked_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the placement checks the oracle fails on tensors outside the file."""
    import batchengine.gguf as reader

    def place_unchecked(cursor: Any, infos: Any, data_start: int, alignment: int) -> Any:
        return {
            name: reader.TensorInfo(name, kind, shape, data_start + offset, size)
            for name, kind, shape, offset, size in infos
        }

    monkeypatch.setattr(reader, "_place_tensors", place_unchecked)
    with pytest.raises(AssertionError):
        check_total(File(tensors=[Tensor("a", (8,), 0, 1 << 30)]).encode())
