"""Networks that part the ranks and tell nobody: a pulled cable, packets lost one way; and one that is merely slow.

Rank zero runs on this host, each peer in a network namespace of its own on the same bridge.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from flare_qualify.fault_drill import Drill, open_drill
from flare_qualify.faults.namespaces import Network, network
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIOS"]


@contextlib.contextmanager
def _opened(context: Context, world_size: int) -> Iterator[tuple[Network, Drill]]:
    with network(world_size) as net:
        group = context.group("oracle", world_size, host=net.address(0), api_host="127.0.0.1")
        group.rank_prefix = {rank: namespace.prefix for rank, namespace in net.namespaces.items()}
        with open_drill(context, group, num_prompts=2) as drill:
            yield net, drill


def _strike(context: Context, drill: Drill, name: str, part: Callable[[], str], heal: Callable[[], None]) -> None:
    members = drill.group.members()
    with drill.traffic() as restoring, drill.traffic(restoring=False) as computing:
        context.wait_until(restoring.num_answered, timeout=20, what="a first answer")
        fired_at = time.monotonic()
        context.fault_fired(name, part())
        drill.expect_end(name, members, [restoring, computing], fired_at=fired_at)
    heal()
    drill.recover(name)


def run_partition(context: Context) -> None:
    """Both ways at once, and each way alone: every process is gone in time, and comes back with all that it had."""
    with _opened(context, 2) as (net, drill):
        parts: Mapping[str, tuple[Callable[[], str], Callable[[], None]]] = {
            "both ways": (lambda: net.pull(1), lambda: net.plug(1)),
            "to the peer": (
                lambda: net.lose_packets(sender=0, receiver=1),
                lambda: net.find_packets(sender=0, receiver=1),
            ),
            "to rank zero": (
                lambda: net.lose_packets(sender=1, receiver=0),
                lambda: net.find_packets(sender=1, receiver=0),
            ),
        }
        rounds = 7 if context.is_long else 1
        for case in context.cases(f"{name}, {number}" for number in range(rounds) for name in parts):
            name = case.rpartition(",")[0]
            _strike(context, drill, case, *parts[name])


def run_idle_partition(context: Context) -> None:
    """A cable pulled while nobody asks anything: heartbeats alone must notice."""
    with _opened(context, 3) as (net, drill):
        members = drill.group.members()
        fired_at = time.monotonic()
        context.fault_fired("a cable pulled from an idle group", net.pull(2))
        drill.expect_end("idle partition", members, [], fired_at=fired_at)
        net.plug(2)
        drill.recover("idle partition")


def run_slow_network(context: Context) -> None:
    """A network of a few hundred kilobits a second: slower, and as right as ever."""
    with _opened(context, 2) as (net, drill):
        net.slow_down(1, bits_per_second=300_000)
        with drill.traffic() as traffic:
            time.sleep(7.0)
        drill.check_traffic(traffic, "slow network", fired_at=None)
        context.check(traffic.num_answered() > 0, "slow network: nothing was answered")
        delayed = net.num_delayed(1)
        if not delayed:
            context.vacuous("no packet had to wait")
            return
        context.fault_fired("a slow network", f"{delayed} packets had to wait")
        drill.answer_all("slow network")
        drill.check_at_rest("slow network")


SCENARIOS = (
    Scenario(
        name="partition",
        proves="Ranks that cannot hear each other, in one direction or both, are gone within 7 s, and restart whole.",
        rows=("A11", "A15"),
        needs=("root", "netns"),
        seconds=27,
        long_seconds=320,
        alone=True,
        run=run_partition,
    ),
    Scenario(
        name="partition-of-an-idle-group",
        proves="A cable pulled while nothing is asked is noticed by heartbeats alone.",
        rows=("A11",),
        needs=("root", "netns"),
        seconds=12,
        alone=True,
        run=run_idle_partition,
    ),
    Scenario(
        name="slow-network",
        proves="A network of 300 kbit/s delays answers and changes none.",
        rows=("A11", "A12"),
        needs=("root", "netns"),
        seconds=10,
        run=run_slow_network,
    ),
)
