"""A pool between instances: a second one, and a first with empty disks, restore what the first has computed."""

from __future__ import annotations

from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.pages import check_pages_at_rest
from flare_qualify.checkers.processes import check_all_gone
from flare_qualify.checkers.records import check_digests, check_parity
from flare_qualify.distance import total_variation
from flare_qualify.group import Group
from flare_qualify.models import ORACLES
from flare_qualify.pool_process import clear_records, pool_of, wait_flushed, wait_pool
from flare_qualify.run_context import Context
from flare_qualify.scenario import SUITES, Scenario
from flare_qualify.workloads.prompts import extend, prompt_of
from flare_qualify.workloads.requests import ask

__all__ = ["SCENARIOS"]

_TOP = 20
_NUM_PROMPTS = 3


class Sharing:
    """Prompts whose answers were learnt cold, on an instance that puts them into the pool."""

    def __init__(self, context: Context, model: str) -> None:
        self.context = context
        self.model = model
        self.references = References(context)
        length = 600 if model == "default" else 150
        self.prompts = {str(number): prompt_of(number, length + 37 * number) for number in range(_NUM_PROMPTS)}

    def learn(self, group: Group) -> None:
        """Ask cold, and wait until the pool has everything."""
        for name, prompt in self.prompts.items():
            answer = ask(group.url, prompt, cache_salt=name, logprobs=_TOP)
            if self.model in ORACLES:
                self.references.learn_oracle(name, answer, model=self.model, prompt=prompt, world_size=group.world_size)
            else:
                self.references.learn(name, answer)
        self.flush(group)

    def flush(self, group: Group) -> None:
        """Wait until the pool has everything that the group has stored."""
        self.context.require(wait_flushed(group), f"not everything was put into the pool: {pool_of(group)}")

    def restore(self, group: Group, when: str, *, tier: str = "pool") -> None:
        """Ask again: all but the last token comes from ``tier``, and every bit of the answer is the same."""
        for name, prompt in self.prompts.items():
            answer = ask(group.url, prompt, cache_salt=name, logprobs=_TOP)
            self.references.compare(name, answer)
            distance = total_variation(answer.logprobs, self.references.answers[name].logprobs)
            self.context.check(distance == 0.0, f"{when}, {name}: total variation {distance:.2e}")
            is_whole = answer.total_cached == len(prompt) - 1 and answer.cached_tokens[tier] == answer.total_cached
            what = f"{answer.cached_tokens} of {len(prompt)}, not all from {tier}"
            self.context.check(is_whole, f"{when}, {name}: {what}: {pool_of(group)}")
            self.context.restored(answer, tier=tier)
        group.wait_stored()
        check_parity(self.context, group, when)
        check_pages_at_rest(self.context, group, when)


def run_sharing(context: Context, *, model: str, is_tls: bool) -> None:
    """Two instances and a manager: the second restores from the pool; so does the first once its disks are empty."""
    pool = context.pool(is_tls=is_tls)
    pool.start()
    first = context.group(model, 2, *pool.group_options())
    first.start()
    context.require(wait_pool(first, "on") is not None, f"the pool is not on: {pool_of(first)}")
    sharing = Sharing(context, model)
    sharing.learn(first)
    second = context.group(model, 2, *pool.group_options())
    second.start()
    context.require(wait_pool(second, "on") is not None, f"the pool is not on: {pool_of(second)}")
    sharing.restore(second, "second instance")
    context.check(set(first.stop().values()) == {0}, "the first instance did not end in order")
    num_files = clear_records(first)
    first.start()
    wait_pool(first, "on")
    context.fault_fired("local disks cleared, every rank restarted", f"{num_files} files removed")
    sharing.restore(first, "disks cleared")
    for group in (first, second):
        group.stop()
        check_digests(context, group, "stopped")
    pool.kill()
    pool.start()
    clear_records(second)
    second.start()
    wait_pool(second, "on")
    context.fault_fired("manager killed while nobody used it", f"start {pool.run}")
    sharing.restore(second, "manager restarted")


def run_killed_rank(context: Context, *, model: str) -> None:
    """A rank is killed, and its disk is lost with it: after a restart of the group its cache comes from the pool."""
    pool = context.pool()
    pool.start()
    group = context.group(model, 2, *pool.group_options(), "--prefix-cache-accept-loss")
    group.start()
    wait_pool(group, "on")
    sharing = Sharing(context, model)
    sharing.learn(group)
    for case in context.cases(["disk kept", "disk lost"]):
        members = group.members()
        group.kill(1)
        check_all_gone(context, group, members, what="a rank killed", limit=6.0, victims=(1,), spared=("rank1",))
        context.fault_fired("rank 1 killed", "SIGKILL")
        if case == "disk lost":
            clear_records(group, 1)
        group.start()
        wait_pool(group, "on")
        sharing.restore(group, case, tier="disk" if case == "disk kept" else "pool")


def run_tenants(context: Context, *, model: str) -> None:
    """Another salt, another salt key or another model finds nothing of what one instance has put."""
    pool = context.pool()
    pool.start()
    first = context.group(model, 2, *pool.group_options())
    first.start()
    wait_pool(first, "on")
    sharing = Sharing(context, model)
    sharing.learn(first)
    other_key = pool.root / "other-salt.key"
    other_key.touch(mode=0o600)
    other_key.write_text("77" * 32)
    kinds = {
        "another salt": (model, ()),
        "another salt key": (model, ("--prefix-cache-salt-key-file", str(other_key))),
        "another model": ("oracle-rows", ()),
    }
    for case in context.cases(kinds):
        name, options = kinds[case]
        group = context.group(name, 2, *pool.group_options(), *options)
        group.start()
        wait_pool(group, "on")
        prompt = extend(sharing.prompts["0"], 5, 20)
        salt = "somebody else" if case == "another salt" else "0"
        answer = ask(group.url, prompt, cache_salt=salt)
        context.answered()
        context.check(answer.total_cached == 0, f"{case}: {answer.cached_tokens} of what is not its own")
        context.fault_fired(f"a stranger asks: {case}", f"{answer.cached_tokens}")
        group.stop()
    second = context.group(model, 2, *pool.group_options())
    second.start()
    wait_pool(second, "on")
    sharing.restore(second, "the same salt and key")


def _sharing(
    model: str,
    *,
    is_tls: bool,
    seconds: float,
    needs: tuple[str, ...] = (),
    suites: tuple[str, ...] = SUITES,
) -> Scenario:
    return Scenario(
        name=f"pool-sharing-{model}-{'tls' if is_tls else 'tcp'}",
        proves="A second instance, and a first with empty disks, restore from the pool what was computed, bit for bit.",
        rows=("B1", "B4", "B6"),
        seconds=seconds,
        needs=needs,
        suites=suites,
        run=partial(run_sharing, model=model, is_tls=is_tls),
    )


SCENARIOS = (
    _sharing("oracle-rows", is_tls=True, seconds=15),
    _sharing("oracle", is_tls=False, seconds=15),
    _sharing("tiny-llama", is_tls=True, seconds=22, needs=("torch",)),
    _sharing("default", is_tls=True, seconds=120, needs=("torch", "default-model"), suites=("long",)),
    Scenario(
        name="pool-killed-rank",
        proves="A rank that was killed, with its disk or without, has its cache again after a restart.",
        rows=("B5",),
        seconds=15,
        run=partial(run_killed_rank, model="oracle-rows"),
    ),
    Scenario(
        name="pool-tenants",
        proves="What one salt, salt key or model has put into the pool is nothing to any other.",
        rows=("B1",),
        seconds=30,
        run=partial(run_tenants, model="oracle"),
    ),
)
