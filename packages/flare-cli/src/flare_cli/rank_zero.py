"""Rank zero's worker: builds the rank, runs the engine's loop, and ends the group in order.

Called on the worker process's main thread, which is the engine thread. Knows the API process as a link only.
"""

from __future__ import annotations

import threading
import time

from flare_cli.agreement import Offer, RankRefuses
from flare_cli.api_link import ApiLink
from flare_cli.cache_wiring import RankCache, open_leader_cache
from flare_cli.config import RunConfig
from flare_cli.control_group import ControlGroup, join_group
from flare_cli.sighting_log import SightingLog
from flare_cli.snapshot import ClusterSnapshot, RankSnapshot
from flare_cli.watchdog import Watchdog
from flare_cli.wiring import RankModel, open_model
from flare_cli.worker_protocol import DrainAsked, Ready, SnapshotReply
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine
from flare_core.engine.scheduler import Scheduler
from flare_core.engine.speculation import SpeculationLimits
from flare_core.errors import ConfigurationMismatch, FlareError
from flare_core.plan import StepPlan, encode_plan
from flare_transport import Sighting
from flare_transport.failpoint import failpoint

__all__ = ["RankZero", "equal_settings"]

IDLE_WAIT_SECONDS = 0.25
"""An idle engine looks at its store this often, so that a poisoning is seen even when nothing wakes it."""
MEETING_SECONDS = 0.5
MIXED_PREFILL_SHARE = 4
"""While something decodes, a step takes this part of ``--max-batch-tokens``: it bounds the time between tokens."""


