"""Prometheus metrics: the server's own, and the cluster's from its snapshot. Owns a registry; knows no route.

Names and help of what the engine and the record path count stand in ``flare_core.metrics``; they are given values here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from flare_cache.job_times import BUCKET_SECONDS
from flare_cli.snapshot import CacheSnapshot, ClusterSnapshot, PoolSnapshot
from flare_core.engine.statistics import EngineSnapshot, HistogramSnapshot
from flare_core.metrics import LATENCY_BOUNDS_SECONDS, METRICS, MetricKind, MetricSpec

__all__ = ["CONTENT_TYPE", "ServerMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SPECS = {spec.name: spec for spec in METRICS}

Labelled = Iterable[tuple[tuple[str, ...], float]]


class ServerMetrics:
    """Counters of one server process. Used on the event loop's thread."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.http_requests = Counter(
            "flare_http_requests", "HTTP requests answered.", ("path", "status"), registry=self._registry
        )
        self.requests_in_work = Gauge(
            "flare_http_requests_in_work", "Generation requests in work.", registry=self._registry
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
        yield GaugeMetricFamily("flare_up", "Whether requests are taken.", float(self._snapshot.state == "ready"))
        yield GaugeMetricFamily("flare_world_size", "Number of ranks.", self._snapshot.world_size)
        poisoned = self._snapshot.poisoned
        yield _family("flare_poisoned_total", (((reason,), count) for reason, count in poisoned.items()))
        if self._snapshot.engine is not None:
            yield from _engine(self._snapshot.engine)
        if self._snapshot.cache is not None:
            yield from _cache(self._snapshot.cache)


def _engine(engine: EngineSnapshot) -> Iterator[Metric]:
    pages = {
        "free": engine.pages_free,
        "held": engine.pages_held,
        "cached": engine.pages_cached,
        "quarantined": engine.pages_quarantined,
    }
    num_hits = sum(engine.hit_tokens.values())
    values: dict[str, float] = {
        "flare_requests_running": engine.running,
        "flare_requests_waiting": engine.waiting,
        "flare_requests_fetching": engine.fetching,
        "flare_request_prompt_tokens_total": engine.prompt_tokens,
        "flare_request_output_tokens_total": engine.output_tokens,
        "flare_request_preemptions_total": engine.num_preemptions,
        "flare_engine_steps_total": engine.num_steps,
        "flare_engine_own_seconds_total": engine.own_seconds,
        "flare_cache_lookups_total": engine.num_lookups,
        "flare_cache_lookup_tokens_total": engine.lookup_tokens,
        "flare_cache_miss_tokens_total": engine.lookup_tokens - num_hits,
        "flare_cache_store_failures_total": engine.num_store_failures,
        "flare_spec_proposed_tokens_total": engine.draft_tokens,
        "flare_spec_accepted_tokens_total": engine.accepted_tokens,
    }
    for name, value in values.items():
        yield _family(name, [((), value)])
    yield _family("flare_device_pages", (((state,), count) for state, count in pages.items()))
    yield _family("flare_cache_hit_tokens_total", (((str(t),), count) for t, count in engine.hit_tokens.items()))
    yield _family("flare_request_finished_total", (((reason,), count) for reason, count in engine.finished.items()))
    for name, histogram in (
        ("flare_request_ttft_seconds", engine.ttft),
        ("flare_request_itl_seconds", engine.itl),
        ("flare_request_queue_seconds", engine.queue),
        ("flare_request_restore_seconds", engine.restore),
    ):
        yield _latency(name, histogram)


def _cache(cache: CacheSnapshot) -> Iterator[Metric]:
    tiers = cache.tiers
    yield _family("flare_cache_records", (((tier.tier,), tier.num_records) for tier in tiers))
    yield _family("flare_cache_bytes", (((tier.tier,), tier.charged_bytes) for tier in tiers))
    yield _family("flare_cache_limit_bytes", (((tier.tier,), tier.limit_bytes) for tier in tiers))
    yield _family("flare_cache_evicted_records_total", (((tier.tier,), tier.records_evicted) for tier in tiers))
    yield _family("flare_cache_join_records", (((verdict,), count) for verdict, count in cache.join.items()))
    yield _family("flare_cache_stores_stopped", (((tier.tier,), tier.stores_stopped is not None) for tier in tiers))
    yield _family("flare_cache_reads_stopped", (((tier.tier,), tier.reads_stopped is not None) for tier in tiers))
    if cache.pool is not None:
        yield from _pool(cache.pool)
    dropped = cache.stores_dropped
    yield _family("flare_cache_dropped_stores_total", (((reason,), count) for reason, count in dropped.items()))
    seconds = HistogramMetricFamily(
        "flare_cache_job_seconds", _SPECS["flare_cache_job_seconds"].help, labels=("op", "rank")
    )
    failures: list[tuple[tuple[str, ...], float]] = []
    for job in cache.jobs:
        labels = (job.op, str(job.rank))
        seconds.add_metric(labels, _buckets(BUCKET_SECONDS, job.counts), job.sum_seconds)
        failures += [((*labels, reason), count) for reason, count in job.failures.items()]
    yield seconds
    yield _family("flare_cache_job_failures_total", failures)


def _pool(pool: PoolSnapshot) -> Iterator[Metric]:
    values: dict[str, float | None] = {
        "flare_pool_on": float(pool.state == "on"),
        "flare_pool_sessions_total": pool.sessions,
        "flare_pool_lookups_total": pool.lookups,
        "flare_pool_unanswered_lookups_total": pool.lookups_unanswered,
        "flare_pool_refused_restores_total": pool.restores_refused,
        "flare_pool_pending_records": pool.pending + pool.backlog,
        "flare_pool_pending_bytes": pool.pending_bytes,
        "flare_pool_put_records_total": pool.records_put,
        "flare_pool_latency_seconds": pool.pool_latency_seconds,
        "flare_pool_restore_bytes_per_second": pool.pool_bytes_per_second,
        "flare_pool_prefill_tokens_per_second": pool.prefill_tokens_per_second,
    }
    for name, value in values.items():
        if value is not None:
            yield _family(name, [((), value)])
    yield _family("flare_pool_off_reasons", (((rank, reason), 1) for rank, reason in pool.reasons.items()))
    yield _family("flare_pool_dropped_records_total", (((reason,), n) for reason, n in pool.dropped.items()))


def _family(name: str, values: Labelled) -> Metric:
    """A counter or a gauge by its name in the table."""
    spec: MetricSpec = _SPECS[name]
    make = CounterMetricFamily if spec.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = make(spec.name.removesuffix("_total"), spec.help, labels=spec.labels)
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _latency(name: str, histogram: HistogramSnapshot) -> Metric:
    family = HistogramMetricFamily(name, _SPECS[name].help, labels=())
    family.add_metric((), _buckets(LATENCY_BOUNDS_SECONDS, histogram.counts), histogram.sum_seconds)
    return family


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    names = [*(repr(float(bound)) for bound in bounds), "+Inf"]
    return list(zip(names, map(float, accumulate(counts)), strict=True))
