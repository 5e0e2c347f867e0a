"""Settings of the scheduler; values, with what follows from them."""

from __future__ import annotations

from dataclasses import dataclass

from flare_core.engine.speculation import SpeculationLimits
from flare_core.errors import UsageError

__all__ = ["SchedulerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What the scheduler must know of model, memory and policy.

    Attributes:
        page_tokens: tokens of a page.
        num_pages: pages of the device pool, equal on all ranks.
        max_sequences: sequences that hold a slot at once.
        max_model_len: longest sequence, prompt and outputs.
        vocab_size: ids at or above it are refused.
        set_fingerprint: root of all keys.
        has_rows: the model keeps a row a sequence. num_row_snapshots: slots for rows beside the sequences' own.
        row_interval_tokens: prefill stops at its multiples and keeps the row there (a multiple of ``page_tokens``; 0:
            only where a prefill or a request ends).
        max_prefill_tokens: prompt tokens of a step in which nothing decodes.
        max_mixed_tokens: prompt tokens of a step in which something decodes; bounds the time between tokens.
        min_tail_tokens: shorter partial pages are not stored.
        speculation: what may be drafted; None: nothing. Models with rows are not drafted for: what a refused draft did
            to a row cannot be taken back.
    """

    page_tokens: int
    num_pages: int
    max_sequences: int
    max_model_len: int
    vocab_size: int
    set_fingerprint: bytes
    has_rows: bool = False
    num_row_snapshots: int = 0
    row_interval_tokens: int = 0
    max_prefill_tokens: int = 2048
    max_mixed_tokens: int = 512
    min_tail_tokens: int = 16
    speculation: SpeculationLimits | None = None

    def __post_init__(self) -> None:
        for name in ("page_tokens", "num_pages", "max_sequences", "max_prefill_tokens", "max_mixed_tokens"):
            if getattr(self, name) < 1:
                msg = f"{name} is {getattr(self, name)}; at least 1 is needed"
                raise UsageError(msg)
        if self.row_interval_tokens % self.page_tokens:
            msg = f"row_interval_tokens {self.row_interval_tokens} is not a multiple of page_tokens {self.page_tokens}"
            raise UsageError(msg)
        if self.speculation is not None and self.has_rows:
            raise UsageError("speculation is not possible with a model that keeps rows; turn it off")

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence that the model allows and the pool holds alone."""
        return min(self.max_model_len, self.num_pages * self.page_tokens)
