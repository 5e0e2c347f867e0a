"""Token ids of one output to text, piece by piece: what was returned, joined, is always the text decoded as a whole.

A piece never ends inside a character. Knows no stop strings and no request.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from flare_cli.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "open_detokenizer"]

MAX_OPEN_TOKENS = 8


class Detokenizer(Protocol):
    """State of one output."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that never became a character."""
        ...


class _ByteDetokenizer:
    """For tokenizers whose text is the tokens' bytes, joined."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowDetokenizer:
    """For tokenizers whose text depends on neighbours: decodes a short window with and without the new token."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_returned = 0
        """Leading tokens of the window whose text was returned."""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        # A character has at most four bytes: what is still open after more tokens will never become one.
        is_open = text.endswith("\ufffd") and len(self._window) - self._num_returned <= MAX_OPEN_TOKENS
        if not text or is_open:
            return ""
        self._window = self._window[self._num_returned :]
        self._num_returned = len(self._window)
        return text

    def flush(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        skip = self._skip_special_tokens
        before = self._tokenizer.decode(self._window[: self._num_returned], skip_special_tokens=skip)
        return self._tokenizer.decode(self._window, skip_special_tokens=skip)[len(before) :]


def open_detokenizer(tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Detokenizer:
    """A detokenizer for one output."""
    kind = _ByteDetokenizer if tokenizer.byte_exact else _WindowDetokenizer
    return kind(tokenizer, skip_special_tokens=skip_special_tokens)
