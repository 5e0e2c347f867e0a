"""One world: a group that serves, fails, dies and starts again under faults, is healed, and must then serve well.

Safety is checked throughout; liveness after healing: the ranks join, a store and a restore succeed within sixty virtual
seconds, and nothing is held any more.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from random import Random

import msgspec

from flare_cache.settings import CacheSettings
from flare_core.engine.request import Drain, ResetCache
from flare_core.geometry import SetIdentity
from flare_core.prefix import Tier
from flare_qualify.sim.checks import Checks
from flare_qualify.sim.device import Exchange
from flare_qualify.sim.disk import SimDisk
from flare_qualify.sim.faults import Faults, disk_rates
from flare_qualify.sim.full_checks import check_all, check_at_rest, check_loss, check_survivors
from flare_qualify.sim.group import Group
from flare_qualify.sim.loop import EventLoop, Violation
from flare_qualify.sim.model import Model
from flare_qualify.sim.options import Options
from flare_qualify.sim.oracle import Oracle, Stream
from flare_qualify.sim.pool_manager import SimManager
from flare_qualify.sim.pool_rules import PoolRules
from flare_qualify.sim.process import PAGE, RunContext
from flare_qualify.sim.records import DiskReader
from flare_qualify.sim.seeding import seed_records
from flare_qualify.sim.streams import Streams
from flare_qualify.sim.workload import Workload

__all__ = ["Outcome", "World", "run_world"]

_VOCAB_SIZE = 97
_FULL_EVERY = 50
_LIVE_SECONDS = 60.0
_SETTLE_SECONDS = 60.0
_RETRY_SECONDS = 2.0
_MAX_EVENTS = 20_000
"""More events than anything takes after healing: time must not stand still either."""
_MAX_OPEN = 10


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one world; ``rule`` is empty where no rule was broken."""

    seed: int
    digest: str
    num_events: int
    virtual_seconds: float
    counts: dict[str, int]
    rule: str = ""
    detail: str = ""
    trace: str = ""


