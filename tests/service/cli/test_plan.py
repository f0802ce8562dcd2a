"""`batchengine plan`: from the header of a model and the peaks of a machine."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kernels
from batchengine import config
from batchengine.core import BatchEngineError
from batchengine.policy.capacity import cpu_processor
from bench.models.synthetic import PRESETS, write_sparse
from service.cli import main, plan
from service.cli.machine import check as checks
from tests.hostile.rewrite import edited

GIB = 1 << 30
POCKET = Path(__file__).resolve().parents[3] / "pocket/pocket-q4_0.gguf"
MACHINE = {
    "threads": 2, "isa": "any", "read_gbps": 30.0, "int8_gops": 900, "memory_bytes": 16 << 30,
    "memory_free_bytes": 8 << 30, "store": "/kv", "store_budget_bytes": 4 << 30,
    "disk_free_bytes": 9 << 30, "disk_bytes": 99 << 30,
}  # fmt: skip
MEASURE = plan.measure


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with known peaks."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CACHE_DIRECTORY", str(tmp_path))  # else that of root, where one may lie
    monkeypatch.setattr(plan, "measure", lambda loaded: (MACHINE, processor(16 << 30)))


def processor(memory_bytes: int) -> Any:
    return cpu_processor("cpu, 2 threads", 30.0, 900.0, memory_bytes)


def test_the_plan_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", str(POCKET), "--gpu", "h200", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["layers"] == 4
    cpu, gpu = found["lanes"]
    assert cpu["fits"]
    assert [c["context_tokens"] for c in cpu["contexts"]] == [2048, 8192, 16384]
    assert gpu["contexts"][0]["sessions"] > cpu["contexts"][0]["sessions"]
    assert main.run(["plan", str(POCKET)]) == 0
    text = capsys.readouterr().out
    assert "cpu, 2 threads: " in text
    assert "gpu" not in text
    assert "2 MiB beside the model's 2 MiB, made at the first start" in text
    assert found["model"]["packed_file"] in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_plan_of_a_model_with_experts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Qwen3-30B-A3B as Q4_0: the parameters of its card, and a sixteenth of its experts a token."""
    path = tmp_path / "m.gguf"
    write_sparse(path, PRESETS["30b-a3b"])
    main.run(["plan", str(path), "--gpu", "h200", "--json"])
    found = json.loads(capsys.readouterr().out)
    model, gpu = found["model"], found["lanes"][1]
    assert model["parameters"] / 1e9 == pytest.approx(30.53, abs=0.01)
    assert model["parameters_used"] / 1e9 == pytest.approx(3.35, abs=0.01)
    assert (model["experts"], model["experts_used"]) == (128, 8)
    assert 15 * GIB < model["packed_bytes"] < 17 * GIB
    assert 1.5 * GIB < model["step_bytes"] < 2 * GIB  # 0.9 of experts, 0.5 of attention, the head
    assert 10 * GIB < model["batch_step_bytes"] < 11 * GIB
    alone = gpu["contexts"][0]
    assert 2.5 < alone["batch_tpot_ms"] / alone["tpot_ms"] < 5.0
    main.run(["plan", str(path)])
    text = capsys.readouterr().out
    assert "experts  8 of 128 for a token: 3.35 of 30.53 G parameters; a step reads 1.7 GiB" in text
    assert max(map(len, text.splitlines())) <= 120
    assert main.run(["plan", str(POCKET), "--json"]) == 0
    dense = json.loads(capsys.readouterr().out)["model"]
    assert dense["experts"] == 0
    assert dense["parameters"] == dense["parameters_used"]
    assert dense["step_bytes"] == dense["batch_step_bytes"]


def test_the_plan_of_a_model_whose_first_layers_are_dense(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """GLM-4.5-Air as Q4_0: a token uses the dense layer and the shared experts whole."""
    path = tmp_path / "m.gguf"
    write_sparse(path, PRESETS["glm4moe-106b-a12b"])
    main.run(["plan", str(path), "--gpu", "h200", "--json"])
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["parameters"] / 1e9 == pytest.approx(106.85, abs=0.01)
    assert model["parameters_used"] / 1e9 == pytest.approx(13.42, abs=0.01)  # two ends, too
    assert (model["experts"], model["experts_used"], model["layers"]) == (128, 8, 46)


def test_a_model_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "measure", lambda loaded: (MACHINE, processor(1 << 20)))
    assert main.run(["plan", str(POCKET)]) == 1
    assert "does not fit. Weights take 2 MiB, there is room for 1 MiB" in capsys.readouterr().out


