"""A disk that fails: the job fails, nothing of it stays, the rest goes on."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import resource
import shutil
import subprocess

import pytest

from flare_cache.disk_shelf import Durability
from flare_cache.host_memory import DeviceFault, DirectPassage
from flare_cache.host_pages import HostPages
from flare_cache.jobs import Job, JobOp, JobStatus, Section
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.record_file import DiskTransport
from flare_cache.staged import StagedTransport
from flare_core.errors import UsageError
from flare_core.prefix import Tier


def failing(call, *, times: int = 1_000_000, code: int = errno.EIO):
    """``call`` that fails ``times`` times and counts how often it was called."""

    def fail(*arguments, **options):
        fail.calls += 1
        if fail.calls <= times:
            raise OSError(code, os.strerror(code))
        return call(*arguments, **options)

    fail.calls = 0
    return fail


@pytest.fixture
def file_size_limit():
    """``with file_size_limit(num_bytes)``: writes beyond it fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    @contextlib.contextmanager
    def limited(num_bytes: int):
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.mark.parametrize("limit", [0, 4096, 9000, 20_000])
def test_a_store_that_does_not_fit_leaves_nothing_behind(open_rank, new_identity, file_size_limit, limit) -> None:
    rank = open_rank(transport=DiskTransport.BUFFERED)
    record = new_identity()
    with file_size_limit(limit):
        result = rank.store(record)
    assert result.status is JobStatus.FAILED
    assert result.reason.startswith("EFBIG")
    assert rank.names() == []
    assert rank.directory.charged_bytes == 0
    assert rank.store(record).status is JobStatus.OK


def test_a_full_disk_fails_stores_until_there_is_room(open_rank, new_identity, mounted) -> None:
    rank = open_rank(path=mounted("size=64k,mode=0700"))
    stored = [rank.store(new_identity(name)) for name in "abcd"]
    assert [result.status for result in stored] == [JobStatus.OK, JobStatus.OK, JobStatus.FAILED, JobStatus.FAILED]
    assert stored[2].reason.startswith("ENOSPC")
    assert rank.directory.charged_bytes == 2 * stored[0].num_bytes
    assert rank.fetch(new_identity("a")).status is JobStatus.OK
    rank.unlink(new_identity("a"))
    assert rank.store(new_identity("c")).status is JobStatus.OK


def test_a_read_only_directory_is_refused_by_name(open_rank, mounted) -> None:
    path = mounted("size=64k,mode=0700")
    subprocess.run(["mount", "-o", "remount,ro", path], check=True)
    with pytest.raises(UsageError, match="cannot be written: Read-only file system"):
        open_rank(path=path)


def test_a_directory_without_write_permission_is_refused_by_name(open_rank, tmp_path) -> None:
    if not os.geteuid():
        pytest.skip("root may write everywhere")
    path = tmp_path / "locked"
    path.mkdir(mode=0o500)
    with pytest.raises(UsageError, match="cannot be written"):
        open_rank(path=path)


def test_a_failed_fsync_is_not_repeated_and_stops_stores(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank(durability=Durability.POWER)
    assert rank.store(new_identity("before")).status is JobStatus.OK
    fsync = failing(os.fsync, times=1)
    monkeypatch.setattr(os, "fsync", fsync)
    assert rank.store(new_identity("failed")).reason.startswith("EIO")
    refused = rank.store(new_identity("later"))
    assert refused.status is JobStatus.FAILED
    assert refused.reason == "stores-stopped: fsync failed: Input/output error"
    assert fsync.calls == 1
    assert rank.names() == [rank.path(new_identity("before")).name]
    assert rank.fetch(new_identity("before")).status is JobStatus.OK
    assert rank.store(new_identity("failed"), tier=Tier.MEMORY).status is JobStatus.OK


def test_a_failed_directory_fsync_takes_the_record_back(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank(durability=Durability.POWER)
    real = os.fsync

    def fsync(fd: int) -> None:
        if fd == rank.directory.dir_fd:
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert rank.store(new_identity()).status is JobStatus.FAILED
    assert rank.names() == []
    assert rank.directory.charged_bytes == 0


def test_a_store_that_cannot_be_undone_says_so(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev))
    monkeypatch.setattr(os, "unlink", failing(os.unlink))
    assert rank.store(new_identity()).status is JobStatus.UNCLEAN
    monkeypatch.undo()
    rank.store(new_identity("another"))
    assert len(rank.names()) == 2


def test_an_unlink_removes_what_a_failed_store_could_not(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev))
    monkeypatch.setattr(os, "unlink", failing(os.unlink))
    assert rank.store(new_identity()).status is JobStatus.UNCLEAN
    monkeypatch.undo()
    assert len(rank.names()) == 1
    assert rank.unlink(new_identity()).status is JobStatus.OK
    assert rank.names() == []
    assert rank.directory.charged_bytes == 0


