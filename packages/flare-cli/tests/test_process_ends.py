"""What a process leaves behind, and how it takes a signal before it has begun."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flare_cache.host_memory import new_mapping

SIGNAL_WHILE_LOADING = """
import builtins, os, sys
import flare_cli.__main__ as entry
load = builtins.__import__
def load_and_signal(name, *arguments, **options):
    if name == "click":
        os.kill(os.getpid(), int(sys.argv[1]))
    return load(name, *arguments, **options)
builtins.__import__ = load_and_signal
entry.main(sys.argv[2:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_server_is_still_loading_ends_it_in_order(number):
    command = [sys.executable, "-c", SIGNAL_WHILE_LOADING, str(int(number)), "run", "no-model"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "flare: stopped before it was ready\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_to_another_command_ends_it_as_signals_do(number, code):
    command = [sys.executable, "-c", SIGNAL_WHILE_LOADING, str(int(number)), "records", "ls", "/"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == code


def test_a_crash_leaves_no_core(tmp_path):
    script = "import os, signal\nfrom flare_cli.process_limits import set_process_limits\nset_process_limits()\n"
    script += "os.kill(os.getpid(), signal.SIGSEGV)"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -signal.SIGSEGV
    assert os.WTERMSIG(status) == signal.SIGSEGV
    assert not os.WCOREDUMP(status)
    assert list(tmp_path.iterdir()) == []


def flags_of(address):
    """The kernel's flags of the mapping at this address of this process."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            start, end = (int(number, 16) for number in words[0].split("-"))
            is_here = start <= address < end
        elif is_here and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError("no such mapping")


def test_memory_of_records_is_no_part_of_a_dump():
    mapping = new_mapping(1 << 20)
    view = (ctypes.c_char * (1 << 20)).from_buffer(mapping)
    assert "dd" in flags_of(ctypes.addressof(view))
