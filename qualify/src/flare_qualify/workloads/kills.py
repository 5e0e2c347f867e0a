"""A SIGKILL to one role at one failpoint: how it is prepared, brought about, and who is its victim."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from flare_qualify.group import Group
from flare_qualify.workloads.failpoints import arm, wait_fired

__all__ = ["ROLES", "Kill"]

ROLES = ("peer", "worker", "api")


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill.

    Attributes:
        role: ``peer``, ``worker`` (rank zero's) or ``api`` (its parent, which serves HTTP).
        step: failpoint; the API process comes to none, so it is killed while a peer pauses there.
        hit: at which time the rank comes to the step.
        peer: the peer that is killed, or that pauses.
    """

    role: str
    step: str
    hit: int = 1
    peer: int = 1

    @property
    def rank(self) -> int:
        """The rank that comes to the failpoint."""
        return 0 if self.role == "worker" else self.peer

    @property
    def victims(self) -> tuple[int, ...]:
        """Ranks whose exit code is the kill's own. Rank zero's is its API process's, which outlives the worker."""
        return {"peer": (self.peer,), "worker": (), "api": (0,)}[self.role]

    @property
    def spared(self) -> tuple[str, ...]:
        """Members of the group (:meth:`Group.members`) that are not judged by when they end."""
        return (f"rank{self.peer}",) if self.role == "peer" else (self.role,)

    def arm(self, group: Group) -> None:
        """Order it for the next start."""
        arm(group, self.rank, f"{self.step}:{'pause=4s' if self.role == 'api' else 'kill'}@{self.hit}")

    def await_kill(self, group: Group, *, timeout: float) -> str:
        """Block until the rank has come to the step; kills the API process then. Evidence, or empty without it."""
        evidence = wait_fired(group, self.rank, self.step, timeout=timeout)
        if evidence and self.role == "api":
            os.kill(group.api_pid(), signal.SIGKILL)
            evidence += ", then SIGKILL to the API process"
        return evidence
