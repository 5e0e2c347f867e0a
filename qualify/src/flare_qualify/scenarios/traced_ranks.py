"""A serving rank whose N-th system call on its records kills it, or fails, in the middle of a store or a restore.

``strace`` is attached once the group serves. It counts the calls of each disk thread for itself, and a small record is
one thread's work, so that "the second write" is the header of some store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from flare_qualify.fault_drill import Drill, open_drill
from flare_qualify.faults.system_calls import READ_PAGES, WRITE_PAGES, Injection, attached
from flare_qualify.process_facts import is_alive
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIOS"]

_KILL = "signal=SIGKILL"
_STEPS = {
    "pages": (WRITE_PAGES, "1"),
    "header": (WRITE_PAGES, "2"),
    "link": (("linkat",), "1"),
    "unlink-temporary": (("unlinkat",), "1"),
}
_FIRE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class _Case:
    """Whose call, which, and what becomes of it."""

    role: str
    step: str
    action: str

    @property
    def injection(self) -> Injection:
        calls, when = (READ_PAGES, "1") if self.step == "read" else _STEPS[self.step]
        return Injection(calls, self.action, when)


def _kill_cases() -> dict[str, _Case]:
    return {
        f"{role} killed at {step}": _Case(role, step, _KILL)
        for step in (*_STEPS, "read")
        for role in ("rank1", "worker")
    }


def _error_cases() -> dict[str, _Case]:
    return {
        f"{role}: {code} at {step}": _Case(role, step, f"error={code}")
        for step in _STEPS
        for role in ("rank1", "worker")
        for code in ("ENOSPC", "EIO")
    }


def run_kills(context: Context) -> None:
    """Killed at a call: the group is gone, and comes back with all that it had reported."""
    cases = _kill_cases()
    chosen = list(cases) if context.is_long else list(cases)[1::3]
    rounds = 4 if context.is_long else 1
    group = context.group("oracle", 2)
    with open_drill(context, group) as drill:
        for case in context.cases(f"{name}, {number}" for number in range(rounds) for name in chosen):
            _kill(context, drill, case, cases[case.rpartition(",")[0]])
        group.stop()


def _kill(context: Context, drill: Drill, name: str, case: _Case) -> None:
    group = drill.group
    members = group.members()
    is_read = case.step == "read"
    with (
        attached(members[case.role], case.injection, context.directory / "kill.trace") as trace,
        drill.traffic(restoring=is_read, new=not is_read) as traffic,
    ):
        deadline = time.monotonic() + _FIRE_SECONDS
        while not (fired := trace.fired()) and time.monotonic() < deadline:
            time.sleep(0.01)
        if not fired:
            context.vacuous(f"{name}: nothing fired")
            return
        fired_at = time.monotonic()
        context.fault_fired(name, "; ".join(fired[-2:]))
        victims = (1,) if case.role == "rank1" else ()
        drill.expect_end(name, members, [traffic], fired_at=fired_at, victims=victims)
    drill.recover(name, at_least=len(drill.prompts))
    drill.reported.note(group)


def run_errors(context: Context) -> None:
    """Failed at a call: the store is taken back on every rank; no request notices, nobody ends."""
    cases = _error_cases()
    chosen = list(cases) if context.is_long else list(cases)[::4]
    group, number = context.group("oracle", 2), 500
    with open_drill(context, group) as drill:
        for name in context.cases(chosen):
            case, members = cases[name], group.members()
            with attached(members[case.role], case.injection, context.directory / "error.trace") as trace:
                drill.ask_new(number, number + 1)
                fired = trace.fired()
            if not fired:
                context.vacuous(f"{name}: nothing fired")
                continue
            context.fault_fired(name, f"{fired[0]} ({len(fired)} calls)")
            context.check(all(map(is_alive, members.values())), f"{name}: a process ended")
            drill.answer_all(name, at_least=len(drill.prompts))
            drill.check_at_rest(name)
            drill.reported.check(group, name)
            number = drill.await_store(name, number + 2)
        group.stop()
        drill.recover("after failed calls", at_least=len(drill.prompts))
        group.stop()


SCENARIOS = (
    Scenario(
        name="serving-rank-killed-at-a-call",
        proves="A serving rank killed at a system call of a store or restore ends the group; nothing reported is lost.",
        rows=("A4", "A5", "A15"),
        needs=("strace",),
        seconds=13,
        long_seconds=300,
        run=run_kills,
    ),
    Scenario(
        name="serving-rank-with-failing-calls",
        proves="A system call that fails in a store takes that store back on every rank, and costs no request.",
        rows=("A5",),
        needs=("strace",),
        seconds=11,
        long_seconds=60,
        run=run_errors,
    ),
)
