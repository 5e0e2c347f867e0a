"""Names of the metrics that flare exports, with their kinds, labels and help: one table, read by every exporter."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["LATENCY_BOUNDS_SECONDS", "METRICS", "MetricKind", "MetricSpec"]


class MetricKind(enum.StrEnum):
    """Prometheus types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric; ``labels`` in the order in which values are given."""

    name: str
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()


LATENCY_BOUNDS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of every latency histogram."""

_C, _G, _H = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("flare_requests_running", _G, "Requests that take part in steps."),
    MetricSpec("flare_requests_waiting", _G, "Requests that wait for pages or a slot."),
    MetricSpec("flare_requests_fetching", _G, "Requests whose prefix is being restored."),
    MetricSpec("flare_request_finished_total", _C, "Requests that ended, by reason.", ("reason",)),
    MetricSpec("flare_request_prompt_tokens_total", _C, "Prompt tokens of admitted requests."),
    MetricSpec("flare_request_output_tokens_total", _C, "Output tokens sent."),
    MetricSpec("flare_request_preemptions_total", _C, "Times a request lost its pages and was computed again."),
    MetricSpec("flare_request_ttft_seconds", _H, "Arrival to first token."),
    MetricSpec("flare_request_itl_seconds", _H, "Time between two tokens of a request."),
    MetricSpec("flare_request_queue_seconds", _H, "Arrival to admission."),
    MetricSpec("flare_request_restore_seconds", _H, "Time a request waited for its prefix to be restored."),
    MetricSpec("flare_engine_steps_total", _C, "Steps executed."),
    MetricSpec("flare_engine_own_seconds_total", _C, "Time the engine spent outside the model runner."),
    MetricSpec("flare_device_pages", _G, "Device pages by state; they add up to the total.", ("state",)),
    MetricSpec("flare_cache_lookups_total", _C, "Prompts looked up in the prefix cache."),
    MetricSpec("flare_cache_lookup_tokens_total", _C, "Prompt tokens looked up: the hits of all tiers and the misses."),
    MetricSpec("flare_cache_hit_tokens_total", _C, "Prompt tokens not computed, counted once verified.", ("tier",)),
    MetricSpec("flare_cache_miss_tokens_total", _C, "Prompt tokens looked up and computed."),
    MetricSpec("flare_cache_store_failures_total", _C, "Stores that ended with a failure."),
    MetricSpec("flare_cache_job_seconds", _H, "Duration of transfer jobs.", ("op", "rank")),
    MetricSpec("flare_cache_job_failures_total", _C, "Transfer jobs that failed.", ("op", "rank", "reason")),
    MetricSpec("flare_cache_dropped_stores_total", _C, "Records that were not stored, by reason.", ("reason",)),
    MetricSpec("flare_cache_stores_stopped", _G, "1 while a tier stores nothing: full, or failing.", ("tier",)),
    MetricSpec("flare_cache_reads_stopped", _G, "1 while a tier is not read: it fails.", ("tier",)),
    MetricSpec("flare_cache_join_records", _G, "Records found at the join, by verdict.", ("verdict",)),
    MetricSpec("flare_cache_records", _G, "Records held, by tier.", ("tier",)),
    MetricSpec("flare_cache_bytes", _G, "Bytes of records of the largest rank, by tier.", ("tier",)),
    MetricSpec("flare_cache_limit_bytes", _G, "Agreed limit, by tier.", ("tier",)),
    MetricSpec("flare_cache_evicted_records_total", _C, "Records evicted, by tier.", ("tier",)),
    MetricSpec("flare_pool_on", _G, "1 while the pool is on, on every rank."),
    MetricSpec("flare_pool_off_reasons", _G, "1 for each rank that keeps the pool off.", ("rank", "reason")),
    MetricSpec("flare_pool_sessions_total", _C, "Times that the pool came on."),
    MetricSpec("flare_pool_lookups_total", _C, "Prompts that the pool was asked about."),
    MetricSpec("flare_pool_unanswered_lookups_total", _C, "Such that were not answered in time."),
    MetricSpec("flare_pool_refused_restores_total", _C, "Restores from the pool that computing was quicker than."),
    MetricSpec("flare_pool_pending_records", _G, "Records that are to be put into the pool."),
    MetricSpec("flare_pool_pending_bytes", _G, "Their bytes on the largest rank."),
    MetricSpec("flare_pool_put_records_total", _C, "Records put into the pool and committed."),
    MetricSpec("flare_pool_dropped_records_total", _C, "Records that were never put, by reason.", ("reason",)),
    MetricSpec("flare_pool_latency_seconds", _G, "Of small restores from the pool, on the slowest rank."),
    MetricSpec("flare_pool_restore_bytes_per_second", _G, "Of restores from the pool, on the slowest rank."),
    MetricSpec("flare_pool_prefill_tokens_per_second", _G, "Of prefill, which a restore is held against."),
    MetricSpec("flare_poisoned_total", _C, "Times that the group was given up while it served.", ("reason",)),
    MetricSpec("flare_spec_accepted_tokens_total", _C, "Draft tokens accepted."),
    MetricSpec("flare_spec_proposed_tokens_total", _C, "Draft tokens proposed."),
)
