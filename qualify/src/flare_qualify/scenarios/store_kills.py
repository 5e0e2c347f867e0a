"""A process killed at each step of a store: what was reported is still there, the rest is on all ranks or on none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import check_all_gone
from flare_qualify.checkers.records import ReportedRecords, check_digests, check_parity
from flare_qualify.group import Group, GroupError
from flare_qualify.models import ORACLES, cache_off_text
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import disarm
from flare_qualify.workloads.kills import Kill
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ANSWER_TOKENS, ask, attempt, begin, drop_device_copies

__all__ = ["SCENARIOS"]

STEPS = (
    "store.begin",
    "store.create",
    "store.write",
    "store.header",
    "store.written",
    "store.fsync",
    "store.link",
    "store.unlink-temporary",
    "store.published",
    "store.fsync-directory",
    "store.ack",
)
"""Of every rank. The twelfth is ``store.report`` at rank zero, and any moment at all at a peer."""

Place = tuple[str, str]
"""Role and step."""

ANY_MOMENT = "any-moment"
PLACES: tuple[Place, ...] = tuple(
    [("worker", step) for step in (*STEPS, "store.report")] + [("peer", step) for step in (*STEPS, ANY_MOMENT)]
)
"""12 steps for each of two roles."""

API_PLACES: tuple[Place, ...] = tuple(("api", step) for step in STEPS)

_NUM_REPORTED = 3
_END_SECONDS = 6.0
_GONE_SECONDS = {"peer": 6.0, "worker": 6.0, "api": 10.0}
_START_SECONDS = 120.0


def _salt(number: int) -> str:
    """Of a prompt: without it a first token in common would let a real model's prefill begin elsewhere."""
    return f"prompt {number}"


@dataclass(slots=True)
class StoreKills:
    """One record directory, and one kill after the other in it."""

    context: Context
    group: Group
    model: str
    references: References = field(init=False)
    reported: ReportedRecords = field(init=False)
    prompts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """The checkers of this directory."""
        self.references = References(self.context)
        self.reported = ReportedRecords(self.context)

    def prepare(self, numbers: Sequence[int]) -> None:
        """Store the first prompts, undisturbed, and learn the right answers to those of ``numbers``."""
        self.group.start(timeout=_START_SECONDS)
        for number in range(_NUM_REPORTED):
            self.references.learn(str(number), ask(self.group.url, prompt_of(number), cache_salt=_salt(number)))
        for number in numbers:
            self._learn(number)
        self.reported.note(self.group)
        self.group.stop()

    def _learn(self, number: int) -> None:
        prompt = prompt_of(number)
        if self.model in ORACLES:
            world_size = self.group.world_size
            text = cache_off_text(self.model, prompt, max_tokens=ANSWER_TOKENS, world_size=world_size)
            self.references.expect(str(number), text)
        else:
            # With another salt, so that nothing of it is found when its store is disturbed.
            self.references.learn(str(number), ask(self.group.url, prompt, cache_salt=f"undisturbed {number}"))

    def kill_once(self, name: str, role: str, step: str, number: int) -> None:
        """Start, look at what the last kill has left, then kill ``role`` at ``step`` of a store of a new prompt."""
        context, group = self.context, self.group
        kill = Kill(role, step, hit=context.rng.randint(1, 2), peer=context.rng.randrange(1, group.world_size))
        if step != ANY_MOMENT:
            kill.arm(group)
        group.start(timeout=_START_SECONDS)
        disarm(group)
        self.check_survivors(name, num_restored=1)
        members = group.members()
        with ThreadPoolExecutor(1) as pool:
            request = begin(pool, group.url, prompt_of(number), cache_salt=_salt(number))
            if step == ANY_MOMENT:
                time.sleep(context.rng.uniform(0.0, 0.08))
                os.kill(members[f"rank{kill.peer}"], signal.SIGKILL)
                evidence = f"SIGKILL to rank {kill.peer}"
            else:
                evidence = self._await_kill(kill)
            killed_at = time.monotonic()
            if evidence:
                context.fault_fired(f"kill {role} at {step}", evidence)
                context.figure("kills_during_store", 1)
            else:
                context.vacuous(f"{name}: {step} was not reached")
                group.kill_all()
            ended = request.result()
        self.references.compare_attempt(str(number), ended)
        if evidence:
            context.timed("a request beside a killed store ends", time.monotonic() - killed_at, limit=_END_SECONDS)
            check_all_gone(
                context,
                group,
                members,
                what=f"{role} killed during a store",
                limit=_GONE_SECONDS[role],
                since=killed_at,
                spared=kill.spared,
                victims=kill.victims,
            )
        group.kill_all()
        self.prompts.append(number)

    def _await_kill(self, kill: Kill) -> str:
        """Until the failpoint was reached, by the prompt's store or by that of the answer."""
        evidence = kill.await_kill(self.group, timeout=5.0)
        if evidence:
            return evidence
        attempt(self.group.url, prompt_of(900), timeout=5.0)
        return kill.await_kill(self.group, timeout=2.0)

    def check_survivors(self, when: str, *, num_restored: int) -> None:
        """At rest after a start: parity, nothing reported lost, and some reported prompts restored bit for bit."""
        check_parity(self.context, self.group, when)
        self.reported.check(self.group, when)
        for number in self.context.rng.sample(range(_NUM_REPORTED), num_restored):
            drop_device_copies(self.group.url)
            prompt = prompt_of(number)
            answer = ask(self.group.url, prompt, cache_salt=_salt(number))
            self.references.compare(str(number), answer)
            is_whole = self.context.restored(answer, at_least=len(prompt) - 1, tier="disk")
            self.context.check(is_whole, f"{when}: prompt {number} was reported, and restored {answer.cached_tokens}")

    def finish(self, when: str) -> None:
        """After the last kill: reported prompts restored, interrupted ones answered right, every digest good."""
        disarm(self.group)
        self.group.start(timeout=_START_SECONDS)
        self.check_survivors(when, num_restored=_NUM_REPORTED)
        for number in self.prompts:
            answer = ask(self.group.url, prompt_of(number), cache_salt=_salt(number))
            self.references.compare(str(number), answer)
        self.group.wait_stored()
        check_parity(self.context, self.group, when)
        check_digests(self.context, self.group, when)
        self.group.stop()


