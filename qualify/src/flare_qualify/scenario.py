"""A scenario: what it proves, what it needs, how long it takes; and the ones that ``flare_qualify.scenarios`` declares.

Knows nothing of how scenarios run.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flare_qualify import scenarios
from flare_qualify.needs import NEEDS

if TYPE_CHECKING:
    from flare_qualify.run_context import Context

__all__ = ["SUITES", "Scenario", "all_scenarios", "choose"]

SUITES = ("standard", "long")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario, declared as ``SCENARIO`` or in ``SCENARIOS`` of a module of ``flare_qualify.scenarios``.

    Attributes:
        name: in lower case with hyphens; unique.
        proves: one sentence.
        run: does it; how it ends is read from the context's history. Raising is a failure.
        rows: rows of the mission that it serves.
        suites: where it runs.
        needs: names in ``needs.NEEDS``; where one is missing, the scenario is skipped with the reason.
        seconds, long_seconds: expected duration in the standard suite and in the long one, on two cores.
        faults_due: without an injected fault that was seen to fire, it is vacuous.
        restores_due: without a restore hit it is vacuous.
        alone: it judges durations, so nothing else runs beside it.
    """

    name: str
    proves: str
    run: Callable[[Context], None]
    rows: tuple[str, ...] = ()
    suites: tuple[str, ...] = SUITES
    needs: tuple[str, ...] = ()
    seconds: float = 10.0
    long_seconds: float | None = None
    faults_due: bool = True
    restores_due: bool = True
    alone: bool = False

    def expected_seconds(self, suite: str) -> float:
        """How long it should take in ``suite``."""
        return self.long_seconds if suite == "long" and self.long_seconds is not None else self.seconds

    def missing(self) -> str:
        """Why it cannot run here; empty where it can."""
        reasons = (NEEDS[need]() for need in self.needs)
        return "; ".join(reason for reason in reasons if reason)


def all_scenarios() -> dict[str, Scenario]:
    """Every declared scenario by name, modules in alphabetical order.

    Raises:
        ValueError: a name is taken twice, or a suite or need is unknown.
    """
    found: dict[str, Scenario] = {}
    for module_info in sorted(pkgutil.iter_modules(scenarios.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{scenarios.__name__}.{module_info.name}")
        declared = getattr(module, "SCENARIOS", ())
        if hasattr(module, "SCENARIO"):
            declared = (module.SCENARIO, *declared)
        for scenario in declared:
            _check(scenario, found)
            found[scenario.name] = scenario
    return found


def _check(scenario: Scenario, found: dict[str, Scenario]) -> None:
    if scenario.name in found:
        msg = f"two scenarios are called {scenario.name}"
        raise ValueError(msg)
    unknown = [suite for suite in scenario.suites if suite not in SUITES]
    unknown += [need for need in scenario.needs if need not in NEEDS]
    if unknown:
        msg = f"scenario {scenario.name}: unknown {', '.join(unknown)}"
        raise ValueError(msg)


def choose(known: dict[str, Scenario], names: tuple[str, ...], suite: str) -> list[Scenario]:
    """The scenarios called ``names``, or all of ``suite`` without names.

    Raises:
        KeyError: no scenario has such a name.
    """
    if not names:
        return [scenario for scenario in known.values() if suite in scenario.suites]
    return [known[name] for name in names]
