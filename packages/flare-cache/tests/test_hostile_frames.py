"""Frames of the record link as a compromised rank might send them: odd shapes, counts at their bounds, names."""

from __future__ import annotations

import msgspec
import pytest

from flare_cache.directory import RECORD_NAME
from flare_cache.job_check import job_problem
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus, RecordIdentity, Section, record_file_name
from flare_cache.join_messages import Broken, Refused, decode_message, encode_message
from flare_cache.record_link import (
    RECORD_ACK,
    Ack,
    JobFrame,
    Progress,
    Started,
    decode_ack,
    decode_job,
    decode_progress,
    decode_started,
    encode_ack,
)
from flare_core.prefix import Tier

NUM_PAGES, NUM_SLOTS = 24, 3
RUN = bytes(16)


@pytest.fixture
def job(new_identity):
    """``job(**fields)``: a fetch of a record of three pages, a tail and a row, into pages 0 to 3."""

    def make(**fields) -> Job:
        record = fields.pop("record", None) or new_identity()
        values = {
            "job_id": 1,
            "op": JobOp.FETCH,
            "tier": Tier.DISK,
            "record": record,
            "sections": tuple(Section(index, index) for index in range(record.num_sections)),
            "row_slot": 0,
        }
        return Job(**(values | fields))

    return make


FRAMES = {
    "job": (decode_job, None),
    "started": (decode_started, Started(RUN, 1, 1)),
    "acknowledgement": (decode_ack, Ack(RUN, 1, JobResult(job_id=1, status=JobStatus.OK))),
    "progress": (decode_progress, Progress(1, 1)),
    "join": (decode_message, Broken("why")),
}


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize("shape", ["a field less", "a field more", "nested without end", "no text", "cut", "empty"])
def test_a_payload_of_another_shape_is_refused(name, shape, job):
    decode, frame = FRAMES[name]
    encoded = msgspec.msgpack.encode(frame or JobFrame(RUN, job()))
    fields = msgspec.msgpack.decode(encoded)
    payload = {
        "a field less": msgspec.msgpack.encode(fields[:-1]),
        "a field more": msgspec.msgpack.encode([*fields, 0]),
        "nested without end": msgspec.msgpack.encode([*fields, 0])[:-1] + b"\x91" * 100_000 + b"\xc0",
        "no text": encoded[:1] + b"\xa2\xc3\x28" + encoded[2:],
        "cut": encoded[:-1],
        "empty": b"",
    }[shape]
    with pytest.raises(msgspec.DecodeError):
        decode(payload)


@pytest.mark.parametrize(
    ("page", "slot", "is_taken"),
    [
        (NUM_PAGES - 1, NUM_SLOTS - 1, True),
        (NUM_PAGES, NUM_SLOTS - 1, False),
        (NUM_PAGES - 1, NUM_SLOTS, False),
        (-1, 0, False),
        (0, -1, False),
        (1 << 63, 0, False),
    ],
)
def test_a_job_is_taken_up_to_the_last_page_and_slot(job, new_geometry, page, slot, is_taken):
    sections = (Section(0, page),)
    problem = job_problem(
        job(sections=sections, row_slot=slot), new_geometry(), num_pages=NUM_PAGES, num_slots=NUM_SLOTS
    )
    assert (problem is None) is is_taken, problem


@pytest.mark.parametrize(("index", "is_taken"), [(2, True), (3, True), (4, False), (1 << 40, False), (-1, False)])
def test_a_job_is_taken_up_to_the_records_last_section(job, new_geometry, index, is_taken):
    problem = job_problem(job(sections=(Section(index, 0),)), new_geometry(), num_pages=NUM_PAGES, num_slots=NUM_SLOTS)
    assert (problem is None) is is_taken


@pytest.mark.parametrize(
    "key",
    [b"", b"../../etc/passwd", b"/etc/passwd\0".ljust(31), b"k" * 33, b"k" * 64],
)
def test_a_key_that_is_none_names_no_file(job, new_geometry, new_identity, key):
    record = new_identity(key=key)
    problem = job_problem(job(record=record), new_geometry(), num_pages=NUM_PAGES, num_slots=NUM_SLOTS)
    assert problem is not None
    assert "wrong length" in problem


@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32, b"/../" * 8, b"\x00" * 31 + b"\n"])
def test_a_file_name_is_made_of_a_key_here_and_is_never_a_path(key):
    assert RECORD_NAME.fullmatch(record_file_name(key))


def test_a_job_on_a_hostile_key_touches_no_file(open_rank, new_identity):
    rank = open_rank()
    foreign = rank.directory.path.parent / "foreign.rec"
    foreign.write_bytes(b"someone else's")
    for op in (JobOp.UNLINK, JobOp.TRUNCATE):
        result = rank.result(rank.submit(op, new_identity(key=b"../foreign")))
        assert result.status is JobStatus.FAILED
    assert foreign.read_bytes() == b"someone else's"


def test_no_job_has_room_for_a_path():
    """What of a job is text is one of a few words."""
    fields = [*msgspec.structs.fields(Job), *msgspec.structs.fields(RecordIdentity), *msgspec.structs.fields(Section)]
    assert [field.name for field in fields if field.type is str] == []
    assert {field.type for field in fields} >= {bytes, int, JobOp, Tier}


@pytest.mark.parametrize("length", [299, 300, 301, 100_000])
def test_a_reason_is_cut_to_what_an_acknowledgement_may_hold(length):
    frame = Ack(RUN, 1, JobResult(job_id=1, status=JobStatus.FAILED, reason="\U0001f525" * length))
    encoded = encode_ack(frame)
    assert len(encoded) <= RECORD_ACK.max_bytes
    assert len(decode_ack(encoded).result.reason) == min(length, 300)


def test_lines_of_a_refusal_are_text_and_nothing_else():
    refused = Refused(["\x1b[31mred", "x" * 10_000], is_mismatch=False)
    assert decode_message(encode_message(refused)) == refused
