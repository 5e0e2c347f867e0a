"""What a block drafter is, read from its ``config.json`` and held against its target. Pure: loads no torch.

Every value that would load and silently draft nonsense is refused here with its key, its value and a remedy: a block
drafter whose slots are read one off, whose taps are one layer off or whose noise token means something else accepts
about 1.1 tokens a round without any error.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from flare_core.compute.model_config import ModelConfig, parse_config
from flare_core.errors import CheckpointError, UnsupportedModel, UsageError
from flare_spec.dspark.dialects import Dialect, DraftKeys, Given, split_keys

__all__ = ["Confidence", "DraftConfig", "MarkovKind", "drafted_tokens", "parse_draft_config"]

CONFIDENCE_WEIGHT: Final = "confidence_head.proj.weight"


class MarkovKind(enum.StrEnum):
    """How the previous token's embedding becomes a bias on the next token's logits."""

    NONE = "none"
    VANILLA = "vanilla"
    GATED = "gated"
    RNN = "rnn"


class Confidence(enum.StrEnum):
    """What the confidence head reads: nothing (no head), the slot's hidden row, or that and the Markov embedding."""

    NONE = "none"
    HIDDEN = "hidden"
    HIDDEN_AND_MARKOV = "hidden-and-markov"


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One block drafter for one target.

    Attributes:
        dialect: how it was written.
        decoder: the drafter's own layers; its hidden size and vocabulary are the target's.
        gamma: tokens a block drafts, as trained.
        anchor_predicts: slot j predicts position start + j + 1, and a block has gamma slots (DSpark); otherwise slot
            j predicts start + j, slot 0 nothing, and a block has gamma + 1 slots (DFlash).
        mask_token_id: what stands in all slots but the first, which holds the anchor.
        taps: target layers whose outputs are the context, increasing; -1 is the embedding's output.
        markov, markov_rank: the Markov head; rank 0 without one.
        confidence: the confidence head.
    """

    dialect: Dialect
    decoder: ModelConfig
    gamma: int
    anchor_predicts: bool
    mask_token_id: int
    taps: tuple[int, ...]
    markov: MarkovKind
    markov_rank: int
    confidence: Confidence

    @property
    def num_slots(self) -> int:
        """Input tokens of a block: the anchor and masks."""
        return self.gamma if self.anchor_predicts else self.gamma + 1

    @property
    def confidence_width(self) -> int:
        """Features that the confidence head reads, 0 without one."""
        if self.confidence is Confidence.NONE:
            return 0
        with_markov = self.confidence is Confidence.HIDDEN_AND_MARKOV
        return self.decoder.hidden_size + (self.markov_rank if with_markov else 0)


_ANCHOR_PREDICTS: Final[Mapping[str, bool]] = {
    "Qwen3DSparkModel": True,
    "DSparkDraftModel": True,
    "DFlashDraftModel": False,
    # Versions of speculators that know ``sample_from_anchor`` write it; the others trained gamma + 1 slots.
    "DSparkSpeculator": False,
    "DFlashSpeculator": False,
}
"""Supported architectures, and whether their first slot predicts where ``sample_from_anchor`` does not say."""

_FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "causal": (False,),
    "is_causal": (False,),
    "shift_label": (False,),
    "projector_type": ("dflash", "dspark"),
}


def parse_draft_config(
    raw: Mapping[str, Any], target: ModelConfig, *, origin: str = "config.json", tensor_names: Collection[str] = ()
) -> DraftConfig:
    """The drafter that ``raw`` describes, for ``target``; ``origin`` names the file in messages.

    ``tensor_names`` are the checkpoint's: the bundled dialect says by them alone whether there is a confidence head.

    Raises:
        UnsupportedModel: something that flare does not implement, named.
        CheckpointError: a value that is missing, contradictory, or belongs to another target, named with a remedy.
    """
    keys = split_keys(raw, origin)
    if keys.architecture not in _ANCHOR_PREDICTS:
        known = ", ".join(_ANCHOR_PREDICTS)
        raise UnsupportedModel(f"{origin}: architecture {keys.architecture} is no supported drafter; use {known}")
    for name, allowed in _FIXED.items():
        given = keys.values.get(name)
        if given is not None and given.value not in allowed:
            raise UnsupportedModel(f"{origin}: {given.key} = {given.value!r} is not supported; only {allowed} is")
    decoder = parse_config({**keys.decoder, "architectures": ["Qwen3ForCausalLM"]}, origin)
    reader = _Reader(keys, origin)
    _check_target(reader, decoder, target)
    rank, kind = _markov(reader)
    anchor_predicts = _anchor_predicts(reader, rank)
    block_size = reader.integer("block_size", at_least=1 if anchor_predicts else 2)
    return DraftConfig(
        dialect=keys.dialect,
        decoder=decoder,
        gamma=block_size if anchor_predicts else block_size - 1,
        anchor_predicts=anchor_predicts,
        mask_token_id=_mask_token_id(reader, target),
        taps=_taps(reader, target),
        markov=kind,
        markov_rank=rank,
        confidence=_confidence(reader, rank, tensor_names),
    )


def drafted_tokens(config: DraftConfig, asked: int | None) -> int:
    """Tokens to draft a round: ``asked``, or all that were trained.

    Fewer are taken from a whole block, so that each slot sees the block it was trained in.

    Raises:
        UsageError: more than were trained, or none.
    """
    if asked is None:
        return config.gamma
    if not 1 <= asked <= config.gamma:
        raise UsageError(
            f"num_speculative_tokens {asked} is not within 1 and {config.gamma}, the tokens that the drafter was "
            f"trained to draft; further slots are untrained"
        )
    return asked


@dataclass(frozen=True, slots=True)
class _Reader:
    keys: DraftKeys
    origin: str

    def get(self, name: str) -> Given | None:
        return self.keys.values.get(name)

    def need(self, name: str, remedy: str) -> Given:
        given = self.get(name)
        if given is None:
            raise CheckpointError(f"{self.origin}: {self.keys.written(name)} is missing; {remedy}")
        return given

    def integer(self, name: str, *, at_least: int) -> int:
        given = self.need(name, "take it from the configuration that the drafter was trained with")
        if not isinstance(given.value, int) or isinstance(given.value, bool) or given.value < at_least:
            raise CheckpointError(
                f"{self.origin}: {given.key} must be an integer of at least {at_least}, not {given.value!r}"
            )
        return given.value

    def flag(self, given: Given) -> bool:
        if not isinstance(given.value, bool):
            raise CheckpointError(f"{self.origin}: {given.key} must be true or false, not {given.value!r}")
        return given.value


def _check_target(reader: _Reader, decoder: ModelConfig, target: ModelConfig) -> None:
    """The drafter borrows the target's embedding and head, so both must speak of the same rows and ids."""
    for name, own, other in (
        ("hidden_size", decoder.hidden_size, target.hidden_size),
        ("vocab_size", decoder.vocab_size, target.vocab_size),
    ):
        if own != other:
            raise CheckpointError(
                f"{reader.origin}: {name} {own} is not the target's {other}; the drafter was made for another target"
            )
    for name, expected, remedy in (
        ("num_target_layers", target.num_layers, "the drafter was made for another target"),
        ("target_hidden_size", target.hidden_size, "a drafter narrower or wider than its target is not supported"),
        ("draft_vocab_size", target.vocab_size, "a reduced vocabulary (d2t) is not supported; train with the full one"),
    ):
        given = reader.get(name)
        if given is not None and given.value != expected:
            raise CheckpointError(
                f"{reader.origin}: {given.key} {given.value!r} is not the target's {expected}; {remedy}"
            )


