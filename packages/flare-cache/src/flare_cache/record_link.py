"""Frames of the record link: their types, limits and codecs. Knows no socket and no state.

Rank zero sends jobs; a peer answers each with STARTED and then an acknowledgement. Every frame names the run and,
from a peer, the rank, so that an answer can be held against the link it came on. Heartbeats carry progress. What the
ranks agree on about the pool travels here too (see ``pool.agreement_messages``).
"""

from __future__ import annotations

import msgspec

from flare_cache.jobs import Job, JobResult
from flare_transport.framing import FrameType

__all__ = [
    "MAX_REASON_CHARACTERS",
    "RECORD_ACK",
    "RECORD_JOB",
    "RECORD_JOIN",
    "RECORD_POOL",
    "RECORD_STARTED",
    "Ack",
    "JobFrame",
    "Progress",
    "Started",
    "decode_ack",
    "decode_job",
    "decode_progress",
    "decode_started",
    "encode_ack",
    "encode_job",
    "encode_progress",
    "encode_started",
]

RECORD_JOB = FrameType(40, "RECORD_JOB", 4 << 20)
RECORD_STARTED = FrameType(41, "RECORD_STARTED", 64)
RECORD_ACK = FrameType(42, "RECORD_ACK", 2048)
RECORD_JOIN = FrameType(43, "RECORD_JOIN", 2 << 20)
RECORD_POOL = FrameType(44, "RECORD_POOL", 2048)

MAX_REASON_CHARACTERS = 300
"""A reason is one line for people; four bytes a character leave room below the limit of an acknowledgement."""


class JobFrame(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A job, and the run it belongs to."""

    run_id: bytes
    job: Job


class Started(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A peer has checked the job and handed it to its own transport."""

    run_id: bytes
    rank: int
    job_id: int


class Ack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What became of a job on one rank."""

    run_id: bytes
    rank: int
    result: JobResult


class Progress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a heartbeat carries: the last step that finished on the sender's device, and jobs it has finished."""

    last_step: int
    num_jobs_finished: int


_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(JobFrame)
_started_decoder = msgspec.msgpack.Decoder(Started)
_ack_decoder = msgspec.msgpack.Decoder(Ack)
_progress_decoder = msgspec.msgpack.Decoder(Progress)


def encode_job(run_id: bytes, job: Job) -> bytes:
    """Payload of a RECORD_JOB frame."""
    return _encoder.encode(JobFrame(run_id, job))


def decode_job(payload: bytes | memoryview) -> JobFrame:
    """Raises msgspec.ValidationError or msgspec.DecodeError when it is no job; so do the decoders below."""
    return _job_decoder.decode(payload)


def encode_started(frame: Started) -> bytes:
    """Payload of a RECORD_STARTED frame."""
    return _encoder.encode(frame)


def decode_started(payload: bytes | memoryview) -> Started:
    """The frame in ``payload``."""
    return _started_decoder.decode(payload)


def encode_ack(frame: Ack) -> bytes:
    """Payload of a RECORD_ACK frame; the reason is cut to what the frame may hold."""
    reason = frame.result.reason
    if len(reason) > MAX_REASON_CHARACTERS:
        result = msgspec.structs.replace(frame.result, reason=reason[:MAX_REASON_CHARACTERS])
        frame = Ack(frame.run_id, frame.rank, result)
    return _encoder.encode(frame)


def decode_ack(payload: bytes | memoryview) -> Ack:
    """The frame in ``payload``."""
    return _ack_decoder.decode(payload)


def encode_progress(progress: Progress) -> bytes:
    """Payload of a heartbeat."""
    return _encoder.encode(progress)


def decode_progress(payload: bytes | memoryview) -> Progress:
    """The progress in a heartbeat's payload."""
    return _progress_decoder.decode(payload)
