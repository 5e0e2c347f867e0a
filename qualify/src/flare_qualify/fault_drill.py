"""What stands around a fault in a scenario: known answers, traffic while it happens, the group's end, the recovery.

Knows no fault. Which outcome is due, an end or business as usual, is said by the scenario.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.pages import check_pages_at_rest, snapshot
from flare_qualify.checkers.processes import check_all_gone
from flare_qualify.checkers.records import ReportedRecords, check_parity, records_of
from flare_qualify.client import Answer, ServerError
from flare_qualify.faults.record_trial import Found
from flare_qualify.group import Group
from flare_qualify.models import PAGE_TOKENS
from flare_qualify.run_context import Context
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import Attempt, ask, attempt, drop_device_copies

__all__ = ["GONE_SECONDS", "Drill", "Traffic", "note_restores", "open_drill"]

GONE_SECONDS = 7.0
"""From a fault on a link to the end of the last process: 5 s of silence, and 2 for everything else."""
_PROMPT_TOKENS = 150


@dataclass(frozen=True, slots=True)
class _Asked:
    name: str
    started_at: float
    attempt: Attempt


@dataclass(slots=True)
class Traffic:
    """Clients that ask known prompts one after the other until told to stop, or until one is not answered."""

    asked: list[_Asked] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    stopping: threading.Event = field(default_factory=threading.Event)

    def num_answered(self) -> int:
        """Requests answered so far."""
        return sum(one.attempt.answer is not None for one in list(self.asked))


@dataclass(slots=True)
class Drill:
    """A group over an oracle model whose answers to ``prompts`` are known and whose records are on disk.

    ``side`` are prompts that traffic asks where it is to need no disk: nobody else asks them.
    """

    context: Context
    group: Group
    model: str
    prompts: dict[str, list[int]]
    side: dict[str, list[int]]
    references: References
    reported: ReportedRecords

    def learn(self) -> None:
        """Ask every prompt cold, hold the answers against the oracle, and note what is stored then."""
        for name, prompt in (self.side | self.prompts).items():
            self._learn_one(name, prompt)
        self.reported.note(self.group)

    def ask_new(self, *numbers: int) -> None:
        """Prompts never asked before: answered as without any cache, whatever becomes of their records.

        Blocks until nothing is in work.
        """
        for number in numbers:
            self._learn_one(f"new prompt {number}", prompt_of(number, _PROMPT_TOKENS))
        self.group.wait_stored()

    def await_store(self, when: str, number: int, *, timeout: float = 15.0) -> int:
        """Ask new prompts from ``number`` on until a record stays, which must be in time; the next number."""
        start = time.monotonic()
        before = {file.name for file in self.group.record_files(0)}
        while time.monotonic() - start < timeout:
            self.ask_new(number)
            number += 1
            if {file.name for file in self.group.record_files(0)} - before:
                self.context.timed(f"{when}: stores go on", time.monotonic() - start, limit=timeout)
                return number
            time.sleep(0.2)
        self.context.check(False, f"{when}: nothing was stored within {timeout:g} s")
        return number

    def _learn_one(self, name: str, prompt: list[int]) -> None:
        answer = ask(self.group.url, prompt, cache_salt=name)
        self.references.learn_oracle(name, answer, model=self.model, prompt=prompt, world_size=self.group.world_size)

    def files_of(self, name: str) -> list[str]:
        """Names of the records, mostly one, that hold a prompt's beginning and most of it."""
        whole = self.prompts[name][: _PROMPT_TOKENS // PAGE_TOKENS * PAGE_TOKENS]
        beginning = struct.pack(f"<{len(whole)}I", *whole)
        return [
            file
            for file, record in records_of(self.group, 0).items()
            if not record.header.identity.start and record.header.token_ids.startswith(beginning)
        ]

    def file_of(self, name: str) -> str:
        """The one of :meth:`files_of`. Raises ScenarioFailed where there is none."""
        files = self.files_of(name)
        self.context.require(bool(files), f"{name} has no record")
        return files[0]

    def job_failures(self, op: str, rank: int) -> dict[str, int]:
        """Failed jobs of this operation on this rank since the start, by reason."""
        jobs = snapshot(self.group)["cache"]["jobs"]
        return next((dict(job["failures"]) for job in jobs if (job["op"], job["rank"]) == (op, rank)), {})

    def answer_all(self, when: str, *, restore: bool = True, at_least: int = 1) -> dict[str, Answer]:
        """Ask every prompt again: nothing may have changed; counts restores, of which ``at_least`` are due."""
        drop_device_copies(self.group.url)
        answers: dict[str, Answer] = {}
        num_restored = 0
        for name, prompt in self.prompts.items():
            answers[name] = answer = ask(self.group.url, prompt, cache_salt=name)
            self.references.compare(name, answer)
            num_restored += self.context.restored(answer)
        if restore:
            self.context.check(num_restored >= at_least, f"{when}: {num_restored} prompts restored, not {at_least}")
        return answers

    @contextlib.contextmanager
    def traffic(self, *, restoring: bool = True, new: bool = False) -> Iterator[Traffic]:
        """A client that asks while the context lasts.

        ``restoring``: every request must fetch records from disk; otherwise it finds all on the device. ``new``: every
        prompt is new to the group, so that every request stores records.
        """
        traffic = Traffic()
        arguments = (traffic, restoring, new)
        thread = threading.Thread(target=self._ask_on, args=arguments, name="traffic", daemon=True)
        thread.start()
        try:
            yield traffic
        finally:
            traffic.stopping.set()
            thread.join()

    def _ask_on(self, traffic: Traffic, restoring: bool, new: bool) -> None:
        prompts = self.prompts if restoring or new else self.side
        for name in itertools.cycle(prompts):
            if traffic.stopping.is_set():
                break
            if restoring:
                with contextlib.suppress(OSError, ServerError):
                    drop_device_copies(self.group.url)
            # Another salt makes it another prompt to every cache, and leaves the answer as it is.
            salt = f"{name} {time.monotonic_ns()}" if new else name
            started_at = time.monotonic()
            found = attempt(self.group.url, prompts[name], timeout=30.0, cache_salt=salt)
            traffic.asked.append(_Asked(name, started_at, found))
            if found.answer is None:
                break
        traffic.ended.set()

    def check_traffic(self, traffic: Traffic, what: str, *, fired_at: float | None) -> None:
        """Everything answered is right; what was not answered got 503 or a broken stream, and only after a fault.

        ``fired_at`` (``time.monotonic``): a request begun before is owed an answer of some kind. None: no fault may
        cost a request anything.
        """
        for one in traffic.asked:
            self.references.compare_attempt(one.name, one.attempt)
            if one.attempt.answer is not None:
                continue
            described = f"{what}: a request ended with {one.attempt.status} {one.attempt.message}"
            if fired_at is None:
                self.context.check(False, described)
            elif one.started_at < fired_at:
                self.context.check(one.attempt.status in {503, 200}, described)

    def expect_end(
        self,
        what: str,
        members: dict[str, int],
        traffics: list[Traffic],
        *,
        fired_at: float,
        victims: tuple[int, ...] = (),
    ) -> None:
        """The group must be gone in time, and the clients told; blocks for it.

        ``victims``: ranks whose exit code is the fault's own.
        """
        check_all_gone(self.context, self.group, members, what=what, limit=GONE_SECONDS, victims=victims)
        for traffic in traffics:
            traffic.ended.wait(GONE_SECONDS)
            self.context.check(traffic.ended.is_set(), f"{what}: a client still waits for its answer")
            self.check_traffic(traffic, what, fired_at=fired_at)
        self.group.kill_all()

    def check_at_rest(self, when: str) -> None:
        """With nothing in work: the same records everywhere, nothing reported lost, every page accounted for."""
        self.group.wait_stored()
        check_parity(self.context, self.group, when)
        check_pages_at_rest(self.context, self.group, when)

    def recover(self, when: str, *, at_least: int = 1) -> None:
        """Start every rank again: what was reported is there, is restored, and answers as before."""
        self.group.start()
        self.reported.check(self.group, when)
        self.answer_all(when, at_least=at_least)
        self.check_at_rest(when)


@contextlib.contextmanager
def open_drill(context: Context, group: Group, *, model: str = "oracle", num_prompts: int = 3) -> Iterator[Drill]:
    """Start the group unless it runs, and teach the drill its answers; every process of the group is gone afterwards.

    The prompts share nothing with each other: each has a salt of its own, its name.
    """
    prompts = {f"prompt {number}": prompt_of(number, _PROMPT_TOKENS) for number in range(num_prompts)}
    side = {"side prompt": prompt_of(9_999, _PROMPT_TOKENS)}
    drill = Drill(context, group, model, prompts, side, References(context), ReportedRecords(context))
    try:
        if not group.processes:
            group.start()
        drill.learn()
        yield drill
    finally:
        group.kill_all()


def note_restores(context: Context, found: Found) -> None:
    """Count what a group without an engine has restored, and compared byte for byte."""
    if found.tokens:
        seconds = round(found.seconds, 4)
        context.history.append("restored", tokens=found.tokens, tier="disk", seconds=seconds, prompt=found.tokens)
