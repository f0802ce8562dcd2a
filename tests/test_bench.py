"""Every bench runs its quick form here, so that it cannot rot; figures are not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DECODE = ("b1", "b4", "b8", "b16", "b32", "4k_b1", "4k_b4")
ROWS = {
    "engine": ("prefill_512", *(f"decode_{row}" for row in DECODE)),
    "kernels": (
        "peaks",
        "linear_q4_0_16",
        "linear_q6_k_1",
        "attend_decode_g2_1024",
        "model_prefill_gops",
        "model_decode_gbps",
    ),
}


def run_bench(name: str, json_path: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-m", "bench", name, "--quick", "--json", str(json_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("RESULT "), last
    result = json.loads(last.removeprefix("RESULT "))
    assert json.loads(json_path.read_text())["result"] == result
    return result


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", sorted(ROWS))
def test_quick_bench_reports_every_row(name: str, tmp_path: Path) -> None:
    result = run_bench(name, tmp_path / "result.json")
    for row in ROWS[name]:
        entry = result[row]
        assert isinstance(entry, dict)
        assert all(value > 0 for value in entry.values()), (row, entry)


@pytest.mark.timeout(180)
def test_invariance_is_total(tmp_path: Path) -> None:
    result = run_bench("invariance", tmp_path / "result.json")
    assert isinstance(result["sequences"], int)
    assert result["sequences"] >= 100
    assert result["identical"] == result["sequences"], result
