"""The two sides of the engine benchmark: flare (decode by plans, prefill by the engine), transformers' ``generate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from flare_cli.model_store import default_model_dir
from flare_core.compute.loading import LoadedRunner, load_runner
from flare_core.engine.request import EngineRequest
from flare_core.plan import Run, RunKind, SequenceStart, StepPlan
from flare_core.sampling import SamplingParams
from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_qualify.engine_drive import PAGE_TOKENS, serve_all

__all__ = ["FlareSide", "TransformersSide", "make_shape", "prompt_ids"]

CHUNK = 2048
"""Tokens of a prefill run: what the scheduler gives a step in which nothing decodes."""

_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm2-shape": (
        "llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
    ),
    "qwen3-shape": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
}


def make_shape(name: str, scratch: Path) -> Path:
    """The directory of a model: SmolLM2 as downloaded (or random weights of its shape), the Qwen3 shape, or a path."""
    if name == "smollm2" and default_model_dir().exists():
        return default_model_dir()
    if name == "smollm2":
        name = "smollm2-shape"
    if name not in _SHAPES:
        return Path(name)
    family, fields = _SHAPES[name]
    fields = fields | {"tie_word_embeddings": True, "max_position_embeddings": 8192, "initializer_range": 0.02}
    # Stored as the real ones are; both sides compute in float32.
    return make_tiny_checkpoint(scratch / name, family, dtype="bfloat16", **fields)


def prompt_ids(context: int, vocab_size: int, *, slot: int = 0) -> list[int]:
    """The prompt of ``context`` ids that both sides see in row ``slot`` of a batch."""
    ids: list[int] = np.random.default_rng([context, slot]).integers(0, min(vocab_size, 40_000), context).tolist()
    return ids


@dataclass(slots=True)
class FlareSide:
    """The runner, with the pages of each slot handed out once."""

    loaded: LoadedRunner
    slot_pages: int
    step: int = 0
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path, max_batch: int, longest: int, **place: Any) -> FlareSide:
        """Load the model with room for ``max_batch`` sequences of ``longest`` tokens.

        ``place``: rank, world size and collectives, where it is one of several ranks.
        """
        slot_pages = -(-longest // PAGE_TOKENS)
        loaded = load_runner(directory, num_pages=max_batch * slot_pages, max_sequences=max_batch, **place)
        return cls(loaded, slot_pages)

    def _launch(self, *runs: Run, starts: tuple[SequenceStart, ...] = ()) -> None:
        self.step += 1
        self.loaded.runner.launch(StepPlan(step=self.step, starts=starts, runs=runs)).result()

    @staticmethod
    def num_fill_steps(context: int) -> int:
        """Steps that :meth:`fill` takes a slot."""
        return -(-(context - 1) // CHUNK) + 1

    def fill(self, context: int, batch: int) -> float:
        """Put ``context`` tokens into each of ``batch`` slots; tokens per second."""
        begin = perf_counter()
        params = SamplingParams(max_tokens=1 << 20, temperature=0.0)
        for slot in range(batch):
            token_ids = self._prompt(context, slot).tobytes()
            starts: tuple[SequenceStart, ...] = (SequenceStart(slot, token_ids, context, params),)
            pages: tuple[int, ...] = tuple(range(slot * self.slot_pages, (slot + 1) * self.slot_pages))
            for at in range(0, context - 1, CHUNK):
                run = Run(slot, RunKind.PREFILL, at, min(CHUNK, context - 1 - at), pages)
                self._launch(run, starts=starts)
                starts, pages = (), ()
            self._launch(Run(slot, RunKind.FIRST, context - 1, 1))
        self.lengths = [context] * batch
        return context * batch / (perf_counter() - begin)

    def _prompt(self, context: int, slot: int) -> NDArray[np.uint32]:
        return np.array(prompt_ids(context, self.loaded.config.vocab_size, slot=slot), dtype="<u4")

    def decode(self, num_tokens: int) -> float:
        """Tokens per second over ``num_tokens`` batched steps behind what :meth:`fill` put there."""
        begin = perf_counter()
        for index in range(num_tokens):
            self._launch(*(Run(slot, RunKind.DECODE, at + index, 1) for slot, at in enumerate(self.lengths)))
        return len(self.lengths) * num_tokens / (perf_counter() - begin)

    def prefill(self, context: int, batch: int) -> float:
        """Prompt tokens per second until every request has its first token, through the whole engine."""
        requests = [
            EngineRequest(
                request_id=str(slot),
                token_ids=self._prompt(context, slot).tobytes(),
                params=SamplingParams(max_tokens=1, temperature=0.0),
            )
            for slot in range(batch)
        ]
        num_pages = self.loaded.memory.num_pages
        return context * batch / serve_all(self.loaded, requests, num_pages=num_pages, max_sequences=batch)


class _Clock(transformers.StoppingCriteria):
    """Notes when each token was there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:  # noqa: ARG002
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@dataclass(slots=True)
class TransformersSide:
    """``generate`` with its KV cache, greedy."""

    model: Any
    cache: Any = None
    input_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @classmethod
    def load(cls, directory: Path) -> TransformersSide:
        """Load the same checkpoint in float32."""
        logging: Any = transformers.utils.logging
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return cls(model.eval())

    def _prompt(self, context: int, batch: int) -> torch.Tensor:
        rows = [prompt_ids(context, self.model.config.vocab_size, slot=slot) for slot in range(batch)]
        return torch.tensor(rows)

    def generate(self, input_ids: torch.Tensor, num_tokens: int, **more: Any) -> list[float]:
        """Greedy, exactly ``num_tokens`` outputs; when each step's tokens were there."""
        clock = _Clock()
        self.model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[clock],
            **more,
        )
        return clock.times

    @torch.inference_mode()
    def fill(self, context: int, batch: int) -> None:
        """Put ``context`` tokens into a cache and repeat it ``batch`` times."""
        self.input_ids = self._prompt(context, batch)
        self.cache = DynamicCache(config=self.model.config)
        self.model(self.input_ids[:1, :-1], cache=self.cache, logits_to_keep=1)
        self.cache.batch_repeat_interleave(batch)

    @torch.inference_mode()
    def decode(self, num_tokens: int) -> float:
        """Tokens per second of ``num_tokens`` steps of ``generate`` from the filled cache."""
        times = self.generate(self.input_ids, num_tokens + 1, cache=self.cache)
        self.cache.crop(self.input_ids.shape[1] - 1 - self.cache.get_seq_length())  # negative: how many to remove
        return self.input_ids.shape[0] * num_tokens / (times[-1] - times[0])

    @torch.inference_mode()
    def prefill(self, context: int, batch: int) -> float:
        """Prompt tokens per second until the first tokens are there."""
        input_ids = self._prompt(context, batch)
        begin = perf_counter()
        self.generate(input_ids, 1)
        return context * batch / (perf_counter() - begin)
