"""Sampling through the runner: counts kept over steps, seeds, min_tokens, world sizes."""

from __future__ import annotations

import pytest

from flare_core.sampling import SamplingParams


def sampled(driver, prompt, num_tokens=10, **fields):
    params = SamplingParams(**({"max_tokens": 32} | fields))
    return [token.token_id for token in driver.complete(prompt, num_tokens, params)]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.7}, {"frequency_penalty": 1.5, "top_k": 30}])
def test_a_seed_gives_one_text_at_every_world_size(fields, checkpoint, on_ranks, prompt):
    texts = [
        text
        for world_size in (1, 2, 4)
        for text in on_ranks(checkpoint("llama"), world_size, lambda driver: sampled(driver, prompt, seed=11, **fields))
    ]
    assert all(text == texts[0] for text in texts)


def test_seeds_give_different_texts(checkpoint, load, prompt):
    driver = load(checkpoint("llama"))
    texts = {tuple(sampled(load(checkpoint("llama")), prompt, seed=seed, temperature=2.0)) for seed in range(4)}
    assert len(texts) == 4
    assert driver.loaded.runner is not None


def test_a_strong_frequency_penalty_forbids_repetition(checkpoint, load, prompt):
    text = sampled(load(checkpoint("llama")), prompt, 20, temperature=0.0, frequency_penalty=1000.0)
    assert len(set(text)) == 20


def test_repetition_penalty_counts_the_prompt_and_presence_penalty_does_not(checkpoint, load, prompt):
    plain = sampled(load(checkpoint("llama")), prompt, 1, temperature=0.0)
    seen = [*prompt, plain[0], *prompt[:3]]
    unpenalised = sampled(load(checkpoint("llama")), seen, 1, temperature=0.0)
    presence = sampled(load(checkpoint("llama")), seen, 1, temperature=0.0, presence_penalty=1000.0)
    assert presence == unpenalised
    repeated = sampled(load(checkpoint("llama")), [*prompt, *unpenalised], 1, temperature=0.0, repetition_penalty=1e6)
    assert repeated[0] not in {*prompt, *unpenalised}


def test_min_tokens_forbids_stop_ids_until_enough_tokens_are_out(checkpoint, load, prompt):
    bias = ((3, 1000.0),)
    text = sampled(
        load(checkpoint("llama")), prompt, 6, temperature=0.0, logit_bias=bias, min_tokens=4, stop_token_ids=(3,)
    )
    assert 3 not in text[:4]
    assert text[4:] == [3, 3]


def test_a_preempted_sequence_keeps_its_counts_and_its_noise(checkpoint, load, prompt):
    fields = {"seed": 5, "temperature": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.3}
    whole = sampled(load(checkpoint("qwen3")), prompt, 8, **fields)
    driver = load(checkpoint("qwen3"))
    params = SamplingParams(max_tokens=32, **fields)
    tokens = [driver.start(2, [*prompt, *whole[:3]], params, num_prompt=len(prompt)).token_id]
    while len(tokens) < 5:
        tokens.append(driver.decode({2: len(prompt) + 3 + len(tokens) - 1})[2].token_id)
    assert tokens == whole[3:]


def test_logprobs_come_only_for_those_who_asked(checkpoint, load, prompt):
    driver = load(checkpoint("llama"))
    driver.start(0, prompt, SamplingParams(max_tokens=4, temperature=0.0))
    driver.start(1, prompt, SamplingParams(max_tokens=4, temperature=0.0, logprobs=0))
    tokens = driver.decode({0: len(prompt), 1: len(prompt)})
    assert tokens[0].logprobs is None
    assert tokens[1].logprobs.token_id == tokens[1].token_id
    assert tokens[1].logprobs.top == ()