def _markov(reader: _Reader) -> tuple[int, MarkovKind]:
    is_dflash = reader.keys.architecture.startswith("DFlash")
    if reader.get("markov_rank") is None and is_dflash:
        return 0, MarkovKind.NONE
    rank = reader.integer("markov_rank", at_least=0)
    if rank == 0:
        return 0, MarkovKind.NONE
    if reader.keys.dialect is Dialect.BUNDLED and reader.get("markov_head_type") is None:
        return rank, MarkovKind.VANILLA
    given = reader.need("markov_head_type", f"with markov_rank = {rank} it must say vanilla, gated or rnn")
    if given.value not in {MarkovKind.VANILLA, MarkovKind.GATED, MarkovKind.RNN}:
        raise UnsupportedModel(
            f"{reader.origin}: {given.key} = {given.value!r} is not known; use vanilla, gated or rnn"
        )
    return rank, MarkovKind(given.value)


def _anchor_predicts(reader: _Reader, rank: int) -> bool:
    given = reader.get("sample_from_anchor")
    if given is not None:
        return reader.flag(given)
    architecture = reader.keys.architecture
    if architecture == "DFlashDraftModel" and rank:
        raise CheckpointError(
            f"{reader.origin}: {architecture} with markov_rank = {rank} does not say which position a slot predicts; "
            f"set sample_from_anchor to true (slot j predicts start + j + 1) or false (start + j)"
        )
    return _ANCHOR_PREDICTS[architecture]


