"""The join: ranks agree, before anything is served, on settings, limits and the set of records. Two pure machines.

::

    peer                                   rank zero
    Hello, ScanChunk...           ----->   waits for every rank; compares settings and layouts
                                  <-----   Refused (every rank fails), or VerdictChunk..., Proposal(digest)
    Confirmed(digest)             ----->   waits for every rank
                                  <-----   Apply
    unlinks and truncates
    Applied                       ----->   waits for every rank, itself included
                                  <-----   Joined(report)

Nothing is removed before every rank has confirmed the same set. A rank that dies in between leaves files that the
next join judges again by the same rule; running it twice changes nothing. The machines know no link, file or time.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from flare_cache.join_loss import loss_objection
from flare_cache.join_messages import (
    CHUNK_RECORDS,
    Applied,
    Apply,
    Broken,
    Confirmed,
    Hello,
    Joined,
    JoinMessage,
    Proposal,
    Refused,
    ScanChunk,
    VerdictChunk,
)
from flare_cache.join_report import JoinReport, RankReport, agreed_limits, disk_limit_of
from flare_cache.join_set import FATE_MASK, Agreement, Summary, Verdict, agree, kept_digest, summarise
from flare_cache.record_plan import FileSizes
from flare_cache.record_table import RecordTable
from flare_cache.settings import Statement, describe_mismatches
from flare_core.errors import ConfigurationMismatch, FlareError, Poisoned, PoisonReason, UsageError, poison_reason

__all__ = ["ApplyHere", "Finished", "JoinEffect", "JoinFailed", "JoinLeader", "JoinPeer", "Tell"]


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to ``rank``."""

    rank: int
    message: JoinMessage


@dataclass(frozen=True, slots=True)
class ApplyHere:
    """Do to this rank's directory what ``verdicts`` say of its scan's records; then call ``applied``."""

    set_id: bytes
    verdicts: bytes


@dataclass(frozen=True, slots=True)
class Finished:
    """The group has joined. ``agreement`` is rank zero's; None on a peer."""

    report: JoinReport
    agreement: Agreement | None = None


@dataclass(frozen=True, slots=True)
class JoinFailed:
    """Start-up fails on this rank with ``error``, as it does on all."""

    error: FlareError


JoinEffect = Tell | ApplyHere | Finished | JoinFailed


def _refusal(refused: Refused) -> FlareError:
    message = "\n".join(refused.lines)
    fault = UsageError if poison_reason(message) is None else Poisoned
    return ConfigurationMismatch(message) if refused.is_mismatch else fault(message)


def _lost(rank: int, reason: str) -> str:
    return f"{PoisonReason.LINK_LOST}: rank {rank} was lost during the join: {reason}"


def _joined(parts: Sequence[Summary]) -> Summary:
    return Summary(
        b"".join(part.keys for part in parts),
        b"".join(part.digests for part in parts),
        b"".join(part.parts for part in parts),
        [size for part in parts for size in part.sizes],
    )


class _Phase(enum.Enum):
    GATHERING = "state its settings and records"
    CONFIRMING = "confirm the set"
    APPLYING = "remove what is not kept"
    OVER = "do anything"


