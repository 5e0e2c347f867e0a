"""Two managers over one store, quotas, and pool settings that cannot work, which are named before harm is done."""

from __future__ import annotations

import time
from dataclasses import dataclass

from flare_cache.pool.client import PoolRefused, connect_to_pool
from flare_cache.pool.messages import POOL_PROTOCOL, Register
from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import exit_codes
from flare_qualify.group import Group, GroupError, free_port
from flare_qualify.pool_process import PoolProcess, pool_of, wait_flushed, wait_pool
from flare_qualify.process_facts import wait_gone
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies
from flare_transport import Address, Security

__all__ = ["SCENARIOS"]

EXIT_USAGE, EXIT_MISMATCH = 2, 78
_REFUSE_SECONDS = 10.0
_SALT = "stores"


def run_two_managers(context: Context) -> None:
    """Two managers over one object store serve one another's records; when one is killed, clients move on."""
    store = (context.directory / "bucket").resolve()
    store.mkdir()
    first = context.pool("--refresh", "500ms", store=f"file://{store}")
    second = context.pool("--refresh", "500ms", store=f"file://{store}")
    for name in ("pool.key", "salt.key"):
        first.group_options()
        second.root.mkdir(parents=True, exist_ok=True)
        (second.root / name).touch(mode=0o600)
        (second.root / name).write_text((first.root / name).read_text())
    first.start()
    second.start()
    references = References(context)
    one = context.group("oracle", 2, *first.group_options())
    one.start()
    context.require(wait_pool(one, "on") is not None, f"the pool is not on: {pool_of(one)}")
    references.learn("1", ask(one.url, prompt_of(1), cache_salt=_SALT))
    context.require(wait_flushed(one), f"not everything was put: {pool_of(one)}")
    one.stop()
    both = f"{second.url},127.0.0.1:{first.port}"
    other = context.group("oracle", 2, *second.group_options(url=both))
    other.start()
    context.require(wait_pool(other, "on") is not None, f"the pool is not on: {pool_of(other)}")
    _restored(context, other, references, "1", "through the other manager")
    references.learn("2", ask(other.url, prompt_of(2), cache_salt=_SALT))
    context.require(wait_flushed(other), f"not everything was put: {pool_of(other)}")
    sessions, members = pool_of(other)["sessions"], other.members()
    second.kill()
    killed = time.monotonic()
    found = wait_pool(other, "on", timeout=20.0, sessions=sessions + 1)
    context.check(found is not None, f"the ranks did not move on: {pool_of(other)}")
    context.timed("the ranks have moved on to the other manager", time.monotonic() - killed, limit=6.0)
    context.fault_fired("one of two managers killed", f"session {found['sessions'] if found else 0}")
    references.learn("3", ask(other.url, prompt_of(3), cache_salt=_SALT))
    context.require(wait_flushed(other), f"not everything was put: {pool_of(other)}")
    context.check(members == other.members(), "a process of the group has died of the pool")
    other.stop()
    third = context.group("oracle", 2, *first.group_options())
    third.start()
    wait_pool(third, "on")
    for name in ("1", "2", "3"):
        _restored(context, third, references, name, "through the manager that is left")


def _restored(context: Context, group: Group, references: References, name: str, when: str) -> None:
    answer = ask(group.url, prompt_of(int(name)), cache_salt=_SALT)
    references.compare(name, answer)
    context.check(
        context.restored(answer, tier="pool"), f"{when}, {name}: {answer.cached_tokens}, nothing from the pool"
    )


def run_quota(context: Context) -> None:
    """A pool that holds little: puts beyond its quota are refused or evict, requests never fail, hits are right."""
    pool = context.pool("--quota", "400k", "--limit", "500k")
    pool.start()
    group = context.group("oracle", 2, *pool.group_options())
    group.start()
    wait_pool(group, "on")
    references = References(context)
    for number in range(10):
        references.learn(str(number), ask(group.url, prompt_of(number), cache_salt=_SALT))
        group.wait_stored()
    # What does not fit is given up in the end, or takes the place of what was used longest ago.
    wait_flushed(group, timeout=20.0)
    found = pool_of(group)
    lost = sum(found["dropped"].values()) + found["records_put"] - pool.num_manifests() + found["pending"]
    context.require(lost > 0, f"the quota was not reached: {found}, {pool.num_manifests()} records in the pool")
    context.fault_fired("quota reached", f"{lost} records evicted, dropped or refused")
    group.stop()
    second = context.group("oracle", 2, *pool.group_options())
    second.start()
    wait_pool(second, "on")
    hits = 0
    # The newest first: what is missed is put, and takes the place of what was used longest ago.
    for number in reversed(range(10)):
        answer = ask(second.url, prompt_of(number), cache_salt=_SALT)
        references.compare(str(number), answer)
        hits += context.restored(answer, tier="pool")
    context.check(0 < hits < 10, f"{hits} of 10 prompts came from a pool that holds a part of them")


