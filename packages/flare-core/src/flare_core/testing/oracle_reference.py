"""What the oracle model answers when nothing is cached, batched or chunked: every other run must equal it."""

from __future__ import annotations

from collections.abc import Sequence

from flare_core.keys import token_array
from flare_core.plan import Run, RunKind, SequenceStart, StepPlan, StepResult, TokenLogprobs
from flare_core.sampling import SamplingParams
from flare_core.testing.collective import SingleRank
from flare_core.testing.oracle_config import OracleConfig
from flare_core.testing.oracle_memory import OracleMemory
from flare_core.testing.oracle_runner import OracleGroup, OracleRunner

__all__ = ["oracle_group", "oracle_prompt_logprobs", "oracle_results", "oracle_text"]


def oracle_group(
    config: OracleConfig,
    *,
    world_size: int,
    page_tokens: int,
    num_pages: int,
    num_row_slots: int = 1,
    is_late: bool = False,
) -> OracleGroup:
    """Runners of all ranks with memories of their own, in one thread."""
    return OracleGroup(
        [
            OracleRunner(config, OracleMemory(geometry, num_pages=num_pages, num_row_slots=num_row_slots), SingleRank())
            for geometry in config.geometries(world_size, page_tokens)
        ],
        is_late=is_late,
    )


def oracle_results(
    config: OracleConfig, prompt: Sequence[int], params: SamplingParams, *, world_size: int = 1, page_tokens: int = 16
) -> list[StepResult]:
    """Results of the steps of one request alone: prefill (where the prompt has two tokens or more), then one a token.

    The text does not depend on ``page_tokens`` except through which bytes are condensed together, so compare only
    runs with equal world size and page size.
    """
    num_pages = -(-(len(prompt) + params.max_tokens) // page_tokens)
    group = oracle_group(config, world_size=world_size, page_tokens=page_tokens, num_pages=num_pages)
    pages = tuple(range(num_pages))
    start = SequenceStart(0, token_array(prompt).tobytes(), len(prompt), params)
    last = len(prompt) - 1
    plans: list[StepPlan] = []
    if last:
        plans.append(StepPlan(step=1, starts=(start,), runs=(Run(0, RunKind.PREFILL, 0, last, pages),)))
        plans.append(StepPlan(step=2, runs=(Run(0, RunKind.FIRST, last, 1),)))
    else:
        plans.append(StepPlan(step=1, starts=(start,), runs=(Run(0, RunKind.FIRST, 0, 1, pages),)))
    results: list[StepResult] = []
    while plans:
        plan = plans.pop(0)
        results.append(group.launch(plan).result())
        num_outputs = sum(len(result.tokens) for result in results)
        if plans or num_outputs >= params.max_tokens or results[-1].tokens[0].token_id in params.stop_token_ids:
            continue
        plans.append(StepPlan(step=plan.step + 1, runs=(Run(0, RunKind.DECODE, last + num_outputs, 1),)))
    return results


def oracle_text(
    config: OracleConfig, prompt: Sequence[int], params: SamplingParams, *, world_size: int = 1, page_tokens: int = 16
) -> list[int]:
    """Output token ids, a final stop token included."""
    results = oracle_results(config, prompt, params, world_size=world_size, page_tokens=page_tokens)
    return [token.token_id for result in results for token in result.tokens]


def oracle_prompt_logprobs(
    config: OracleConfig, prompt: Sequence[int], params: SamplingParams, *, world_size: int = 1, page_tokens: int = 16
) -> list[TokenLogprobs]:
    """Entries for the prompt's tokens from the second on; ``params`` asks for them."""
    results = oracle_results(config, prompt, params, world_size=world_size, page_tokens=page_tokens)
    return [entry for result in results for _, entries in result.prompt_logprobs for entry in entries]