def test_a_record_whose_temporary_name_stays_is_taken_back(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    monkeypatch.setattr(os, "unlink", failing(os.unlink, times=1))
    assert rank.store(new_identity()).status is JobStatus.FAILED
    assert rank.names() == []


def test_an_unreadable_record_is_a_miss(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    monkeypatch.setattr(os, "preadv", failing(os.preadv))
    result = rank.fetch(record)
    assert (result.status, result.reason) == (JobStatus.BAD_RECORD, "read-error: EIO at offset 0")
    monkeypatch.undo()
    assert rank.fetch(record).status is JobStatus.OK


def test_an_unreadable_page_is_a_miss(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    real = os.preadv

    def preadv(fd, views, offset):
        if offset > 8192:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert rank.fetch(record).reason.startswith("read-error: EIO at offset")


def test_running_out_of_descriptors_is_this_ranks_failure_and_not_the_records(
    open_rank, new_identity, monkeypatch
) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    monkeypatch.setattr(os, "open", failing(os.open, code=errno.EMFILE))
    assert rank.fetch(record).status is JobStatus.FAILED
    assert rank.unlink(record).status is JobStatus.FAILED


def test_an_unopenable_record_is_a_miss(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    monkeypatch.setattr(os, "open", failing(os.open))
    assert rank.fetch(record).reason.startswith("read-error: EIO on opening")
    assert len(rank.scan().damaged) == 1


def test_short_reads_and_writes_are_continued(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank(transport=DiskTransport.BUFFERED)
    record = new_identity()
    real_write, real_read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: real_write(fd, [views[0][:1000]], at))
    assert rank.store(record).status is JobStatus.OK
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real_read(fd, [views[0][:4096]], at))
    assert rank.fetch(record).status is JobStatus.OK
    assert rank.page_bytes(0, 4) == rank.page_bytes(12, 4)


def test_a_write_that_writes_nothing_fails(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: 0)
    assert rank.store(new_identity()).reason.startswith("EIO")
    assert rank.names() == []


def test_a_record_that_ends_early_while_it_is_read_is_a_miss(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank()
    record = new_identity()
    rank.store(record)
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: real(fd, views, at) if at == 0 else 0)
    assert rank.fetch(record).reason.startswith("truncated: the file ends at")


def test_a_directory_that_is_gone_fails_stores_and_nothing_else(open_rank, new_identity, tmp_path) -> None:
    rank = open_rank(path=tmp_path / "doomed")
    shutil.rmtree(tmp_path / "doomed")
    assert rank.store(new_identity()).reason.startswith("ENOENT")
    assert rank.fetch(new_identity()).reason.startswith("missing")


def test_a_directory_that_is_replaced_by_a_link_is_not_followed(open_rank, new_identity, tmp_path) -> None:
    rank = open_rank(path=tmp_path / "here")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").rename(tmp_path / "moved")
    (tmp_path / "here").symlink_to(tmp_path / "elsewhere")
    assert rank.store(new_identity()).status is JobStatus.OK
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert len(list((tmp_path / "moved").glob("*.rec"))) == 1


def test_direct_transport_is_refused_where_the_file_system_has_none(open_rank, monkeypatch) -> None:
    real = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UsageError, match="refuses O_DIRECT"):
        open_rank(transport=DiskTransport.DIRECT)


@pytest.mark.parametrize("refused", ["open", "write"])
def test_auto_falls_back_to_buffered(open_rank, new_identity, monkeypatch, tmp_path, refused) -> None:
    real = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **options)

    if refused == "open":
        monkeypatch.setattr(os, "open", refuse)
    else:
        monkeypatch.setattr(os, "pwritev", failing(os.pwritev, code=errno.EINVAL))
    rank = open_rank()
    monkeypatch.undo()
    assert not rank.disk.direct
    assert rank.names() == []
    assert rank.store(new_identity()).status is JobStatus.OK


@pytest.mark.parametrize("call", ["open", "pwritev"])
def test_a_probe_that_fails_otherwise_is_not_taken_for_an_answer(open_rank, monkeypatch, call) -> None:
    real = getattr(os, call)

    def fail(first, second, *arguments, **options):
        if call == "pwritev" or (isinstance(second, int) and second & os.O_DIRECT):
            raise OSError(errno.EIO, "Input/output error")
        return real(first, second, *arguments, **options)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output"):
        open_rank()


class ScatteredPages:
    """Pages in pieces of odd lengths at odd addresses, as another engine may have them."""

    def __init__(self, geometry) -> None:
        self.memory = HostPages.allocate(geometry, num_pages=60, num_slots=4)
        self.geometry = geometry
        self.device = "cpu"

    def page_segments(self, page: int):
        size = self.geometry.page_bytes
        base = self.memory.base + page * (size + 64) + 8
        return [(base, 1000), (base + 1000, 0), (base + 1010, size - 1000)]

    def row_segments(self, slot: int):
        return [(self.memory.base + 200_000 + slot * 10_001, self.geometry.row_stride)]

    def page(self, page: int) -> bytes:
        start = self.page_segments(page)[0][0] - self.memory.base
        whole = bytes(self.memory.buffer[start : start + self.geometry.page_bytes + 10])
        return whole[:1000] + whole[1010:]


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.MEMORY])
def test_pages_that_are_not_aligned_pass_through_a_buffer(open_rank, new_identity, new_geometry, tier) -> None:
    pages = ScatteredPages(new_geometry())
    pages.memory.buffer[:] = os.urandom(len(pages.memory.buffer))
    rank = open_rank(pages=pages, passage=DirectPassage(aligned=True))
    record = new_identity()
    assert rank.store(record, tier=tier).status is JobStatus.OK
    assert rank.fetch(record, tier=tier).status is JobStatus.OK
    assert [pages.page(12 + i) for i in range(4)] == [pages.page(i) for i in range(4)]


