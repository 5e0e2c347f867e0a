"""The disk benchmark moves the bytes it says, and the scan benchmark's records are sound."""

from __future__ import annotations

from flare_cache.directory import RecordDirectory
from flare_cache.inspect import list_records, verify_records
from flare_cache.record_file import DiskTransport
from flare_cache.scan import scan_directory
from flare_qualify.bench_disk import compare
from flare_qualify.many_records import SET_FINGERPRINT, small_geometry, write_records


def test_both_sides_move_the_same_bytes_and_clean_up(tmp_path) -> None:
    found = compare(
        tmp_path,
        total_bytes=1 << 20,
        record_bytes=512 << 10,
        page_bytes=64 << 10,
        part_bytes=128 << 10,
        rounds=2,
        transport=DiskTransport.BUFFERED,
    )
    assert [one.op for one in found] == ["fetch", "store"]
    assert all(one.num_bytes == 2 * ((512 << 10) + 4096) and one.ratio > 0 for one in found)
    assert list(tmp_path.iterdir()) == []


def test_many_records_are_chains_of_sound_records(tmp_path) -> None:
    path = tmp_path / "records"
    write_records(path, 250, geometry=small_geometry())
    listing = list_records(path)
    assert len(listing.records) == 250
    assert max(record.depth for record in listing.records) == 99
    assert not [record for record in listing.records if record.orphan]
    assert {one.reason for one in verify_records(listing, progress=lambda *_: None)} == {None}
    directory = RecordDirectory.open(path)
    scan = scan_directory(directory, geometry=small_geometry(), set_fingerprint=SET_FINGERPRINT, with_token_ids=True)
    assert len(scan.records) == 250
    directory.close()
