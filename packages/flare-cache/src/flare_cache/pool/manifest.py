"""What the pool's storage holds: names of objects, and the manifest that alone makes a record visible.

A record is one shard object per rank, the bytes of that rank's record file, and one manifest object. The manifest is
put last and only if absent; it is deleted first. Nothing here does I/O.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass

import msgspec

from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.decoding import decode

__all__ = [
    "MANIFEST_FORMAT",
    "Extent",
    "Manifest",
    "ObjectKind",
    "ObjectName",
    "Shard",
    "decode_manifest",
    "encode_manifest",
    "manifest_name",
    "manifests_prefix",
    "namespace_id",
    "namespace_prefix",
    "parse_name",
    "shard_name",
    "shards_prefix",
]

MANIFEST_FORMAT = 1
_VERSION = "v1"
_NAMESPACE_DOMAIN = b"flare/pool-namespace/1"


class Shard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One rank's object.

    Attributes:
        num_bytes: its size.
        header_digest: SHA-256 that ends its header: it binds every section's digest.
    """

    num_bytes: int
    header_digest: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A record that is whole in the pool.

    Attributes:
        format: :data:`MANIFEST_FORMAT`; a higher one is left alone.
        record: the rank-invariant identity, as it was stored.
        extent: what is left of tail and row in the shards; the same on every rank.
        token_ids: ids of [start, end), u32 little endian.
        shards: one for each rank, by rank.
        created_at: Unix seconds, for people and for the order of eviction after a restart.
    """

    format: int = MANIFEST_FORMAT
    record: RecordIdentity
    extent: Extent
    token_ids: bytes
    shards: tuple[Shard, ...]
    created_at: float

    @property
    def num_bytes(self) -> int:
        """Of all shards."""
        return sum(shard.num_bytes for shard in self.shards)


def namespace_id(set_fingerprint: bytes, salt_key_id: bytes) -> bytes:
    """The namespace of instances that share records: equal set fingerprint and salt key. 32 bytes."""
    return hashlib.sha256(_NAMESPACE_DOMAIN + set_fingerprint + salt_key_id).digest()


def namespace_prefix(namespace: bytes) -> str:
    """What the names of a namespace's objects begin with."""
    return f"{_VERSION}/{namespace.hex()}/"


def manifests_prefix(namespace: bytes) -> str:
    """What the names of a namespace's manifests begin with."""
    return f"{namespace_prefix(namespace)}manifests/"


def shards_prefix(namespace: bytes) -> str:
    """What the names of a namespace's shards begin with."""
    return f"{namespace_prefix(namespace)}shards/"


def manifest_name(namespace: bytes, key: bytes) -> str:
    """Object name of a record's manifest."""
    return f"{manifests_prefix(namespace)}{key.hex()}"


def shard_name(namespace: bytes, key: bytes, store_id: bytes, rank: int) -> str:
    """Object name of one rank's shard."""
    return f"{shards_prefix(namespace)}{key.hex()}.{store_id.hex()}.{rank}"


_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest object."""
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in ``data``. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return decode(_decoder, data)


class ObjectKind(enum.StrEnum):
    """Kinds of objects."""

    MANIFEST = "manifest"
    SHARD = "shard"


@dataclass(frozen=True, slots=True)
class ObjectName:
    """What an object's name says. ``store_id`` and ``rank`` are of shards only."""

    kind: ObjectKind
    namespace: bytes
    key: bytes
    store_id: bytes = b""
    rank: int = -1


_MANIFEST_NAME = re.compile(r"v1/([0-9a-f]{64})/manifests/([0-9a-f]{64})", re.ASCII)
_SHARD_NAME = re.compile(r"v1/([0-9a-f]{64})/shards/([0-9a-f]{64})\.([0-9a-f]{32})\.([0-9]{1,6})", re.ASCII)


def parse_name(name: str) -> ObjectName | None:
    """What ``name`` says; None where it is not of an object of this version."""
    if (match := _MANIFEST_NAME.fullmatch(name)) is not None:
        return ObjectName(ObjectKind.MANIFEST, bytes.fromhex(match[1]), bytes.fromhex(match[2]))
    if (match := _SHARD_NAME.fullmatch(name)) is not None:
        namespace, key, store_id = (bytes.fromhex(match[place]) for place in (1, 2, 3))
        return ObjectName(ObjectKind.SHARD, namespace, key, store_id, int(match[4]))
    return None