class World:
    """See the module."""

    def __init__(self, options: Options, *, keep_log: bool = False) -> None:
        self.options = options
        self.loop = EventLoop(keep_log=keep_log)
        self.rng = Random(f"world {options.seed}")  # noqa: S311 - repeatable chance is what is wanted
        self.model = Model(options.world_size, options.page_tokens, _VOCAB_SIZE, options.has_rows, options.is_uneven)
        self.settings = _settings(options, self.model)
        self.disks = [SimDisk(rank) for rank in range(options.world_size)]
        oracle = Oracle(self.model)
        reader = DiskReader(self.settings.identity, oracle)
        counts: Counter[str] = Counter()
        streams = Streams(oracle, counts)
        self.checks = Checks(self.loop, self.rng, oracle, reader, self.disks, options.is_power_durable, streams, counts)
        self.pool: SimManager | None = None
        if options.has_pool:
            self.pool = SimManager(
                loop=self.loop,
                rng=self.rng,
                identity=self.settings.identity,
                latency_seconds=options.latency_seconds,
                counts=counts,
                limit_bytes=self._pool_limit(),
            )
            self.pool.start()
            self.checks.pool = PoolRules(self.pool, options.world_size)
        self.workload = Workload(options, self.rng, oracle, streams.by_id, _VOCAB_SIZE)
        self.rates = disk_rates(options)
        self.slow_disk = [1.0] * options.world_size
        self.slow_device = [1.0] * options.world_size
        self.device_faults: set[int] = set()
        self.accept_loss = False
        self.group: Group | None = None
        self.is_healed = False
        self.backups: dict[int, dict[str, tuple[bytes, bool]]] = {}
        self.faults = Faults(self)
        self._num_groups = 0
        self._is_restart_due = False

    def run(self) -> None:
        """The whole life. Raises Violation."""
        self.workload.prepare(self.settings.identity.fingerprint())
        seed_records(self)
        self._start_group()
        self.loop.after(0.3, "request", self._send_request)
        while self.loop.num_events < self.options.num_events:
            self.faults.before_event()
            self._one()
        self._heal()
        self._settle()

    def _one(self) -> None:
        if not self.loop.run_next():
            raise Violation("liveness", "nothing happens any more")
        group = self.group
        if group is None:
            return
        if group.first_death is None:
            check_loss(group, self.loop.now)
        elif group.is_dead and not self._is_restart_due:
            self._is_restart_due = True
            self.accept_loss = any("accept" in reason for reason in group.reasons)
            self.faults.remember(group)
            self.faults.between_runs()
            self.loop.after(0.1 + self.rng.random(), "restart", self._start_group)
        elif not group.is_dead:
            check_survivors(group, self.loop.now)
        if self.loop.num_events % _FULL_EVERY == 0:
            check_all(self.checks, group)

    def _start_group(self) -> None:
        self._is_restart_due = False
        self.device_faults.clear()
        self._num_groups += 1
        settings = msgspec_replace_loss(self.settings, accept_loss=self.accept_loss)
        context = RunContext(
            run_id=self.rng.randbytes(16),
            options=self.options,
            settings=settings,
            model=self.model,
            loop=self.loop,
            rng=self.rng,
            disks=self.disks,
            rates=self.rates,
            exchange=Exchange(self.options.world_size),
            supervisor=self.checks,
            slow_disk=self.slow_disk,
            slow_device=self.slow_device,
            device_faults=self.device_faults,
            pool=self.pool,
        )
        self.group = Group(context, self._num_groups, self.checks)
        self.group.is_lethal = self.faults.may_fail_start or self.faults.is_a_disk_stalled
        self.group.may_fail_join = self.faults.may_fail_join
        self.checks.begin(self.group)
        self.group.start()

    def _send_request(self) -> None:
        if self.is_healed:
            return
        group = self.group
        open_streams = sum(1 for _ in self.checks.streams.running())
        leader = group.leader if group is not None and group.is_serving else None
        if leader is not None and leader.poison is None and not leader.is_asked_to_drain and open_streams < _MAX_OPEN:
            leader.put([self.workload.request()])
        wait = self.rng.expovariate(1 / self.options.request_seconds)
        self.loop.after(wait if group is not None and group.is_serving else 0.2, "request", self._send_request)

    # -- after the faults ------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """No more faults; an operator restarts what cannot recover by itself."""
        self.loop.note("healed")
        self.is_healed = True
        self.faults.heal()
        group = self.group
        if group is None or group.is_dead:
            return
        if self._has_stopped(group) or self._has_buried(group) or self.rng.random() < 0.3:
            self._restart(group)
        elif group.is_serving and self.rng.random() < 0.3:
            group.is_lethal = True
            group.leader.drain([Drain()])

    def _restart(self, group: Group) -> None:
        group.is_lethal = True
        for process in group.processes:
            process.end("restarted by the operator")

    def _has_stopped(self, group: Group) -> bool:
        """A failing disk has made the group give up storing or reading until the next start."""
        store = group.leader.store
        directories = [process.directory for process in group.processes if process.directory is not None]
        return any(directory.stores_stopped is not None for directory in directories) or (
            store is not None
            and any(
                (tier.stores_stopped or tier.reads_stopped) is not None for tier in store.statistics().tiers.values()
            )
        )

    def _has_buried(self, group: Group) -> bool:
        store = group.leader.store
        return store is not None and any(
            not record.is_usable for records in store._records.values() for record in records.index.records()
        )

    def _pool_limit(self) -> int | None:
        options = self.options
        geometries = self.settings.identity.geometries
        record_bytes = sum(2 * PAGE + options.max_sections * one.page_bytes + one.row_stride for one in geometries)
        return options.pool_limit_records * record_bytes or None

    def _until(self, what: str, seconds: float, is_so: Callable[[], bool]) -> None:
        deadline, last_event = self.loop.now + seconds, self.loop.num_events + _MAX_EVENTS
        while not is_so():
            if self.loop.now > deadline or self.loop.num_events > last_event:
                raise Violation("liveness", f"{what}: not within {seconds:g} s of healing")
            self._one()

    def _is_serving(self) -> bool:
        return self.group is not None and self.group.is_serving and self.group.leader.poison is None

    def _settle(self) -> None:
        self._until("no process is left of a run that faults broke", _SETTLE_SECONDS, self._is_steady)
        self._until_quiet()
        if self.group is not None and self._has_stopped(self.group):
            # What failed before the healing was told after it.
            self._restart(self.group)
            self._until_quiet()
        deadline = self.loop.now + _LIVE_SECONDS
        while not self._restores():
            if self.loop.now > deadline:
                raise Violation("liveness", f"nothing is stored and restored within {_LIVE_SECONDS:g} s of healing")
            self._until("time passes", _LIVE_SECONDS, self._later(_RETRY_SECONDS))
        self._until("the pool is on, and has what was put", _LIVE_SECONDS, self._is_pool_settled)
        group = self.group
        if group is not None:
            check_all(self.checks, group)
            check_at_rest(self.checks, group)

    def _until_quiet(self) -> None:
        self._until("the ranks join", _LIVE_SECONDS, self._is_serving)
        self._until("open requests end", _LIVE_SECONDS, self._is_quiet)

    def _restores(self) -> bool:
        """Whether a new prompt is stored, and restored when it comes again."""
        command, prompt = self.workload.probe()
        first = self._ask(command)
        self._until("a request ends", _LIVE_SECONDS, lambda: first.is_over and self._is_quiet())
        self._leader_put(ResetCache("probe", Tier.DEVICE))
        command, _ = self.workload.probe(prompt)
        second = self._ask(command)
        self._until("a request ends", _LIVE_SECONDS, lambda: second.is_over and self._is_quiet())
        if first.reason != "length" or second.reason != "length":
            raise Violation("liveness", f"probes ended with {first.reason!r} and {second.reason!r}")
        return second.restored > 0 or first.num_prompt_tokens <= self.options.page_tokens

    def _later(self, seconds: float) -> Callable[[], bool]:
        until = self.loop.now + seconds
        return lambda: self.loop.now >= until

    def _ask(self, command: object) -> Stream:
        self._leader_put(command)
        return self.checks.streams.by_id[command.request.request_id]  # type: ignore[attr-defined]

    def _leader_put(self, command: object) -> None:
        if self.group is not None:
            self.group.leader.put([command])  # type: ignore[list-item]

    def _is_steady(self) -> bool:
        """Either the run serves and no fault it has seen can still end it, or a later one has begun."""
        group = self.group
        if group is None or self.loop.now < self.faults.last_effect:
            return False
        return group.first_death is None and group.leader.poison is None and not group.leader.is_asked_to_drain

    def _is_pool_settled(self) -> bool:
        leader = self.group.leader if self.group is not None else None
        if self.pool is None or leader is None:
            return True
        tier = leader.store.pool if leader.store is not None else None
        return leader.pool_session is not None and tier is not None and not tier.has_pending and self._is_quiet()

    def _is_quiet(self) -> bool:
        group = self.group
        leader = group.leader if group is not None else None
        if leader is None or leader.scheduler is None or leader.store is None or leader.engine is None:
            return False
        is_open = any(True for _ in self.checks.streams.running())
        scheduler = leader.scheduler
        is_empty = not (
            scheduler.num_unfinished or scheduler.num_transfers or scheduler._active or scheduler._last_builder
        )
        return not is_open and is_empty and leader.store.is_idle and not leader.has_steps


