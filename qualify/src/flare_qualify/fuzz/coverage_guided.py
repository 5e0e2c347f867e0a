"""Drives a target by atheris (libFuzzer with Python coverage), in a process of its own, where atheris is installed."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flare_qualify.fuzz.corpus import Corpus
from flare_qualify.fuzz.loop import Crash, FuzzResult
from flare_qualify.fuzz.target import Target

__all__ = ["fuzz_by_coverage", "grow_corpus", "has_atheris"]

_PACKAGES = ["flare_core", "flare_transport", "flare_cache", "flare_cli"]
_EXECUTIONS = re.compile(r"^#(\d+)\s", re.MULTILINE)
_TRACE_CHARACTERS = 4000
_NUM_KEPT = 64


def has_atheris() -> bool:
    """Whether atheris can be imported here."""
    return importlib.util.find_spec("atheris") is not None


def fuzz_by_coverage(target: Target, *, seconds: float, seed: int, corpus: Corpus | None = None) -> FuzzResult:
    """As ``loop.fuzz``, guided by coverage; ends at the first crash, which is written to the corpus."""
    return _fuzz(target, seconds=seconds, seed=seed, corpus=corpus or Corpus(), num_kept=0)


def grow_corpus(target: Target, *, seconds: float, seed: int, corpus: Corpus | None = None) -> FuzzResult:
    """As ``fuzz_by_coverage``, and the smallest inputs that reached something new are added to the corpus."""
    return _fuzz(target, seconds=seconds, seed=seed, corpus=corpus or Corpus(), num_kept=_NUM_KEPT)


def _fuzz(target: Target, *, seconds: float, seed: int, corpus: Corpus, num_kept: int) -> FuzzResult:
    with tempfile.TemporaryDirectory(prefix="flare-fuzz-") as name:
        work = Path(name)
        inputs = work / "inputs"
        inputs.mkdir()
        known = corpus.inputs(target)
        for number, data in enumerate(known):
            (inputs / f"{number:05}").write_bytes(data)
        begun_with = set(inputs.iterdir())
        began = time.monotonic()
        options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={seed}", f"-artifact_prefix={work}/found-"]
        ended = _run(target, *options, str(inputs))
        taken = time.monotonic() - began
        output = ended.stdout + ended.stderr
        crashes = tuple(
            Crash(str(corpus.keep_crash(target, path.read_bytes())), _what(output), output[-_TRACE_CHARACTERS:])
            for path in sorted(work.glob("found-*"))
        )
        if ended.returncode and not crashes:
            crashes = (Crash("", f"the fuzzing process ended with {ended.returncode}", output[-_TRACE_CHARACTERS:]),)
        # What reached something new was written beside the inputs that it began with.
        found = sorted(set(inputs.iterdir()) - begun_with, key=lambda path: path.stat().st_size)
        for path in found[:num_kept]:
            corpus.keep(target, path.read_bytes())
        counts = [int(count) for count in _EXECUTIONS.findall(output)]
        return FuzzResult(target.name, "atheris", taken, max(counts, default=0), len(known), crashes)


def _run(target: Target, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flare_qualify.fuzz.coverage_guided", target.name]
    command += [f"-max_len={target.max_bytes}", "-timeout=20", "-rss_limit_mb=4096", *options]
    return subprocess.run(command, capture_output=True, check=False, text=True, errors="replace")


def _what(output: str) -> str:
    lines = [line for line in output.splitlines() if re.match(r"^[\w.]+(Error|Exception|Violation)\b", line)]
    return lines[0][:300] if lines else "see the trace"


def _serve(arguments: list[str]) -> None:
    """In the process of its own: instrument, then run until libFuzzer ends the process."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=_PACKAGES):
        from flare_qualify.fuzz.registry import chosen
    (target,) = chosen(arguments[1:2])
    with target.open() as execute:
        atheris.Setup([arguments[0], *arguments[2:]], execute)
        atheris.Fuzz()


if __name__ == "__main__":
    _serve(sys.argv)
