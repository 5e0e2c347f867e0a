"""Messages between ranks and the pool's manager that are as they should be, to be changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flare_cache.jobs import Extent
from flare_cache.pool import admin_messages, agreement_messages
from flare_cache.pool.manifest import Manifest, Shard
from flare_cache.pool.messages import (
    POOL_PROTOCOL,
    Commit,
    Committed,
    Done,
    Find,
    Found,
    GetStart,
    Grant,
    Has,
    Presence,
    PutFinish,
    PutStart,
    Refused,
    RefusedReason,
    Register,
    Registered,
    Release,
    ReportBad,
    Request,
)
from flare_qualify.fuzz.targets.records import sample_identities

__all__ = ["ADMIN_REQUESTS", "AGREEMENT", "MANIFEST", "REPLIES", "REQUESTS", "TRANSFER"]

TRANSFER = bytes(range(16))
_RECORD = sample_identities()[0]
_TOKENS = bytes(4 * (_RECORD.end - _RECORD.start))
_SHARD_BYTES = 8 << 12

MANIFEST = Manifest(
    record=_RECORD,
    extent=Extent.ROW,
    token_ids=_TOKENS,
    shards=(Shard(_SHARD_BYTES, bytes(32)),),
    created_at=1.0,
)
REQUESTS: Sequence[Request] = (
    Register(
        protocol=POOL_PROTOCOL,
        namespace=bytes(32),
        set_fingerprint=bytes(32),
        world_size=1,
        rank=0,
        session=bytes(16),
        instance="host",
        model="model",
        buffers=(1,),
    ),
    Find(root=bytes(32), keys=bytes(64), first_page=0, next_ids=bytes(8)),
    Has(keys=_RECORD.key),
    GetStart(key=_RECORD.key, store_id=_RECORD.store_id, rank=0),
    PutStart(record=_RECORD, extent=Extent.ROW, rank=0, num_bytes=_SHARD_BYTES),
    PutFinish(transfer=TRANSFER),
    Release(transfer=TRANSFER),
    Commit(record=_RECORD, extent=Extent.ROW, token_ids=_TOKENS),
    ReportBad(key=_RECORD.key, store_id=_RECORD.store_id, rank=0, detail="bad"),
)
REPLIES = (
    Registered(epoch=bytes(16), manager="m", num_records=1, num_other_records=2),
    Refused(reason=RefusedReason.QUOTA, detail="full"),
    Found(manifests=(MANIFEST,), num_pages=2),
    Presence(present=b"\1\0"),
    Grant(transfer=TRANSFER, epoch=bytes(16), num_bytes=4096, header_digest=bytes(32), seconds=9.0),
    Done(num_bytes=3),
    Committed(store_id=bytes(16)),
)
ADMIN_REQUESTS = (
    admin_messages.Status(),
    admin_messages.ListRecords(first=3),
    admin_messages.Verify(remove=True),
    admin_messages.Collect(),
)
AGREEMENT: Sequence[Any] = (
    agreement_messages.Propose(bytes(16), 0, bytes(16), bytes(32)),
    agreement_messages.Vote(bytes(16), 1, bytes(16), ""),
    agreement_messages.TurnOn(bytes(16)),
    agreement_messages.TurnOff(bytes(16), "no"),
    agreement_messages.Lost(bytes(16), 1, "gone"),
)
