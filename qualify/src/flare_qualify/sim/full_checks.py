"""The rules that cost a look at everything: every fifty events, and at rest."""

from __future__ import annotations

from flare_cache.jobs import record_file_name
from flare_core.prefix import Tier
from flare_qualify.sim.checks import Checks
from flare_qualify.sim.group import Group
from flare_qualify.sim.loop import Violation
from flare_qualify.sim.records import Found

__all__ = ["check_all", "check_at_rest", "check_loss", "check_survivors"]

_SURVIVAL_SECONDS = 9.0
"""Five seconds without a heartbeat, 0.7 of draining, one for the watchdog, and what a timer may be late."""


def check_all(checks: Checks, group: Group) -> None:
    """Pages add up, the index offers only what every rank holds, and no disk holds more than is charged."""
    leader = group.leader
    store, scheduler = leader.store, leader.scheduler
    if store is None or scheduler is None or group.first_death is not None or leader.poison is not None:
        return
    try:
        scheduler.check()
    except AssertionError as error:
        raise Violation("pages", str(error)) from error
    for tier in (Tier.MEMORY, Tier.DISK):
        checks.check_held(leader, tier)
    if checks.pool is not None:
        checks.pool.check(group)
    charged = store._records[Tier.DISK]._budget.charged_bytes
    limit = store._records[Tier.DISK]._budget.limit_bytes
    for disk in group.context.disks:
        files = {inode.number: inode for name, inode in disk.names.items() if name.endswith((".rec", ".tmp"))}
        used = sum(len(inode.data) for inode in files.values())
        if used > charged or charged > limit:
            raise Violation("disk limit", f"rank {disk.rank} holds {used} bytes, {charged} of {limit} are charged")
    for process in group.processes:
        shelf = process.memory_shelf
        if shelf is not None and shelf.used_bytes > store._records[Tier.MEMORY]._budget.charged_bytes:
            raise Violation("memory limit", f"{process.name} holds {shelf.used_bytes} bytes")


def check_at_rest(checks: Checks, group: Group) -> None:
    """Nothing is held, nothing is pinned, and every rank's directory holds the same records."""
    leader = group.leader
    store, scheduler = leader.store, leader.scheduler
    if store is None or scheduler is None:
        raise Violation("liveness", "at rest without a store")
    try:
        scheduler.check_at_rest()
    except AssertionError as error:
        raise Violation("at rest", str(error)) from error
    if checks.pool is not None:
        checks.pool.check_at_rest(group)
    if +checks.owned:
        raise Violation("at rest", f"transfers own {dict(+checks.owned)}")
    for tier, records in store._records.items():
        for record in records.index.records():
            is_buried = record_file_name(record.key) in checks.buried and not record.is_usable
            if record.num_pins or not (record.is_stored or is_buried):
                raise Violation("at rest", f"{record.key.hex()[:16]} in {tier}: {record.num_pins} pins")
    for process in group.processes:
        if process.files.num_open != 1:
            raise Violation("at rest", f"{process.name} has {process.files.num_open} descriptors")
        if process.ledger.jobs:
            raise Violation("at rest", f"{process.name} has jobs {sorted(process.ledger.jobs)}")
    _check_directories(checks, group)


def _check_directories(checks: Checks, group: Group) -> None:
    disks = group.context.disks
    first = {name: checks.reader.found(disks[0], name) for name in sorted(disks[0].records())}
    for disk in disks[1:]:
        other = {name: checks.reader.found(disk, name) for name in sorted(disk.records())}
        for name in sorted(first.keys() | other.keys()):
            if any(checks.is_excused(one, name) for one in disks) or name in checks.buried:
                continue
            if not _are_alike(first.get(name), other.get(name), is_uneven=name in checks.uneven):
                raise Violation("directories differ", f"{name[:16]} on ranks 0 and {disk.rank}")


def _are_alike(here: Found | None, there: Found | None, *, is_uneven: bool) -> bool:
    """Both are there, of one store, and of equal parts unless some rank could not cut it; or neither is."""
    if here is None or there is None:
        return here is there
    parts = (here.has_tail, here.has_row) == (there.has_tail, there.has_row)
    return here.identity == there.identity and (parts or is_uneven)


def check_survivors(group: Group, now: float) -> None:
    """When one process of a run has died, the others end within seconds."""
    if group.first_death is None:
        return
    # Peers watch rank zero alone: a chain of deaths may take as long at each link of it.
    began = max(group.last_death, *(process.frozen_until for process in group.processes))
    if now - began > _SURVIVAL_SECONDS:
        alive = [process.name for process in group.processes if process.is_alive]
        raise Violation("survivors", f"{alive} still live {now - began:.1f} s after the last death")


def check_loss(group: Group, now: float) -> None:
    """A link on which nothing arrives is noticed within seconds, whatever else goes on."""
    if group.lost_since is None:
        return
    thawed = max(process.frozen_until for process in group.processes)
    if now - max(group.lost_since, thawed) > _SURVIVAL_SECONDS:
        raise Violation("loss unnoticed", f"nothing has arrived on a link for {now - group.lost_since:.1f} s")
