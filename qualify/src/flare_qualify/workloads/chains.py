"""A prompt that grew turn by turn: a chain of many records, so that its restore is many jobs one after the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.records import ReportedRecords
from flare_qualify.client import Answer
from flare_qualify.group import Group
from flare_qualify.run_context import Context
from flare_qualify.workloads.failpoints import arm, disarm, hits
from flare_qualify.workloads.prompts import extend, prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies

__all__ = ["Chain"]

_TURN_TOKENS = 48
_SALT = "chain"


@dataclass(slots=True)
class Chain:
    """The chain of one record directory. ``answer`` is that of the whole prompt, the first time it was asked."""

    context: Context
    num_turns: int = 12
    number: int = 11
    prompt: list[int] = field(default_factory=list)
    references: References = field(init=False)
    reported: ReportedRecords = field(init=False)
    answer: Answer | None = None

    def __post_init__(self) -> None:
        """The checkers of what the chain restores."""
        self.references = References(self.context)
        self.reported = ReportedRecords(self.context)

    def grow(self, group: Group) -> None:
        """Ask for every turn of the started group, so that each leaves records; then a short prompt beside it."""
        prompt: list[int] = prompt_of(self.number, _TURN_TOKENS)
        for turn in range(self.num_turns):
            prompt = extend(prompt, self.number * 100 + turn, _TURN_TOKENS)
            self.answer = ask(group.url, prompt, cache_salt=_SALT)
            self.context.answered()
            group.wait_stored()
        self.prompt = prompt
        if self.answer is not None:
            self.references.answers["chain"] = self.answer
        self.reported.note(group)

    def restore(self, group: Group, *, tier: str = "disk") -> bool:
        """Ask for the whole prompt after its device copies were dropped; count the hit, compare the answer.

        False where not all of it came back.
        """
        drop_device_copies(group.url)
        answer = ask(group.url, self.prompt, cache_salt=_SALT)
        self.references.compare("chain", answer)
        return self.context.restored(answer, at_least=len(self.prompt) - 1, tier=tier)

    def request_options(self) -> dict[str, Any]:
        """Fields that a request for the chain's prompt needs to find it."""
        return {"cache_salt": _SALT}

    def hits_of_a_restore(self, group: Group, points: tuple[str, ...]) -> dict[tuple[int, str], int]:
        """How often each rank comes to each of ``points`` while the chain is restored once. Restarts the group."""
        for rank in range(group.world_size):
            arm(group, rank, ";".join(f"{point}:pause=0ms@1+" for point in points))
        group.start()
        self.context.require(self.restore(group), "the chain was not restored whole")
        group.wait_stored()
        found = {(rank, point): len(hits(group, rank, point)) for rank in range(group.world_size) for point in points}
        group.stop()
        disarm(group)
        return found
