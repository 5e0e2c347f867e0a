"""Files that are not what they should be: a miss with a reason, never a wrong byte, and nothing foreign touched."""

from __future__ import annotations

import hashlib
import os
import struct

import msgspec
import pytest

from flare_cache.jobs import JobStatus, record_file_name
from flare_cache.record import decode_header, encode_header, file_layout


def layout_of(rank, record):
    return file_layout(record, page_bytes=rank.geometry.page_bytes, row_stride=rank.geometry.row_stride)


def change_bytes(path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path, at: int) -> None:
    data = path.read_bytes()
    change_bytes(path, at, bytes([data[at] ^ 0x10]))


def signed(header: bytes, at: int, data: bytes) -> bytes:
    changed = bytearray(header)
    changed[at : at + len(data)] = data
    changed[-32:] = hashlib.sha256(changed[:-32]).digest()
    return bytes(changed)


@pytest.mark.parametrize("at", [0, 9, 20, 200, 300, 4000, 4095])
def test_a_flipped_header_is_a_miss_and_can_still_be_unlinked(open_rank, new_identity, at) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    flip(rank.path(record), at)
    assert rank.fetch(record).status is JobStatus.BAD_RECORD
    scan = rank.scan()
    assert not scan.records
    assert [file.name for file in scan.damaged + scan.left] == [rank.path(record).name]
    if scan.damaged:
        assert rank.unlink(record).status is JobStatus.OK
        assert rank.names() == []


@pytest.mark.parametrize("at", [*range(9), 10, 12, 13, 14, 15, 48, 100])
def test_a_flipped_header_of_this_set_is_removed_at_the_join(open_rank, new_identity, at) -> None:
    # A length that cannot be leaves the set readable; left alone, the file would refuse its key to every later store.
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    data = rank.path(record).read_bytes()
    change_bytes(rank.path(record), at, bytes([data[at] ^ (1 if at == 10 else 0x20)]))
    scan = rank.scan()
    assert [file.name for file in scan.damaged] == [rank.path(record).name]
    assert not scan.left


@pytest.mark.parametrize(("section", "name"), [(0, "section 0"), (2, "section 2"), (3, "section 3"), (4, "the row")])
@pytest.mark.parametrize("within", [0, 4095])
def test_a_flipped_page_tail_or_row_is_a_miss_that_names_it(open_rank, new_identity, section, name, within) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    flip(rank.path(record), layout_of(rank, record).section_offset(section) + within)
    result = rank.fetch(record)
    assert result.status is JobStatus.BAD_RECORD
    assert result.reason.startswith(f"section-digest: {name}")
    assert len(rank.scan().records) == 1


