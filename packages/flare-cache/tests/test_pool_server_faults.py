"""A real manager and ranks on real sockets: who is refused, what ends, and what it costs."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from pathlib import Path

import pytest

from flare_cache.jobs import Job, JobOp, Section
from flare_cache.pool.admin_client import connect_admin
from flare_cache.pool.admin_messages import ListRecords, Status, Verify
from flare_cache.pool.client import PoolClient, PoolRefused, PoolUnavailable
from flare_cache.pool.local_storage import open_local_storage
from flare_cache.pool.messages import (
    MAX_WORLD_SIZE,
    POOL_REQUEST,
    GetStart,
    Has,
    Presence,
)
from flare_cache.pool.staging import BufferState, allocate_staging
from flare_cache.pool.testing_manager import (
    KEY,
    SESSION,
    connect,
    make_record,
    managing,
    share,
    sharing,
)
from flare_cache.record import RecordError
from flare_core.errors import UsageError
from flare_core.prefix import Tier
from flare_transport import Address, BulkUnit, Security, UnitOp, UnitStatus
from flare_transport.bulk_socket import receive_answer, receive_into, send_all


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def wait_until(is_so, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol": 99}, "version"),
        ({"rank": 7}, "malformed"),
        ({"world_size": MAX_WORLD_SIZE + 1}, "malformed"),
        ({"namespace": b"short"}, "malformed"),
    ],
    ids=["protocol", "rank", "world size", "namespace"],
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

        client._link.send(POOL_REQUEST, secrets.token_bytes(100))
        wait_until(lambda: not client.is_open)
        assert other.request(Has(keys=bytes(32)), timeout_seconds=5) == Presence(present=b"\0")
        other.close()
        client.close()
        assert threading.active_count() < 50
