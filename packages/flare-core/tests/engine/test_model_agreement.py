"""The engine's tokens and log-probabilities against transformers on tiny random checkpoints."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

NUM_TOKENS = 8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
    "rope_theta": 10000.0,
}

MODELS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}}),
    "llama-stored-bf16": ("llama", {"dtype": "bfloat16", "attention_bias": True}),
    "qwen3-tied-stored-bf16": ("qwen3", {"dtype": "bfloat16", "tie_word_embeddings": True}),
    "llama-empty-shares": ("llama", {"vocab_size": 1500, "intermediate_size": 100}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-biases": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-yarn-mscale": ("qwen3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}}),
    "qwen3-yarn-factor": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
    "qwen3-two-kv-heads": ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
}


@pytest.fixture(scope="session")
def reference(checkpoint):
    """(model name, prompt) to transformers' greedy tokens and log-softmax rows."""
    known = {}

    def run(name: str, token_ids: list[int]):
        key = (name, tuple(token_ids))
        if key not in known:
            family, overrides = MODELS[name]
            model = AutoModelForCausalLM.from_pretrained(checkpoint(family, **overrides), dtype=torch.float32)
            output = model.generate(
                torch.tensor([token_ids]),
                max_new_tokens=NUM_TOKENS,
                min_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                output_logits=True,
                return_dict_in_generate=True,
            )
            logprobs = torch.log_softmax(torch.cat(output.logits), dim=-1)
            known[key] = output.sequences[0, len(token_ids) :].tolist(), logprobs
        return known[key]

    return run


def assert_agrees(tokens, expected):
    token_ids, logprobs = expected
    assert [token.token_id for token in tokens] == token_ids
    for token, row in zip(tokens, logprobs, strict=True):
        assert token.logprobs.logprob == pytest.approx(row[token.token_id].item(), abs=1e-4)
        assert token.logprobs.rank == 1
        for token_id, value in token.logprobs.top:
            assert value == pytest.approx(row[token_id].item(), abs=1e-4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", list(MODELS))
def test_greedy_tokens_and_logprobs_equal_transformers_at_every_world_size(
    name, world_size, checkpoint, on_ranks, reference, prompt
):
    family, overrides = MODELS[name]
    token_ids = [token % 1400 for token in prompt]
    results = on_ranks(
        checkpoint(family, **overrides), world_size, lambda driver: driver.complete(token_ids, NUM_TOKENS)
    )
    assert_agrees(results[0], reference(name, token_ids))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunked_prefill_gives_the_tokens_of_whole_prefill(chunk, checkpoint, load, reference, prompt):
    token_ids = [token % 1400 for token in prompt]
    tokens = load(checkpoint("qwen3")).complete(token_ids, NUM_TOKENS, chunk=chunk)
    assert_agrees(tokens, reference("qwen3", token_ids))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_batch_gives_each_sequence_the_tokens_it_gets_alone(world_size, checkpoint, on_ranks, reference, prompt):
    prompts = [[token % 1400 for token in prompt[start:stop]] for start, stop in ((0, 70), (3, 20), (10, 11), (5, 38))]

    def body(driver):
        outputs = {slot: [driver.start(slot, ids)] for slot, ids in enumerate(prompts)}
        for _ in range(NUM_TOKENS - 1):
            positions = {slot: len(prompts[slot]) + len(outputs[slot]) - 1 for slot in outputs}
            for slot, token in driver.decode(positions).items():
                outputs[slot].append(token)
        return outputs

    outputs = on_ranks(checkpoint("llama"), world_size, body)[0]
    for slot, token_ids in enumerate(prompts):
        assert_agrees(outputs[slot], reference("llama", token_ids))


@pytest.mark.parametrize("world_size", [1, 3])
def test_prompt_logprobs_equal_transformers(world_size, checkpoint, on_ranks, prompt, reference):
    from flare_core.sampling import SamplingParams

    params = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=3)

    def body(driver):
        driver.start(0, prompt, params, chunk=30)
        return [entry for _, entries in driver.prompt_logprobs for entry in entries]

    entries = on_ranks(checkpoint("qwen2"), world_size, body)[0]
    model = AutoModelForCausalLM.from_pretrained(checkpoint("qwen2"), dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0], dim=-1)
    assert [entry.token_id for entry in entries] == prompt[1:]
    for entry, row in zip(entries, logprobs, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()


def test_bfloat16_stays_near_transformers_in_float32(checkpoint, load, reference, prompt):
    token_ids = [token % 1400 for token in prompt]
    token = load(checkpoint("llama"), dtype="bfloat16").start(0, token_ids)
    row = reference("llama", token_ids)[1][0]
    assert token.logprobs.logprob == pytest.approx(row[token.token_id].item(), abs=0.3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_preempted_sequence_goes_on_with_the_same_tokens(world_size, checkpoint, on_ranks, reference, prompt):
    token_ids = [token % 1400 for token in prompt]

    def body(driver):
        tokens = driver.complete(token_ids, 3)
        known = token_ids + [token.token_id for token in tokens]
        tokens.append(driver.start(1, known, num_prompt=len(token_ids)))
        while len(tokens) < NUM_TOKENS:
            tokens.append(driver.decode({1: len(token_ids) + len(tokens) - 1})[1])
        return tokens

    assert_agrees(on_ranks(checkpoint("llama"), world_size, body)[0], reference("llama", token_ids))