def run_store_kills(context: Context, *, places: Sequence[Place], repeats: int, every: int) -> None:
    """The long form: each place ``repeats`` times in a directory of its own; a case is a place.

    The standard form: one place of ``every``, once each, all in one directory; a case is a kill.
    """
    if not context.is_long:
        run_in_one_directory(context, model="oracle", places=places[::every])
        return
    for case in context.cases(map(" ".join, places)):
        role, step = case.split()
        options = ("--prefix-cache-durability", "power") if "fsync" in step else ()
        group = context.group("oracle", 2, *options)
        kills = StoreKills(context, group, "oracle")
        try:
            kills.prepare(range(100, 100 + repeats))
            for repeat in range(repeats):
                kills.kill_once(f"{case}, {repeat}", role, step, 100 + repeat)
            kills.finish(f"after {case}")
        except GroupError as error:
            context.check(False, f"{case}: {error}")
        group.kill_all()


def run_in_one_directory(context: Context, *, model: str, places: Sequence[Place]) -> None:
    """One kill at each of ``places`` in turn; each start looks at what all kills before it have left."""
    group = context.group(model, 2, "--prefix-cache-durability", "power")
    kills = StoreKills(context, group, model)
    kills.prepare(range(100, 100 + len(places)))
    for case in context.cases(f"{number} {role} {step}" for number, (role, step) in enumerate(places)):
        number, role, step = case.split()
        kills.kill_once(case, role, step, 100 + int(number))
    kills.finish("after the last kill")


def run_real_model(context: Context, *, model: str) -> None:
    """20 kills over the places, or 3 in the standard form."""
    order = [PLACES[(7 * number) % len(PLACES)] for number in range(20 if context.is_long else 3)]
    run_in_one_directory(context, model=model, places=order)


SCENARIOS = (
    Scenario(
        name="kill-at-each-store-step",
        proves="A rank killed at any step of a store loses nothing reported, and leaves no record on some ranks only.",
        rows=("A4", "A5", "A6"),
        seconds=65,
        long_seconds=1500,
        run=partial(run_store_kills, places=PLACES, repeats=20, every=1),
    ),
    Scenario(
        name="kill-api-process-during-stores",
        proves="With its API process killed at any step of a store the group ends, and loses nothing reported.",
        rows=("A4", "A5", "A6"),
        seconds=15,
        long_seconds=200,
        run=partial(run_store_kills, places=API_PLACES, repeats=5, every=3),
    ),
    Scenario(
        name="kill-at-store-steps-tiny-llama",
        proves="The same with a real model whose ranks are bound by collectives.",
        rows=("A4", "A5", "A6"),
        needs=("torch",),
        seconds=50,
        long_seconds=240,
        run=partial(run_real_model, model="tiny-llama"),
    ),
    Scenario(
        name="kill-at-store-steps-default",
        proves="The same with the default model.",
        rows=("A4", "A5", "A6"),
        suites=("long",),
        needs=("torch", "default-model"),
        seconds=900,
        run=partial(run_real_model, model="default"),
    ),
)
