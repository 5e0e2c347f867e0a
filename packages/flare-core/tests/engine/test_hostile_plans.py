"""Step plans that rank zero, were it compromised, might send: they end a rank's step, never reach beyond its memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flare_core.plan import PageCopy, Run, RunKind, SequenceStart, StepPlan
from flare_core.sampling import SamplingParams

NUM_PAGES, MAX_SEQUENCES = 16, 4
HUGE = 1 << 40


def start(slot=0, token_ids=(1, 2, 3, 4), num_prompt=4, **params):
    values = {"max_tokens": 4, "temperature": 0.0} | params
    return SequenceStart(slot, np.array(token_ids, dtype="<u4").tobytes(), num_prompt, SamplingParams(**values))


def prefill(slot=0, at=0, num_tokens=3, pages=(0,)):
    return Run(slot, RunKind.PREFILL, at, num_tokens, pages)


PLANS = {
    "a page beyond the pool": {"starts": (start(),), "runs": (prefill(pages=(NUM_PAGES,)),)},
    "a page far beyond the pool": {"starts": (start(),), "runs": (prefill(pages=(HUGE,)),)},
    "a page before the pool": {"starts": (start(),), "runs": (prefill(pages=(-NUM_PAGES - 1,)),)},
    "no page": {"starts": (start(),), "runs": (prefill(pages=()),)},
    "a slot that does not exist": {"starts": (start(slot=MAX_SEQUENCES),)},
    "a slot that nobody took": {"runs": (prefill(slot=2),)},
    "tokens that are not known": {"starts": (start(),), "runs": (prefill(num_tokens=9),)},
    "tokens before the first": {"starts": (start(),), "runs": (prefill(at=-8, num_tokens=3),)},
    "a token beyond the vocabulary": {"starts": (start(token_ids=(1, 1 << 31, 3, 4)),), "runs": (prefill(),)},
    "odd bytes of token ids": {"starts": (SequenceStart(0, b"abc", 1, SamplingParams(max_tokens=1)),)},
    "a copy from beyond the pool": {"page_copies": (PageCopy(NUM_PAGES, 0, 4),)},
    "a copy to beyond the pool": {"page_copies": (PageCopy(0, HUGE, 4),)},
    "a first token that is not known": {"starts": (start(),), "runs": (Run(0, RunKind.FIRST, 99, 1, (0,)),)},
    "a decode beyond the pages": {"starts": (start(),), "runs": (Run(0, RunKind.DECODE, 500, 1, (0,)),)},
    "a biased id beyond the vocabulary": {
        "starts": (start(logit_bias=((1 << 30, 1.0),)),),
        "runs": (prefill(), Run(0, RunKind.FIRST, 3, 1)),
    },
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_leads_out_of_a_ranks_memory_fails_the_step(name, checkpoint, load):
    driver = load(checkpoint("llama"), num_pages=NUM_PAGES, max_sequences=MAX_SEQUENCES)
    runner = driver.loaded.runner
    # The pages that a plan of this list may write are the first and the last; the others are watched.
    before = [driver.loaded.memory.page_bytes(page) for page in range(1, NUM_PAGES - 1)]
    with pytest.raises((IndexError, ValueError, RuntimeError, OverflowError)):
        runner.launch(StepPlan(step=1, **PLANS[name])).result()
    assert [driver.loaded.memory.page_bytes(page) for page in range(1, NUM_PAGES - 1)] == before
    assert torch.isfinite(driver.loaded.memory.views).all()
