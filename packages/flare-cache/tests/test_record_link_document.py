"""The record link's tables of docs/wire-format.md are those of the codec."""

from __future__ import annotations

import enum
import hashlib
import types
import typing
from pathlib import Path

import msgspec
import pytest

from flare_cache import join_messages, record_link
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus, RecordIdentity, Section
from flare_cache.join_messages import CHUNK_RECORDS, JoinMessage, decode_message, encode_message
from flare_cache.join_report import JoinReport, RankReport
from flare_cache.join_set import Summary, Verdict, kept_digest
from flare_cache.pool.agreement_messages import PoolMessage
from flare_cache.record_link import Ack, JobFrame, Progress, Started
from flare_cache.record_table import KEEP_ROW, KEEP_TAIL
from flare_cache.settings import Statement
from flare_core.prefix import Tier
from flare_transport.framing import FrameType

DOCUMENT = (Path(__file__).parents[3] / "docs" / "wire-format.md").read_text(encoding="utf-8")
MESSAGES = typing.get_args(JoinMessage)
JOB_STRUCTURES = (JobFrame, Started, Ack, Progress, Job, RecordIdentity, Section, JobResult)
JOIN_STRUCTURES = (*MESSAGES, Statement, Summary, JoinReport, RankReport)
NAMES = {int: "integer", bytes: "bytes", str: "text", bool: "boolean", type(None): "nil"}


def tables(heading: str) -> list[list[list[str]]]:
    """The tables of one section, each a list of rows of cells, without its two header lines."""
    section = DOCUMENT.split(f"# {heading}\n", 1)[1].split("\n#", 1)[0]
    found = [block.splitlines() for block in section.split("\n\n") if block.startswith("|")]
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in block[2:]] for block in found]


def type_name(declared) -> str:
    """A declared type in the document's words."""
    origin, arguments = typing.get_origin(declared), typing.get_args(declared)
    if origin in (list, tuple):
        return f"array of {type_name(arguments[0])}"
    if origin is dict:
        return f"map of {type_name(arguments[0])} to {type_name(arguments[1])}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(type_name, arguments))
    if isinstance(declared, type) and issubclass(declared, enum.Enum):
        return "text"
    return NAMES.get(declared) or declared.__name__


def declared_rows(structures) -> list[list[str]]:
    return [
        [structure.__name__, name, type_name(declared)]
        for structure in structures
        for name, declared in typing.get_type_hints(structure).items()
        if name in structure.__struct_fields__
    ]


def value_of(structure: type, field: str, *, heading: str) -> str:
    rows = [row for table in tables(heading) for row in table]
    return next(row[3] for row in rows if row[:2] == [structure.__name__, field])


def test_every_frame_type_of_the_record_link_is_listed_with_its_code_and_limit() -> None:
    declared = [one for one in vars(record_link).values() if isinstance(one, FrameType)]
    listed = [(int(code), name, int(limit)) for code, name, limit, *_ in tables("Record link")[0]]
    assert listed == [(one.code, one.name, one.max_bytes) for one in declared]


@pytest.mark.parametrize(
    ("heading", "structures", "table"), [("Jobs", JOB_STRUCTURES, 0), ("Join", JOIN_STRUCTURES, 1)]
)
def test_every_structure_is_listed_with_its_fields_in_their_order(heading, structures, table) -> None:
    assert [row[:3] for row in tables(heading)[table]] == declared_rows(structures)
    assert all(structure.__struct_config__.array_like for structure in structures)


def test_every_join_message_is_listed_with_its_tag_and_fields() -> None:
    declared = [
        [str(one.__struct_config__.tag), one.__name__, ", ".join(one.__struct_fields__) or "none"] for one in MESSAGES
    ]
    assert [[tag, name, fields] for tag, name, _, fields in tables("Join")[0]] == declared
    assert f"at most {CHUNK_RECORDS} records" in DOCUMENT
    assert {name for name in join_messages.__all__ if name[0].isupper()} >= {one.__name__ for one in MESSAGES}


def test_every_message_about_the_pool_is_listed_with_its_tag_and_fields() -> None:
    declared = [
        [str(one.__struct_config__.tag), one.__name__, ", ".join(one.__struct_fields__)]
        for one in typing.get_args(PoolMessage)
    ]
    assert [row[:3] for row in tables("Pool agreement")[0]] == declared


def test_a_message_is_its_tag_and_then_its_fields() -> None:
    message = join_messages.Applied(1, 2, 3)
    assert msgspec.msgpack.decode(encode_message(message)) == [9, 1, 2, 3]
    assert decode_message(msgspec.msgpack.encode([9, 1, 2, 3])) == message


def test_a_structure_is_the_array_of_all_its_fields(new_identity) -> None:
    job = Job(job_id=7, op=JobOp.UNLINK, tier=Tier.DISK, record=new_identity())
    run_id, found = msgspec.msgpack.decode(record_link.encode_job(b"r" * 16, job))
    assert run_id == b"r" * 16
    assert found[:3] == [7, "unlink", "disk"]
    assert len(found) == len(Job.__struct_fields__)
    assert len(found[3]) == len(RecordIdentity.__struct_fields__)


@pytest.mark.parametrize(
    ("structure", "field", "values"),
    [(Job, "op", JobOp), (JobResult, "status", JobStatus), (Job, "tier", (Tier.MEMORY, Tier.DISK, Tier.POOL))],
)
def test_every_value_of_a_choice_is_listed(structure, field, values) -> None:
    listed = value_of(structure, field, heading="Jobs").replace(" or ", ", ").split(", ")
    assert listed == [f"`{value}`" for value in values]


def test_verdicts_and_what_they_keep_are_those_of_the_code() -> None:
    assert [(int(code), name) for code, name, _ in tables("Join")[2]] == [(one, one.name) for one in Verdict]
    assert value_of(Summary, "parts", heading="Join").endswith(f"{KEEP_TAIL} has a tail, {KEEP_ROW} has a row")
    assert f"at most {record_link.MAX_REASON_CHARACTERS} characters" in value_of(JobResult, "reason", heading="Jobs")


def test_the_digest_of_the_kept_set_is_the_documents() -> None:
    summary = Summary(b"b" * 32 + b"a" * 32, b"d" * 32 + b"c" * 32, bytes(2), [1, 2])
    expected = b"flare/join/1" + b"a" * 32 + b"c" * 32 + bytes((KEEP_TAIL,)) + b"b" * 32 + b"d" * 32 + b"\0"
    assert kept_digest(summary, bytes((0, KEEP_TAIL))) == hashlib.sha256(expected).digest()
