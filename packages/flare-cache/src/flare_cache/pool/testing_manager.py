"""A real manager and ranks that use it in one process, for tests: over sockets, on a real directory.

Nothing of flare's serving uses this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from flare_cache.host_memory import DirectPassage
from flare_cache.jobs import Extent, Job, JobOp, RecordIdentity, Section
from flare_cache.pool.client import PoolClient, connect_to_pool
from flare_cache.pool.core_words import PoolLimits
from flare_cache.pool.local_storage import open_local_storage
from flare_cache.pool.manifest import namespace_id
from flare_cache.pool.messages import POOL_PROTOCOL, Commit, Committed, Register, Reply
from flare_cache.pool.server import PoolServer, ServerSettings
from flare_cache.pool.shelf import PoolShelf, staging_bytes
from flare_cache.pool.staging import allocate_staging
from flare_cache.transfer import Transfer
from flare_core.prefix import Tier
from flare_transport import Address, Security

__all__ = [
    "KEY",
    "NAMESPACE",
    "SESSION",
    "SET",
    "WORLD",
    "PoolRank",
    "connect",
    "make_record",
    "managing",
    "run",
    "share",
    "sharing",
    "token_ids",
]

SET = hashlib.sha256(b"the set of the tests").digest()
PAGE_TOKENS = 4
KEY = bytes(range(32))
SESSION = b"session-16-bytes"
NAMESPACE = namespace_id(SET, bytes(16))
WORLD = 2


def make_record(
    name: str, *, start: int = 0, num_pages: int = 3, tail_tokens: int = 2, **fields: Any
) -> RecordIdentity:
    """A record that extends none; ``fields`` replace what follows from the name."""
    digest = hashlib.sha256(name.encode()).digest()
    identity = RecordIdentity(
        key=digest,
        store_id=digest[16:],
        parent_key=b"",
        start_key=hashlib.sha256(digest + b"start").digest(),
        start=start,
        end=start + num_pages * PAGE_TOKENS + tail_tokens,
        page_tokens=PAGE_TOKENS,
        tail_tokens=tail_tokens,
        has_row=True,
    )
    return msgspec.structs.replace(identity, **fields)


def token_ids(record: RecordIdentity) -> bytes:
    """Its tokens: their own positions."""
    return b"".join(token.to_bytes(4, "little") for token in range(record.start, record.end))


@contextlib.contextmanager
def managing(
    root: Path, *, security: Security = Security.TLS, memory_bytes: int = 0, **limits: Any
) -> Iterator[PoolServer]:
    """A manager over ``root``; ``limits`` as of :class:`PoolLimits`."""
    storage = open_local_storage(root)
    settings = ServerSettings(
        address=Address("127.0.0.1", 0),
        key=KEY,
        security=security,
        name="test",
        place=str(root),
        limits=PoolLimits(**limits),
        memory_bytes=memory_bytes,
    )
    server = PoolServer(settings, storage)
    server.start()
    try:
        yield server
    finally:
        server.close()
        storage.close()


def connect(server: PoolServer, rank: int = 0, **fields: Any) -> PoolClient:
    """A registered rank; ``fields`` replace what it says of itself, and ``key`` the pool's."""
    register = Register(
        protocol=POOL_PROTOCOL,
        namespace=NAMESPACE,
        set_fingerprint=SET,
        world_size=WORLD,
        rank=rank,
        session=SESSION,
        instance="test",
        model="model",
        buffers=(1,),
    )
    return connect_to_pool(
        Address("127.0.0.1", server.port),
        key=fields.pop("key", KEY),
        security=server.settings.security,
        register=msgspec.structs.replace(register, **fields),
        on_lost=lambda _: None,
    )


class PoolRank:
    """A rank with its shelf of the pool switched on, put from its disk or from its memory tier.

    ``rank`` has ``geometry``, ``pages``, ``disk`` and ``memory`` shelves.
    """

    def __init__(self, rank: Any, server: PoolServer, *, tier: Tier = Tier.DISK) -> None:
        self.rank = rank
        self.client = connect(server, rank.geometry.rank)
        self.shelf = PoolShelf(
            geometry=rank.geometry,
            set_fingerprint=SET,
            passage=DirectPassage(aligned=False),
            source=rank.disk if tier is Tier.DISK else rank.memory,
            staging=allocate_staging(2, staging_bytes(rank.geometry)),
        )
        self.shelf.turn_on(SESSION, self.client)

    def put(self, record: RecordIdentity, *, extent: Extent = Extent.ROW) -> int:
        """Put the own shard; its size, 0 where the pool has the record."""
        job = Job(job_id=1, op=JobOp.PUT, tier=Tier.POOL, record=record, pool_session=SESSION, extent=extent)
        return run(self.shelf.put(job, since=time.monotonic()))

    def fetch(self, record: RecordIdentity, *, first_page: int = 12, with_row: bool = True) -> int:
        """Fetch all sections to pages from ``first_page`` on, and the row to slot 1."""
        sections = tuple(Section(index, first_page + index) for index in range(record.num_sections))
        slot = 1 if record.has_row and with_row else None
        job = Job(job_id=1, op=JobOp.FETCH, tier=Tier.POOL, record=record, pool_session=SESSION, sections=sections,
                  row_slot=slot)  # fmt: skip
        return run(self.shelf.fetch(job, self.rank.pages, since=time.monotonic()))

    def commit(self, record: RecordIdentity, *, extent: Extent = Extent.ROW) -> Reply:
        """Ask for the record to be made visible."""
        message = Commit(record=record, extent=extent, token_ids=token_ids(record))
        return self.client.request(message, timeout_seconds=5)

    def close(self) -> None:
        """Leave the pool."""
        self.shelf.turn_off("the test ends")
        self.client.close()


def run(transfer: Transfer) -> int:
    """All parts one after the other."""
    try:
        for part in transfer.parts:
            transfer.run(part)
        return transfer.finish()
    except BaseException:
        transfer.abandon()
        raise


@contextlib.contextmanager
def sharing(
    open_rank: Callable[[int, int], Any], server: PoolServer, tier: Tier = Tier.DISK
) -> Iterator[list[PoolRank]]:
    """Two ranks of one instance."""
    ranks = [PoolRank(open_rank(rank, WORLD), server, tier=tier) for rank in range(WORLD)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def share(ranks: list[PoolRank], record: RecordIdentity, tier: Tier = Tier.DISK) -> None:
    """Store on every rank, put every shard, commit."""
    for rank in ranks:
        rank.rank.store(record, tier=tier)
        rank.put(record)
    reply = ranks[0].commit(record)
    if reply != Committed(store_id=record.store_id):
        msg = f"the commit was answered with {reply}"
        raise AssertionError(msg)
