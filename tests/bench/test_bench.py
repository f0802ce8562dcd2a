"""Every bench runs in its quick form, so that it stays runnable; figures are not checked. Those
that take longest are outside the default suite."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kernels
from bench.cuda.serving.modelled_worker import ModelledStep
from bench.engine import SETTINGS
from bench.idle import idle_row
from bench.models import synthetic
from bench.models.llama import LlamaContext, LlamaModel

ROOT = Path(__file__).resolve().parents[2]
DECODE = ("b1", "b4", "b8", "b16", "b32", "4k_b1", "4k_b4")
ROWS = {
    "engine": ("prefill_512", "prefill_4k", *(f"decode_{row}" for row in DECODE)),
    "kernels": (
        "peaks",
        "linear_q4_0_16",
        "linear_q6_k_1",
        "attend_decode_g2_1024",
        "attend_prefill_g2_512",
        "model_prefill_gops",
        "model_decode_gbps",
    ),
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the benches keep their model between the tests here, instead of the user's cache."""
    return tmp_path_factory.mktemp("cache")


def run_bench(name: str, json_path: Path, cache: Path, *more: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "bench", name, "--quick", "--json", str(json_path), *more],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
        timeout=290,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("RESULT "), last
    result = json.loads(last.removeprefix("RESULT "))
    assert json.loads(json_path.read_text())["result"] == result
    return result


@pytest.mark.slow  # measures; the other benches here show that results are written
@pytest.mark.parametrize("name", ["engine", "kernels"])
def test_quick_bench_reports_every_row(name: str, tmp_path: Path, cache: Path) -> None:
    result = run_bench(name, tmp_path / "result.json", cache, "--model", "small")
    for row in ROWS[name]:
        entry = result[row]
        assert isinstance(entry, dict)
        assert all(value > 0 for value in entry.values()), (row, entry)


@pytest.mark.slow  # test_batch_chunks_and_seeds_change_no_token, and tests/model, compare the same
def test_the_invariance_bench_finds_no_difference(tmp_path: Path, cache: Path) -> None:
    result = run_bench("invariance", tmp_path / "result.json", cache)
    assert isinstance(result["sequences"], int)
    assert result["sequences"] >= 100
    assert result["identical"] == result["sequences"], result


@pytest.mark.slow
@pytest.mark.skipif("avx512-vnni" not in kernels.isa_levels(), reason="both builds are the same")
def test_canonical_cost_reports_every_row(tmp_path: Path, cache: Path) -> None:
    """Builds the free-order module if it is missing (a minute), so that its variants compile."""
    result = run_bench("canonical", tmp_path / "result.json", cache)["canonical_cost"]
    assert isinstance(result, dict)
    for row in ("prefill_512", "decode_b1", "decode_b16", "linear_q4_0_512", "attend_decode"):
        assert result[row]["canonical_us"] > 0, row
        assert result[row]["free_us"] > 0, row


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("kv_unified", [False, True])
def test_restored_kv_equals_prefilled_kv(
    setting: dict[str, Any], kv_unified: bool, tmp_path: Path
) -> None:
    """The peer's long rows start from copied state: it must attend to all of it."""
    path = tmp_path / "small.gguf"
    synthetic.write_synthetic(path, synthetic.PRESETS["small"])
    with LlamaModel(path) as model:
        tokens = np.random.default_rng(3).integers(3, model.n_vocab, 40).tolist()
        with LlamaContext(model, n_ctx=256, **setting) as context:
            context.prefill(tokens)
            state = context.save_sequence(0)
            expected = context.prefill([7], start=40)
        with LlamaContext(
            model, n_ctx=1024, n_seq_max=2, kv_unified=kv_unified, **setting
        ) as context:
            for sequence in range(2):
                context.load_sequence(sequence, state)
            context.step([7, 7], [40, 40])
            for sequence in range(2):
                np.testing.assert_allclose(context.logits(sequence), expected, rtol=0.02, atol=0.02)
            context.clear()
            context.load_sequence(1, state.repeated(3))  # restores 120 positions, or raises
            context.cut(1, 40)  # the first of the three is the sequence itself
            np.testing.assert_allclose(
                context.prefill([7], sequence=1, start=40), expected, rtol=0.02, atol=0.02
            )


