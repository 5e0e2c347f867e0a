"""The join: what is kept is what all ranks hold, whatever they hold; settings and losses stop it by name."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.index import Record
from flare_cache.jobs import RecordIdentity
from flare_cache.join import ApplyHere, Finished, JoinFailed, JoinLeader, JoinPeer, Tell
from flare_cache.join_loss import MAX_CRASH_RECORDS
from flare_cache.join_messages import (
    Applied,
    decode_message,
    encode_message,
)
from flare_cache.join_set import Verdict, adopt
from flare_cache.record_plan import FileSizes
from flare_cache.record_table import KEEP_ROW, KEEP_TAIL, RecordTable, ScannedRecord
from flare_cache.settings import CacheSettings, Statement
from flare_core.errors import ConfigurationMismatch, UsageError
from flare_core.geometry import Axis, Geometry, Plane, SetIdentity

PAGE = 4
SET_ID = b"the drawn set id"


def geometries(world_size: int) -> tuple[Geometry, ...]:
    plane = Plane("kv", "float32", (Axis("token", PAGE), Axis("dim", 64)))
    return tuple(Geometry(rank, world_size, PAGE, (plane,), 100) for rank in range(world_size))


def record(
    name: int,
    parent: ScannedRecord | None = None,
    *,
    num_pages: int = 1,
    tail: int = 0,
    row: bool = False,
    store: int = 0,
) -> ScannedRecord:
    start = parent.identity.end - parent.identity.tail_tokens if parent is not None else 0
    identity = RecordIdentity(
        key=hashlib.sha256(name.to_bytes(4, "big")).digest(),
        store_id=store.to_bytes(16, "big"),
        parent_key=parent.identity.key if parent is not None else b"",
        start_key=bytes(32),
        start=start,
        end=start + num_pages * PAGE + tail,
        page_tokens=PAGE,
        tail_tokens=tail,
        has_row=row,
    )
    digest = hashlib.sha256(msgspec.msgpack.encode(identity)).digest()
    token_ids = bytes(4 * (identity.end - identity.start))
    return ScannedRecord(
        identity=identity, invariant_digest=digest, size=8192, has_tail=tail > 0, has_row=row, token_ids=token_ids
    )


def truncated(one: ScannedRecord, *, tail: bool, row: bool) -> ScannedRecord:
    return msgspec.structs.replace(one, has_tail=one.has_tail and tail, has_row=one.has_row and row and tail)


def statement(rank: int, world_size: int, records=(), **fields) -> Statement:
    planned = geometries(world_size)
    cache = CacheSettings(
        identity=SetIdentity(bytes(32), PAGE, "float32", "float32", "cpu", 1, planned),
        salt_key_id=bytes(16),
        has_disk=True,
        others=fields.pop("others", {}),
    )
    values = {
        "rank": rank,
        "fields": cache.fields(),
        "layout": planned[rank].layout_fingerprint,
        "disk_limit_bytes": 1 << 30,
        "file_system": f"host{rank}",
        "directory": f"/records/{rank}",
        "record_bytes": sum(one.size for one in records),
        "num_records": len(records),
    }
    return Statement(**{**values, **fields})


@dataclass
class Outcome:
    finished: dict[int, Finished]
    errors: dict[int, Exception]
    verdicts: dict[int, bytes]
    reports: int = 0


def join(scans: list[list[ScannedRecord]], *, statements=None, accept_loss: bool = False) -> Outcome:
    """Run all machines to the end, every message through its encoding."""
    world_size = len(scans)
    statements = statements or [statement(rank, world_size, scan) for rank, scan in enumerate(scans)]
    leader = JoinLeader(
        statements[0],
        RecordTable.of(scans[0]),
        world_size=world_size,
        sizes=FileSizes(geometries(world_size)),
        accept_loss=accept_loss,
        draw_set_id=lambda: SET_ID,
    )
    peers = {rank: JoinPeer(statements[rank], RecordTable.of(scans[rank])) for rank in range(1, world_size)}
    outcome = Outcome({}, {}, {})
    pending: deque = deque([(0, leader.start())] + [(rank, peer.start()) for rank, peer in peers.items()])
    while pending:
        rank, effects = pending.popleft()
        for effect in effects:
            match effect:
                case Tell(target, message):
                    message = decode_message(encode_message(message))
                    if target == 0:
                        pending.append((0, leader.receive(rank, message)))
                    else:
                        pending.append((target, peers[target].receive(message)))
                case ApplyHere(_, verdicts):
                    outcome.verdicts[rank] = verdicts
                    machine = leader if rank == 0 else peers[rank]
                    pending.append((rank, machine.applied(Applied(0, 0, 0))))
                case Finished():
                    outcome.finished[rank] = effect
                case JoinFailed(error):
                    outcome.errors[rank] = error
    return outcome


def after(scan: list[ScannedRecord], verdicts: bytes) -> list[ScannedRecord]:
    """The directory's content when the verdicts were carried out."""
    return [
        msgspec.structs.replace(one, has_tail=bool(verdict & KEEP_TAIL), has_row=bool(verdict & KEEP_ROW))
        for one, verdict in zip(scan, verdicts, strict=True)
        if verdict & 0x0F == Verdict.KEPT
    ]


