"""The drafter's layers against a naive drafter that recomputes everything, with full masks and nothing cached."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file

from flare_core.compute.model_config import parse_config
from flare_core.errors import FlareError
from flare_spec.dspark.block_sampling import top_candidates
from flare_spec.dspark.draft import DraftNoise, draft_block
from flare_spec.dspark.testing import flat_draft_config, make_draft_checkpoint
from flare_spec.dspark.weights import load_block_draft

CPU = torch.device("cpu")
TARGET = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
)
TAPS = 3


def loaded(tmp_path, *, dtype=torch.float32, **changes):
    """A random drafter and its tensors as they are on disk."""
    directory = make_draft_checkpoint(tmp_path / "draft", TARGET, flat_draft_config(TARGET, **changes))
    draft = load_block_draft(directory, TARGET, dtype=dtype, device=CPU)
    return draft, load_file(directory / "model.safetensors")


def taps_of(num_positions, seed=3):
    return torch.randn(num_positions, TAPS * 48, generator=torch.Generator().manual_seed(seed))


def context_of(draft, taps):
    store = draft.backbone.new_context()
    draft.backbone.extend(store, draft.backbone.context_rows(taps))
    return store


def rms(rows, weight, epsilon=1e-6):
    return rows / torch.sqrt(rows.square().mean(-1, keepdim=True) + epsilon) * weight


def turned(heads, positions, theta=10000.0):
    """Rotation of halves, [N, heads, D], written out."""
    dim = heads.shape[-1]
    angles = torch.tensor(
        [[position / theta ** (2 * pair / dim) for pair in range(dim // 2)] for position in positions]
    )
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    low, high = heads[..., : dim // 2], heads[..., dim // 2 :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def naive_rows(tensors, taps, blocks, *, num_slots, mask_token_id):
    """Normed rows [blocks, slots, hidden] for (start, anchor token) ``blocks``, all in one masked sequence.

    Keys are the context of all positions, then every block's own slots; a slot sees the context before its block's
    start and its own block, nothing else.
    """
    count = len(taps)
    positions = [start + slot for start, _ in blocks for slot in range(num_slots)]
    ids = [token if slot == 0 else mask_token_id for _, token in blocks for slot in range(num_slots)]
    owner = [index for index in range(len(blocks)) for _ in range(num_slots)]
    visible = torch.tensor(
        [
            [key < blocks[block][0] if key < count else owner[key - count] == block for key in range(count + len(ids))]
            for block in owner
        ]
    )
    context = rms(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    rows = tensors["embed_tokens.weight"][ids]
    for layer in range(2):
        get = {name: tensors[f"layers.{layer}.{name}.weight"] for name in LAYER_NAMES}
        normed = rms(rows, get["input_layernorm"])
        both = torch.cat([context, normed])
        query = rms((normed @ get["self_attn.q_proj"].T).view(-1, 4, 16), get["self_attn.q_norm"])
        key = rms((both @ get["self_attn.k_proj"].T).view(-1, 2, 16), get["self_attn.k_norm"])
        value = (both @ get["self_attn.v_proj"].T).view(-1, 2, 16)
        query, key = turned(query, positions), turned(key, [*range(count), *positions])
        heads = []
        for head in range(4):
            scores = query[:, head] @ key[:, head // 2].T / math.sqrt(16)
            heads.append(scores.masked_fill(~visible, -math.inf).softmax(-1) @ value[:, head // 2])
        rows = rows + torch.cat(heads, dim=-1) @ get["self_attn.o_proj"].T
        normed = rms(rows, get["post_attention_layernorm"])
        gate, up = normed @ get["mlp.gate_proj"].T, normed @ get["mlp.up_proj"].T
        rows = rows + (gate * gate.sigmoid() * up) @ get["mlp.down_proj"].T
    return rms(rows, tensors["norm.weight"]).view(len(blocks), num_slots, -1)


LAYER_NAMES = (
    "input_layernorm", "post_attention_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip


@pytest.mark.parametrize("anchor_predicts", [True, False])
def test_row_j_of_a_block_is_that_of_the_slot_which_predicts_start_plus_j_plus_one(tmp_path, anchor_predicts):
    draft, tensors = loaded(tmp_path, sample_from_anchor=anchor_predicts, block_size=5 if anchor_predicts else 6)
    taps = taps_of(70)
    blocks = [(0, 17), (1, 5), (33, 250), (70, 8)]
    contexts = [context_of(draft, taps[:start]) for start, _ in blocks]
    ids = draft.backbone.block_ids(torch.tensor([token for _, token in blocks]))
    assert ids.tolist() == [[token] + [299] * (draft.config.num_slots - 1) for _, token in blocks]
    rows = draft.backbone.hidden(tensors["embed_tokens.weight"][ids], contexts)
    naive = naive_rows(tensors, taps, blocks, num_slots=draft.config.num_slots, mask_token_id=299)
    # A DSpark slot at start + j predicts start + j + 1; a DFlash slot at start + j + 1 predicts itself.
    expected = naive if anchor_predicts else naive[:, 1:]
    assert rows.shape == expected.shape == (4, 5, 48)
    torch.testing.assert_close(rows, expected, atol=2e-5, rtol=1e-4)
    shifted = naive_rows(
        tensors, taps, [(2, 5)], num_slots=draft.config.num_slots, mask_token_id=299
    )  # the test would see a block one position off
    assert (rows[1] - shifted[0][-5:]).abs().max() > 1e-2


def test_context_in_pieces_or_cut_and_extended_again_equals_context_at_once(tmp_path):
    draft, tensors = loaded(tmp_path)
    taps = taps_of(150)
    whole = context_of(draft, taps)
    pieces = draft.backbone.new_context()
    for part in (taps[:1], taps[1:64], taps[64:65], taps[65:150]):
        draft.backbone.extend(pieces, draft.backbone.context_rows(part))
    draft.backbone.extend(pieces, draft.backbone.context_rows(taps_of(9, seed=4)))
    embedded = tensors["embed_tokens.weight"][draft.backbone.block_ids(torch.tensor([7]))]
    draft.backbone.hidden(embedded, [pieces])  # a block leaves nothing behind
    pieces.truncate(100)
    draft.backbone.extend(pieces, draft.backbone.context_rows(taps[100:]))
    assert (whole.first, whole.stop, pieces.stop) == (0, 150, 150)
    torch.testing.assert_close(pieces.key_value(0, 150), whole.key_value(0, 150), atol=1e-5, rtol=1e-5)
    recomputed = draft.backbone.key_value(draft.backbone.context_rows(taps), torch.arange(150.0))
    assert torch.equal(whole.key_value(0, 150), recomputed.permute(0, 2, 3, 1, 4))
    one, other = (draft.backbone.hidden(embedded, [store]) for store in (whole, pieces))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_a_batch_of_different_contexts_equals_each_alone_and_twice_the_same(tmp_path):
    draft, tensors = loaded(tmp_path)
    taps = taps_of(90)
    contexts = [context_of(draft, taps[:length]) for length in (90, 0, 13)]
    embedded = tensors["embed_tokens.weight"][draft.backbone.block_ids(torch.tensor([3, 4, 5]))]
    together = draft.backbone.hidden(embedded, contexts)
    assert torch.equal(together, draft.backbone.hidden(embedded, contexts))
    for index, store in enumerate(contexts):
        alone = draft.backbone.hidden(embedded[index : index + 1], [store])
        torch.testing.assert_close(together[index : index + 1], alone, atol=1e-5, rtol=1e-4)


def test_a_context_that_begins_late_hides_what_lies_before_it(tmp_path):
    draft, tensors = loaded(tmp_path)
    taps = taps_of(40)
    late = draft.backbone.new_context(first=25)
    draft.backbone.extend(late, draft.backbone.context_rows(taps[25:]))
    assert (late.first, late.stop) == (25, 40)
    whole = context_of(draft, taps)
    torch.testing.assert_close(late.key_value(25, 40), whole.key_value(25, 40), atol=1e-5, rtol=1e-5)
    embedded = tensors["embed_tokens.weight"][draft.backbone.block_ids(torch.tensor([7]))]
    assert not torch.allclose(draft.backbone.hidden(embedded, [late]), draft.backbone.hidden(embedded, [whole]))
    late.truncate(25)
    with pytest.raises(FlareError, match="25 to 25 cannot be cut at 24"):
        late.truncate(24)


def test_projections_with_biases_are_computed_with_them(tmp_path):
    draft, tensors = loaded(tmp_path, attention_bias=True)
    for layer in range(2):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            assert tensors[f"layers.{layer}.self_attn.{name}.bias"].abs().max() > 0
    taps = taps_of(1)
    bias = tensors["layers.1.self_attn.v_proj.bias"]
    rows = rms(taps @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    value = rows @ tensors["layers.1.self_attn.v_proj.weight"].T + bias
    torch.testing.assert_close(context_of(draft, taps).key_value(0, 1)[1, 1].flatten(), value[0], atol=1e-5, rtol=1e-5)


def test_bfloat16_layers_draft_nearly_the_same_rows(tmp_path):
    draft, tensors = loaded(tmp_path)
    narrow, _ = loaded(tmp_path, dtype=torch.bfloat16)
    taps = taps_of(30)
    embedded = tensors["embed_tokens.weight"][draft.backbone.block_ids(torch.tensor([7]))]
    exact = draft.backbone.hidden(embedded, [context_of(draft, taps)])
    rounded = narrow.backbone.hidden(embedded.bfloat16(), [context_of(narrow, taps.bfloat16())])
    assert rounded.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(exact, rounded.float(), dim=-1).min() > 0.998


def test_a_drafted_block_is_sampled_at_the_positions_its_slots_predict(tmp_path):
    from flare_core.compute.philox import STREAM_DRAFT, gumbel

    draft, tensors = loaded(tmp_path, markov_rank=0, markov_head_type=None, confidence_head_with_markov=False)
    taps = taps_of(33)
    context = context_of(draft, taps)
    head = tensors["lm_head.weight"]
    seeds = torch.tensor([11])
    drafted = draft_block(
        draft,
        [context],
        torch.tensor([250]),
        num_tokens=5,
        noise=DraftNoise(torch.tensor([0.7]), seeds),
        embed=lambda ids: tensors["embed_tokens.weight"][ids],
        base_scores=lambda rows: ((rows @ head.T).bfloat16(), None),
    )
    rows = naive_rows(tensors, taps, [(33, 250)], num_slots=5, mask_token_id=299)[0]
    for slot in range(5):
        noise = gumbel(seeds, torch.tensor([33 + slot + 1]), torch.arange(300), stream=STREAM_DRAFT)
        score = (rows[slot] @ head.T).bfloat16().float() / 0.7 + noise
        assert drafted.sampled.tokens[0, slot] == score.argmax()
    expected = torch.sigmoid(rows @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"])
    torch.testing.assert_close(drafted.confidences[0], expected, atol=1e-4, rtol=1e-4)
    assert context.stop == 33


def test_the_confidence_head_reads_the_markov_embedding_of_the_token_before(tmp_path):
    draft, tensors = loaded(tmp_path)
    taps = taps_of(12)
    drafted = draft_block(
        draft,
        [context_of(draft, taps)],
        torch.tensor([250]),
        num_tokens=5,
        noise=DraftNoise(torch.tensor([0.0]), torch.tensor([0])),
        embed=lambda ids: tensors["embed_tokens.weight"][ids],
        base_scores=lambda rows: ((rows @ tensors["lm_head.weight"].T).bfloat16(), None),
    )
    before = [250, *drafted.sampled.tokens[0, :-1].tolist()]
    rows = naive_rows(tensors, taps, [(12, 250)], num_slots=5, mask_token_id=299)[0]
    read = torch.cat([rows, tensors["markov_head.markov_w1.weight"][before].bfloat16().float()], dim=-1)
    expected = torch.sigmoid(read @ tensors["confidence_head.proj.weight"][0] + tensors["confidence_head.proj.bias"])
    torch.testing.assert_close(drafted.confidences[0], expected, atol=1e-4, rtol=1e-4)


def test_fewer_tokens_are_the_first_of_a_whole_block(tmp_path):
    draft, tensors = loaded(tmp_path)
    context = context_of(draft, taps_of(12))

    def drafted(num_tokens):
        return draft_block(
            draft,
            [context],
            torch.tensor([250]),
            num_tokens=num_tokens,
            noise=DraftNoise(torch.tensor([1.0]), torch.tensor([4])),
            embed=lambda ids: tensors["embed_tokens.weight"][ids],
            base_scores=lambda rows: top_candidates((rows @ tensors["lm_head.weight"].T).bfloat16(), 16),
        )

    whole, part = drafted(5), drafted(2)
    assert part.sampled.tokens.tolist() == whole.sampled.tokens[:, :2].tolist()
    assert part.confidences.shape == (1, 2)
    assert part.ids.shape == (1, 2, 16)
