"""A manager over a real directory, and ranks' shelves on real sockets: put, commit, find, get; and what goes wrong."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from flare_cache.host_memory import DirectPassage
from flare_cache.jobs import Extent, Job, JobOp, RecordIdentity, Section
from flare_cache.pool.admin_client import connect_admin
from flare_cache.pool.admin_messages import Collect, ListRecords, Status, Verify
from flare_cache.pool.client import PoolClient, PoolRefused, PoolUnavailable, connect_to_pool
from flare_cache.pool.core_words import PoolLimits
from flare_cache.pool.local_storage import open_local_storage
from flare_cache.pool.manifest import namespace_id
from flare_cache.pool.messages import (
    POOL_PROTOCOL,
    Commit,
    Committed,
    Find,
    Found,
    GetStart,
    Has,
    Presence,
    PutStart,
    Refused,
    RefusedReason,
    Register,
)
from flare_cache.pool.server import PoolServer, ServerSettings
from flare_cache.pool.shelf import PoolShelf, staging_bytes
from flare_cache.pool.staging import BufferState, allocate_staging
from flare_cache.record import RecordError
from flare_core.errors import UsageError
from flare_core.prefix import Tier
from flare_transport import Address, Security

SET = hashlib.sha256(b"the set of the tests").digest()
PAGE_TOKENS = 4
KEY = bytes(range(32))
SESSION = b"session-16-bytes"
NAMESPACE = namespace_id(SET, bytes(16))
WORLD = 2


def make_record(name: str, *, start: int = 0, num_pages: int = 3, tail_tokens: int = 2, **fields) -> RecordIdentity:
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
    return b"".join(token.to_bytes(4, "little") for token in range(record.start, record.end))


@contextlib.contextmanager
def managing(root: Path, *, security: Security = Security.TLS, memory_bytes: int = 0, **limits) -> Iterator[PoolServer]:
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


def connect(server: PoolServer, rank: int = 0, **fields) -> PoolClient:
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
    """A rank with its shelf of the pool switched on, put from its disk or from its memory tier."""

    def __init__(self, rank, server: PoolServer, *, tier: Tier = Tier.DISK) -> None:
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
        job = Job(job_id=1, op=JobOp.PUT, tier=Tier.POOL, record=record, pool_session=SESSION, extent=extent)
        return run(self.shelf.put(job, since=time.monotonic()))

    def fetch(self, record: RecordIdentity, *, first_page: int = 12, with_row: bool = True) -> int:
        sections = tuple(Section(index, first_page + index) for index in range(record.num_sections))
        slot = 1 if record.has_row and with_row else None
        job = Job(job_id=1, op=JobOp.FETCH, tier=Tier.POOL, record=record, pool_session=SESSION, sections=sections,
                  row_slot=slot)  # fmt: skip
        return run(self.shelf.fetch(job, self.rank.pages, since=time.monotonic()))

    def commit(self, record: RecordIdentity, *, extent: Extent = Extent.ROW) -> object:
        message = Commit(record=record, extent=extent, token_ids=token_ids(record))
        return self.client.request(message, timeout_seconds=5)

    def close(self) -> None:
        self.shelf.turn_off("the test ends")
        self.client.close()


def run(transfer) -> int:
    try:
        for part in transfer.parts:
            transfer.run(part)
        return transfer.finish()
    except BaseException:
        assert transfer.abandon()
        raise


@contextlib.contextmanager
def sharing(open_rank, server: PoolServer, tier: Tier = Tier.DISK) -> Iterator[list[PoolRank]]:
    ranks = [PoolRank(open_rank(rank, WORLD), server, tier=tier) for rank in range(WORLD)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def share(ranks: list[PoolRank], record: RecordIdentity, tier: Tier = Tier.DISK) -> None:
    """Store on every rank, put every shard, commit."""
    for rank in ranks:
        assert rank.rank.store(record, tier=tier).status == "ok"
        assert rank.put(record) > 0
    assert ranks[0].commit(record) == Committed(store_id=record.store_id)


@pytest.mark.parametrize("security", [Security.TLS, Security.PLAINTEXT], ids=["tls", "plaintext"])
@pytest.mark.parametrize("tier", [Tier.DISK, Tier.MEMORY])
@pytest.mark.parametrize("memory_bytes", [0, 1 << 24], ids=["from-storage", "from-memory"])
def test_every_rank_gets_back_the_bytes_that_it_put(open_rank, tmp_path, security, tier, memory_bytes) -> None:
    record = make_record("a")
    with (
        managing(tmp_path / "pool", security=security, memory_bytes=memory_bytes) as server,
        sharing(open_rank, server, tier) as ranks,
    ):
        share(ranks, record, tier)
        for rank in ranks:
            assert rank.fetch(record) > 0
            count = record.num_sections
            assert rank.rank.page_bytes(12, count) == rank.rank.page_bytes(0, count)
            assert bytes(rank.rank.pages.row(1)) == bytes(rank.rank.pages.row(0))


def test_a_record_is_visible_only_when_every_shard_is_in(open_rank, tmp_path) -> None:
    record = make_record("a")
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        for rank in ranks:
            rank.rank.store(record)
        ranks[0].put(record)
        reply = ranks[0].commit(record)
        assert isinstance(reply, Refused)
        assert (reply.reason, reply.detail) == (RefusedReason.INCOMPLETE, "no shard of ranks [1]")
        assert ranks[1].client.request(Has(keys=record.key), timeout_seconds=5) == Presence(present=b"\0")
        with pytest.raises(RecordError, match="missing"):
            ranks[0].fetch(record)
        ranks[1].put(record)
        assert isinstance(ranks[0].commit(record), Committed)
        assert ranks[1].client.request(Has(keys=record.key), timeout_seconds=5) == Presence(present=b"\1")


def test_what_was_acknowledged_outlives_the_manager_and_what_was_not_committed_is_collected(
    open_rank, tmp_path
) -> None:
    kept, lost = make_record("kept"), make_record("lost")
    root = tmp_path / "pool"
    with managing(root) as server, sharing(open_rank, server) as ranks:
        share(ranks, kept)
        ranks[0].rank.store(lost)
        ranks[0].put(lost)
    with managing(root, grace_seconds=0.0) as server:
        with contextlib.closing(PoolRank(open_rank(0, WORLD, path=tmp_path / "other"), server)) as rank:
            assert rank.client.registered.num_records == 1
            assert rank.fetch(kept) > 0
        with connect_admin(Address("127.0.0.1", server.port), key=KEY, security=Security.TLS) as operator:
            assert operator.ask(Collect()).num_objects == 1
            assert operator.ask(Collect()).num_objects == 0
            assert operator.ask(Verify(count=10)).bad == ()


def test_a_truncated_record_is_put_and_restored_as_far_as_it_goes(open_rank, tmp_path) -> None:
    record = make_record("a")
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        for rank in ranks:
            rank.rank.store(record)
            assert rank.rank.truncate(record, keep_tail=True).status == "ok"
            with pytest.raises(RecordError, match="truncated"):
                rank.put(record)
            rank.put(record, extent=Extent.TAIL)
        assert isinstance(ranks[0].commit(record, extent=Extent.TAIL), Committed)
        assert ranks[1].fetch(record, with_row=False) > 0
        with pytest.raises(RecordError, match="truncated"):
            ranks[1].fetch(record, with_row=True)


def test_a_flipped_bit_in_a_put_is_refused_and_in_the_pool_is_a_miss_that_removes_the_record(
    open_rank, tmp_path
) -> None:
    record, other = make_record("a"), make_record("b")
    root = tmp_path / "pool"
    with managing(root) as server, sharing(open_rank, server) as ranks:
        ranks[0].rank.store(other)
        flip(ranks[0].rank.path(other), -100)
        with pytest.raises(OSError, match="pool-corrupt"):
            ranks[0].put(other)
        assert not list((root / "tmp").iterdir())
        share(ranks, record)
        shard = next(path for path in root.rglob(f"{record.key.hex()}.*.1"))
        flip(shard, shard.stat().st_size // 2)
        with pytest.raises(RecordError, match="section-digest"):
            ranks[1].fetch(record)
        wait_until(lambda: ranks[0].client.request(Has(keys=record.key), timeout_seconds=5).present == b"\0")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def wait_until(is_so, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_instances_of_one_namespace_share_and_the_first_commit_stays(open_rank, tmp_path) -> None:
    first = make_record("a")
    second = msgspec.structs.replace(first, store_id=bytes(16))
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        share(ranks, first)
        other = open_rank(0, WORLD, path=tmp_path / "other")
        other.store(second)
        with contextlib.closing(PoolRank(other, server)) as rank:
            assert rank.put(second) == 0
            assert rank.commit(second) == Committed(store_id=first.store_id)
            with pytest.raises(RecordError, match="missing"):
                rank.fetch(second)
            assert rank.fetch(first) > 0


def test_instances_of_another_namespace_see_nothing(open_rank, tmp_path) -> None:
    record = make_record("a")
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        share(ranks, record)
        with contextlib.closing(connect(server, namespace=bytes(32))) as stranger:
            assert (stranger.registered.num_records, stranger.registered.num_other_records) == (0, 1)
            assert stranger.request(Has(keys=record.key), timeout_seconds=5) == Presence(present=b"\0")
            message = GetStart(key=record.key, store_id=record.store_id, rank=0)
            assert stranger.request(message, timeout_seconds=5).reason is RefusedReason.MISSING


def test_a_find_tells_the_run_and_what_goes_on_behind_it(open_rank, tmp_path) -> None:
    record = make_record("a", tail_tokens=0, num_pages=2, has_row=False)
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        share(ranks, record)
        from flare_cache.index import Record

        keys = Record(record, token_ids(record), 0, 0, False).page_keys()
        found = ranks[0].client.request(
            Find(root=record.start_key, keys=b"".join([*keys, bytes(32)]), first_page=0, next_ids=b""),
            timeout_seconds=5,
        )
        assert isinstance(found, Found)
        assert ([one.record for one in found.manifests], found.num_pages) == ([record], 2)
        behind = ranks[0].client.request(
            Find(root=record.start_key, keys=bytes(32), first_page=0, next_ids=b""), timeout_seconds=5
        )
        assert ([one.record for one in behind.manifests], behind.num_pages) == ([record], 0)


def test_the_limit_evicts_what_was_used_longest_ago_and_the_quota_refuses_what_cannot_fit(open_rank, tmp_path) -> None:
    records = [make_record(name) for name in "abc"]
    with managing(tmp_path / "size") as server, sharing(open_rank, server) as ranks:
        share(ranks, records[0])
        size = server.core.num_bytes
    again = open_rank_again(open_rank, tmp_path)
    with (
        managing(tmp_path / "pool", limit_bytes=2 * size, quota_bytes=2 * size) as server,
        sharing(again, server) as ranks,
    ):
        share(ranks, records[0])
        share(ranks, records[1])
        ranks[0].fetch(records[0])
        share(ranks, records[2])
        present = ranks[0].client.request(Has(keys=b"".join(one.key for one in records)), timeout_seconds=5)
        assert present == Presence(present=b"\1\0\1")
        large = PutStart(record=make_record("large"), extent=Extent.ROW, rank=0, num_bytes=4 * size // 4096 * 4096)
        assert ranks[0].client.request(large, timeout_seconds=5).reason is RefusedReason.QUOTA


def open_rank_again(open_rank, tmp_path):
    return lambda rank, world: open_rank(rank, world, path=tmp_path / f"again-{rank}")


def test_a_child_is_not_visible_without_what_it_extends(open_rank, tmp_path) -> None:
    parent = make_record("parent", tail_tokens=0)
    child = make_record("child", start=parent.end, parent_key=parent.key)
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        for rank in ranks:
            rank.rank.store(child)
            rank.put(child)
        assert ranks[0].commit(child).reason is RefusedReason.INCOMPLETE
        share(ranks, parent)
        assert isinstance(ranks[0].commit(child), Committed)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"protocol": 99}, "version"), ({"rank": 7}, "malformed"), ({"namespace": b"short"}, "malformed")],
    ids=["protocol", "rank", "namespace"],
)
def test_a_rank_that_is_not_what_it_should_be_is_refused_by_name(tmp_path, fields, reason) -> None:
    with managing(tmp_path / "pool") as server, pytest.raises(PoolRefused, match=reason):
        connect(server, **fields)


def test_another_key_and_a_closed_port_are_told_apart(tmp_path) -> None:
    with managing(tmp_path / "pool") as server:
        with pytest.raises(PoolRefused, match="the pool keys differ"):
            connect(server, key=bytes(32))
        port = server.port
    with pytest.raises(PoolUnavailable, match="refused"):
        connect_admin(Address("127.0.0.1", port), key=KEY, security=Security.TLS)


def test_a_transfer_belongs_to_its_session_and_each_range_of_it_is_given_once(open_rank, tmp_path) -> None:
    record = make_record("a")
    with managing(tmp_path / "pool", security=Security.PLAINTEXT) as server, sharing(open_rank, server) as ranks:
        share(ranks, record)
        client = ranks[0].client
        grant = client.request(GetStart(key=record.key, store_id=record.store_id, rank=0), timeout_seconds=5)
        from flare_transport import BulkUnit, UnitOp, UnitStatus
        from flare_transport.bulk_socket import receive_answer, receive_into, send_all

        def ask(through: PoolClient, key: bytes, op: UnitOp = UnitOp.GET) -> UnitStatus:
            with contextlib.closing(through.open_bulk(timeout_seconds=5)) as sock:
                unit = BulkUnit.make(key, op, grant.transfer, offset=0, length=4096)
                send_all(sock, memoryview(unit.encode()))
                answer = receive_answer(sock)
                if answer.status is UnitStatus.OK:
                    receive_into(sock, memoryview(bytearray(answer.length)))
                return answer.status

        own_key = client.transfer_key(grant.transfer)
        assert ask(client, bytes(32)) is UnitStatus.UNKNOWN
        assert ask(ranks[1].client, own_key) is UnitStatus.UNKNOWN
        assert ask(ranks[1].client, ranks[1].client.transfer_key(grant.transfer)) is UnitStatus.UNKNOWN
        assert ask(client, own_key, UnitOp.PUT) is UnitStatus.UNKNOWN
        assert ask(client, own_key) is UnitStatus.OK
        assert ask(client, own_key) is UnitStatus.UNKNOWN


def test_a_manager_that_dies_in_a_transfer_fails_the_job_at_once_and_frees_the_buffer(open_rank, tmp_path) -> None:
    record = make_record("a")
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        share(ranks, record)
        sections = tuple(Section(index, 12 + index) for index in range(record.num_sections))
        job = Job(job_id=1, op=JobOp.FETCH, tier=Tier.POOL, record=record, pool_session=SESSION, sections=sections,
                  row_slot=1)  # fmt: skip
        transfer = ranks[0].shelf.fetch(job, ranks[0].rank.pages, since=time.monotonic())
        server.close()
        with pytest.raises(OSError, match=r"pool|connection|closed"):
            transfer.run(transfer.parts[0])
        assert transfer.abandon()
        assert ranks[0].shelf.staging.num_quarantined == 0
        with pytest.raises(OSError, match="pool"):
            ranks[0].fetch(record)


def test_a_silent_manager_costs_a_job_its_budget_and_no_more(open_rank, tmp_path) -> None:
    """The manager's machine is there, accepts, and says nothing: the request ends in time and as a failure."""
    record = make_record("a")
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        share(ranks, record)
        server._lock.acquire()
        try:
            job = Job(job_id=1, op=JobOp.FETCH, tier=Tier.POOL, record=record, pool_session=SESSION,
                      sections=(Section(0, 12),))  # fmt: skip
            with pytest.raises(PoolUnavailable, match="no answer to GetStart"):
                ranks[0].shelf.fetch(job, ranks[0].rank.pages, since=time.monotonic() - 3.0)
        finally:
            server._lock.release()