def content(scan: list[ScannedRecord]) -> set[tuple[bytes, bytes, bool, bool]]:
    return {(one.identity.key, one.invariant_digest, one.has_tail, one.has_row) for one in scan}


def oracle(scans: list[list[ScannedRecord]]) -> set[tuple[bytes, bytes, bool, bool]]:
    """What all ranks hold, by looking at everything until nothing changes any more."""
    held = [{one.identity.key: one for one in scan} for scan in scans]
    kept = {
        key: one
        for key, one in held[0].items()
        if all(key in other and other[key].invariant_digest == one.invariant_digest for other in held)
    }
    tails = {key: all(other[key].has_tail for other in held) for key in kept}
    rows = {key: all(other[key].has_row for other in held) for key in kept}
    while True:
        bad = {
            key
            for key, one in kept.items()
            if (one.identity.parent_key and one.identity.parent_key not in kept)
            or (one.identity.num_pages == 0 and not tails[key])
        }
        if not bad:
            return {(key, one.invariant_digest, tails[key], rows[key]) for key, one in kept.items()}
        kept = {key: one for key, one in kept.items() if key not in bad}


@st.composite
def divergent_scans(draw):
    """A forest of records, of which each rank holds some, some cut, some from another store."""
    world_size = draw(st.integers(1, 3))
    records: list[ScannedRecord] = []
    for name in range(draw(st.integers(0, 10))):
        parents = [one for one in records if one.identity.num_pages]
        parent = draw(st.sampled_from([None, *parents]))
        tail = draw(st.integers(0, PAGE - 1))
        num_pages = draw(st.integers(0 if tail and parent else 1, 2))
        records.append(record(name, parent, num_pages=num_pages, tail=tail, row=draw(st.booleans())))
    scans = []
    for _ in range(world_size):
        scan = []
        for one in records:
            match draw(st.integers(0, 9)):
                case 0:
                    continue
                case 1:
                    scan.append(truncated(one, tail=False, row=False))
                case 2:
                    scan.append(truncated(one, tail=True, row=False))
                case 3:
                    other = msgspec.structs.replace(one.identity, store_id=b"another-store-id")
                    digest = hashlib.sha256(msgspec.msgpack.encode(other)).digest()
                    scan.append(msgspec.structs.replace(one, identity=other, invariant_digest=digest))
                case _:
                    scan.append(one)
        scans.append(draw(st.permutations(scan)))
    return scans


@settings(max_examples=400, deadline=None)
@given(divergent_scans(), st.data())
def test_the_join_keeps_what_all_ranks_hold_and_a_second_join_changes_nothing(scans, data):
    first = join(scans, accept_loss=True)
    assert first.errors == {}
    assert set(first.finished) == set(range(len(scans)))
    left = [after(scan, first.verdicts[rank]) for rank, scan in enumerate(scans)]
    expected = oracle(scans)
    assert [content(scan) for scan in left] == [expected] * len(scans)
    # A rank may have died with its part half done: any mixture of before and after.
    torn = [
        {one.identity.key: one for one in scan} | {one.identity.key: one for one in done}
        for scan, done in zip(scans, left, strict=True)
    ]
    resumed = [
        [torn_rank[key] for key in torn_rank if key in {one.identity.key for one in done} or data.draw(st.booleans())]
        for torn_rank, done in zip(torn, left, strict=True)
    ]
    again = join(resumed, accept_loss=True)
    assert [content(after(scan, again.verdicts[rank])) for rank, scan in enumerate(resumed)] == [expected] * len(scans)
    settled = join(left, accept_loss=True)
    assert [after(scan, settled.verdicts[rank]) for rank, scan in enumerate(left)] == left


