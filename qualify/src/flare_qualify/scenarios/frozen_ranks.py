"""A rank that neither dies nor answers: everyone else is gone in seconds, and it never gets back in."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import EXIT_POISONED, check_all_gone
from flare_qualify.checkers.records import ReportedRecords, check_parity
from flare_qualify.faults.processes import stopped
from flare_qualify.group import Group
from flare_qualify.process_facts import process_state
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.verdict import Damage
from flare_qualify.workloads.failpoints import arm, disarm, wait_fired
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, begin, drop_device_copies

__all__ = ["SCENARIOS"]

GONE_SECONDS = 7.0
_STREAM_TOKENS = 400
_STREAM = prompt_of(70, 30)
_REPORTED = prompt_of(71)


def run_frozen(context: Context, *, model: str, world_size: int, role: str, point: str) -> None:
    """Stop ``role`` at a step in the middle of a stream (``point``), or from outside where that is empty."""
    group = context.group(model, world_size)
    references, reported = References(context), ReportedRecords(context)
    group.start()
    references.learn("stream", ask(group.url, _STREAM, max_tokens=_STREAM_TOKENS, cache_salt="first"))
    references.learn("reported", ask(group.url, _REPORTED))
    reported.note(group)
    group.stop()
    rank = 0 if role == "worker" else world_size - 1
    for case in context.cases([str(number) for number in range(5 if context.is_long else 1)]):
        if point:
            arm(group, rank, f"{point}:stop@{context.rng.randint(40, 200)}")
        group.start()
        disarm(group)
        frozen = _freeze(context, group, references, role=role, point=point, case=case)
        if frozen:
            _thaw_beside_a_new_run(context, group, frozen, rank=rank, case=case)
            _check_restored(context, group, references, reported, case)
        group.kill_all()


def _freeze(context: Context, group: Group, references: References, *, role: str, point: str, case: str) -> int:
    """Stop it, and hold everyone else to the limit; the stopped process, or 0 when nothing was stopped."""
    members = group.members()
    name = role if role == "worker" else f"rank{group.world_size - 1}"
    pid = members[name]
    rank = 0 if role == "worker" else group.world_size - 1
    with ThreadPoolExecutor(1) as pool:
        stream = begin(pool, group.url, _STREAM, max_tokens=_STREAM_TOKENS, cache_salt=f"case {case}", timeout=30)
        if point:
            evidence = wait_fired(group, rank, point, timeout=15.0)
        else:
            time.sleep(context.rng.uniform(0.05, 0.3))
            os.kill(pid, signal.SIGSTOP)
            evidence = f"SIGSTOP to {name}"
        stopped_at = time.monotonic()
        context.wait_until(lambda: process_state(pid) == "T" or not evidence, timeout=5, what="the process to stop")
        if not evidence:
            context.vacuous(f"{case}: {point} was not reached")
            group.kill_all()
            stream.result()
            return 0
        context.fault_fired(f"stop {role} {point or 'anywhere'}", f"{evidence}, state T")
        context.figure("stops", 1)
        what = f"{role} stopped"
        check_all_gone(
            context, group, members, what=what, limit=GONE_SECONDS, since=stopped_at, spared=(name,), victims=(rank,)
        )
        result = stream.result()
        context.check(result.answer is None, f"{case}: a stream was finished by a group with a stopped rank")
        references.compare_attempt("stream", result, what=Damage.PAGES_REUSED)
    for number, process in group.processes.items():
        if number != rank:
            context.check(process.wait(1) == EXIT_POISONED, f"{case}: rank {number} exited with {process.returncode}")
    return pid


def _thaw_beside_a_new_run(context: Context, group: Group, frozen: int, *, rank: int, case: str) -> None:
    """Start everyone anew at the same address, let the old process go on, and see that it only ends."""
    old = group.processes[rank]
    group.prepare(keep_ports=True)
    for number in range(group.world_size):
        group.launch_rank(number)
    time.sleep(0.3)
    with contextlib.suppress(ProcessLookupError):
        os.kill(frozen, signal.SIGCONT)
    try:
        group.wait_healthy(timeout=60.0)
        code = old.wait(10.0)
    except subprocess.TimeoutExpired:
        context.check(False, f"{case}: the thawed process went on beside the new run")
        os.killpg(old.pid, signal.SIGKILL)
        old.wait()
        return
    context.check(code == EXIT_POISONED, f"{case}: the thawed rank {rank} exited with {code}, not {EXIT_POISONED}")


def _check_restored(
    context: Context, group: Group, references: References, reported: ReportedRecords, case: str
) -> None:
    check_parity(context, group, case)
    reported.check(group, case)
    drop_device_copies(group.url)
    answer = ask(group.url, _REPORTED)
    references.compare("reported", answer)
    is_whole = context.restored(answer, at_least=len(_REPORTED) - 1, tier="disk")
    context.check(is_whole, f"{case}: restored {answer.cached_tokens}")
    context.check(set(group.stop().values()) == {0}, f"{case}: the new run did not end in order")


def run_paused_api(context: Context) -> None:
    """Stop the API process for a while: it holds nothing that anyone waits for, so everything goes on afterwards."""
    group = context.group("oracle", 2)
    references = References(context)
    group.start()
    references.learn("stream", ask(group.url, _STREAM, max_tokens=_STREAM_TOKENS, cache_salt="first"))
    members = group.members()
    for case in context.cases([str(number) for number in range(5 if context.is_long else 2)]):
        with ThreadPoolExecutor(1) as pool:
            stream = begin(pool, group.url, _STREAM, max_tokens=_STREAM_TOKENS, cache_salt=f"case {case}")
            time.sleep(context.rng.uniform(0.05, 0.3))
            with stopped(members["api"]) as evidence:
                context.fault_fired("stop api for 7 s", evidence)
                time.sleep(7.0)
            result = stream.result()
        if context.check(result.answer is not None, f"{case}: {result.message}"):
            references.compare_attempt("stream", result)
        context.check(group.members() == members, f"{case}: some process ended")
        group.wait_stored()
        drop_device_copies(group.url)
        answer = ask(group.url, _STREAM, max_tokens=_STREAM_TOKENS, cache_salt=f"case {case}")
        references.compare("stream", answer)
        context.restored(answer, tier="disk")
    context.check(set(group.stop().values()) == {0}, "the group did not end in order")


def _frozen(
    role: str, point: str = "", *, model: str = "oracle", world_size: int = 2, seconds: float = 16, **fields: object
) -> Scenario:
    where = point.replace(".", "-") or "anywhere"
    return Scenario(
        name=f"frozen-{role}-{where}-{model}",
        proves=f"With its {role} stopped, every other process of the group is gone within 7 s; it never gets back in.",
        rows=("A11", "A12", "A15"),
        seconds=seconds,
        long_seconds=5 * seconds,
        alone=True,
        run=partial(run_frozen, model=model, world_size=world_size, role=role, point=point),
        **fields,  # type: ignore[arg-type]
    )


SCENARIOS = (
    _frozen("peer", "step.launch", world_size=3, seconds=18),
    _frozen("peer", "step.result", model="tiny-llama", seconds=35, needs=("torch",)),
    _frozen("peer"),
    _frozen("worker", "step.launch"),
    Scenario(
        name="paused-api-process",
        proves="An API process that stands still for a while loses no stream, and nobody else.",
        rows=("D1",),
        seconds=22,
        long_seconds=50,
        run=run_paused_api,
    ),
)
