"""Reads a block drafter's checkpoint: a directory with ``config.json`` and safetensors, under their published names.

Every rank holds the whole drafter: its layers are few, and all ranks must draft the same from the same bytes. The
embedding and the head are the target's own. Layers take the form of :mod:`flare_core.compute.layers`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flare_core.compute.checkpoint import directory_files, open_file
from flare_core.compute.layers import LayerWeights, Projection, RmsNorm
from flare_core.compute.model_config import ModelConfig
from flare_core.compute.rotary import Rotary, interleave
from flare_core.errors import CheckpointError
from flare_spec.dspark.backbone import Backbone
from flare_spec.dspark.confidence import ConfidenceHead
from flare_spec.dspark.config import Confidence, DraftConfig, MarkovKind, parse_draft_config
from flare_spec.dspark.markov import MarkovHead
from flare_spec.dspark.tensor_table import ALIASED, draft_tensors, is_aliased, optional_tensors

__all__ = ["BlockDraft", "draft_from_tensors", "load_block_draft"]

_FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """A block drafter, ready. ``markov`` and ``confidence`` are None where the drafter has no such head."""

    config: DraftConfig
    backbone: Backbone
    markov: MarkovHead | None
    confidence: ConfidenceHead | None


def load_block_draft(directory: Path, target: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> BlockDraft:
    """Read the drafter in ``directory`` for ``target``: layers in ``dtype``, the Markov head rounded to bfloat16.

    Blocks on the disk.

    Raises:
        CheckpointError: a missing, surplus or misshapen tensor, or a configuration for another target.
        UnsupportedModel: a drafter that flare does not implement.
    """
    files = directory_files(directory)
    config = parse_draft_config(
        _read_config(directory), target, origin=str(directory / "config.json"), tensor_names=files
    )
    _check_names(directory, config, files)
    opened: dict[Path, Any] = {}
    for name in ALIASED:
        if name in files:
            expected = (target.vocab_size, target.hidden_size)
            _check_shape(files[name], name, tuple(open_file(files[name], opened).get_slice(name).get_shape()), expected)
    tensors = {
        name: _read(files[name], name, shape, opened) for name, shape in draft_tensors(config).items() if name in files
    }
    return draft_from_tensors(config, tensors, dtype=dtype, device=device)


def draft_from_tensors(
    config: DraftConfig, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device
) -> BlockDraft:
    """The drafter of ``tensors``, named and shaped as :func:`draft_tensors` says, of any float dtype."""
    decoder = config.decoder

    def get(name: str) -> torch.Tensor:
        return tensors[name].to(device=device, dtype=dtype)

    def norm(name: str) -> RmsNorm:
        return RmsNorm.create(get(name), decoder.rms_norm_eps)

    backbone = Backbone(
        config=config,
        rotary=Rotary.create(decoder.rope, decoder.head_dim, device),
        fuse=Projection(get("fc.weight")),
        context_norm=norm("hidden_norm.weight"),
        layers=tuple(_layer(config, get, norm, f"layers.{index}.") for index in range(decoder.num_layers)),
        final_norm=norm("norm.weight"),
    )
    return BlockDraft(config, backbone, _markov(config, tensors, device), _confidence(config, tensors, device))


def _read_config(directory: Path) -> Mapping[str, Any]:
    path = directory / "config.json"
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; give the directory of a draft checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _check_names(directory: Path, config: DraftConfig, files: Mapping[str, Path]) -> None:
    expected = draft_tensors(config)
    missing = [name for name in expected if name not in files and name not in optional_tensors(config)]
    if missing:
        raise CheckpointError(
            f"{directory} has no tensor {missing[0]} ({len(missing)} missing); config.json asks for it"
        )
    surplus = sorted(name for name in files if name not in expected and not is_aliased(name))
    if surplus:
        remedy = {"d2t": "a reduced vocabulary is not supported", "t2d": "a reduced vocabulary is not supported"}.get(
            surplus[0], "config.json knows nothing of it, so that ignoring it would change what is drafted"
        )
        raise CheckpointError(f"{directory} has a tensor {surplus[0]} ({len(surplus)} such); {remedy}")


def _check_shape(path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"{path}: tensor {name} has shape {found}, not {expected}")


def _read(path: Path, name: str, shape: tuple[int, ...], opened: dict[Path, Any]) -> torch.Tensor:
    view = open_file(path, opened).get_slice(name)
    _check_shape(path, name, tuple(view.get_shape()), shape)
    if view.get_dtype() not in _FLOATS:
        raise CheckpointError(f"{path}: tensor {name} holds {view.get_dtype()}; only F32, BF16 and F16 do")
    return view[...]  # type: ignore[no-any-return]


def _layer(
    config: DraftConfig, get: Callable[[str], torch.Tensor], norm: Callable[[str], RmsNorm], prefix: str
) -> LayerWeights:
    decoder = config.decoder
    dim = decoder.head_dim

    def stacked(part: str, names: Sequence[str], kind: str) -> torch.Tensor:
        rows = [get(f"{prefix}{part}.{name}.{kind}") for name in names]
        return torch.cat(
            [
                interleave(each, dim) if name in {"q_proj", "k_proj"} else each
                for name, each in zip(names, rows, strict=True)
            ]
        )

    qkv = ("q_proj", "k_proj", "v_proj")
    query, key = (interleave(get(f"{prefix}self_attn.{name}_norm.weight"), dim) for name in ("q", "k"))
    head_norm = torch.stack([query] * decoder.num_heads + [key] * decoder.num_kv_heads)
    return LayerWeights(
        attention_norm=norm(prefix + "input_layernorm.weight"),
        qkv=Projection(
            stacked("self_attn", qkv, "weight"), stacked("self_attn", qkv, "bias") if decoder.qkv_bias else None
        ),
        head_norm=RmsNorm.create(head_norm, decoder.rms_norm_eps),
        output=Projection(
            get(prefix + "self_attn.o_proj.weight"), get(prefix + "self_attn.o_proj.bias") if decoder.o_bias else None
        ),
        mlp_norm=norm(prefix + "post_attention_layernorm.weight"),
        gate_up=Projection(stacked("mlp", ("gate_proj", "up_proj"), "weight")),
        down=Projection(get(prefix + "mlp.down_proj.weight")),
    )


def _markov(config: DraftConfig, tensors: Mapping[str, torch.Tensor], device: torch.device) -> MarkovHead | None:
    if config.markov is MarkovKind.NONE:
        return None

    def rounded(name: str) -> torch.Tensor:
        # bfloat16 values; on the CPU they are kept widened, because every product of a block would widen them again.
        values = tensors[f"markov_head.{name}.weight"].to(device=device, dtype=torch.bfloat16)
        return values.float() if device.type == "cpu" else values

    mixer = {MarkovKind.GATED: "gate_proj", MarkovKind.RNN: "joint_proj"}.get(config.markov)
    return MarkovHead(
        kind=config.markov,
        w1=rounded("markov_w1"),
        w2=rounded("markov_w2"),
        mixer=None if mixer is None else _float_projection(tensors, f"markov_head.{mixer}", device),
    )


def _confidence(
    config: DraftConfig, tensors: Mapping[str, torch.Tensor], device: torch.device
) -> ConfidenceHead | None:
    if config.confidence is Confidence.NONE:
        return None
    return ConfidenceHead(
        projection=_float_projection(tensors, "confidence_head.proj", device),
        reads_markov=config.confidence is Confidence.HIDDEN_AND_MARKOV,
    )


def _float_projection(tensors: Mapping[str, torch.Tensor], prefix: str, device: torch.device) -> Projection:
    """Small heads are computed in float32 whatever the layers are computed in."""
    bias = tensors.get(prefix + ".bias")
    weight = tensors[prefix + ".weight"].to(device=device, dtype=torch.float32)
    return Projection(weight, None if bias is None else bias.to(device=device, dtype=torch.float32))
