"""Answers of the manager that change nothing: what is found along a chain, what is there, what agrees. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from flare_cache.jobs import RecordIdentity
from flare_cache.pool.core_words import ShardFacts
from flare_cache.pool.messages import Commit, Find, Found, Has, Presence, Refused, RefusedReason, Reply
from flare_cache.pool.pool_space import Namespace

__all__ = ["answer_find", "answer_has", "disagreement"]

_KEY_BYTES = 32
_MAX_FOUND_BYTES = 8 << 20


def answer_find(found: Namespace | None, request: Find) -> Reply:
    """The longest run along the chain, and what goes on behind it; as much as a reply holds."""
    if len(request.keys) % _KEY_BYTES or len(request.root) != _KEY_BYTES:
        return Refused(reason=RefusedReason.MALFORMED, detail=f"{len(request.keys)} bytes of keys")
    if found is None:
        return Found(manifests=(), num_pages=0)
    manifests, num_pages = found.index.find(request.root, _split(request.keys), request.first_page)
    num_bytes = 0
    for number, manifest in enumerate(manifests):
        num_bytes += len(manifest.token_ids) + 4096
        if num_bytes > _MAX_FOUND_BYTES and number:
            taken = manifests[:number]
            last = taken[-1].record
            reached = (last.end - last.tail_tokens) // last.page_tokens
            return Found(manifests=tuple(taken), num_pages=reached, more=reached > request.first_page)
    return Found(manifests=tuple(manifests), num_pages=num_pages)


def answer_has(found: Namespace | None, request: Has) -> Reply:
    """Which keys are visible."""
    if len(request.keys) % _KEY_BYTES:
        return Refused(reason=RefusedReason.MALFORMED, detail=f"{len(request.keys)} bytes of keys")
    return Presence(present=bytes(found is not None and found.index.has(key) for key in _split(request.keys)))


def disagreement(record: RecordIdentity, request: Commit, facts: Sequence[ShardFacts]) -> str:
    """Why these shards are not one record's; empty where they are. Ranks' headers must be equal but for the rank."""
    if any(fact.record != record or fact.extent is not request.extent for fact in facts):
        return "a rank's shard is of another record or extent"
    if len({fact.invariant_digest for fact in facts}) != 1 or facts[0].token_ids != request.token_ids:
        return "the ranks' shards differ in what must be equal"
    return ""


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + _KEY_BYTES] for at in range(0, len(keys), _KEY_BYTES)]
