"""Disks that fail: ext4 on a loop device that can be full, slow, unreadable, read-only or cut from power.

The device's backing file lies in a directory of the caller's; mount point and device are gone afterwards, also when
something still has files open there. Knows no record.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flare_qualify.faults.commands import FaultError, run, write_control_file
from flare_qualify.faults.names import BLKIO_ROOT, sweep_leftovers, unique_name

__all__ = ["MIB", "LoopDisk", "PowerCut", "fill", "loop_disk", "physical_offset", "slowed_down", "small_tmpfs"]

MIB = 1 << 20
_EXT4_IOC_SHUTDOWN = 0x8004587D
_FS_IOC_FIEMAP = 0xC020660B
_FIEMAP_HEADER = struct.Struct("=QQLLLL")
_FIEMAP_EXTENT = struct.Struct("=QQQQQLLLL")
_FIEMAP_SYNC = 1
_MAX_EXTENTS = 512
_LET_GO_SECONDS = 5.0


class PowerCut(enum.IntEnum):
    """What the file system had written down when the power went."""

    SYNCED = 0
    """Everything: it was frozen first."""
    JOURNAL_WRITTEN = 1
    """The journal's transactions, but no data that was not synced."""
    NOTHING_WRITTEN = 2
    """Only what was synced: the running transaction is lost."""


