"""A manager over a real directory, and ranks' shelves on real sockets: put, commit, find, get, evict."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import pytest

from flare_cache.index import Record
from flare_cache.jobs import Extent
from flare_cache.pool.admin_client import connect_admin
from flare_cache.pool.admin_messages import Collect, Verify
from flare_cache.pool.messages import (
    Committed,
    Find,
    Found,
    GetStart,
    Has,
    Presence,
    PutStart,
    Refused,
    RefusedReason,
)
from flare_cache.pool.testing_manager import (
    KEY,
    WORLD,
    PoolRank,
    connect,
    make_record,
    managing,
    share,
    sharing,
    token_ids,
)
from flare_cache.record import RecordError
from flare_core.prefix import Tier
from flare_transport import Address, Security


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
