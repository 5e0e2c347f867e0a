"""From answers to a drafter on a tiny target: the padded pass, interrupted runs, and acceptance that adds up."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch.nn.functional import embedding, linear

from flare_core.compute.attention import BatchRow
from flare_core.compute.attention_cpu import CpuAttention
from flare_core.compute.loading import LoadedRunner, load_runner
from flare_core.errors import CheckpointError
from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_spec.dspark.train import TrainSettings
from flare_spec.dspark.training_model import read_trainee
from flare_spec.dspark.weights import load_block_draft
from flare_spec.training import run as run_module
from flare_spec.training.acceptance import expected_acceptance, greedy_acceptance
from flare_spec.training.answers import Question, answer
from flare_spec.training.conversations import Conversation, add_conversations, padded, read_conversations
from flare_spec.training.run import DraftShape, default_taps, draft_config, train_draft, unused_token
from flare_spec.training.target_pass import target_outputs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedRunner:
    torch.set_num_threads(1)
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    return load_runner(model, page_tokens=16, num_pages=64, max_sequences=4, max_model_len=64)


@pytest.fixture(scope="module")
def conversations(loaded) -> list[Conversation]:
    questions = {at: Question(tuple(range(3 + at, 9 + 2 * at)), 0.0, seed=at) for at in range(8)}
    return [each for _, each in sorted(answer(loaded, questions, max_tokens=16, max_sequences=4))]


def test_answers_begin_with_their_prompts_and_depend_on_nothing_beside_them(loaded, conversations):
    assert [each.num_prompt_tokens for each in conversations] == [6 + at for at in range(8)]
    alone = dict(answer(loaded, {5: Question(tuple(range(8, 19)), 0.0, seed=5)}, max_tokens=16, max_sequences=1))
    assert alone[5] == conversations[5]


def test_the_padded_pass_gives_the_rows_that_the_engine_computes(loaded, conversations):
    model = loaded.runner.model
    tokens, _ = padded(conversations)
    tapped, rows = target_outputs(model, (-1, 0), tokens)
    attention = CpuAttention(loaded.memory)
    for index in (0, 7):
        ids = torch.tensor(conversations[index].tokens)
        plan = attention.chunk(list(range(8)), 0, len(ids))
        hidden = model.hidden(ids, torch.arange(len(ids)).float(), plan)
        logits = linear(rows[index, : len(ids)], model.head.weight)
        torch.testing.assert_close(logits, model.local_logits(hidden), atol=1e-4, rtol=1e-4)
        one = attention.batch([BatchRow(list(range(8)), len(ids) - 1)])
        last = model.hidden(ids[-1:], torch.tensor([len(ids) - 1.0]), one)
        torch.testing.assert_close(logits[-1:], model.local_logits(last), atol=1e-4, rtol=1e-4)
        width = model.config.hidden_size
        torch.testing.assert_close(tapped[index, : len(ids), :width], embedding(ids, model.embedding))
    first = dataclasses.replace(model, layers=model.layers[:1])
    shallow = first.hidden(
        torch.tensor(conversations[0].tokens),
        torch.arange(len(conversations[0].tokens)).float(),
        attention.chunk(list(range(8)), 0, len(conversations[0].tokens)),
    )
    torch.testing.assert_close(tapped[0, : len(shallow), width:], shallow, atol=1e-5, rtol=1e-4)


def shape_of(loaded, conversations, **changes):
    config = loaded.config
    values = {
        "taps": default_taps(config.num_layers, 1), "gamma": 3, "num_layers": 1, "markov_rank": 4,
        "mask_token_id": unused_token(conversations, config.vocab_size),
    }  # fmt: skip
    return draft_config(config, DraftShape(**(values | changes)))


def trained(loaded, conversations, directory: Path, *, num_steps=6, stop_after=None, reports=None):
    """Train; with ``stop_after`` as if the machine went off after that step had been saved."""
    seen = []

    def report(step, _):
        seen.append(step)
        if step - 1 == stop_after:
            raise KeyboardInterrupt

    train_draft(
        loaded.runner.model, conversations, directory, shape_of(loaded, conversations),
        settings=TrainSettings(num_steps=num_steps, num_anchors=4, peak_rate=5e-3), batch_size=3, report=report,
        clock=itertools.count(0, 100).__next__,
    )  # fmt: skip
    return seen


def test_an_interrupted_run_goes_on_and_ends_as_one_that_was_not(loaded, conversations, tmp_path):
    assert trained(loaded, conversations, tmp_path / "whole") == [0, 1, 2, 3, 4, 5]
    with pytest.raises(KeyboardInterrupt):
        trained(loaded, conversations, tmp_path / "parts", stop_after=2)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert trained(loaded, conversations, tmp_path / "parts") == [3, 4, 5]
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts


def test_the_state_of_a_run_with_other_settings_or_a_damaged_one_is_refused(loaded, conversations, tmp_path):
    trained(loaded, conversations, tmp_path)
    with pytest.raises(CheckpointError, match="other settings"):
        trained(loaded, conversations, tmp_path, num_steps=7)
    (tmp_path / run_module.STATE).write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="remove it"):
        trained(loaded, conversations, tmp_path)


def test_a_trained_drafter_accepts_and_expectation_and_rounds_add_up(loaded, conversations, tmp_path):
    trained(loaded, conversations, tmp_path, num_steps=30)
    model = loaded.runner.model
    draft = load_block_draft(tmp_path, loaded.config, dtype=torch.float32, device=CPU)
    for result, each in zip(greedy_acceptance(model, draft, conversations), conversations, strict=True):
        # Every round yields its length, and all of them the answer after its first token.
        assert result.num_rounds * result.length == pytest.approx(len(each.tokens) - each.num_prompt_tokens - 1)
        assert result.reached[0] == result.num_rounds
        assert all(one >= two for one, two in zip(result.reached, result.accepted, strict=True))
    trainee = read_trainee(tmp_path, loaded.config, device=CPU)
    expected = expected_acceptance(model, trainee, conversations[0], temperature=1.0, num_anchors=8)
    assert expected is not None
    assert expected.length == pytest.approx(1 + sum(expected.accepted) / expected.num_rounds, rel=1e-5)
    other = expected_acceptance(model, trainee, conversations[0], temperature=1.0, num_anchors=8, use_markov=False)
    assert other is not None
    assert other.length != expected.length


def test_conversations_come_back_from_their_files_and_a_damaged_one_is_named(conversations, tmp_path):
    add_conversations(tmp_path, {3: conversations[3], 1: conversations[1]})
    add_conversations(tmp_path, {2: conversations[2]})
    assert read_conversations(tmp_path) == {number: conversations[number] for number in (1, 2, 3)}
    (tmp_path / "0000009.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"0000009\.safetensors"):
        read_conversations(tmp_path)
