"""Random draft checkpoints with published names, shapes and configurations, for tests and demonstrations.

Importing this loads no torch; making a checkpoint needs ``torch`` and ``safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flare_core.compute.model_config import ModelConfig
from flare_spec.dspark.config import parse_draft_config
from flare_spec.dspark.tensor_table import ALIASED, draft_tensors

__all__ = ["flat_draft_config", "make_draft_checkpoint"]


def flat_draft_config(target: ModelConfig, **overrides: Any) -> dict[str, Any]:
    """``config.json`` of a small DSpark drafter for ``target`` as DeepSpec writes it; None drops a key."""
    values: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_position,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
        "num_target_layers": target.num_layers,
        "block_size": 5,
        "mask_token_id": target.vocab_size - 1,
        "target_layer_ids": list(range(target.num_layers - 1)),
        "num_anchors": 512,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dtype": "float32",
    }
    return {key: value for key, value in (values | overrides).items() if value is not None}


def make_draft_checkpoint(
    directory: Path, target: ModelConfig, raw: Mapping[str, Any], *, seed: int = 0, dtype: str = "float32"
) -> Path:
    """Write a random drafter for ``target`` with the configuration ``raw`` to ``directory``, with copies of aliases.

    Norms and biases are random too, so that leaving one out shows. The same arguments give the same weights.
    """
    import torch
    from safetensors.torch import save_file

    config = parse_draft_config(raw, target, tensor_names=("confidence_head.proj.weight",))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    shapes = dict(draft_tensors(config)) | dict.fromkeys(ALIASED, (target.vocab_size, target.hidden_size))
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        scale = 0.1 if len(shape) == 1 else shape[-1] ** -0.5
        centre = 1.0 if "norm" in name else 0.0
        tensors[name] = (centre + scale * values).to(getattr(torch, dtype))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(raw), indent=2))
    return directory
