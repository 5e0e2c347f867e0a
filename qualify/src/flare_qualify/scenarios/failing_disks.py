"""One rank's disk fails while the group serves: full, unreadable, read-only, slow. No request may notice.

The rank's record directory is a small ext4 file system of its own on a loop device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from flare_qualify.checkers.pages import check_pages_at_rest
from flare_qualify.checkers.records import records_of, subtree
from flare_qualify.fault_drill import Drill, open_drill
from flare_qualify.faults.commands import FaultError
from flare_qualify.faults.disks import MIB, LoopDisk, fill, loop_disk, physical_offset, slowed_down, small_tmpfs
from flare_qualify.faults.system_calls import READ_PAGES, WRITE_PAGES, Injection, attached
from flare_qualify.process_facts import is_alive
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.requests import drop_device_copies

__all__ = ["SCENARIOS"]

_RANK = 1


@contextlib.contextmanager
def _opened(
    context: Context, *options: str, num_prompts: int = 3, num_bytes: int = 48 * MIB
) -> Iterator[tuple[LoopDisk, Drill]]:
    """A group of two that has learnt its answers; rank 1 keeps its records on the loop disk."""
    group = context.group("oracle", 2, "--prefix-cache-disk-limit", "30M", *options)
    with (
        loop_disk(group.record_directory(_RANK), num_bytes=num_bytes) as disk,
        open_drill(context, group, num_prompts=num_prompts) as drill,
    ):
        yield disk, drill


def run_full(context: Context) -> None:
    """Full, then with room again, and once more: stores are dropped meanwhile, and go on afterwards."""
    with _opened(context) as (disk, drill):
        group, number = drill.group, 100
        for case in context.cases(f"round {index}" for index in range(8 if context.is_long else 2)):
            ballast, evidence = fill(disk.path)
            before = set(group.record_files(0))
            with drill.traffic() as traffic:
                drill.ask_new(*range(number, number + 4))
            number += 4
            drill.check_traffic(traffic, case, fired_at=None)
            reasons = drill.job_failures("store", _RANK)
            context.check("ENOSPC" in str(reasons), f"{case}: stores on rank 1 failed of {reasons}")
            context.fault_fired("a full disk", f"{evidence}; stores failed: {reasons}")
            drill.check_at_rest(f"{case}, full")
            context.check(set(group.record_files(0)) <= before, f"{case}: something was stored on a full disk")
            ballast.unlink()
            number = drill.await_store(f"{case}, with room again", number)
            drill.answer_all(case, at_least=len(drill.prompts))
            drill.check_at_rest(f"{case}, with room again")
            drill.reported.note(group)
        group.stop()
        drill.recover("after a full disk", at_least=len(drill.prompts))


def run_unreadable(context: Context) -> None:
    """Sectors under a record are gone: a miss, the same answer, and the record leaves every rank."""
    with _opened(context, num_prompts=4) as (disk, drill):
        group = drill.group
        drop_device_copies(group.url)
        directory = group.record_directory(_RANK)
        places = {path.name: physical_offset(path, 4096) for path in directory.glob("*.rec")}
        # The one that lies last on the device, so that hardly any other is hit.
        name = max((drill.file_of(name) for name in drill.prompts), key=places.__getitem__)
        victim, store_id = directory / name, records_of(group, 0)[name].header.identity.store_id
        lost = subtree(group, name)
        evidence = disk.lose_sectors(victim, offset=4096)
        answers = drill.answer_all("unreadable", at_least=len(drill.prompts) - 1)
        group.wait_stored()
        failures = drill.job_failures("fetch", _RANK)
        context.check("read-error" in str(failures), f"fetches on rank 1 failed of {failures}")
        context.fault_fired("unreadable sectors", f"{evidence}; fetches failed: {failures}")
        missed = [name for name, answer in answers.items() if not answer.cached_tokens["disk"]]
        context.check(len(missed) == 1, f"{missed} were not restored, one was due")
        for rank in range(2):
            held = records_of(group, rank).get(victim.name)
            is_old = held is not None and held.header.identity.store_id == store_id
            context.check(not is_old, f"rank {rank} still holds the unreadable record")
        check_pages_at_rest(context, group, "unreadable")
        group.stop()
        disk.restore_sectors()
        disk.repair()
        drill.reported.forget(name for name, place in places.items() if place >= places[victim.name])
        drill.reported.forget(lost)
        drill.recover("after unreadable sectors", at_least=len(drill.prompts) - 1)


def run_failing_reads(context: Context) -> None:
    """Every read of one rank fails: after three the disk is not read any more, which costs three records, not all."""
    with _opened(context, num_prompts=6) as (_, drill):
        group, pid = drill.group, drill.group.members()["rank1"]
        drop_device_copies(group.url)
        trace_path = context.directory / "reads.trace"
        with attached(pid, Injection(READ_PAGES, "error=EIO", "1+"), trace_path) as trace:
            answers = drill.answer_all("failing reads", restore=False)
            fired = trace.fired()
        context.require(bool(fired), "no read failed")
        context.fault_fired("failing reads", f"{len(fired)} calls: {fired[0]}")
        found = {name: answer.cached_tokens["disk"] for name, answer in answers.items()}
        context.check(not any(found.values()), f"restored although every read failed: {found}")
        context.check(
            group.wait_log(0, "not read any more", timeout=1.0), "rank zero did not say that it reads no more"
        )
        drill.answer_all("reads given up", restore=False)
        group.wait_stored()
        check_pages_at_rest(context, group, "failing reads")
        codes = group.stop()
        context.check(codes == dict.fromkeys(codes, 0), f"exit codes {codes}")
        drill.reported.names.clear()
        drill.recover("after failing reads", at_least=3)


def run_small(context: Context) -> None:
    """A file system in memory that is much smaller than the limit given for it: full by flare's own records."""
    group = context.group("oracle", 2, "--prefix-cache-disk-limit", "30M")
    with (
        small_tmpfs(group.record_directory(_RANK), num_bytes=400_000),
        open_drill(context, group) as drill,
    ):
        drill.ask_new(*range(20))
        reasons = drill.job_failures("store", _RANK)
        context.require("ENOSPC" in str(reasons), f"stores on rank 1 failed of {reasons}")
        context.fault_fired("a disk smaller than its limit", f"stores failed: {reasons}")
        drill.answer_all("small disk", at_least=len(drill.prompts))
        drill.check_at_rest("small disk")
        codes = group.stop()
        context.check(codes == dict.fromkeys(codes, 0), f"exit codes {codes}")
        drill.recover("after a small disk", at_least=len(drill.prompts))


