"""A disk that fails while records are kept on it: what is promised then, seen on one rank with a real directory."""

from __future__ import annotations

import errno
import os
import subprocess
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
    jobs = [rank.submit_store(new_identity(name)) for name in "ab"]
    assert [rank.result(job).status for job in jobs] == [JobStatus.FAILED, JobStatus.FAILED]
    assert len(calls) == 1
    assert rank.names() == []
    assert rank.directory.stores_stopped == "fsync failed: Input/output error"


def test_a_file_system_that_goes_read_only_fails_stores_and_removals_and_is_still_read(
    open_rank, new_identity, mounted
) -> None:
    path = mounted("size=1m,mode=0700")
    rank = open_rank(path=path)
    rank.fill()
    assert rank.store(new_identity("a")).status is JobStatus.OK
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)
    charged = rank.directory.charged_bytes
    assert rank.store(new_identity("b")).reason.startswith("EROFS")
    assert rank.unlink(new_identity("a")).reason.startswith("EROFS")
    assert rank.truncate(new_identity("a")).reason.startswith("EROFS")
    assert rank.directory.charged_bytes == charged
    assert rank.fetch(new_identity("a")).status is JobStatus.OK
    subprocess.run(["mount", "-o", "remount,rw", path], check=True)
    assert rank.store(new_identity("b")).status is JobStatus.OK
