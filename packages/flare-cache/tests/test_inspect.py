"""Looking into a record directory, with a server at work in it or without."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from flare_cache.directory import RecordDirectory
from flare_cache.inspect import find_record, list_records, remove_records, verify_records
from flare_cache.record import Problem
from flare_core.errors import UsageError


@pytest.fixture
def family(open_rank, new_identity):
    """A rank with a tree of records: a root with two children, one of them with a child, and an orphan."""
    rank = open_rank()
    root = new_identity("root", start=0, parent_key=b"")
    first = new_identity("first", parent_key=root.key)
    second = new_identity("second", parent_key=root.key)
    deep = new_identity("deep", parent_key=first.key, num_pages=1, tail_tokens=0, has_row=False)
    orphan = new_identity("orphan")
    records = {"root": root, "first": first, "second": second, "deep": deep, "orphan": orphan}
    for record in records.values():
        rank.store(record)
    return rank, records


def test_records_are_listed_as_a_tree_while_a_server_works(family) -> None:
    rank, records = family
    rank.truncate(records["second"])
    listing = list_records(rank.directory.path)
    keys = {record.key: name for name, record in records.items()}
    found = [(keys[one.header.identity.key], one.depth, one.orphan) for one in listing.records]
    assert set(found) == {
        ("root", 0, False), ("first", 1, False), ("second", 1, False), ("deep", 2, False), ("orphan", 0, True),
    }  # fmt: skip
    names = [name for name, _, _ in found]
    assert names.index("root") < names.index("first") == names.index("deep") - 1
    assert listing.holder is not None
    assert listing.holder.pid == os.getpid()
    assert listing.set_file is None
    assert listing.num_bytes == rank.directory.charged_bytes
    second = find_record(listing, records["second"].key.hex())
    assert (second.has_tail, second.has_row) == (False, False)


def test_a_record_is_found_by_an_unambiguous_beginning_of_its_key(family) -> None:
    rank, records = family
    listing = list_records(rank.directory.path)
    key = records["deep"].key.hex()
    found = find_record(listing, key[:12].upper())
    assert found.header.identity == records["deep"]
    assert found.header.rank == 0
    assert len(found.header.token_ids) == 16
    with pytest.raises(UsageError, match="5 records"):
        find_record(listing, "")
    with pytest.raises(UsageError, match="0 records"):
        find_record(listing, "zz")


def test_verification_names_what_is_bad_and_reports_progress(family) -> None:
    rank, records = family
    rank.truncate(records["second"], keep_tail=True)
    path = rank.path(records["first"])
    for record, at in ((records["first"], 5000), (records["orphan"], path.stat().st_size - 1), (records["deep"], 30)):
        data = bytearray(rank.path(record).read_bytes())
        data[at] ^= 1
        rank.path(record).write_bytes(data)
    seen: list[tuple[str, int]] = []
    listing = list_records(rank.directory.path)
    assert [file.problem for file in listing.unusable] == [Problem.HEADER_DIGEST]
    verdicts = {one.name: one.reason for one in verify_records(listing, progress=lambda *one: seen.append(one))}
    assert len(seen) == 4
    assert sum(size for _, size in seen) < listing.num_bytes
    assert verdicts[rank.path(records["first"]).name] == "section-digest: section 0"
    assert verdicts[rank.path(records["orphan"]).name] == "section-digest: the row"
    assert verdicts[rank.path(records["deep"]).name].startswith("header-digest")
    assert verdicts[rank.path(records["root"]).name] is None
    assert verdicts[rank.path(records["second"]).name] is None
    chosen = [find_record(listing, records["root"].key.hex())]
    assert [one.reason for one in verify_records(listing, progress=lambda *_: None, records=chosen)] == [None]


def test_a_record_that_goes_away_meanwhile_is_missing(family, new_identity) -> None:
    rank, records = family
    listing = list_records(rank.directory.path)
    rank.unlink(records["orphan"])
    reasons = {one.name: one.reason for one in verify_records(listing, progress=lambda *_: None)}
    assert reasons[rank.path(records["orphan"]).name].startswith("missing")


def test_damaged_and_misnamed_files_are_listed_apart(family, new_identity) -> None:
    rank, records = family
    os.truncate(rank.path(records["first"]), 5000)
    rank.path(records["orphan"]).rename(rank.path(new_identity("elsewhere")))
    rank.path(new_identity("empty")).write_bytes(b"")
    rank.path(new_identity("folder")).mkdir()
    rank.path(new_identity("link")).symlink_to("/etc/hostname")
    listing = list_records(rank.directory.path)
    assert {file.problem for file in listing.unusable} == {
        Problem.TRUNCATED, Problem.OTHER_RECORD, Problem.READ_ERROR,
    }  # fmt: skip
    assert len(listing.unusable) == 5
    assert len(listing.records) == 3


def test_removal_is_refused_while_a_server_works(family) -> None:
    rank, records = family
    with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
        remove_records(rank.directory.path, [records["root"].key.hex()])


def test_removal_takes_what_extends_a_record_and_damaged_files_by_name(family, tmp_path, new_identity) -> None:
    rank, records = family
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    for name in rank.names():
        (copy / name).write_bytes((rank.directory.path / name).read_bytes())
    removal = remove_records(copy, [records["first"].key.hex()[:16]])
    assert list(removal.names) == [rank.path(records[name]).name for name in ("deep", "first")]
    assert removal.num_bytes == sum(rank.path(records[name]).stat().st_size for name in ("deep", "first"))
    damaged = copy / rank.path(records["orphan"]).name
    damaged.write_bytes(b"damaged")
    assert remove_records(copy, [damaged.name[:10]]).names == (damaged.name,)
    left = {record.header.identity for record in list_records(copy).records}
    assert left == {records["root"], records["second"]}
    with pytest.raises(UsageError, match="0 records"):
        remove_records(copy, ["ff" * 32])
    RecordDirectory.open(copy, lock_timeout_seconds=0.0).close()


def test_a_record_that_cannot_be_removed_is_an_error(family, tmp_path, monkeypatch) -> None:
    rank, records = family
    copy = tmp_path / "copy"
    copy.mkdir(mode=0o700)
    name = rank.path(records["root"]).name
    (copy / name).write_bytes((rank.directory.path / name).read_bytes())

    def fail(self, name):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(RecordDirectory, "remove", fail)
    with pytest.raises(UsageError, match="cannot be removed: Input/output error"):
        remove_records(copy, [name[:20]])


def test_a_missing_directory_is_a_users_mistake(tmp_path) -> None:
    with pytest.raises(UsageError, match="cannot be opened as a directory"):
        list_records(tmp_path / "missing")


def test_large_pages_are_verified_in_pieces(open_rank, new_identity, new_geometry) -> None:
    rank = open_rank(geometry=new_geometry(dim=600_000, row_bytes=0))
    record = new_identity(num_pages=1, tail_tokens=0, has_row=False)
    rank.store(record)
    listing = list_records(rank.directory.path)
    assert listing.num_bytes > 9 << 20
    assert [one.reason for one in verify_records(listing, progress=lambda *_: None)] == [None]


def test_looking_needs_no_torch_and_no_numpy_pages() -> None:
    program = (
        "import sys, flare_cache.inspect, flare_cache.staged, flare_cache.cuda_staging; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"


def test_a_record_of_a_foreign_layout_is_described_by_its_own_numbers(open_rank, new_identity, new_geometry) -> None:
    rank = open_rank(geometry=new_geometry(dim=1000, row_bytes=0))
    record = msgspec.structs.replace(new_identity(), has_row=False)
    rank.store(record)
    (found,) = list_records(rank.directory.path).records
    assert found.header.layout.page_bytes == rank.geometry.page_bytes
    assert (found.has_tail, found.has_row) == (True, False)