@pytest.mark.slow
def test_quality_passes_its_gate_on_the_pocket_model(tmp_path: Path, cache: Path) -> None:
    """A few answers and one small synthetic model; bench/results has the figures."""
    result: dict[str, Any] = run_bench("quality", tmp_path / "result.json", cache)
    assert 0.0 < result["pocket"]["ratio"] < 0.05
    assert result["pocket"]["top1"] > 95.0
    assert result["answers"]["kept"] == result["answers"]["items"] > 0 == result["answers"]["lost"]
    assert result["llama"]["engine"] > 95.0
    assert 0.0 < result["plain"]["kl"] < result["plain"]["kl_q4_0"]
    assert 0.0 < result["outliers_20"]["kl"] < result["outliers_20"]["kl_q4_0"]


@pytest.mark.alone
def test_calls_on_a_store_stay_below_their_limits(tmp_path: Path, cache: Path) -> None:
    """The limits are far above the figures, which are those of a million pages too."""
    result = run_bench("store", tmp_path / "result.json", cache)
    assert set(result) == {"lookup_us", "stat_us", "longest_hold_ms"}
    assert 0.0 < result["lookup_us"] < 200.0
    assert 0.0 < result["stat_us"] < 5_000.0
    assert 0.0 < result["longest_hold_ms"] < 200.0


@pytest.mark.alone
def test_router_decides_in_microseconds(tmp_path: Path, cache: Path) -> None:
    """The limit is far above the figure (see bench/results): this machine may be busy."""
    result = run_bench("router", tmp_path / "result.json", cache)
    median_us, p99_us = result["median_us"], result["p99_us"]
    assert isinstance(median_us, float)
    assert isinstance(p99_us, float)
    assert 0.0 < median_us < 200.0
    assert median_us <= p99_us


def test_hop_measures_both_kinds_of_links(tmp_path: Path, cache: Path) -> None:
    result = run_bench("hop", tmp_path / "r.json", cache)
    for key in ("tcp_hop_us", "tls_hop_us", "tcp_layer_us", "tls_layer_us"):
        found = result[f"{key}_range"]
        assert isinstance(found, list)
        low, high = found
        assert low <= result[key] <= high < 100_000


@pytest.mark.slow
def test_idle_measures_every_depth(tmp_path: Path, cache: Path) -> None:
    result = run_bench("idle", tmp_path / "r.json", cache)
    idle = result["idle"]
    assert isinstance(idle, dict)
    assert len(idle) == 3
    assert all(0.0 <= share < 1.0 for share in idle.values())


def test_idle_is_the_time_between_steps_of_all_sessions() -> None:
    step = ModelledStep
    whole = [step(2, float(at), at + 0.75) for at in range(20)]
    steps = [step(1, -9.0, -8.0), *whole, step(1, 30.0, 31.0)]
    row = idle_row(steps, 2)
    assert (row["idle"], row["gap_ms"], row["step_ms"]) == (0.25, 250.0, 750.0)


def test_the_drafts_bench_decodes_changes_of_a_git_history(tmp_path: Path, cache: Path) -> None:
    """A file that is said again has drafts, each of which may be right."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    history, lines = tmp_path / "history", [f"value_{i} = compute({i} * {i})" for i in range(60)]
    history.mkdir()
    one, two = history / "one.py", history / "two.py"
    for i in range(3):
        one.write_text("\n".join([*lines, f"last = {i}", *lines[: 10 + i]]))
        if i == 2:
            two.write_text("\n".join(lines[::-1]))
        for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "change"]):
            who = ["-c", "user.name=bench", "-c", "user.email=bench@localhost"]
            subprocess.run(["git", "-C", str(history), *who, *command], check=True)
    asked = "--model", "small", "--history", str(history), "--answer", "200"
    result = run_bench("drafts", tmp_path / "result.json", cache, *asked)
    rewrites, added = result["rewrite"], result["new"]
    assert isinstance(rewrites, dict)
    assert isinstance(added, dict)
    assert rewrites["tokens_per_step"] > 1
    assert 0 < rewrites["accepted"] <= 1
    assert all(value > 0 for value in rewrites.values())
