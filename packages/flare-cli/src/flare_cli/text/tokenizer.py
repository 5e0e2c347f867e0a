"""Tokenizers of a model directory, and what a token id is in bytes.

Owns the choice of tokenizer and byte-level decoding. Does not know requests, streams of tokens (``detokenizer``) or
chat templates. Every method is a pure function of its arguments and may be called from any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flare_core.errors import CheckpointError, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

__all__ = ["ByteTokenizer", "FileTokenizer", "Tokenizer", "load_tokenizer"]

MAX_TOKENIZER_BYTES = 256 << 20


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def num_ids(self) -> int:
        """Ids are 0 to ``num_ids`` - 1."""
        ...

    @property
    def byte_exact(self) -> bool:
        """Whether text is the UTF-8 decoding of the tokens' bytes joined (else it depends on neighbours)."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of ``text``; with special tokens as the tokenizer adds them to a prompt."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that are no UTF-8 become U+FFFD. Unknown ids are empty."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this id stands for, special tokens by their names; empty for an unknown id."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` skips this id."""
        ...


class ByteTokenizer:
    """One id a byte, from ``first_byte`` on; the other ids are special and have no text. For models without files."""

    byte_exact = True

    def __init__(self, num_ids: int, *, first_byte: int = 0) -> None:
        self._num_ids = num_ids
        self._first = first_byte

    @property
    def num_ids(self) -> int:
        return self._num_ids

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:  # noqa: ARG002  it has none to add
        return [byte + self._first for byte in text.encode("utf-8", "replace")]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002  empty anyway
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if self.is_special(token_id) else bytes((token_id - self._first,))

    def is_special(self, token_id: int) -> bool:
        return not self._first <= token_id < self._first + 256


class FileTokenizer:
    """A ``tokenizer.json`` as the ``tokenizers`` library reads it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, byte_level: bool) -> None:
        self._tokenizer = tokenizer
        self._added = dict(tokenizer.get_added_tokens_decoder())
        self.byte_exact = byte_level

    @property
    def num_ids(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if not self.byte_exact:
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        parts = (self.token_bytes(i) for i in token_ids if not (skip_special_tokens and self.is_special(i)))
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.content.encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.byte_exact:
            table = byte_level_alphabet()
            # A token with a character outside the alphabet stands for itself, as in the library's decoder.
            return bytes(table[c] for c in token) if all(c in table for c in token) else token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return token.replace("\u2581", " ").encode()

    def is_special(self, token_id: int) -> bool:
        added = self._added.get(token_id)
        return added is not None and added.special


@cache
def byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table), inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def load_tokenizer(directory: Path) -> FileTokenizer:
    """The tokenizer in a model directory. Reads files.

    Raises:
        CheckpointError: ``tokenizer.json`` is missing or damaged.
        UnsupportedModel: a tokenizer in another file format.
    """
    import tokenizers

    path = directory / "tokenizer.json"
    if not path.is_file():
        others = [n for n in ("tokenizer.model", "vocab.json", "tekken.json") if (directory / n).is_file()]
        if others:
            msg = f"{directory}: the tokenizer is in {others[0]}; flare reads tokenizer.json only"
            raise UnsupportedModel(msg)
        msg = f"{directory}: tokenizer.json is missing"
        raise CheckpointError(msg)
    if path.stat().st_size > MAX_TOKENIZER_BYTES:
        msg = f"{path}: larger than {MAX_TOKENIZER_BYTES} bytes"
        raise CheckpointError(msg)
    try:
        text = path.read_text(encoding="utf-8")
        tokenizer = tokenizers.Tokenizer.from_str(text)
        decoder = json.loads(text).get("decoder") or {}
    except Exception as error:  # noqa: BLE001  the library raises plain Exception for a damaged file
        msg = f"{path}: not a tokenizer: {str(error)[:200]}"
        raise CheckpointError(msg) from None
    return FileTokenizer(tokenizer, byte_level=decoder.get("type") == "ByteLevel")
