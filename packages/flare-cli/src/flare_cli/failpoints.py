"""Failpoints of a flare process: armed from its environment, and put around its model runner. For qualification only.

The names, and what can be done at them, are ``flare_transport.failpoint``'s. ``python -m flare_cli.failpoints`` lists
them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from flare_core.errors import UsageError
from flare_core.plan import StepPlan, StepResult
from flare_core.ports import ModelRunner, PendingStep
from flare_transport.failpoint import FAILPOINTS, FailpointError, arm, failpoint, is_armed

__all__ = ["FAILPOINT_VARIABLE", "arm_failpoints", "with_failpoints"]

FAILPOINT_VARIABLE = "FLARE_FAILPOINT"


def arm_failpoints(environ: Mapping[str, str]) -> None:
    """Arm what ``environ`` orders for this process, and say so on standard error. For entry points.

    Raises:
        UsageError: it is no order; names the part and what would be right.
    """
    spec = environ.get(FAILPOINT_VARIABLE, "")
    try:
        arm(spec)
    except FailpointError as error:
        msg = f"{FAILPOINT_VARIABLE}: {error}"
        raise UsageError(msg) from None
    if is_armed():
        # Logs are not set up yet.
        os.write(2, f"flare: WARNING: {FAILPOINT_VARIABLE}={spec}: this process WILL FAIL ON PURPOSE\n".encode())


def with_failpoints(runner: ModelRunner) -> ModelRunner:
    """``runner`` itself, unless this process is armed."""
    return _WatchedRunner(runner) if is_armed() else runner


@dataclass(frozen=True, slots=True)
class _WatchedRunner:
    """A runner that comes to failpoints."""

    runner: ModelRunner

    def launch(self, plan: StepPlan) -> PendingStep:
        """See the port."""
        failpoint("step.launch")
        return _WatchedStep(self.runner.launch(plan))


@dataclass(frozen=True, slots=True)
class _WatchedStep:
    """A launched step that comes to a failpoint."""

    step: PendingStep

    def result(self) -> StepResult:
        """See the port."""
        failpoint("step.result")
        return self.step.result()


if __name__ == "__main__":
    for point in FAILPOINTS:
        print(f"{point.name:24}{point.where:10}{point.what}")
