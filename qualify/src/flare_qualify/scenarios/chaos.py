"""A soak: clients ask without pause, a fault comes every few seconds, all ranks are restarted after each loss."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.pages import check_pages_at_rest
from flare_qualify.checkers.records import check_digests, check_parity
from flare_qualify.group import Group, GroupError
from flare_qualify.models import cache_off_text
from flare_qualify.process_facts import process_state, wait_gone
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import arm, disarm, fired
from flare_qualify.workloads.prompts import extend, prompt_of
from flare_qualify.workloads.requests import ANSWER_TOKENS, Attempt, attempt, drop_device_copies

__all__ = ["SCENARIOS"]

_MODEL, _WORLD_SIZE, _NUM_CLIENTS = "oracle-rows", 3, 4
_CASE_SECONDS = 60.0
_LOSS_SECONDS = 10.0
_ORDERS = (
    "store.link:error=ENOSPC@{n}",
    "store.write:error=EIO@{n}",
    "store.published:kill@{n}",
    "store.ack:kill@{n}",
    "fetch.read:kill@{n}",
    "fetch.read:error=EIO@{n}",
    "fetch.verify:pause=300ms@{n}",
    "fetch.ack:stop@{n}",
    "unlink.remove:kill@{n}",
    "truncate.cut:kill@{n}",
    "step.launch:kill@{n}0",
    "step.result:stop@{n}0",
)


@dataclass(slots=True)
class Soak:
    """One stretch of the soak over one set of record directories."""

    context: Context
    group: Group
    references: References = field(init=False)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    stopping: threading.Event = field(default_factory=threading.Event)
    serving: threading.Event = field(default_factory=threading.Event)
    at_work: list[threading.Lock] = field(default_factory=lambda: [threading.Lock() for _ in range(_NUM_CLIENTS)])
    order: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        """Prompts that share beginnings, and the answers that the oracle gives to them without any cache."""
        self.references = References(self.context)
        for tree in range(4):
            trunk = prompt_of(200 + tree, 60 + 40 * tree)
            for branch in range(6):
                self.prompts[f"{tree}.{branch}"] = extend(trunk, 10 * tree + branch, 16 + 24 * branch)
        for name, prompt in self.prompts.items():
            text = cache_off_text(_MODEL, prompt, max_tokens=ANSWER_TOKENS, world_size=_WORLD_SIZE)
            self.references.expect(name, text)

    def client(self, number: int) -> None:
        """Ask until told to stop; a server that is away is asked again."""
        chance = random.Random(f"{self.context.seed}/client {number}")  # noqa: S311  repeated by its seed
        while not self.stopping.is_set():
            name = chance.choice(list(self.prompts))
            with self.at_work[number]:
                result = attempt(self.group.url, self.prompts[name], timeout=20.0) if self.serving.is_set() else None
            if result is None or result.answer is None:
                self.stopping.wait(0.2)
            if result is not None:
                self._judge(name, result)

    def _judge(self, name: str, result: Attempt) -> None:
        if result.status == 0 and not result.text:
            self.ends["no connection"] += 1
            return
        self.references.compare_attempt(name, result)
        self.ends["answered" if result.answer else "refused" if result.is_refused else "broken"] += 1
        if result.answer is not None:
            self.context.restored(result.answer)

    def start(self) -> None:
        """Restart every rank, one of them perhaps with a failpoint armed; what it finds must be whole."""
        disarm(self.group)
        rng = self.context.rng
        self.order = None
        if rng.random() < 0.6:
            self.order = (rng.randrange(_WORLD_SIZE), rng.choice(_ORDERS).format(n=rng.randint(1, 6)))
            arm(self.group, *self.order)
        self.group.start()
        check_parity(self.context, self.group, "chaos, restarted")
        self.serving.set()

    def await_loss(self, seconds: float) -> bool:
        """Whether the group is lost by itself within this time, by the failpoint that it started with."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in self.group.processes.values()):
                return True
            if self.order is not None and process_state(self._pid(self.order[0])) == "T":
                return True
            time.sleep(0.05)
        return False

    def _pid(self, rank: int) -> int:
        members = self.group.members()
        return members.get("worker" if rank == 0 else f"rank{rank}", 0)

    def note_order(self) -> None:
        """Count the failpoint's fault, if it came."""
        if self.order is None:
            return
        rank, order = self.order
        evidence = fired(self.group, rank, order.partition(":")[0])
        if evidence:
            self.context.fault_fired(f"chaos: {order.partition('@')[0]}", evidence)
            self.order = None

    def strike(self) -> None:
        """Kill or stop a process, or drop what the device holds."""
        members = self.group.members()
        if not members:
            return
        name = self.context.rng.choice(sorted(members))
        how = self.context.rng.choice(("kill", "kill", "stop", "drop"))
        # A stopped API process may still come back: nobody leaves for its sake (see paused-api-process).
        match "kill" if (how, name) == ("stop", "api") else how:
            case "kill":
                os.kill(members[name], signal.SIGKILL)
                self.context.fault_fired(f"chaos: kill {name.rstrip('0123456789')}", f"SIGKILL to {name}")
            case "stop":
                os.kill(members[name], signal.SIGSTOP)
                self.context.fault_fired(f"chaos: stop {name.rstrip('0123456789')}", f"SIGSTOP to {name}")
            case _:
                drop_device_copies(self.group.url)

    def end_lost_group(self) -> None:
        """All that is not stopped must be gone in time; then the supervisor removes the rest."""
        members = {name: pid for name, pid in self.group.members().items() if process_state(pid) != "T"}
        if "worker" in members and "api" not in self.group.members():
            members.pop("worker")
        gone = wait_gone(members, timeout=_LOSS_SECONDS + 5.0)
        left = sorted(members.keys() - gone.keys())
        self.context.check(not left, f"chaos: {left} outlived the group")
        if gone:
            self.context.timed("chaos: a lost group ends", max(gone.values()), limit=_LOSS_SECONDS)
        self.group.kill_all()
        self.quiesce()
        self.context.figure("group_restarts", 1)

    def quiesce(self) -> None:
        """Let no client ask, and wait for those that do: what is compared at a start is at rest."""
        self.serving.clear()
        for lock in self.at_work:
            with lock:
                pass

    def is_lost(self) -> bool:
        """Whether any process has ended or is stopped."""
        members = self.group.members()
        expected = {"api", "worker"} | {f"rank{rank}" for rank in range(1, _WORLD_SIZE)}
        return members.keys() != expected or any(process_state(pid) == "T" for pid in members.values())