@settings(max_examples=150, deadline=None)
@given(divergent_scans(), st.integers(0, 100_000))
def test_the_join_evicts_down_to_the_limit_and_stays_closed_under_parents(scans, limit):
    world_size = len(scans)
    statements = [statement(rank, world_size, scan) for rank, scan in enumerate(scans)]
    statements[-1] = msgspec.structs.replace(statements[-1], disk_limit_bytes=max(1, limit))
    outcome = join(scans, statements=statements, accept_loss=True)
    agreement = outcome.finished[0].agreement
    report = outcome.finished[world_size - 1].report
    assert report.disk_limit_bytes == min(max(1, limit), statements[0].disk_limit_bytes)
    assert agreement.kept_bytes <= report.disk_limit_bytes
    keys = {one.identity.key for one in agreement.kept}
    assert all(one.identity.parent_key in keys for one in agreement.kept if one.identity.parent_key)
    assert sorted(agreement.oldest_first) == sorted(keys)
    index = adopt(agreement, PAGE)
    seen: set[bytes] = set()
    for one in index.records():
        assert isinstance(one, Record)
        assert set(one.children) <= seen
        seen.add(one.key)


def test_oldest_use_goes_first_and_a_parent_is_as_young_as_its_children():
    parent, old, young = record(1), record(2), record(3)
    child = record(4, parent)
    scan = [parent, old, young, child]
    statements = [statement(0, 1, scan, disk_limit_bytes=3 * 8192)]
    agreement = join([scan], statements=statements).finished[0].agreement
    assert {one.identity for one in agreement.kept} == {one.identity for one in (parent, young, child)}
    assert agreement.counts()[0] == {Verdict.KEPT: 3, Verdict.OVER_LIMIT: 1}


def test_every_rank_reports_why_records_went():
    common, gone, other = record(1), record(2), record(3)
    child = record(4, gone)
    cut = record(5, common, num_pages=0, tail=2)
    differing = record(3, store=9)
    scans = [[common, gone, other, child, cut], [common, differing, child, truncated(cut, tail=False, row=False)]]
    outcome = join(scans)
    report = outcome.finished[1].report
    assert report == outcome.finished[0].report
    assert report.ranks[0].verdicts == {
        "kept": 1, "missing": 1, "differs": 1, "orphaned": 1, "empty": 1, "damaged": 0,
    }  # fmt: skip
    assert report.ranks[1].verdicts == {"kept": 1, "differs": 1, "orphaned": 1, "empty": 1, "damaged": 0}
    assert any("dropped 1 differs" in line for line in report.lines())
    assert report.set_id == SET_ID


@pytest.mark.parametrize("world_size", [2, 3])
def test_settings_that_differ_fail_every_rank_with_both_values(world_size):
    statements = [statement(rank, world_size) for rank in range(world_size)]
    last = world_size - 1
    statements[last] = statement(last, world_size, others={"kv_dtype": "bfloat16", "extra": "1"})
    outcome = join([[]] * world_size, statements=statements)
    assert set(outcome.errors) == set(range(world_size))
    for error in outcome.errors.values():
        assert isinstance(error, ConfigurationMismatch)
        assert f"kv_dtype: rank 0 has float32, rank {last} has bfloat16" in str(error)
        assert f"extra: rank 0 has absent, rank {last} has 1" in str(error)


def test_a_rank_whose_layout_is_not_what_rank_zero_planned_fails_the_join():
    statements = [statement(0, 2), msgspec.structs.replace(statement(1, 2), layout=bytes(32))]
    (error, _) = join([[], []], statements=statements).errors.values()
    assert isinstance(error, ConfigurationMismatch)
    assert f"layout: rank 1 must have {geometries(2)[1].layout_fingerprint.hex()[:40]}…, has 0000" in str(error)


