"""The ranks' agreement on the pool, cut at every message: all are on or all are off, and the group serves on."""

from __future__ import annotations

import secrets
import socket
import time

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.records import check_parity
from flare_qualify.faults.line_faults import Cut
from flare_qualify.faults.proxy import Direction, FaultProxy
from flare_qualify.group import Group
from flare_qualify.pool_process import PoolProcess, pool_of, wait_flushed, wait_pool
from flare_qualify.process_facts import wait_gone
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import arm, disarm, wait_fired
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies

__all__ = ["SCENARIOS"]

_SALT = "votes"
_POSITIONS = (0, 40, 200, 500, 900, 1500, 2500, 4000)
_CUT_SECONDS = 20.0
POINTS = (
    (0, "pool.connect"),
    (1, "pool.connect"),
    (0, "pool.vote"),
    (1, "pool.vote"),
    (0, "pool.tell"),
    (0, "pool.on"),
    (1, "pool.on"),
)
_ACTIONS = ("kill", "pause", "error=EIO")
_LATE_PAUSE, _LINK_PAUSE = "pause=11s", "pause=3s"
"""Past the deadline for votes; and, where a link's own thread is held, less than its heartbeats allow."""
_WHILE_OFF = 3


def _serve_locally(context: Context, group: Group, references: References, when: str) -> None:
    """Requests are answered, and restored from the disk."""
    drop_device_copies(group.url)
    answer = ask(group.url, prompt_of(1), cache_salt=_SALT)
    references.compare("1", answer)
    context.check(context.restored(answer, tier="disk"), f"{when}: {answer.cached_tokens}, nothing from the disk")


def _learned(context: Context, pool: PoolProcess) -> References:
    """The answer to one prompt, which the pool has; and what an instance without a pool takes it from."""
    references = References(context)
    group = context.group("oracle", 2, *pool.group_options())
    group.start()
    context.require(wait_pool(group, "on") is not None, f"the pool is not on: {pool_of(group)}")
    references.learn("1", ask(group.url, prompt_of(1), cache_salt=_SALT))
    context.require(wait_flushed(group), f"not everything was put: {pool_of(group)}")
    group.stop()
    return references


def run_one_no(context: Context) -> None:
    """One rank has another key: it votes no, so all are off, with its reason; the group serves from local tiers."""
    pool = context.pool()
    pool.start()
    references = _learned(context, pool)
    other = pool.root / "other.key"
    other.touch(mode=0o600)
    other.write_text(secrets.token_hex(32))
    for rank in context.cases(["0", "1"]):
        group = context.group("oracle", 2, *pool.group_options())
        group.rank_options = {int(rank): ("--pool-key-file", str(other))}
        group.start()
        references.compare("1", ask(group.url, prompt_of(1), cache_salt=_SALT))
        group.wait_stored()
        for _ in range(_WHILE_OFF):
            found = pool_of(group)
            context.check(found["state"] != "on", f"the pool is on though rank {rank} cannot join it")
            _serve_locally(context, group, references, f"rank {rank} votes no")
        reasons = pool_of(group)["reasons"]
        if context.check(rank in reasons, f"the reason of rank {rank} is not shown: {reasons}"):
            context.fault_fired(f"rank {rank} votes no", str(reasons[rank]))
        group.rank_options = {}
        context.check(set(group.stop().values()) == {0}, "the group did not end in order")
        group.start()
        context.check(wait_pool(group, "on") is not None, f"with the right key it is not on: {pool_of(group)}")
        group.stop()


def run_failpoints(context: Context) -> None:
    """A rank dies, is late or fails at each step of the agreement: off for all, or all end; then on for all."""
    pool = context.pool()
    pool.start()
    references = _learned(context, pool)
    group = context.group("oracle", 2, *pool.group_options())
    names = [f"{action} at {point} of rank {rank}" for rank, point in POINTS for action in _ACTIONS]
    for name in context.cases(context.some(names, every=6)):
        action, _, point, _, _, rank = name.split()
        if action == "pause":
            action = _LATE_PAUSE if point == "pool.vote" else _LINK_PAUSE
        arm(group, int(rank), f"{point}:{action}")
        group.launch()
        fired = wait_fired(group, int(rank), point, timeout=20.0)
        if not fired:
            context.vacuous(f"{name}: not reached")
            group.kill_all()
            continue
        context.fault_fired(name, fired)
        if action == "kill":
            pids = {str(one): process.pid for one, process in group.processes.items()}
            context.check(len(wait_gone(pids, timeout=15.0)) == len(pids), f"{name}: ranks outlive the killed one")
            group.kill_all()
        else:
            group.wait_healthy()
            began = time.monotonic()
            references.compare("1", ask(group.url, prompt_of(1), cache_salt=_SALT))
            context.timed("a request while a vote hangs", time.monotonic() - began, limit=5.0)
            _come_back(context, group, references, name)
            group.stop()
        disarm(group)
        group.start()
        _come_back(context, group, references, f"after {name}")
        group.stop()


