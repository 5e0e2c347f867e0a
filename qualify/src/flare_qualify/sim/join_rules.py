"""The rules of a join: what every rank holds is what was kept, and what was counted on is lost to faults alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flare_cache.jobs import record_file_name
from flare_core.prefix import Tier
from flare_qualify.sim.disk import SimDisk
from flare_qualify.sim.leader import Leader
from flare_qualify.sim.loop import Violation

if TYPE_CHECKING:
    from flare_qualify.sim.checks import Checks

__all__ = ["check_joined"]


def check_joined(checks: Checks, leader: Leader) -> None:
    """Rank zero has joined; from now on what is kept is counted on."""
    group = checks.group
    if group is None or leader.store is None:
        return
    group.has_joined = True
    checks.counts["joins"] += 1
    kept = {record.key: record for record in leader.store._records[Tier.DISK].index.records()}
    num_evicted = _num_evicted(checks, leader)
    for key, (store_id, _) in checks.reported.items():
        record = kept.get(key)
        if (record is None or record.identity.store_id != store_id) and not _is_loss_excused(checks, key):
            num_evicted -= 1
            if num_evicted < 0:
                raise Violation("reported record lost", f"{key.hex()[:16]} is not kept by the join")
    for record in kept.values():
        parent = record.identity.parent_key
        if parent and parent not in kept:
            raise Violation("parents", f"{record.key.hex()[:16]} is kept without {parent.hex()[:16]}")
    names = {record_file_name(key) for key in kept}
    for disk in checks.disks:
        surplus = sorted(name for name in disk.records() if name not in names)
        if surplus and not all(checks.is_excused(disk, name) for name in surplus):
            raise Violation("join", f"rank {disk.rank} still has {surplus[0][:16]}, which is not kept")
    checks.reported = {key: (one.identity.store_id, one.identity.parent_key) for key, one in kept.items()}
    checks.check_held(leader, Tier.DISK)
    for process in group.processes:
        if process.is_alive:
            _take_stock(checks.disks[process.rank], names)


def _num_evicted(checks: Checks, leader: Leader) -> int:
    """Records that went for the limit: a power cut that takes unlinks back leaves more than it holds."""
    if leader.report is None or not any(disk.cut or disk.excused for disk in checks.disks):
        return 0
    return leader.report.ranks[0].verdicts.get("over-limit", 0)


def _take_stock(disk: SimDisk, kept: set[str]) -> None:
    """What is excused from now on: damage, and what the join could not read and therefore left where it is."""
    disk.excused = {name for name, inode in disk.names.items() if inode.is_damaged} | (disk.records().keys() - kept)
    disk.cut.clear()


def _is_loss_excused(checks: Checks, key: bytes) -> bool:
    """A fault that may take records took this one, or one that it extends, on some rank."""
    while key:
        name = record_file_name(key)
        for disk in checks.disks:
            inode = disk.names.get(name)
            is_cut = name in disk.cut and not checks.is_power_durable
            is_rotten = inode is not None and inode.is_damaged and name not in disk.cut
            if name in disk.excused or is_cut or is_rotten:
                return True
        known = checks.reported.get(key)
        if known is None:
            return True
        key = known[1]
    return False
