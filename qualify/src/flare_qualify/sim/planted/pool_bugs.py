"""Bugs in how ranks agree on the pool, and in how records get there and back."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec

from flare_cache.pool.agreement import PoolLeader, PoolVoter, Say
from flare_cache.pool.agreement_messages import Lost, Propose, Vote
from flare_cache.pool.core import PoolCore
from flare_cache.pool.core_words import PutManifest
from flare_cache.pool.manifest import Manifest, Shard, encode_manifest, manifest_name
from flare_cache.pool.messages import Commit, Committed
from flare_cache.pool.outbox import Outbox
from flare_cache.pool.pool_tier import PoolTier
from flare_cache.pool.puts import PoolPuts, extent_of
from flare_qualify.sim import pool_shelf
from flare_qualify.sim.planted.patching import PlantedBug, exchange

__all__ = ["POOL_BUGS"]


def _on_too_early() -> AbstractContextManager[None]:
    voted = PoolLeader._voted

    def _voted(self: Any, attempt: Any, vote: Vote, now: float) -> Any:
        effects = voted(self, attempt, vote, now)
        is_nearly = len(attempt.votes) == len(self._ranks) - 1 and self._attempt is attempt and not self._is_on
        return [*effects, *self._turn_on(attempt)] if is_nearly and len(self._ranks) > 2 else effects

    return exchange((PoolLeader, "_voted", _voted))


def _any_epoch() -> AbstractContextManager[None]:
    proposed, heard = PoolVoter._proposed, PoolLeader.heard

    def _proposed(self: Any, proposal: Propose) -> Any:
        return proposed(self, msgspec.structs.replace(proposal, epoch=b""))

    def _heard(self: Any, rank: int, message: Any, now: float) -> Any:
        attempt = self._attempt
        if isinstance(message, Vote) and not message.reason and attempt is not None and 0 in attempt.votes:
            message = msgspec.structs.replace(message, epoch=attempt.votes[0].epoch)
        return heard(self, rank, message, now)

    return exchange((PoolVoter, "_proposed", _proposed), (PoolLeader, "heard", _heard))


def _loss_untold() -> AbstractContextManager[None]:
    lost = PoolVoter.lost

    def _lost(self: Any, session: bytes, reason: str) -> Any:
        effects = lost(self, session, reason)
        return [effect for effect in effects if not (isinstance(effect, Say) and isinstance(effect.message, Lost))]

    return exchange((PoolVoter, "lost", _lost))


def _no_second_try() -> AbstractContextManager[None]:
    tick = PoolLeader.tick

    def _tick(self: Any, now: float) -> Any:
        return [] if self._attempt is None and self._retry_at else tick(self, now)

    return exchange((PoolLeader, "tick", _tick))


def _lookup_left() -> AbstractContextManager[None]:
    turned_off = PoolTier._turned_off

    def _turned_off(self: Any, reason: str) -> None:
        ready = list(self._ready)
        turned_off(self, reason)
        self._ready = ready

    return exchange((PoolTier, "_turned_off", _turned_off))


def _pin_kept() -> AbstractContextManager[None]:
    forget = Outbox._forget

    def _forget(self: Any, out: Any) -> None:
        unpin, self.unpin = self.unpin, lambda _: None
        forget(self, out)
        self.unpin = unpin

    return exchange((Outbox, "_forget", _forget))


def _believed() -> AbstractContextManager[None]:
    committed = PoolPuts._committed

    def _committed(self: Any, out: Any, session: Any, reply: Any, now: float) -> None:
        del reply
        committed(self, out, session, Committed(store_id=out.record.identity.store_id), now)

    return exchange((PoolPuts, "_committed", _committed))


def _committed_before_put() -> AbstractContextManager[None]:
    """On both sides: rank zero asks too early, and the manager does not look."""
    submit = PoolPuts._submit

    def _submit(self: Any, out: Any, session: Any) -> None:
        submit(self, out, session)
        record = out.record
        request = Commit(record=record.identity, extent=extent_of(record), token_ids=record.token_ids)
        session.requests.request_later(request, lambda _: None, timeout_seconds=10.0)

    return exchange((PoolPuts, "_submit", _submit), (PoolCore, "_commit", _commit_blindly))


def _commit_blindly(self: Any, session: bytes, number: int, *rest: Any) -> None:
    who, request, _ = rest
    record = request.record
    manifest = Manifest(
        record=record,
        extent=request.extent,
        token_ids=request.token_ids,
        shards=tuple(Shard(4096, bytes(32)) for _ in range(who.world_size)),
        created_at=0.0,
    )
    waiting = self._committing.setdefault((who.namespace, record.key), [])
    waiting.append((session, number, manifest))
    name = manifest_name(who.namespace, record.key)
    self._effects.append(PutManifest(who.namespace, record.key, name, encode_manifest(manifest)))


def _unverified() -> AbstractContextManager[None]:
    return exchange((pool_shelf, "verify_items", lambda *_, **__: None))


POOL_BUGS = (
    PlantedBug("pool-on-too-early", "the pool is on when every rank has voted yes, not all but one", _on_too_early),
    PlantedBug("pool-any-epoch", "all ranks are registered with one process of the manager", _any_epoch),
    PlantedBug("pool-loss-untold", "a rank that has lost the manager says so, and all are off", _loss_untold),
    PlantedBug("pool-no-second-try", "after a failure the ranks agree anew", _no_second_try),
    PlantedBug("pool-lookup-left", "whoever waits for the pool's answer goes on when the pool is off", _lookup_left),
    PlantedBug("pool-pin-kept", "a record is pinned no longer than its put takes", _pin_kept),
    PlantedBug("pool-believed", "a record is in the pool when the manager has said so", _believed),
    PlantedBug("pool-committed-before-put", "a record is visible when every shard is in", _committed_before_put),
    PlantedBug("pool-unverified", "what comes from the pool is verified before it reaches a page", _unverified),
)
