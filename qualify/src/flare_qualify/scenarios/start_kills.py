"""A process killed at each step of a start: nobody serves half a group, and the next start is whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import exit_codes
from flare_qualify.checkers.records import ReportedRecords, check_digests, check_parity
from flare_qualify.group import Group
from flare_qualify.process_facts import wait_gone
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import arm, disarm, wait_fired
from flare_qualify.workloads.kills import Kill
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies

__all__ = ["SCENARIOS"]

RENDEZVOUS = (
    ("worker", "rendezvous.listen"),
    ("peer", "rendezvous.hello"),
    ("worker", "rendezvous.welcome"),
    ("peer", "rendezvous.proof"),
    ("worker", "rendezvous.accept"),
    ("worker", "rendezvous.met"),
    ("peer", "rendezvous.met"),
    ("worker", "record-link.offer"),
    ("peer", "record-link.connect"),
    ("worker", "record-link.accept"),
    ("api", "rendezvous.proof"),
    ("api", "record-link.connect"),
)
JOIN = (
    ("worker", "join.scan"),
    ("peer", "join.scan"),
    ("peer", "join.hello"),
    ("worker", "join.propose"),
    ("peer", "join.confirm"),
    ("worker", "join.apply"),
    ("peer", "join.apply"),
    ("worker", "join.applied"),
    ("peer", "join.applied"),
    ("worker", "join.joined"),
    ("peer", "join.joined"),
    ("api", "join.scan"),
    ("api", "join.confirm"),
    ("api", "join.applied"),
)
_NUM_PROMPTS = 2
_MEETING_SECONDS = 6.0
"""``--rendezvous-timeout``: those that wait for a killed rank give up after this."""
_GONE_SECONDS = _MEETING_SECONDS + 7.0


@dataclass(slots=True)
class _Filled:
    """A record directory with reported prompts, and what rank one alone may hold beside them."""

    references: References
    reported: ReportedRecords
    surplus: dict[str, bytes] = field(default_factory=dict)

    def disagree(self, group: Group) -> None:
        """Leave the next join something to remove: whole records that rank zero lacks."""
        for name, data in self.surplus.items():
            path = group.record_directory(1) / name
            path.write_bytes(data)
            path.chmod(0o600)


def _fill(context: Context, group: Group) -> _Filled:
    filled = _Filled(References(context), ReportedRecords(context))
    group.start()
    for number in range(_NUM_PROMPTS):
        filled.references.learn(str(number), ask(group.url, prompt_of(number)))
    filled.reported.note(group)
    ask(group.url, prompt_of(50))
    group.wait_stored()
    group.stop()
    for file in group.record_files(1):
        if file.name not in filled.reported.names:
            path = group.record_directory(1) / file.name
            filled.surplus[file.name] = path.read_bytes()
            path.unlink()
            (group.record_directory(0) / file.name).unlink()
    return filled


def run_start_kills(context: Context, *, places: tuple[tuple[str, str], ...]) -> None:
    """Each place once, in one record directory; every second start after it is undisturbed and restores all."""
    group = context.group("oracle-rows", 2)
    filled, options = _fill(context, group), group.options
    for case in context.cases(context.some([f"{role} at {step}" for role, step in places], every=2)):
        role, _, step = case.split()
        kill = Kill(role, step)
        if step.startswith("join."):
            filled.disagree(group)
        kill.arm(group)
        if not step.startswith("join."):  # where nobody has met yet, those that are left wait for the one that is gone
            group.options = (*options, "--rendezvous-timeout", f"{_MEETING_SECONDS:g}s")
        group.launch()
        disarm(group)
        group.options = options
        evidence = kill.await_kill(group, timeout=20.0)
        if not evidence:
            context.vacuous(f"{case}: not reached")
            group.kill_all()
            continue
        context.fault_fired(f"kill {case}", evidence)
        context.figure("kills_during_start", 1)
        _check_nobody_serves(context, group, case, victims=kill.victims)
        _check_next_start(context, group, case, filled)


def _check_nobody_serves(context: Context, group: Group, case: str, *, victims: tuple[int, ...]) -> None:
    pids = {f"rank{rank}": process.pid for rank, process in group.processes.items()}
    gone = wait_gone(pids, timeout=_GONE_SECONDS + 5.0)
    context.check(len(gone) == len(pids), f"{case}: {sorted(pids.keys() - gone.keys())} did not end")
    if gone:
        context.timed("a start that lost a rank ends", max(gone.values()), limit=_GONE_SECONDS)
    for rank, code in exit_codes(group).items():
        is_right = code in {70, 75} or rank in victims
        context.check(is_right, f"{case}: rank {rank} exited with {code}, not 70 or 75")
        context.check("Traceback" not in group.log(rank), f"{case}: rank {rank} printed a traceback")
    group.kill_all()


def _check_next_start(context: Context, group: Group, case: str, filled: _Filled) -> None:
    group.start()
    check_parity(context, group, case)
    filled.reported.check(group, case)
    drop_device_copies(group.url)
    for number in range(_NUM_PROMPTS):
        prompt = prompt_of(number)
        answer = ask(group.url, prompt)
        filled.references.compare(str(number), answer)
        is_whole = context.restored(answer, at_least=len(prompt) - 1, tier="disk")
        context.check(is_whole, f"{case}: prompt {number} restored {answer.cached_tokens}")
    group.stop()


def run_end_kills(context: Context) -> None:
    """A rank killed while it writes its hint at an end in order: the hint is a hint, nothing is lost."""
    group = context.group("oracle", 2)
    filled = _fill(context, group)
    for case in context.cases([f"rank {rank} at join.save-hint" for rank in (0, 1)]):
        rank = int(case.split()[1])
        arm(group, rank, "join.save-hint:kill")
        group.start()
        disarm(group)
        group.stop()
        evidence = wait_fired(group, rank, "join.save-hint", timeout=1.0)
        if evidence:
            context.fault_fired(f"kill rank {rank} at join.save-hint", evidence)
        else:
            context.vacuous(f"{case}: not reached")
        _check_next_start(context, group, case, filled)
    check_digests(context, group, "at the end")


SCENARIOS = (
    Scenario(
        name="kill-during-rendezvous",
        proves="A rank killed at any step of the rendezvous or of opening its record link ends the start of all.",
        rows=("A6", "A7", "A9"),
        seconds=30,
        long_seconds=80,
        run=partial(run_start_kills, places=RENDEZVOUS),
    ),
    Scenario(
        name="kill-during-join",
        proves="A rank killed at any step of the join ends the start of all; the next one agrees, and nothing is lost.",
        rows=("A6", "A9"),
        seconds=30,
        long_seconds=80,
        run=partial(run_start_kills, places=JOIN),
    ),
    Scenario(
        name="kill-while-ending",
        proves="A rank killed while it writes its start hint loses no record.",
        rows=("A6",),
        seconds=10,
        run=run_end_kills,
    ),
)
