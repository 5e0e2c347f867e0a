"""The join over real links when something goes wrong: who is told what, and that nobody waits for ever."""

from __future__ import annotations

import errno
import socket
import threading
import time
from pathlib import Path

import pytest

from flare_cache import record_group
from flare_cache.dispatcher import Dispatcher
from flare_cache.join_messages import Apply
from flare_cache.join_shell import JoinInbox, JoinRun
from flare_cache.outcomes import ShardedLimits
from flare_cache.record_group import start_leader, start_peer
from flare_cache.record_link import RECORD_JOIN, Progress, encode_progress
from flare_cache.sharded import ShardedLeader
from flare_cache.testing import RUN_ID, GroupPlan, LocalGroup, make_rank, token_geometries
from flare_core.errors import FlareError, UsageError
from flare_transport.errors import LinkLost, QueueFull
from flare_transport.local_link import local_link
from flare_transport.router import Router


def plan_at(root: Path) -> GroupPlan:
    return GroupPlan(geometries=token_geometries(2), root=root)


class Half:
    """One real rank of two, and a bare link in place of the other."""

    def __init__(self, root: Path, rank: int) -> None:
        self.rank = make_rank(plan_at(root), rank)
        here, there = socket.socketpair()
        self.link = local_link(here, name=f"record link to rank {1 - rank}")
        self.other = local_link(there, name="the other side")
        self.router = Router()
        self.heard: list[bytes] = []
        self.has_heard = threading.Event()
        self.router.route(RECORD_JOIN, lambda _, payload: self._hear(bytes(payload)))
        self.other.start(self.router, pulse=lambda: encode_progress(Progress(0, 0)))

    def _hear(self, payload: bytes) -> None:
        self.heard.append(payload)
        self.has_heard.set()

    def start(self, *, timeout_seconds: float = 30.0) -> str:
        """Start the real rank; what its error says."""
        with pytest.raises(FlareError) as caught:
            self._start(timeout_seconds)
        self.rank.directory.close()
        self.other.close()
        return str(caught.value)

    def _start(self, timeout_seconds: float) -> None:
        setup, link = self.rank.setup, self.link
        if self.rank.rank == 1:
            start_peer(setup, link, run_id=RUN_ID, on_end=lambda _: None, timeout_seconds=timeout_seconds)
            return
        quiet = {"on_outcome": lambda: None, "on_poison": lambda _: None}
        start_leader(setup, {1: link}, run_id=RUN_ID, timeout_seconds=timeout_seconds, **quiet)


def test_a_peer_that_says_nothing_is_named_when_time_is_up(tmp_path):
    text = Half(tmp_path, 0).start(timeout_seconds=0.1)
    assert "rank 1 was lost during the join: ranks [1] did not state its settings and records in 0.1 s" in text


def test_a_leader_that_says_nothing_is_given_up_when_time_is_up(tmp_path):
    half = Half(tmp_path, 1)
    assert "rank 0 was lost during the join: no answer in 0.1 s" in half.start(timeout_seconds=0.1)
    assert half.has_heard.wait(5)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_that_ends_during_the_join_fails_it(tmp_path, rank):
    half = Half(tmp_path, rank)
    threading.Timer(0.05, lambda: half.other.fail("pulled out")).start()
    assert f"rank {1 - rank} was lost during the join" in half.start()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_message_that_cannot_be_read_fails_the_join(tmp_path, rank):
    half = Half(tmp_path, rank)
    half.other.send(RECORD_JOIN, b"\xc1garbage")
    assert "a message that cannot be read" in half.start()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_cannot_apply_what_was_agreed_fails_every_rank_by_name(tmp_path, failing, monkeypatch):
    def refuse(directory, *args, **kwargs):
        if directory.path.name == f"rank{failing}":
            raise OSError(errno.EROFS, "Read-only file system")
        return apply_verdicts(directory, *args, **kwargs)

    apply_verdicts = record_group.apply_verdicts
    monkeypatch.setattr(record_group, "apply_verdicts", refuse)
    with pytest.raises(UsageError, match=rf"rank {failing}: .*Read-only file system") as caught:
        LocalGroup.start(plan_at(tmp_path))
    assert "Read-only file system" in caught.value.__notes__[0]


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_without_threads_fails_the_join_of_every_rank(tmp_path, failing, monkeypatch):
    def start(transport) -> None:
        if transport.geometry.rank == failing:
            raise RuntimeError("can't start new thread")
        started(transport)

    started = record_group.StagedTransport.start
    monkeypatch.setattr(record_group.StagedTransport, "start", start)
    with pytest.raises((RuntimeError, UsageError), match="can't start new thread") as caught:
        LocalGroup.start(plan_at(tmp_path))
    assert "can't start new thread" in caught.value.__notes__[0]


def test_a_message_larger_than_the_queue_waits_for_room_until_the_deadline():
    attempts: list[Exception] = [QueueFull("full"), QueueFull("full"), LinkLost("gone")]

    class Full:
        def send(self, frame_type, payload=b"") -> None:
            raise attempts.pop(0)

    run = JoinRun({1: Full()}, lambda _: None, lambda _: [], lambda _: [], time.monotonic() + 60)
    run._tell(1, Apply())
    assert attempts == []
    late = JoinRun({1: Full()}, lambda _: None, lambda _: [], lambda _: [], 0.0)
    attempts.append(QueueFull("full"))
    late._tell(1, Apply())
    assert attempts == []


def test_the_join_and_the_dispatcher_share_a_router():
    router = Router()
    machine = ShardedLeader(run_id=RUN_ID, world_size=2, limits=ShardedLimits())
    Dispatcher(machine, on_outcome=lambda: None, on_poison=lambda _: None).route(router, 1)
    JoinInbox().route(router, 1)
    assert RECORD_JOIN.code in router.types
