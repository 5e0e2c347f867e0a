"""Prometheus metrics: the server's own, and the cluster's from its snapshot. Owns a registry; knows no route."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from flare_cli.snapshot import ClusterSnapshot

__all__ = ["CONTENT_TYPE", "ServerMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


class ServerMetrics:
    """Counters of one server process. Used on the event loop's thread."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self.http_requests = Counter(
            "flare_http_requests", "HTTP requests answered.", ("path", "status"), registry=registry
        )
        self.requests_in_work = Gauge("flare_http_requests_in_work", "Generation requests in work.", registry=registry)
        self.ttft_seconds = Histogram(
            "flare_request_ttft_seconds", "Time from request to first output.", buckets=_SECONDS, registry=registry
        )
        self.request_seconds = Histogram(
            "flare_request_seconds", "Time from request to the end of its output.", buckets=_SECONDS, registry=registry
        )

    def exposition(self, snapshot: ClusterSnapshot) -> bytes:
        """The text that Prometheus scrapes."""
        registry = CollectorRegistry()
        registry.register(_SnapshotCollector(snapshot))
        return generate_latest(self._registry) + generate_latest(registry)


class _SnapshotCollector:
    """One snapshot as metric families."""

    def __init__(self, snapshot: ClusterSnapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        snapshot = self._snapshot
        yield GaugeMetricFamily("flare_up", "Whether the engine takes requests.", float(snapshot.state == "ready"))
        yield GaugeMetricFamily("flare_world_size", "Number of ranks.", snapshot.world_size)
        yield CounterMetricFamily("flare_steps", "Steps planned.", snapshot.steps_total)
        yield from self._requests_and_tokens()
        yield from self._cache()

    def _requests_and_tokens(self) -> Iterator[Metric]:
        requests, tokens = self._snapshot.requests, self._snapshot.tokens
        now = GaugeMetricFamily("flare_requests", "Requests in the engine.", labels=("state",))
        now.add_metric(("running",), requests.running)
        now.add_metric(("waiting",), requests.waiting)
        yield now
        ended = CounterMetricFamily("flare_requests_ended", "Requests that ended.", labels=("how",))
        ended.add_metric(("finished",), requests.finished_total)
        ended.add_metric(("cancelled",), requests.cancelled_total)
        ended.add_metric(("failed",), requests.failed_total)
        yield ended
        yield CounterMetricFamily("flare_preemptions", "Requests preempted.", requests.preempted_total)
        yield CounterMetricFamily("flare_request_prompt_tokens", "Prompt tokens of requests.", tokens.prompt_total)
        yield CounterMetricFamily("flare_request_output_tokens", "Output tokens of requests.", tokens.output_total)
        yield CounterMetricFamily("flare_cache_lookup_tokens", "Prompt tokens looked up.", tokens.lookup_total)
        hits = CounterMetricFamily("flare_cache_hit_tokens", "Tokens restored and verified.", labels=("tier",))
        for tier, count in sorted(tokens.hit_total.items()):
            hits.add_metric((tier,), count)
        yield hits

    def _cache(self) -> Iterator[Metric]:
        pages = GaugeMetricFamily("flare_pages", "Device pages.", labels=("state",))
        for state in ("free", "held", "cached", "quarantined"):
            pages.add_metric((state,), getattr(self._snapshot.pages, state))
        yield pages
        records = GaugeMetricFamily("flare_cache_records", "Records of a tier.", labels=("tier",))
        used = GaugeMetricFamily("flare_cache_used_bytes", "Bytes of the largest rank's records.", labels=("tier",))
        limit = GaugeMetricFamily("flare_cache_limit_bytes", "The agreed limit.", labels=("tier",))
        jobs = CounterMetricFamily("flare_cache_jobs", "Transfer jobs reported.", labels=("tier", "op"))
        failures = CounterMetricFamily("flare_cache_job_failures", "Transfer jobs failed.", labels=("tier", "op"))
        for tier in self._snapshot.tiers:
            records.add_metric((tier.tier,), tier.num_records)
            used.add_metric((tier.tier,), tier.used_bytes)
            limit.add_metric((tier.tier,), tier.limit_bytes)
            for op, count in sorted(tier.jobs_total.items()):
                jobs.add_metric((tier.tier, op), count)
            for op, count in sorted(tier.failures_total.items()):
                failures.add_metric((tier.tier, op), count)
        yield from (records, used, limit, jobs, failures)
