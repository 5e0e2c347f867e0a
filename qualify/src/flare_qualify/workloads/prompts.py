"""Prompts as token ids, drawn by number: the same number gives the same prompt in every run and process."""

from __future__ import annotations

import random

__all__ = ["extend", "prompt_of"]

_LEAST_ID, _NUM_IDS = 3, 250
"""Ids that every model here has: the oracle models' bytes, and plain text elsewhere."""


def prompt_of(number: int, num_tokens: int = 150) -> list[int]:
    """A prompt that shares no first page with another number's."""
    chance = random.Random(f"prompt {number}")  # noqa: S311  repeated by its seed
    return [_LEAST_ID + chance.randrange(_NUM_IDS) for _ in range(num_tokens)]


def extend(prompt: list[int], number: int, num_tokens: int) -> list[int]:
    """``prompt`` and ``num_tokens`` more, drawn by ``number``: a branch of the prefix tree."""
    return prompt + prompt_of(number + 1_000_000, num_tokens)