def test_the_measurement_takes_no_more_memory_than_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A virtual machine may say that its cache has 320 MiB: sixteen of them are 5 GiB."""
    taken: list[int] = []

    def read(threads: int, size: int = 0) -> float:
        taken.append(threads * size)
        return 1.0

    monkeypatch.setattr(kernels, "peak_read_gbps", read)
    monkeypatch.setattr(kernels, "peak_int8_gops", lambda threads, seconds: 1.0)
    MEASURE(config.load(None, {"model.path": str(POCKET)}))
    assert 0 < taken[-1] <= 1 << 30


def test_packed_weights_without_a_use_are_named_and_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CACHE_DIRECTORY", "STATE_DIRECTORY", "RUNTIME_DIRECTORY"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    cache = tmp_path / "CACHE_DIRECTORY"
    old, new = cache / "old-1.weights", cache / "new-1.weights"
    for file in (old, new):
        file.write_bytes(bytes(1024))
        file.chmod(0o600)
    os.utime(old, (1000, 1000))
    main.run(["doctor"])
    text = capsys.readouterr().out
    assert "1 packed model, 1.0 KiB, unused for 30 days. Fix: batchengine store weights" in text
    assert main.run(["store", "weights"]) == 0
    assert "2.0 KiB of packed weights" in capsys.readouterr().out
    assert main.run(["store", "weights", "--remove", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [(row["file"], row["state"]) for row in files] == [
        ("new-1.weights", "unused"),
        ("old-1.weights", "removed"),
    ]
    assert list(cache.iterdir()) == [new]


def test_what_serve_would_refuse_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "notes.gguf"
    other.write_text("not a model, but some text of another kind")
    assert main.run(["plan", str(other)]) == 1
    assert "BE1302" in capsys.readouterr().err
    assert main.run(["plan", str(tmp_path / "absent.gguf")]) == 2
    assert main.run(["plan", str(POCKET), "--gpu", "voodoo2"]) == 2
    assert "h200" in capsys.readouterr().err


@pytest.mark.parametrize("has_template", [True, False])
def test_a_vocabulary_that_serve_would_refuse_is_refused(
    has_template: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Before the weights are packed, and whether or not the file has a chat template."""

    def edit(values: dict[str, Any], _: object) -> None:
        del values["tokenizer.ggml.merges"]
        if not has_template:
            del values["tokenizer.chat_template"]

    shutil.copyfile(POCKET, tmp_path / "m.gguf")
    model, path = edited(tmp_path / "m.gguf", edit), tmp_path / "c.toml"
    places = f'cache_dir = "{tmp_path}/cache"\n[store]\ndir = "{tmp_path}/kv"\n'
    path.write_text(f'{places}[server]\nport = 0\nadmin_socket = "{tmp_path}/a.sock"\n')
    for command in ("plan", "check", "serve"):
        assert main.run([command, str(model), "--config", str(path)]) == 1
        assert "no tokenizer.ggml.merges" in capsys.readouterr().err


def test_a_read_only_file_system_is_called_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = config.load(None, {"store.dir": str(tmp_path / "kv"), "cache_dir": str(tmp_path)})
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(BatchEngineError, match=r"read-only file system.*--store"):
        checks.check_folders(loaded)


def test_a_store_without_room_for_open_pages_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `serve` refuses it once the model is loaded."""
    given: dict[str, object] = {
        "model.path": str(POCKET), "store.dir": str(tmp_path / "kv"), "server.port": 0,
        "store.budget_bytes": 64 << 20, "cache_dir": str(tmp_path), "store.allow_volatile": True,
    }  # fmt: skip
    loaded = config.load(None, given)
    for free_bytes, is_said in ((9 << 20, False), (7 << 20, True)):
        monkeypatch.setattr(checks, "disk_bytes", lambda _, free=free_bytes: (free, 1 << 40))
        said = [text for text in checks.check(loaded).warnings if text.startswith("open pages")]
        assert bool(said) == is_said
