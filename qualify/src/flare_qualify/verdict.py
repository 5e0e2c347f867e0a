"""What a scenario came to: counts folded from its history, and the verdict they give.

A scenario passes only where its fault was seen to fire and a restore hit followed where one was due: a run in which
nothing happened proves nothing and is ``fail-vacuous``. Pure: knows no file, process or clock.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from flare_qualify.history import Event

__all__ = ["Damage", "Outcome", "Tally", "Verdict", "outcome_of"]


class Verdict(enum.StrEnum):
    """How a scenario ended. A skip has a reason and does not count as a scenario run."""

    PASS = "pass"  # noqa: S105  a verdict
    FAIL = "fail"
    VACUOUS = "fail-vacuous"
    SKIP = "skip"
    UNFINISHED = "unfinished"


class Damage(enum.StrEnum):
    """What must be zero in every run; the names stand at the top of ``qualification.json``."""

    WRONG_TOKENS = "wrong_tokens"
    PARTIALLY_VISIBLE = "partially_visible_records"
    LOST_REPORTED = "lost_reported_records"
    PAGES_REUSED = "pages_reused_before_accounting"
    DEATHS_BY_REQUEST = "deaths_by_request"


@dataclass(slots=True)
class Tally:
    """Counts of some stretch of a history."""

    faults: int = 0
    restores: int = 0
    restored_tokens: int = 0
    requests: int = 0
    checks: int = 0
    cases: int = 0
    damage: Counter[Damage] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    vacuous: list[str] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Count what ``other`` counted, too."""
        self.faults += other.faults
        self.restores += other.restores
        self.restored_tokens += other.restored_tokens
        self.requests += other.requests
        self.checks += other.checks
        self.cases += other.cases
        self.damage.update(other.damage)
        self.failures += other.failures
        self.vacuous += other.vacuous
        for name, number in other.figures.items():
            self.figures[name] = self.figures.get(name, 0) + number

    def take(self, event: Event) -> None:
        """Count one event; kinds that count nothing are ignored."""
        match event["kind"]:
            case "fault":
                self.faults += 1
            case "restored":
                self.restores += 1
                self.restored_tokens += int(event["tokens"])
            case "answered":
                self.requests += int(event.get("count", 1))
            case "checked":
                self.checks += 1
            case "damage":
                self.damage[Damage(event["what"])] += int(event["count"])
            case "failed":
                self.failures.append(str(event["reason"]))
            case "vacuous":
                self.vacuous.append(str(event["reason"]))
            case "figure":
                name = str(event["name"])
                self.figures[name] = self.figures.get(name, 0) + int(event["number"])


@dataclass(frozen=True, slots=True)
class Outcome:
    """A scenario's verdict with what it rests on.

    Attributes:
        reason: why it was not passed; empty where it was.
        done_cases: cases of it that need not run again.
        seconds: over all attempts.
    """

    verdict: Verdict
    reason: str
    tally: Tally
    done_cases: frozenset[str]
    seconds: float


def outcome_of(events: Iterable[Event], *, faults_due: bool, restores_due: bool) -> Outcome:
    """Fold a scenario's history.

    An attempt begins with a ``begin`` event and ends with ``end`` or ``skipped``. A ``case`` event ends a case: what
    was counted since the previous one belongs to it. When an attempt is given up or repeated, only its good cases keep
    their counts, and its damage: no rerun undoes a wrong token.
    """
    kept, attempt, current = Tally(), Tally(), Tally()
    done: set[str] = set()
    seconds, started_at, last_at = 0.0, None, 0.0
    is_ended, skip = False, None
    for event in events:
        last_at = float(event["at"])
        match event["kind"]:
            case "begin":
                kept.damage.update(attempt.damage + current.damage)
                attempt, current, is_ended, skip = Tally(), Tally(), False, None
                started_at = last_at
            case "case":
                current.cases += 1
                is_good = not (current.failures or current.vacuous or current.damage)
                (kept if is_good else attempt).add(current)
                if is_good:
                    done.add(str(event["name"]))
                current = Tally()
            case "end" | "skipped":
                is_ended = True
                skip = str(event["reason"]) if event["kind"] == "skipped" else None
                seconds += last_at - (started_at if started_at is not None else last_at)
                started_at = None
            case _:
                current.take(event)
    if started_at is not None:
        seconds += last_at - started_at
    total = Tally()
    for part in (kept, attempt, current):
        total.add(part)
    verdict, reason = _judge(total, is_ended=is_ended, skip=skip, faults_due=faults_due, restores_due=restores_due)
    return Outcome(verdict, reason, total, frozenset(done), seconds)


def _judge(
    tally: Tally, *, is_ended: bool, skip: str | None, faults_due: bool, restores_due: bool
) -> tuple[Verdict, str]:
    damage = [f"{count} {what}" for what, count in tally.damage.items() if count]
    if damage or tally.failures:
        return Verdict.FAIL, "; ".join([*damage, *tally.failures[:5]])
    if skip is not None:
        return Verdict.SKIP, skip
    if not is_ended:
        return Verdict.UNFINISHED, "the run was cut off"
    if tally.vacuous:
        return Verdict.VACUOUS, "; ".join(tally.vacuous[:5])
    if faults_due and not tally.faults:
        return Verdict.VACUOUS, "no fault fired"
    if restores_due and not tally.restores:
        return Verdict.VACUOUS, "no restore hit followed"
    return Verdict.PASS, ""
