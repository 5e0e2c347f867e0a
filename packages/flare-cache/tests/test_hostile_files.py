"""Small files of a record directory of any kind and content, and what someone may do who can write there."""

from __future__ import annotations

import hashlib
import os
import struct
import time

import msgspec
import pytest

from flare_cache.digest import DIGEST_BYTES, section_digest
from flare_cache.directory import RecordDirectory
from flare_cache.jobs import JobStatus
from flare_cache.join_index import JOIN_INDEX_NAME, read_join_index
from flare_cache.record import BOUND, TOKENS_AT, Problem, RecordError, decode_header, encode_header, file_layout
from flare_cache.scan import save_join_index
from flare_cache.set_file import SET_FILE_NAME
from flare_core.errors import UsageError
from flare_core.geometry import align_up

KINDS = ["empty", "garbage", "directory", "fifo", "link", "broken link", "sparse"]


def make(path, kind: str) -> None:
    match kind:
        case "empty":
            path.touch()
        case "garbage":
            path.write_bytes(os.urandom(5000))
        case "directory":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "link":
            path.symlink_to("/etc/hostname")
        case "broken link":
            path.symlink_to("nowhere")
        case "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 40)


def deep(num_bytes: int) -> bytes:
    return b'{"fields":' + b'{"a":' * num_bytes


def test_whoever_may_write_the_directory_can_forge_a_record(open_rank, new_identity) -> None:
    """Digests guard against chance: someone who makes them anew is believed."""
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    layout = file_layout(record, page_bytes=rank.geometry.page_bytes, row_stride=rank.geometry.row_stride)
    data = bytearray(rank.path(record).read_bytes())
    at = layout.section_offset(0)
    forged = b"forged".ljust(layout.page_bytes, b"!")
    data[at : at + layout.page_bytes] = forged
    digests_at = align_up(TOKENS_AT + 4 * (record.end - record.start), 64) + BOUND.size
    digest = section_digest(record.store_id, rank.geometry.rank, index=0, payload=[memoryview(forged)])
    data[digests_at : digests_at + DIGEST_BYTES] = digest
    header_end = layout.header_bytes - 32
    data[header_end : layout.header_bytes] = hashlib.sha256(data[:header_end]).digest()
    rank.path(record).write_bytes(data)
    assert rank.fetch(record, first_page=12).status is JobStatus.OK
    assert rank.page_bytes(12, 1) == [forged]


@pytest.mark.parametrize("kind", KINDS)
def test_a_join_idx_of_any_kind_is_at_worst_none(open_rank, new_identity, set_fingerprint, kind) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    make(rank.directory.path / JOIN_INDEX_NAME, kind)
    began = time.monotonic()
    assert [one.identity.key for one in rank.scan().records] == [record.key]
    assert time.monotonic() - began < 20
    index = read_join_index(rank.directory.files, set_fingerprint=set_fingerprint, geometry=rank.geometry)
    assert len(index.records) == 0


@pytest.mark.parametrize("extra", [b"\xc0", b"\x91" * 100_000 + b"\xc0"], ids=["a field more", "nested without end"])
def test_a_join_idx_with_a_right_digest_over_a_wrong_shape_is_none(
    open_rank, new_identity, set_fingerprint, extra
) -> None:
    rank = open_rank()
    rank.store(new_identity())
    save_join_index(rank.directory, rank.scan().records, geometry=rank.geometry, set_fingerprint=set_fingerprint)
    path = rank.directory.path / JOIN_INDEX_NAME
    data = path.read_bytes()
    magic, payload = data[:9], data[41:]
    payload = bytes((payload[0] + 1,)) + payload[1:] + extra
    path.write_bytes(magic + hashlib.sha256(payload).digest() + payload)
    scan = rank.scan()
    assert (len(scan.records), scan.num_hinted) == (1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_set_json_of_any_kind_is_refused_by_name(tmp_path, kind) -> None:
    directory = RecordDirectory.open(tmp_path / "records")
    try:
        make(tmp_path / "records" / SET_FILE_NAME, kind)
        with pytest.raises(UsageError, match=SET_FILE_NAME):
            directory.read_set()
    finally:
        directory.close()


@pytest.mark.parametrize("content", [deep(10), deep(100_000), b'{"format":' + b"9" * 5000, b"[" * 100_000, b"\xff\xfe"])
def test_a_set_json_of_any_content_is_refused_by_name(tmp_path, content) -> None:
    directory = RecordDirectory.open(tmp_path / "records")
    try:
        (tmp_path / "records" / SET_FILE_NAME).write_bytes(content)
        with pytest.raises(UsageError, match="damaged"):
            directory.read_set()
    finally:
        directory.close()


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[" * 4096, b'{"pid":' + b"9" * 4000, msgspec.json.encode({"pid": 1})]
)
def test_a_lock_of_any_content_can_be_taken_and_waited_for(tmp_path, content) -> None:
    path = tmp_path / "records"
    path.mkdir(mode=0o700)
    (path / "LOCK").write_bytes(content)
    directory = RecordDirectory.open(path)
    (path / "LOCK").write_bytes(content)
    with pytest.raises(UsageError, match="in use by another process"):
        RecordDirectory.open(path, lock_timeout_seconds=0.0)
    directory.close()


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "broken link"])
def test_a_lock_that_is_no_file_is_refused_by_name(tmp_path, kind) -> None:
    path = tmp_path / "records"
    path.mkdir(mode=0o700)
    make(path / "LOCK", kind)
    with pytest.raises(UsageError, match="cannot be written"):
        RecordDirectory.open(path)


@pytest.mark.parametrize("has_row", [True, False])
def test_a_header_whose_row_is_said_in_one_place_and_denied_in_another_is_refused(
    new_identity, new_geometry, set_fingerprint, has_row
) -> None:
    record = new_identity(has_row=has_row)
    digests = bytes(DIGEST_BYTES * (record.num_sections + has_row))
    header = bytearray(
        encode_header(
            record,
            bytes(4 * (record.end - record.start)),
            set_fingerprint=set_fingerprint,
            geometry=new_geometry(),
            digests=digests,
        )
    )
    bound_at = align_up(TOKENS_AT + 4 * (record.end - record.start), 64)
    row_bytes_at, file_bytes_at = bound_at + 40 + 5 * 8, bound_at + 40 + 6 * 8
    row_bytes, file_bytes = (struct.unpack_from("<Q", header, at)[0] for at in (row_bytes_at, file_bytes_at))
    other = 0 if has_row else 4096
    struct.pack_into("<Q", header, row_bytes_at, other)
    struct.pack_into("<Q", header, file_bytes_at, file_bytes - row_bytes + other)
    header[-32:] = hashlib.sha256(header[:-32]).digest()
    with pytest.raises(RecordError) as caught:
        decode_header(header)
    assert caught.value.problem is Problem.INCONSISTENT