@dataclass(slots=True)
class LoopDisk:
    """A mounted ext4 file system.

    Attributes:
        path: mount point, mode 0700. device: the loop device. backing: its file, of ``num_bytes``.
    """

    path: Path
    device: str
    backing: Path
    num_bytes: int
    options: str

    def cut_power(self, how: PowerCut) -> str:
        """From now on nothing reaches the disk, and every access fails with EIO, until :meth:`remount`; the evidence.

        Raises:
            FaultError: the file system does not let itself be shut down, or went on.
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("I", how))
        except OSError as error:
            raise FaultError(f"{self.path} cannot be shut down: {error.strerror}") from error
        finally:
            os.close(fd)
        try:
            (self.path / "alive").touch()
        except OSError as error:
            return f"after the cut ({how.name}) creating a file fails: {error.strerror}"
        raise FaultError(f"{self.path} went on after its shutdown")

    def remount(self) -> None:
        """Unmount and mount again, as after a reboot: the journal is replayed. Nothing may have a file open in it."""
        _unmount(self.path)
        run("mount", "-o", self.options, self.device, self.path)

    def repair(self) -> None:
        """Unmount, have ``e2fsck`` repair what it finds, and mount again. Nothing may have a file open in it."""
        _unmount(self.path)
        # Exit codes below 4: no errors, or errors that were corrected.
        run("sh", "-c", 'e2fsck -fy "$0" > /dev/null 2>&1; test $? -lt 4', self.device)
        run("mount", "-o", self.options, self.device, self.path)

    def sync(self) -> None:
        """Write everything that programs have written to the device."""
        run("sync", "-f", self.path)

    def turn_read_only(self) -> str:
        """The kernel finds an error in the file system and goes on read-only; the evidence."""
        name = Path(self.device).name
        write_control_file(Path(f"/sys/fs/ext4/{name}/trigger_fs_error"), "qualification")
        try:
            (self.path / "alive").touch()
        except OSError as error:
            return f"creating a file fails: {error.strerror}"
        raise FaultError(f"{self.path} can still be written")

    def lose_sectors(self, file: Path, *, offset: int) -> str:
        """Reading ``file`` from ``offset`` on, and whatever lies behind it on the device, gives EIO; the evidence.

        The backing file is cut there, so that the sectors do not exist any more. What of the file was in memory is
        dropped from it.
        """
        physical = physical_offset(file, offset)
        os.truncate(self.backing, physical)
        write_control_file(Path("/proc/sys/vm/drop_caches"), "1")
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.pread(fd, 4096, offset)
        except OSError as error:
            return f"reading {file.name} at {offset} fails: {error.strerror}"
        finally:
            os.close(fd)
        raise FaultError(f"{file} can still be read at {offset}")

    def restore_sectors(self) -> None:
        """The sectors are there again, and hold zeros."""
        os.truncate(self.backing, self.num_bytes)


def physical_offset(file: Path, offset: int) -> int:
    """Where on the device the byte of ``file`` at ``offset`` lies. Raises FaultError where it has none."""
    buffer = bytearray(_FIEMAP_HEADER.size + _MAX_EXTENTS * _FIEMAP_EXTENT.size)
    _FIEMAP_HEADER.pack_into(buffer, 0, 0, (1 << 64) - 1, _FIEMAP_SYNC, 0, _MAX_EXTENTS, 0)
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _FS_IOC_FIEMAP, buffer, True)
    finally:
        os.close(fd)
    num_extents = _FIEMAP_HEADER.unpack_from(buffer)[3]
    for number in range(num_extents):
        at = _FIEMAP_HEADER.size + number * _FIEMAP_EXTENT.size
        logical, physical, length, *_ = _FIEMAP_EXTENT.unpack_from(buffer, at)
        if logical <= offset < logical + length:
            return int(physical + offset - logical)
    raise FaultError(f"{file} has nothing on the device at {offset}")


@contextlib.contextmanager
def loop_disk(path: Path, *, num_bytes: int = 64 * MIB, options: str = "errors=remount-ro") -> Iterator[LoopDisk]:
    """An ext4 file system of ``num_bytes``, mounted at ``path``, which is created; its backing file lies beside it.

    Raises:
        FaultError: loop devices or mounting are not allowed here.
    """
    sweep_leftovers()
    backing = path.with_name(f"{path.name}.{unique_name()}.image")
    with contextlib.ExitStack() as undo:
        path.mkdir(parents=True)
        undo.callback(path.rmdir)
        backing.touch(mode=0o600)
        undo.callback(backing.unlink, missing_ok=True)
        os.truncate(backing, num_bytes)
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", backing)
        device = run("losetup", "--find", "--show", backing).strip()
        undo.callback(run, "losetup", "-d", device)
        run("mount", "-o", options, device, path)
        # Lazily, so that nothing stays mounted where a process that is about to be killed still has files open.
        undo.callback(run, "umount", "-l", path)
        path.chmod(0o700)
        yield LoopDisk(path, device, backing, num_bytes, options)


def _unmount(path: Path) -> None:
    """Unmount; a process that was killed a moment ago may still hold a file open. Raises FaultError after 5 s."""
    deadline = time.monotonic() + _LET_GO_SECONDS
    while True:
        try:
            run("umount", path)
        except FaultError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return


@contextlib.contextmanager
def small_tmpfs(path: Path, *, num_bytes: int) -> Iterator[None]:
    """A private file system in memory that holds that much, mounted at ``path`` (created). Raises FaultError."""
    path.mkdir(parents=True)
    try:
        run("mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", unique_name(), path)
        try:
            yield
        finally:
            run("umount", "-l", path)
    finally:
        path.rmdir()


def fill(directory: Path, *, leave_bytes: int = 0) -> tuple[Path, str]:
    """Fill the file system of ``directory`` up but for ``leave_bytes``: the file to remove, and the evidence.

    Raises:
        FaultError: it did not become full.
    """
    ballast = directory / f"{unique_name()}.ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            for size in (MIB, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
            os.fsync(file.fileno())
        except OSError as error:
            raise FaultError(f"{ballast}: {error.strerror}") from error
        os.ftruncate(file.fileno(), max(0, file.tell() - leave_bytes))
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if free > leave_bytes + MIB // 4:
        raise FaultError(f"{directory} still has {free} bytes free")
    return ballast, f"{free} bytes are free on the file system"


@contextlib.contextmanager
def slowed_down(disk: LoopDisk, pids: list[int], *, bytes_per_second: int) -> Iterator[str]:
    """Reads and writes of these processes on the disk are held to that rate; gives the evidence of the rule.

    Only what goes past the page cache is held (O_DIRECT, and what is read from the device).

    Raises:
        FaultError: there is no blkio controller here.
    """
    group = BLKIO_ROOT / unique_name()
    number = Path(disk.device).stat().st_rdev
    rule = f"{os.major(number)}:{os.minor(number)} {bytes_per_second}"
    try:
        group.mkdir()
    except OSError as error:
        raise FaultError(f"{group}: {error.strerror}") from error
    try:
        for what in ("read", "write"):
            write_control_file(group / f"blkio.throttle.{what}_bps_device", rule)
        for pid in pids:
            write_control_file(group / "cgroup.procs", str(pid))
        yield f"blkio.throttle has {rule}"
    finally:
        with contextlib.suppress(OSError):
            for left in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(FaultError):
                    write_control_file(BLKIO_ROOT / "cgroup.procs", left)
        with contextlib.suppress(OSError):
            group.rmdir()
