"""What the engine needs from others, and what the record path needs from the engine.

Each port's docstring says who calls it, whether it may block, who owns what until when, and what a failure means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from flare_core.keys import TokenIds
from flare_core.plan import StepPlan, StepResult
from flare_core.prefix import PrefixQuery, Restorable, StoreEvent, StoreRequest, Tier
from flare_core.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["Collective", "Drafter", "JobGate", "KeyValue", "ModelRunner", "PageMemory", "PendingStep", "PrefixStore"]


class PendingStep(Protocol):
    """A launched step."""

    def result(self) -> StepResult:
        """Block until the step has finished on this rank's device; then what it gave."""
        ...


class ModelRunner(Protocol):
    """Executes step plans on one rank, in order. Called by the engine thread only.

    ``launch`` may block (a CPU computes at once). A fault in it is a fault of the rank: the process ends.
    """

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin ``plan``; the plan's jobs have been waited for by the caller."""
        ...


class Drafter(Protocol):
    """Guesses how sequences go on. Called by the engine thread of every rank, in the same order, with equal arguments.

    Ranks do not compare proposals: they are functions of the arguments alone, without a clock or other chance.
    Blocks for as long as drafting takes, which is part of the step. What is proposed changes how soon a request says
    something; not what, by the coupled rule, nor its distribution, by rejection sampling.
    """

    @property
    def max_drafts(self) -> int:
        """Most tokens that it proposes for a sequence at once."""
        ...

    @property
    def taps(self) -> Sequence[int]:
        """Layers of the model whose outputs :meth:`observe` wants, rising, -1 for the embedding; not the last."""
        ...

    def start(self, slot: int, token_ids: TokenIds, params: SamplingParams) -> None:
        """A sequence has taken ``slot``; these tokens are known of it, prompt and outputs. Forget who had it before."""
        ...

    def observe(self, slot: int, start: int, rows: torch.Tensor) -> None:
        """Outputs of the tapped layers side by side, [n, taps * hidden], at the positions [start, start + n).

        Of every known token that is computed here, in order; there is a gap where a prefix was restored. Called only
        where there are taps.
        """
        ...

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Outputs that were decided since."""
        ...

    def propose(self, slots: Sequence[int], max_tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        """For each slot at most so many tokens that may come next; none where there is no good guess."""
        ...


class JobGate(Protocol):
    """Orders transfer jobs against steps on one rank. Called by the engine thread."""

    def wait_for_jobs(self, jobs: Sequence[int]) -> None:
        """Block until these jobs have finished on this rank. The watchdog bounds the wait, not this call."""
        ...

    def step_finished(self, step: int) -> None:
        """Steps up to ``step`` have finished on this rank's device: jobs waiting for them may start."""
        ...


class PageMemory(Protocol):
    """A rank's pages and rows as memory. Thread-safe, non-blocking; valid until the engine is closed.

    A page or row is an ordered list of (address, length): one segment in flare's own pool, several elsewhere.
    Addresses are host addresses when ``device`` is "cpu" and device addresses otherwise.
    """

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        ...

    def page_segments(self, page: int) -> Sequence[tuple[int, int]]:
        """Segments of page ``page``; lengths sum to ``Geometry.page_bytes``."""
        ...

    def row_segments(self, slot: int) -> Sequence[tuple[int, int]]:
        """Segments of row slot ``slot``; lengths sum to ``Geometry.row_stride``."""
        ...


class PrefixStore(Protocol):
    """Records outside the device: rank zero's view. Called by the engine thread only; nothing here blocks.

    Pages, row slots and ancestors named in a fetch or a store belong to the store until ``poll`` has returned the
    ticket's event. After a poisoning nothing is reported any more: ``poll`` raises ``Poisoned``.
    """

    def prepare(self, query: PrefixQuery) -> int | None:
        """Ask whoever is far away what they have of ``query``. Returns a ticket, whose event says when ``lookup`` knows
        it; None: it knows all there is to know now."""
        ...

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that only prefilled ``num_tokens`` took so long: what a restore is held against."""
        ...

    def lookup(self, query: PrefixQuery) -> Restorable:
        """The longest prefix that all ranks hold; no segments where nothing goes beyond the device's share."""
        ...

    def fetch(
        self,
        query: PrefixQuery,
        restorable: Restorable,
        *,
        pages: Sequence[int],
        row_slot: int | None,
        after_step: int,
    ) -> int:
        """Restore into ``pages``: one page id for every page index from ``query.num_device_pages`` on.

        ``after_step`` is the last step that touches these pages or the slot. Returns a ticket."""
        ...

    def store(self, request: StoreRequest) -> int | None:
        """Store what is not stored yet. Returns a ticket, or None: nothing to do, or dropped (and counted)."""
        ...

    def poll(self) -> Sequence[StoreEvent]:
        """Events since the last call.

        Raises:
            Poisoned: ranks can no longer account for each other; stop at once.
        """
        ...

    def cancel(self, ticket: int) -> None:
        """Give up a fetch as far as it has not begun; its event still comes."""
        ...

    def reset(self, tier: Tier) -> bool:
        """Forget what ``tier`` (memory) holds and nothing pins; False where there is no such tier."""
        ...


class Collective(Protocol):
    """Sums and gathers bytes between ranks for runners without torch. Blocks until every rank has called."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather(self, data: bytes) -> list[bytes]:
        """``data`` of every rank, by rank."""
        ...


class KeyValue(Protocol):
    """The table that ``torch.distributed`` meets in. Thread-safe; ``get`` and ``wait`` block up to the timeout."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, *, timeout_seconds: float) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def wait(self, keys: Sequence[str], *, timeout_seconds: float) -> None: ...

    def check(self, keys: Sequence[str]) -> bool: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...

    def delete(self, key: str) -> bool: ...

    def num_keys(self) -> int: ...
