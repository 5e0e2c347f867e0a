"""Lines that strangers cause: the first few, then their number."""

import logging

import pytest

from flare_cli.logs import set_up_logs
from flare_cli.rate_limit import RateLimit
from flare_cli.sighting_log import SightingLog
from flare_transport import Sighting


def test_the_first_few_of_a_window_pass_and_the_next_window_tells_how_many_did_not():
    limit = RateLimit(num_passing=2, window_seconds=10)
    assert [limit.admit("a", 0.0) for _ in range(5)] == [0, 0, None, None, None]
    assert limit.admit("b", 1.0) == 0
    assert limit.admit("a", 9.9) is None
    assert limit.admit("a", 10.0) == 4
    assert limit.admit("a", 10.1) == 0


def test_what_was_held_back_is_told_once():
    limit = RateLimit(num_passing=1)
    for _ in range(4):
        limit.admit("a", 0.0)
    assert limit.take_held_back() == {"a": 3}
    assert limit.take_held_back() == {}
    assert limit.admit("a", 10.0) == 0


def test_many_keys_take_no_more_memory_than_few():
    limit = RateLimit(num_passing=1, max_keys=3)
    admitted = [limit.admit(key, 0.0) for key in range(10)]
    assert admitted == [0, 0, 0, 0, *[None] * 6]
    assert limit.take_held_back() == {None: 6}
    # When a window is over its place is free again.
    assert [limit.admit(key, 20.0) for key in (50, 51)] == [0, 0]


@pytest.fixture
def own_root(monkeypatch):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_flood_of_connections_takes_a_few_lines_and_their_number(caplog):
    caplog.set_level(logging.INFO)
    log = SightingLog()
    for _ in range(1000):
        log.note(Sighting("10.0.0.9", None, "its bytes are no frame"))
    log.note(Sighting("10.0.0.1", 1, "joined", has_joined=True))
    assert len(caplog.messages) == 7
    assert caplog.messages[0] == "rendezvous: 10.0.0.9: its bytes are no frame"
    assert caplog.messages[5] == "rendezvous: 10.0.0.9: 995 more connections were turned away"
    assert caplog.messages[6] == "rendezvous: rank 1 at 10.0.0.1: joined"


def test_a_flood_of_bad_http_takes_a_few_lines_and_other_lines_stay(own_root, capsys):
    set_up_logs(as_json=False, process="api")
    for _ in range(1000):
        logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
        logging.getLogger("flare.http").info("a client broke off within the body of %s", "/v1/completions")
    logging.getLogger("flare").info("draining")
    lines = capsys.readouterr().err.splitlines()
    assert sum("Invalid HTTP" in line for line in lines) == 5
    assert sum("broke off" in line for line in lines) == 5
    assert lines[-1].endswith("draining")
