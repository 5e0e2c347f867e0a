"""Managers over one bucket of a server that speaks S3: each serves what came through the other, also alone."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator

import pytest

from flare_cache.host_memory import DirectPassage
from flare_cache.index import Record
from flare_cache.jobs import Extent, Job, JobOp, RecordIdentity, Section
from flare_cache.pool.admin_client import connect_admin
from flare_cache.pool.admin_messages import Collect, Verify
from flare_cache.pool.client import PoolClient, connect_to_pool
from flare_cache.pool.core_words import PoolLimits
from flare_cache.pool.messages import (
    POOL_PROTOCOL,
    Commit,
    Committed,
    Find,
    Has,
    Presence,
    RefusedReason,
    Register,
    Reply,
)
from flare_cache.pool.object_storage import ObjectStorage
from flare_cache.pool.server import PoolServer, ServerSettings
from flare_cache.pool.shelf import PoolShelf, staging_bytes
from flare_cache.pool.staging import allocate_staging
from flare_core.prefix import Tier
from flare_transport import Address, Security

PAGE_TOKENS = 4
KEY = bytes(range(32))
SESSION = b"session-16-bytes"
QUICK, NEVER = 0.0, 1e9


@contextlib.contextmanager
def managing(storage: ObjectStorage, *, refresh_seconds: float = QUICK, **limits) -> Iterator[PoolServer]:
    settings = ServerSettings(
        address=Address("127.0.0.1", 0), key=KEY, security=Security.TLS, name="test", place="s3", memory_bytes=0,
        limits=PoolLimits(**limits), refresh_seconds=refresh_seconds,
    )  # fmt: skip
    server = PoolServer(settings, storage)
    server.start()
    try:
        yield server
    finally:
        server.close()


def make_record(name: str, **fields) -> RecordIdentity:
    digest = hashlib.sha256(name.encode()).digest()
    values = {
        "key": digest, "store_id": digest[16:], "parent_key": b"", "start_key": hashlib.sha256(digest).digest(),
        "start": 0, "end": 3 * PAGE_TOKENS + 2, "page_tokens": PAGE_TOKENS, "tail_tokens": 2, "has_row": True,
    }  # fmt: skip
    return RecordIdentity(**(values | fields))


def token_ids(record: RecordIdentity) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in range(record.start, record.end))


class Failing:
    """A storage that a test exchanges for one that fails."""

    def __init__(self, good: ObjectStorage) -> None:
        self.good = self.used = good

    def __getattr__(self, name: str):
        return getattr(self.used, name)


class OneRank:
    """A group of one rank; it is in a session with one manager at a time."""

    def __init__(self, open_rank, set_fingerprint: bytes, path) -> None:
        self.rank = open_rank(0, 1, path=path)
        self.set_fingerprint = set_fingerprint
        self.shelf = PoolShelf(
            geometry=self.rank.geometry,
            set_fingerprint=set_fingerprint,
            passage=DirectPassage(aligned=False),
            source=self.rank.disk,
            staging=allocate_staging(2, staging_bytes(self.rank.geometry)),
        )
        self.client: PoolClient | None = None

    def join(self, server: PoolServer) -> None:
        self.leave()
        register = Register(
            protocol=POOL_PROTOCOL, namespace=bytes(32), set_fingerprint=self.set_fingerprint, world_size=1, rank=0,
            session=SESSION, instance="test", model="model", buffers=(1,),
        )  # fmt: skip
        self.client = connect_to_pool(
            Address("127.0.0.1", server.port), key=KEY, security=Security.TLS, register=register,
            on_lost=lambda _: None,
        )  # fmt: skip
        self.shelf.turn_on(SESSION, self.client)

    def leave(self) -> None:
        if self.client is not None:
            self.shelf.turn_off("left")
            self.client.close()

    def ask(self, request) -> Reply | None:
        assert self.client is not None
        return self.client.request(request, timeout_seconds=10)

    def share(self, record: RecordIdentity) -> Reply | None:
        assert self.rank.store(record).status == "ok"
        job = Job(job_id=1, op=JobOp.PUT, tier=Tier.POOL, record=record, pool_session=SESSION, extent=Extent.ROW)
        finish(self.shelf.put(job, since=time.monotonic()))
        return self.ask(Commit(record=record, extent=Extent.ROW, token_ids=token_ids(record)))

    def restored(self, record: RecordIdentity) -> bytes:
        sections = tuple(Section(index, 12 + index) for index in range(record.num_sections))
        job = Job(job_id=1, op=JobOp.FETCH, tier=Tier.POOL, record=record, pool_session=SESSION, sections=sections,
                  row_slot=1)  # fmt: skip
        finish(self.shelf.fetch(job, self.rank.pages, since=time.monotonic()))
        return self.rank.page_bytes(12, record.num_sections)

    def stored(self, record: RecordIdentity) -> bytes:
        return self.rank.page_bytes(0, record.num_sections)

    def wait_present(self, record: RecordIdentity, present: bytes) -> None:
        deadline = time.monotonic() + 20
        while self.ask(Has(keys=record.key)) != Presence(present=present):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def finish(transfer) -> None:
    for part in transfer.parts:
        transfer.run(part)
    transfer.finish()


@pytest.fixture
def join_ranks(open_rank, set_fingerprint, tmp_path):
    """``join_ranks(server, ...)``: groups of one rank, each with the manager named."""
    ranks: list[OneRank] = []

    def join(*servers: PoolServer) -> list[OneRank]:
        for server in servers:
            ranks.append(OneRank(open_rank, set_fingerprint, tmp_path / f"rank-{len(ranks)}"))
            ranks[-1].join(server)
        return ranks

    yield join
    for rank in ranks:
        rank.leave()


def test_what_was_put_through_one_manager_is_served_by_the_other_and_when_one_is_gone(open_bucket, join_ranks) -> None:
    first_record, second_record = make_record("first"), make_record("second")
    with managing(ObjectStorage(open_bucket())) as second:
        with managing(ObjectStorage(open_bucket())) as first:
            one, other = join_ranks(first, second)
            assert one.share(first_record) == Committed(store_id=first_record.store_id)
            other.wait_present(first_record, b"\1")
            assert other.restored(first_record) == one.stored(first_record)
            keys = b"".join(Record(first_record, token_ids(first_record), 0, 2, True).page_keys())
            found = other.ask(Find(root=first_record.start_key, keys=keys, first_page=0, next_ids=b""))
            assert ([each.record for each in found.manifests], found.num_pages) == ([first_record], 3)
        one.join(second)
        assert one.share(second_record) == Committed(store_id=second_record.store_id)
        assert other.restored(second_record) == one.stored(second_record)


def test_of_two_that_put_the_same_record_through_two_managers_the_first_stays(open_bucket, join_ranks) -> None:
    record = make_record("same")
    again = make_record("same", store_id=bytes(16))
    storage = ObjectStorage(open_bucket())
    # The second manager never looks: only the bucket itself can tell it.
    with managing(storage) as first, managing(ObjectStorage(open_bucket()), refresh_seconds=NEVER) as second:
        one, other = join_ranks(first, second)
        assert one.share(record) == Committed(store_id=record.store_id)
        assert other.ask(Has(keys=record.key)) == Presence(present=b"\0")
        assert other.share(again) == Committed(store_id=record.store_id)
        assert other.ask(Has(keys=record.key)) == Presence(present=b"\1")
        assert other.restored(record) == one.stored(record)


def test_what_one_manager_removes_the_other_offers_no_more(open_bucket, join_ranks) -> None:
    record, large = make_record("old"), make_record("new")
    with managing(ObjectStorage(open_bucket())) as second:
        with managing(ObjectStorage(open_bucket())) as first:
            one, other = join_ranks(first, second)
            one.share(record)
            other.wait_present(record, b"\1")
            size = first.core.num_bytes
        with managing(ObjectStorage(open_bucket()), limit_bytes=size) as third:
            one.join(third)
            assert one.share(large) == Committed(store_id=large.store_id)
            other.wait_present(record, b"\0")
            other.wait_present(large, b"\1")


def test_a_manager_that_collects_leaves_what_another_has_just_made_visible(open_bucket, join_ranks) -> None:
    record = make_record("kept")
    with (
        managing(ObjectStorage(open_bucket())) as first,
        managing(ObjectStorage(open_bucket()), refresh_seconds=NEVER, grace_seconds=0.0) as second,
    ):
        one, other = join_ranks(first, second)
        one.share(record)
        with connect_admin(Address("127.0.0.1", second.port), key=KEY, security=Security.TLS) as operator:
            assert operator.ask(Collect()).num_objects == 0
        with connect_admin(Address("127.0.0.1", first.port), key=KEY, security=Security.TLS) as operator:
            assert operator.ask(Verify(count=10)).bad == ()
        assert one.restored(record) == one.stored(record)
        assert other.ask(Has(keys=record.key)) == Presence(present=b"\0")


def test_a_bucket_that_fails_refuses_the_put_in_time_and_the_session_goes_on(open_bucket, join_ranks) -> None:
    record, later = make_record("lost"), make_record("later")
    storage = Failing(ObjectStorage(open_bucket()))
    with managing(storage) as server:
        (one,) = join_ranks(server)
        storage.used = ObjectStorage(open_bucket("no-such-bucket"))
        with pytest.raises(OSError, match=RefusedReason.STORAGE):
            one.share(record)
        storage.used = storage.good
        assert one.share(later) == Committed(store_id=later.store_id)
