"""The models that scenarios serve, made once for a run directory: oracle models, a tiny random Llama, the default one.

The oracle models need no torch and start in under half a second; every output byte depends on every byte of every page
and row, so a wrong byte anywhere shows in the text.
"""

from __future__ import annotations

import fcntl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from flare_cli.model_store import find_default_model
from flare_core.sampling import SamplingParams
from flare_core.testing.oracle_config import OracleConfig, decode_bytes, write_oracle_model
from flare_core.testing.oracle_reference import oracle_text

__all__ = ["ORACLES", "PAGE_TOKENS", "ModelLibrary", "cache_off_text", "group_options"]

PAGE_TOKENS = 16
"""Small pages, so that short prompts have many."""

_ENDLESS = -1e9
"""As a bias of the end token: texts are as long as was asked."""

ORACLES: Mapping[str, OracleConfig] = MappingProxyType(
    {
        "oracle": OracleConfig(eos_bias=_ENDLESS),
        "oracle-rows": OracleConfig(eos_bias=_ENDLESS, row_bytes=5000),
        "oracle-slow": OracleConfig(eos_bias=_ENDLESS, prefill_cost_seconds=0.002),
    }
)
"""By name. ``oracle-slow`` has the records of ``oracle`` and takes 2 ms a prompt token."""


@dataclass(frozen=True, slots=True)
class ModelLibrary:
    """Model directories under ``root``; several processes may ask at once."""

    root: Path

    def directory(self, name: str) -> Path:
        """The directory of ``oracle``, ``oracle-rows``, ``oracle-slow``, ``tiny-llama`` or ``default``; made if needed.

        ``tiny-llama`` needs torch and transformers and takes seconds the first time.

        Raises:
            KeyError: no model of this name. FileNotFoundError: the default model was never fetched.
        """
        if name == "default":
            found = find_default_model()
            if found is None:
                raise FileNotFoundError("the default model is not here: flare model get smollm2")
            return found
        if name != "tiny-llama" and name not in ORACLES:
            raise KeyError(name)
        self.root.mkdir(parents=True, exist_ok=True)
        directory = self.root / name
        with (self.root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.is_dir():
                scratch = self.root / f"{name}.making"
                _make(name, scratch)
                scratch.rename(directory)
        return directory


def _make(name: str, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    if name in ORACLES:
        write_oracle_model(directory, ORACLES[name])
        return
    from flare_core.testing.checkpoints import make_tiny_checkpoint

    make_tiny_checkpoint(directory, "llama", num_attention_heads=6, num_key_value_heads=3, head_dim=16)


def group_options(model: str) -> tuple[str, ...]:
    """Flags under which small prompts of this model make many records and every tail is kept."""
    if model == "default":
        return ("--prefix-cache-min-tail", "0", "--threads", "1", "--dtype", "float32")
    options = ("--page-tokens", str(PAGE_TOKENS), "--prefix-cache-min-tail", "0", "--kv-memory", "256pages")
    return (*options, "--threads", "1")


def cache_off_text(model: str, prompt: list[int], *, max_tokens: int, world_size: int) -> str:
    """What an oracle model answers greedily when nothing is cached, computed in this process.

    Raises:
        KeyError: not an oracle model.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    ids = oracle_text(ORACLES[model], prompt, params, world_size=world_size, page_tokens=PAGE_TOKENS)
    return decode_bytes(ids).decode(errors="replace")