def test_an_empty_directory_that_would_cost_the_group_its_records_needs_consent():
    scan = [record(1), record(2)]
    outcome = join([scan, []])
    assert all(isinstance(error, UsageError) for error in outcome.errors.values())
    assert len(outcome.errors) == 2
    assert "16384 bytes of records a rank would be lost, because the directory of rank 1 (/records/1)" in str(
        outcome.errors[0]
    )
    assert join([scan, []], accept_loss=True).finished[0].report.num_kept == 0
    assert join([[], scan, scan]).errors[1].args[0].count("rank 0") == 1
    # What the others do not share would go anyway.
    assert join([scan, [record(3)], []]).errors == {}


def test_a_directory_of_the_group_without_records_needs_no_consent():
    # A rank that was killed during the group's first store has none, and the others' must go.
    statements = [statement(rank, 2, set_id=SET_ID) for rank in range(2)]
    outcome = join([[record(1)], []], statements=statements)
    assert outcome.errors == {}
    assert outcome.finished[0].report.num_kept == 0
    # More than can have been under way at once is no trace of a kill.
    many = [record(number) for number in range(1, MAX_CRASH_RECORDS + 2)]
    assert join([many[:-1], []], statements=statements).errors == {}
    assert "rank 1 (/records/1) is empty" in str(join([many, []], statements=statements).errors[0])


def test_directories_of_different_groups_need_consent_and_an_id_is_adopted():
    def told(first: bytes, second: bytes, **options) -> Outcome:
        statements = [statement(0, 2, set_id=first), statement(1, 2, set_id=second)]
        return join([[], []], statements=statements, **options)

    first, second = b"a" * 16, b"b" * 16
    assert "belong to different groups" in str(told(first, second).errors[0])
    assert told(first, second, accept_loss=True).finished[1].report.set_id == first
    assert told(b"", second).finished[0].report.set_id == second
    assert told(first, b"").finished[0].report.set_id == first
    assert told(b"", b"").finished[0].report.set_id == SET_ID


def test_a_derived_limit_is_shared_by_the_ranks_of_one_file_system():
    base = {"disk_limit_bytes": 0, "free_bytes": 1000, "record_bytes": 250}
    statements = [
        statement(0, 3, **base, file_system="one"),
        statement(1, 3, **base, file_system="one"),
        statement(2, 3, disk_limit_bytes=900),
    ]
    report = join([[], [], []], statements=statements).finished[2].report
    assert [rank.disk_limit_bytes for rank in report.ranks] == [600, 600, 900]
    assert [rank.is_limit_derived for rank in report.ranks] == [True, True, False]
    assert report.disk_limit_bytes == 600
    assert any("derived from free space" in line for line in report.lines())


def test_files_left_alone_count_against_the_limit():
    scan = [record(1), record(2)]
    statements = [statement(0, 1, scan, disk_limit_bytes=20_000, left_bytes=10_000)]
    finished = join([scan], statements=statements).finished[0]
    assert finished.report.num_kept == 1
    assert finished.report.left_bytes == 10_000


def test_without_tiers_only_settings_are_agreed():
    bare = [msgspec.structs.replace(statement(rank, 2), directory="", disk_limit_bytes=0) for rank in range(2)]
    report = join([[], []], statements=bare).finished[1].report
    assert (report.disk_limit_bytes, report.memory_limit_bytes, report.set_id) == (0, 0, b"")
    assert list(report.lines()) == []
    memory = [msgspec.structs.replace(one, memory_bytes=70 + one.rank) for one in bare]
    report = join([[], []], statements=memory).finished[1].report
    assert report.memory_limit_bytes == 70
    assert len(list(report.lines())) == 1


def test_a_long_scan_travels_in_chunks():
    scan = [record(number) for number in range(20_000)]
    outcome = join([scan, scan])
    assert outcome.finished[1].report.num_kept == 20_000
    chunks = [effect.message for effect in JoinPeer(statement(1, 2, scan), RecordTable.of(scan)).start()]
    assert [len(chunk.part) for chunk in chunks[1:]] == [8192, 8192, 3616]
    assert all(len(encode_message(chunk)) < 1 << 20 for chunk in chunks)


def test_long_values_are_shortened_where_they_differ_early():
    first, second = statement(0, 2, others={"x": "a" * 60}), statement(1, 2, others={"x": "b" * 60})
    error = join([[], []], statements=[first, second]).errors[0]
    assert f"x: rank 0 has {'a' * 40}…, rank 1 has {'b' * 40}…" in str(error)