class JoinLeader:
    """Rank zero's machine.

    Args:
        statement: rank zero's own.
        records: its scan, oldest use first, with token ids; empty without a disk tier.
        world_size: number of ranks.
        sizes: of this group's files.
        accept_loss: go on where the loss guard would stop.
        draw_set_id: 16 random bytes, for the first join of a group.
    """

    def __init__(
        self,
        statement: Statement,
        records: RecordTable,
        *,
        world_size: int,
        sizes: FileSizes,
        accept_loss: bool,
        draw_set_id: Callable[[], bytes],
    ) -> None:
        self._records = records
        self._world_size = world_size
        self._sizes = sizes
        self._accept_loss = accept_loss
        self._draw_set_id = draw_set_id
        self._phase = _Phase.GATHERING
        self._statements = {0: statement}
        self._chunks: dict[int, list[Summary]] = {}
        self._set_id = b""
        self._agreement: Agreement | None = None
        self._digest = b""
        self._confirmed: set[int] = set()
        self._applied: dict[int, Applied] = {}

    def start(self) -> list[JoinEffect]:
        """Begin; a group of one is complete at once."""
        return self._go_on()

    def awaited(self) -> tuple[list[int], str]:
        """Ranks that have not answered, and what they have yet to do; for the message when time is up."""
        missing = {
            _Phase.GATHERING: [rank for rank in range(self._world_size) if not self._is_gathered(rank)],
            _Phase.CONFIRMING: [rank for rank in range(1, self._world_size) if rank not in self._confirmed],
            _Phase.APPLYING: [rank for rank in range(self._world_size) if rank not in self._applied],
            _Phase.OVER: [],
        }
        return missing[self._phase], self._phase.value

    def receive(self, rank: int, message: JoinMessage) -> list[JoinEffect]:
        """A message came on the link of ``rank``."""
        if self._phase is _Phase.OVER:
            return []
        match message, self._phase:
            case Broken(reason), _:
                return self._refuse([f"rank {rank}: {reason}"])
            case Hello(statement), _Phase.GATHERING if rank not in self._statements and statement.rank == rank:
                self._statements[rank] = statement
                self._chunks[rank] = []
            case ScanChunk(part), _Phase.GATHERING if self._is_chunk_due(rank, part):
                self._chunks[rank].append(part)
            case Confirmed(digest), _Phase.CONFIRMING if rank not in self._confirmed and digest == self._digest:
                self._confirmed.add(rank)
            case Applied(), _Phase.APPLYING if rank not in self._applied:
                self._applied[rank] = message
            case _:
                return self._refuse([f"rank {rank} sent {type(message).__name__} out of turn"])
        return self._go_on()

    def applied(self, applied: Applied) -> list[JoinEffect]:
        """Rank zero's own directory is done."""
        self._applied[0] = applied
        return self._go_on()

    def failed(self, reason: str) -> list[JoinEffect]:
        """Rank zero itself cannot go on."""
        return [] if self._phase is _Phase.OVER else self._refuse([f"rank 0: {reason}"])

    def lost(self, rank: int, reason: str) -> list[JoinEffect]:
        """The link of ``rank`` ended, or time is up."""
        return [] if self._phase is _Phase.OVER else self._refuse([_lost(rank, reason)])

    def _is_chunk_due(self, rank: int, part: Summary) -> bool:
        return rank in self._chunks and part.is_well_formed() and 0 < len(part) <= self._num_records_due(rank)

    def _num_records_due(self, rank: int) -> int:
        return self._statements[rank].num_records - sum(map(len, self._chunks.get(rank, ())))

    def _is_gathered(self, rank: int) -> bool:
        return rank in self._statements and (rank == 0 or self._num_records_due(rank) == 0)

    def _go_on(self) -> list[JoinEffect]:
        """The next phase, once every rank has done its part of this one."""
        match self._phase:
            case _Phase.GATHERING if all(map(self._is_gathered, range(self._world_size))):
                return self._propose()
            case _Phase.CONFIRMING if len(self._confirmed) == self._world_size - 1:
                return self._apply()
            case _Phase.APPLYING if len(self._applied) == self._world_size:
                return self._finish()
        return []

    def _refuse(self, lines: list[str], *, is_mismatch: bool = False) -> list[JoinEffect]:
        self._phase = _Phase.OVER
        refused = Refused(lines, is_mismatch)
        told: list[JoinEffect] = [Tell(rank, refused) for rank in range(1, self._world_size)]
        return [*told, JoinFailed(_refusal(refused))]

    def _propose(self) -> list[JoinEffect]:
        statements = self._by_rank()
        mismatches = describe_mismatches(statements)
        if mismatches:
            return self._refuse(["ranks were started with settings that must be equal:", *mismatches], is_mismatch=True)
        own = summarise(self._records)
        summaries = {rank: _joined(self._chunks[rank]) for rank in range(1, self._world_size)}
        objection = self._set_ids(statements) or loss_objection([own, *summaries.values()], statements)
        if objection is not None and not self._accept_loss:
            return self._refuse([objection])
        disk_limit, _ = agreed_limits(statements)
        left_bytes = max(statement.left_bytes for statement in statements)
        self._agreement = agree(
            self._records, own, others=summaries, sizes=self._sizes, limit_bytes=max(0, disk_limit - left_bytes)
        )
        self._digest = kept_digest(own, self._agreement.verdicts[0])
        effects: list[JoinEffect] = []
        for rank in range(1, self._world_size):
            verdicts = self._agreement.verdicts[rank]
            effects.extend(
                Tell(rank, VerdictChunk(verdicts[at : at + CHUNK_RECORDS]))
                for at in range(0, len(verdicts), CHUNK_RECORDS)
            )
            effects.append(Tell(rank, Proposal(self._set_id, self._digest)))
        self._phase = _Phase.CONFIRMING
        return [*effects, *self._go_on()]

    def _by_rank(self) -> list[Statement]:
        return [self._statements[rank] for rank in range(self._world_size)]

    def _set_ids(self, statements: Sequence[Statement]) -> str | None:
        """Settle the group's set id; an objection where directories have belonged to different groups."""
        found = [statement for statement in statements if statement.set_id]
        self._set_id = found[0].set_id if found else self._draw_set_id()
        if len({statement.set_id for statement in found}) < 2:
            return None
        named = ", ".join(f"rank {one.rank} ({one.directory}) holds set {one.set_id.hex()}" for one in found)
        return (
            f"record directories belong to different groups: {named}; give each rank the directory it had, or accept "
            "that records are lost with --prefix-cache-accept-loss"
        )

    def _apply(self) -> list[JoinEffect]:
        assert self._agreement is not None  # noqa: S101 - a type's proof: proposed before
        self._phase = _Phase.APPLYING
        told: list[JoinEffect] = [Tell(rank, Apply()) for rank in range(1, self._world_size)]
        return [*told, ApplyHere(self._set_id, self._agreement.verdicts[0])]

    def _finish(self) -> list[JoinEffect]:
        assert self._agreement is not None  # noqa: S101 - a type's proof: proposed before
        self._phase = _Phase.OVER
        report = self._report(self._agreement)
        told: list[JoinEffect] = [Tell(rank, Joined(report)) for rank in range(1, self._world_size)]
        return [*told, Finished(report, self._agreement)]

    def _report(self, agreement: Agreement) -> JoinReport:
        statements = self._by_rank()
        counts = agreement.counts()
        has_disk = bool(statements[0].directory)
        disk_limit, memory_limit = agreed_limits(statements)
        ranks = [
            RankReport(
                rank=one.rank,
                directory=one.directory,
                disk_limit_bytes=disk_limit_of(one, statements) if has_disk else 0,
                is_limit_derived=has_disk and not one.disk_limit_bytes,
                memory_bytes=one.memory_bytes,
                verdicts={_NAMES[verdict]: number for verdict, number in counts[one.rank].items()}
                | {"damaged": self._applied[one.rank].num_damaged},
                num_truncated=self._applied[one.rank].num_truncated,
                num_left=self._applied[one.rank].num_left,
            )
            for one in statements
        ]
        return JoinReport(
            set_id=self._set_id if has_disk else b"",
            num_kept=len(agreement.kept),
            kept_bytes=agreement.kept_bytes,
            left_bytes=max(one.left_bytes for one in statements),
            disk_limit_bytes=disk_limit if has_disk else 0,
            memory_limit_bytes=memory_limit,
            ranks=ranks,
        )


