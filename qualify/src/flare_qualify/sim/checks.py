"""The rules, checked as things happen: each method is told one thing that a machine said or did.

Tokens equal the reference; nothing is reported, offered or handed over that some rank lacks or that is not what it
should be; pages belong to a transfer until rank zero has accounted for it; nothing comes after a poisoning; nothing
reported is lost to the death of processes. What is checked in full, now and then, is in :mod:`full_checks`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from flare_cache.jobs import Job, JobOp, record_file_name
from flare_cache.join_messages import Confirmed, decode_message
from flare_cache.outcomes import Done, Failed, Outcome
from flare_cache.record_link import RECORD_JOIN
from flare_core.engine.request import EngineEvent
from flare_core.plan import StepPlan
from flare_core.prefix import PrefixQuery, Restorable, StoreEvent, StoreRequest, Tier
from flare_qualify.sim.disk import SimDisk
from flare_qualify.sim.group import Group
from flare_qualify.sim.join_rules import check_joined
from flare_qualify.sim.leader import Leader
from flare_qualify.sim.ledger import Place, job_places, row_place
from flare_qualify.sim.loop import EventLoop, Violation
from flare_qualify.sim.oracle import Oracle
from flare_qualify.sim.pool_rules import PoolRules
from flare_qualify.sim.process import RankProcess
from flare_qualify.sim.records import DiskReader
from flare_qualify.sim.streams import Streams

__all__ = ["Checks"]


@dataclass(slots=True)
class Checks:
    """See the module; implements ``flare_qualify.sim.group.GroupWatch``.

    Attributes:
        group: the run that is watched; what earlier ones still do is ignored, for all of them is dead.
        reported: records on disk that requests can count on: key to (store id, key of the parent).
        counts: what happened, for the summary.
        uneven: files that some rank could not cut: until the next join it has more than is offered.
        buried: files that some rank could not remove: their names stay taken until the next join.
        pool: the rules of the pool, if there is one.
    """

    loop: EventLoop
    rng: Random
    oracle: Oracle
    reader: DiskReader
    disks: Sequence[SimDisk]
    is_power_durable: bool
    streams: Streams
    counts: Counter[str]
    group: Group | None = None
    reported: dict[bytes, tuple[bytes, bytes]] = field(default_factory=dict)
    owned: Counter[Place] = field(default_factory=Counter)
    uneven: set[str] = field(default_factory=set)
    buried: set[str] = field(default_factory=set)
    pool: PoolRules | None = None
    _tickets: dict[int, list[Place]] = field(default_factory=dict)

    def begin(self, group: Group) -> None:
        """A new run is watched from now on."""
        self.group = group
        self.owned.clear()
        self.uneven.clear()
        self.buried.clear()
        self._tickets.clear()
        if self.pool is not None:
            self.pool.begin()

    def pool_switched(self, rank: int, session: bytes | None) -> None:
        """A rank is in a session of the pool, or in none."""
        if self.pool is not None:
            self.pool.switched(rank, session)

    def is_excused(self, disk: SimDisk, name: str) -> bool:
        """A fault was injected on this file: it may be refused, lost or dropped, never believed."""
        inode = disk.names.get(name)
        return name in disk.excused or name in disk.cut or (inode is not None and inode.is_damaged)

    # -- processes -------------------------------------------------------------------------------------------------

    def process_ended(self, process: RankProcess, reason: str) -> None:
        """A process is gone."""
        group = self.group
        if group is None:
            return
        if group.first_death is None:
            group.first_death = self.loop.now
        group.last_death = self.loop.now
        group.reasons.append(reason)
        self.counts["deaths"] += 1
        may_fail = group.may_fail_join or "accept" in reason or any("accept" in other for other in group.reasons)
        if not group.is_lethal and (group.has_joined or not may_fail):
            raise Violation("end without cause", f"{process.name}: {reason}")
        if process.rank == 0:
            self.streams.end_all()
        group.call_off()
        disk = self.disks[process.rank]
        for name in disk.records():
            if not self.is_excused(disk, name) and (problem := self.reader.problem(disk, name)) is not None:
                raise Violation("whole files", f"{process.name} died and left {name[:16]}: {problem}")

    def file_unlinked(self, process: RankProcess, name: str) -> None:
        """A process is about to remove a file."""
        group = self.group
        if group is None or process.is_joined or not name.endswith(".rec"):
            return
        missing = [peer.process.rank for peer in group.peers if peer.process.rank not in group.confirmed]
        if missing:
            raise Violation("join order", f"{process.name} removes {name[:16]} before ranks {missing} confirmed")

    def peer_sent(self, group: Group, rank: int, frame_type: object, payload: bytes) -> None:
        """A peer sends a frame on its record link."""
        if frame_type is RECORD_JOIN and isinstance(decode_message(payload), Confirmed):
            group.confirmed.add(rank)

    def rank_joined(self, process: RankProcess) -> None:
        """A peer serves."""

    def draw_id(self) -> bytes:
        """16 bytes for a set or a store."""
        return self.rng.randbytes(16)

    def joined(self, leader: Leader) -> None:
        """Rank zero has joined: every rank holds the kept set, and nothing that was counted on is lost."""
        check_joined(self, leader)

    def check_held(self, leader: Leader, tier: Tier) -> None:
        """Every rank holds what the index of a tier offers."""
        store = leader.store
        if store is None or tier not in store._records:
            return
        for record in store._records[tier].index.records():
            if record.is_stored and record.is_usable:
                self._check_held(
                    record.identity,
                    tier,
                    num_sections=record.num_pages + bool(record.tail_tokens),
                    with_row=record.has_row,
                    what="the index offers",
                )

    def _check_held(self, identity: object, tier: Tier, *, num_sections: int, with_row: bool, what: str) -> None:
        group = self.group
        key: bytes = identity.key  # type: ignore[attr-defined]
        name = record_file_name(key)
        for process in group.processes if group is not None else ():
            if tier is Tier.MEMORY:
                shelf = process.memory_shelf
                held = shelf._records.get(key) if shelf is not None else None
                if process.is_alive and (held is None or held.header.identity != identity):
                    raise Violation("offered, not held", f"{what} {name[:16]}, which {process.name} lacks in memory")
                continue
            disk = self.disks[process.rank]
            found = self.reader.found(disk, name)
            if found is None or found.identity != identity:
                if not self.is_excused(disk, name):
                    raise Violation("offered, not held", f"{what} {name[:16]}, which {process.name} lacks")
                continue
            layout = found.header.layout
            has = layout.num_pages + found.has_tail
            if (has < num_sections or (with_row and not found.has_row)) and not self.is_excused(disk, name):
                raise Violation("offered, not held", f"{what} more of {name[:16]} than {process.name} has")

    # -- jobs ------------------------------------------------------------------------------------------------------

    def submitted(self, leader: Leader, job: Job) -> None:
        """Rank zero plans a job."""
        del leader
        if job.op is JobOp.STORE:
            self.oracle.learn_record(job.record, job.token_ids)
        elif job.op is JobOp.UNLINK and job.tier is Tier.DISK:
            self.reported.pop(job.record.key, None)

    def took(self, leader: Leader, outcomes: Sequence[Outcome]) -> None:
        """Rank zero's engine learns what became of jobs."""
        if leader.poison is not None:
            raise Violation("after poison", f"{type(outcomes[0]).__name__} is reported after: {leader.poison}")
        for outcome in outcomes:
            job = outcome.job
            if isinstance(outcome, Failed):
                _refuse_internal(outcome)
                if outcome.cleanup or job.op is JobOp.UNLINK:
                    self.buried.add(record_file_name(job.record.key))
            match outcome:
                case Done() if job.op is JobOp.STORE:
                    self.counts[f"stored {job.tier}"] += 1
                    self._check_stored(job)
                case Done() if job.op is JobOp.FETCH:
                    self.counts[f"fetched {job.tier}"] += 1
                    self._check_fetched(job)
                case Done() if job.op is JobOp.UNLINK:
                    self.counts["unlinked"] += 1
                    self._check_gone(job, frozenset())
                case Failed() if job.op is JobOp.STORE:
                    self.counts["failed stores"] += 1
                    self._check_gone(job, frozenset(failure.rank for failure in outcome.cleanup))
                case Failed():
                    self.counts[f"failed {job.op}"] += 1
                    if job.op is JobOp.TRUNCATE:
                        self.uneven.add(record_file_name(job.record.key))
                case Done():
                    self.counts[f"done {job.op}"] += 1

    def _check_stored(self, job: Job) -> None:
        identity = job.record
        name = record_file_name(identity.key)
        self._check_held(
            identity, job.tier, num_sections=identity.num_sections, with_row=identity.has_row, what="reported is"
        )
        if job.tier is not Tier.DISK:
            return
        for disk in self.disks:
            if not self.is_excused(disk, name) and (problem := self.reader.problem(disk, name)) is not None:
                raise Violation("reported, not whole", f"{name[:16]} on rank {disk.rank}: {problem}")
        self.reported[identity.key] = (identity.store_id, identity.parent_key)

    def _check_gone(self, job: Job, still: frozenset[int]) -> None:
        if job.tier is not Tier.DISK:
            return
        name = record_file_name(job.record.key)
        for disk in self.disks:
            found = self.reader.found(disk, name)
            is_back = name in disk.cut  # a power cut has taken the unlink back
            if found is not None and found.identity == job.record and disk.rank not in still and not is_back:
                raise Violation("reported gone, still there", f"{job.op} of {name[:16]}: rank {disk.rank} has it")

    def _check_fetched(self, job: Job) -> None:
        group = self.group
        for process in group.processes if group is not None else ():
            expected = self.oracle.sections(job.record, process.rank)
            if expected is None:
                continue
            size = process.memory.page_bytes
            for section in job.sections:
                right = expected[section.index]
                start = section.page * size
                if process.memory.pages[start : start + len(right)] != right:
                    raise Violation("restored bytes", f"page {section.page} of {process.name} holds other bytes")

    def job_begins(self, process: RankProcess, job: Job) -> None:
        """A job's first task runs on a rank."""
        process.ledger.job_begins(job)
        self._check_owned(process, job)

    def job_ends(self, process: RankProcess, job: Job, *, is_ok: bool) -> None:
        """A job's last task has run on a rank."""
        process.ledger.job_ends(job, is_ok=is_ok)
        self._check_owned(process, job)

    def _check_owned(self, process: RankProcess, job: Job) -> None:
        group = self.group
        if group is None or not group.processes[0].is_alive or group.leader.poison is not None:
            return
        for place in job_places(job):
            if not self.owned[place]:
                raise Violation("reused before accounting", f"{process.name} works on {place} for job {job.job_id}")

    def delivered(self, process: RankProcess, place: Place, data: memoryview) -> None:
        """A fetch is about to hand bytes to a page: they have been verified."""
        job = process.ledger.jobs.get(process.ledger.writer_of(place))
        if job is None or place < 0:
            return
        expected = self.oracle.sections(job.record, process.rank)
        index = next((section.index for section in job.sections if section.page == place), None)
        if expected is not None and index is not None and data[: len(expected[index])] != expected[index]:
            raise Violation("unverified bytes", f"{process.name} hands wrong bytes to page {place}")

    def step_computed(self, step: int) -> None:
        """Every rank has computed a step: it ends on each a little later."""
        group = self.group
        if group is None:
            return
        exchange = group.context.exchange
        gathered = exchange.all_of(step)
        del exchange.parts[step]
        for process in group.processes:
            seconds = group.context.options.latency_seconds + process.step_seconds()
            process.after(seconds, process.label_ends, lambda device=process.device: device.finish(gathered))  # type: ignore[misc]

    # -- the prefix store and the engine ---------------------------------------------------------------------------

    def looked_up(self, leader: Leader, query: PrefixQuery, found: Restorable) -> None:
        """Rank zero offers a restore."""
        del query
        store = leader.store
        # What is known of the pool is a hint: it may be gone when it is fetched.
        for segment in (one for one in found.segments if one.tier is not Tier.POOL):
            record = store._records[segment.tier].index.get(segment.record_key) if store is not None else None
            if record is None:
                raise Violation("offered, not held", f"{segment.record_key.hex()[:16]} is not in the index")
            until = segment.first_section + segment.num_sections
            self._check_held(
                record.identity, segment.tier, num_sections=until, with_row=segment.with_row, what="lookup offers"
            )

    def fetching(self, leader: Leader, ticket: int, pages: Sequence[int], row_slot: int | None) -> None:
        """Pages belong to a fetch from now on."""
        del leader
        self._own(ticket, [*pages, *([] if row_slot is None else [row_place(row_slot)])])

    def storing(self, leader: Leader, ticket: int | None, request: StoreRequest) -> None:
        """A prefix is offered to the store; with a ticket, its pages belong to the store from now on."""
        del leader
        if ticket is None:
            self.oracle.learn(request.root, request.token_ids.tobytes(), request.keys)
            return
        places = [*request.pages]
        if request.tail_page is not None:
            places.append(request.tail_page)
        if request.row_slot is not None:
            places.append(row_place(request.row_slot))
        self._own(ticket, places)

    def _own(self, ticket: int, places: list[Place]) -> None:
        self._tickets[ticket] = places
        self.owned.update(places)

    def polled(self, leader: Leader, events: Sequence[StoreEvent]) -> None:
        """Transfers have ended for the engine: their pages are its own again."""
        del leader
        for event in events:
            self.owned.subtract(self._tickets.pop(event.ticket, ()))

    def planned(self, leader: Leader, plan: StepPlan) -> None:
        """The engine plans a step."""
        self.counts["steps"] += 1
        if leader.poison_seen:
            raise Violation("after poison", f"step {plan.step} is planned")

    def emitted(self, leader: Leader, events: Sequence[EngineEvent]) -> None:
        """The engine tells of requests."""
        self.streams.emitted(events, is_poisoned=leader.poison_seen)

    def poisoned(self, leader: Leader, reason: str) -> None:
        """Rank zero gives up."""
        del leader
        self.counts["poisonings"] += 1
        group = self.group
        if "internal" in reason:
            raise Violation("exception", reason)
        if group is not None and not group.is_lethal:
            raise Violation("poison without cause", reason)


def _refuse_internal(outcome: Failed) -> None:
    """A rank's worker met what nobody had foreseen."""
    for failure in outcome.failures:
        if failure.reason.startswith("internal"):
            raise Violation("exception", f"rank {failure.rank}: {failure.reason}")
