"""The pool's manager as a machine: what is visible, who may transfer what, what must go. No I/O, no clock, no thread.

Requests and what storage has done go in with the time; replies and work for storage come out. A record's life::

    PutStart/PutFinish on every rank -> shards in --Commit--> manifest put if absent -> visible --evicted, bad-->
        manifest deleted -> (grace, longer than any transfer) -> shards deleted

Shards without a manifest are found by gc. What a manager forgets when it dies is only what was not visible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from flare_cache.jobs import RecordIdentity
from flare_cache.pool.core_answers import answer_find, answer_has, disagreement
from flare_cache.pool.core_words import (
    Answer,
    CheckShard,
    CoreEffect,
    LandShard,
    PoolLimits,
    PutManifest,
    ShardFacts,
    Transfer,
)
from flare_cache.pool.manifest import Extent, Manifest, Shard, encode_manifest, manifest_name, shard_name
from flare_cache.pool.messages import (
    MAX_WORLD_SIZE,
    POOL_PROTOCOL,
    Commit,
    Committed,
    Done,
    Find,
    GetStart,
    Grant,
    Has,
    PutFinish,
    PutStart,
    Refused,
    RefusedReason,
    Register,
    Registered,
    Release,
    Reply,
    ReportBad,
    Request,
)
from flare_cache.pool.pool_index import PoolIndex
from flare_cache.pool.pool_space import PoolSpace
from flare_cache.record import BLOCK_BYTES, identity_problem

__all__ = ["PoolCore"]


class PoolCore:
    """The machine.

    Args:
        epoch: of this process, 16 bytes.
        name: of the manager, for people.
        limits: see :class:`PoolLimits`.
        draw_transfer: 16 random bytes.
    """

    def __init__(self, *, epoch: bytes, name: str, limits: PoolLimits, draw_transfer: Callable[[], bytes]) -> None:
        self._epoch = epoch
        self._name = name
        self._limits = limits
        self.space = PoolSpace(limits)
        self._draw_transfer = draw_transfer
        self._sessions: dict[bytes, Register] = {}
        self._transfers: dict[bytes, Transfer] = {}
        self._committing: dict[tuple[bytes, bytes], list[tuple[bytes, int, Manifest]]] = {}
        self._effects: list[CoreEffect] = []
        self._deleting: Counter[str] = Counter()
        self.is_draining = False

    @property
    def namespaces(self) -> Mapping[bytes, PoolIndex]:
        """What is visible, by namespace."""
        return {namespace: found.index for namespace, found in self.space.namespaces.items()}

    @property
    def sessions(self) -> Mapping[bytes, Register]:
        """Who is registered, by session of the link."""
        return self._sessions

    @property
    def num_transfers(self) -> int:
        """Granted and not ended."""
        return len(self._transfers)

    @property
    def num_bytes(self) -> int:
        """Of everything visible."""
        return sum(found.index.num_bytes for found in self.space.namespaces.values())

    def adopt(self, namespace: bytes, manifests: Sequence[Manifest]) -> None:
        """Storage has these manifests: after a start, or since another manager put them."""
        for manifest in manifests:
            self.space.namespace(namespace, manifest.record.page_tokens).index.add(manifest)

    def vanished(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        """Storage has these no more: another manager removed them, and sees to their shards."""
        found = self.space.namespaces.get(namespace)
        for key in keys if found is not None else ():
            assert found is not None  # noqa: S101 - a type's proof
            found.index.remove(key)

    def ended(self, session: bytes, now: float) -> list[CoreEffect]:
        """A link has ended: its transfers are void, but for shards that storage is taking in."""
        self._sessions.pop(session, None)
        for transfer in [each for each in self._transfers.values() if each.session == session and not each.is_landing]:
            self._drop(transfer)
        return self.tick(now)

    def tick(self, now: float) -> list[CoreEffect]:
        """Time has passed: end what has expired, delete what its grace is over for."""
        for transfer in [each for each in self._transfers.values() if now >= each.expires_at and not each.is_landing]:
            self._drop(transfer)
        # What is on its way again, or being committed, is not given up.
        puts = {(each.namespace, each.record.key) for each in self._transfers.values() if each.record is not None}
        self.space.tick(now, busy=puts | self._committing.keys())
        return self._take()

    def handle(self, session: bytes, number: int, request: Request, now: float) -> list[CoreEffect]:
        """A request came on the link of ``session``; the answer may follow from a later event."""
        if isinstance(request, Register):
            reply: Reply | None = self._register(session, request)
        else:
            who = self._sessions.get(session)
            if who is None:
                reply = Refused(reason=RefusedReason.NOT_REGISTERED)
            else:
                reply = self._answer(session, number, who, request, now)
        if reply is not None:
            self._effects.append(Answer(session, number, reply))
        return self._take()

    def _answer(self, session: bytes, number: int, who: Register, request: Request, now: float) -> Reply | None:
        reply: Reply | None = Refused(reason=RefusedReason.MALFORMED, detail=type(request).__name__)
        match request:
            case Find():
                reply = answer_find(self.space.namespaces.get(who.namespace), request)
            case Has():
                reply = answer_has(self.space.namespaces.get(who.namespace), request)
            case GetStart():
                reply = self._get(session, who, request, now)
            case PutStart():
                reply = self._put(session, who, request, now)
            case PutFinish(transfer=transfer):
                reply = self._finish(session, number, transfer)
            case Release(transfer=transfer):
                reply = self._release(session, transfer)
            case Commit():
                reply = self._commit(session, number, who, request, now)
            case ReportBad():
                reply = self._report(number, session, who, request)
        return reply

    def _register(self, session: bytes, request: Register) -> Reply:
        if request.protocol != POOL_PROTOCOL:
            detail = f"this manager speaks version {POOL_PROTOCOL}, the rank {request.protocol}: install the same flare"
            return Refused(reason=RefusedReason.VERSION, detail=detail)
        if self.is_draining:
            return Refused(reason=RefusedReason.DRAINING, detail="the manager is ending")
        lengths = (len(request.namespace), len(request.set_fingerprint), len(request.session))
        if lengths != (32, 32, 16) or not 0 <= request.rank < request.world_size <= MAX_WORLD_SIZE:
            return Refused(reason=RefusedReason.MALFORMED, detail=f"rank {request.rank} of {request.world_size}")
        self._sessions[session] = request
        own = self.space.namespaces.get(request.namespace)
        num_own = len(own.index.manifests) if own is not None else 0
        num_all = sum(len(found.index.manifests) for found in self.space.namespaces.values())
        return Registered(
            epoch=self._epoch, manager=self._name, num_records=num_own, num_other_records=num_all - num_own
        )

    # -- transfers -------------------------------------------------------------------------------------------------

    def transfer(self, session: bytes, transfer: bytes, now: float) -> Transfer | None:
        """A transfer that units of this session may name now."""
        known = self._transfers.get(transfer)
        if known is None or known.session != session or now >= known.expires_at or known.is_landing:
            return None
        return known

    def condemn(self, namespace: bytes, key: bytes, now: float) -> list[CoreEffect]:
        """An operator has found a record bad."""
        self.space.condemn(namespace, key, now)
        return self._take()

    def is_granted(self, transfer: bytes) -> bool:
        """Whether a transfer lasts; what belongs to one that does not may go."""
        return transfer in self._transfers

    def _get(self, session: bytes, who: Register, request: GetStart, now: float) -> Reply:
        found = self.space.namespaces.get(who.namespace)
        manifest = found.index.get(request.key) if found is not None else None
        if found is None or manifest is None or manifest.record.store_id != request.store_id:
            return Refused(reason=RefusedReason.MISSING, detail=f"record {request.key.hex()[:16]}")
        if request.rank != who.rank or request.rank >= len(manifest.shards):
            return Refused(reason=RefusedReason.RANK, detail=f"rank {who.rank} asks for the shard of {request.rank}")
        found.index.use(request.key)
        shard = manifest.shards[request.rank]
        name = shard_name(who.namespace, request.key, request.store_id, request.rank)
        return self._grant(session, who, name, shard.num_bytes, now, header_digest=shard.header_digest)

    def _put(self, session: bytes, who: Register, request: PutStart, now: float) -> Reply:
        problem = identity_problem(request.record)
        if problem is not None or request.num_bytes % BLOCK_BYTES or request.num_bytes <= 0:
            return Refused(reason=RefusedReason.MALFORMED, detail=problem or f"a shard of {request.num_bytes} bytes")
        if request.rank != who.rank:
            return Refused(reason=RefusedReason.RANK, detail=f"rank {who.rank} puts the shard of {request.rank}")
        if request.num_bytes > self._limits.max_shard_bytes:
            detail = f"a shard of {request.num_bytes} bytes, the most is {self._limits.max_shard_bytes}"
            return Refused(reason=RefusedReason.FULL, detail=detail)
        name = shard_name(who.namespace, request.record.key, request.record.store_id, request.rank)
        if name in self._deleting:
            return Refused(reason=RefusedReason.BUSY, detail="what was put there before is being deleted")
        found = self.space.namespace(who.namespace, request.record.page_tokens)
        if found.index.has(request.record.key):
            return Refused(reason=RefusedReason.EXISTS)
        pending = sum(each.num_bytes for each in self._transfers.values() if each.record is not None)
        if pending + request.num_bytes > self._limits.max_pending_bytes:
            return Refused(reason=RefusedReason.BUSY, detail=f"{pending} bytes are on their way")
        # What a record extends is not evicted to make room for it.
        found.index.use(request.record.parent_key)
        refusal = self.space.make_room(who.namespace, found, request.num_bytes, now)
        if refusal is not None:
            return refusal
        found.reserved_bytes += request.num_bytes
        self.space.spare(name)
        return self._grant(session, who, name, request.num_bytes, now, record=request.record, extent=request.extent)

    def _grant(
        self,
        session: bytes,
        who: Register,
        name: str,
        num_bytes: int,
        now: float,
        *,
        header_digest: bytes = b"",
        record: RecordIdentity | None = None,
        extent: Extent = Extent.ROW,
    ) -> Grant:
        transfer = Transfer(
            id=self._draw_transfer(),
            session=session,
            namespace=who.namespace,
            set_fingerprint=who.set_fingerprint,
            rank=who.rank,
            world_size=who.world_size,
            name=name,
            num_bytes=num_bytes,
            record=record,
            extent=extent,
            expires_at=now + self._limits.transfer_seconds,
        )
        self._transfers[transfer.id] = transfer
        return Grant(
            transfer=transfer.id,
            epoch=self._epoch,
            num_bytes=num_bytes,
            header_digest=header_digest,
            seconds=self._limits.transfer_seconds,
        )

    def _finish(self, session: bytes, number: int, transfer_id: bytes) -> Reply | None:
        transfer = self._transfers.get(transfer_id)
        if transfer is None or transfer.session != session or transfer.record is None or transfer.is_landing:
            return Refused(reason=RefusedReason.EXPIRED, detail="no such transfer")
        if not transfer.is_whole:
            self._drop(transfer)
            return Refused(reason=RefusedReason.INCOMPLETE, detail="some of the shard was not sent")
        transfer.is_landing = True
        self._effects.append(LandShard(transfer, number))
        return None

    def _release(self, session: bytes, transfer: bytes) -> Reply:
        known = self._transfers.get(transfer)
        if known is not None and known.session == session and not known.is_landing:
            self._drop(known)
        return Done()

    def landed(self, transfer: Transfer, number: int, outcome: ShardFacts | Refused) -> list[CoreEffect]:
        """The shard of a finished put was verified and is durable, or why not."""
        self._drop(transfer)
        found, record = self.space.namespaces.get(transfer.namespace), transfer.record
        if isinstance(outcome, Refused):
            self._effects.append(Answer(transfer.session, number, outcome))
        elif found is not None and record is not None:
            visible = found.index.get(record.key)
            # A shard that came again while its record was committed is that record's.
            if visible is None or visible.record.store_id != record.store_id:
                found.landed.setdefault((record.key, record.store_id), {})[transfer.rank] = outcome
            self._effects.append(Answer(transfer.session, number, Done(num_bytes=transfer.num_bytes)))
        return self._take()

    def _drop(self, transfer: Transfer) -> None:
        if self._transfers.pop(transfer.id, None) is not None and transfer.record is not None:
            self.space.namespaces[transfer.namespace].reserved_bytes -= transfer.num_bytes

    # -- commits ---------------------------------------------------------------------------------------------------

    def _commit(self, session: bytes, number: int, who: Register, request: Commit, now: float) -> Reply | None:
        record = request.record
        found = self.space.namespace(who.namespace, record.page_tokens)
        known = found.index.get(record.key)
        if known is not None:
            return Committed(store_id=known.record.store_id)
        place = (record.key, record.store_id)
        shards = found.landed.get(place, {})
        missing = [rank for rank in range(who.world_size) if rank not in shards]
        if missing:
            return Refused(reason=RefusedReason.INCOMPLETE, detail=f"no shard of ranks {missing}")
        if record.parent_key and not found.index.has(record.parent_key):
            return Refused(reason=RefusedReason.INCOMPLETE, detail="the record that it extends is not in the pool")
        facts = [shards[rank] for rank in range(who.world_size)]
        problem = disagreement(record, request, facts)
        if problem:
            del found.landed[place]
            return Refused(reason=RefusedReason.CORRUPT, detail=problem)
        manifest = Manifest(
            record=record,
            extent=request.extent,
            token_ids=request.token_ids,
            shards=tuple(Shard(fact.num_bytes, fact.header_digest) for fact in facts),
            created_at=self._limits.wall_clock_offset + now,
        )
        waiting = self._committing.setdefault((who.namespace, record.key), [])
        waiting.append((session, number, manifest))
        if len(waiting) == 1:
            name = manifest_name(who.namespace, record.key)
            self._effects.append(PutManifest(who.namespace, record.key, name, encode_manifest(manifest)))
        return None

    def manifest_put(
        self, namespace: bytes, key: bytes, outcome: Manifest | Refused | None, now: float
    ) -> list[CoreEffect]:
        """What became of a manifest: None: it is there now; the one that was there before; or why it failed."""
        waiting = self._committing.pop((namespace, key), [])
        if not waiting:
            return self.tick(now)
        own = waiting[0][2]
        found = self.space.namespace(namespace, own.record.page_tokens)
        found.landed.pop((key, own.record.store_id), None)
        if isinstance(outcome, Refused):
            reply: Reply = outcome
        else:
            visible = outcome if outcome is not None else own
            found.index.add(visible)
            if visible.record.store_id != own.record.store_id:
                self.space.doom(namespace, own, now)
            reply = Committed(store_id=visible.record.store_id)
            if outcome is None and not found.index.has(key):
                # What it extends was evicted while its manifest was put.
                found.index.remove(key)
                self.space.withdraw(namespace, [own], now)
                reply = Refused(reason=RefusedReason.INCOMPLETE, detail="the record that it extends has gone")
        for session, number, _ in waiting:
            self._effects.append(Answer(session, number, reply))
        return self._take()

    # -- what must go ----------------------------------------------------------------------------------------------

    def _report(self, number: int, session: bytes, who: Register, request: ReportBad) -> Reply | None:
        found = self.space.namespaces.get(who.namespace)
        manifest = found.index.get(request.key) if found is not None else None
        if manifest is None or manifest.record.store_id != request.store_id or request.rank >= len(manifest.shards):
            return Done()
        self._effects.append(CheckShard(who.namespace, manifest, request.rank, who.set_fingerprint, session, number))
        return None

    def checked(self, effect: CheckShard, problem: str | None, now: float) -> list[CoreEffect]:
        """A shard that a rank reported was looked at; with a problem, the record goes, and what extends it."""
        if problem is not None:
            self.space.condemn(effect.namespace, effect.manifest.record.key, now)
        self._effects.append(Answer(effect.session, effect.number, Done()))
        return self._take()

    def deleted(self, names: Sequence[str]) -> list[CoreEffect]:
        """Objects are deleted, or could not be: a shard of that name may be put again and stays."""
        self._deleting.subtract(names)
        self._deleting = +self._deleting
        return self._take()

    def _take(self) -> list[CoreEffect]:
        for deletion in self.space.deletions:
            self._deleting.update(deletion.names)
        effects, self._effects = [*self._effects, *self.space.deletions], []
        self.space.deletions.clear()
        return effects
