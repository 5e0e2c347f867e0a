"""Scheduler, runner and drafters together: whatever is drafted, a request says what it says without drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from flare_core.compute.loading import load_runner
from flare_core.engine.config import SchedulerConfig
from flare_core.engine.engine import Engine, NoGate
from flare_core.engine.request import AddRequest, CancelRequest, EngineRequest, Finished, FinishReason, Tokens
from flare_core.engine.scheduler import Scheduler
from flare_core.engine.speculation import SpeculationLimits, StepCosts
from flare_core.plan import RunKind, StepPlan
from flare_core.ports import Drafter
from flare_core.sampling import SamplingParams
from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_core.testing.torch_ranks import run_ranks
from flare_spec.config import parse_speculative_config
from flare_spec.drafters import make_drafter
from flare_spec.verification.choosing import RatioChooser, coupled_chooser

PAGE_TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Stored in 16 bits, as real ones are: products of few rows then have the bits that each row has alone."""
    return make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", dtype="bfloat16")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Guesses:
    """Proposes what a rule says of the tokens so far."""

    max_drafts = 5
    taps = ()

    def __init__(self, rule) -> None:
        self.rule = rule
        self.texts: dict[int, list[int]] = {}

    def start(self, slot: int, token_ids, params) -> None:
        self.texts[slot] = np.asarray(token_ids).tolist()

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        self.texts[slot].extend(token_ids)

    def propose(self, slots: Sequence[int], max_tokens: Sequence[int]) -> Sequence[Sequence[int]]:
        return [self.rule(self.texts[slot], most)[:most] for slot, most in zip(slots, max_tokens, strict=True)]


def random_rule(tokens: list[int], max_tokens: int) -> list[int]:
    return np.random.default_rng(len(tokens)).integers(0, 3000, max_tokens).tolist()


def foresight(known: list[list[int]], *, wrong_every: int = 0):
    """Knows the texts to come; with ``wrong_every`` some of its guesses are wrong."""

    def rule(tokens: list[int], max_tokens: int) -> list[int]:
        text = next((text for text in known if text[: len(tokens)] == tokens), tokens)
        drafts = text[len(tokens) : len(tokens) + max_tokens]
        if wrong_every:
            drafts = [d + 1 if (len(tokens) + at) % wrong_every == 0 else d for at, d in enumerate(drafts)]
        return drafts

    return rule


class Bench:
    """One engine and what it says."""

    def __init__(
        self, model: Path, cache: Path, drafter: Drafter | None, *, num_pages: int = 200, ranks=None,
        chooser=coupled_chooser,
    ) -> None:  # fmt: skip
        rank, collectives = ranks or (0, None)
        world_size = 1 if collectives is None else collectives.world_size
        self.loaded = load_runner(
            model, rank=rank, world_size=world_size, collectives=collectives, page_tokens=PAGE_TOKENS,
            num_pages=num_pages, max_sequences=8, digest_cache=cache,
            make_drafter=None if drafter is None else lambda _: drafter, make_chooser=chooser,
        )  # fmt: skip
        limits = None if drafter is None else SpeculationLimits(5)
        config = SchedulerConfig(
            page_tokens=PAGE_TOKENS, num_pages=num_pages, max_sequences=8, max_model_len=self.loaded.max_model_len,
            vocab_size=self.loaded.config.vocab_size, set_fingerprint=self.loaded.identity.fingerprint(),
            speculation=limits,
        )  # fmt: skip
        self.scheduler = Scheduler(config)
        if self.scheduler._drafting is not None:
            self.scheduler._drafting.costs = FreeRows()
        self.events: list = []
        self.plans: list[StepPlan] = []
        self.engine = Engine(
            self.scheduler, self.loaded.runner, gate=NoGate(), store=None, send_plan=self.plans.append,
            emit=self.events.extend,
        )  # fmt: skip

    def serve(self, requests: Sequence[EngineRequest]) -> dict[str, tuple[list[int], list, Finished]]:
        self.engine.inbox.put([AddRequest(request) for request in requests])
        while self.engine.step():
            pass
        self.scheduler.check_at_rest()
        found: dict = {request.request_id: ([], [], None) for request in requests}
        for event in self.events:
            match event:
                case Tokens(request_id, token_ids, logprobs):
                    found[request_id][0].extend(token_ids)
                    found[request_id][1].extend(logprobs or ())
                case Finished(request_id):
                    found[request_id] = (*found[request_id][:2], event)
        self.events.clear()
        return found


class FreeRows(StepCosts):
    """Every number of rows takes as long: what is drafted depends on acceptance alone, not on the machine."""

    def measured(self, num_rows: int, seconds: float) -> None:
        pass

    def of(self, num_rows: int) -> float:
        return 1.0


