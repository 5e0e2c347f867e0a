"""Orders to fail: how they are written, when they are due, and that each action does to a real process what it says."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from flare_transport.failpoint import FAILPOINT_EXIT_CODE, FAILPOINTS, FailpointError, arm, failpoint, is_armed


@pytest.fixture(autouse=True)
def disarmed():
    yield
    arm("")


def run_armed(spec, *names, stdout=subprocess.PIPE):
    """A process that comes to ``names`` in order, saying "past" after each."""
    script = "import sys; from flare_transport.failpoint import arm, failpoint; arm(sys.argv[1])\n"
    script += "for name in sys.argv[2:]:\n    failpoint(name)\n    print('past', flush=True)"
    return subprocess.Popen(
        [sys.executable, "-c", script, spec, *names], stdout=stdout, stderr=subprocess.PIPE, text=True
    )


def reach(name, times):
    """What became of each of ``times`` visits: the error number, or None."""
    seen = []
    for _ in range(times):
        try:
            failpoint(name)
        except OSError as error:
            seen.append(error.errno)
        else:
            seen.append(None)
    return seen


def test_names_are_unique_and_say_where_and_what():
    assert len({point.name for point in FAILPOINTS}) == len(FAILPOINTS)
    assert all(point.where in {"rank 0", "peer", "any rank", "manager"} and point.what for point in FAILPOINTS)


def test_nothing_happens_while_nothing_was_ordered():
    assert not is_armed()
    assert [failpoint(point.name) for point in FAILPOINTS] == [None] * len(FAILPOINTS)


def test_an_order_is_due_at_its_visit_and_at_no_other():
    arm("store.link:error=EIO@2")
    assert is_armed()
    assert reach("store.header", 3) == [None, None, None]
    assert reach("store.link", 4) == [None, errno.EIO, None, None]


def test_a_lasting_order_is_due_from_its_visit_on():
    arm("fetch.read:error=EIO@2+")
    assert reach("fetch.read", 4) == [None, errno.EIO, errno.EIO, errno.EIO]


def test_orders_are_joined_by_semicolons_and_replaced_by_the_next():
    arm(" store.write:error=ENOSPC ; store.fsync:error=EIO@1;")
    assert reach("store.write", 1) + reach("store.fsync", 1) == [errno.ENOSPC, errno.EIO]
    arm("")
    assert not is_armed()
    assert reach("store.write", 2) == [None, None]


def test_two_orders_for_one_name_count_apart():
    arm("store.write:error=EIO@1;store.write:error=ENOSPC@3")
    assert reach("store.write", 3) == [errno.EIO, None, errno.ENOSPC]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("store.rename:kill", "'store.rename' is no failpoint; known are store.begin, "),
        ("store.link", "is no order: write NAME:ACTION"),
        ("store.link:kill@0", "is no order"),
        ("store.link:crash", "'crash' is no action; known are kill, stop, exit, hang, pause=500ms, error=EIO"),
        ("store.link:kill=9", "'kill=9' is no action"),
        ("store.link:error", "'error' is no action"),
        ("store.link:error=ENOTHING", "'ENOTHING' is no error number"),
        ("store.link:pause=5", "'5' is no pause; write one like 500ms or 5s"),
    ],
)
def test_what_is_no_order_is_refused_by_name_and_changes_nothing(spec, message):
    arm("store.begin:error=EIO")
    with pytest.raises(FailpointError, match=message):
        arm(f"store.write:error=EIO;{spec}")
    assert reach("store.begin", 1) == [errno.EIO]


@pytest.mark.parametrize(("action", "code"), [("kill", -signal.SIGKILL), ("exit", FAILPOINT_EXIT_CODE)])
def test_an_action_ends_the_process_there_and_leaves_its_line(action, code):
    process = run_armed(f"store.link:{action}@2", "store.link", "store.header", "store.link", "store.link")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert output == "past\npast\n"
    assert errors == f"failpoint store.link: {action}\n"


def test_stop_stops_the_process_until_it_is_continued():
    with run_armed("store.link:stop", "store.link") as process:
        stopped, status = os.waitpid(process.pid, os.WUNTRACED)
        assert stopped == process.pid
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60) == ("past\n", "failpoint store.link: stop\n")


def test_hang_goes_no_further():
    with run_armed("store.link:hang", "store.begin", "store.link") as process:
        assert process.stdout.readline() == "past\n"
        assert process.stderr.readline() == "failpoint store.link: hang\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.2)
        process.kill()
        assert process.stdout.read() == ""


def test_pause_goes_on_afterwards():
    process = run_armed("store.link:pause=10ms", "store.link", "store.link")
    assert process.communicate(timeout=60) == ("past\npast\n", "failpoint store.link: pause=10ms\n")
