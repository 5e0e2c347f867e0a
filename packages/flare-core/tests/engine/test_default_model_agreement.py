"""The embedded default model against transformers at every world size: real weights, real text, three KV heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

MODEL = Path.home() / ".cache/flare/models/smollm2-135m-instruct"
NUM_TOKENS = 16
TOLERANCE = 5e-4
TIE = 1e-4
TEXTS = (
    "The lighthouse keeper wrote in his log that the storm had begun before dawn, and that by noon the sea",
    "def moving_average(values, window):\n    total = sum(values[:window])\n    result = [total / window]\n    for",
    "記録から前置部を復元するほうが、計算し直すよりも速い。なぜなら",
)

pytestmark = pytest.mark.skipif(not MODEL.exists(), reason="the default model is not here: flare model get smollm2")


@pytest.fixture(scope="module")
def references() -> list[tuple[list[int], list[int], torch.Tensor]]:
    """For each text: its ids, the greedy tokens, and the log-softmax rows [token, vocabulary]."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    found = []
    for text in TEXTS:
        token_ids = tokenizer.encode(text).ids
        output = model.generate(
            torch.tensor([token_ids]),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        rows = torch.log_softmax(torch.cat(output.logits), dim=-1)
        found.append((token_ids, output.sequences[0, len(token_ids) :].tolist(), rows))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_default_model_gives_the_tokens_and_logprobs_of_transformers(world_size, on_ranks, references) -> None:
    results = on_ranks(MODEL, world_size, lambda driver: [driver.complete(ids, NUM_TOKENS) for ids, _, _ in references])
    assert all(result == results[0] for result in results)
    for tokens, (_, token_ids, rows) in zip(results[0], references, strict=True):
        for token, expected, row in zip(tokens, token_ids, rows, strict=True):
            best, second = row.topk(2).values.tolist()
            if token.token_id != expected:
                assert best - second < TIE
                break  # from a tie on the two texts are different ones
            assert token.logprobs.logprob == pytest.approx(row[expected].item(), abs=TOLERANCE)
            for token_id, value in token.logprobs.top:
                assert value == pytest.approx(row[token_id].item(), abs=TOLERANCE)