def test_a_job_of_another_session_is_a_miss(open_rank, tmp_path) -> None:
    record = make_record("a")
    with managing(tmp_path / "pool") as server, sharing(open_rank, server) as ranks:
        share(ranks, record)
        job = Job(job_id=1, op=JobOp.FETCH, tier=Tier.POOL, record=record, pool_session=bytes(16),
                  sections=(Section(0, 12),))  # fmt: skip
        with pytest.raises(RecordError, match="missing"):
            ranks[0].shelf.fetch(job, ranks[0].rank.pages, since=time.monotonic())
        ranks[0].shelf.turn_off("rank 1: no")
        with pytest.raises(RecordError, match="rank 1: no"):
            ranks[0].fetch(record)


def test_an_unknown_buffer_is_never_lent_again() -> None:
    staging = allocate_staging(2, 4096)
    quiet, unknown = staging.take(time.monotonic() + 1), staging.take(time.monotonic() + 1)
    staging.give_back(quiet, BufferState.QUIET)
    staging.give_back(unknown, BufferState.UNKNOWN)
    assert staging.num_quarantined == 1
    assert staging.take(time.monotonic() + 1) is quiet
    with pytest.raises(TimeoutError, match="1 are quarantined"):
        staging.take(time.monotonic() + 0.01)


