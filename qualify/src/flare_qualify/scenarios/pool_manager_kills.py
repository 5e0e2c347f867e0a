"""The pool's manager killed between what it stores, makes visible and deletes: what is visible is whole, always."""

from __future__ import annotations

import signal
import time

from flare_cli.failpoints import FAILPOINT_VARIABLE
from flare_qualify.checkers.answers import References
from flare_qualify.group import Group
from flare_qualify.pool_process import PoolProcess, pool_of, wait_flushed, wait_pool
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask

__all__ = ["SCENARIOS"]

_SALT = "manager kills"
_KILLS = ("delete@1", "store-shard@2", "commit@1", "commit@3")
_LITTLE = "300k"
"""A limit at which records are evicted, for the case in which something is to be deleted."""
_DEATH_SECONDS = 30.0


def run_kills(context: Context) -> None:
    """One kill after the other over one store; after each start everything visible is verified, and puts go on."""
    pool = context.pool()
    pool.start()
    group = context.group("oracle-rows", 2, *pool.group_options())
    group.start()
    context.require(wait_pool(group, "on") is not None, f"the pool is not on: {pool_of(group)}")
    references = References(context)
    members = group.members()
    prompt = 0
    for case in context.cases(_KILLS):
        point, _, count = case.partition("@")
        pool.stop()
        pool.options = ("--limit", _LITTLE) if point == "delete" else ()
        pool.environment[FAILPOINT_VARIABLE] = f"manager.{point}:kill@{count}"
        pool.start()
        wait_pool(group, "on")
        deadline = time.monotonic() + _DEATH_SECONDS
        while pool.process is not None and pool.process.poll() is None and time.monotonic() < deadline:
            references.learn(str(prompt), ask(group.url, prompt_of(prompt), cache_salt=_SALT))
            prompt += 1
            time.sleep(0.1)
        code = pool.process.poll() if pool.process is not None else None
        if code == -signal.SIGKILL:
            context.fault_fired(f"manager killed at {case}", f"exit by signal {-code}")
        else:
            context.vacuous(f"{case}: not reached within {_DEATH_SECONDS:g} s")
        del pool.environment[FAILPOINT_VARIABLE]
        pool.options = ()
        pool.kill()
        pool.start()
        _verify(context, pool, case)
        context.check(wait_pool(group, "on") is not None, f"{case}: the ranks did not come back: {pool_of(group)}")
        context.check(wait_flushed(group), f"{case}: pending puts were not resumed: {pool_of(group)}")
        _verify(context, pool, f"{case}, flushed")
    context.check(members == group.members(), "a process of the group has died of the pool")
    group.stop()
    _restore(context, pool, references, prompt)


def _verify(context: Context, pool: PoolProcess, when: str) -> None:
    """Every digest of everything visible, by the operator's command."""
    found = pool.ask("verify", pool.url, "--key-file", str(pool.key_file))
    context.check(found.returncode == 0, f"{when}: {found.stdout[-500:]} {found.stderr[-500:]}")


def _restore(context: Context, pool: PoolProcess, references: References, num_prompts: int) -> None:
    """A second instance has all of it, and not a byte of it is wrong."""
    second: Group = context.group("oracle-rows", 2, *pool.group_options())
    second.start()
    wait_pool(second, "on")
    hits = 0
    for number in range(num_prompts):
        answer = ask(second.url, prompt_of(number), cache_salt=_SALT)
        references.compare(str(number), answer)
        hits += context.restored(answer, tier="pool")
    context.check(hits == num_prompts, f"{hits} of {num_prompts} prompts came from the pool")
    second.stop()


SCENARIOS = (
    Scenario(
        name="pool-manager-kills",
        proves="The manager killed while it stores, commits or deletes leaves nothing visible that is not whole.",
        rows=("B1", "B5"),
        seconds=45,
        run=run_kills,
    ),
)
