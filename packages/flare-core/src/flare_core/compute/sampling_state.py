"""What sampling remembers of each slot: its parameters on the host, its token counts on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from flare_core.keys import TokenIds
from flare_core.sampling import SamplingParams

__all__ = ["SampleRow", "SlotSampling", "start_sampling"]


@dataclass(slots=True)
class SlotSampling:
    """One slot's sampling state.

    Attributes:
        params: how tokens are chosen.
        num_prompt_tokens: what comes behind the prompt is output.
        in_prompt: bool [vocabulary], which ids the prompt has; None without penalties.
        output_counts: float32 [vocabulary], how often each id was put out; None without penalties.
    """

    params: SamplingParams
    num_prompt_tokens: int
    in_prompt: torch.Tensor | None
    output_counts: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """Greedy over the raw logits, but for ``min_tokens``."""
        params = self.params
        return params.temperature == 0.0 and not params.logit_bias and self.output_counts is None

    def forbids_stops(self, position: int) -> bool:
        """Whether the token at ``position`` comes before ``min_tokens`` outputs."""
        return bool(self.params.stop_token_ids) and position - self.num_prompt_tokens < self.params.min_tokens


@dataclass(frozen=True, slots=True)
class SampleRow:
    """A row of logits to choose a token from: whose, and the absolute index of the token being decided.

    ``drafts``: tokens between the slot's last one and this row, which count as outputs.
    """

    state: SlotSampling
    position: int
    drafts: tuple[int, ...] = ()

    def output_counts(self) -> torch.Tensor | None:
        """The slot's, with the drafts; None without penalties."""
        counts = self.state.output_counts
        if counts is None or not self.drafts:
            return counts
        drafts = torch.tensor(self.drafts, device=counts.device)
        return counts.index_add(0, drafts, torch.ones(len(drafts), device=counts.device))


def start_sampling(
    params: SamplingParams, token_ids: TokenIds, num_prompt_tokens: int, *, vocab_size: int, device: torch.device
) -> SlotSampling:
    """The state of a sequence with these known tokens, prompt and outputs."""
    if params.repetition_penalty == 1.0 and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return SlotSampling(params, num_prompt_tokens, None, None)
    in_prompt = np.zeros(vocab_size, dtype=np.bool_)
    in_prompt[token_ids[:num_prompt_tokens]] = True
    counts = np.bincount(token_ids[num_prompt_tokens:], minlength=vocab_size).astype(np.float32)
    return SlotSampling(
        params, num_prompt_tokens, torch.from_numpy(in_prompt).to(device), torch.from_numpy(counts).to(device)
    )