class BrokenDevice(DirectPassage):
    """A passage whose device has failed."""

    def outgoing(self, sections):
        raise DeviceFault("an illegal address")


def test_a_device_fault_is_told_and_its_job_never_ends(new_identity, new_geometry, set_fingerprint) -> None:
    geometry = new_geometry()
    told: queue.Queue = queue.Queue()
    shelf = MemoryShelf(
        geometry=geometry, set_fingerprint=set_fingerprint, passage=BrokenDevice(aligned=False), limit_bytes=1 << 20
    )
    transport = StagedTransport(
        geometry=geometry, num_pages=9, num_slots=1, memory=HostPages.allocate(geometry, num_pages=9, num_slots=1),
        shelves={Tier.MEMORY: shelf}, on_result=told.put, on_fault=told.put,
    )  # fmt: skip
    transport.start()
    record = new_identity(num_pages=1, tail_tokens=0, has_row=False)
    job = Job(job_id=1, op=JobOp.STORE, tier=Tier.MEMORY, record=record, sections=(Section(0, 0),), token_ids=bytes(16))
    transport.submit(job)
    assert told.get(timeout=20) == "device fault in job 1: an illegal address"
    assert transport.num_jobs == 1
    assert not transport.close(0.01)


def test_what_was_not_foreseen_fails_the_job_and_not_the_thread(open_rank, new_identity, monkeypatch) -> None:
    rank = open_rank(num_threads=1)

    def surprise(*arguments, **options):
        raise KeyError("surprise")

    monkeypatch.setattr("flare_cache.disk_shelf.section_digest", surprise)
    assert rank.store(new_identity()).reason.startswith("internal: KeyError")
    monkeypatch.undo()
    assert rank.names() == []
    assert rank.store(new_identity()).status is JobStatus.OK


def test_a_listener_that_fails_does_not_stop_the_transport(open_rank, new_identity, caplog) -> None:
    rank = open_rank(num_threads=1)
    put = rank.results.put
    rank.transport.on_result = lambda result: put(result) or {}["no such listener"]
    assert rank.store(new_identity()).status is JobStatus.OK
    assert rank.fetch(new_identity()).status is JobStatus.OK
    assert "a listener of the staged transport failed" in caplog.text
