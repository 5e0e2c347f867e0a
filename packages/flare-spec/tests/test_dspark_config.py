"""Draft configurations: the dialects say the same, and what would load and draft nonsense is refused by its name."""

from __future__ import annotations

import pytest

from flare_core.compute.model_config import parse_config
from flare_core.errors import CheckpointError, UnsupportedModel, UsageError
from flare_spec.dspark.config import Confidence, MarkovKind, drafted_tokens, parse_draft_config
from flare_spec.dspark.dialects import Dialect
from flare_spec.dspark.tensor_table import draft_tensors, is_aliased, optional_tensors
from flare_spec.dspark.testing import flat_draft_config

TARGET = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
)
PUBLISHED = {
    "num_hidden_layers": 5,
    "layer_types": ["full_attention"] * 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "markov_rank": 256,
}
DRAFTING = (
    "block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov",
)  # fmt: skip
BOOKKEEPING = ("num_target_layers", "num_anchors")


def flat(**changes):
    return flat_draft_config(TARGET, **(PUBLISHED | changes))


def decoder_keys(**changes):
    return {key: value for key, value in flat(**changes).items() if key not in DRAFTING + BOOKKEEPING}


def bundled(**changes):
    own = {
        "dspark_block_size": 7,
        "dspark_noise_token_id": 151669,
        "dspark_target_layer_ids": [1, 9, 17, 25, 33],
        "dspark_markov_rank": 256,
    }
    values = decoder_keys() | own | changes
    return {key: value for key, value in values.items() if value is not None}


def nested(**changes):
    """As z-lab writes a DFlash drafter; changes of None drop a key of the section."""
    section = {"block_size": 16, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]} | changes
    kept = {key: value for key, value in section.items() if value is not None}
    return decoder_keys(architectures=["DFlashDraftModel"]) | {"dflash_config": kept, "num_target_layers": 36}


def speculators(**changes):
    values = {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "speculators_version": "0.7.0",
        "speculators_config": {"algorithm": "dspark"},
        "transformer_layer_config": decoder_keys(architectures=None),
        "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
        "block_size": 8,
        "mask_token_id": 151669,
        "draft_vocab_size": 151936,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "dtype": "bfloat16",
    } | changes
    return {key: value for key, value in values.items() if value is not None}


def parse(raw, **options):
    return parse_draft_config(raw, TARGET, **options)


def test_the_published_configuration_is_read():
    config = parse(flat())
    assert (config.gamma, config.num_slots, config.anchor_predicts) == (7, 7, True)
    assert (config.mask_token_id, config.taps) == (151669, (1, 9, 17, 25, 33))
    assert (config.markov, config.markov_rank) == (MarkovKind.VANILLA, 256)
    assert (config.confidence, config.confidence_width) == (Confidence.HIDDEN_AND_MARKOV, 2816)
    assert (config.decoder.num_layers, config.decoder.qk_norm, config.dialect) == (5, True, Dialect.FLAT)


def test_tensors_have_the_published_names_and_shapes():
    shapes = draft_tensors(parse(flat()))
    assert shapes["fc.weight"] == (2560, 12800)
    assert shapes["markov_head.markov_w1.weight"] == shapes["markov_head.markov_w2.weight"] == (151936, 256)
    assert shapes["confidence_head.proj.weight"] == (1, 2816)
    assert shapes["layers.4.self_attn.k_norm.weight"] == (128,)
    assert len(shapes) == 3 + 5 * 11 + 2 + 2
    assert "embed_tokens.weight" not in shapes
    assert all(map(is_aliased, ("embed_tokens.weight", "lm_head.weight", "rotary_emb.inv_freq")))
    gated, rnn = (draft_tensors(parse(flat(markov_head_type=kind))) for kind in ("gated", "rnn"))
    assert gated["markov_head.gate_proj.weight"] == (256, 2816)
    assert rnn["markov_head.joint_proj.weight"] == (768, 3072)


