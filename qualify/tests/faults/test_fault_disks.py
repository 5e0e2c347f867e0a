"""Disks on loop devices: each way to fail is seen from a program's side, and nothing stays mounted."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

import pytest

from flare_qualify.faults.commands import FaultError
from flare_qualify.faults.disks import MIB, PowerCut, fill, loop_disk, slowed_down, small_tmpfs


@pytest.fixture
def disk(needs, tmp_path):
    needs("root", "loop", "mount")
    with loop_disk(tmp_path / "disk", num_bytes=24 * MIB) as made:
        yield made
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()
    assert list(tmp_path.iterdir()) == []


def test_the_disk_is_private_and_can_be_written(disk) -> None:
    assert disk.path.stat().st_mode & 0o777 == 0o700
    (disk.path / "file").write_bytes(b"x" * 10_000)
    disk.remount()
    assert (disk.path / "file").read_bytes() == b"x" * 10_000


def test_a_full_disk_takes_nothing_until_the_ballast_goes(disk) -> None:
    ballast, evidence = fill(disk.path)
    assert "free" in evidence
    with pytest.raises(OSError, match="No space left") as caught, (disk.path / "more").open("wb", buffering=0) as file:
        file.write(bytes(MIB))
    assert caught.value.errno == errno.ENOSPC
    ballast.unlink()
    (disk.path / "more").write_bytes(bytes(MIB))


def test_lost_sectors_give_eio_from_there_on(disk) -> None:
    path = disk.path / "file"
    path.write_bytes(bytes(range(256)) * 4096)
    evidence = disk.lose_sectors(path, offset=512 * 1024)
    assert "Input/output error" in evidence
    disk.restore_sectors()


@pytest.mark.parametrize("how", list(PowerCut))
def test_what_was_synced_outlives_a_power_cut(disk, how) -> None:
    for name, is_synced in (("synced", True), ("not synced", False)):
        fd = os.open(disk.path / name, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(fd, b"y" * 50_000)
        if is_synced:
            os.fsync(fd)
            directory = os.open(disk.path, os.O_RDONLY)
            os.fsync(directory)
            os.close(directory)
        os.close(fd)
    assert "Input/output error" in disk.cut_power(how)
    disk.remount()
    assert (disk.path / "synced").read_bytes() == b"y" * 50_000
    if how is PowerCut.SYNCED:
        assert (disk.path / "not synced").read_bytes() == b"y" * 50_000
    if how is PowerCut.NOTHING_WRITTEN:
        left = disk.path / "not synced"
        assert not left.exists() or left.read_bytes() != b"y" * 50_000


def test_a_read_only_disk_can_be_read_and_repaired(disk) -> None:
    (disk.path / "file").write_text("here")
    assert "Read-only" in disk.turn_read_only()
    assert (disk.path / "file").read_text() == "here"
    disk.repair()
    (disk.path / "file").write_text("again")


def test_a_slowed_disk_takes_its_time(disk) -> None:
    path = disk.path / "file"
    path.write_bytes(bytes(MIB))
    os.sync()
    try:
        with slowed_down(disk, [os.getpid()], bytes_per_second=MIB) as rule:
            assert "blkio" in rule
            start = time.monotonic()
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            with mmap.mmap(-1, MIB) as aligned:
                assert os.preadv(fd, [aligned], 0) == MIB
            os.close(fd)
            assert time.monotonic() - start > 0.3
    except FaultError as error:
        pytest.skip(str(error))


def test_a_small_tmpfs_is_full_at_its_size(needs, tmp_path) -> None:
    needs("root", "mount")
    with small_tmpfs(tmp_path / "small", num_bytes=MIB), pytest.raises(OSError, match="No space left"):
        (tmp_path / "small" / "file").write_bytes(bytes(2 * MIB))
    assert list(tmp_path.iterdir()) == []
