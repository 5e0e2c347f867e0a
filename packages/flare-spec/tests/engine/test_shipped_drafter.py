"""The drafter that the package brings for SmolLM2-135M-Instruct: it loads for such a target, and it is small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flare_spec
from flare_core.compute.model_config import parse_config
from flare_core.errors import CheckpointError
from flare_spec.dspark.config import MarkovKind
from flare_spec.dspark.weights import load_block_draft

DIRECTORY = Path(flare_spec.__file__).parent / "drafters_data" / "smollm2-135m-instruct"
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
CPU = torch.device("cpu")


def test_the_shipped_drafter_loads_for_its_target() -> None:
    draft = load_block_draft(DIRECTORY, parse_config(TARGET), dtype=torch.float32, device=CPU)
    assert draft.config.gamma == 5
    assert draft.config.markov is MarkovKind.VANILLA
    assert draft.markov is not None
    assert draft.markov.w2.abs().max() > 0.1  # trained: it begins as zeros


def test_the_shipped_drafter_has_at_most_15_mib() -> None:
    assert sum(path.stat().st_size for path in DIRECTORY.iterdir()) <= 15 << 20


def test_the_shipped_drafter_is_refused_for_another_target() -> None:
    with pytest.raises(CheckpointError, match="target"):
        load_block_draft(DIRECTORY, parse_config(TARGET | {"num_hidden_layers": 28}), dtype=torch.float32, device=CPU)
