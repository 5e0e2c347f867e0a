"""Every fuzz target over its corpus and, for a while, beyond it; by coverage where atheris is installed and time is."""

from __future__ import annotations

from dataclasses import asdict

from flare_qualify.fuzz.corpus import Corpus
from flare_qualify.fuzz.coverage_guided import fuzz_by_coverage, has_atheris
from flare_qualify.fuzz.loop import fuzz
from flare_qualify.fuzz.registry import TARGETS
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIO"]

_SECONDS, _LONG_SECONDS = 1.0, 60.0


def _run(context: Context) -> None:
    corpus = Corpus(crashes=context.directory / "crashes")
    is_guided = context.is_long and has_atheris()
    run = fuzz_by_coverage if is_guided else fuzz
    executions = 0
    for target in TARGETS:
        seconds = _LONG_SECONDS if context.is_long else _SECONDS
        result = run(target, seconds=seconds, seed=context.rng.randrange(1 << 31), corpus=corpus)
        executions += result.executions
        context.history.append("fuzzed", **asdict(result))
        for crash in result.crashes:
            context.check(False, f"{target.name}: {crash.error}; {target.proves} Input: {crash.file}")
    context.figure("fuzz executions", executions)


SCENARIO = Scenario(
    name="fuzz",
    proves="Whatever bytes come, in a frame, handshake, record, request or directory, they are taken or refused.",
    run=_run,
    rows=("D1", "D4"),
    seconds=_SECONDS * len(TARGETS) + 5,
    long_seconds=(_LONG_SECONDS + 5) * len(TARGETS),
    faults_due=False,
    restores_due=False,
)
