"""Links that break, fall silent, slow down or carry other bytes than were sent: control and record link, each way."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from flare_qualify.fault_drill import Drill
from flare_qualify.faults.line_faults import (
    Bandwidth,
    BlackHole,
    Close,
    Cut,
    Delay,
    Duplicate,
    Flip,
    LineFault,
    SlowClose,
    Stall,
    Swap,
)
from flare_qualify.faults.proxied_peer import CONTROL, RECORDS
from flare_qualify.faults.proxy import Direction
from flare_qualify.proxied_group import ProxiedGroup, open_proxied_drill
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIOS"]

_FIRE_SECONDS = 8.0
_UP, _DOWN = Direction.FROM_CALLER, Direction.TO_CALLER


@dataclass(frozen=True, slots=True)
class _Case:
    """What happens to which link of the last peer."""

    route: str
    direction: Direction
    fault: LineFault


BREAKS: Mapping[str, LineFault] = {
    "reset": Cut(0, Close.RESET),
    "finish-in-a-frame": Cut(7, Close.FINISH),
    "reset-in-a-frame": Cut(30, Close.RESET),
    "flip": Flip(40, 0x10),
    "flip-length": Flip(3, 0x01),
    "duplicate": Duplicate(0, 100),
    "swap": Swap(0, 60),
}
SILENCES: Mapping[str, LineFault] = {
    "stall": Stall(),
    "black-hole": BlackHole(),
    "stall-in-a-frame": Stall(11),
}


def _cases(faults: Mapping[str, LineFault]) -> dict[str, _Case]:
    """Every fault on both links and in both directions."""
    return {
        f"{fault} {route} {direction}": _Case(route, direction, faults[fault])
        for fault in faults
        for route in (RECORDS, CONTROL)
        for direction in (_UP, _DOWN)
    }


def _strike(context: Context, lines: ProxiedGroup, drill: Drill, name: str, case: _Case) -> None:
    """One fault under traffic: everything ends in time; then the group comes back with all that it had."""
    members = lines.group.members()
    with drill.traffic() as restoring, drill.traffic(restoring=False) as computing:
        context.wait_until(restoring.num_answered, timeout=20, what="a first answer")
        armed_at = time.monotonic()
        lines.proxy.arm(case.route, case.direction, case.fault)
        firings = lines.proxy.wait_fired(timeout=_FIRE_SECONDS)
        if not firings:
            context.vacuous(f"{name}: nothing fired")
            return
        context.fault_fired(name, f"{firings[0].what} on the {firings[0].route}, {firings[0].direction}")
        drill.expect_end(name, members, [restoring, computing], fired_at=min(armed_at, firings[0].at))
    lines.start()
    _recovered(drill, name)


def _recovered(drill: Drill, name: str) -> None:
    drill.reported.check(drill.group, name)
    drill.answer_all(name)
    drill.check_at_rest(name)


def run_broken(context: Context, *, faults: Mapping[str, LineFault], in_standard: tuple[str, ...]) -> None:
    """A subset of the combinations in the standard suite, all of them in the long one."""
    cases = _cases(faults)
    chosen = list(cases) if context.is_long else [name for name in cases if name in in_standard]
    with open_proxied_drill(context) as (lines, drill):
        for name in context.cases(chosen):
            _strike(context, lines, drill, name, cases[name])
        lines.stop()


def run_three_ranks(context: Context) -> None:
    """One peer of two falls silent: the other, whose links are sound, ends too."""
    with open_proxied_drill(context, world_size=3) as (lines, drill):
        _strike(context, lines, drill, "black hole of one peer", _Case(RECORDS, _UP, BlackHole()))
        lines.stop()


def run_slow(context: Context) -> None:
    """Slow and late links cost time and nothing else."""
    slow: Mapping[str, LineFault] = {"narrow": Bandwidth(20_000), "late": Delay(0.15), "slow to close": SlowClose(0.5)}
    with open_proxied_drill(context) as (lines, drill):
        for name in context.cases(slow if context.is_long else ("narrow", "slow to close")):
            _endure(context, lines, drill, name, slow[name])
        lines.stop()


def _endure(context: Context, lines: ProxiedGroup, drill: Drill, name: str, fault: LineFault) -> None:
    for route in (RECORDS, CONTROL):
        for direction in Direction:
            lines.proxy.arm(route, direction, fault)
    with drill.traffic() as traffic:
        time.sleep(1.0 if isinstance(fault, SlowClose) else 5.5)
    drill.check_traffic(traffic, name, fired_at=None)
    context.check(traffic.num_answered() > 0, f"{name}: nothing was answered")
    drill.check_at_rest(name)
    if isinstance(fault, SlowClose):
        codes = lines.group.stop()
        context.check(codes == dict.fromkeys(codes, 0), f"{name}: exit codes {codes}")
    firings = lines.proxy.wait_fired(timeout=0.0)
    if not firings:
        context.vacuous(f"{name}: nothing fired")
        return
    context.fault_fired(name, firings[0].what)
    lines.start()
    _recovered(drill, name)


def run_slow_reader(context: Context) -> None:
    """A peer that stops reading its record link: what needs no peer's disk goes on until it is given up (A12)."""
    with open_proxied_drill(context) as (lines, drill):
        members = lines.group.members()
        drill.answer_all("before", restore=False)
        with drill.traffic(restoring=False) as computing:
            context.wait_until(computing.num_answered, timeout=20, what="a first answer")
            lines.proxy.arm(RECORDS, _DOWN, Stall())
            firings = lines.proxy.wait_fired(timeout=_FIRE_SECONDS)
            context.require(bool(firings), "nothing fired")
            context.fault_fired("a peer that does not read", firings[0].what)
            before = computing.num_answered()
            with drill.traffic() as restoring:
                drill.expect_end("slow reader", members, [restoring, computing], fired_at=firings[0].at)
            served = computing.num_answered() - before
            context.figure("requests_served_beside_a_stalled_link", served)
            context.check(served > 0, "the worker answered nothing while a peer did not read")
        lines.start()
        _recovered(drill, "slow reader")
        lines.stop()


