"""A drafter as it is trained: parameters under their published names, and a pass over many blocks with gradients.

Computes what :mod:`flare_spec.dspark.backbone` does, for all anchors of a sequence at once and without writing in
place. Knows no loss and no optimiser.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name everyone knows
from safetensors.torch import load_file, save_file

from flare_core.compute.layers import Projection
from flare_core.compute.model_config import ModelConfig
from flare_core.compute.rotary import inverse_frequencies
from flare_spec.dspark.confidence import ConfidenceHead, confidence_logits
from flare_spec.dspark.config import Confidence, DraftConfig, MarkovKind, parse_draft_config
from flare_spec.dspark.markov import MarkovHead
from flare_spec.dspark.tensor_table import draft_tensors
from flare_spec.dspark.training_data import Blocks

__all__ = ["Trainee", "new_trainee", "read_trainee", "save_trainee"]


@dataclass(frozen=True, slots=True)
class Trainee:
    """``parameters`` by published name, float32, with gradients; the embedding and the head are not among them."""

    config: DraftConfig
    parameters: Mapping[str, torch.Tensor]

    def rows(self, taps: torch.Tensor, blocks: Blocks, embedding: torch.Tensor) -> torch.Tensor:
        """Normed rows [B, A, gamma, hidden] of all blocks; row k is for label k.

        ``taps`` [B, T, taps * hidden]; ``embedding`` [vocabulary, hidden] is the target's. A block sees the positions
        before its anchor and itself.
        """
        config = self.config
        slots = torch.arange(config.num_slots, device=taps.device)
        context = self._norm(F.linear(taps, self.parameters["fc.weight"]), "hidden_norm.weight")
        places = torch.arange(taps.shape[1], device=taps.device)
        is_hidden = places >= blocks.anchors.unsqueeze(2)
        ids = torch.where(slots == 0, blocks.previous[:, :, :1], config.mask_token_id)
        rows = F.embedding(ids, embedding)
        own_rotation = self._rotation(blocks.anchors.unsqueeze(2) + slots)
        context_rotation = self._rotation(places)
        for layer in range(config.decoder.num_layers):
            prefix = f"layers.{layer}."
            normed = self._norm(rows, prefix + "input_layernorm.weight")
            query = self._heads(normed, prefix, "q", own_rotation)
            own = self._heads(normed, prefix, "k", own_rotation), self._heads(normed, prefix, "v")
            past = self._heads(context, prefix, "k", context_rotation), self._heads(context, prefix, "v")
            rows = rows + self._linear(_attend(query, own, past, is_hidden), prefix + "self_attn.o_proj")
            normed = self._norm(rows, prefix + "post_attention_layernorm.weight")
            gate, up = (self._linear(normed, f"{prefix}mlp.{name}_proj") for name in ("gate", "up"))
            rows = rows + self._linear(F.silu(gate) * up, prefix + "mlp.down_proj")
        return self._norm(rows[:, :, config.num_slots - config.gamma :], "norm.weight")

    def markov(self, rows: torch.Tensor, blocks: Blocks) -> tuple[torch.Tensor, torch.Tensor]:
        """Operands of w2 and Markov embeddings, [B, A, gamma, rank], given the true tokens before; rank 0 without."""
        config = self.config
        if config.markov is MarkovKind.NONE:
            nothing = rows.new_empty(*rows.shape[:3], 0)
            return nothing, nothing
        mixer = {MarkovKind.GATED: "gate_proj", MarkovKind.RNN: "joint_proj"}.get(config.markov)
        head = MarkovHead(
            config.markov,
            self.parameters["markov_head.markov_w1.weight"],
            self.parameters["markov_head.markov_w2.weight"],
            None if mixer is None else self._projection(f"markov_head.{mixer}"),
        )
        flat_rows, previous = rows.flatten(0, 1), blocks.previous.flatten(0, 1)
        state = head.first_state(len(previous))
        operands, embeddings = [], []
        for slot in range(config.gamma):
            step = head.step(previous[:, slot], flat_rows[:, slot], state)
            state = step.state
            operands.append(step.operand)
            embeddings.append(step.embedding)
        shape = (*rows.shape[:3], config.markov_rank)
        return torch.stack(operands, dim=1).view(shape), torch.stack(embeddings, dim=1).view(shape)

    def confidence_logits(self, rows: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor | None:
        """[B, A, gamma] float32, or None without a confidence head."""
        if self.config.confidence is Confidence.NONE:
            return None
        reads_markov = self.config.confidence is Confidence.HIDDEN_AND_MARKOV
        head = ConfidenceHead(self._projection("confidence_head.proj"), reads_markov)
        return confidence_logits(head, rows, embeddings)

    def _projection(self, name: str) -> Projection:
        return Projection(self.parameters[name + ".weight"], self.parameters.get(name + ".bias"))

    def _linear(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(rows, self.parameters[name + ".weight"], self.parameters.get(name + ".bias"))

    def _norm(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.parameters[name]
        return F.rms_norm(rows.float(), weight.shape, weight, self.config.decoder.rms_norm_eps)

    def _rotation(self, positions: torch.Tensor) -> torch.Tensor:
        """[..., 2, 1, D / 2], cosine and sine of ``positions`` [...]."""
        inverse, factor = inverse_frequencies(self.config.decoder.rope, self.config.decoder.head_dim)
        angles = positions.float().unsqueeze(-1) * inverse.to(positions.device)
        return torch.stack([angles.cos(), angles.sin()], dim=-2).unsqueeze(-2) * factor

    def _heads(self, rows: torch.Tensor, prefix: str, kind: str, rotation: torch.Tensor | None = None) -> torch.Tensor:
        """[..., heads, D]: projected, and normed and rotated by halves where there is a rotation."""
        heads = self._linear(rows, f"{prefix}self_attn.{kind}_proj")
        heads = heads.view(*heads.shape[:-1], -1, self.config.decoder.head_dim)
        if rotation is None:
            return heads
        low, high = self._norm(heads, f"{prefix}self_attn.{kind}_norm.weight").chunk(2, dim=-1)
        cos, sin = rotation.unbind(-3)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _attend(
    query: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    past: tuple[torch.Tensor, torch.Tensor],
    is_hidden: torch.Tensor,
) -> torch.Tensor:
    """[B, A, S, query heads * D]: one softmax over the context, less what ``is_hidden`` [B, A, T], and the own block.

    ``query`` [B, A, S, query heads, D]; keys and values [B, A, S, KV heads, D] of blocks and [B, T, KV heads, D] of the
    context.
    """
    num_kv, dim = own[0].shape[-2:]
    grouped = query.unflatten(-2, (num_kv, -1)) * dim**-0.5  # type: ignore[no-untyped-call]
    to_past = torch.einsum("bashgd,bthd->bashgt", grouped, past[0])
    to_past = to_past.masked_fill(is_hidden[:, :, None, None, None], -torch.inf)
    to_own = torch.einsum("bashgd,bakhd->bashgk", grouped, own[0])
    weights = torch.cat([to_past, to_own], dim=-1).softmax(dim=-1)
    length = to_past.shape[-1]
    output = torch.einsum("bashgt,bthd->bashgd", weights[..., :length], past[1])
    output = output + torch.einsum("bashgk,bakhd->bashgd", weights[..., length:], own[1])
    return output.flatten(3)


def new_trainee(config: DraftConfig, generator: torch.Generator, *, device: torch.device) -> Trainee:
    """A drafter to train: norms of one, biases and w2 of zero (no bias on any token yet), the rest normal by fan-in.

    But w1, which is looked up and not multiplied, is normal with a deviation of one.
    """
    parameters = {}
    for name, shape in draft_tensors(config).items():
        if "norm" in name:
            values = torch.ones(shape)
        elif len(shape) == 1 or name == "markov_head.markov_w2.weight":
            values = torch.zeros(shape)
        else:
            scale = 1.0 if name == "markov_head.markov_w1.weight" else shape[-1] ** -0.5
            values = torch.randn(shape, generator=generator) * scale
        parameters[name] = values.to(device).requires_grad_()
    return Trainee(config, parameters)


def read_trainee(directory: Path, target: ModelConfig, *, device: torch.device) -> Trainee:
    """What :func:`save_trainee` wrote, in float32 and without gradients; blocks on the disk.

    For a directory that :func:`flare_spec.dspark.weights.load_block_draft` has read, and so checked, before.
    """
    raw = json.loads((directory / "config.json").read_bytes())
    config = parse_draft_config(raw, target, origin=str(directory / "config.json"))
    tensors = load_file(directory / "model.safetensors")
    return Trainee(config, {name: tensors[name].to(device, torch.float32) for name in draft_tensors(config)})


def save_trainee(trainee: Trainee, directory: Path, raw: Mapping[str, Any], *, dtype: torch.dtype) -> None:
    """Write a checkpoint of one safetensors file, with ``raw``, which the trainee's config was read from."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to(device="cpu", dtype=dtype).contiguous() for name, value in trainee.parameters.items()
    }
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dict(raw), indent=2))
