"""Parts of the simulator that must be right for its verdicts to mean something: disk, links, ledger, model, oracle."""

from __future__ import annotations

import errno
import os
from random import Random

import pytest

from flare_cache.jobs import Job, JobOp, RecordIdentity, Section
from flare_core.prefix import Tier
from flare_qualify.sim.disk import SimDisk
from flare_qualify.sim.files import DiskRates, ProcessKilled, SimFiles
from flare_qualify.sim.ledger import Ledger, StepUse
from flare_qualify.sim.links import Wire, connect
from flare_qualify.sim.loop import EventLoop, Violation
from flare_qualify.sim.model import Model, choose_token
from flare_transport.framing import FrameType
from flare_transport.router import Router

NOTE = FrameType(60, "NOTE", 4096)
NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


def open_files(disk: SimDisk, **rates) -> SimFiles:
    def nothing(*_) -> None:
        return None

    return SimFiles(
        disk=disk,
        others=[],
        rates=DiskRates(**rates),
        rng=Random(1),
        clock=lambda: 1.0,
        on_unlink=nothing,
        on_kill=nothing,
    )


def write(files: SimFiles, name: str, data: bytes) -> int:
    fd = files.open(name, NEW)
    files.pwritev(fd, [memoryview(data)], 0)
    return fd


def test_what_was_synced_outlives_a_power_cut() -> None:
    for seed in range(30):
        disk = SimDisk(0)
        files = open_files(disk)
        fd = write(files, "a.tmp", b"x" * 9000)
        files.fsync(fd)
        files.link("a.tmp", "a.rec")
        files.unlink("a.tmp")
        files.fsync_directory()
        disk.lose_power(Random(seed))
        assert bytes(disk.names["a.rec"].data) == b"x" * 9000
        assert "a.tmp" not in disk.names


def test_what_was_not_synced_may_be_lost_in_any_part() -> None:
    seen = set()
    for seed in range(200):
        disk = SimDisk(0)
        files = open_files(disk)
        write(files, "a.tmp", b"x" * 8192)
        files.link("a.tmp", "a.rec")
        disk.lose_power(Random(seed))
        found = disk.names.get("a.rec")
        seen.add(None if found is None else (len(found.data), found.data.count(b"x")))
    assert {None, (8192, 8192), (8192, 4096), (8192, 0), (0, 0)} <= seen


def test_a_file_whose_fsync_failed_must_not_be_synced_again() -> None:
    files = open_files(SimDisk(0), fsync_eio=1.0)
    fd = write(files, "a.tmp", b"x")
    with pytest.raises(OSError, match="Input/output error"):
        files.fsync(fd)
    with pytest.raises(Violation, match="fsync repeated"):
        files.fsync(fd)


def test_a_killed_process_touches_nothing_any_more() -> None:
    disk = SimDisk(0)
    files = open_files(disk)
    files.kill_in = 2
    fd = files.open("a.tmp", NEW)
    with pytest.raises(ProcessKilled):
        files.pwritev(fd, [memoryview(b"x")], 0)
    with pytest.raises(ProcessKilled):
        files.unlink("a.tmp")
    assert "a.tmp" in disk.names


def test_a_full_disk_takes_nothing() -> None:
    disk = SimDisk(0)
    files = open_files(disk)
    fd = write(files, "a.tmp", b"x")
    disk.is_full = True
    for call in (lambda: files.pwritev(fd, [memoryview(b"y")], 1), lambda: files.open("b.tmp", NEW)):
        with pytest.raises(OSError, match="No space") as caught:
            call()
        assert caught.value.errno == errno.ENOSPC


def linked(cut_after: int | None = None):
    loop, rng = EventLoop(), Random(3)
    wires = (Wire(0.001, 0.01, cut_after=cut_after), Wire(0.001, 0.01))

    def after(seconds, kind, call) -> None:
        loop.after(seconds, kind, call)

    here, there = connect(("here", "there"), loop, rng, after=(after, after), wires=wires, split_rate=1.0)
    received: list[bytes] = []
    router = Router()
    router.route(NOTE, lambda _, payload: received.append(bytes(payload)))
    ends: list[str] = []
    router.on_end(lambda _, end: ends.append(end.cause.value))
    there.start(router, pulse=bytes)
    here.start(Router(), pulse=bytes)
    return loop, here, received, ends