SCENARIOS = (
    Scenario(
        name="links-broken",
        proves="A record or control link that breaks or carries other bytes ends every process; no record is lost.",
        rows=("A11", "A12", "A15"),
        needs=("root", "netns"),
        seconds=25,
        long_seconds=260,
        run=partial(
            run_broken,
            faults=BREAKS,
            in_standard=(
                f"reset-in-a-frame {RECORDS} {_UP}",
                f"flip {RECORDS} {_DOWN}",
                f"duplicate {RECORDS} {_UP}",
                f"finish-in-a-frame {CONTROL} {_DOWN}",
                f"swap {CONTROL} {_UP}",
            ),
        ),
    ),
    Scenario(
        name="links-silent",
        proves="A link on which nothing arrives any more, one way, ends every process of the group within 7 s.",
        rows=("A11", "A15"),
        needs=("root", "netns"),
        seconds=21,
        long_seconds=190,
        alone=True,
        run=partial(
            run_broken,
            faults=SILENCES,
            in_standard=(f"black-hole {RECORDS} {_UP}", f"stall {CONTROL} {_DOWN}"),
        ),
    ),
    Scenario(
        name="links-silent-of-one-peer-of-two",
        proves="When one of two peers falls silent, the other ends as well, within 7 s.",
        rows=("A11",),
        needs=("root", "netns"),
        seconds=12,
        alone=True,
        run=run_three_ranks,
    ),
    Scenario(
        name="links-slow",
        proves="Narrow, late and slowly closing links change no answer and end no process.",
        rows=("A11", "A12"),
        needs=("root", "netns"),
        seconds=17,
        long_seconds=26,
        run=run_slow,
    ),
    Scenario(
        name="links-slow-reader",
        proves="While a peer does not read its record link, the worker serves what needs no record, then gives it up.",
        rows=("A12",),
        needs=("root", "netns"),
        seconds=12,
        alone=True,
        run=run_slow_reader,
    ),
)
