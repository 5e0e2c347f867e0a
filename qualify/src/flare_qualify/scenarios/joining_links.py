"""Links that break while the ranks meet and join: the group serves, or every rank ends with a code and a message.

Positions count from the first byte of the connection, so that the handshakes are hit wherever they can be.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from flare_qualify.client import ServerError, get_json
from flare_qualify.fault_drill import Drill
from flare_qualify.faults.line_faults import BlackHole, Cut, Flip, LineFault
from flare_qualify.faults.proxied_peer import CONTROL, RECORDS
from flare_qualify.faults.proxy import Direction, FaultProxy, Firing
from flare_qualify.process_facts import is_alive
from flare_qualify.proxied_group import ProxiedGroup, open_proxied_drill
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIOS"]

_SETTLE_SECONDS = 25.0
_MEET_OPTIONS = ("--rendezvous-timeout", "6s")
_POSITIONS = (0, 11, 40, 200, 500, 900, 1500, 2500, 4000)
_STANDARD = ((CONTROL, 200, "cut"), (CONTROL, 40, "flip"), (RECORDS, 900, "cut"))


def _fault(kind: str, at: int) -> LineFault:
    kinds: Mapping[str, LineFault] = {"cut": Cut(at), "flip": Flip(at, 4), "black hole": BlackHole(at)}
    return kinds[kind]


def run_joining(context: Context) -> None:
    """One fault in each start; afterwards a start without, which restores everything."""
    chosen = [(*one, Direction.TO_CALLER) for one in _STANDARD]
    if context.is_long:
        chosen = [
            (route, at, kind, direction)
            for route in (CONTROL, RECORDS)
            for at in _POSITIONS
            for kind in ("cut", "flip", "black hole")
            for direction in Direction
        ]
    cases = {
        f"{kind} at {at}, {route}, {direction}": (route, at, kind, direction) for route, at, kind, direction in chosen
    }
    with open_proxied_drill(context, *_MEET_OPTIONS) as (proxied, drill):
        proxied.group.stop()
        for name in context.cases(cases):
            route, at, kind, direction = cases[name]
            _start_with(context, proxied, drill, name, (route, direction, _fault(kind, at)))


def _start_with(
    context: Context, proxied: ProxiedGroup, drill: Drill, name: str, armed: tuple[str, Direction, LineFault]
) -> None:
    group, (route, direction, fault) = proxied.group, armed

    def arm(proxy: FaultProxy) -> None:
        proxy.arm(route, direction, fault)

    proxied.launch(arm)
    firings = _fired_or_served(proxied)
    if firings:
        context.fault_fired(name, firings[0].what)
        # Only one connection breaks: whoever tries again must get through.
        proxied.proxy.heal(route)
    else:
        context.figure("faults_behind_the_end_of_a_start", 1)
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline and not _serves(proxied) and _living(proxied):
        time.sleep(0.05)
    outcome = "served" if _serves(proxied) else "ended" if not _living(proxied) else "hung"
    context.check(outcome != "hung", f"{name}: after {_SETTLE_SECONDS:g} s the ranks neither serve nor have ended")
    for rank, process in group.processes.items():
        if outcome == "ended":
            context.check(process.returncode not in {0, None}, f"{name}: rank {rank} ended with {process.returncode}")
            context.check("Traceback" not in group.log(rank), f"{name}: rank {rank} printed a traceback")
    context.figure(f"starts_with_a_broken_link_that_{outcome}", 1)
    proxied.start()
    drill.reported.check(group, name)
    drill.answer_all(name, at_least=len(drill.prompts))
    drill.check_at_rest(name)


def _fired_or_served(proxied: ProxiedGroup) -> list[Firing]:
    """Wait until the fault has fired, or the start is done before so many bytes have passed."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    while time.monotonic() < deadline:
        if firings := proxied.proxy.wait_fired(timeout=0.1):
            return firings
        if _serves(proxied) or not _living(proxied):
            break
    return proxied.proxy.wait_fired(timeout=0.0)


def _serves(proxied: ProxiedGroup) -> bool:
    try:
        get_json(proxied.group.url, "/health", timeout=2.0)
    except (OSError, ServerError):
        return False
    return True


def _living(proxied: ProxiedGroup) -> bool:
    for process in proxied.group.processes.values():
        process.poll()
    return any(is_alive(process.pid) for process in proxied.group.processes.values())


SCENARIOS = (
    Scenario(
        name="links-broken-while-joining",
        proves="A link that breaks in a handshake or a join is retried or ends every rank with a message; none hangs.",
        rows=("A6", "A7", "A9"),
        needs=("root", "netns"),
        seconds=27,
        long_seconds=900,
        run=run_joining,
    ),
)
