"""The directory of a run: where each scenario's history lies, what they came to, and ``qualification.json``.

Everything is read from the histories each time, so that a report made later, or after a cut, says the same.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flare_qualify.history import Event, History, read_history, seal_history
from flare_qualify.scenario import Scenario
from flare_qualify.scenario_process import HISTORY_NAME
from flare_qualify.verdict import Damage, Outcome, Tally, Verdict, outcome_of

__all__ = ["RunDirectory", "RunResult", "ScenarioResult", "current_commit"]

RESULT_NAME = "qualification.json"
REPORT_NAME = "report.html"


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One scenario of the run."""

    name: str
    proves: str
    rows: tuple[str, ...]
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run came to; ``starts`` are the ``run`` events of its history: commit, suite, seed."""

    scenarios: tuple[ScenarioResult, ...]
    starts: tuple[Event, ...]
    total: Tally

    def count(self, verdict: Verdict) -> int:
        """Scenarios with this verdict."""
        return sum(scenario.outcome.verdict is verdict for scenario in self.scenarios)

    @property
    def is_good(self) -> bool:
        """No damage, nothing failed, nothing vacuous, nothing unfinished, and something passed."""
        bad = (Verdict.FAIL, Verdict.VACUOUS, Verdict.UNFINISHED)
        return not any(self.count(verdict) for verdict in bad) and self.count(Verdict.PASS) > 0

    @property
    def num_run(self) -> int:
        """Scenarios that count as run: all but skipped and unfinished ones."""
        return len(self.scenarios) - self.count(Verdict.SKIP) - self.count(Verdict.UNFINISHED)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths and results under ``root``."""

    root: Path
    own: History = field(init=False)

    def __post_init__(self) -> None:
        """The run's own history lies beside the scenarios'."""
        object.__setattr__(self, "own", History(self.root / HISTORY_NAME))

    @property
    def models(self) -> Path:
        """Where models are made."""
        return self.root / "models"

    def scenario(self, name: str) -> Path:
        """Directory of one scenario."""
        return self.root / "scenarios" / name

    def history(self, name: str) -> Path:
        """History of one scenario."""
        return self.scenario(name) / HISTORY_NAME

    def begin(self, *, suite: str, seed: int, resumed: bool) -> None:
        """Note a start of the runner."""
        seal_history(self.own.path)
        machine = f"{platform.node()}: {os.cpu_count()} cores, {platform.machine()}, {platform.release()}"
        self.own.append(
            "run",
            suite=suite,
            seed=seed,
            resumed=resumed,
            commit=current_commit(),
            python=platform.python_version(),
            machine=machine,
        )

    def outcome(self, scenario: Scenario) -> Outcome:
        """What this scenario has come to so far."""
        events = read_history(self.history(scenario.name))
        return outcome_of(events, faults_due=scenario.faults_due, restores_due=scenario.restores_due)

    def result(self, scenarios: list[Scenario]) -> RunResult:
        """What the run has come to so far; ``scenarios`` without a history are left out."""
        results: list[ScenarioResult] = []
        total = Tally()
        for scenario in scenarios:
            if not self.history(scenario.name).exists():
                continue
            outcome = self.outcome(scenario)
            results.append(ScenarioResult(scenario.name, scenario.proves, scenario.rows, outcome))
            total.add(outcome.tally)
        starts = tuple(event for event in read_history(self.own.path) if event["kind"] == "run")
        return RunResult(tuple(results), starts, total)

    def write_result(self, result: RunResult) -> Path:
        """Write ``qualification.json``, whole or not at all; its path."""
        path = self.root / RESULT_NAME
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(result_document(result), indent=1) + "\n")
        scratch.rename(path)
        return path


def result_document(result: RunResult) -> dict[str, Any]:
    """The contents of ``qualification.json``."""
    total, starts = result.total, result.starts
    commits = list(dict.fromkeys(start["commit"] for start in starts))
    return {
        "faults_injected": total.faults,
        **{str(what): total.damage[what] for what in Damage},
        "scenarios_run": result.num_run,
        "scenarios_passed": result.count(Verdict.PASS),
        "scenarios_skipped": result.count(Verdict.SKIP),
        "is_good": result.is_good,
        "restores": total.restores,
        "restored_tokens": total.restored_tokens,
        "requests": total.requests,
        "checks": total.checks,
        "figures": dict(sorted(total.figures.items())),
        "seeds": sorted({int(start["seed"]) for start in starts}),
        "commit": commits[-1] if commits else "unknown",
        "commits": commits,
        "suite": starts[-1]["suite"] if starts else "",
        "machine": starts[-1]["machine"] if starts else "",
        "python": starts[-1]["python"] if starts else "",
        "written_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(sum(scenario.outcome.seconds for scenario in result.scenarios), 1),
        "scenarios": [_scenario_document(scenario) for scenario in result.scenarios],
    }


def _scenario_document(scenario: ScenarioResult) -> dict[str, Any]:
    outcome = scenario.outcome
    document: dict[str, Any] = {
        "name": scenario.name,
        "verdict": str(outcome.verdict),
        "seconds": round(outcome.seconds, 1),
        "faults": outcome.tally.faults,
        "restores": outcome.tally.restores,
        "cases": outcome.tally.cases,
        "proves": scenario.proves,
        "rows": list(scenario.rows),
    }
    if outcome.tally.figures:
        document["figures"] = outcome.tally.figures
    if outcome.reason:
        document["reason"] = outcome.reason
    return document


def current_commit() -> str:
    """The commit of this source tree, ``-dirty`` behind it where files differ from it; ``unknown`` without git."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
