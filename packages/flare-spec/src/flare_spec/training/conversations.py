"""Prompts with answers as tokens, and the directory of safetensors files that they are kept in.

Files are written whole under a name of their own and never changed; so what is there after an interruption is right.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flare_core.errors import CheckpointError

__all__ = ["Conversation", "add_conversations", "padded", "read_conversations", "save_whole"]


@dataclass(frozen=True, slots=True)
class Conversation:
    """``tokens`` of prompt and answer, and how many of them are the prompt's."""

    tokens: tuple[int, ...]
    num_prompt_tokens: int


def read_conversations(directory: Path) -> dict[int, Conversation]:
    """What ``directory`` holds, by number; nothing where it does not exist.

    Raises:
        CheckpointError: a damaged file.
    """
    found: dict[int, Conversation] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            tensors = load_file(path)
            numbers, prompts, ends = (tensors[name].tolist() for name in ("numbers", "num_prompt_tokens", "ends"))
            tokens = tensors["tokens"].tolist()
        except (OSError, KeyError, SafetensorError) as error:
            raise CheckpointError(f"{path}: not a file of answers: {error}; remove it, to answer them again") from error
        for at, number in enumerate(numbers):
            start = ends[at - 1] if at else 0
            found[number] = Conversation(tuple(tokens[start : ends[at]]), prompts[at])
    return found


def add_conversations(directory: Path, conversations: Mapping[int, Conversation]) -> None:
    """Write them as one more file, named by the lowest number in it."""
    directory.mkdir(parents=True, exist_ok=True)
    each = list(conversations.values())
    lengths = torch.tensor([len(one.tokens) for one in each])
    tensors = {
        "numbers": torch.tensor(list(conversations), dtype=torch.int64),
        "num_prompt_tokens": torch.tensor([one.num_prompt_tokens for one in each], dtype=torch.int64),
        "ends": lengths.cumsum(0),
        "tokens": torch.tensor([token for one in each for token in one.tokens], dtype=torch.int32),
    }
    save_whole(directory / f"{min(conversations):07}.safetensors", tensors)


def save_whole(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that is under ``path`` either whole or not at all."""
    part = path.with_name(path.name + ".part")
    save_file(dict(tensors), part, metadata=None if metadata is None else dict(metadata))
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


def padded(conversations: Sequence[Conversation]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, T] int64 and whether each is of an answer [B, T] bool; padding on the right is token 0 and none."""
    length = max(len(each.tokens) for each in conversations)
    tokens = torch.zeros(len(conversations), length, dtype=torch.int64)
    is_answer = torch.zeros(len(conversations), length, dtype=torch.bool)
    for row, each in enumerate(conversations):
        tokens[row, : len(each.tokens)] = torch.tensor(each.tokens)
        is_answer[row, each.num_prompt_tokens : len(each.tokens)] = True
    return tokens, is_answer
