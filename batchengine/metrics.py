"""The metric objects of one daemon and the text of `/metrics`.

Owns names, labels and buckets; refuses unbounded label values: a label is an enum of
this program or a name from a capped table. Times are recorded in seconds, as Prometheus expects.
"""

from __future__ import annotations

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

disable_created_metrics()  # of each series the time of its creation: no query here needs it
PREFIX = "batchengine_"
LABEL_VALUES_MAX = 64  # distinct ignored field names kept; clients choose these names
OTHER = "other"
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600)
TPOT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2, 5)
E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 3600)
RATIO_BUCKETS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10, 100)
MOVE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
STEP_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


class Metrics:
    """All metrics of one daemon, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        r = self.registry
        c, rt = "class", "route"

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=r)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, text, labels, registry=r)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(PREFIX + name, text, labels, registry=r, buckets=buckets)

        self.requests_waiting = gauge("requests_waiting", "Requests waiting for a seat", c)
        self.requests_running = gauge("requests_running", "Requests holding a seat", c, rt)
        self.kv_usage_ratio = gauge("kv_usage_ratio", "Share of the KV budget in use", "tier")
        self.cache_config_info = gauge(
            "cache_config_info",
            "Constant 1; KV geometry in the labels",
            "block_size",
            "num_gpu_blocks",
        )
        self.ttft_seconds = histogram("ttft_seconds", "Arrival to first token", TTFT_BUCKETS, c, rt)
        self.tpot_seconds = histogram(
            "tpot_seconds", "Mean time per later token of a request", TPOT_BUCKETS, c, rt
        )
        self.e2e_seconds = histogram("e2e_seconds", "Arrival to last token", E2E_BUCKETS, c, rt)
        self.timelines_total = counter(
            "timelines_total", "Requests with a session id, by how they went on with it", "use"
        )
        self.history_missing_total = counter(
            "history_missing_total", "Requests of a session that held none of its earlier messages"
        )
        self.slo_requests_total = counter(
            "slo_requests_total", "Finished requests by what became of their targets", c, "outcome"
        )
        self.prefix_hit_tokens_total = counter(
            "prefix_hit_tokens_total", "Prompt tokens whose KV was found instead of computed"
        )
        self.kv_restored_tokens_used_total = counter(
            "kv_restored_tokens_used_total",
            "Tokens whose KV came back with a reopened session and was used",
        )
        self.kv_rejected_total = counter(
            "kv_rejected_total", "Turns that reused less KV than their session had", "reason"
        )
        self.tokens_total = counter("tokens_total", "Tokens computed", "kind")
        self.lane_tokens_total = counter(
            "lane_tokens_total",
            "Tokens that a lane has computed, generated, drafted, and accepted of drafts",
            "lane",
            "kind",
        )
        self.ignored_fields_total = counter(
            "ignored_fields_total", "Request fields that were not understood", "field"
        )
        self.worker_restarts_total = counter(
            "worker_restarts_total", "Lane workers started again after dying", "lane"
        )
        self.steps_total = counter("steps_total", "Steps run", "lane")
        self.step_seconds = histogram("step_seconds", "Duration of a step", STEP_BUCKETS, "lane")
        self.step_predicted_seconds_total = counter(
            "step_predicted_seconds_total", "Step time the cost model predicted", "lane"
        )
        self.event_loop_lag_seconds = histogram(
            "event_loop_lag_seconds",
            "By how much a timer of the daemon's event loop was late; once a second",
            STEP_BUCKETS,
        )
        self.preemptions_total = counter("preemptions_total", "Seats taken back mid-run", c)
        self.numeric_faults_total = counter(
            "numeric_faults_total", "Sessions stopped because a row was not finite"
        )
        self.sessions_forgotten_total = counter(
            "sessions_forgotten_total", "Idle sessions whose KV table was inconsistent"
        )
        self.kv_pages_total = counter("kv_pages_total", "KV pages by what happened", "event")
        self.kv_scrubbed_pages_total = counter(
            "kv_scrubbed_pages_total", "Stored pages read again while idle", "result"
        )
        self.canaries_total = counter(
            "canaries_total", "Times a lane computed the canary page", "lane", "result"
        )
        self.kv_page_slots = gauge("kv_page_slots", "Page slots of the store", "state")
        self.kv_tier_ok = gauge("kv_tier_ok", "1 = pages can be cached")
        self.ledger_ok = gauge("ledger_ok", "1 = the token ledger can be written")
        self.serving = gauge("serving", "1 = a request sent now is computed")
        self.lane_up = gauge("lane_up", "1 = the lane computes", "lane")
        self.lane_confined = gauge(
            "lane_confined", "1 = the lane's worker has given up what it does not need", "lane"
        )
        # routing, moves and restores; actual times are in ttft_seconds
        self.route_decisions_total = counter(
            "route_decisions_total", "Routing decisions", "lane", "reason"
        )
        self.ttft_predicted_seconds = histogram(
            "ttft_predicted_seconds",
            "TTFT as predicted when the lane was chosen",
            TTFT_BUCKETS,
            c,
            rt,
        )
        self.tpot_predicted_seconds = histogram(
            "tpot_predicted_seconds",
            "TPOT as predicted when the lane was chosen",
            TPOT_BUCKETS,
            c,
            rt,
        )
        self.prediction_ratio = histogram(
            "prediction_ratio", "Actual over predicted time: 1 = right", RATIO_BUCKETS, "of", rt
        )
        self.shed_total = counter("shed_total", "Requests refused for load", c, "reason")
        self.promotions_total = counter(
            "promotions_total", "Sessions moved between lanes", "from", "to", "result"
        )
        self.promotion_seconds = histogram(
            "promotion_seconds", "A move from its request to its end", MOVE_BUCKETS
        )
        self.promotion_gap_seconds = histogram(
            "promotion_gap_seconds", "Longest pause a reader saw because of a move", MOVE_BUCKETS
        )
        self.restores_total = counter(
            "restores_total", "KV on disk: read or computed again", "choice"
        )
        self.restore_ratio = histogram(
            "restore_ratio", "Actual over predicted time of reading KV", RATIO_BUCKETS
        )
        self.peer_up = gauge("peer_up", "1 = the link to this peer is up", "peer")
        self.peer_data_up = gauge(
            "peer_data_up", "1 = the data link to the worker of this peer is up", "peer"
        )
        self.peer_rtt_seconds = gauge(
            "peer_rtt_seconds", "Median round trip to this peer; 0 = not measured", "peer"
        )
        self.peer_pages_taken = gauge(
            "peer_pages_taken", "Pages of this daemon's sessions that this peer keeps", "peer"
        )
        self.peer_pages_given = gauge(
            "peer_pages_given", "Pages that are kept here for sessions of this peer", "peer"
        )
        self.of_peer = (
            self.peer_up,
            self.peer_data_up,
            self.peer_rtt_seconds,
            self.peer_pages_taken,
            self.peer_pages_given,
        )
        self.page_moves = gauge("page_moves", "Moves of pages to and from peers under way")
        self.peer_connections_refused_total = counter(
            "peer_connections_refused_total", "Connections to the peer port that came to nothing"
        )
        self._fields: dict[str, str] = {}  # name -> the tenant that sent it first

    def count_ignored_field(self, field: str, tenant: str) -> None:
        """Count an ignored request field. A tenant adds as many of LABEL_VALUES_MAX names as it
        leaves to others; its further ones are "other"."""
        if field not in self._fields:
            left = LABEL_VALUES_MAX - len(self._fields)
            is_full = list(self._fields.values()).count(tenant) >= left
            if is_full or len(field) > 64 or not field.isascii():
                field = OTHER
            else:
                self._fields[field] = tenant
        self.ignored_fields_total.labels(field).inc()

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Finished requests by class and what became of their targets."""
        found: dict[str, dict[str, int]] = {}
        for metric in self.slo_requests_total.collect():
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    of_class = found.setdefault(sample.labels["class"], {})
                    of_class[sample.labels["outcome"]] = int(sample.value)
        return found

    def prefix_hits(self) -> int:
        """Prompt tokens whose KV was found instead of computed."""
        samples = [s for metric in self.prefix_hit_tokens_total.collect() for s in metric.samples]
        return int(sum(s.value for s in samples if s.name.endswith("_total")))

    def render(self) -> tuple[bytes, str]:
        """Return the body of a scrape and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
