"""A store that one rank wrote and another could not: visible on no rank afterwards, in both directions (A5)."""

from __future__ import annotations

from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.pages import check_pages_at_rest, snapshot
from flare_qualify.checkers.records import ReportedRecords, check_parity, records_of
from flare_qualify.group import Group
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import arm, disarm, fired
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies

__all__ = ["SCENARIOS"]

STEPS = ("store.create", "store.write", "store.header", "store.link")
ERRORS = ("ENOSPC", "EIO")


def run_partial_stores(context: Context, *, world_size: int) -> None:
    """Every step and error on each rank; in the standard form, some of them."""
    names = [f"rank {rank} {step} {error}" for step in STEPS for error in ERRORS for rank in range(world_size)]
    for number, case in enumerate(context.cases(context.some(names, every=3 if world_size == 2 else 5))):
        _, rank, step, error = case.split()
        group = context.group("oracle-rows", world_size)
        _fail_once(context, group, case, rank=int(rank), order=f"{step}:error={error}@3", number=number)
        group.kill_all()


def _fail_once(context: Context, group: Group, case: str, *, rank: int, order: str, number: int) -> None:
    """One prompt is stored well; the first store of the next one fails on ``rank`` alone."""
    references, reported = References(context), ReportedRecords(context)
    arm(group, rank, order)
    group.start()
    first, second = prompt_of(2 * number), prompt_of(2 * number + 1)
    references.learn("first", ask(group.url, first))
    group.wait_stored()
    reported.note(group)
    step = order.partition(":")[0]
    num_hits = int(order.rpartition("@")[2])
    names_before = set(records_of(group, 0))
    references.learn("second", ask(group.url, second))
    group.wait_stored()
    evidence = fired(group, rank, step)
    if not evidence:
        context.vacuous(f"{case}: {step} was not reached {num_hits} times")
        return
    context.fault_fired(f"error at {step} on rank {rank} alone", evidence)
    context.figure("partial_stores", 1)
    check_parity(context, group, case)
    check_pages_at_rest(context, group, case)
    jobs = snapshot(group)["cache"]["jobs"]
    failures = {job["rank"]: job["failures"] for job in jobs if job["op"] == "store" and job["failures"]}
    context.check(rank in failures, f"{case}: no failed store is counted for rank {rank}: {failures}")
    drop_device_copies(group.url)
    references.compare("second", ask(group.url, second))
    references.compare("first", restored := ask(group.url, first))
    context.check(context.restored(restored, at_least=len(first) - 1), f"{case}: {restored.cached_tokens}")
    disarm(group)
    group.stop()
    group.start()
    check_parity(context, group, f"{case}, restarted")
    reported.check(group, f"{case}, restarted")
    references.compare("second", ask(group.url, second))
    references.compare("first", restored := ask(group.url, first))
    context.check(context.restored(restored, at_least=len(first) - 1), f"{case}, restarted: {restored.cached_tokens}")
    group.wait_stored()
    context.check(set(records_of(group, 0)) > names_before, f"{case}: the second prompt was not stored in the end")
    group.stop()


def run_failed_cleanup(context: Context) -> None:
    """One rank cannot write, the other cannot remove what it wrote: used by nobody, and gone at the next start."""
    for case in context.cases(["rank 0 writes", "rank 1 writes"]):
        writer = int(case.split()[1])
        group = context.group("oracle", 2)
        references = References(context)
        arm(group, 1 - writer, "store.link:error=EIO@1+")
        arm(group, writer, "unlink.remove:error=EIO@1+")
        group.start()
        prompt = prompt_of(5)
        references.learn("prompt", ask(group.url, prompt))
        group.wait_stored()
        for rank, step in ((1 - writer, "store.link"), (writer, "unlink.remove")):
            evidence = fired(group, rank, step)
            if evidence:
                context.fault_fired(f"error at {step} on rank {rank}", evidence)
            else:
                context.vacuous(f"{case}: {step} was not reached on rank {rank}")
        left = group.record_files(writer)
        context.check(bool(left), f"{case}: the writer's file was removed after all")
        context.check(not group.record_files(1 - writer), f"{case}: the other rank has a file")
        drop_device_copies(group.url)
        again = ask(group.url, prompt)
        references.compare("prompt", again)
        context.check(again.total_cached == 0, f"{case}: {again.cached_tokens} from a record that one rank lacks")
        group.stop()
        disarm(group)
        group.start()
        check_parity(context, group, f"{case}, restarted")
        references.compare("prompt", ask(group.url, prompt))
        group.wait_stored()
        drop_device_copies(group.url)
        references.compare("prompt", answer := ask(group.url, prompt))
        context.check(
            context.restored(answer, at_least=len(prompt) - 1), f"{case}, stored anew: {answer.cached_tokens}"
        )
        group.stop()


SCENARIOS = (
    Scenario(
        name="partial-store-tp2",
        proves="A store that fails on one rank, at either rank and at any step, is visible on none.",
        rows=("A5", "A4"),
        seconds=18,
        long_seconds=60,
        run=partial(run_partial_stores, world_size=2),
    ),
    Scenario(
        name="partial-store-tp3",
        proves="The same where two ranks wrote and one failed.",
        rows=("A5", "A4", "A18"),
        seconds=18,
        long_seconds=90,
        run=partial(run_partial_stores, world_size=3),
    ),
    Scenario(
        name="failed-cleanup",
        proves="What a rank could not remove of a failed store is reported, used by no lookup, and gone after a start.",
        rows=("A5",),
        seconds=12,
        run=run_failed_cleanup,
    ),
)
