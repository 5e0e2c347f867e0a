"""A process killed between two tokens: streams end unfinished, with right tokens so far, and everyone leaves."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import check_all_gone
from flare_qualify.checkers.records import ReportedRecords, check_parity
from flare_qualify.group import Group
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import disarm
from flare_qualify.workloads.kills import Kill
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, begin, drop_device_copies

__all__ = ["SCENARIOS"]

PLACES = (
    ("worker", "step.send"),
    ("worker", "step.launch"),
    ("peer", "step.launch"),
    ("api", "step.launch"),
    ("worker", "step.result"),
    ("peer", "step.result"),
)
_STREAM_TOKENS = 300
_STREAMS = {f"stream {number}": prompt_of(80 + number, 20 + number) for number in range(3)}
_REPORTED = prompt_of(90)
_GONE_SECONDS = {"peer": 6.0, "worker": 6.0, "api": 10.0}


def run_step_kills(context: Context, *, world_size: int) -> None:
    """Each place with three streams at work; the next start restores what was reported."""
    group = context.group("oracle-rows", world_size)
    references, reported = References(context), ReportedRecords(context)
    group.start()
    for name, prompt in _STREAMS.items():
        references.learn(name, ask(group.url, prompt, max_tokens=_STREAM_TOKENS, cache_salt="first"))
    references.learn("reported", ask(group.url, _REPORTED))
    reported.note(group)
    group.stop()
    repeats = 10 if context.is_long else 1
    for case in context.cases(f"{role} {step} {repeat}" for repeat in range(repeats) for role, step in PLACES):
        role, step, _ = case.split()
        # Past the steps of the restore that looks after the last kill.
        kill = Kill(role, step, hit=context.rng.randint(40, 200), peer=context.rng.randrange(1, world_size))
        kill.arm(group)
        group.start()
        disarm(group)
        _check_restored(context, group, references, reported, case)
        _kill_once(context, group, references, kill, case)
        group.kill_all()
    group.start()
    _check_restored(context, group, references, reported, "after the last kill")
    group.stop()


def _kill_once(context: Context, group: Group, references: References, kill: Kill, case: str) -> None:
    members = group.members()
    with ThreadPoolExecutor(len(_STREAMS)) as pool:
        streams = {
            name: begin(pool, group.url, prompt, max_tokens=_STREAM_TOKENS, cache_salt=case)
            for name, prompt in _STREAMS.items()
        }
        evidence = kill.await_kill(group, timeout=20.0)
        killed_at = time.monotonic()
        if evidence:
            context.fault_fired(f"kill {kill.role} at {kill.step}", evidence)
            context.figure("kills_during_steps", 1)
        else:
            context.vacuous(f"{case}: not reached {kill.hit} times")
            group.kill_all()
        for name, stream in streams.items():
            result = stream.result()
            references.compare_attempt(name, result)
            context.check(result.is_broken or result.is_refused, f"{case}: {name} ended with {result.status}")
    if evidence:
        check_all_gone(
            context,
            group,
            members,
            what=f"{kill.role} killed between tokens",
            limit=_GONE_SECONDS[kill.role],
            since=killed_at,
            spared=kill.spared,
            victims=kill.victims,
        )


def _check_restored(
    context: Context, group: Group, references: References, reported: ReportedRecords, when: str
) -> None:
    check_parity(context, group, when)
    reported.check(group, when)
    drop_device_copies(group.url)
    answer = ask(group.url, _REPORTED)
    references.compare("reported", answer)
    is_whole = context.restored(answer, at_least=len(_REPORTED) - 1, tier="disk")
    context.check(is_whole, f"{when}: restored {answer.cached_tokens}")


SCENARIOS = (
    Scenario(
        name="kill-between-tokens",
        proves="A process killed in the middle of streams ends them unfinished, with right tokens so far; all leave.",
        rows=("A11", "A15"),
        seconds=22,
        long_seconds=200,
        run=partial(run_step_kills, world_size=3),
    ),
)
