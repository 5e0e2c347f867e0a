"""Training: the same rows as the loaded drafter, the published loss, and acceptance that rises, most with Markov.

The target is a language of bigrams: what follows depends on the token before alone. Its first draft token can be
foreseen from the context exactly; the later ones only by a drafter that knows what it drafted before.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flare_core.compute.model_config import parse_config
from flare_spec.dspark.config import parse_draft_config
from flare_spec.dspark.draft import DraftNoise, draft_block
from flare_spec.dspark.testing import flat_draft_config, make_draft_checkpoint
from flare_spec.dspark.train import TrainSettings, learning_rate, train
from flare_spec.dspark.training_data import TrainingBatch, make_blocks, sample_anchors
from flare_spec.dspark.training_loss import LossWeights, draft_loss
from flare_spec.dspark.training_model import Trainee, new_trainee, save_trainee
from flare_spec.dspark.weights import load_block_draft

CPU = torch.device("cpu")
VOCAB, HIDDEN, GAMMA = 24, 32, 4
TARGET = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
)


class Bigrams:
    """The target: ``rows[t] @ head.T`` are the logits of what follows token t, most of it on a few ids.

    A ``cycle`` counts through the ids with hardly an exception.
    """

    def __init__(self, *, is_cycle=False):
        generator = torch.Generator().manual_seed(8)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.next_rows = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.45
        if is_cycle:
            self.next_rows[: VOCAB - 1] = self.head[: VOCAB - 1].roll(-1, dims=0) / 2
        self.mixing = torch.randn(2 * HIDDEN, 2 * HIDDEN, generator=generator) / 8
        self.probabilities = (self.next_rows @ self.head.T).softmax(dim=-1)

    def taps(self, tokens):
        return torch.cat([self.embedding[tokens], self.next_rows[tokens]], dim=-1) @ self.mixing

    def text(self, count, length, generator):
        """Sampled sequences [count, length]; the last id is the mask and is never drawn."""
        tokens = [torch.randint(VOCAB - 1, (count,), generator=generator)]
        for _ in range(length - 1):
            weights = self.probabilities[tokens[-1]].index_fill(1, torch.tensor([VOCAB - 1]), 0.0)
            tokens.append(torch.multinomial(weights, 1, generator=generator).squeeze(1))
        return torch.stack(tokens, dim=1)

    def batch(self, tokens):
        is_answer = torch.ones_like(tokens, dtype=torch.bool)
        return TrainingBatch(tokens, is_answer, self.taps(tokens), self.next_rows[tokens])


def raw_config(**changes):
    return flat_draft_config(TARGET, **({"block_size": GAMMA, "num_hidden_layers": 1, "layer_types": None} | changes))


def random_trainee(tmp_path, raw):
    """A random drafter, loaded for drafting and as a trainee of the same numbers."""
    from safetensors.torch import load_file

    directory = make_draft_checkpoint(tmp_path, TARGET, raw)
    tensors = load_file(directory / "model.safetensors")
    config = parse_draft_config(raw, TARGET)
    parameters = {
        name: value for name, value in tensors.items() if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    return load_block_draft(directory, TARGET, dtype=torch.float32, device=CPU), Trainee(config, parameters)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"sample_from_anchor": False}, {"attention_bias": True}])
def test_a_trainee_computes_the_rows_that_the_loaded_drafter_drafts_from(tmp_path, changes):
    target = Bigrams()
    draft, trainee = random_trainee(tmp_path, raw_config(**changes))
    batch = target.batch(target.text(2, 40, torch.Generator().manual_seed(1)))
    anchors = torch.tensor([[0, 7, 30], [1, 2, 35]])
    blocks = make_blocks(batch, anchors, torch.ones(2, 3, dtype=torch.bool), draft.config.gamma)
    trained = trainee.rows(batch.taps, blocks, target.embedding)
    for sequence in range(2):
        for index in range(3):
            start = int(anchors[sequence, index])
            context = draft.backbone.new_context()
            draft.backbone.extend(context, draft.backbone.context_rows(batch.taps[sequence, :start]))
            ids = draft.backbone.block_ids(batch.tokens[sequence, start : start + 1])
            rows = draft.backbone.hidden(target.embedding[ids], [context])
            torch.testing.assert_close(trained[sequence, index], rows[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_loss_is_the_published_sum_over_the_learned_labels(tmp_path, kind):
    target = Bigrams()
    _, trainee = random_trainee(tmp_path, raw_config(markov_head_type=kind))
    batch = target.batch(target.text(2, 12, torch.Generator().manual_seed(1)))
    batch.is_answer[1, 6] = False
    blocks = make_blocks(batch, torch.tensor([[2, 9], [4, 0]]), torch.tensor([[True, True], [True, False]]), GAMMA)
    assert blocks.is_learned.sum(dim=2).tolist() == [[4, 2], [1, 0]]
    weights = LossWeights()
    report = draft_loss(trainee, batch, blocks, embedding=target.embedding, head=target.head, weights=weights)
    rows = trainee.rows(batch.taps, blocks, target.embedding)
    operands, embeddings = trainee.markov(rows, blocks)
    confidence = trainee.confidence_logits(rows, embeddings)
    sums, lengths, total_weight = [0.0, 0.0, 0.0], [], 0.0
    for sequence, index in ((0, 0), (0, 1), (1, 0)):
        reached, length = 1.0, 1.0
        for slot in range(int(blocks.is_learned[sequence, index].sum())):
            position = int(blocks.anchors[sequence, index]) + slot
            bias = operands[sequence, index, slot] @ trainee.parameters["markov_head.markov_w2.weight"].T
            draft = (rows[sequence, index, slot] @ target.head.T + bias).softmax(dim=0)
            distance = (draft - target.probabilities[batch.tokens[sequence, position]]).abs().sum().item()
            label = batch.tokens[sequence, position + 1]
            weight, sure = math.exp(-slot / 4.0), torch.sigmoid(confidence[sequence, index, slot]).item()
            accepted = 1 - distance / 2
            sums[0] -= weight * math.log(draft[label])
            sums[1] += weight * distance
            sums[2] -= weight * (accepted * math.log(sure) + (1 - accepted) * math.log(1 - sure))
            total_weight += weight
            reached *= accepted
            length += reached
        lengths.append(length)
    means = [value / total_weight for value in sums]
    assert [report.cross_entropy, report.distance, report.confidence] == pytest.approx(means, rel=1e-4)
    assert report.total.item() == pytest.approx(0.1 * means[0] + 0.9 * means[1] + 1.0 * means[2], rel=1e-4)
    assert report.length == pytest.approx(sum(lengths) / 3, rel=1e-4)


def test_anchors_are_drawn_without_repetition_where_an_answer_goes_on():
    is_answer = torch.zeros(3, 30, dtype=torch.bool)
    is_answer[0, 5:15] = True
    is_answer[1, [3, 7, 8, 29]] = True
    seen: set[int] = set()
    for seed in range(50):
        anchors, is_anchor = sample_anchors(is_answer, 4, torch.Generator().manual_seed(seed))
        assert is_anchor.sum(dim=1).tolist() == [4, 1, 0]
        chosen = anchors[0].tolist()
        assert chosen == sorted(set(chosen))
        seen.update(chosen)
        assert anchors[1, is_anchor[1]].tolist() == [7]
    assert seen == set(range(5, 14))
    many, is_anchor = sample_anchors(is_answer, 64, torch.Generator())
    assert many.shape == (3, 64)
    assert many[0, is_anchor[0]].tolist() == list(range(5, 14))


def test_the_rate_rises_then_falls_to_nothing():
    settings = TrainSettings(num_steps=100)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4])
    assert rates[4] == 6e-4
    assert all(one >= two for one, two in itertools.pairwise(rates[4:]))
    assert rates[-1] < 1e-6


def trained(raw, target, *, num_steps=250):
    """A drafter trained on a few sequences, and its reports."""
    generator = torch.Generator().manual_seed(2)
    batch = target.batch(target.text(8, 64, generator))
    trainee = new_trainee(parse_draft_config(raw, TARGET), generator, device=CPU)
    reports = []
    train(
        trainee,
        (batch for _ in range(num_steps)),
        embedding=target.embedding,
        head=target.head,
        settings=TrainSettings(num_steps=num_steps, num_anchors=16, peak_rate=5e-3),
        report=lambda _, each: reports.append(each),
    )
    assert len(reports) == num_steps
    return trainee, reports


def mean_length(reports):
    return sum(each.length for each in reports) / len(reports)


def accepted_tokens(draft, target, *, num_rounds):
    """Mean tokens a round (the bonus included) when drafting after new text and accepting by min(1, p / q)."""
    generator = torch.Generator().manual_seed(99)
    tokens = target.text(num_rounds, 20, generator)
    contexts = []
    for row in tokens:
        context = draft.backbone.new_context()
        draft.backbone.extend(context, draft.backbone.context_rows(target.taps(row[:-1])))
        contexts.append(context)
    drafted = draft_block(
        draft,
        contexts,
        tokens[:, -1],
        num_tokens=draft.config.gamma,
        noise=DraftNoise(torch.ones(num_rounds), torch.arange(num_rounds)),
        embed=lambda ids: target.embedding[ids],
        base_scores=lambda rows: ((rows @ target.head.T).bfloat16(), None),
    )
    proposal = drafted.sampled.scores.float().softmax(dim=-1)
    total = 0
    for row in range(num_rounds):
        before = tokens[row, -1]
        total += 1
        for slot in range(GAMMA):
            token = drafted.sampled.tokens[row, slot]
            ratio = target.probabilities[before, token] / proposal[row, slot, token]
            if torch.rand((), generator=generator) >= ratio:
                break
            total += 1
            before = token
    return total / num_rounds, drafted.confidences


def test_a_drafter_learns_its_target_and_with_a_markov_head_more_of_it(tmp_path):
    raw, target = raw_config(), Bigrams()
    trainee, reports = trained(raw, target)
    before, after = mean_length(reports[:10]), mean_length(reports[-10:])
    assert before < 2.0
    assert after > 3.3
    last = reports[-1]
    assert min(last.acceptance) > 0.7
    _, without = trained(raw_config(markov_rank=0, confidence_head_with_markov=False), target)
    assert mean_length(without[-10:]) + 0.5 < after

    save_trainee(trainee, tmp_path, raw, dtype=torch.bfloat16)
    draft = load_block_draft(tmp_path, TARGET, dtype=torch.float32, device=CPU)
    observed, confidence = accepted_tokens(draft, target, num_rounds=400)  # on text that was not trained on
    assert observed > 3.0
    assert confidence[:, 0].mean().item() == pytest.approx(last.acceptance[0], abs=0.15)


def test_slots_read_by_the_other_convention_are_one_position_off(tmp_path):
    target, heads = Bigrams(is_cycle=True), {"markov_rank": 0, "enable_confidence_head": False}
    by_anchor = raw_config(**heads)
    by_mask = raw_config(**heads, sample_from_anchor=False, block_size=GAMMA + 1)
    for raw, other in ((by_anchor, by_mask), (by_mask, by_anchor)):
        trainee, _ = trained(raw, target, num_steps=100)
        lengths = []
        for written in (raw, other):
            save_trainee(trainee, tmp_path, written, dtype=torch.float32)
            draft = load_block_draft(tmp_path, TARGET, dtype=torch.float32, device=CPU)
            lengths.append(accepted_tokens(draft, target, num_rounds=100)[0])
        assert lengths[0] > 4.5
        assert lengths[1] < 1.5
