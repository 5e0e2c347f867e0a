"""One training run from its conversations to the drafter's checkpoint, which goes on where it was interrupted.

Owns the configuration of the drafter that is trained and the order of things; not progress bars, prompts or answers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from flare_core.compute.model_config import ModelConfig
from flare_core.compute.sharded_model import ShardedModel
from flare_core.errors import UsageError
from flare_spec.dspark.config import DraftConfig, parse_draft_config
from flare_spec.dspark.train import TrainSettings, new_optimiser, train
from flare_spec.dspark.training_data import TrainingBatch
from flare_spec.dspark.training_loss import LossReport
from flare_spec.dspark.training_model import new_trainee, save_trainee
from flare_spec.training.batches import batches_from
from flare_spec.training.checkpoint import read_state, write_state
from flare_spec.training.conversations import Conversation
from flare_spec.training.target_pass import target_batch

__all__ = ["DraftShape", "default_taps", "draft_config", "train_draft", "unused_token"]

_SAVE_SECONDS: Final = 60.0
STATE: Final = "training-state.safetensors"


@dataclass(frozen=True, slots=True)
class DraftShape:
    """What is chosen about a drafter; the rest is the target's. ``markov_rank`` 0: no Markov head."""

    taps: tuple[int, ...]
    gamma: int
    num_layers: int
    markov_rank: int
    mask_token_id: int


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """``count`` layers spread from the second to the second last, which see what is said and what is about to be.

    Raises:
        UsageError: more than the target has to tap.
    """
    if not 1 <= count <= num_layers - 1:
        raise UsageError(f"{count} taps: a target of {num_layers} layers has 1 to {num_layers - 1}")
    first, last = min(1, num_layers - 1 - count), num_layers - 2
    return tuple(last - (count - 1 - each) * (last - first) // max(1, count - 1) for each in range(count))


def unused_token(conversations: Sequence[Conversation], vocab_size: int) -> int:
    """The lowest id that no conversation has: what stands in the slots that are to be drafted.

    Raises:
        UsageError: there is none.
    """
    used = {token for each in conversations for token in each.tokens}
    unused = next((token for token in range(vocab_size) if token not in used), None)
    if unused is None:
        raise UsageError("the conversations have every id of the vocabulary; give the id of a mask token")
    return unused


def draft_config(target: ModelConfig, shape: DraftShape) -> dict[str, Any]:
    """``config.json``, in the dialect that DeepSpec publishes."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * shape.num_layers,
        "num_target_layers": target.num_layers,
        "block_size": shape.gamma,
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.taps),
        "markov_rank": shape.markov_rank,
        **({"markov_head_type": "vanilla"} if shape.markov_rank else {}),
        "enable_confidence_head": True,
        "confidence_head_with_markov": shape.markov_rank > 0,
        "dtype": "bfloat16",
    }


def train_draft(
    model: ShardedModel,
    conversations: Sequence[Conversation],
    directory: Path,
    raw: dict[str, Any],
    *,
    settings: TrainSettings,
    batch_size: int,
    report: Callable[[int, LossReport], None],
    clock: Callable[[], float] = time.monotonic,
) -> DraftConfig:
    """Train a drafter for ``model`` on ``conversations`` and write it to ``directory`` as bfloat16.

    The state is written there every minute; called again with equal arguments, training goes on from it. ``report`` is
    called with every step done. Blocks for as long as it takes.

    Raises:
        UsageError: no conversations.
        CheckpointError: the directory holds the state of other settings, or a damaged one.
    """
    if not conversations:
        raise UsageError("there is no conversation to train on; ask for more prompts")
    config = parse_draft_config(raw, model.config)
    device = model.embedding.device
    trainee = new_trainee(config, torch.Generator().manual_seed(settings.seed), device=device)
    optimiser = new_optimiser(trainee)
    run = json.dumps([raw, repr(settings), batch_size, len(conversations)], sort_keys=True)
    directory.mkdir(parents=True, exist_ok=True)
    state = directory / STATE
    first = read_state(state, trainee, optimiser, run=run)
    saved_at = clock()

    def reported(step: int, result: LossReport) -> None:
        nonlocal saved_at
        report(step, result)
        if clock() - saved_at >= _SAVE_SECONDS:
            write_state(state, trainee, optimiser, next_step=step + 1, run=run)
            saved_at = clock()

    # Products of float32 on tensor cores, where there are some: the drafter ends as bfloat16 anyway.
    torch.set_float32_matmul_precision("high")
    train(
        trainee,
        _batches(model, config, conversations, batch_size=batch_size, seed=settings.seed, step=first),
        embedding=model.embedding,
        head=model.head.weight,
        settings=settings,
        report=reported,
        optimiser=optimiser,
        first_step=first,
    )
    write_state(state, trainee, optimiser, next_step=settings.num_steps, run=run)
    save_trainee(trainee, directory, raw, dtype=torch.bfloat16)
    return config


def _batches(
    model: ShardedModel,
    config: DraftConfig,
    conversations: Sequence[Conversation],
    *,
    batch_size: int,
    seed: int,
    step: int,
) -> Iterator[TrainingBatch]:
    lengths = [len(each.tokens) for each in conversations]
    for batch in batches_from(lengths, batch_size=batch_size, seed=seed, step=step):
        yield target_batch(model, config.taps, [conversations[index] for index in batch])