def test_an_operator_sees_who_is_there_and_what_is_held(open_rank, tmp_path) -> None:
    record = make_record("a")
    with managing(tmp_path / "pool", memory_bytes=1 << 24) as server, sharing(open_rank, server) as ranks:
        share(ranks, record)
        with connect_admin(Address("127.0.0.1", server.port), key=KEY, security=Security.TLS) as operator:
            status = operator.ask(Status())
            assert [one.num_records for one in status.namespaces] == [1]
            assert sorted(one.rank for one in status.sessions) == [0, 1]
            assert status.memory_bytes == status.namespaces[0].num_bytes > 0
            lines = operator.ask(ListRecords())
            assert [line.key for line in lines.records] == [record.key.hex()]
            verified = operator.ask(Verify(count=10))
            assert (verified.num_records, verified.bad) == (1, ())
            shard = next((tmp_path / "pool").rglob(f"{record.key.hex()}.*.0"))
            flip(shard, 5000)
            verified = operator.ask(Verify(count=10, remove=True))
            assert verified.bad[0][1].startswith("rank 0: section-digest")
            assert operator.ask(ListRecords()).total == 0


def test_a_directory_belongs_to_one_manager_and_is_private(tmp_path) -> None:
    storage = open_local_storage(tmp_path / "pool")
    with pytest.raises(UsageError, match="used by another manager"):
        open_local_storage(tmp_path / "pool")
    storage.close()
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(UsageError, match="chmod 700"):
        open_local_storage(tmp_path / "open")


def test_many_silent_strangers_keep_no_rank_out(tmp_path) -> None:
    with managing(tmp_path / "pool") as server, contextlib.ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        client = connect(server)
        assert client.is_open
        client.close()


def test_garbage_on_a_link_ends_that_link_only(tmp_path) -> None:
    with managing(tmp_path / "pool") as server:
        client, other = connect(server), connect(server, 1)
        from flare_cache.pool.messages import POOL_REQUEST

        client._link.send(POOL_REQUEST, secrets.token_bytes(100))
        wait_until(lambda: not client.is_open)
        assert other.request(Has(keys=bytes(32)), timeout_seconds=5) == Presence(present=b"\0")
        other.close()
        client.close()
        assert threading.active_count() < 50
