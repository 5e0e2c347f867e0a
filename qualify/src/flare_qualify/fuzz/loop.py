"""Drives targets: corpus first, then mutations until the time is up. Deterministic for a seed, but for the time."""

from __future__ import annotations

import time
import traceback
from dataclasses import dataclass

from flare_qualify.fuzz.corpus import Corpus
from flare_qualify.fuzz.mutate import Mutator
from flare_qualify.fuzz.target import Execute, Target

__all__ = ["SLOW_SECONDS", "Crash", "FuzzResult", "fuzz"]

SLOW_SECONDS = 5.0
"""An execution that takes longer is a finding: inputs are a few kilobytes."""

MAX_CRASHES = 5


@dataclass(frozen=True, slots=True)
class Crash:
    """An input that broke the rule: the file it was written to, what was raised, in one line, and where."""

    file: str
    error: str
    trace: str


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """One target's run."""

    target: str
    engine: str
    seconds: float
    executions: int
    corpus: int
    crashes: tuple[Crash, ...]

    @property
    def executions_per_second(self) -> float:
        """The rate."""
        return self.executions / self.seconds if self.seconds else 0.0


def fuzz(
    target: Target, *, seconds: float, seed: int, corpus: Corpus | None = None, max_crashes: int = MAX_CRASHES
) -> FuzzResult:
    """Replay the corpus of ``target``, then mutate it for ``seconds``; crashes are written to the corpus.

    Stops at ``max_crashes`` of different kinds. What an execution raises is one, and an execution of over five seconds.
    """
    corpus = corpus or Corpus()
    pool = corpus.inputs(target)
    mutator = Mutator(seed, target.words, target.max_bytes)
    crashes: dict[str, Crash] = {}
    executions = 0
    began = time.monotonic()
    with target.open() as execute:
        while len(crashes) < max_crashes:
            is_replay = executions < len(pool)
            if not is_replay and time.monotonic() - began >= seconds:
                break
            data = pool[executions] if is_replay else mutator.mutated(pool)
            executions += 1
            error = _run(execute, data)
            if error is not None:
                summary = f"{type(error).__name__}: {str(error)[:200]}"
                trace = "".join(traceback.format_exception(error))
                place = trace.rsplit("File ", 1)[-1].split("\n")[0]
                kind = f"{type(error).__name__} {place}"
                if kind not in crashes:  # the same fault is found again and again
                    crashes[kind] = Crash(str(corpus.keep_crash(target, data)), summary, trace)
    return FuzzResult(target.name, "mutation", time.monotonic() - began, executions, len(pool), tuple(crashes.values()))


def _run(execute: Execute, data: bytes) -> Exception | None:
    began = time.monotonic()
    try:
        execute(data)
    except Exception as error:  # noqa: BLE001  whatever comes out is the finding
        return error
    taken = time.monotonic() - began
    return TimeoutError(f"one execution took {taken:.1f} s") if taken > SLOW_SECONDS else None