def run_soak(context: Context) -> None:
    """Stretches of a minute each; a case is a stretch."""
    for case in context.cases([f"minute {minute}" for minute in range(20)]):
        group = context.group(_MODEL, _WORLD_SIZE, "--prefix-cache-disk-limit", "3M", name=case.replace(" ", "-"))
        soak = Soak(context, group)
        try:
            _soak_for(soak, _CASE_SECONDS)
        except GroupError as error:
            context.check(False, f"{case}: {error}")
        finally:
            soak.stopping.set()
            group.kill_all()


def _soak_for(soak: Soak, seconds: float) -> None:
    context, group = soak.context, soak.group
    soak.start()
    clients = [threading.Thread(target=soak.client, args=(number,)) for number in range(_NUM_CLIENTS)]
    for client in clients:
        client.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        is_lost = soak.await_loss(context.rng.uniform(2.0, 6.0))
        soak.note_order()
        if not is_lost:
            soak.strike()
            time.sleep(0.2)
        if is_lost or soak.is_lost():
            soak.end_lost_group()
            soak.start()
    soak.stopping.set()
    for client in clients:
        client.join()
    disarm(group)
    group.kill_all()
    group.start()
    check_pages_at_rest(context, group, "after the soak")
    check_parity(context, group, "after the soak")
    check_digests(context, group, "after the soak")
    for kind, count in soak.ends.items():
        context.figure(f"soak_requests_{kind.replace(' ', '_')}", count)
    group.stop()


SCENARIOS = (
    Scenario(
        name="chaos-soak",
        proves="Under faults of all kinds every few seconds and restarts by a supervisor, no answer is ever wrong.",
        rows=("A4", "A5", "A11", "A15"),
        suites=("long",),
        seconds=1300,
        alone=True,
        run=run_soak,
    ),
)