def _mask_token_id(reader: _Reader, target: ModelConfig) -> int:
    mask = reader.integer("mask_token_id", at_least=0)
    if mask >= target.vocab_size:
        key = reader.need("mask_token_id", "").key
        raise CheckpointError(
            f"{reader.origin}: {key} {mask} is not below the vocabulary's {target.vocab_size}; "
            f"use the id that the drafter was trained with"
        )
    return mask


def _taps(reader: _Reader, target: ModelConfig) -> tuple[int, ...]:
    # Ids of speculators count inputs of layers: one more than the layer whose output it is.
    is_shifted = reader.keys.dialect is Dialect.SPECULATORS and reader.get("target_layer_ids") is None
    name = "aux_hidden_state_layer_ids" if is_shifted else "target_layer_ids"
    given = reader.need(name, "name the target layers whose outputs the drafter reads")
    ids = given.value
    if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
        raise CheckpointError(f"{reader.origin}: {given.key} must be a list of layer numbers, not {ids!r}")
    taps = tuple(each - 1 if is_shifted else each for each in ids)
    if any(one >= two for one, two in itertools.pairwise(taps)):
        raise CheckpointError(f"{reader.origin}: {given.key} {ids} must increase; its order is that of fc's columns")
    last = target.num_layers - 1
    first_id, last_id = (0, last) if is_shifted else (-1, last - 1)
    if taps[0] < -1 or taps[-1] >= last:
        raise CheckpointError(
            f"{reader.origin}: {given.key} {ids} must lie within {first_id} and {last_id} for a target of "
            f"{target.num_layers} layers; the last layer's output cannot be tapped"
        )
    return taps


def _confidence(reader: _Reader, rank: int, tensor_names: Collection[str]) -> Confidence:
    if reader.keys.dialect is Dialect.BUNDLED:
        if CONFIDENCE_WEIGHT not in tensor_names:
            return Confidence.NONE
        return Confidence.HIDDEN_AND_MARKOV if rank else Confidence.HIDDEN
    enabled = reader.get("enable_confidence_head")
    if enabled is None or not reader.flag(enabled):
        return Confidence.NONE
    with_markov = reader.need(
        "confidence_head_with_markov", "say whether the confidence head reads the Markov embedding"
    )
    if not reader.flag(with_markov):
        return Confidence.HIDDEN
    if not rank:
        raise CheckpointError(
            f"{reader.origin}: {with_markov.key} = true needs a Markov head, but markov_rank is 0; set it to false"
        )
    return Confidence.HIDDEN_AND_MARKOV
