"""The join's machines one message at a time: what comes out of turn, breaks or is not held here fails every rank."""

from __future__ import annotations

import hashlib

import pytest

from flare_cache.jobs import RecordIdentity
from flare_cache.join import JoinFailed, JoinLeader, JoinPeer, Tell
from flare_cache.join_messages import (
    Applied,
    Apply,
    Broken,
    Confirmed,
    Hello,
    Joined,
    Proposal,
    Refused,
    ScanChunk,
    VerdictChunk,
)
from flare_cache.join_report import JoinReport
from flare_cache.join_set import Summary, summarise
from flare_cache.record_plan import FileSizes
from flare_cache.record_table import KEEP_TAIL, RecordTable, ScannedRecord
from flare_cache.settings import Statement
from flare_cache.testing import GroupPlan, token_geometries
from flare_core.errors import UsageError

SET_ID = b"the drawn set id"
PLAN = GroupPlan(geometries=token_geometries(2))


def record(name: int) -> ScannedRecord:
    """A page at the root, stored once."""
    key = hashlib.sha256(bytes((name,))).digest()
    identity = RecordIdentity(
        key=key, store_id=key[:16], parent_key=b"", start_key=bytes(32), start=0, end=4, page_tokens=4, tail_tokens=0,
        has_row=False,
    )  # fmt: skip
    return ScannedRecord(
        identity=identity, invariant_digest=hashlib.sha256(key).digest(), size=8192, has_tail=False, has_row=False
    )


def statement(rank: int, scan=()) -> Statement:
    layout = PLAN.geometries[rank].layout_fingerprint
    return Statement(rank=rank, fields=PLAN.cache_settings(rank).fields(), layout=layout, num_records=len(scan))


def leader_of_two(scan=()) -> JoinLeader:
    leader = JoinLeader(
        statement(0, scan), RecordTable.of(scan), world_size=2, sizes=FileSizes(PLAN.geometries), accept_loss=True,
        draw_set_id=lambda: SET_ID,
    )  # fmt: skip
    assert leader.start() == []
    return leader


def hello(scan=(), *, rank: int = 1) -> Hello:
    return Hello(statement(rank, scan))


MANY = RecordTable.of([record(1), record(2)])


@pytest.mark.parametrize(
    "messages",
    [
        [Apply()],
        [hello(), hello()],
        [hello(rank=0)],
        [ScanChunk(summarise(MANY))],
        [hello(MANY[:1]), ScanChunk(summarise(MANY))],
        [hello(MANY), ScanChunk(Summary(b"", b"", b"", []))],
        [hello(MANY), ScanChunk(Summary(b"short", bytes(64), bytes(2), [1, 2]))],
        [Confirmed(bytes(32))],
        [Applied(0, 0, 0)],
        [hello(), Confirmed(b"another digest")],
    ],
)
def test_a_message_out_of_turn_fails_the_join_on_every_rank(messages):
    leader = leader_of_two()
    effects = [effect for message in messages for effect in leader.receive(1, message)]
    assert isinstance(effects[-1], JoinFailed)
    assert "out of turn" in str(effects[-1].error)
    assert isinstance(effects[-2].message, Refused)
    assert leader.receive(1, hello()) == []
    assert leader.lost(1, "gone") == leader.failed("late") == []
    assert leader.awaited() == ([], "do anything")


def test_the_leader_knows_whom_it_waits_for():
    leader = leader_of_two(MANY)
    assert leader.awaited() == ([1], "state its settings and records")
    leader.receive(1, hello(MANY))
    assert leader.awaited()[0] == [1]
    effects = leader.receive(1, ScanChunk(summarise(MANY)))
    assert leader.awaited() == ([1], "confirm the set")
    proposal = effects[-1].message
    leader.receive(1, Confirmed(proposal.digest))
    assert leader.awaited() == ([0, 1], "remove what is not kept")


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (lambda leader: leader.receive(1, Broken("disk full")), "rank 1: disk full"),
        (lambda leader: leader.lost(1, "reset"), "link-lost: rank 1 was lost during the join: reset"),
        (lambda leader: leader.failed("read-only"), "rank 0: read-only"),
    ],
)
def test_a_rank_that_breaks_fails_the_join_by_name(event, text):
    *told, failed = event(leader_of_two())
    assert str(failed.error) == text
    assert [effect.message.lines for effect in told] == [[text]]


def proposed(scan, verdicts: bytes, digest: bytes) -> list:
    peer = JoinPeer(statement(1, scan), RecordTable.of(scan))
    peer.start()
    peer.receive(VerdictChunk(verdicts))
    return peer.receive(Proposal(SET_ID, digest))


def test_a_peer_refuses_a_set_that_it_does_not_hold():
    plain = [record(1)]
    for verdicts in (b"", b"\x00\x00", bytes((KEEP_TAIL,)), b"\x00"):
        tell, failed = proposed(plain, verdicts, b"wrong digest")
        assert isinstance(tell.message, Broken)
        assert isinstance(failed.error, UsageError)


def test_a_peer_takes_no_message_out_of_turn():
    report = JoinReport(
        set_id=SET_ID, num_kept=0, kept_bytes=0, left_bytes=0, disk_limit_bytes=0, memory_limit_bytes=0, ranks=[]
    )
    for message in (Apply(), Joined(report), hello()):
        peer = JoinPeer(statement(1), RecordTable.of([]))
        tell, failed = peer.receive(message)
        assert "out of turn" in str(failed.error)
        assert isinstance(tell, Tell)
        assert peer.receive(Apply()) == peer.lost("gone") == []
    peer = JoinPeer(statement(1), RecordTable.of([]))
    (failed,) = peer.lost("silence")
    assert "rank 0 was lost during the join: silence" in str(failed.error)
    assert [type(effect) for effect in JoinPeer(statement(1), RecordTable.of([])).failed("no threads")] == [
        Tell,
        JoinFailed,
    ]
