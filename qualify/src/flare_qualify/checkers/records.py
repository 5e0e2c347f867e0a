"""Record directories of all ranks against each other, and against what was reported before a fault.

Holds at rest only: with nothing in work, or with every rank ended and joined again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from flare_cache.inspect import RecordSummary, list_records, verify_records
from flare_qualify.group import Group
from flare_qualify.run_context import Context
from flare_qualify.verdict import Damage

__all__ = ["ReportedRecords", "check_digests", "check_parity", "records_of", "subtree", "temporary_files"]


def records_of(group: Group, rank: int) -> dict[str, RecordSummary]:
    """Records with a sound header in this rank's directory, by file name."""
    directory = group.record_directory(rank)
    return {record.name: record for record in list_records(directory).records} if directory.is_dir() else {}


def subtree(group: Group, top: str) -> set[str]:
    """Names of ``top`` and of all that extends it, on rank zero."""
    records = records_of(group, 0)
    by_key = {record.header.identity.key: name for name, record in records.items()}
    found = {top}
    for record in sorted(records.values(), key=lambda one: one.depth):
        if by_key.get(record.header.identity.parent_key) in found:
            found.add(record.name)
    return found


def temporary_files(group: Group, rank: int) -> list[str]:
    """Files of flare's that are being written: what a store leaves when it is killed."""
    directory = group.record_directory(rank)
    names = (path.name for path in directory.iterdir()) if directory.is_dir() else ()
    return sorted(name for name in names if name.endswith(".tmp"))


def check_parity(context: Context, group: Group, when: str) -> int:
    """Count records that some ranks lack, or hold from another computation or cut elsewhere; the number found.

    Also checks that file sizes are those that each rank's geometry implies, and that no temporary file is left.
    """
    ranks = [records_of(group, rank) for rank in range(group.world_size)]
    names = set().union(*ranks)
    bad: list[str] = []
    for name in sorted(names):
        held = [records.get(name) for records in ranks]
        states = {
            None if record is None else (record.header.identity, record.has_tail, record.has_row) for record in held
        }
        if len(states) > 1:
            bad.append(f"{name[:12]}: {['absent' if record is None else record.size for record in held]}")
    files = [frozenset(file.name for file in group.record_files(rank)) for rank in range(group.world_size)]
    uneven = frozenset[str]().union(*files) - files[0].intersection(*files)
    bad += [f"{name[:12]}: a file on some ranks only" for name in sorted(uneven)]
    context.damage(Damage.PARTIALLY_VISIBLE, len(bad), f"{when}: {'; '.join(bad[:5])}")
    for rank, records in enumerate(ranks):
        odd = [record.name[:12] for record in records.values() if not _size_fits(record)]
        context.check(not odd, f"{when}: sizes on rank {rank} are not those of its geometry: {odd[:5]}")
        left = temporary_files(group, rank)
        context.check(not left, f"{when}: rank {rank} has temporary files: {left[:5]}")
    return len(bad)


def _size_fits(record: RecordSummary) -> bool:
    layout = record.header.layout
    return record.size == (
        layout.row_end if record.has_row else layout.tail_end if record.has_tail else layout.pages_end
    )


def check_digests(context: Context, group: Group, when: str) -> int:
    """Verify every digest of every rank's records; the number of bad ones, each a failure of the scenario."""
    bad = 0
    for rank in range(group.world_size):
        for verdict in verify_records(list_records(group.record_directory(rank)), progress=lambda *_: None):
            bad += verdict.reason is not None
            context.check(verdict.reason is None, f"{when}: rank {rank}, {verdict.name[:12]}: {verdict.reason}")
    return bad


@dataclass(slots=True)
class ReportedRecords:
    """Names of records that rank zero had reported: what lay on every rank when nothing was in work."""

    context: Context
    names: set[str] = field(default_factory=set)

    def note(self, group: Group) -> None:
        """Take what is stored now as reported; blocks until nothing is in work."""
        group.wait_stored()
        self.names |= set.intersection(
            *({file.name for file in group.record_files(r)} for r in range(group.world_size))
        )

    def forget(self, names: Iterable[str]) -> None:
        """These were evicted, or destroyed by the scenario itself."""
        self.names -= set(names)

    def check(self, group: Group, when: str) -> int:
        """Count reported records that any rank lacks now, at rest after every rank has joined again."""
        held = set.intersection(*({file.name for file in group.record_files(r)} for r in range(group.world_size)))
        lost = sorted(self.names - held)
        self.context.damage(Damage.LOST_REPORTED, len(lost), f"{when}: {[name[:12] for name in lost[:5]]}")
        self.context.history.append("checked")
        return len(lost)