def test_the_bundled_dialect_says_the_same_and_takes_its_heads_from_defaults_and_tensors():
    with_head = parse(bundled(), tensor_names=("confidence_head.proj.weight",))
    expected = parse(flat())
    assert with_head.dialect is Dialect.BUNDLED
    for field in ("decoder", "gamma", "anchor_predicts", "mask_token_id", "taps", "markov", "confidence"):
        assert getattr(with_head, field) == getattr(expected, field)
    assert optional_tensors(with_head) == {"confidence_head.proj.bias"}
    assert parse(bundled()).confidence is Confidence.NONE


def test_a_dflash_block_holds_one_slot_more_than_it_drafts():
    config = parse(nested())
    assert (config.gamma, config.num_slots, config.anchor_predicts) == (15, 16, False)
    assert (config.markov, config.confidence, config.dialect) == (MarkovKind.NONE, Confidence.NONE, Dialect.NESTED)
    top_level = nested(block_size=None) | {"block_size": 16}
    assert parse(top_level) == config


def test_speculators_count_taps_from_one_and_slots_from_the_anchor():
    config = parse(speculators())
    assert config.taps == parse(flat()).taps
    assert (config.gamma, config.num_slots, config.anchor_predicts) == (7, 8, False)
    shifted = parse(speculators(sample_from_anchor=True, block_size=7))
    assert (shifted.gamma, shifted.num_slots, shifted.anchor_predicts) == (7, 7, True)
    assert parse(speculators(sample_from_anchor=False)) == config


def test_a_rank_of_zero_is_no_markov_head():
    config = parse(flat(markov_rank=0, markov_head_type=None, confidence_head_with_markov=False))
    assert (config.markov, config.markov_rank) == (MarkovKind.NONE, 0)
    assert (config.confidence, config.confidence_width) == (Confidence.HIDDEN, 2560)
    assert parse(flat(enable_confidence_head=False)).confidence_width == 0


def test_the_embedding_may_be_tapped():
    assert parse(flat(target_layer_ids=[-1, 34])).taps == (-1, 34)


