"""The Grafana dashboard and the alert rules name metrics, labels and values that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from batchengine.metrics import Metrics

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
PROMTOOL = shutil.which("promtool")
FROM_PROMETHEUS = {"instance", "job", "le"}
VALUES = {
    "class": {"interactive", "standard", "background", "batch"},
    "outcome": {"met", "ttft_miss", "tpot_miss", "ttlt_miss"},
    "kind": {"computed", "generated"},
    "result": {"equal", "different", "unknown", "failed"},
}
NAME = re.compile(r"\bbatchengine_[a-z0-9_]+")
SELECTOR = re.compile(r"\{([^{}]*)\}")
MATCHER = re.compile(r'(\w+)\s*(=~|!=|!~|=)\s*"([^"]*)"')
GROUPING = re.compile(r"\bby\s*\(([^)]*)\)")


def exposed() -> dict[str, set[str]]:
    """The name of every series in /metrics -> its labels."""
    found: dict[str, set[str]] = {}
    for metric in vars(Metrics()).values():
        if not isinstance(metric, MetricWrapperBase):
            continue
        name, labels = metric._name, set(metric._labelnames)
        names = {
            "counter": (f"{name}_total",),
            "gauge": (name,),
            "histogram": (f"{name}_bucket", f"{name}_sum", f"{name}_count"),
        }[metric._type]
        found |= dict.fromkeys(names, labels)
    return found


def wrong(expression: str, series: dict[str, set[str]]) -> list[str]:
    """The names in a PromQL expression that nothing stands for."""
    bare = SELECTOR.sub("", expression)
    used = set(NAME.findall(bare))
    labels = set[str]().union(FROM_PROMETHEUS, *(series.get(name, set()) for name in used))
    problems = [f"no metric {name}" for name in used - series.keys()]
    for selector in SELECTOR.findall(expression):
        for label, operator, value in MATCHER.findall(selector):
            if label not in labels:
                problems.append(f"no label {label}")
            values = value.split("|") if operator in ("=~", "!~") else [value]
            if label in VALUES and not set(values) <= VALUES[label]:
                problems.append(f"no value {value} of {label}")
    for group in GROUPING.findall(bare):
        names = {name.strip() for name in group.split(",")}
        problems += [f"no label {name}" for name in names - labels]
    return problems


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / "grafana.json").read_text())["panels"]
    return found


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_grafana_dashboard_names_metrics_that_exist() -> None:
    series = exposed()
    shown = [panel for panel in panels() if panel["type"] != "row"]
    expressions = [one["expr"] for panel in shown for one in panel["targets"]]
    assert len(expressions) > 20
    for expression in expressions:
        assert not wrong(expression, series), expression
    names = {legend for p in shown for t in p["targets"] for legend in
             re.findall(r"\{\{(\w+)\}\}", t["legendFormat"])}  # fmt: skip
    assert names <= FROM_PROMETHEUS.union(*series.values())


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_alerts_name_metrics_that_exist_and_say_what_to_do() -> None:
    series = exposed() | {"up": {"job"}}
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found) > 8
    for rule in found:
        assert not wrong(rule["expr"], series), rule["expr"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "action"}
        assert NAME.search(rule["expr"]) or rule["expr"].startswith("up{")


def test_the_scrape_sample_fits_the_alerts() -> None:
    sample = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert sample["rule_files"] == ["alerts.yml"]
    assert [one["job_name"] for one in sample["scrape_configs"]] == ["batchengine"]


@pytest.mark.skipif(
    PROMTOOL is None, reason="promtool (Debian package prometheus) is not installed"
)
def test_promtool_finds_nothing_wrong() -> None:
    """With the rules, the scrape sample that names them, and the text of /metrics."""
    metrics = Metrics()
    metrics.lane_up.labels(lane="fast").set(1)
    for arguments, text in (
        (["config", str(FOLDER / "prometheus.yml")], None),
        (["rules", "--lint-fatal", str(FOLDER / "alerts.yml")], None),
        (["metrics"], metrics.render()[0]),
    ):
        command = [str(PROMTOOL), "check", *arguments]
        done = subprocess.run(command, input=text, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), done


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("batchengine_nothing", "no metric"),
        ('batchengine_lane_up{peer="x"}', "no label"),
        ("sum by (peer) (batchengine_lane_up)", "no label"),
        ('batchengine_requests_waiting{class="urgent"}', "no value"),
    ],
)
def test_a_wrong_name_is_found(expression: str, problem: str) -> None:
    assert any(problem in one for one in wrong(expression, exposed()))