def run_unreachable(context: Context) -> None:
    """Nobody listens at the start: the group serves, says so, keeps trying, and is on once the manager is there."""
    pool = context.pool()
    group = context.group("oracle", 2, *pool.group_options())
    references = References(context)
    group.start()
    references.learn("1", ask(group.url, prompt_of(1), cache_salt=_SALT))
    group.wait_stored()
    found = pool_of(group)
    context.check(found["state"] != "on" and bool(found["reasons"]), f"it is not said why the pool is off: {found}")
    context.check("pool" in group.log(0), "the log of rank 0 does not speak of the pool")
    context.fault_fired("no manager at the start", str(found["reasons"]))
    drop_device_copies(group.url)
    answer = ask(group.url, prompt_of(1), cache_salt=_SALT)
    references.compare("1", answer)
    context.check(context.restored(answer, tier="disk"), f"without a pool: {answer.cached_tokens}")
    pool.start()
    context.check(wait_pool(group, "on", timeout=15.0) is not None, f"the ranks gave up: {pool_of(group)}")
    context.check(wait_flushed(group), f"what was stored before is not put: {pool_of(group)}")
    group.stop()
    second = context.group("oracle", 2, *pool.group_options())
    second.start()
    wait_pool(second, "on")
    _restored(context, second, references, "1", "stored before the manager was there")


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A start that must be refused: flags of the ranks, exit code, and words of the message on some rank."""

    name: str
    options: tuple[str, ...]
    words: tuple[str, ...]
    code: int = EXIT_USAGE
    only_rank_one: bool = False


def _refusals(pool: PoolProcess) -> tuple[_Refusal, ...]:
    open_key = pool.root / "open.key"
    open_key.write_text("11" * 32)
    open_key.chmod(0o644)
    other = f"selenes://127.0.0.1:{free_port()}"
    return (
        _Refusal("unknown scheme", ("--pool", "redis://127.0.0.1:1"), ("redis://127.0.0.1:1", "selene")),
        _Refusal("no port", ("--pool", "selenes://host:99999"), ("99999",)),
        _Refusal("a key that others can read", ("--pool-key-file", str(open_key)), ("open.key",)),
        _Refusal("no key", ("--pool-key-file", str(pool.root / "missing.key")), ("missing.key",)),
        _Refusal("another pool on one rank", ("--pool", other), ("--pool",), EXIT_MISMATCH, only_rank_one=True),
    )


def run_refusals(context: Context) -> None:
    """Settings that cannot work end the start with a message that names them; a difference names it on every rank."""
    pool = context.pool()
    pool.start()
    refusals = {refusal.name: refusal for refusal in _refusals(pool)}
    for name in context.cases(refusals):
        refusal = refusals[name]
        group = context.group("oracle", 2, *pool.group_options())
        group.rank_options = dict.fromkeys((1,) if refusal.only_rank_one else (0, 1), refusal.options)
        start = time.monotonic()
        group.launch()
        pids = {f"rank{rank}": process.pid for rank, process in group.processes.items()}
        gone = wait_gone(pids, timeout=_REFUSE_SECONDS + 5.0)
        if context.check(len(gone) == len(pids), f"{name}: {sorted(pids.keys() - gone.keys())} went on"):
            context.timed("a start that must be refused ends", time.monotonic() - start, limit=_REFUSE_SECONDS)
        codes = exit_codes(group)
        context.check(set(codes.values()) == {refusal.code}, f"{name}: exit codes {codes}, not {refusal.code}")
        for rank in range(2):
            missing = [word for word in refusal.words if word not in group.log(rank)]
            context.check(not missing, f"{name}: rank {rank} does not say {missing}: {group.log(rank)[-600:]}")
            context.check("Traceback" not in group.log(rank), f"{name}: rank {rank} printed a traceback")
        context.fault_fired(f"refused: {name}", f"exit codes {codes}")
        group.kill_all()
    _refuse_second_manager(context, pool)
    _refuse_the_future(context, pool)


def _refuse_second_manager(context: Context, pool: PoolProcess) -> None:
    """A second manager over a directory in use names its holder; one whose port is taken names the port."""
    second = context.pool(store=str(pool.store_directory))
    try:
        second.start(timeout=20.0)
    except GroupError as error:
        context.check("Traceback" not in str(error), f"two managers over one directory: {error}")
        context.fault_fired("refused: two managers over one directory", str(error)[-200:])
    else:
        context.check(False, "two managers serve one directory")


def _refuse_the_future(context: Context, pool: PoolProcess) -> None:
    """A rank whose flare speaks a later version than the manager's is told both versions."""
    register = Register(
        protocol=POOL_PROTOCOL + 1,
        namespace=bytes(32),
        set_fingerprint=bytes(32),
        world_size=1,
        rank=0,
        session=bytes(16),
        instance="from the future",
        model="",
        buffers=(),
    )
    try:
        client = connect_to_pool(
            Address("127.0.0.1", pool.port),
            key=bytes.fromhex(pool.key_file.read_text()),
            security=Security.TLS,
            register=register,
            on_lost=lambda _: None,
        )
    except PoolRefused as refused:
        words = [str(POOL_PROTOCOL), str(POOL_PROTOCOL + 1), "version"]
        missing = [word for word in words if word not in str(refused)]
        context.check(not missing, f"a later version is refused without {missing}: {refused}")
        context.fault_fired("refused: a later version", str(refused))
    else:
        client.close()
        context.check(False, "a rank of a later version was taken in")


SCENARIOS = (
    Scenario(
        name="pool-two-managers",
        proves="Two managers over one object store serve one another's records; one is killed, clients move on.",
        rows=("B1", "B5"),
        seconds=30,
        run=run_two_managers,
    ),
    Scenario(
        name="pool-quota",
        proves="A pool beyond its quota evicts or refuses; no request fails and no hit is wrong.",
        rows=("B1",),
        seconds=30,
        run=run_quota,
    ),
    Scenario(
        name="pool-unreachable-at-start",
        proves="Without a manager at the start the group serves, says why, and puts all of it later.",
        rows=("B5", "B6"),
        seconds=15,
        run=run_unreachable,
    ),
    Scenario(
        name="pool-bad-settings",
        proves="Pool settings that cannot work, or differ between ranks, end the start and are named.",
        rows=("B3",),
        seconds=20,
        restores_due=False,
        run=run_refusals,
    ),
)
