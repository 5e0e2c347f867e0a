"""The pool's manager killed and started again under load, or silent, full, gone: no request fails, no hit is stale."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.records import check_digests, check_parity
from flare_qualify.group import Group
from flare_qualify.pool_process import PoolProcess, pool_of, wait_flushed, wait_pool
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.prompts import extend, prompt_of
from flare_qualify.workloads.requests import Attempt, ask, attempt, drop_device_copies

__all__ = ["SCENARIOS"]

VOTED_SECONDS = 3.0
_BASE_TOKENS = 120
_PROMPTS_A_ROUND = 2


@dataclass(slots=True)
class Load:
    """A client that asks one prompt after the other until it is told to end: old ones, which restore, and new ones.

    Device copies are dropped in between, and the disk is small, so that the pool is asked again and again.
    """

    context: Context
    group: Group
    attempts: list[tuple[str, Attempt]] = field(default_factory=list)
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=self._run, name="load")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ended.is_set():
            name = str(number % 8 if number % 3 else number)
            self.attempts.append((name, attempt(self.group.url, self.prompt(name), cache_salt="load")))
            number += 1
            if number % 2:
                drop_device_copies(self.group.url)

    @staticmethod
    def prompt(name: str) -> list[int]:
        """Of a name, which is a number."""
        return extend(prompt_of(40, _BASE_TOKENS), int(name), 40)

    def judge(self, references: References) -> None:
        """None has failed, and every answer to one prompt is the same."""
        context = self.context
        hits = 0
        for name, one in self.attempts:
            context.check(one.answer is not None, f"prompt {name} failed with {one.status}: {one.message}")
            if one.answer is None:
                continue
            if name not in references.answers:
                references.answers[name] = one.answer
            references.compare(name, one.answer)
            if one.answer.cached_tokens["pool"]:
                context.restored(one.answer, tier="pool")
                hits += 1
        context.figure("requests_under_load", len(self.attempts))
        context.figure("pool_hits_under_load", hits)


def run_restarts(context: Context, *, standard: int, long: int) -> None:
    """Kill the manager under load, start it again; within three seconds of its listening all ranks have voted."""
    pool = context.pool()
    pool.start()
    group = context.group("oracle-rows", 2, *pool.group_options(), "--prefix-cache-disk-limit", "160k")
    group.start()
    context.require(wait_pool(group, "on") is not None, f"the pool is not on: {pool_of(group)}")
    references = References(context)
    members = group.members()
    with Load(context, group) as load:
        for number in range(long if context.is_long else standard):
            _restart_once(context, pool, group, f"restart {number}")
    load.judge(references)
    context.check(members == group.members(), "a process of the group has died of the pool")
    context.check(wait_flushed(group), f"pending puts were not resumed: {pool_of(group)}")
    group.stop()
    check_digests(context, group, "stopped")


def _restart_once(context: Context, pool: PoolProcess, group: Group, what: str) -> None:
    time.sleep(0.2 + 0.3 * context.rng.random())
    sessions = pool_of(group)["sessions"]
    pool.kill()
    off = wait_pool(group, "off", timeout=10.0) or wait_pool(group, "joining", timeout=1.0)
    context.check(off is not None, f"{what}: the pool is still on: {pool_of(group)}")
    time.sleep(1.2 * context.rng.random())
    pool.start()
    listening = time.monotonic()
    found = wait_pool(group, "on", timeout=VOTED_SECONDS + 10.0, sessions=sessions + 1)
    context.timed("all ranks have reconnected and voted", time.monotonic() - listening, limit=VOTED_SECONDS)
    if context.check(found is not None, f"{what}: the ranks did not come back: {pool_of(group)}"):
        context.fault_fired(f"manager {what}", f"session {found['sessions'] if found else 0}")
        context.figure("manager_restarts", 1)


def run_frozen_manager(context: Context) -> None:
    """The manager is stopped (SIGSTOP): its silence costs a bounded time, then local tiers serve; it comes back."""
    pool = context.pool()
    pool.start()
    group = context.group("oracle", 2, *pool.group_options())
    group.start()
    wait_pool(group, "on")
    references = References(context)
    prompts = {str(number): prompt_of(number) for number in range(4)}
    for name, prompt in prompts.items():
        references.learn(name, ask(group.url, prompt, cache_salt=name))
    context.require(wait_flushed(group), f"not everything was put: {pool_of(group)}")
    process = pool.process
    context.require(process is not None, "no manager")
    if process is None:
        return
    os.kill(process.pid, signal.SIGSTOP)
    context.fault_fired("manager stopped", "SIGSTOP")
    for name, prompt in prompts.items():
        start = time.monotonic()
        references.compare(name, ask(group.url, prompt, cache_salt=name))
        new = attempt(group.url, prompt_of(100 + int(name)), cache_salt=name)
        context.check(new.answer is not None, f"a request failed beside a silent manager: {new.message}")
        context.timed("two requests beside a silent manager", time.monotonic() - start, limit=6.0)
    context.check(wait_pool(group, "off", timeout=15.0) is not None, f"the silence was not noticed: {pool_of(group)}")
    sessions = pool_of(group)["sessions"]
    os.kill(process.pid, signal.SIGCONT)
    context.check(
        wait_pool(group, "on", timeout=15.0, sessions=sessions + 1) is not None, f"not back: {pool_of(group)}"
    )
    context.check(wait_flushed(group), f"pending puts were not resumed: {pool_of(group)}")
    group.stop()
    _restore_elsewhere(context, pool, references, prompts)


def _restore_elsewhere(
    context: Context, pool: PoolProcess, references: References, prompts: dict[str, list[int]]
) -> None:
    second = context.group("oracle", 2, *pool.group_options())
    second.start()
    wait_pool(second, "on")
    for name, prompt in prompts.items():
        answer = ask(second.url, prompt, cache_salt=name)
        references.compare(name, answer)
        context.check(context.restored(answer, tier="pool"), f"{name}: {answer.cached_tokens}")
    second.wait_stored()
    check_parity(context, second, "second instance")
    second.stop()


def run_corrupt_store(context: Context) -> None:
    """Bytes of shards are changed in the manager's store: what fails its digests is a miss, and never a wrong byte."""
    pool = context.pool("--memory", "0")
    pool.start()
    group = context.group("oracle", 2, *pool.group_options())
    group.start()
    wait_pool(group, "on")
    references = References(context)
    prompts = {str(number): prompt_of(number) for number in range(4)}
    for name, prompt in prompts.items():
        references.learn(name, ask(group.url, prompt, cache_salt=name))
    context.require(wait_flushed(group), f"not everything was put: {pool_of(group)}")
    group.stop()
    shards = sorted(path for path in pool.store_directory.rglob("shards/**/*") if path.is_file())
    context.require(bool(shards), f"no shards below {pool.store_directory}")
    damaged = shards[:: max(1, len(shards) // 4)]
    for path in damaged:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    context.fault_fired("bits flipped in the store", f"{len(damaged)} of {len(shards)} shards")
    second = context.group("oracle", 2, *pool.group_options())
    second.start()
    wait_pool(second, "on")
    for name, prompt in prompts.items():
        answer = ask(second.url, prompt, cache_salt=name)
        references.compare(name, answer)
        context.restored(answer, tier="pool")
    context.check(wait_flushed(second), f"the damaged records were not put again: {pool_of(second)}")
    second.stop()


SCENARIOS = (
    Scenario(
        name="pool-manager-restarts",
        proves="The manager killed and restarted under load fails no request; all ranks are back within 3 s.",
        rows=("B5",),
        seconds=30,
        long_seconds=150,
        alone=True,
        run=partial(run_restarts, standard=6, long=50),
    ),
    Scenario(
        name="pool-silent-manager",
        proves="A manager that is stopped costs requests a bounded time; when it goes on, so does the pool.",
        rows=("B5",),
        seconds=40,
        alone=True,
        run=run_frozen_manager,
    ),
    Scenario(
        name="pool-corrupt-store",
        proves="A bit flipped in the manager's store is a miss, and the record is put again.",
        rows=("B1",),
        seconds=15,
        run=run_corrupt_store,
    ),
)
