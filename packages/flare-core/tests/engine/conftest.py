"""Shared by the engine's tests: tiny checkpoints made once a session, and a way to drive a runner by plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from flare_core.compute.loading import LoadedRunner, load_runner
from flare_core.plan import Run, RunKind, SampledToken, SequenceStart, StepPlan, StepResult
from flare_core.sampling import SamplingParams
from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_core.testing.torch_ranks import run_ranks

GREEDY = SamplingParams(max_tokens=64, temperature=0.0, logprobs=5)


class Driver:
    """Feeds one runner with plans for a few sequences, and keeps what it says of prompt tokens."""

    def __init__(self, loaded: LoadedRunner) -> None:
        self.loaded = loaded
        self.prompt_logprobs: list = []
        self._page_tokens = loaded.memory.geometry.page_tokens
        self._step = 0
        self._next_page = 0
        self._num_pages: dict[int, int] = {}

    def launch(self, **fields) -> StepResult:
        self._step += 1
        result = self.loaded.runner.launch(StepPlan(step=self._step, **fields)).result()
        assert result.step == self._step
        self.prompt_logprobs.extend(result.prompt_logprobs)
        return result

    def pages(self, slot: int, num_tokens: int) -> tuple[int, ...]:
        """New pages so that the slot holds ``num_tokens`` tokens."""
        needed = -(-num_tokens // self._page_tokens) - self._num_pages.get(slot, 0)
        if needed <= 0:
            return ()
        self._num_pages[slot] = self._num_pages.get(slot, 0) + needed
        first = self._next_page
        self._next_page += needed
        return tuple(range(first, first + needed))

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        chunk: int = 4096,
        num_prompt: int | None = None,
    ) -> SampledToken:
        """Prefill in chunks, then the last token alone; gives the first token."""
        known = np.array(token_ids, dtype="<u4")
        count = len(known)
        self._num_pages[slot] = 0
        starts = (SequenceStart(slot, known.tobytes(), num_prompt or count, params),)
        for at in range(0, count - 1, chunk):
            size = min(chunk, count - 1 - at)
            run = Run(slot, RunKind.PREFILL, at, size, self.pages(slot, at + size))
            self.launch(starts=starts, runs=(run,))
            starts = ()
        run = Run(slot, RunKind.FIRST, count - 1, 1, self.pages(slot, count))
        return self.launch(starts=starts, runs=(run,)).tokens[0]

    def decode(self, slots: dict[int, int]) -> dict[int, SampledToken]:
        """One batch; ``slots`` maps a slot to the position of its last token."""
        runs = tuple(
            Run(slot, RunKind.DECODE, position, 1, self.pages(slot, position + 1)) for slot, position in slots.items()
        )
        return {token.slot: token for token in self.launch(runs=runs).tokens}

    def complete(
        self, token_ids: Sequence[int], num_tokens: int, params: SamplingParams = GREEDY, *, chunk: int = 4096
    ) -> list[SampledToken]:
        """One sequence alone in slot 0."""
        tokens = [self.start(0, token_ids, params, chunk=chunk)]
        while len(tokens) < num_tokens:
            tokens.append(self.decode({0: len(token_ids) + len(tokens) - 1})[0])
        return tokens


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """``checkpoint(family, **overrides)``: a tiny model's directory, made once for the session."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides) -> Path:
        key = f"{family}-{sorted(overrides.items())}"
        if key not in made:
            made[key] = make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        return made[key]

    return make


@pytest.fixture
def digest_cache(tmp_path) -> Path:
    return tmp_path / "digests.json"


@pytest.fixture
def load(digest_cache) -> Callable[..., Driver]:
    """``load(directory, **settings)``: a driver around a runner of one rank."""

    def one(directory: Path, **settings) -> Driver:
        values = {"page_tokens": 16, "num_pages": 128, "max_sequences": 8} | settings
        return Driver(load_runner(directory, digest_cache=digest_cache, **values))

    return one


@pytest.fixture
def on_ranks(load) -> Callable:
    """``on_ranks(directory, world_size, body)``: ``body(driver)`` on every rank, ranks as threads."""

    def run(directory: Path, world_size: int, body: Callable[[Driver], object], **settings) -> list:
        def one_rank(rank, collectives):
            torch.set_num_threads(1)
            if world_size == 1:
                return body(load(directory, **settings))
            return body(load(directory, rank=rank, world_size=world_size, collectives=collectives, **settings))

        return run_ranks(world_size, one_rank)

    return run


@pytest.fixture
def prompt() -> list[int]:
    return np.random.default_rng(7).integers(0, 3000, 70).tolist()
