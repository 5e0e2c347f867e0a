"""The scan: every sound record, in the order of use, and what join.idx may and may not spare it."""

from __future__ import annotations

import os

import msgspec
import pytest

from flare_cache import scan as scan_module
from flare_cache.jobs import record_file_name
from flare_cache.join_index import JOIN_INDEX_NAME
from flare_cache.record_table import RecordTable
from flare_cache.scan import save_join_index


@pytest.fixture
def rank(open_rank, new_identity):
    rank = open_rank()
    for name in "abcd":
        rank.store(new_identity(name))
    return rank


def save(rank, records) -> None:
    table, fingerprint = RecordTable.of(records), rank.disk.set_fingerprint
    save_join_index(rank.directory, table, geometry=rank.geometry, set_fingerprint=fingerprint)


def test_every_record_is_found_with_its_tokens_and_digest(rank, new_identity) -> None:
    found = rank.scan()
    assert {record.identity for record in found.records} == {new_identity(name) for name in "abcd"}
    assert all(len(record.token_ids) == 4 * 14 for record in found.records)
    assert len({record.invariant_digest for record in found.records}) == 4
    assert (found.num_hinted, found.damaged, found.left) == (0, [], [])
    assert rank.directory.charged_bytes == sum(record.size for record in found.records)


def test_ranks_agree_on_the_digest_of_a_store(open_rank, new_identity) -> None:
    digests = set()
    for number in range(2):
        rank = open_rank(number)
        rank.fill(seed=number + 5)
        rank.store(new_identity())
        digests.add(rank.scan().records[0].invariant_digest)
    assert len(digests) == 1


def test_join_idx_spares_the_headers_and_keeps_the_order_of_use(rank, monkeypatch) -> None:
    records = rank.scan().records
    order = [records[2], records[0], records[3], records[1]]
    save(rank, order)
    monkeypatch.setattr(scan_module, "sound_headers", None)
    found = rank.scan()
    assert list(found.records) == order
    assert found.num_hinted == 4
    assert rank.scan(with_token_ids=False).records[0].token_ids == b""


def test_records_that_join_idx_does_not_know_come_last(rank, new_identity) -> None:
    records = sorted(rank.scan().records, key=lambda record: record.identity.key, reverse=True)
    save(rank, records)
    rank.store(new_identity("new"))
    found = rank.scan()
    assert [record.identity for record in found.records] == [r.identity for r in records] + [new_identity("new")]
    assert found.num_hinted == 4


def test_a_record_changed_after_join_idx_was_written_is_read_again(rank, new_identity) -> None:
    save(rank, rank.scan().records)
    rank.truncate(new_identity("a"))
    rank.unlink(new_identity("b"))
    rank.unlink(new_identity("c"))
    again = msgspec.structs.replace(new_identity("c"), store_id=bytes(16))
    rank.store(again)
    found = {record.identity.key: record for record in rank.scan().records}
    assert len(found) == 3
    assert rank.scan().num_hinted == 1
    assert not found[new_identity("a").key].has_tail
    assert found[again.key].identity == again


def test_a_hint_without_tokens_does_not_do_where_tokens_are_needed(rank) -> None:
    save(rank, rank.scan(with_token_ids=False).records)
    assert rank.scan(with_token_ids=False).num_hinted == 4
    found = rank.scan()
    assert found.num_hinted == 0
    assert all(record.token_ids for record in found.records)


def test_records_gone_before_the_exit_are_not_in_join_idx(rank, new_identity) -> None:
    records = rank.scan().records
    rank.unlink(new_identity("a"))
    save(rank, records)
    assert len(rank.scan().records) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text", "folder", "other-set"])
def test_a_damaged_or_foreign_join_idx_is_as_good_as_none(rank, damage) -> None:
    records = rank.scan().records
    path = rank.directory.path / JOIN_INDEX_NAME
    fingerprint = bytes(32) if damage == "other-set" else rank.disk.set_fingerprint
    save_join_index(rank.directory, RecordTable.of(records), geometry=rank.geometry, set_fingerprint=fingerprint)
    data = path.read_bytes()
    match damage:
        case "flip":
            path.write_bytes(data[:200] + bytes([data[200] ^ 1]) + data[201:])
        case "cut":
            path.write_bytes(data[:-5])
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_bytes(data[:9] + b"x" * 100)
        case "folder":
            path.unlink()
            path.mkdir()
    found = rank.scan()
    assert found.num_hinted == 0
    assert {record.identity for record in found.records} == {record.identity for record in records}


def test_a_join_idx_of_another_shape_is_ignored(rank) -> None:
    import hashlib

    data = msgspec.msgpack.encode([1, 2])
    (rank.directory.path / JOIN_INDEX_NAME).write_bytes(b"FLAREIDX2" + hashlib.sha256(data).digest() + data)
    assert rank.scan().num_hinted == 0


def test_a_hint_of_a_size_that_is_no_record_is_not_believed(rank, new_identity) -> None:
    os.truncate(rank.path(new_identity("a")), 100)
    records = [
        msgspec.structs.replace(record, size=100) if record.identity == new_identity("a") else record
        for record in rank.scan().records
    ]
    save(rank, [*records, rank.scan().records[0]])
    os.truncate(rank.path(new_identity("b")), 5000)
    found = rank.scan()
    assert len(found.records) == 2
    assert len(found.damaged) == 2


def test_a_join_idx_that_cannot_be_written_leaves_nothing(rank, monkeypatch) -> None:
    records = rank.scan().records

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        save(rank, records)
    monkeypatch.undo()
    assert not [name for name in rank.names() if "idx" in name]


@pytest.mark.parametrize("cold_waits", [0.0, 100.0])
def test_many_records_are_found_by_one_thread_or_several(open_rank, new_identity, monkeypatch, cold_waits) -> None:
    rank = open_rank()
    rank.store(new_identity())
    data = rank.path(new_identity()).read_bytes()
    names = [f"{number:064x}.rec" for number in range(600)]
    for name in names:
        (rank.directory.path / name).write_bytes(data)
    monkeypatch.setattr(scan_module, "_COLD_WAITS", cold_waits)
    found = rank.scan()
    assert [record.identity for record in found.records] == [new_identity()]
    assert sorted(file.name for file in found.damaged) == names
    assert record_file_name(new_identity().key) not in names
