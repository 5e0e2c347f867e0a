"""System calls tampered with: a program that runs under strace, and one that it is attached to."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from flare_qualify.faults.commands import FaultError
from flare_qualify.faults.processes import session_members, stopped
from flare_qualify.faults.system_calls import WRITE_PAGES, Injection, Trace, attached, traced_command

WRITER = """
import os, sys
print("ready", flush=True)
sys.stdin.readline()
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
for number in range(3):
    try:
        os.pwritev(fd, [b"x" * 10], 10 * number)
    except OSError as error:
        print(number, os.strerror(error.errno), flush=True)
print("done", flush=True)
"""


def writer(target, prefix=()) -> subprocess.Popen:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", WRITER, str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def go(process: subprocess.Popen) -> str:
    said, _ = process.communicate("go\n", timeout=30)
    return said


def test_the_nth_call_kills_before_it_does_anything(needs, tmp_path) -> None:
    needs("strace")
    trace = Trace(tmp_path / "trace")
    injection = Injection(WRITE_PAGES, "signal=SIGKILL", "3")
    with writer(tmp_path / "file", traced_command(trace.path, injection.options())) as process:
        go(process)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_bytes() == b"x" * 20
    assert any("killed by SIGKILL" in line for line in trace.fired())


@pytest.mark.parametrize(("when", "failed"), [("2", ["1"]), ("2+", ["1", "2"]), ("5", [])])
def test_a_call_fails_once_or_ever_after(needs, tmp_path, when, failed) -> None:
    needs("strace")
    trace = Trace(tmp_path / "trace")
    injection = Injection(WRITE_PAGES, "error=ENOSPC", when)
    with writer(tmp_path / "file", traced_command(trace.path, injection.options())) as process:
        said = go(process)
    lines = [line.split()[0] for line in said.splitlines() if "No space" in line]
    assert lines == failed
    assert len(trace.fired()) == len(failed)
    assert process.returncode == 0


def test_calls_are_counted_by_the_thread_that_makes_most(needs, tmp_path) -> None:
    needs("strace")
    trace = Trace(tmp_path / "trace")
    with writer(tmp_path / "file", traced_command(trace.path, ["-e", "trace=pwritev,pwritev2,fsync"])) as process:
        go(process)
    assert list(trace.most_calls().values()) == [3]
    assert trace.fired() == []


def test_a_running_process_can_be_tampered_with_and_is_let_go(needs, tmp_path) -> None:
    needs("strace")
    with writer(tmp_path / "file") as process:
        assert process.stdout.readline() == "ready\n"
        with attached(process.pid, Injection(WRITE_PAGES, "error=EIO", "1+"), tmp_path / "trace") as trace:
            said = go(process)
            assert said.count("Input/output error") == 3
            assert len(trace.fired()) == 3
    assert process.returncode == 0


def test_attaching_to_nobody_is_an_error(needs, tmp_path) -> None:
    needs("strace")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    injection = Injection(WRITE_PAGES, "error=EIO")
    with pytest.raises(FaultError, match="did not attach"), attached(process.pid, injection, tmp_path / "trace"):
        pass


def test_a_stopped_process_does_nothing_until_it_is_continued(tmp_path) -> None:
    with writer(tmp_path / "file") as process:
        process.stdout.readline()
        assert session_members(process.pid) == [process.pid]
        with stopped(process.pid) as evidence:
            assert "state T" in evidence
            process.stdin.write("go\n")
            process.stdin.flush()
            assert not (tmp_path / "file").exists()
        assert process.stdout.readline() == "done\n"


def test_stopping_what_is_gone_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    with pytest.raises(FaultError, match="gone"), stopped(process.pid):
        pass
