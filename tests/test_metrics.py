"""Metric names and labels are an interface; the number of label values is bounded."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from batchengine.metrics import LABEL_VALUES_MAX, Metrics

LABELS = {
    "requests_waiting": ("class",),
    "requests_running": ("class", "route"),
    "kv_usage_ratio": ("tier",),
    "cache_config_info": ("block_size", "num_gpu_blocks"),
    "ttft_seconds": ("class", "route"),
    "tpot_seconds": ("class", "route"),
    "e2e_seconds": ("class", "route"),
    "slo_requests_total": ("class", "outcome"),
    "prefix_hit_tokens_total": (),
    "ignored_fields_total": ("field",),
    "worker_restarts_total": ("lane",),
    "steps_total": ("lane",),
    "step_seconds": ("lane",),
    "tokens_total": ("kind",),
    "lane_tokens_total": ("lane", "kind"),
    "numeric_faults_total": (),
    "sessions_forgotten_total": (),
    "kv_pages_total": ("event",),
    "route_decisions_total": ("lane", "reason"),
    "ttft_predicted_seconds": ("class", "route"),
    "tpot_predicted_seconds": ("class", "route"),
    "prediction_ratio": ("of", "route"),
    "shed_total": ("class", "reason"),
    "promotions_total": ("from", "to", "result"),
    "promotion_seconds": (),
    "promotion_gap_seconds": (),
    "restores_total": ("choice",),
    "restore_ratio": (),
}


def test_metrics_have_the_documented_names_and_labels() -> None:
    metrics = Metrics()
    for name, labels in LABELS.items():
        assert tuple(getattr(metrics, name)._labelnames) == labels, name


def test_metrics_render_in_the_text_format() -> None:
    metrics = Metrics()
    metrics.requests_waiting.labels("batch").set(3)
    metrics.ttft_seconds.labels("interactive", "cpu").observe(0.3)
    metrics.tokens_total.labels("generated").inc(7)
    metrics.steps_total.labels("cpu").inc()
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    samples = {
        (s.name, *sorted(s.labels.values())): s.value
        for family in text_string_to_metric_families(body.decode())
        for s in family.samples
    }
    assert samples["batchengine_requests_waiting", "batch"] == 3
    assert samples["batchengine_ttft_seconds_count", "cpu", "interactive"] == 1
    assert samples["batchengine_ttft_seconds_bucket", "0.25", "cpu", "interactive"] == 0
    assert samples["batchengine_ttft_seconds_bucket", "0.5", "cpu", "interactive"] == 1
    assert samples["batchengine_tokens_total", "generated"] == 7
    assert samples["batchengine_steps_total", "cpu"] == 1


def test_two_daemons_in_one_process_have_separate_metrics() -> None:
    one, other = Metrics(), Metrics()
    one.prefix_hit_tokens_total.inc(5)
    assert b"prefix_hit_tokens_total 5.0" in one.render()[0]
    assert b"prefix_hit_tokens_total 0.0" in other.render()[0]


def test_clients_cannot_add_label_values() -> None:
    metrics = Metrics()
    for i in range(1000):
        metrics.count_ignored_field(f"field_{i}", "a")
    for name in ("x" * 1000, "naïve", "field_1"):
        metrics.count_ignored_field(name, "a")
    metrics.count_ignored_field("of_another_key", "b")
    text = metrics.render()[0].decode()
    rows = [r for r in text.splitlines() if r.startswith("batchengine_ignored_fields_total{")]
    half = LABEL_VALUES_MAX // 2
    assert len(rows) == half + 2
    assert f'field="other"}} {1000 - half + 2}.0' in text
    assert 'field="field_1"} 2.0' in text
    assert 'field="of_another_key"} 1.0' in text
    for number in range(1000):
        metrics.count_ignored_field(f"more_{number}", f"tenant {number}")
    text = metrics.render()[0].decode()
    assert text.count("batchengine_ignored_fields_total{") <= LABEL_VALUES_MAX + 1
    assert "_created" not in text
