"""What a scenario drives: groups, chance, and the history in which it says what happened.

Owns the processes that a scenario starts and ends them with it. Judges nothing: the verdict is folded from the history.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from flare_qualify.client import Answer
from flare_qualify.group import Group
from flare_qualify.history import History
from flare_qualify.models import ModelLibrary, group_options
from flare_qualify.pool_process import PoolProcess
from flare_qualify.process_facts import kill_marked
from flare_qualify.verdict import Damage

__all__ = ["MARK", "Context", "ScenarioFailed", "ScenarioSkipped"]

MARK = "QUALIFY_SCENARIO"
"""Environment variable of every process that a scenario starts, so that none outlives it."""


class ScenarioFailed(Exception):
    """The scenario cannot go on, and has failed; the message says why."""


class ScenarioSkipped(Exception):
    """The scenario cannot run here; the message says what is missing."""


@dataclass(slots=True)
class Context:
    """One scenario at work.

    Attributes:
        directory: empty at the first start of a scenario; its groups and logs lie there.
        suite: ``standard`` or ``long``: how much to do.
        seed: of the run; ``rng`` derives from it, the scenario's name and the case.
        done_cases: cases that a former attempt has finished.
    """

    scenario: str
    suite: str
    directory: Path
    seed: int
    history: History
    models: ModelLibrary
    done_cases: frozenset[str] = frozenset()
    rng: random.Random = field(default_factory=random.Random)
    groups: list[Group] = field(default_factory=list)
    pools: list[PoolProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Seed the chance of what comes before the first case."""
        self.rng = random.Random(f"{self.seed}/{self.scenario}")  # noqa: S311  repeated by its seed

    @property
    def is_long(self) -> bool:
        """Whether this is the long form."""
        return self.suite == "long"

    @property
    def mark(self) -> str:
        """Value of :data:`MARK` for this scenario's processes."""
        return str(self.directory.resolve())

    def group(self, model: str, world_size: int, *options: str, name: str = "", **fields: Any) -> Group:
        """A group over ``model`` (a name of ``models.ModelLibrary``), not started; killed when the scenario ends.

        ``options`` come after ``models.group_options``; ``fields`` are those of :class:`Group`. Its directory is
        new; give a ``name`` to choose it.
        """
        root = self.directory / (name or f"group{len(self.groups)}")
        environment = {MARK: self.mark, "OMP_NUM_THREADS": "1"} | fields.pop("environment", {})
        flags: Sequence[str] = (*group_options(model), *options)
        group = Group(self.models.directory(model), world_size, root, flags, environment=environment, **fields)
        self.groups.append(group)
        return group

    def pool(self, *options: str, **fields: Any) -> PoolProcess:
        """A manager of a pool, not started; killed when the scenario ends. ``fields`` as of :class:`PoolProcess`."""
        root = self.directory / f"pool{len(self.pools)}"
        environment = {MARK: self.mark} | fields.pop("environment", {})
        pool = PoolProcess(root, options=options, environment=environment, **fields)
        pool.prepare()
        self.pools.append(pool)
        return pool

    def command_environment(self) -> dict[str, str]:
        """Environment for a process that is not a rank, so that it ends with the scenario, too."""
        return os.environ | {MARK: self.mark}

    def some(self, names: Sequence[str], *, every: int) -> list[str]:
        """One of ``every`` names in the standard suite, which ones by the run's seed; all of them in the long one."""
        return list(names) if self.is_long else list(names[self.seed % every :: every])

    def cases(self, names: Iterable[str]) -> Iterator[str]:
        """Those of ``names`` that no former attempt has finished. What happens up to the next one belongs to the case.

        ``rng`` begins anew with each, so that a case is the same whether the ones before it ran or not.
        """
        for name in names:
            if name in self.done_cases:
                continue
            self.rng = random.Random(f"{self.seed}/{self.scenario}/{name}")  # noqa: S311  as above
            yield name
            self.history.append("case", name=name)

    def fault_fired(self, what: str, evidence: str, **fields: Any) -> None:
        """A fault was injected and was seen: ``evidence`` is the log line, exit signal or count that shows it.

        Raises:
            ValueError: without evidence.
        """
        if not evidence:
            msg = f"{what}: a fault counts only with evidence that it fired"
            raise ValueError(msg)
        self.history.append("fault", what=what, evidence=evidence[:300], **fields)

    def restored(self, answer: Answer, *, at_least: int = 1, tier: str = "") -> bool:
        """Count a restore hit if ``answer`` restored ``at_least`` prompt tokens (of ``tier``); whether it did.

        Without ``tier`` every tier but the device counts: what never left the device was not restored.
        """
        tiers = (tier,) if tier else ("memory", "disk", "pool")
        tokens = sum(answer.cached_tokens.get(name, 0) for name in tiers)
        if tokens < at_least or not tokens:
            return False
        where = tier or max(tiers, key=lambda name: answer.cached_tokens.get(name, 0))
        seconds = round(answer.ttft_seconds, 4)
        self.history.append("restored", tokens=tokens, tier=where, seconds=seconds, prompt=answer.prompt_tokens)
        return True

    def damage(self, what: Damage, count: int, detail: str) -> None:
        """``count`` of what must never happen; nothing for 0."""
        if count:
            self.history.append("damage", what=what, count=count, detail=detail[:500])

    def check(self, condition: bool, otherwise: str) -> bool:
        """Count a check; where it does not hold, the scenario fails for this reason and goes on."""
        self.history.append("checked")
        if not condition:
            self.history.append("failed", reason=otherwise[:2000])
        return condition

    def require(self, condition: bool, otherwise: str) -> None:
        """As :meth:`check`, but the scenario ends here where it does not hold.

        Raises:
            ScenarioFailed: it does not hold.
        """
        if not self.check(condition, otherwise):
            raise ScenarioFailed(otherwise)

    def answered(self, count: int = 1) -> None:
        """Requests that were answered, well or with an error."""
        self.history.append("answered", count=count)

    def vacuous(self, reason: str) -> None:
        """A fault or a restore hit that was due did not come: the scenario cannot pass."""
        self.history.append("vacuous", reason=reason[:500])

    def figure(self, name: str, number: int) -> None:
        """A count to be shown, and added up over scenarios (``kills``, ``simulated_schedules``)."""
        self.history.append("figure", name=name, number=number)

    def timed(self, what: str, seconds: float, *, limit: float) -> bool:
        """A duration that has a limit: recorded, and checked; whether it was kept."""
        self.history.append("timed", what=what, seconds=round(seconds, 3), limit=limit)
        return self.check(seconds <= limit, f"{what} took {seconds:.1f} s, allowed are {limit:g} s")

    def skip(self, reason: str) -> NoReturn:
        """The scenario cannot run here.

        Raises:
            ScenarioSkipped: always.
        """
        raise ScenarioSkipped(reason)

    def wait_until(self, condition: Any, *, timeout: float, what: str) -> None:
        """Block until ``condition()`` is true, asking every 10 ms.

        Raises:
            ScenarioFailed: it was not within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                self.require(False, f"{what}: not within {timeout:g} s")
            time.sleep(0.01)

    def close(self) -> None:
        """Kill everything that the scenario has started."""
        for group in self.groups:
            group.kill_all()
        for pool in self.pools:
            pool.kill()
        kill_marked(MARK, self.mark)
