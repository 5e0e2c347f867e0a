"""Well-formed messages with odd content, given to the machines behind the decoders, as a compromised rank would."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from flare_cache.job_check import job_problem
from flare_cache.jobs import JobOp
from flare_cache.join import JoinFailed, JoinLeader, JoinPeer
from flare_cache.join_messages import Hello, decode_message
from flare_cache.outcomes import Poison, RunHere, ShardedLimits
from flare_cache.record import file_layout
from flare_cache.record_link import decode_ack, decode_job, decode_started
from flare_cache.record_plan import FileSizes
from flare_cache.record_table import RecordTable, ScannedRecord
from flare_cache.sharded import ShardedLeader
from flare_core.geometry import Axis, Geometry, Plane
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_qualify.fuzz.targets.messages import odd_message
from flare_qualify.fuzz.targets.records import GEOMETRY, sample_identities
from flare_qualify.fuzz.targets.samples import JOIN_SAMPLES, RUN_ID, WIRES, sample_job, sample_statement
from flare_transport.frame_types import KEY_VALUE_REPLY
from flare_transport.key_value_table import MAX_WAITING, CountRequest, KeyValueTable

__all__ = ["JOBS", "JOIN", "KEY_VALUES"]

NUM_PAGES, NUM_SLOTS = 8, 2
_PLANE = Plane("kv", "float32", (Axis("token", 4), Axis("dim", 256)))
_GEOMETRIES = tuple(Geometry(rank, 2, 4, (_PLANE,), 5000) for rank in range(2))
_FIELDS = {"page_tokens": "4"} | {f"layout[{g.rank}]": g.layout_fingerprint.hex() for g in _GEOMETRIES}


def _records() -> RecordTable:
    """One record at the root, as both ranks hold it."""
    identity = sample_identities()[1]
    token_ids = bytes(4 * (identity.end - identity.start))
    record = ScannedRecord(
        identity=identity, invariant_digest=bytes(32), size=12288, has_tail=False, has_row=False, token_ids=token_ids
    )
    return RecordTable.of([record])


def _execute_join(data: bytes) -> None:
    choices = Choices(data)
    scan = _records()
    statements = [
        msgspec.structs.replace(sample_statement(rank, _FIELDS, num_records=1), layout=geometry.layout_fingerprint)
        for rank, geometry in enumerate(_GEOMETRIES)
    ]
    leader = JoinLeader(
        statements[0],
        scan,
        world_size=2,
        sizes=FileSizes(_GEOMETRIES),
        accept_loss=choices.flag(),
        draw_set_id=lambda: RUN_ID,
    )
    peer = JoinPeer(statements[1], scan)
    is_leader = choices.flag()
    effects = [*leader.start(), *peer.start()]
    for _ in range(8):
        if choices.is_spent:
            break
        sample = choices.pick(JOIN_SAMPLES)
        if isinstance(sample, Hello) and choices.flag():
            sample = Hello(statements[1])
        encoded = msgspec.msgpack.encode(sample) if choices.flag() else odd_message(sample, choices)
        try:
            message = decode_message(encoded)
        except msgspec.DecodeError:
            continue
        effects = leader.receive(1, message) if is_leader else peer.receive(message)
        ended = sum(isinstance(effect, JoinFailed) for effect in effects)
        require(ended <= 1, "start-up failed twice at once")
    if is_leader:
        leader.awaited()


def _execute_jobs(data: bytes) -> None:
    choices = Choices(data)
    if choices.flag():
        _check_job(odd_message(WIRES[0].samples[choices.integer(0, len(JobOp) - 1)], choices))
        return
    leader = ShardedLeader(run_id=RUN_ID, world_size=2, limits=ShardedLimits())
    now = 0.0
    job = msgspec.structs.replace(sample_job(choices.pick(tuple(JobOp))), job_id=0)
    leader.submit(job, tag=1, num_bytes=4096, now=now)
    is_poisoned = False
    for _ in range(8):
        if choices.is_spent:
            break
        now += 0.1
        wire = WIRES[1 + choices.integer(0, 1)]
        message = odd_message(wire.samples[0], choices)
        try:
            if wire.name == "started":
                effects = leader.started(1, decode_started(message), now)
            else:
                effects = leader.acked(1, decode_ack(message), now)
        except msgspec.DecodeError:
            continue
        require(not (is_poisoned and effects), "something was done after poisoning")
        is_poisoned = is_poisoned or any(isinstance(effect, Poison) for effect in effects)
        require(not any(isinstance(effect, RunHere) for effect in effects[8:]), "more jobs than credits")


def _check_job(message: bytes) -> None:
    """A job that a rank takes names only pages, slots and sections that it has."""
    try:
        job = decode_job(message).job
    except msgspec.DecodeError:
        return
    if job_problem(job, GEOMETRY, num_pages=NUM_PAGES, num_slots=NUM_SLOTS) is not None:
        return
    layout = file_layout(job.record, page_bytes=GEOMETRY.page_bytes, row_stride=GEOMETRY.row_stride)
    for section in job.sections:
        require(0 <= section.page < NUM_PAGES, f"page {section.page} taken")
        require(0 <= section.index < job.record.num_sections, f"section {section.index} taken")
        end = layout.section_offset(section.index) + layout.page_bytes
        require(layout.header_bytes <= end - layout.page_bytes and end <= layout.tail_end, "a section outside the file")
    require(job.row_slot is None or 0 <= job.row_slot < NUM_SLOTS, f"slot {job.row_slot} taken")
    require(len(job.record.key) == 32, "a file name of another length")
    require(layout.header_bytes <= 1 << 20, "a header over its limit")


def _execute_key_values(data: bytes) -> None:
    choices = Choices(data)
    table = KeyValueTable()
    wire = next(each for each in WIRES if each.name == "key-value request")
    for _ in range(30):
        if choices.is_spent:
            break
        client = choices.integer(0, 2)
        if choices.integer(0, 9) == 9:
            table.drop(client)
            continue
        sample = choices.pick(wire.samples)
        message = msgspec.msgpack.encode(sample) if choices.flag() else odd_message(sample, choices)
        try:
            request = wire.decode(message)
        except msgspec.DecodeError:
            continue
        for asker, reply in table.handle(client, request):
            require(asker in (0, 1, 2), "a reply to nobody")
            encoded = msgspec.msgpack.encode(reply)
            require(len(encoded) <= KEY_VALUE_REPLY.max_bytes, "a reply over its limit")
    ((_, reply),) = table.handle(0, CountRequest(0))
    require(isinstance(reply.answer, int) and reply.answer <= 30 + MAX_WAITING, "keys from nowhere")


@contextlib.contextmanager
def _open_join() -> Iterator[Execute]:
    yield _execute_join


@contextlib.contextmanager
def _open_jobs() -> Iterator[Execute]:
    yield _execute_jobs


@contextlib.contextmanager
def _open_key_values() -> Iterator[Execute]:
    yield _execute_key_values


def _seeds() -> Iterator[bytes]:
    for number in range(24):
        yield bytes((number % 2, number // 2 % 2)) + bytes((number * 7 + index * 3) % 16 for index in range(60))
    # Whole joins in their order: the peer's messages to the leader, and the leader's to the peer.
    yield bytes((0, 1, 0, 1, 1, 1, 1, 6, 1, 8, 1))
    yield bytes((0, 0, 4, 1, 5, 1, 7, 1, 9, 1))


JOIN = Target(
    "join",
    "Whatever a rank says during the join, the other side goes on, or fails start-up by name.",
    _open_join,
    _seeds,
    words=(b"\x00\x01", b"\x01\x01", b"\x06\x01"),
)
JOBS = Target(
    "jobs",
    "A rank takes only jobs on pages, slots and sections that it has; rank zero poisons at an answer that cannot be.",
    _open_jobs,
    _seeds,
)
KEY_VALUES = Target(
    "key-values",
    "Whatever a peer asks of the key-value table, it answers, refuses or waits, within its bounds.",
    _open_key_values,
    _seeds,
)
