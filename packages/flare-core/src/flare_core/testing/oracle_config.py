"""Configuration of the oracle model: what its pages and rows look like on each rank, and its byte vocabulary.

Knows the directory format of the model (one ``config.json``); knows nothing of arithmetic or memory.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from flare_core.errors import CheckpointError, UsageError
from flare_core.geometry import DTYPE_BYTES, Axis, Geometry, Plane, SetIdentity
from flare_core.sharding import split_heads

__all__ = [
    "BOS_TOKEN",
    "BYTE_OFFSET",
    "EOS_TOKEN",
    "NUMERICS_VERSION",
    "ORACLE_MODEL_TYPE",
    "OracleConfig",
    "PlaneSpec",
    "decode_bytes",
    "encode_text",
    "load_oracle_config",
    "write_oracle_model",
]

ORACLE_MODEL_TYPE = "flare-oracle"
NUMERICS_VERSION = 1
"""Raised whenever the same input gives other bytes or tokens."""

BOS_TOKEN = 0
EOS_TOKEN = 1
BYTE_OFFSET = 3
"""Token id of byte 0; id 2 is padding."""


class PlaneSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One plane of the model's pages before it is divided over ranks.

    Attributes:
        name: for messages.
        dtype: a key of ``DTYPE_BYTES``.
        width: elements of an entry, for each KV head where ``per_head``.
        per_head: the entries are divided by KV heads over ranks; otherwise every rank holds whole entries.
        head_first: axes are [head, token, dim] instead of [token, head, dim].
        tokens_per_entry: tokens that one entry stands for; must divide ``page_tokens``.
    """

    name: str = "kv"
    dtype: str = "float32"
    width: int = 8
    per_head: bool = True
    head_first: bool = False
    tokens_per_entry: int = 1


class OracleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """``config.json`` of an oracle model.

    Attributes:
        vocab_size: ids below 259 are BOS, EOS, padding and the 256 bytes; more are allowed and have no bytes.
        num_attention_heads, num_key_value_heads: how pages divide over ranks, as in a real model.
        planes: what a page holds.
        row_bytes: bytes of the state row for each KV head that a rank holds; 0 for none.
        max_position_embeddings: longest sequence.
        eos_bias: added to the end token's score; about 4 makes texts end by themselves now and then.
        prefill_cost_seconds: time that a rank sleeps for every token of a prefill run, to make cold prompts slow.
        seed: another seed is another model.
    """

    model_type: str = ORACLE_MODEL_TYPE
    vocab_size: int = 259
    num_attention_heads: int = 6
    num_key_value_heads: int = 3
    planes: tuple[PlaneSpec, ...] = (PlaneSpec(),)
    row_bytes: int = 0
    max_position_embeddings: int = 1 << 21
    eos_token_id: int = EOS_TOKEN
    bos_token_id: int = BOS_TOKEN
    eos_bias: float = -8.0
    prefill_cost_seconds: float = 0.0
    seed: int = 0

    def geometries(self, world_size: int, page_tokens: int) -> tuple[Geometry, ...]:
        """Every rank's geometry.

        Raises:
            UsageError: heads cannot be divided, or a plane's entries do not divide a page.
        """
        shards = split_heads(self.num_attention_heads, self.num_key_value_heads, world_size)
        return tuple(
            Geometry(
                rank=rank,
                world_size=world_size,
                page_tokens=page_tokens,
                planes=tuple(_plane(spec, len(shard.kv), page_tokens) for spec in self.planes),
                row_bytes=self.row_bytes * len(shard.kv),
            )
            for rank, shard in enumerate(shards)
        )

    def identity(self, world_size: int, page_tokens: int) -> SetIdentity:
        """Identity of the records of this model; its speed takes no part."""
        model = msgspec.structs.replace(self, prefill_cost_seconds=0.0)
        return SetIdentity(
            model=hashlib.sha256(msgspec.json.encode(model)).digest(),
            page_tokens=page_tokens,
            kv_dtype=self.planes[0].dtype,
            compute_dtype="uint8",
            device_kind="cpu",
            numerics=NUMERICS_VERSION,
            geometries=self.geometries(world_size, page_tokens),
        )


def _plane(spec: PlaneSpec, num_heads: int, page_tokens: int) -> Plane:
    if page_tokens % spec.tokens_per_entry:
        msg = f"plane {spec.name!r}: tokens_per_entry {spec.tokens_per_entry} does not divide page_tokens {page_tokens}"
        raise UsageError(msg)
    axes = [Axis("token", page_tokens // spec.tokens_per_entry)]
    if spec.per_head:
        axes.insert(0 if spec.head_first else 1, Axis("head", num_heads))
    axes.append(Axis("dim", spec.width))
    return Plane(spec.name, spec.dtype, tuple(axes), spec.tokens_per_entry)


def load_oracle_config(directory: Path) -> OracleConfig:
    """The configuration in ``directory/config.json``.

    Raises:
        CheckpointError: no such file, not an oracle model, or a value of the wrong type.
    """
    path = directory / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=OracleConfig)
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror}); an oracle model is a directory with a config.json"
        raise CheckpointError(msg) from error
    except msgspec.MsgspecError as error:
        msg = f"{path}: {error}"
        raise CheckpointError(msg) from error
    if config.model_type != ORACLE_MODEL_TYPE:
        msg = f"{path}: model_type is {config.model_type!r}, not {ORACLE_MODEL_TYPE!r}"
        raise CheckpointError(msg)
    _check(config, path)
    return config


def _check(config: OracleConfig, path: Path) -> None:
    if config.vocab_size < BYTE_OFFSET + 256:
        msg = f"{path}: vocab_size {config.vocab_size} must be at least {BYTE_OFFSET + 256} to hold every byte"
        raise CheckpointError(msg)
    if not config.planes:
        msg = f"{path}: planes is empty; a page holds at least one"
        raise CheckpointError(msg)
    for plane in config.planes:
        if plane.dtype not in DTYPE_BYTES:
            msg = f"{path}: plane {plane.name!r} has dtype {plane.dtype!r}; known are {', '.join(DTYPE_BYTES)}"
            raise CheckpointError(msg)


def write_oracle_model(directory: Path, config: OracleConfig | None = None) -> Path:
    """Write a servable model directory (``config.json``, mode as the umask says); returns ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(config or OracleConfig()), indent=2)
    (directory / "config.json").write_bytes(data + b"\n")
    return directory


def encode_text(text: str) -> list[int]:
    """Token ids of ``text``: one for each UTF-8 byte."""
    return [byte + BYTE_OFFSET for byte in text.encode()]


def decode_bytes(token_ids: list[int]) -> bytes:
    """Bytes of ``token_ids``; ids that stand for no byte give none."""
    return bytes(token - BYTE_OFFSET for token in token_ids if BYTE_OFFSET <= token < BYTE_OFFSET + 256)
