"""A process killed at random progress of a restore: 503, nobody left, and everything restored after a restart (A15)."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import check_all_gone
from flare_qualify.checkers.records import check_digests, check_parity
from flare_qualify.group import Group
from flare_qualify.models import ORACLES
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.verdict import Damage
from flare_qualify.workloads.chains import Chain
from flare_qualify.workloads.failpoints import disarm
from flare_qualify.workloads.kills import ROLES, Kill
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import Attempt, ask, begin, drop_device_copies

__all__ = ["SCENARIOS"]

STEPS = ("fetch.begin", "fetch.open", "fetch.header", "fetch.read", "fetch.verify", "fetch.deliver", "fetch.ack")
PLACES = (*((role, step) for step in STEPS for role in ROLES), ("worker", "fetch.report"))
FAIL_SECONDS = 6.0
GONE_SECONDS = {"peer": 6.0, "worker": 6.0, "api": 10.0}
_COMPANION_TOKENS = 300
_START_SECONDS = 120.0


@dataclass(slots=True)
class RestoreKills:
    """One record directory, and one kill after the other in it. Each start first restores what the last kill left."""

    context: Context
    group: Group
    chain: Chain
    num_hits: dict[tuple[int, str], int] = field(default_factory=dict)
    companions: References = field(init=False)

    def __post_init__(self) -> None:
        """Requests that decode beside the restore, whose pages nobody may touch."""
        self.companions = References(self.context)

    def prepare(self) -> None:
        """Fill the directory, and count what one restore comes to."""
        self.group.start(timeout=_START_SECONDS)
        self.chain.grow(self.group)
        answer = ask(self.group.url, prompt_of(7, 20), max_tokens=_COMPANION_TOKENS, cache_salt="first companion")
        self.companions.learn("companion", answer)
        self.group.wait_stored()
        self.group.stop()
        self.num_hits = self.chain.hits_of_a_restore(self.group, (*STEPS, "fetch.report"))

    def kill_once(self, name: str, role: str, step: str) -> None:
        """Start, restore whole, then kill ``role`` at a random hit of ``step`` during a second restore."""
        context, group = self.context, self.group
        peer = context.rng.randrange(1, group.world_size)
        total = self.num_hits[0 if role == "worker" else peer, step]
        kill = Kill(role, step, hit=total + context.rng.randint(1, total), peer=peer)
        kill.arm(group)
        group.start(timeout=_START_SECONDS)
        disarm(group)
        self.check_survivors(name)
        drop_device_copies(group.url)
        members = group.members()
        with ThreadPoolExecutor(2) as pool:
            companion = begin(
                pool, group.url, prompt_of(7, 20), max_tokens=_COMPANION_TOKENS, cache_salt=f"companion of {name}"
            )
            restore = begin(pool, group.url, self.chain.prompt, **self.chain.request_options())
            evidence = kill.await_kill(group, timeout=20.0)
            killed_at = time.monotonic()
            if evidence:
                context.fault_fired(f"kill {role} at {step}", evidence, hit=kill.hit - total, of=total)
                context.figure("kills_during_restore", 1)
            else:
                context.vacuous(f"{name}: {step} was not reached {kill.hit} times")
                group.kill_all()
            self._check_failure(name, role, restore, killed_at)
            self.companions.compare_attempt("companion", companion.result(), what=Damage.PAGES_REUSED)
        if evidence:
            what = f"{role} killed during a restore"
            check_all_gone(
                context,
                group,
                members,
                what=what,
                limit=GONE_SECONDS[role],
                since=killed_at,
                spared=kill.spared,
                victims=kill.victims,
            )
        group.kill_all()

    def _check_failure(self, name: str, role: str, restore: Future[Attempt], killed_at: float) -> None:
        attempt = restore.result()
        self.context.timed(
            "a request whose restore lost a rank fails", time.monotonic() - killed_at, limit=FAIL_SECONDS
        )
        # Nobody can answer 503 for a killed API process: its connection ends, without output.
        is_right = attempt.is_refused or (role == "api" and attempt.is_broken)
        self.context.check(is_right, f"{name}: status {attempt.status}, {attempt.text!r}, {attempt.message}")
        self.chain.references.compare_attempt("chain", attempt, what=Damage.PAGES_REUSED)

    def check_survivors(self, when: str) -> None:
        """At rest after a start: nothing visible on some ranks only, nothing reported lost, all of it restored."""
        check_parity(self.context, self.group, when)
        self.chain.reported.check(self.group, when)
        self.context.check(self.chain.restore(self.group), f"{when}: the chain was not restored whole")
        self.group.wait_stored()

    def finish(self) -> None:
        """After the last kill: everything once more, and every digest."""
        disarm(self.group)
        self.group.start(timeout=_START_SECONDS)
        self.check_survivors("after the last kill")
        check_digests(self.context, self.group, "after the last kill")
        self.group.stop()


def run_kills(context: Context, *, model: str, world_size: int, standard: int, long: int) -> None:
    """``standard`` or ``long`` kills at random progress, roles and steps in turn."""
    group = context.group(model, world_size)
    kills = RestoreKills(context, group, Chain(context, num_turns=12 if model in ORACLES else 6))
    kills.prepare()
    count = long if context.is_long else standard
    # Seven is prime to the number of places: a few kills are spread over all of them.
    places = (PLACES[(7 * number) % len(PLACES)] for number in range(count))
    names = [f"{number:03d} {role} {step}" for number, (role, step) in enumerate(places)]
    for name in context.cases(names):
        _, role, step = name.split()
        kills.kill_once(name, role, step)
    kills.finish()


def _kills(model: str, world_size: int, *, standard: int, long: int, seconds: float, **fields: object) -> Scenario:
    return Scenario(
        name=f"kill-during-restore-{model}-tp{world_size}",
        proves="A rank killed at any progress of a restore fails the request with 503 and ends the group; no loss.",
        rows=("A15", "A11"),
        seconds=seconds,
        long_seconds=seconds * long / max(standard, 1) if standard else 12.0 * long,
        run=partial(run_kills, model=model, world_size=world_size, standard=standard, long=long),
        **fields,  # type: ignore[arg-type]
    )


SCENARIOS = (
    _kills("oracle", 2, standard=15, long=120, seconds=45),
    _kills("oracle-rows", 3, standard=9, long=80, seconds=35),
    _kills("tiny-llama", 2, standard=3, long=20, seconds=50, needs=("torch",)),
    _kills(
        "default", 2, standard=0, long=20, seconds=0, needs=("torch", "default-model"), suites=("long",), alone=True
    ),
)
