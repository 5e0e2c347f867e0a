"""A disk that fails while records are kept on it: what is promised then, seen on one rank with a real directory."""

from __future__ import annotations

import errno
import os
import threading

from flare_cache.disk_shelf import Durability
from flare_cache.jobs import JobStatus


def test_a_directory_is_never_synced_again_once_that_failed(open_rank, new_identity, monkeypatch) -> None:
    """Two stores reach the directory's fsync at once: the one that comes second must not be told that all is well."""
    rank = open_rank(durability=Durability.POWER)
    real, calls = os.fsync, []
    both = threading.Barrier(2)

    def fsync(fd: int) -> None:
        if fd != rank.directory.dir_fd:
            real(fd)
            both.wait(20)  # both files are safe before either name is
            return
        calls.append(fd)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    records = [new_identity(name, has_row=False) for name in "ab"]
    jobs = [rank.submit_store(record, first_page=8 * at) for at, record in enumerate(records)]
    assert [rank.result(job).status for job in jobs] == [JobStatus.FAILED, JobStatus.FAILED]
    assert len(calls) == 1
    assert rank.names() == []
    assert rank.directory.stores_stopped == "fsync failed: Input/output error"


def test_a_file_system_that_goes_read_only_fails_stores_and_removals_and_is_still_read(
    open_rank, new_identity, monkeypatch
) -> None:
    rank = open_rank()
    rank.fill()
    assert rank.store(new_identity("a")).status is JobStatus.OK
    charged, names = rank.directory.charged_bytes, rank.names()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def open_to_read(name: str, flags: int, *more: object, **options: object) -> int:
        return refuse() if flags & (os.O_WRONLY | os.O_RDWR) else real(name, flags, *more, **options)

    real = os.open
    with monkeypatch.context() as context:
        for call in ("unlink", "link", "ftruncate"):
            context.setattr(os, call, refuse)
        context.setattr(os, "open", open_to_read)
        assert rank.store(new_identity("b")).reason.startswith("EROFS")
        assert rank.unlink(new_identity("a")).reason.startswith("EROFS")
        assert rank.truncate(new_identity("a")).reason.startswith("EROFS")
        assert (rank.directory.charged_bytes, rank.names()) == (charged, names)
        assert rank.fetch(new_identity("a")).status is JobStatus.OK
    assert rank.store(new_identity("b")).status is JobStatus.OK