def _come_back(context: Context, group: Group, references: References, when: str) -> None:
    """On for all in the end: what the pool has is restored on every rank, and all ranks keep the same."""
    found = wait_pool(group, "on", timeout=25.0)
    context.check(found is not None, f"{when}: the pool does not come on: {pool_of(group)}")
    drop_device_copies(group.url)
    answer = ask(group.url, prompt_of(1), cache_salt=_SALT)
    references.compare("1", answer)
    context.restored(answer)
    group.wait_stored()
    check_parity(context, group, when)


def run_cut_connections(context: Context) -> None:
    """A connection to the manager breaks after so many bytes, from either side: all off, then all on."""
    pool = context.pool()
    pool.start()
    references = _learned(context, pool)
    names = [f"{direction}, {at}" for direction in Direction for at in _POSITIONS]
    with FaultProxy() as proxy:
        listener = socket.create_server(("127.0.0.1", 0))
        url = f"selenes://127.0.0.1:{listener.getsockname()[1]}"
        proxy.open_route("pool", listener, ("127.0.0.1", pool.port))
        group = context.group("oracle", 2, *pool.group_options(url=url))
        group.start()
        context.require(wait_pool(group, "on") is not None, f"the pool is not on: {pool_of(group)}")
        members = group.members()
        for name in context.cases(context.some(names, every=2)):
            direction, at = name.rsplit(", ", 1)
            sessions = pool_of(group)["sessions"]
            # What is there goes first, so that every byte of a new connection can be the last.
            proxy.arm("pool", Direction(direction), Cut())
            _wait_cut(context, proxy, group, f"{name}: the old connection")
            proxy.arm("pool", Direction(direction), Cut(int(at)))
            what = _wait_cut(context, proxy, group, name)
            references.compare("1", ask(group.url, prompt_of(1), cache_salt=_SALT))
            context.fault_fired(f"cut {name}", what)
            proxy.heal("pool")
            found = wait_pool(group, "on", timeout=15.0, sessions=sessions + 1)
            context.check(found is not None, f"{name}: the pool does not come back: {pool_of(group)}")
            _come_back(context, group, references, name)
        context.check(members == group.members(), "a process of the group has died of the pool")
        group.stop()


def _wait_cut(context: Context, proxy: FaultProxy, group: Group, name: str) -> str:
    """Ask for something new, which makes the ranks talk to the manager, until one more connection was cut."""
    before = len(proxy.wait_fired(timeout=0.0))
    deadline = time.monotonic() + _CUT_SECONDS
    while len(fired := proxy.wait_fired(timeout=0.0)) == before:
        context.require(time.monotonic() < deadline, f"{name}: no connection was cut")
        ask(group.url, prompt_of(context.rng.randrange(1000, 1_000_000)), cache_salt=_SALT)
        time.sleep(0.2)
    return fired[before].what


SCENARIOS = (
    Scenario(
        name="pool-one-rank-votes-no",
        proves="One rank that cannot join the pool keeps all out of it, says why, and the group serves.",
        rows=("B2",),
        seconds=20,
        run=run_one_no,
    ),
    Scenario(
        name="pool-votes-cut",
        proves="A rank that dies, hangs or fails at any step of the agreement leaves no rank on alone.",
        rows=("B2", "B5"),
        seconds=40,
        long_seconds=250,
        run=run_failpoints,
    ),
    Scenario(
        name="pool-connections-cut",
        proves="A connection to the manager that breaks anywhere turns the pool off for all, and on again for all.",
        rows=("B2", "B5"),
        seconds=40,
        long_seconds=80,
        run=run_cut_connections,
    ),
)
