"""The block drafter on a GPU drafts what it drafts on the CPU."""

from __future__ import annotations

import pytest
import torch

from flare_core.compute.model_config import parse_config
from flare_spec.dspark.draft import DraftNoise, draft_block
from flare_spec.dspark.testing import flat_draft_config, make_draft_checkpoint
from flare_spec.dspark.weights import load_block_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TARGET = parse_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 3000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
)


def drafted(directory, device):
    """What is drafted for two sequences, one of them sampled, with everything on ``device``."""
    draft = load_block_draft(directory, TARGET, dtype=torch.float32, device=device)
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(3000, 64, generator=generator).to(device) for _ in range(2))
    contexts = []
    for length in (90, 17):
        context = draft.backbone.new_context()
        taps = torch.randn(length, 3 * 64, generator=generator).to(device)
        draft.backbone.extend(context, draft.backbone.context_rows(taps))
        contexts.append(context)
    return draft_block(
        draft,
        contexts,
        torch.tensor([5, 6], device=device),
        num_tokens=5,
        noise=DraftNoise(torch.tensor([0.0, 1.0], device=device), torch.tensor([3, 4], device=device)),
        embed=lambda ids: embedding[ids],
        base_scores=lambda rows: ((rows @ head.T).bfloat16(), None),
    )


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_gpu_drafts_what_the_cpu_drafts(tmp_path, kind):
    directory = make_draft_checkpoint(tmp_path, TARGET, flat_draft_config(TARGET, markov_head_type=kind))
    here, there = (drafted(directory, torch.device(name)) for name in ("cpu", "cuda"))
    assert torch.equal(there.sampled.tokens.cpu(), here.sampled.tokens)
    torch.testing.assert_close(there.sampled.scores.cpu(), here.sampled.scores, atol=0.1, rtol=0.02)
    torch.testing.assert_close(there.confidences.cpu(), here.confidences, atol=1e-3, rtol=1e-3)
