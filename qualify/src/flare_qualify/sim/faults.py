"""Faults: what is injected, when, and which runs may end because of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flare_cache.record_link import RECORD_ACK, RECORD_STARTED, decode_ack, decode_job, decode_started
from flare_core.engine.request import CancelRequest, Drain, ResetCache
from flare_core.prefix import Tier
from flare_qualify.sim.files import DiskRates
from flare_qualify.sim.group import Group
from flare_qualify.sim.links import SimLink
from flare_qualify.sim.options import FaultKind, Options
from flare_qualify.sim.pool_faults import PoolFaults, heal_pool
from flare_qualify.sim.process import RankProcess
from flare_qualify.sim.seeding import diverge, wipe
from flare_transport.framing import HEADER_BYTES

if TYPE_CHECKING:
    from flare_qualify.sim.world import World

__all__ = ["Faults", "disk_rates"]

_MAX_HARMLESS_SECONDS = 2.5
"""Stalls and freezes of a run that together last no longer end nothing."""


def disk_rates(options: Options) -> DiskRates:
    """Of failing calls."""
    rate, kinds = options.call_fault_rate, options.faults
    return DiskRates(
        read_eio=rate if FaultKind.READ_EIO in kinds else 0.0,
        read_flip=rate if FaultKind.READ_FLIP in kinds else 0.0,
        misdirect=rate if FaultKind.MISDIRECTED_READ in kinds else 0.0,
        write_eio=rate if FaultKind.WRITE_EIO in kinds else 0.0,
        fsync_eio=rate if FaultKind.FSYNC_EIO in kinds else 0.0,
        name_eio=rate if FaultKind.NAME_EIO in kinds else 0.0,
        short_io=rate * 3 if FaultKind.SHORT_IO in kinds else 0.0,
    )


def _peer_of(link: SimLink) -> int:
    """The rank at whose end a frame was sent."""
    return int(link.name.partition(" r")[2].partition("-")[0])


_MAX_OLD_FRAMES = 150
_STALE_EVENTS = 60
"""A frame of an earlier run waits at most so many events for a moment in which it could be meant."""


class Faults:
    """Injects into one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._kinds = list(world.options.faults)
        self._weights = list(world.options.faults.values())
        self._next_at = self._draw(0)
        self.last_effect = 0.0
        """When the last fault that was injected may still show."""
        self._stale_until = 0
        self._are_disks_due = False
        self._old_frames: dict[str, list[bytes]] = {}
        self._actions: dict[FaultKind, Callable[[Group], None]] = {
            FaultKind.KILL: self._kill,
            FaultKind.KILL_IN_CALL: self._kill_in_call,
            FaultKind.POWER_CUT: self._power_cut,
            FaultKind.BLACKOUT: self._blackout,
            FaultKind.FREEZE: self._freeze,
            FaultKind.LINK_CUT: self._cut,
            FaultKind.LINK_STALL: self._stall,
            FaultKind.ONE_WAY_LOSS: self._lose,
            FaultKind.DUPLICATE_FRAME: self._duplicate,
            FaultKind.STALE_FRAME: self._stale,
            FaultKind.BIT_ROT: self._rot,
            FaultKind.DISK_FULL: self._fill,
            FaultKind.SLOW_DISK: self._slow_disk,
            FaultKind.SLOW_DEVICE: self._slow_device,
            FaultKind.DEVICE_FAULT: self._device_fault,
            FaultKind.RESTART: self._restart,
            FaultKind.CANCEL: self._cancel,
            FaultKind.RESET: self._reset,
        }
        if world.pool is not None:
            self._actions |= PoolFaults(world.pool, world.loop, world.rng).actions()
            self._actions[FaultKind.POOL_ALONE] = self._leave_pool_alone

    @property
    def may_fail_start(self) -> bool:
        """Names cannot be removed, so that even a failed store may not be undone; or directories fail to open."""
        rates = self._world.rates
        return bool(rates.name_eio)

    @property
    def is_a_disk_stalled(self) -> bool:
        """A disk is still so slow, from an earlier run on, that a job on it may outlive its deadline."""
        return max(self._world.slow_disk) * self._world.options.task_seconds > _MAX_HARMLESS_SECONDS

    @property
    def may_fail_join(self) -> bool:
        """Calls fail that a start-up cannot do without."""
        rates = self._world.rates
        return bool(rates.read_eio or rates.write_eio or rates.fsync_eio or rates.name_eio or rates.read_flip
                    or rates.misdirect) or any(disk.is_full for disk in self._world.disks)  # fmt: skip

    def _draw(self, now: int) -> float:
        if not self._kinds:
            return float("inf")
        return now + 1 + self._rng.expovariate(1 / self._world.options.fault_events)

    def before_event(self) -> None:
        """Inject what is due."""
        world = self._world
        if self._stale_until > world.loop.num_events and world.group is not None:
            self._bring_up(world.group)
        if world.loop.num_events < self._next_at:
            return
        self._next_at = self._draw(world.loop.num_events)
        kind = self._rng.choices(self._kinds, self._weights)[0]
        group, action = world.group, self._actions.get(kind)
        if action is None or group is None or group.is_dead:
            return
        world.loop.note(f"fault {kind}")
        world.checks.counts[f"fault {kind}"] += 1
        action(group)

    def between_runs(self) -> None:
        """No process is left: remember what was said, and now and then change what is on the disks."""
        world = self._world
        if self._are_disks_due:
            self._are_disks_due = False
            for disk in world.disks:
                wipe(disk)
        if FaultKind.DIVERGENCE in world.options.faults and not world.is_healed and self._rng.random() < 0.5:
            diverge(world)

    def heal(self) -> None:
        """Everything works from now on."""
        world = self._world
        world.rates.heal()
        world.device_faults.clear()
        for disk in world.disks:
            disk.is_full = False
        world.slow_disk[:] = [1.0] * len(world.slow_disk)
        world.slow_device[:] = [1.0] * len(world.slow_device)
        if world.pool is not None:
            heal_pool(world.pool)
        group = world.group
        if group is None:
            return
        group.lost_since = None
        for process in group.processes:
            process.files.kill_in = None
            for link in process.links:
                link.outgoing.stalled_until = 0.0
                link.outgoing.cut_after = None
                link.flush()

    def _effect(self, group: Group, seconds: float = 0.0) -> None:
        """The run may end because of what was injected, at the latest some seconds after ``seconds``."""
        group.is_lethal = True
        self.last_effect = max(self.last_effect, self._world.loop.now + seconds + 12.0)

    def _victim(self, group: Group) -> RankProcess:
        return self._rng.choice([process for process in group.processes if process.is_alive])

    def _link(self, group: Group) -> SimLink | None:
        links = [link for process in group.processes if process.is_alive for link in process.links if link.end is None]
        return self._rng.choice(links) if links else None

    def _kill(self, group: Group) -> None:
        self._effect(group)
        self._victim(group).end("killed")

    def _kill_in_call(self, group: Group) -> None:
        self._effect(group)
        self._victim(group).files.kill_in = self._rng.randint(1, 25)

    def _power_cut(self, group: Group) -> None:
        self._effect(group)
        victim = self._victim(group)
        victim.end("power cut", is_silent=self._rng.random() < 0.5)
        self._world.disks[victim.rank].lose_power(self._rng)

    def _blackout(self, group: Group) -> None:
        self._effect(group)
        for process in group.processes:
            process.end("power cut", is_silent=True)
        for disk in self._world.disks:
            disk.lose_power(self._rng)

    def _freeze(self, group: Group) -> None:
        seconds = self._rng.choice((0.1, 1.0, 8.0)) * (0.2 + self._rng.random())
        self._victim(group).frozen_until = self._world.loop.now + seconds
        self._count_stall(group, seconds)

    def _count_stall(self, group: Group, seconds: float) -> None:
        group.stalled_seconds += seconds
        self.last_effect = max(self.last_effect, self._world.loop.now + seconds)
        if group.stalled_seconds > _MAX_HARMLESS_SECONDS:
            self._effect(group, seconds)

    def _cut(self, group: Group) -> None:
        link = self._link(group)
        if link is not None:
            self._effect(group)
            link.outgoing.cut_after = self._rng.randint(1, 400)

    def _stall(self, group: Group) -> None:
        link = self._link(group)
        if link is not None:
            seconds = self._rng.choice((0.01, 0.1, 1.0)) * (0.2 + self._rng.random())
            link.outgoing.stalled_until = max(link.outgoing.stalled_until, self._world.loop.now + seconds)
            self._count_stall(group, seconds)

    def _lose(self, group: Group) -> None:
        link = self._link(group)
        if link is not None:
            self._effect(group)
            now = self._world.loop.now
            link.outgoing.stalled_until = now + 40.0
            group.lost_since = now if group.lost_since is None else group.lost_since

    def _duplicate(self, group: Group) -> None:
        link = self._link(group)
        if link is not None and link.sent:
            self._effect(group)
            link.put(self._rng.choice(link.sent[-4:]))

    def _stale(self, group: Group) -> None:
        """A frame of an earlier run turns up: any one, or, soon, one that could be meant."""
        if not self._old_frames:
            self._kill(group)  # so that there is an earlier run
        elif self._rng.random() < 0.8:
            self._stale_until = self._world.loop.num_events + _STALE_EVENTS
        elif (link := self._link(group)) is not None and (frames := self._old_frames.get(link.name)):
            self._effect(group)
            link.put(self._rng.choice(frames))

    def _bring_up(self, group: Group) -> None:
        for process in group.processes:
            for link in process.links if process.is_alive else ():
                frames = self._old_frames.get(link.name) if link.end is None else None
                fitting = [frame for frame in frames or () if self._fits(group, link, frame)]
                if fitting and link.other is not None:
                    self._stale_until = 0
                    self._effect(group)
                    link.other.take(self._rng.choice(fitting))
                    return

    def _fits(self, group: Group, link: SimLink, frame: bytes) -> bool:
        """The frame of an earlier run names a job that could be meant now."""
        payload = frame[HEADER_BYTES:]
        flights = group.leader.machine._flights
        if frame[5] == RECORD_ACK.code:
            job_id = decode_ack(payload).result.job_id
            flight, rank = flights.get(job_id), _peer_of(link)
            if flight is None or rank not in flight.clocks or rank in flight.results:
                return False
            return flight.clocks[rank].is_started
        if frame[5] == RECORD_STARTED.code:
            return decode_started(payload).job_id in flights and self._rng.random() < 0.1
        is_later = decode_job(payload).job.job_id > group.leader.machine._last_job_id
        return is_later and self._rng.random() < 0.02

    def remember(self, group: Group) -> None:
        """Keep what the run's record links carried, to bring it up again in a later run."""
        for process in group.processes:
            for link in process.links:
                if link.sent:
                    self._old_frames[link.name] = [*self._old_frames.get(link.name, ()), *link.sent][-_MAX_OLD_FRAMES:]

    def _rot(self, group: Group) -> None:
        del group
        disk = self._rng.choice(self._world.disks)
        files = [name for name, inode in sorted(disk.records().items()) if inode.data]
        if not files:
            return
        name = self._rng.choice(files)
        inode = disk.names[name]
        disk.excused.add(name)
        at = self._rng.randrange(len(inode.data))
        inode.data[at] ^= 1 << self._rng.randrange(8)
        inode.is_damaged = True
        inode.version += 1
        inode.sync()

    def _fill(self, group: Group) -> None:
        group.may_fail_join = True
        world = self._world
        disk = self._rng.choice(world.disks)
        disk.is_full = True

        def empty() -> None:
            disk.is_full = False

        world.loop.after(0.02 + 0.3 * self._rng.random(), f"r{disk.rank} has space", empty)

    def _slow_disk(self, group: Group) -> None:
        rank = self._rng.randrange(len(group.processes))
        self._effect(group, 40.0)
        seconds = self._rng.choice((0.05, 0.5, 8.0, 8.0))
        self._slow(self._world.slow_disk, rank, seconds / self._world.options.task_seconds)

    def _slow_device(self, group: Group) -> None:
        rank = self._rng.randrange(len(group.processes))
        self._slow(self._world.slow_device, rank, self._rng.choice((5.0, 30.0)))

    def _slow(self, factors: list[float], rank: int, factor: float) -> None:
        factors[rank] = factor

        def recover() -> None:
            factors[rank] = 1.0

        self._world.loop.after(0.1 + self._rng.random(), f"r{rank} is fast again", recover)

    def _device_fault(self, group: Group) -> None:
        self._effect(group)
        self._world.device_faults.add(self._victim(group).rank)

    def _restart(self, group: Group) -> None:
        if group.is_serving and not group.leader.is_asked_to_drain:
            self._effect(group, 20.0)
            group.leader.drain([Drain()])

    def _leave_pool_alone(self, group: Group) -> None:
        """All local disks are cleared while the ranks are down: what the pool has is all there is."""
        self._are_disks_due = True
        self._restart(group)

    def _cancel(self, group: Group) -> None:
        running = [stream.request_id for stream in self._world.checks.streams.running()]
        if group.is_serving and running:
            group.leader.put([CancelRequest(self._rng.choice(running))])

    def _reset(self, group: Group) -> None:
        if group.is_serving:
            group.leader.put([ResetCache("reset", self._rng.choice((Tier.DEVICE, Tier.DEVICE, Tier.MEMORY)))])