def run_until(loop: EventLoop, seconds: float) -> None:
    while loop.now < seconds and loop.run_next():
        pass


def test_frames_arrive_whole_and_in_order_however_they_are_split_and_stalled() -> None:
    loop, here, received, ends = linked()
    notes = [bytes([number]) * 100 for number in range(40)]
    for number, note in enumerate(notes):
        if number == 20:
            here.outgoing.stalled_until = 1.0
        here.send(NOTE, note)
    run_until(loop, 2.0)
    assert received == notes
    assert ends == []


@pytest.mark.parametrize("cut_after", range(17, 400, 61))
def test_a_link_cut_at_any_byte_delivers_what_was_whole_before(cut_after) -> None:
    loop, here, received, ends = linked(cut_after)
    for number in range(4):
        if here.end is None:
            here.send(NOTE, bytes([number]) * 84)
    run_until(loop, 2.0)
    assert len(received) <= cut_after // 100
    assert ends == ["disconnected"]


def test_silence_ends_a_link_in_five_seconds() -> None:
    loop, here, _, ends = linked()
    here.outgoing.stalled_until = 100.0
    run_until(loop, 4.0)
    assert ends == []
    run_until(loop, 5.0)
    assert ends == ["no heartbeat"]


def make_job(job_id: int, op: JobOp, page: int) -> Job:
    record = RecordIdentity(
        key=bytes(32), store_id=bytes(16), parent_key=b"", start_key=bytes(32), start=0, end=4,
        page_tokens=4, tail_tokens=0, has_row=False,
    )  # fmt: skip
    return Job(job_id=job_id, op=op, tier=Tier.DISK, record=record, sections=(Section(0, page),))


def use(step: int, *, reads=(), writes=()) -> StepUse:
    return StepUse(step, frozenset(reads), frozenset(writes), frozenset())


def test_a_page_is_not_written_while_it_is_stored() -> None:
    ledger = Ledger(0)
    ledger.job_begins(make_job(1, JobOp.STORE, 7))
    ledger.step_begins(use(1, reads=[7]), ())
    ledger.step_ends()
    with pytest.raises(Violation, match="page 7 of job 1"):
        ledger.step_begins(use(2, writes=[7]), ())


def test_a_restored_page_is_read_by_a_step_that_needs_its_job() -> None:
    ledger = Ledger(0)
    job = make_job(3, JobOp.FETCH, 5)
    ledger.job_begins(job)
    ledger.job_ends(job, is_ok=True)
    ledger.step_begins(use(1, reads=[5]), (3,))
    ledger.step_ends()
    job = make_job(4, JobOp.FETCH, 5)
    ledger.job_begins(job)
    ledger.job_ends(job, is_ok=True)
    with pytest.raises(Violation, match="without needing job 4"):
        ledger.step_begins(use(2, reads=[5]), ())


def test_one_other_byte_anywhere_makes_another_token() -> None:
    model = Model(2, 4, 1 << 30, has_rows=True, is_uneven=False)
    tokens = b"".join(number.to_bytes(4, "little") for number in range(9))
    digests = model.digests(tokens, 1)
    rows = [model.row_after(bytes(8), digests, rank) for rank in range(2)]
    entries = [bytearray(model.entries(digests, rank)) for rank in range(2)]
    right = choose_token([model.condense(bytes(entries[r]), rows[r]) for r in range(2)], 9, 1 << 30)
    assert right == model.expected_token(digests, 9)
    for rank in range(2):
        for at in range(0, len(entries[rank]), 7):
            entries[rank][at] ^= 1
            parts = [model.condense(bytes(entries[r]), rows[r]) for r in range(2)]
            assert choose_token(parts, 9, 1 << 30) != right
            entries[rank][at] ^= 1
