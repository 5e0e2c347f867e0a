"""Runs one scenario in a process of its own, ``python -m flare_qualify.scenario_process NAME …``, for the runner.

A scenario that hangs or breaks its process takes no other one along. All it says is in its history; exit code 0 means
that the history has its end.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from flare_qualify.history import History, read_history, seal_history
from flare_qualify.models import ModelLibrary
from flare_qualify.run_context import Context, ScenarioFailed, ScenarioSkipped
from flare_qualify.scenario import SUITES, Scenario, all_scenarios
from flare_qualify.verdict import outcome_of

__all__ = ["HISTORY_NAME", "run_here"]

HISTORY_NAME = "history.jsonl"


def run_here(scenario: Scenario, directory: Path, *, suite: str, seed: int, models: ModelLibrary) -> None:
    """Run it to its end in this process; the outcome is in ``directory``'s history."""
    path = directory / HISTORY_NAME
    directory.mkdir(parents=True, exist_ok=True)
    seal_history(path)
    before = outcome_of(read_history(path), faults_due=False, restores_due=False)
    history = History(path)
    attempt = sum(event["kind"] == "begin" for event in read_history(path)) + 1
    history.append("begin", scenario=scenario.name, suite=suite, seed=seed, attempt=attempt)
    reason = scenario.missing()
    if reason:
        history.append("skipped", reason=reason)
        return
    context = Context(
        scenario=scenario.name,
        suite=suite,
        directory=directory / f"attempt{attempt}",
        seed=seed,
        history=history,
        models=models,
        done_cases=before.done_cases,
    )
    context.directory.mkdir(exist_ok=True)
    try:
        scenario.run(context)
    except ScenarioSkipped as skipped:
        history.append("skipped", reason=str(skipped))
        return
    except ScenarioFailed:
        pass  # its reason is in the history already
    except Exception as error:  # noqa: BLE001  whatever a scenario raises is its failure
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        history.append("failed", reason=f"{type(error).__name__} at {place}: {str(error)[-1800:]}")
        traceback.print_exc()
    finally:
        context.close()
    history.append("end")


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    """0 when the history has its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--suite", choices=SUITES, default=SUITES[0])
    parser.add_argument("--seed", type=int, default=1)
    settings = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    scenario = all_scenarios()[settings.name]
    models = ModelLibrary(settings.models)
    run_here(scenario, settings.directory, suite=settings.suite, seed=settings.seed, models=models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