@pytest.mark.parametrize(
    ("raw", "error", "named"),
    [
        (flat(mask_token_id=151936), CheckpointError, "mask_token_id 151936 is not below the vocabulary's 151936"),
        (flat(mask_token_id=None), CheckpointError, "mask_token_id is missing"),
        (bundled(dspark_noise_token_id=None), CheckpointError, "dspark_noise_token_id is missing"),
        (bundled(dspark_noise_token_id=151936), CheckpointError, "dspark_noise_token_id 151936"),
        (flat(target_layer_ids=[1, 35]), CheckpointError, "within -1 and 34 .* last layer's output"),
        (flat(target_layer_ids=[-2, 3]), CheckpointError, "within -1 and 34"),
        (speculators(aux_hidden_state_layer_ids=[2, 36]), CheckpointError, "aux_hidden.* within 0 and 35"),
        (flat(target_layer_ids=[9, 1]), CheckpointError, "must increase"),
        (flat(target_layer_ids=[9, 9]), CheckpointError, "must increase"),
        (flat(target_layer_ids=[]), CheckpointError, "target_layer_ids must be a list of layer numbers"),
        (flat(target_layer_ids=[True]), CheckpointError, "target_layer_ids must be a list of layer numbers"),
        (flat(target_layer_ids=None), CheckpointError, "target_layer_ids is missing"),
        (flat(markov_head_type=None), CheckpointError, "markov_head_type is missing; with markov_rank = 256"),
        (flat(markov_head_type="fir"), UnsupportedModel, "markov_head_type = 'fir'"),
        (flat(markov_rank=None), CheckpointError, "markov_rank is missing"),
        (flat(markov_rank=-1), CheckpointError, "markov_rank must be an integer of at least 0, not -1"),
        (flat(confidence_head_with_markov=None), CheckpointError, "confidence_head_with_markov is missing"),
        (flat(markov_rank=0), CheckpointError, "confidence_head_with_markov = true needs a Markov head"),
        (flat(enable_confidence_head="yes"), CheckpointError, "enable_confidence_head must be true or false"),
        (flat(block_size=0), CheckpointError, "block_size must be an integer of at least 1, not 0"),
        (nested(block_size=1), CheckpointError, "block_size must be an integer of at least 2, not 1"),
        (flat(hidden_size=2048), CheckpointError, "hidden_size 2048 is not the target's 2560"),
        (flat(vocab_size=151669), CheckpointError, "vocab_size 151669 is not the target's 151936"),
        (flat(num_target_layers=28), CheckpointError, "num_target_layers 28 is not the target's 36"),
        (speculators(draft_vocab_size=32000), CheckpointError, "draft_vocab_size 32000 .* reduced vocabulary"),
        (speculators(target_hidden_size=4096), CheckpointError, "target_hidden_size 4096"),
        (flat(architectures=["Gemma4DSparkModel"]), UnsupportedModel, "Gemma4DSparkModel is not supported: its norms"),
        (bundled(architectures=["DeepseekV4ForCausalLM"]), UnsupportedModel, "DeepseekV4ForCausalLM .*mHC.* MoE"),
        (bundled(hc_mult=4), UnsupportedModel, "hc_mult = 4"),
        (bundled(dspark_n_routed_experts=128), UnsupportedModel, "dspark_n_routed_experts = 128"),
        (bundled(dspark_draft_topk=16), UnsupportedModel, "dspark_draft_topk = 16"),
        (flat(architectures=["LlamaForCausalLM"]), UnsupportedModel, "LlamaForCausalLM is no supported drafter"),
        (flat(architectures=None), UnsupportedModel, "architectures must name one drafter"),
        (nested() | {"architectures": ["DFlash2DraftModel"]}, UnsupportedModel, "DFlash2DraftModel .* convolutions"),
        (nested(conv_kernel_size=2), UnsupportedModel, "dflash_config.conv_kernel_size = 2 belongs to DFlash2"),
        (nested(use_swa=True), UnsupportedModel, "dflash_config.use_swa = True"),
        (nested(causal=True), UnsupportedModel, "dflash_config.causal = True"),
        (nested(projector_type="domino"), UnsupportedModel, "projector_type = 'domino'"),
        (nested(markov_rank=8, markov_head_type="vanilla"), CheckpointError, "set sample_from_anchor to true"),
        (nested() | {"dflash_config": [1]}, CheckpointError, "dflash_config must be an object"),
        (nested() | {"mask_token_id": 7}, CheckpointError, "mask_token_id = 7 contradicts dflash_config.mask_token_id"),
        (nested() | {"block_size": 8}, CheckpointError, "contradicts"),
        (speculators(speculators_model_type="eagle3"), UnsupportedModel, "'eagle3' is no block drafter"),
        (speculators(shift_label=True), UnsupportedModel, "shift_label = True"),
        (speculators(norm_before_residual=True), UnsupportedModel, "norm_before_residual = True"),
        (speculators(transformer_layer_config=None), CheckpointError, "must be a positive integer, not None"),
        (flat(layer_types=["sliding_attention"]), UnsupportedModel, "sliding_attention"),
        (flat(quantization_config={"quant_method": "fp8"}), UnsupportedModel, "quantization_config"),
        (flat(attention_conv=True), UnsupportedModel, "attention_conv = True"),
    ],
)
def test_what_would_draft_nonsense_is_refused_by_key_and_value(raw, error, named):
    with pytest.raises(error, match=rf"draft.json: .*{named}"):
        parse(raw, origin="draft.json")


def test_more_tokens_than_were_trained_are_refused():
    config = parse(flat())
    assert (drafted_tokens(config, None), drafted_tokens(config, 3), drafted_tokens(config, 7)) == (7, 3, 7)
    for asked in (0, 8):
        with pytest.raises(UsageError, match=f"num_speculative_tokens {asked} .* 7"):
            drafted_tokens(config, asked)
