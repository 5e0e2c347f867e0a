"""The N-th write-side system call of a store or a join kills the process, fails, or lies: for every call, every N.

A group of ranks in one small process runs under ``strace``. Its calls are counted once, then it runs again and again,
each time with another call tampered with.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from flare_cache.disk_shelf import Durability
from flare_core.errors import FlareError
from flare_qualify.fault_drill import note_restores
from flare_qualify.faults.record_trial import Child, Found, read_back, started_child
from flare_qualify.faults.system_calls import WRITE_PAGES, WRITE_SIDE_CALLS, Injection, Trace, traced_command
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.verdict import Damage

__all__ = ["SCENARIOS"]

_OPEN = "openat"
"""Opens and makes files; only on the record directories."""
_KILL = "signal=SIGKILL"
_SAVED = 4
"""Records that are stored before the run that is tampered with."""


@dataclass(frozen=True, slots=True)
class _Tampering:
    """One run: what is done to which call, when."""

    call: str
    action: str
    when: str

    @property
    def name(self) -> str:
        return f"{self.call} {self.when} {self.action}"


def _tamperings(counts: dict[str, int], actions: tuple[str, ...]) -> list[_Tampering]:
    """Each call of each kind once with each action, and every later one, too, where it fails."""
    found = [
        _Tampering(call, action, str(number))
        for call, count in sorted(counts.items())
        for number in range(1, count + 1)
        for action in actions
    ]
    return found + [_Tampering(call, action, "1+") for call in sorted(counts) for action in actions if action != _KILL]


class _Loop:
    """Runs the child again and again over a copy of the same directories."""

    def __init__(self, context: Context, durability: Durability, num_records: int) -> None:
        self._context = context
        self._durability = durability
        self._num_records = num_records
        self._template = context.directory / "template"
        self._root = context.directory / "ranks"

    def prepare(self, change: Callable[[Path], None]) -> None:
        """Store :data:`_SAVED` records, then ``change`` the directories: where every run begins."""
        self._template.mkdir(mode=0o700)
        with started_child(self._template, num_records=_SAVED, environment=self._environment()) as child:
            self._context.require(child.wait() == 0 and len(child.stored) == _SAVED, f"preparing: {child.lines}")
        change(self._template)

    def count(self) -> dict[str, int]:
        """How often a run makes each of the calls, in the thread that makes it most."""
        counts: dict[str, int] = {}
        for calls, paths in ((WRITE_SIDE_CALLS, ()), ((_OPEN,), self._directories)):
            chosen = [word for path in paths for word in ("-P", str(path))]
            trace = self._traced([*chosen, "-e", f"trace={','.join(calls)}"])
            counts |= {call: number for call, number in trace.most_calls().items() if call in calls}
        self._context.require(len(counts) > 2, f"only {counts} were seen")
        return counts

    def largest_write(self) -> int:
        """Bytes of the largest write of a run."""
        lines = self._traced(["-e", f"trace={','.join(WRITE_PAGES)}"]).lines()
        return max(int(line.rpartition("= ")[2].split()[0]) for line in lines if line.rstrip()[-1].isdigit())

    def intact(self) -> set[int]:
        """Records that are whole on every rank where a run begins."""
        self._fresh()
        return set(read_back(self._root, range(_SAVED)).restored)

    def _traced(self, options: list[str]) -> Trace:
        trace = self._fresh()
        with self._run(traced_command(trace.path, options)) as child:
            self._context.require(child.wait() == 0, f"counting: {child.lines}")
        return trace

    @property
    def _directories(self) -> tuple[Path, ...]:
        return tuple(self._root / f"rank{rank}" for rank in range(2))

    def tampered(self, tampering: _Tampering) -> tuple[Child, list[str], Found | None]:
        """One run: what the child said, what was done to it, and what is there afterwards (None: no start)."""
        trace = self._fresh()
        paths = self._directories if tampering.call == _OPEN else ()
        injection = Injection([tampering.call], tampering.action, tampering.when, paths)
        with self._run(traced_command(trace.path, injection.options())) as child:
            child.wait()
        try:
            found = read_back(self._root, range(_SAVED + self._num_records))
        except (FlareError, OSError) as error:
            self._context.check(False, f"{tampering.name}: the group does not start afterwards: {error}")
            return child, trace.fired(), None
        return child, trace.fired(), found

    def _run(self, prefix: list[str]) -> AbstractContextManager[Child]:
        return started_child(
            self._root,
            num_records=self._num_records,
            first=_SAVED,
            durability=self._durability,
            prefix=prefix,
            environment=self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        return self._context.command_environment()

    def _fresh(self) -> Trace:
        shutil.rmtree(self._root, ignore_errors=True)
        shutil.copytree(self._template, self._root, symlinks=True)
        trace = Trace(self._context.directory / "calls.trace")
        trace.path.unlink(missing_ok=True)
        return trace


def _disagree(root: Path) -> None:
    """Directories between which a join has something of everything to do: unlink, truncate, leave alone."""
    files = [sorted((root / f"rank{rank}").glob("*.rec")) for rank in range(2)]
    files[1][0].unlink()
    os.truncate(files[0][1], files[0][1].stat().st_size - 4096)
    data = bytearray(files[1][2].read_bytes())
    data[100] ^= 1
    files[1][2].write_bytes(data)
    for rank in range(2):
        (root / f"rank{rank}" / "join.idx").unlink(missing_ok=True)


def _chosen(context: Context, tamperings: list[_Tampering], num_standard: int) -> dict[str, _Tampering]:
    """All in the long suite; otherwise some, evenly spread over the calls and the actions."""
    if not context.is_long and len(tamperings) > num_standard:
        step = len(tamperings) / num_standard
        tamperings = [tamperings[int(number * step)] for number in range(num_standard)]
    return {tampering.name: tampering for tampering in tamperings}


def _account(context: Context, tampering: _Tampering, fired: list[str]) -> bool:
    if not fired:
        context.vacuous(f"{tampering.name}: nothing fired")
        return False
    context.fault_fired(tampering.name, fired[0])
    context.figure("system_calls_tampered_with", len(fired))
    return True


def _judge(context: Context, name: str, child: Child, found: Found, *, kept: set[int]) -> None:
    """``kept``: records that were whole on every rank before the run."""
    context.damage(Damage.WRONG_TOKENS, len(found.wrong), f"{name}: {found.wrong[:3]}")
    context.damage(Damage.PARTIALLY_VISIBLE, len(found.partial), f"{name}: {found.partial[:3]}")
    lost = sorted((kept | set(child.stored)) - set(found.restored))
    context.damage(Damage.LOST_REPORTED, len(lost), f"{name}: {lost}; said {child.lines[-3:]}")
    note_restores(context, found)


def run_store(context: Context) -> None:
    """Stores into directories that hold some records already."""
    for durability in (Durability.POWER, Durability.PROCESS):
        loop = _Loop(context, durability, num_records=2)
        shutil.rmtree(context.directory / "template", ignore_errors=True)
        loop.prepare(lambda _: None)
        actions = (_KILL, "error=EIO", "error=ENOSPC")
        chosen = _chosen(context, _tamperings(loop.count(), actions), 11)
        for case in context.cases(f"{durability}: {name}" for name in chosen):
            tampering = chosen[case.partition(": ")[2]]
            child, fired, found = loop.tampered(tampering)
            if _account(context, tampering, fired) and found is not None:
                _judge(context, case, child, found, kept=set(range(_SAVED)))
                if tampering.action != _KILL:
                    has_ended = bool(child.refused) or child.lines[-1].startswith(("closed", "poisoned"))
                    context.check(has_ended, f"{case}: said {child.lines[-3:]}")


def run_join(context: Context) -> None:
    """A join that must unlink, truncate and keep is killed or failed at each of its calls: the next one converges."""
    loop = _Loop(context, Durability.PROCESS, num_records=0)
    loop.prepare(_disagree)
    intact = loop.intact()
    context.require(0 < len(intact) < _SAVED, f"the directories were to disagree, and share {intact}")
    chosen = _chosen(context, _tamperings(loop.count(), (_KILL, "error=EIO")), 14)
    for case in context.cases(chosen):
        tampering = chosen[case]
        child, fired, found = loop.tampered(tampering)
        if _account(context, tampering, fired) and found is not None:
            _judge(context, case, child, found, kept=intact)


def run_lies(context: Context) -> None:
    """A write that reports success and writes nothing: acknowledged by every rank, and found out afterwards.

    A whole write that is missing leaves a file that is too short; the first 4096 bytes of one leave a hole in a file of
    the right size, which digests alone can tell from a page.
    """
    loop = _Loop(context, Durability.PROCESS, num_records=2)
    loop.prepare(lambda _: None)
    for case, num_bytes in {"a write": loop.largest_write(), "a page": 4096}.items():
        lie = _Tampering(",".join(WRITE_PAGES), f"retval={num_bytes}", "1")
        child, fired, found = loop.tampered(lie)
        if not _account(context, lie, fired) or found is None:
            continue
        context.damage(Damage.WRONG_TOKENS, len(found.wrong), f"{case}: {found.wrong[:3]}")
        context.check(set(range(_SAVED)) <= set(found.restored), f"{case}: records stored before are gone: {found}")
        context.check(_SAVED in child.stored, f"{case}: the store was not acknowledged: {child.lines}")
        context.check(_SAVED in found.missing, f"{case}: what was not written was restored: {found}")
        note_restores(context, found)


def run_failed_sync(context: Context) -> None:
    """A sync that fails once: it is never repeated, what it was for is not reported, and nothing is stored any more."""
    loop = _Loop(context, Durability.POWER, num_records=3)
    loop.prepare(lambda _: None)
    once = _Tampering("fsync", "error=EIO", "1")
    child, fired, found = loop.tampered(once)
    if not _account(context, once, fired) or found is None:
        return
    counts = Trace(context.directory / "calls.trace").most_calls()
    context.check(counts["fsync"] == 1, f"a thread whose fsync had failed called it {counts['fsync']} times")
    context.check(not child.stored, f"reported although the sync had failed: {child.lines}")
    context.check("fsync failed" in str(child.failed[1:]), f"stores went on after a failed sync: {child.lines}")
    _judge(context, once.name, child, found, kept=set(range(_SAVED)))
    context.check(found.restored == list(range(_SAVED)), f"something that was not synced is there: {found.restored}")


SCENARIOS = (
    Scenario(
        name="nth-call-of-a-store",
        proves="Whichever write-side system call of a store kills the ranks or fails, no reported record is lost.",
        rows=("A4", "A5"),
        needs=("strace",),
        seconds=20,
        long_seconds=300,
        run=run_store,
    ),
    Scenario(
        name="nth-call-of-a-join",
        proves="Whichever write-side system call of a join kills the ranks or fails, the next join converges.",
        rows=("A6",),
        needs=("strace",),
        seconds=10,
        long_seconds=60,
        run=run_join,
    ),
    Scenario(
        name="failed-sync",
        proves="A failed fsync is never repeated; its record is not reported, and stores stop for that directory.",
        rows=("A5",),
        needs=("strace",),
        seconds=3,
        run=run_failed_sync,
    ),
    Scenario(
        name="writes-that-lie",
        proves="A write that reports success and writes nothing is found out when it is read.",
        rows=("A13",),
        needs=("strace",),
        seconds=5,
        run=run_lies,
    ),
)
