"""Sequences that share a step: what they may share changes no token, and on 16-bit copies no bit of a sampling row."""

from __future__ import annotations

import numpy as np
import pytest

from flare_core.plan import Run, RunKind, SequenceStart
from flare_core.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, logprobs=20)
LENGTHS = [70, 3, 18, 41, 33]
HALVED = [
    ("llama", {"dtype": "bfloat16"}),
    ("qwen3", {"dtype": "bfloat16", "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 2}),
]


def shared_steps(driver, prompts, num_tokens=6):
    """Every sequence in the same steps: one with all prefills, one with all first tokens, then batches."""
    first_pages = np.cumsum([0] + [6] * len(prompts))
    starts, prefill, first = [], [], []
    for slot, prompt in enumerate(prompts):
        count = len(prompt)
        starts.append(SequenceStart(slot, np.array(prompt, dtype="<u4").tobytes(), count, PARAMS))
        pages = tuple(range(first_pages[slot], first_pages[slot + 1]))
        prefill.append(Run(slot, RunKind.PREFILL, 0, count - 1, pages))
        first.append(Run(slot, RunKind.FIRST, count - 1, 1))
    driver.launch(starts=tuple(starts), runs=tuple(prefill))
    outputs = [[token] for token in driver.launch(runs=tuple(first)).tokens]
    for step in range(num_tokens - 1):
        runs = tuple(Run(slot, RunKind.DECODE, len(prompt) + step, 1) for slot, prompt in enumerate(prompts))
        for output, token in zip(outputs, driver.launch(runs=runs).tokens, strict=True):
            output.append(token)
    return outputs


@pytest.fixture
def prompts(prompt):
    return [[(token + slot) % 3000 for token in prompt[:length]] for slot, length in enumerate(LENGTHS)]


@pytest.mark.parametrize(("family", "overrides"), [("llama", {}), ("qwen2", {"dtype": "bfloat16"}), *HALVED])
@pytest.mark.parametrize("world_size", [1, 2])
def test_shared_steps_give_the_tokens_of_single_runs(
    family, overrides, world_size, checkpoint, on_ranks, load, prompts
):
    directory = checkpoint(family, **overrides)
    together = on_ranks(directory, world_size, lambda driver: shared_steps(driver, prompts))[0]
    for slot, prompt in enumerate(prompts):
        alone = load(directory).complete(prompt, 6, PARAMS)
        assert [token.token_id for token in together[slot]] == [token.token_id for token in alone]
        for one, other in zip(together[slot], alone, strict=True):
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob, abs=1e-4)


@pytest.mark.parametrize(("family", "overrides"), HALVED)
def test_rows_that_are_computed_together_have_the_bits_they_have_alone(family, overrides, checkpoint, load, prompts):
    directory = checkpoint(family, **overrides)
    driver = load(directory)
    if not driver.loaded.runner.model.is_row_invariant:
        pytest.skip("this build of torch has no kernel for 16-bit copies")
    together = shared_steps(driver, prompts)
    for slot, prompt in enumerate(prompts):
        # The same pages: those of the prefill in company, which alone may differ in the last bits.
        alone = load(directory)
        pages = tuple(range(6 * slot, 6 * slot + 6))
        alone.loaded.memory.views[list(pages)] = driver.loaded.memory.views[list(pages)]
        start = SequenceStart(7, np.array(prompt, dtype="<u4").tobytes(), len(prompt), PARAMS)
        tokens = [alone.launch(starts=(start,), runs=(Run(7, RunKind.FIRST, len(prompt) - 1, 1, pages),)).tokens[0]]
        runs = [Run(7, RunKind.DECODE, len(prompt) + step, 1) for step in range(5)]
        tokens.extend(alone.launch(runs=(run,)).tokens[0] for run in runs)
        assert [token.logprobs for token in tokens] == [token.logprobs for token in together[slot]]


def test_a_first_token_beside_a_decoding_sequence_is_that_of_a_step_of_its_own(checkpoint, load, prompts):
    for overrides in ({}, {"dtype": "bfloat16"}):
        directory = checkpoint("llama", **overrides)
        expected = load(directory).start(1, prompts[0], PARAMS)
        driver = load(directory)
        driver.start(0, prompts[3], PARAMS)
        count = len(prompts[0])
        start = SequenceStart(1, np.array(prompts[0], dtype="<u4").tobytes(), count, PARAMS)
        driver.launch(starts=(start,), runs=(Run(1, RunKind.PREFILL, 0, count - 1, driver.pages(1, count)),))
        runs = (
            Run(0, RunKind.DECODE, len(prompts[3]), 1, driver.pages(0, len(prompts[3]) + 1)),
            Run(1, RunKind.FIRST, count - 1, 1),
        )
        tokens = driver.launch(runs=runs).tokens
        assert [token.slot for token in tokens] == [0, 1]
        assert tokens[1].logprobs == expected.logprobs