def run_read_only(context: Context) -> None:
    """The kernel turns the file system read-only: stores fail, restores go on; a repaired disk is as before."""
    with _opened(context) as (disk, drill):
        group = drill.group
        # What the journal does not have yet is lost with it, as in a power cut.
        disk.sync()
        evidence = disk.turn_read_only()
        with drill.traffic() as traffic:
            drill.ask_new(*range(200, 204))
        drill.check_traffic(traffic, "read-only", fired_at=None)
        reasons = drill.job_failures("store", _RANK)
        context.check(bool(reasons), "no store failed on a read-only disk")
        context.fault_fired("a read-only disk", f"{evidence}; stores failed: {reasons}")
        drill.answer_all("read-only", at_least=len(drill.prompts))
        drill.check_at_rest("read-only")
        group.stop()
        disk.repair()
        drill.recover("after a read-only disk", at_least=len(drill.prompts))


def run_slow(context: Context) -> None:
    """A disk of 200 kB/s, then one whose calls take half a second: restores are late, nothing is poisoned."""
    with _opened(context, "--prefix-cache-disk-transport", "direct") as (disk, drill):
        group = drill.group
        with contextlib.ExitStack() as undo:
            try:
                rule = undo.enter_context(slowed_down(disk, [group.members()["rank1"]], bytes_per_second=200_000))
            except FaultError as error:
                context.skip(str(error))
            _late_answers(context, drill, "a slow disk", rule, at_least_seconds=0.1)
        injection = Injection([*READ_PAGES, *WRITE_PAGES], "delay_enter=500000", when="1+")
        with attached(group.members()["rank1"], injection, context.directory / "delays.trace") as trace:
            _late_answers(context, drill, "slow calls", "", at_least_seconds=0.9)
            fired = trace.fired()
        context.check(bool(fired), "no call was delayed")
        if fired:
            context.fault_fired("slow calls", f"{len(fired)} calls delayed: {fired[0]}")
        drill.check_at_rest("slow disk")
        group.stop()
        drill.recover("after a slow disk", at_least=len(drill.prompts))


def _late_answers(context: Context, drill: Drill, what: str, evidence: str, *, at_least_seconds: float) -> None:
    group = drill.group
    members = group.members()
    drop_device_copies(group.url)
    with drill.traffic(restoring=False) as computing:
        start = time.monotonic()
        answers = drill.answer_all(what, at_least=len(drill.prompts))
        seconds = time.monotonic() - start
    drill.check_traffic(computing, what, fired_at=None)
    slowest = max(answer.ttft_seconds for answer in answers.values())
    if evidence:
        context.require(slowest >= at_least_seconds, f"{what}: the slowest restore took {slowest:.3f} s only")
        context.fault_fired(what, f"{evidence}; slowest restore {slowest:.2f} s, all {seconds:.1f} s")
    context.check(all(map(is_alive, members.values())), f"{what}: a process ended")
    context.check(computing.num_answered() > 0, f"{what}: nothing else was answered")


SCENARIOS = (
    Scenario(
        name="disk-full",
        proves="On a full disk stores are dropped on every rank and requests served; stores go on once there is room.",
        rows=("A5", "A8"),
        needs=("root", "loop", "mount"),
        seconds=9,
        long_seconds=90,
        run=run_full,
    ),
    Scenario(
        name="disk-smaller-than-its-limit",
        proves="A disk that its own records fill is served from, and costs no request.",
        rows=("A5", "A8"),
        needs=("root", "mount"),
        seconds=10,
        run=run_small,
    ),
    Scenario(
        name="disk-that-fails-every-read",
        proves="A disk whose reads fail is not read any more after three: it costs three records and no request.",
        rows=("A13",),
        needs=("root", "loop", "mount", "strace"),
        seconds=10,
        run=run_failing_reads,
    ),
    Scenario(
        name="disk-unreadable",
        proves="A record that cannot be read any more is a miss, and is removed on every rank.",
        rows=("A13",),
        needs=("root", "loop", "mount"),
        seconds=7,
        run=run_unreadable,
    ),
    Scenario(
        name="disk-read-only",
        proves="When a file system turns read-only, restores go on, stores fail cleanly, and a repair brings all back.",
        rows=("A5",),
        needs=("root", "loop", "mount"),
        seconds=8,
        run=run_read_only,
    ),
    Scenario(
        name="disk-slow",
        proves="A slow disk makes restores late; nothing is poisoned and other requests are served meanwhile.",
        rows=("A11", "A12"),
        needs=("root", "loop", "mount", "strace"),
        seconds=10,
        alone=True,
        run=run_slow,
    ),
)
