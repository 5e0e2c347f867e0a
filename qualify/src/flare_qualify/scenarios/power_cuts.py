"""The power goes while records are stored: ext4 is shut down under a group, mounted again, and read back.

A ``power`` directory must have every reported record; a ``process`` one may have lost some, and never holds a wrong
byte. Directories are on one loop device; a group of ranks in one small process stores as fast as it can.
"""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flare_cache.disk_shelf import Durability
from flare_core.errors import FlareError
from flare_qualify.fault_drill import note_restores, open_drill
from flare_qualify.faults.disks import LoopDisk, PowerCut, loop_disk
from flare_qualify.faults.record_trial import Found, read_back, started_child
from flare_qualify.faults.system_calls import Injection, Trace, traced_command
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.verdict import Damage
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import begin

__all__ = ["SCENARIOS"]

_NUM_RECORDS = 400
"""More than a child stores before its power goes."""
_DISK_BYTES = 48 << 20


def run_cuts(context: Context, *, durability: Durability, lies: bool = False) -> None:
    """Cut after cut on one device. ``lies``: it reports every sync as done and does none."""
    rounds = 250 if context.is_long else 3 if lies else 9
    modes = list(PowerCut)
    with loop_disk(context.directory / "disk", num_bytes=_DISK_BYTES) as disk:
        for case in context.cases(f"{modes[number % len(modes)].name}, {number}" for number in range(rounds)):
            _cut(context, disk, case, durability, lies=lies)


def _cut(context: Context, disk: LoopDisk, case: str, durability: Durability, *, lies: bool) -> None:
    how = PowerCut[case.partition(",")[0]]
    trace = Trace(context.directory / "lies.trace")
    injection = Injection(["fsync"], "retval=0", "1+")
    root = disk.path / "ranks"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(mode=0o700)
    num_before = context.rng.randrange(1, 12)
    with started_child(
        root,
        num_records=_NUM_RECORDS,
        durability=durability,
        prefix=traced_command(trace.path, injection.options()) if lies else (),
        environment=context.command_environment(),
    ) as child:
        if lies:
            # The set file has been there for long when the power goes: only records are not what was said of them.
            context.require(child.read_until("joined"), f"{case}: the child ended: {child.lines[-3:]}")
            disk.sync()
        for _ in range(num_before):
            context.require(child.read_until("stored"), f"{case}: the child ended: {child.lines[-3:]}")
        evidence = disk.cut_power(how)
        child.kill()
    if lies:
        context.require(bool(fired := trace.fired()), f"{case}: no sync was lied about")
        evidence += f"; {len(fired)} syncs were not done"
    context.fault_fired(f"power cut, {how.name}", evidence, durability=str(durability))
    disk.remount()
    numbers = range(max(child.stored) + 2)
    try:
        found = read_back(root, numbers)
    except (FlareError, OSError) as error:
        context.check(False, f"{case}: the group does not start afterwards: {error}")
        return
    must_be_whole = (durability is Durability.POWER and not lies) or how is PowerCut.SYNCED
    _judge(context, case, set(child.stored), found, must_be_whole=must_be_whole)


def _judge(context: Context, case: str, reported: set[int], found: Found, *, must_be_whole: bool) -> None:
    context.damage(Damage.WRONG_TOKENS, len(found.wrong), f"{case}: {found.wrong[:3]}")
    context.damage(Damage.PARTIALLY_VISIBLE, len(found.partial), f"{case}: {found.partial[:3]}")
    lost = sorted(reported - set(found.restored))
    if must_be_whole:
        context.damage(Damage.LOST_REPORTED, len(lost), f"{case}: {lost[:5]} of {len(reported)} reported")
    else:
        context.figure("records_lost_to_power_cuts_as_allowed", len(lost))
    context.figure("power_cuts", 1)
    note_restores(context, found)
    context.history.append("checked")


def run_group_cut(context: Context) -> None:
    """Both hosts of a serving group lose power at once, in the middle of stores."""
    group = context.group("oracle", 2, "--prefix-cache-durability", "power", "--prefix-cache-disk-limit", "30M")
    with (
        loop_disk(group.record_directory(0), num_bytes=_DISK_BYTES) as one,
        loop_disk(group.record_directory(1), num_bytes=_DISK_BYTES) as other,
        open_drill(context, group) as drill,
    ):
        for case in context.cases(f"cut {number}" for number in range(12 if context.is_long else 2)):
            with ThreadPoolExecutor(4) as pool:
                asked = [begin(pool, group.url, prompt_of(context.rng.randrange(1000, 1_000_000))) for _ in range(4)]
                asked[0].result()
                cuts = [disk.cut_power(PowerCut.NOTHING_WRITTEN) for disk in (one, other)]
                group.kill_all()
            context.fault_fired("power cut of both hosts", "; ".join(cuts))
            one.remount()
            other.remount()
            drill.recover(case, at_least=len(drill.prompts))
            drill.reported.note(group)
        group.stop()


SCENARIOS = (
    Scenario(
        name="power-cut-durable",
        proves="With --prefix-cache-durability power, no reported record is lost to a power cut.",
        rows=("A4", "A6"),
        needs=("root", "loop", "mount"),
        seconds=9,
        long_seconds=600,
        run=partial(run_cuts, durability=Durability.POWER),
    ),
    Scenario(
        name="power-cut-process",
        proves="Without, a power cut may lose records, and never leaves a wrong byte or a record on some ranks only.",
        rows=("A4", "A6"),
        needs=("root", "loop", "mount"),
        seconds=9,
        long_seconds=600,
        restores_due=False,
        run=partial(run_cuts, durability=Durability.PROCESS),
    ),
    Scenario(
        name="power-cut-of-a-lying-disk",
        proves="A disk that lies about syncs may lose records in a power cut, and never leaves a wrong byte.",
        rows=("A4", "A6"),
        needs=("root", "loop", "mount", "strace"),
        seconds=5,
        long_seconds=600,
        restores_due=False,
        run=partial(run_cuts, durability=Durability.POWER, lies=True),
    ),
    Scenario(
        name="power-cut-of-a-group",
        proves="A serving group whose hosts lose power during stores restores what it had reported.",
        rows=("A4", "A6"),
        needs=("root", "loop", "mount"),
        seconds=9,
        long_seconds=120,
        run=run_group_cut,
    ),
)
