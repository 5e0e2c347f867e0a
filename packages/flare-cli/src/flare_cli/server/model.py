"""What the server knows of the model that it serves, and the limits that it holds clients to. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from flare_cli.text.chat_template import ChatTemplate
from flare_cli.text.generation_config import GenerationDefaults
from flare_cli.text.tokenizer import Tokenizer

__all__ = ["Limits", "ServedModel"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one client may ask for.

    Attributes:
        max_body_bytes: of a request.
        max_n: choices of one prompt.
        max_choices: prompts times choices of one request.
        max_output_tokens: of one choice; None: what the context leaves.
        max_concurrent_requests: in work at once; more are answered with 429.
        max_stops, max_stop_chars: stop strings of a request, and the length of one.
        body_seconds: within which a body must have arrived.
    """

    max_body_bytes: int = 8 << 20
    max_n: int = 16
    max_choices: int = 128
    max_output_tokens: int | None = None
    max_concurrent_requests: int = 512
    max_stops: int = 16
    max_stop_chars: int = 1024
    max_logit_bias: int = 1024
    body_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the API shows it.

    Attributes:
        name: what ``model`` must be in requests (or absent, or "default").
        created: seconds since 1970 at which the server started.
        vocab_size: ids the model has; ids of prompts must be below.
        max_model_len: prompt and output tokens together, at most.
    """

    name: str
    created: int
    vocab_size: int
    max_model_len: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