class RankZero:
    """One life: ``start``, ``serve``, ``close``."""

    def __init__(self, config: RunConfig, api: ApiLink, watchdog: Watchdog) -> None:
        self._config = config
        self._api = api
        self._watchdog = watchdog
        self._group: ControlGroup | None = None
        self._cache: RankCache | None = None
        self._engine: Engine | None = None
        self._model: RankModel | None = None
        self._has_met = threading.Event()
        self._sightings = SightingLog()
        self._started_at = time.monotonic()

    def start(self) -> None:
        """Meet the ranks, agree, load, join the caches, and say that requests are taken.

        Raises:
            FlareError, TransportError: why this rank, or another, cannot start.
        """
        config = self._config
        if config.world_size > 1:
            self._api.stage(f"waiting for {config.world_size - 1} more ranks at {config.rendezvous}")
        self._group = ControlGroup(
            join_group(config, self._observe),
            on_loss=self._watchdog.doom,
            on_drain_asked=lambda rank: self._api.notify(DrainAsked(rank)),
        )
        self._has_met.set()
        try:
            self._assemble(self._group)
        except (ConfigurationMismatch, RankRefuses):
            raise
        except FlareError as error:
            self._group.tell_failure(str(error))
            raise

    def _assemble(self, group: ControlGroup) -> None:
        config = self._config
        group.agree(Offer(equal_settings(config)))
        self._model = open_model(config, group, agree_pages=self._agree_pages, report=self._api.stage)
        group.agree(Offer({"model identity": self._model.identity.fingerprint().hex()}))
        group.expect_heartbeats()
        self._cache = open_leader_cache(config, group, self._model, on_loss=self._watchdog.doom)
        self._engine = self._make_engine(self._model, self._cache)
        self._cache.wake = self._engine.inbox.wake
        self._api.attach(self._engine.inbox)
        self._api.notify(SnapshotReply(self._snapshot(False)))
        self._api.notify(
            Ready(
                vocab_size=self._model.vocab_size,
                max_model_len=self._engine.scheduler.config.max_sequence_tokens,
                facts=(*self._model.facts, *self._rank_facts(), *self._cache.facts),
            )
        )

    def serve(self) -> None:
        """Run until drained or stopped.

        Raises:
            Poisoned: the ranks lost account of each other. TransportError: a peer or the API process is gone.
        """
        engine = self._engine
        if engine is None:
            return
        while True:
            progressed = engine.step()
            self._api.answer_queries(self._snapshot)
            if engine.is_finished:
                return
            if not progressed:
                engine.inbox.wait(IDLE_WAIT_SECONDS)

    def abandon(self) -> None:
        """Give the start up, from another thread than the one in ``start``: peers that have come exit 0, too.

        Blocks up to two seconds; the process must end then.
        """
        # The ranks may be meeting this very moment; a peer that has met would take a link that vanishes for a loss.
        self._has_met.wait(MEETING_SECONDS)
        if self._group is not None:
            self._group.call_off()

    def close(self) -> None:
        """End the caches and the group in order; peers exit 0. Blocks for what is on its way."""
        if self._group is not None:
            self._group.expect_end()
        if self._cache is not None:
            self._cache.close()
        if self._group is not None:
            self._group.close()

    def _make_engine(self, model: RankModel, cache: RankCache) -> Engine:
        config = self._config
        scheduler = Scheduler(
            SchedulerConfig(
                page_tokens=config.page_tokens,
                num_pages=model.num_pages,
                max_sequences=config.max_sequences,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
                set_fingerprint=model.identity.fingerprint(),
                has_rows=any(geometry.row_bytes for geometry in model.identity.geometries),
                num_row_snapshots=model.num_row_snapshots,
                row_interval_tokens=cache.row_interval_tokens,
                max_prefill_tokens=config.max_batch_tokens,
                max_mixed_tokens=max(1, config.max_batch_tokens // MIXED_PREFILL_SHARE),
                min_tail_tokens=config.prefix_cache_min_tail,
                speculation=SpeculationLimits(model.max_drafts) if model.max_drafts else None,
            ),
            cache.store,
        )
        return Engine(
            scheduler,
            model.runner,
            gate=cache.gate,
            store=cache.store,
            send_plan=self._send_plan,
            emit=self._api.emit,
            lead=_plan_lead(config, model),
        )

    def _send_plan(self, plan: StepPlan) -> None:
        group = self._group
        if group is not None and group.world_size > 1:
            failpoint("step.send")
            group.send_plan(encode_plan(plan))
            group.last_step = plan.step

    def _agree_pages(self, num_pages: int) -> int:
        group = self._group
        if group is None:
            return num_pages
        return group.agree(Offer({}, {"pages": num_pages}))["pages"]

    def _observe(self, sighting: Sighting) -> None:
        self._sightings.note(sighting)

    def _rank_facts(self) -> list[tuple[str, str]]:
        group = self._group
        if group is None or group.world_size == 1:
            return []
        peers = ", ".join(f"rank {rank} at {view.address}" for rank, view in sorted(group.views.items()))
        return [("ranks", f"{group.world_size}: this one, {peers}")]

    def _snapshot(self, with_records: bool) -> ClusterSnapshot:
        engine, model, group = self._engine, self._model, self._group
        if engine is None or model is None or group is None:
            return ClusterSnapshot(state="starting")
        now = time.monotonic()
        snapshot = engine.scheduler.snapshot()
        ranks = [RankSnapshot(rank=0, address=group.local_address, step=snapshot.num_steps)]
        ranks += [
            RankSnapshot(rank=rank, address=view.address, step=view.step, silent_seconds=now - view.heard_at)
            for rank, view in sorted(group.views.items())
        ]
        return ClusterSnapshot(
            state="ready",
            fingerprint=model.identity.fingerprint().hex(),
            world_size=group.world_size,
            max_model_len=engine.scheduler.config.max_sequence_tokens,
            page_tokens=self._config.page_tokens,
            num_pages=model.num_pages,
            uptime_seconds=now - self._started_at,
            engine=snapshot,
            cache=None if self._cache is None else self._cache.snapshot(with_records),
            ranks=tuple(ranks),
        )


def _plan_lead(config: RunConfig, model: RankModel) -> int:
    """Steps to plan ahead. Where a step verifies drafts, the next one begins at a place that only its result tells."""
    if model.max_drafts:
        return 0
    return model.plan_lead if config.plan_lead is None else config.plan_lead


def equal_settings(config: RunConfig) -> dict[str, str]:
    """What must be the same on every rank before a model is opened, by flag."""
    names = (
        "page_tokens",
        "max_sequences",
        "max_model_len",
        "dtype",
        "speculative_config",
        "prefix_cache_durability",
        "prefix_cache_min_tail",
    )
    settings = {f"--{name.replace('_', '-')}": str(getattr(config, name)) for name in names}
    settings["--prefix-cache-disk"] = "given" if config.prefix_cache_disk is not None else "absent"
    settings["--prefix-cache-memory"] = "given" if config.prefix_cache_memory else "absent"
    settings["--pool"] = "absent" if config.pool is None else str(config.pool)
    settings["--pool-pending"] = str(config.pool_pending)
    return settings