_NAMES = {verdict: verdict.name.lower().replace("_", "-") for verdict in Verdict}


class JoinPeer:
    """A peer's machine: ``statement`` and ``records`` (its scan) are its own."""

    def __init__(self, statement: Statement, records: RecordTable) -> None:
        self._statement = statement
        self._summary = summarise(records)
        self._verdicts = bytearray()
        self._proposal: Proposal | None = None
        self._is_applying = False
        self._is_over = False

    def start(self) -> list[JoinEffect]:
        """State settings and scan."""
        summary = self._summary
        effects: list[JoinEffect] = [Tell(0, Hello(self._statement))]
        for at in range(0, len(summary), CHUNK_RECORDS):
            end = at + CHUNK_RECORDS
            part = Summary(
                summary.keys[32 * at : 32 * end],
                summary.digests[32 * at : 32 * end],
                summary.parts[at:end],
                summary.sizes[at:end],
            )
            effects.append(Tell(0, ScanChunk(part)))
        return effects

    def receive(self, message: JoinMessage) -> list[JoinEffect]:
        """A message came from rank zero."""
        if self._is_over:
            return []
        match message:
            case Refused():
                self._is_over = True
                return [JoinFailed(_refusal(message))]
            case VerdictChunk(verdicts) if self._proposal is None:
                self._verdicts += verdicts
                return []
            case Proposal() if self._proposal is None:
                return self._consider(message)
            case Apply() if self._proposal is not None and not self._is_applying:
                self._is_applying = True
                return [ApplyHere(self._proposal.set_id, bytes(self._verdicts))]
            case Joined(report) if self._is_applying:
                self._is_over = True
                return [Finished(report)]
        return self._break(f"rank 0 sent {type(message).__name__} out of turn")

    def applied(self, applied: Applied) -> list[JoinEffect]:
        """This rank's directory is done."""
        return [Tell(0, applied)]

    def lost(self, reason: str) -> list[JoinEffect]:
        """The link ended, or time is up."""
        if self._is_over:
            return []
        self._is_over = True
        return [JoinFailed(Poisoned(_lost(0, reason)))]

    def failed(self, reason: str) -> list[JoinEffect]:
        """This rank cannot go on; every rank is to be told so."""
        return self._break(reason)

    def _consider(self, proposal: Proposal) -> list[JoinEffect]:
        verdicts = bytes(self._verdicts)
        if len(verdicts) != len(self._summary):
            return self._break(f"rank 0 judged {len(verdicts)} of {len(self._summary)} records")
        parts = np.frombuffer(self._summary.parts, dtype=np.uint8)
        asked = np.frombuffer(verdicts, dtype=np.uint8) & np.uint8(0xFF ^ FATE_MASK) & ~parts
        if asked.any() or kept_digest(self._summary, verdicts) != proposal.digest:
            return self._break("rank 0 proposes a set that is not held here")
        self._proposal = proposal
        return [Tell(0, Confirmed(proposal.digest))]

    def _break(self, reason: str) -> list[JoinEffect]:
        self._is_over = True
        return [
            Tell(0, Broken(reason)),
            JoinFailed(UsageError(f"rank {self._statement.rank}: {reason}")),
        ]