def msgspec_replace_loss(settings: CacheSettings, *, accept_loss: bool) -> CacheSettings:
    """The same settings with another answer to the loss guard."""
    return CacheSettings(
        identity=settings.identity,
        salt_key_id=settings.salt_key_id,
        has_disk=settings.has_disk,
        disk_limit_bytes=settings.disk_limit_bytes,
        memory_bytes=settings.memory_bytes,
        min_tail_tokens=settings.min_tail_tokens,
        max_record_bytes=settings.max_record_bytes,
        durability=settings.durability,
        accept_loss=accept_loss,
    )


def _settings(options: Options, model: Model) -> CacheSettings:
    from flare_cache.disk_shelf import Durability

    geometries = model.geometries()
    identity = SetIdentity(bytes(32), options.page_tokens, "uint8", "uint8", "cpu", 1, geometries)
    page, row = max(geometry.page_bytes for geometry in geometries), geometries[0].row_stride
    record_bytes = PAGE + options.max_sections * page + row
    return CacheSettings(
        identity=identity,
        salt_key_id=bytes(16),
        has_disk=True,
        disk_limit_bytes=options.disk_records * record_bytes,
        memory_bytes=options.memory_records * record_bytes or None,
        min_tail_tokens=options.min_tail_tokens,
        max_record_bytes=(1 << 20) + options.max_sections * page + row,
        durability=Durability.POWER if options.is_power_durable else Durability.PROCESS,
    )


def run_world(options: Options, *, keep_log: bool = False) -> tuple[Outcome, World]:
    """Run one world to its end, or to the first rule that is broken."""
    world = World(options, keep_log=keep_log)
    rule = detail = trace = ""
    try:
        world.run()
    except Violation as violation:
        rule, detail = violation.rule, violation.detail
    except Exception as error:  # noqa: BLE001 - whatever a machine raises in an event would have ended its process
        rule, detail = "exception", f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
    outcome = Outcome(
        seed=options.seed,
        digest=world.loop.digest(),
        num_events=world.loop.num_events,
        virtual_seconds=world.loop.now,
        counts=dict(sorted(world.checks.counts.items())),
        rule=rule,
        detail=detail,
        trace=trace,
    )
    return outcome, world
