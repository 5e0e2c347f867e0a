"""A block drafter in the engine: it is shown what it must see, drafts alike on all ranks, and changes no text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from flare_core.compute.loading import load_runner
from flare_core.compute.model_config import read_config
from flare_core.compute.sharded_model import ShardedModel, Taps
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate
from flare_core.engine.request import AddRequest, EngineRequest, Tokens
from flare_core.engine.scheduler import Scheduler
from flare_core.engine.speculation import SpeculationLimits, StepCosts
from flare_core.errors import CheckpointError, UsageError
from flare_core.sampling import SamplingParams
from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_core.testing.torch_ranks import run_ranks
from flare_spec.config import parse_speculative_config
from flare_spec.drafters import make_chooser, make_drafter
from flare_spec.dspark.drafter import BlockDrafter
from flare_spec.dspark.testing import flat_draft_config, make_draft_checkpoint

PAGE_TOKENS = 16
NUM_PAGES = 200


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), "llama", dtype="bfloat16")


@pytest.fixture(scope="module")
def draft(model, tmp_path_factory) -> Path:
    target = read_config(model)
    return make_draft_checkpoint(tmp_path_factory.mktemp("draft"), target, flat_draft_config(target))


class FreeRows(StepCosts):
    """Every number of rows takes as long, so that as much as possible is drafted."""

    def measured(self, num_rows: int, seconds: float) -> None:
        pass

    def of(self, num_rows: int) -> float:
        return 1.0


class Witness:
    """Passes everything on to a block drafter, and keeps what it proposed after which tokens."""

    def __init__(self, inner: BlockDrafter) -> None:
        self.inner = inner
        self.texts: dict[int, list[int]] = {}
        self.proposals: list[tuple[list[int], SamplingParams, int, list[int]]] = []
        self.max_drafts, self.taps = inner.max_drafts, inner.taps

    def start(self, slot, token_ids, params) -> None:
        self.texts[slot] = np.asarray(token_ids).tolist()
        self.inner.start(slot, token_ids, params)

    def observe(self, slot, start, rows) -> None:
        self.inner.observe(slot, start, rows)

    def extend(self, slot, token_ids) -> None:
        self.texts[slot].extend(token_ids)
        self.inner.extend(slot, token_ids)

    def propose(self, slots, max_tokens) -> Sequence[Sequence[int]]:
        proposed = self.inner.propose(slots, max_tokens)
        for slot, tokens in zip(slots, proposed, strict=True):
            state = self.inner._slots[slot]
            if state.context is not None:
                first = state.context.first
                self.proposals.append((list(self.texts[slot]), state.params, first, list(tokens)))
        return proposed


def config_of(draft: Path, **values) -> str:
    extra = "".join(f', "{name}": {value}' for name, value in values.items())
    return f'{{"method": "dspark", "model": "{draft}"{extra}}}'


class Bench:
    def __init__(self, model: Path, cache: Path, config: str | None, *, ranks=(0, None)) -> None:
        rank, collectives = ranks
        self.witness: Witness | None = None

        def witnessed(target: ShardedModel) -> Witness:
            self.witness = Witness(make_drafter(parse_speculative_config(config or ""), target))
            return self.witness

        parsed = None if config is None else parse_speculative_config(config)
        self.loaded = load_runner(
            model, rank=rank, world_size=1 if collectives is None else collectives.world_size, collectives=collectives,
            page_tokens=PAGE_TOKENS, num_pages=NUM_PAGES, max_sequences=8, digest_cache=cache,
            make_drafter=None if config is None else witnessed,
            make_chooser=lambda target, witness: make_chooser(parsed, target, getattr(witness, "inner", None)),
        )  # fmt: skip
        limits = None if self.witness is None else SpeculationLimits(self.witness.max_drafts)
        self.scheduler = Scheduler(
            SchedulerConfig(
                page_tokens=PAGE_TOKENS, num_pages=NUM_PAGES, max_sequences=8, max_model_len=self.loaded.max_model_len,
                vocab_size=self.loaded.config.vocab_size, set_fingerprint=self.loaded.identity.fingerprint(),
                speculation=limits,
            )
        )  # fmt: skip
        if self.scheduler._drafting is not None:
            self.scheduler._drafting.costs = FreeRows()
        self.events: list = []
        self.engine = Engine(
            self.scheduler, self.loaded.runner, gate=NoGate(), store=None, send_plan=lambda _: None,
            emit=self.events.extend,
        )  # fmt: skip

    def serve(self, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
        self.engine.inbox.put([AddRequest(request) for request in requests])
        while self.engine.step():
            pass
        self.scheduler.check_at_rest()
        texts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for event in self.events:
            if isinstance(event, Tokens):
                texts[event.request_id].extend(event.token_ids)
        self.events.clear()
        return texts


def make_requests(num: int, *, shared: int = 20, **params) -> list[EngineRequest]:
    generator = np.random.default_rng(11)
    head = generator.integers(0, 3000, shared)
    return [
        EngineRequest(
            request_id=f"r{index}",
            token_ids=np.concatenate([head, generator.integers(0, 3000, 5 + 9 * index)]).astype("<u4").tobytes(),
            params=SamplingParams(max_tokens=20, **{"temperature": 0.0, "seed": index} | params),
        )
        for index in range(num)
    ]


def fresh_proposal(bench: Bench, tokens: list[int], params: SamplingParams, first: int, count: int) -> list[int]:
    """What a drafter proposes that sees, in one pass over the target, exactly the positions from ``first`` on."""
    inner = bench.witness.inner
    model = bench.loaded.runner.model
    known = len(tokens) - 1
    taps = Taps(inner.taps)
    plan = bench.loaded.runner._attention.chunk(range(-(-known // PAGE_TOKENS)), 0, known)
    with torch.inference_mode():
        model.prefill(torch.tensor(tokens[:known]), torch.arange(known).float(), plan, taps)
    again = BlockDrafter(inner.draft, model, inner.max_drafts)
    again.start(0, np.array(tokens, dtype="<u4"), params)
    if first < known:
        again.observe(0, first, taps.side_by_side()[first:])
    return list(again.propose([0], [count])[0])


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}], ids=["greedy", "sampled"])
def test_what_is_drafted_is_what_follows_from_the_tokens_alone(model, draft, tmp_path, params) -> None:
    """Batches, chunks, refused drafts and shared pages: the context is as if all had been computed in one pass."""
    bench = Bench(model, tmp_path / "d", config_of(draft))
    bench.serve(make_requests(3, shared=40, **params))
    assert len(bench.witness.proposals) > 20
    exact = 0
    for tokens, given, first, proposed in bench.witness.proposals[::3]:
        exact += fresh_proposal(bench, tokens, given, first, len(proposed)) == proposed
    # Rounding of another batch shape may turn a draft; it cannot turn many.
    assert exact >= 0.9 * len(bench.witness.proposals[::3])


def test_a_restored_prefix_is_not_attended_to(model, draft, tmp_path) -> None:
    bench = Bench(model, tmp_path / "d", config_of(draft))
    request = make_requests(1, shared=60)
    bench.serve(request)
    bench.witness.proposals.clear()
    again = [EngineRequest(request_id="again", token_ids=request[0].token_ids, params=request[0].params)]
    bench.serve(again)
    firsts = {first for _, _, first, _ in bench.witness.proposals}
    assert firsts == {len(request[0].token_ids) // 4 - 1}


@pytest.mark.parametrize("world_size", [1, 2])
def test_rejection_sampling_keeps_greedy_texts_and_ranks_agree(model, draft, tmp_path, world_size) -> None:
    config = config_of(draft, rejection_sample_method='"standard"')
    greedy, sampled = make_requests(2), make_requests(3, temperature=0.9, top_p=0.9, logprobs=2)
    plain = Bench(model, tmp_path / "d", None).serve(greedy)

    def one(rank, collectives):
        bench = Bench(model, tmp_path / "d", config, ranks=(rank, collectives))
        return bench.serve(greedy), bench.serve(sampled), bench.scheduler.snapshot().draft_tokens

    results = [one(0, None)] if world_size == 1 else run_ranks(world_size, one)
    assert all(result == results[0] for result in results)
    texts, others, num_drafts = results[0]
    assert texts == plain
    assert all(len(tokens) == 20 for tokens in others.values())
    assert num_drafts > 40


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_a_block_drafter_changes_no_text_at_any_world_size(model, draft, tmp_path, params, world_size) -> None:
    asked = make_requests(3, **params)
    plain = Bench(model, tmp_path / "d", None).serve(asked)

    def one(rank, collectives):
        bench = Bench(model, tmp_path / "d", config_of(draft), ranks=(rank, collectives))
        return bench.serve(asked), [proposal[3] for proposal in bench.witness.proposals]

    results = [one(0, None)] if world_size == 1 else run_ranks(world_size, one)
    assert all(result == results[0] for result in results)
    assert results[0][0] == plain


def test_one_message_a_block_brings_the_candidates(model, draft, tmp_path) -> None:
    """Beside the sum that embeds the anchors; nothing as long as the vocabulary travels."""

    def one(rank, collectives):
        bench = Bench(model, tmp_path / "d", config_of(draft), ranks=(rank, collectives))
        inner = bench.witness.inner
        inner.start(0, np.arange(5, dtype="<u4"), SamplingParams(max_tokens=4))
        inner.observe(0, 0, torch.zeros(4, len(inner.taps) * bench.loaded.config.hidden_size))
        before = collectives.num_collectives
        inner.propose([0], [5])
        return collectives.num_collectives - before

    assert run_ranks(2, one) == [2, 2]


def test_drafts_end_where_the_drafter_is_not_sure(model, draft, tmp_path) -> None:
    bench = Bench(model, tmp_path / "d", config_of(draft, confidence_threshold=1.0))
    bench.serve(make_requests(1))
    assert all(not proposed for *_, proposed in bench.witness.proposals)


def test_more_drafts_than_were_trained_and_another_targets_drafter_are_refused(model, draft, tmp_path) -> None:
    with pytest.raises(UsageError, match="num_speculative_tokens 7 is not within 1 and 5"):
        Bench(model, tmp_path / "d", config_of(draft, num_speculative_tokens=7))
    other = make_tiny_checkpoint(tmp_path / "other", "llama", num_hidden_layers=6)
    with pytest.raises(CheckpointError, match="made for another target"):
        Bench(other, tmp_path / "d", config_of(draft))
    with pytest.raises(CheckpointError, match="holds neither"):
        Bench(model, tmp_path / "d", config_of(tmp_path / "nothing"))
