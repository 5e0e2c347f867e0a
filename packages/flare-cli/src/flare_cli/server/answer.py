"""What the answers of both APIs share: totals of an output, token strings, usage. Values to dictionaries; no HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flare_cli.server.generation import Piece
from flare_cli.text.tokenizer import Tokenizer
from flare_core.plan import TokenLogprobs
from flare_core.prefix import Tier

__all__ = ["OutputTotals", "Renderer", "prompt_logprobs_object", "token_string", "usage_object"]


@dataclass(slots=True)
class OutputTotals:
    """Everything one output has given so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    cached_tokens: dict[Tier, int] = field(default_factory=dict)
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_chunks: int = 0
    """Stream chunks made so far."""
    num_chars: int = 0
    """Characters in them."""

    def add(self, piece: Piece) -> None:
        """Count ``piece`` in."""
        self.text.append(piece.text)
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs
        self.num_tokens += piece.num_tokens
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.cached_tokens.update(piece.cached_tokens)
        self.draft_tokens += piece.draft_tokens
        self.accepted_tokens += piece.accepted_tokens


class Renderer(Protocol):
    """Shapes the answer of one request."""

    def chunks(self, piece: Piece, outputs: Sequence[OutputTotals]) -> list[dict[str, Any]]:
        """Stream chunks for a piece that ``outputs`` has counted in; may be empty."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, without choices."""
        ...

    def whole(self, outputs: Sequence[OutputTotals], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        ...


def token_string(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; where its bytes are no text by themselves, ``bytes:`` and their escapes."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs_object(
    entries: Sequence[TokenLogprobs], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """For every prompt token a mapping from ids to log-probability, rank and text; None for the first."""

    def one(entry: TokenLogprobs) -> dict[str, Any]:
        ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(entry.top[:num_top], 1)}
        ranked.setdefault(entry.token_id, (entry.logprob, entry.rank))
        return {
            str(token_id): {"logprob": value, "rank": rank, "decoded_token": token_string(tokenizer, token_id)}
            for token_id, (value, rank) in ranked.items()
        }

    return [None, *map(one, entries)]


def usage_object(
    num_prompt_tokens: int, outputs: Sequence[OutputTotals], first_choices: Sequence[int]
) -> dict[str, Any]:
    """``usage``; cached tokens are those of each prompt's choice 0 (``first_choices`` are their indices).

    Drafts are told in the API's own words where there were any: predictions, accepted and rejected.
    """
    num_completion_tokens = sum(output.num_tokens for output in outputs)
    by_tier = {str(tier): sum(outputs[index].cached_tokens.get(tier, 0) for index in first_choices) for tier in Tier}
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(by_tier.values())},
        "flare": {"cached_tokens": by_tier},
    }
    num_drafts = sum(output.draft_tokens for output in outputs)
    if num_drafts:
        num_accepted = sum(output.accepted_tokens for output in outputs)
        usage["completion_tokens_details"] = {
            "accepted_prediction_tokens": num_accepted,
            "rejected_prediction_tokens": num_drafts - num_accepted,
        }
    return usage
