"""The files of a simulated disk as one process sees them: the port of ``flare_cache.directory_files``, with faults.

Each call may fail as the options say, and may be the one that the process is killed in; a killed process's calls do
nothing any more. Which records are wanted, and when calls happen, is not known here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from flare_cache.directory_files import FileEntry
from flare_qualify.sim.disk import Inode, SimDisk
from flare_qualify.sim.loop import Violation

__all__ = ["DiskRates", "ProcessKilled", "SimFiles"]

_BLOCK = 4096
_FREE_BYTES = 1 << 30


class ProcessKilled(BaseException):
    """The process ends at this call; nothing of it runs on."""


@dataclass(slots=True)
class DiskRates:
    """How often calls fail, as probabilities; all zero once the world is healed."""

    read_eio: float = 0.0
    read_flip: float = 0.0
    misdirect: float = 0.0
    write_eio: float = 0.0
    fsync_eio: float = 0.0
    name_eio: float = 0.0
    short_io: float = 0.0

    def heal(self) -> None:
        """No more faults."""
        for name in self.__slots__:
            setattr(self, name, 0.0)


@dataclass(frozen=True, slots=True)
class _Status:
    st_mode: int
    st_size: int
    st_mtime_ns: int
    st_ino: int


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    file: Inode

    def inode(self) -> int:
        return self.file.number

    def is_file(self, *, follow_symlinks: bool) -> bool:
        return not follow_symlinks

    def stat(self, *, follow_symlinks: bool) -> _Status:
        del follow_symlinks
        return _status(self.file)


def _status(inode: Inode) -> _Status:
    return _Status(stat.S_IFREG | 0o600, len(inode.data), inode.mtime_ns, inode.number)


def _fail(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@dataclass(slots=True)
class SimFiles:
    """See the module.

    Attributes:
        disk: what outlives the process.
        others: disks that a misdirected read may return bytes of.
        rates, rng: of faults.
        clock: virtual seconds, for modification times.
        on_unlink: told every name before it is removed.
        kill_in: the process is killed in this many calls' time; None: never.
        on_kill: told when that happens.
    """

    disk: SimDisk
    others: Sequence[SimDisk]
    rates: DiskRates
    rng: Random
    clock: Callable[[], float]
    on_unlink: Callable[[str], None]
    on_kill: Callable[[], None]
    kill_in: int | None = None
    is_dead: bool = False
    _open: dict[int, tuple[Inode, str]] = field(default_factory=dict)
    _last_fd: int = 100

    def _enter(self) -> None:
        if self.is_dead:
            raise ProcessKilled
        if self.kill_in is not None:
            self.kill_in -= 1
            if self.kill_in <= 0:
                self.is_dead = True
                self.on_kill()
                raise ProcessKilled

    def _strikes(self, rate: float) -> bool:
        return rate > 0 and self.rng.random() < rate

    def open(self, name: str, flags: int, mode: int = 0o600) -> int:
        """See the port; the same for all that follow."""
        del mode
        self._enter()
        inode = self.disk.names.get(name)
        if (inode is not None or flags & os.O_CREAT) and self._strikes(self.rates.read_eio):
            self.disk.excused.add(name)
            raise _fail(errno.EIO)
        if flags & os.O_CREAT:
            if inode is not None and flags & os.O_EXCL:
                raise _fail(errno.EEXIST)
            if inode is None:
                if self.disk.is_full:
                    raise _fail(errno.ENOSPC)
                if self._strikes(self.rates.name_eio):
                    raise _fail(errno.EIO)
                inode = self.disk.new_inode()
                inode.mtime_ns = int(self.clock() * 1e9)
                self.disk.set_name(name, inode)
            elif flags & os.O_TRUNC:
                inode.touch(0, len(inode.data))
                inode.data = bytearray()
        if inode is None:
            raise _fail(errno.ENOENT)
        self._last_fd += 1
        self._open[self._last_fd] = (inode, name)
        return self._last_fd

    def close(self, fd: int) -> None:
        """``close``; a descriptor that is not open is a violation."""
        if self.is_dead:
            raise ProcessKilled
        if self._open.pop(fd, None) is None:
            raise Violation("descriptor", f"{fd} is closed twice")

    @property
    def num_open(self) -> int:
        """Open descriptors."""
        return len(self._open)

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """``pread``."""
        self._enter()
        inode, name = self._open[fd]
        if self._strikes(self.rates.read_eio):
            self.disk.excused.add(name)
            raise _fail(errno.EIO)
        data = bytes(inode.data[offset : offset + num_bytes])
        return bytes(self._spoil(bytearray(data), inode, name, offset=offset))

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """``preadv``; may read less than asked for, in whole blocks."""
        self._enter()
        inode, name = self._open[fd]
        if self._strikes(self.rates.read_eio):
            self.disk.excused.add(name)
            raise _fail(errno.EIO)
        wanted = sum(map(len, buffers))
        if wanted > _BLOCK and self._strikes(self.rates.short_io):
            wanted = _BLOCK * self.rng.randint(1, wanted // _BLOCK)
        data = self._spoil(inode.data[offset : offset + wanted], inode, name, offset=offset)
        at = 0
        for buffer in buffers:
            piece = data[at : at + len(buffer)]
            buffer[: len(piece)] = piece
            at += len(piece)
            if at == len(data):
                break
        return len(data)

    def _spoil(self, data: bytearray, inode: Inode, name: str, *, offset: int) -> bytearray:
        """What a read really returns: now and then other bytes than were asked for."""
        if data and self._strikes(self.rates.read_flip):
            data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
            self.disk.excused.add(name)
        if data and self._strikes(self.rates.misdirect):
            other = self._elsewhere(inode, name, offset=offset, num_bytes=len(data))
            if other is not None:
                self.disk.excused.add(name)
                return other
        return data

    def _elsewhere(self, inode: Inode, name: str, *, offset: int, num_bytes: int) -> bytearray | None:
        places: list[tuple[Inode, int]] = [
            (inode, at) for at in range(0, len(inode.data) - num_bytes + 1, _BLOCK) if at != offset
        ]
        places += [
            (file, offset)
            for disk in (self.disk, *self.others)
            for other, file in disk.names.items()
            if other.endswith(".rec") and file is not inode and len(file.data) >= offset + num_bytes
        ]
        # Another rank's file of the same record is the hardest to tell: its digests must name the rank.
        twins = [disk.names[name] for disk in self.others if name in disk.names]
        places += [(twin, offset) for twin in twins if len(twin.data) >= offset + num_bytes] * 4
        if not places:
            return None
        file, at = self.rng.choice(places)
        return bytearray(file.data[at : at + num_bytes])

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """``pwritev``; may write less than asked for."""
        self._enter()
        inode, _ = self._open[fd]
        if self.disk.is_full:
            raise _fail(errno.ENOSPC)
        if self._strikes(self.rates.write_eio):
            raise _fail(errno.EIO)
        data = b"".join(buffers)
        if len(data) > _BLOCK and self._strikes(self.rates.short_io):
            data = data[: _BLOCK * self.rng.randint(1, len(data) // _BLOCK)]
        end = offset + len(data)
        if len(inode.data) < end:
            inode.data.extend(bytes(end - len(inode.data)))
        inode.data[offset:end] = data
        inode.touch(offset, end)
        inode.mtime_ns = int(self.clock() * 1e9)
        return len(data)

    def fstat(self, fd: int) -> _Status:
        """``fstat``."""
        self._enter()
        return _status(self._open[fd][0])

    def lstat(self, name: str) -> _Status:
        """``lstat``."""
        self._enter()
        inode = self.disk.names.get(name)
        if inode is None:
            raise _fail(errno.ENOENT)
        return _status(inode)

    def ftruncate(self, fd: int, size: int) -> None:
        """``ftruncate``."""
        self._enter()
        inode, _ = self._open[fd]
        if self._strikes(self.rates.write_eio):
            raise _fail(errno.EIO)
        before = len(inode.data)
        if size < before:
            del inode.data[size:]
        else:
            inode.data.extend(bytes(size - before))
        inode.touch(min(size, before), max(size, before))
        inode.mtime_ns = int(self.clock() * 1e9)

    def fsync(self, fd: int) -> None:
        """``fsync``; after a failed one the kernel has forgotten what it could not write, and says so only once."""
        self._enter()
        inode, name = self._open[fd]
        if inode.sync_failed:
            raise Violation("fsync repeated", f"{name} on rank {self.disk.rank} is synced again after a failure")
        if self._strikes(self.rates.fsync_eio):
            inode.sync_failed = True
            raise _fail(errno.EIO)
        inode.sync()

    def fsync_directory(self) -> None:
        """``fsync`` of the directory."""
        self._enter()
        if self._strikes(self.rates.fsync_eio):
            raise _fail(errno.EIO)
        self.disk.sync_names()

    def link(self, source: str, target: str) -> None:
        """``link``."""
        self._enter()
        inode = self.disk.names.get(source)
        if inode is None:
            raise _fail(errno.ENOENT)
        if target in self.disk.names:
            raise _fail(errno.EEXIST)
        if self._strikes(self.rates.name_eio):
            raise _fail(errno.EIO)
        self.disk.set_name(target, inode)

    def rename(self, source: str, target: str) -> None:
        """``rename``."""
        self._enter()
        inode = self.disk.names.get(source)
        if inode is None:
            raise _fail(errno.ENOENT)
        self.disk.set_name(target, inode)
        self.disk.set_name(source, None)

    def unlink(self, name: str) -> None:
        """``unlink``."""
        self._enter()
        if name not in self.disk.names:
            raise _fail(errno.ENOENT)
        if self._strikes(self.rates.name_eio):
            raise _fail(errno.EIO)
        self.on_unlink(name)
        self.disk.set_name(name, None)

    def entries(self) -> list[FileEntry]:
        """Every name."""
        self._enter()
        return [_Entry(name, inode) for name, inode in self.disk.names.items()]

    def will_need(self, fd: int, offset: int, num_bytes: int) -> None:
        """Advice is not taken."""
        del fd, offset, num_bytes
        self._enter()

    def free_bytes(self) -> int:
        """Always the same."""
        return _FREE_BYTES

    def file_system(self) -> str:
        """One of its own for each rank."""
        return f"simulated/{self.disk.rank}"

    def close_directory(self) -> None:
        """Nothing to give back."""
