"""The text side of a model: tokenizer, chat template, defaults. What the API process reads of a model directory."""

from __future__ import annotations

from dataclasses import dataclass

from flare_cli.model_source import ModelSource
from flare_cli.text.chat_template import ChatTemplate, load_chat_template
from flare_cli.text.generation_config import GenerationDefaults, load_generation_defaults
from flare_cli.text.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = ["ServedText", "load_text"]


@dataclass(frozen=True, slots=True)
class ServedText:
    """Everything between text and token ids."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults


def load_text(source: ModelSource) -> ServedText:
    """Read tokenizer, template and defaults. Blocks on the disk.

    Raises:
        CheckpointError, UnsupportedModel: one of the files is missing, damaged or of an unknown kind.
    """
    defaults = load_generation_defaults(source.directory)
    template = load_chat_template(source.directory)
    if source.is_oracle:
        from flare_core.testing.oracle_config import BYTE_OFFSET, load_oracle_config

        vocab_size = load_oracle_config(source.directory).vocab_size
        return ServedText(ByteTokenizer(vocab_size, first_byte=BYTE_OFFSET), template, defaults)
    return ServedText(load_tokenizer(source.directory), template, defaults)