def test_pages_swapped_within_a_record_are_found(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    data, layout = rank.path(record).read_bytes(), layout_of(rank, record)
    first, second = layout.section_offset(0), layout.section_offset(1)
    change_bytes(rank.path(record), first, data[second : second + layout.page_bytes])
    change_bytes(rank.path(record), second, data[first : first + layout.page_bytes])
    assert rank.fetch(record).reason.startswith("section-digest: section")


def test_a_page_of_another_computation_is_found(open_rank, new_identity, tmp_path) -> None:
    rank, source = open_rank(), open_rank(path=tmp_path / "again")
    record = new_identity()
    again = msgspec.structs.replace(record, store_id=bytes(16))
    rank.store(record)
    source.fill(seed=2)
    source.store(again)
    at = layout_of(rank, record).section_offset(1)
    change_bytes(rank.path(record), at, source.path(again).read_bytes()[at : at + rank.geometry.page_bytes])
    assert rank.fetch(record).reason.startswith("section-digest: section 1")


def test_the_same_pages_stored_twice_have_other_digests(open_rank, new_identity, tmp_path) -> None:
    rank, source, peer = open_rank(), open_rank(path=tmp_path / "again"), open_rank(1)
    record = new_identity()
    again = msgspec.structs.replace(record, store_id=bytes(16))
    digests = set()
    for one, stored in ((rank, record), (source, again), (peer, record)):
        one.store(stored)
        digests |= {decode_header(one.path(stored).read_bytes()).digest_at(position) for position in range(5)}
    assert len(digests) == 15


@pytest.mark.parametrize("size", [0, 15, 4095, 4096, 10_000])
def test_a_file_shorter_than_its_pages_is_damaged(open_rank, new_identity, size) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    os.truncate(rank.path(record), size)
    assert rank.fetch(record).reason.startswith("truncated")
    scan = rank.scan()
    assert [file.reason.partition(":")[0] for file in scan.damaged] == ["truncated"]
    assert not scan.records


def test_a_size_between_two_legal_ones_counts_as_the_lower(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    layout = layout_of(rank, record)
    found = []
    for size in (layout.row_end + 1, layout.row_end, layout.row_end - 1, layout.tail_end, layout.tail_end - 1,
                 layout.pages_end):  # fmt: skip
        os.truncate(rank.path(record), size)
        (one,) = rank.scan().records
        found.append((one.size, one.has_tail, one.has_row))
    whole, tail, pages = (layout.row_end, True, True), (layout.tail_end, True, False), (layout.pages_end, False, False)
    assert found == [whole, whole, tail, tail, pages, pages]


def test_records_of_a_newer_format_are_left_charged_and_listed(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity()
    size = rank.store(record).num_bytes
    header = rank.path(record).read_bytes()[:4096]
    change_bytes(rank.path(record), 0, signed(header, 8, struct.pack("<HH", 9, 9)))
    scan = rank.scan()
    assert [(file.name, file.size) for file in scan.left] == [(rank.path(record).name, size)]
    assert "format 9" in scan.left[0].reason
    assert rank.directory.charged_bytes == size
    assert rank.unlink(record).status is JobStatus.FAILED
    assert rank.store(record).status is JobStatus.FAILED
    assert rank.names() == [rank.path(record).name]


def test_records_of_another_set_are_left(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    header = rank.path(record).read_bytes()[:4096]
    change_bytes(rank.path(record), 0, signed(header, 16, bytes(32)))
    assert rank.fetch(record).reason.startswith("other-set")
    assert rank.unlink(record).status is JobStatus.FAILED
    scan = rank.scan()
    assert (len(scan.left), len(scan.damaged)) == (1, 0)


def test_a_record_of_another_rank_is_damaged_here(open_rank, new_identity) -> None:
    first, second = open_rank(0), open_rank(1)
    record = new_identity()
    second.store(record)
    os.link(second.path(record), first.path(record))
    assert first.fetch(record).reason.startswith("other-rank: rank 1 of 2, this is rank 0 of 2")
    assert first.scan().damaged[0].reason.startswith("other-rank")


def test_a_misnamed_record_is_damaged(open_rank, new_identity) -> None:
    rank = open_rank()
    record, other = new_identity("a"), new_identity("b")
    rank.store(record)
    rank.path(record).rename(rank.path(other))
    assert rank.fetch(other).reason.startswith("other-record")
    assert rank.scan().damaged[0].reason.startswith("other-record: the file holds")


def test_foreign_names_and_things_that_are_no_files_are_left_alone(open_rank, new_identity) -> None:
    rank = open_rank()
    pipe, link, folder = (new_identity(name) for name in "plf")
    os.mkfifo(rank.path(pipe))
    rank.path(link).symlink_to("/etc/hostname")
    rank.path(folder).mkdir()
    for name in ("notes.txt", "abc.rec", f"{'0' * 64}.rec.bak"):
        (rank.directory.path / name).write_text("mine")
    before = rank.names()
    scan = rank.scan()
    assert not scan.records
    assert not scan.damaged
    assert {file.name for file in scan.left} == {record_file_name(one.key) for one in (pipe, link, folder)}
    for one in (pipe, link, folder):
        assert rank.fetch(one).status is not JobStatus.OK
    assert rank.names() == before


def test_a_header_of_many_tokens_is_read_whole(open_rank, new_identity) -> None:
    rank = open_rank()
    record = new_identity(num_pages=1, tail_tokens=0, has_row=False, start=0)
    long = msgspec.structs.replace(record, end=4 * 600)
    header = encode_header(
        long, bytes(4 * 4 * 600), set_fingerprint=rank.disk.set_fingerprint, geometry=rank.geometry,
        digests=bytes(16 * 600),
    )  # fmt: skip
    assert len(header) > 4096
    rank.path(long).write_bytes(header + bytes(600 * rank.geometry.page_bytes))
    (found,) = rank.scan().records
    assert found.identity == long
    assert found.token_ids == bytes(4 * 4 * 600)
    assert rank.scan(with_token_ids=False).records[0].token_ids == b""
    assert rank.truncate(long).status is JobStatus.OK
    os.truncate(rank.path(long), 8192)
    assert rank.scan().damaged[0].reason.startswith("truncated: 8192 of")
    assert rank.unlink(long).status is JobStatus.OK