def requests(num: int, *, num_tokens: int = 24, **params) -> list[EngineRequest]:
    generator = np.random.default_rng(5)
    head = generator.integers(0, 3000, 30)
    made = []
    for index in range(num):
        prompt = np.concatenate([head, generator.integers(0, 3000, 3 + 5 * index), head[:6]]).astype("<u4")
        settings = {"temperature": 0.0, "seed": 100 + index} | params
        made.append(
            EngineRequest(
                request_id=f"r{index}",
                token_ids=prompt.tobytes(),
                params=SamplingParams(max_tokens=num_tokens + index, **settings),
            )
        )
    return made


def texts(found) -> dict[str, list[int]]:
    return {request_id: tokens for request_id, (tokens, _, _) in found.items()}


def made(config: str) -> Drafter:
    return make_drafter(parse_speculative_config(config), target=None)  # lookups know no model


DRAFTERS = {
    "ngram": lambda _: made('{"method": "ngram", "prompt_lookup_min": 1}'),
    "suffix": lambda _: made('{"method": "suffix"}'),
    "random": lambda _: Guesses(random_rule),
    "foresight": lambda known: Guesses(foresight(known)),
    "mixed": lambda known: Guesses(foresight(known, wrong_every=3)),
    "none": lambda _: Guesses(lambda tokens, max_tokens: []),
}
SETTINGS = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "hot": {"temperature": 1.5, "top_k": 50, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    "greedy penalties": {"repetition_penalty": 1.5, "logit_bias": ((7, 2.0),)},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_drafter_changes_no_text(model, tmp_path, drafter, settings) -> None:
    asked = requests(4, **SETTINGS[settings])
    plain = texts(Bench(model, tmp_path / "d", None).serve(asked))
    known = [np.frombuffer(r.token_ids, dtype="<u4").tolist() + plain[r.request_id] for r in asked]
    bench = Bench(model, tmp_path / "d", DRAFTERS[drafter](known))
    found = bench.serve(asked)
    assert texts(found) == plain
    drafted = sum(event.usage.draft_tokens for _, _, event in found.values())
    accepted = sum(event.usage.accepted_tokens for _, _, event in found.values())
    snapshot = bench.scheduler.snapshot()
    assert (snapshot.draft_tokens, snapshot.accepted_tokens) == (drafted, accepted)
    if drafter == "foresight":
        assert accepted == drafted > 60
        assert snapshot.num_steps < 20
    if drafter == "mixed":
        assert 0 < accepted < drafted
    if drafter == "none":
        assert drafted == 0


@pytest.mark.parametrize("settings", ["greedy", "greedy penalties"])
@pytest.mark.parametrize("drafter", ["ngram", "random", "mixed"])
def test_rejection_sampling_keeps_greedy_texts(model, tmp_path, drafter, settings) -> None:
    asked = requests(3, **SETTINGS[settings])
    plain = texts(Bench(model, tmp_path / "d", None).serve(asked))
    known = [np.frombuffer(r.token_ids, dtype="<u4").tolist() + plain[r.request_id] for r in asked]
    bench = Bench(model, tmp_path / "d", DRAFTERS[drafter](known), chooser=lambda target, _: RatioChooser(target, None))
    assert texts(bench.serve(asked)) == plain


def test_rejection_sampling_draws_what_sampling_draws(model, tmp_path) -> None:
    """The second token of 600 seeds, for which one id is always drafted: each id as often as without drafts."""
    prompt = requests(1)[0].token_ids
    params = {"temperature": 0.5, "top_k": 4, "max_tokens": 3}
    asked = [
        EngineRequest(request_id=str(seed), token_ids=prompt, params=SamplingParams(seed=seed, **params))
        for seed in range(600)
    ]
    plain = texts(Bench(model, tmp_path / "d", None).serve(asked))
    likely = Counter(tokens[1] for tokens in plain.values()).most_common(1)[0][0]
    drafter = Guesses(lambda tokens, max_tokens: [likely])
    bench = Bench(model, tmp_path / "d", drafter, chooser=lambda target, _: RatioChooser(target, None))
    drafted = texts(bench.serve(asked))
    assert bench.scheduler.snapshot().draft_tokens == 600
    assert 0 < bench.scheduler.snapshot().accepted_tokens < 600
    counts = [Counter(tuple(tokens[:2]) for tokens in found.values()) for found in (plain, drafted)]
    # Two samples of one distribution: chi-square of their difference, by pairs that are frequent enough.
    pairs = [pair for pair in counts[0] | counts[1] if counts[0][pair] + counts[1][pair] >= 16]
    statistic = sum((counts[0][p] - counts[1][p]) ** 2 / (counts[0][p] + counts[1][p]) for p in pairs)
    assert statistic < len(pairs) + 5 * (2 * len(pairs)) ** 0.5


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_on_what_is_accepted(model, tmp_path, world_size) -> None:
    asked = requests(3, temperature=0.8)
    plain = texts(Bench(model, tmp_path / "d", None).serve(asked))
    known = [np.frombuffer(r.token_ids, dtype="<u4").tolist() + plain[r.request_id] for r in asked]

    def one(rank, collectives):
        bench = Bench(model, tmp_path / "d", DRAFTERS["mixed"](known), ranks=(rank, collectives))
        return texts(bench.serve(asked)), bench.scheduler.snapshot().accepted_tokens

    results = run_ranks(world_size, one)
    assert all(result == results[0] for result in results)
    assert results[0][0] == plain
    assert results[0][1] > 0


def test_logprobs_come_with_every_token(model, tmp_path) -> None:
    asked = requests(2, logprobs=3)
    plain = Bench(model, tmp_path / "d", None).serve(asked)
    known = [np.frombuffer(r.token_ids, dtype="<u4").tolist() + plain[r.request_id][0] for r in asked]
    found = Bench(model, tmp_path / "d", DRAFTERS["mixed"](known)).serve(asked)
    for request_id, (tokens, logprobs, _) in found.items():
        assert [entry.token_id for entry in logprobs] == tokens
        assert [entry.logprob for entry in logprobs] == pytest.approx([e.logprob for e in plain[request_id][1]])


def test_an_output_ends_at_its_stop_token_and_keeps_nothing_behind_it(model, tmp_path) -> None:
    asked = requests(1, num_tokens=30)
    plain = texts(Bench(model, tmp_path / "d", None).serve(asked))["r0"]
    stop = plain[11]
    prompt = np.frombuffer(asked[0].token_ids, dtype="<u4").tolist()
    stopping = requests(1, num_tokens=30, stop_token_ids=(stop,), min_tokens=0)
    bench = Bench(model, tmp_path / "d", Guesses(foresight([prompt + plain])))
    tokens, _, event = bench.serve(stopping)["r0"]
    assert tokens == plain[: plain.index(stop) + 1]
    assert event.reason is FinishReason.STOP
    assert event.usage.completion_tokens == len(tokens)
    # A following request that repeats the answer finds what was kept, and no more than was said.
    again = EngineRequest(
        request_id="again",
        token_ids=np.array(prompt + plain, dtype="<u4").tobytes(),
        params=SamplingParams(max_tokens=4, temperature=0.0),
    )
    follow = bench.serve([again])["again"]
    cached = sum(follow[2].usage.cached_tokens.values())
    assert cached <= len(prompt) + len(tokens)
    assert follow[0] == texts(Bench(model, tmp_path / "d", None).serve([again]))["again"]


def test_no_more_tokens_come_than_were_asked_for(model, tmp_path) -> None:
    for num_tokens in range(1, 8):
        asked = requests(1, num_tokens=num_tokens)
        plain = texts(Bench(model, tmp_path / "d", None).serve(asked))
        known = [np.frombuffer(asked[0].token_ids, dtype="<u4").tolist() + plain["r0"] + [1] * 9]
        assert texts(Bench(model, tmp_path / "d", Guesses(foresight(known))).serve(asked)) == plain


def test_drafts_take_no_page_from_anyone_and_preemption_changes_no_text(model, tmp_path) -> None:
    """A pool so small that sequences are preempted: the texts stay, and every page is accounted for."""
    asked = requests(6, num_tokens=40)
    plain = texts(Bench(model, tmp_path / "d", None).serve(asked))
    known = [np.frombuffer(r.token_ids, dtype="<u4").tolist() + plain[r.request_id] for r in asked]
    bench = Bench(model, tmp_path / "d", DRAFTERS["mixed"](known), num_pages=16)
    assert texts(bench.serve(asked)) == plain
    assert bench.scheduler.snapshot().num_preemptions > 0


def test_rows_of_a_step_stay_within_the_limit(model, tmp_path) -> None:
    asked = requests(8)
    bench = Bench(model, tmp_path / "d", Guesses(random_rule))
    bench.serve(asked)
    for plan in bench.plans:
        drafts = sum(run.num_tokens - 1 for run in plan.runs if run.kind is RunKind.VERIFY)
        assert not drafts or sum(run.num_tokens for run in plan.runs if run.kind is not RunKind.PREFILL) <= 32


def test_a_request_cancelled_while_drafts_are_verified_leaves_nothing(model, tmp_path) -> None:
    bench = Bench(model, tmp_path / "d", Guesses(random_rule))
    bench.engine.inbox.put([AddRequest(request) for request in requests(2, num_tokens=50)])
    for _ in range(6):
        bench.engine.step()
    bench.engine.begin()
    bench.scheduler.cancel("r0")
    if bench.engine.due is not None:
        bench.engine.finish()
    bench.engine.inbox.put([CancelRequest("r1")])
    while bench.engine.step():
        pass
    bench.scheduler.check_at_rest()
