"""A process killed while a record is cut or removed: afterwards it is the same on all ranks, whatever that is."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import check_all_gone
from flare_qualify.checkers.records import check_digests, check_parity, records_of
from flare_qualify.group import Group
from flare_qualify.models import cache_off_text
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import disarm
from flare_qualify.workloads.kills import ROLES, Kill
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ANSWER_TOKENS, ask, attempt, begin, drop_device_copies

__all__ = ["SCENARIOS"]

UNLINK_STEPS = ("unlink.begin", "unlink.remove", "unlink.ack")
TRUNCATE_STEPS = ("truncate.begin", "truncate.cut", "truncate.ack")
_NUM_PROMPTS = 4
_ROOMY = "1G"
_GONE_SECONDS = {"peer": 6.0, "worker": 6.0, "api": 10.0}


@dataclass(frozen=True, slots=True)
class Removals:
    """How a kind of removal is brought about, and at which steps a rank is killed in it."""

    op: str
    model: str
    steps: tuple[str, ...]
    options: tuple[str, ...] = ()

    def places(self) -> dict[str, tuple[str, str]]:
        """(role, step) by case name; the last step is rank zero's own."""
        pairs = [(role, step) for step in self.steps for role in ROLES] + [("worker", f"{self.op}.report")]
        return {f"{role} at {step}": (role, step) for role, step in pairs}


def _size_of_one(context: Context, model: str, world_size: int) -> int:
    """Bytes on the largest rank that one prompt and its answer take."""
    group = context.group(model, world_size)
    group.start()
    ask(group.url, prompt_of(0))
    group.wait_stored()
    group.stop()
    return max(sum(file.num_bytes for file in group.record_files(rank)) for rank in range(world_size))


def run_removal_kills(context: Context, *, removals: Removals, world_size: int) -> None:
    """Each role at each step four times; in the standard form, every second of these places once."""
    places = removals.places()
    names = [f"{name}, {repeat}" for repeat in range(4 if context.is_long else 1) for name in places]
    names = context.some(names, every=2)
    options = removals.options
    if removals.op == "unlink":
        limit = int(2.5 * _size_of_one(context, removals.model, world_size))
        options = ("--prefix-cache-disk-limit", str(limit))
    for case in context.cases(names):
        role, step = places[case.rpartition(",")[0]]
        group = context.group(removals.model, world_size, *options)
        _kill_once(context, group, removals, Kill(role, step, hit=context.rng.randint(1, 2)), case)
        group.kill_all()


def _kill_once(context: Context, group: Group, removals: Removals, kill: Kill, name: str) -> None:
    references = References(context)
    for number in range(_NUM_PROMPTS + 1):
        text = cache_off_text(removals.model, prompt_of(number), max_tokens=ANSWER_TOKENS, world_size=group.world_size)
        references.expect(str(number), text)
    kill.arm(group)
    group.start()
    disarm(group)
    members = group.members()
    evidence, asked = "", 0
    with ThreadPoolExecutor(1) as pool:
        # A removal follows a store: the first prompts are answered undisturbed, a later one finds its group dying.
        for number in range(_NUM_PROMPTS):
            asked = number + 1
            request = begin(pool, group.url, prompt_of(number))
            last = number == _NUM_PROMPTS - 1
            evidence = kill.await_kill(group, timeout=5.0 if last else 0.4)
            references.compare_attempt(str(number), request.result())
            if evidence:
                break
    killed_at = time.monotonic()
    if not evidence:
        context.vacuous(f"{name}: {kill.step} was not reached")
        group.kill_all()
        return
    context.fault_fired(f"kill {kill.role} at {kill.step}", evidence)
    context.figure("kills_during_removal", 1)
    check_all_gone(
        context,
        group,
        members,
        what=f"{kill.role} killed during {removals.op}",
        limit=_GONE_SECONDS[kill.role],
        since=killed_at,
        spared=kill.spared,
        victims=kill.victims,
    )
    group.kill_all()
    # Under the small limit what is answered now would evict what is to be restored: a kill leaves no order of use.
    group.options = (*group.options, "--prefix-cache-disk-limit", _ROOMY)
    group.start()
    check_parity(context, group, name)
    check_digests(context, group, name)
    _restore_what_is_left(context, group, references, asked=asked, name=name)
    group.stop()


def _restore_what_is_left(context: Context, group: Group, references: References, *, asked: int, name: str) -> None:
    """Every prompt that was asked is answered right, and what the records on disk hold is restored."""
    num_records = len(records_of(group, 0))
    restored = 0
    for number in range(asked):
        drop_device_copies(group.url)
        result = attempt(group.url, prompt_of(number))
        references.compare_attempt(str(number), result)
        if result.answer is not None:
            restored += context.restored(result.answer, tier="disk")
        context.check(result.answer is not None, f"{name}: prompt {number} was not answered: {result.message}")
    context.check(bool(restored) or not num_records, f"{name}: {num_records} records, and nothing was restored")
    group.wait_stored()
    check_parity(context, group, f"{name}, served again")


SCENARIOS = (
    Scenario(
        name="kill-during-eviction",
        proves="A rank killed at any step of an eviction leaves the record on all ranks or on none.",
        rows=("A17", "A6"),
        seconds=20,
        long_seconds=100,
        run=partial(run_removal_kills, removals=Removals("unlink", "oracle", UNLINK_STEPS), world_size=2),
    ),
    Scenario(
        name="kill-during-compaction",
        proves="A rank killed at any step of cutting a record's tail or row leaves it cut on all ranks or on none.",
        rows=("A6", "A16"),
        seconds=20,
        long_seconds=100,
        run=partial(run_removal_kills, removals=Removals("truncate", "oracle", TRUNCATE_STEPS), world_size=2),
    ),
)
