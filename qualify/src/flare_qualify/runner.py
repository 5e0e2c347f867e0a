"""Runs scenarios, each in a process of its own, shows how far they are, and keeps ``qualification.json`` up to date."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from flare_qualify.history import History, read_history
from flare_qualify.process_facts import kill_marked
from flare_qualify.report import write_report
from flare_qualify.run_context import MARK
from flare_qualify.run_directory import RunDirectory, RunResult
from flare_qualify.scenario import Scenario
from flare_qualify.verdict import Outcome, Verdict, outcome_of

__all__ = ["STYLES", "RunSettings", "run_scenarios"]

STYLES = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.VACUOUS: "magenta",
    Verdict.SKIP: "yellow",
    Verdict.UNFINISHED: "yellow",
}

_POLL_SECONDS = 0.5
_END_SECONDS = 15.0
_LEAST_LIMIT_SECONDS = 120.0
_LIMIT_FACTOR = 5.0
"""A scenario that takes this many times what it should is ended, and has failed."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How to run. ``jobs`` scenarios run beside each other, but for those that are ``alone``."""

    directory: RunDirectory
    suite: str
    seed: int = 1
    resume: bool = False
    jobs: int = 1
    keep: bool = False


@dataclass(slots=True)
class _Runner:
    """One run."""

    settings: RunSettings
    scenarios: list[Scenario]
    console: Console
    progress: Progress
    overall: TaskID
    lock: threading.Lock = field(default_factory=threading.Lock)
    children: set[subprocess.Popen[bytes]] = field(default_factory=set)
    is_stopping: bool = False

    def run(self, todo: list[Scenario]) -> None:
        together = [scenario for scenario in todo if not scenario.alone]
        alone = [scenario for scenario in todo if scenario.alone]
        with ThreadPoolExecutor(self.settings.jobs) as pool:
            try:
                list(pool.map(self.run_one, together))
            except KeyboardInterrupt:
                self.stop()  # before the pool waits for its threads
                raise
        for scenario in alone:
            self.run_one(scenario)

    def run_one(self, scenario: Scenario) -> None:
        if self.is_stopping:
            return
        expected = scenario.expected_seconds(self.settings.suite)
        task = self.progress.add_task(scenario.name, total=None, note="")
        with self._process(scenario) as process:
            self._watch(scenario, process, task, limit=max(_LEAST_LIMIT_SECONDS, _LIMIT_FACTOR * expected))
        outcome = self.settings.directory.outcome(scenario)
        with self.lock:
            self.progress.remove_task(task)
            self.progress.advance(self.overall, expected)
            self._tell(scenario, outcome)
            self._write()
        if outcome.verdict is Verdict.PASS and not self.settings.keep:
            _remove_attempts(self.settings.directory.scenario(scenario.name))

    @contextlib.contextmanager
    def _process(self, scenario: Scenario) -> Iterator[subprocess.Popen[bytes]]:
        settings, directory = self.settings, self.settings.directory.scenario(scenario.name)
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "flare_qualify.scenario_process", scenario.name]
        # Whole paths: a rank may run elsewhere, and a link to a directory must lead there from anywhere.
        command += ["--directory", str(directory.resolve()), "--models", str(settings.directory.models.resolve())]
        command += ["--suite", settings.suite, "--seed", str(settings.seed)]
        with (directory / "output.log").open("ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.children.add(process)
        try:
            yield process
        finally:
            _end(process)
            self.children.discard(process)
            for attempt in directory.glob("attempt*"):
                kill_marked(MARK, str(attempt.resolve()))

    def _watch(self, scenario: Scenario, process: subprocess.Popen[bytes], task: TaskID, *, limit: float) -> None:
        path = self.settings.directory.history(scenario.name)
        deadline = time.monotonic() + limit
        while process.poll() is None and not self.is_stopping:
            if time.monotonic() > deadline:
                History(path).append("failed", reason=f"it was still running after {limit:.0f} s and was ended")
                _end(process)
                History(path).append("end")
                return
            tally = outcome_of(read_history(path), faults_due=False, restores_due=False).tally
            note = f"{tally.faults} faults, {tally.restores} restores" + (f", {tally.cases} cases" * bool(tally.cases))
            self.progress.update(task, note=note)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
        if not self.is_stopping and process.returncode:
            tail = (path.parent / "output.log").read_text(errors="replace")[-800:]
            History(path).append("failed", reason=f"its process ended with {process.returncode}: {tail}")
            History(path).append("end")

    def _tell(self, scenario: Scenario, outcome: Outcome) -> None:
        style = STYLES[outcome.verdict]
        line = f"[{style}]{outcome.verdict:>12}[/] {scenario.name:<40} {outcome.seconds:6.1f} s"
        line += f"  {outcome.tally.faults} faults, {outcome.tally.restores} restores"
        self.console.print(line, highlight=False, soft_wrap=True)
        if outcome.reason:
            self.console.print(
                f"             {outcome.reason[:1500]}", style="dim", highlight=False, markup=False, soft_wrap=True
            )

    def _write(self) -> None:
        directory = self.settings.directory
        directory.write_result(directory.result(self.scenarios))

    def stop(self) -> None:
        self.is_stopping = True
        for process in list(self.children):
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, time to clean up, SIGKILL."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _remove_attempts(directory: Path) -> None:
    """The groups' files of a scenario that passed; its history stays."""
    for attempt in directory.glob("attempt*"):
        shutil.rmtree(attempt, ignore_errors=True)


def run_scenarios(scenarios: list[Scenario], settings: RunSettings, console: Console) -> RunResult:
    """Run them and write ``qualification.json`` and the report. Blocks until all have ended.

    With ``resume`` those that passed in this directory are not run again, and those cut off go on with the first case
    that is not done. Without it a former run in the directory is moved aside first, in place of an older one there.

    Raises:
        BlockingIOError: another runner works in the directory.
        FileExistsError: the directory holds something that is no run, or a run of another suite that is not to be
            gone on with.
        KeyboardInterrupt: after ending what was started and writing what there is.
    """
    directory = settings.directory
    if not settings.resume:
        _move_aside(directory)
    directory.root.mkdir(parents=True, exist_ok=True)
    with _locked(directory.root / "LOCK"):
        return _run_locked(scenarios, settings, console)


def _run_locked(scenarios: list[Scenario], settings: RunSettings, console: Console) -> RunResult:
    directory = settings.directory
    former = next((event["suite"] for event in read_history(directory.own.path) if event["kind"] == "run"), None)
    if former not in {None, settings.suite}:
        raise FileExistsError(f"{directory.root} holds a run of the suite {former}; choose another --directory")
    directory.begin(suite=settings.suite, seed=settings.seed, resumed=settings.resume)
    todo = [each for each in scenarios if directory.outcome(each).verdict is not Verdict.PASS]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True) as progress:
        seconds = sum(scenario.expected_seconds(settings.suite) for scenario in todo)
        overall = progress.add_task(f"{len(todo)} scenarios", total=seconds, note="")
        runner = _Runner(settings, scenarios, console, progress, overall)
        try:
            runner.run(todo)
        except KeyboardInterrupt:
            runner.stop()
            raise
        finally:
            result = directory.result(scenarios)
            directory.write_result(result)
            write_report(directory, result)
    return result


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _move_aside(directory: RunDirectory) -> None:
    root = directory.root
    if not root.is_dir() or not any(root.iterdir()):
        return
    if not directory.own.path.exists():
        raise FileExistsError(f"{root} holds something that is no qualification run; choose another --directory")
    with _locked(root / "LOCK"):
        previous = root.with_name(root.name + ".previous")
        shutil.rmtree(previous, ignore_errors=True)
        root.rename(previous)
