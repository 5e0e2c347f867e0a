"""One valid message of every kind that flare decodes, and how it is decoded. What the message targets start from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flare_cache import join_messages, record_link
from flare_cache.jobs import Job, JobOp, JobResult, JobStatus, Section
from flare_cache.join_report import JoinReport, RankReport
from flare_cache.join_set import Summary
from flare_cache.pool import admin_messages, agreement_messages, manifest
from flare_cache.pool import messages as pool_messages
from flare_cache.settings import Statement
from flare_cli import agreement, snapshot, worker_protocol
from flare_core import plan as core_plan
from flare_core.engine import request as core_request
from flare_core.prefix import Tier
from flare_core.sampling import SamplingParams
from flare_qualify.fuzz.targets import pool_samples
from flare_qualify.fuzz.targets.records import GEOMETRY, sample_identities
from flare_transport import LinkOffer, key_value_table

__all__ = ["JOIN_SAMPLES", "RUN_ID", "WIRES", "Wire", "sample_job", "sample_statement"]

RUN_ID = bytes(range(16))


@dataclass(frozen=True, slots=True)
class Wire:
    """One decoder of the product: what it is called, how it decodes, and messages that it takes."""

    name: str
    decode: Callable[[bytes], Any]
    samples: Sequence[Any]


def sample_job(op: JobOp = JobOp.STORE) -> Job:
    """A job on a record of three pages, a tail and a row."""
    record = sample_identities()[0]
    has_pages = op in (JobOp.STORE, JobOp.FETCH)
    return Job(
        job_id=7,
        op=op,
        tier=Tier.DISK,
        record=record,
        after_step=3,
        sections=tuple(Section(index, index) for index in range(record.num_sections)) if has_pages else (),
        row_slot=0 if has_pages else None,
        token_ids=bytes(4 * (record.end - record.start)) if op is JobOp.STORE else b"",
    )


def sample_statement(rank: int, fields: dict[str, str] | None = None, *, num_records: int = 0) -> Statement:
    """What a rank says of itself at join."""
    return Statement(
        rank=rank,
        fields=fields or {"page_tokens": "4"},
        layout=GEOMETRY.layout_fingerprint,
        disk_limit_bytes=1 << 30,
        file_system=f"host{rank}",
        directory=f"/records/{rank}",
        num_records=num_records,
    )


_REPORT = JoinReport(
    set_id=RUN_ID,
    num_kept=1,
    kept_bytes=4096,
    left_bytes=0,
    disk_limit_bytes=1 << 30,
    memory_limit_bytes=0,
    ranks=[
        RankReport(
            rank=0,
            directory="/records/0",
            disk_limit_bytes=1 << 30,
            is_limit_derived=False,
            memory_bytes=0,
            verdicts={"kept": 1},
            num_truncated=0,
            num_left=0,
        )
    ],
)

JOIN_SAMPLES: tuple[join_messages.JoinMessage, ...] = (
    join_messages.Hello(sample_statement(1, num_records=1)),
    join_messages.ScanChunk(Summary(bytes(32), bytes(32), b"\xc0", [4096])),
    join_messages.Refused(["settings differ"], is_mismatch=True),
    join_messages.Broken("no space"),
    join_messages.VerdictChunk(b"\x00"),
    join_messages.Proposal(RUN_ID, bytes(32)),
    join_messages.Confirmed(bytes(32)),
    join_messages.Apply(),
    join_messages.Applied(0, 0, 0),
    join_messages.Joined(_REPORT),
)

_PARAMS = SamplingParams(max_tokens=4, logit_bias=((1, 0.5),), stop_token_ids=(2,), logprobs=3)
_LOGPROBS = core_plan.TokenLogprobs(5, -0.5, 1, ((5, -0.5), (6, -1.5)))
_PLAN = core_plan.StepPlan(
    step=1,
    needs_jobs=(7,),
    row_copies=(core_plan.RowCopy(-1, 0),),
    page_copies=(core_plan.PageCopy(1, 2, 3),),
    starts=(core_plan.SequenceStart(0, bytes(16), 4, _PARAMS),),
    runs=(
        core_plan.Run(0, core_plan.RunKind.PREFILL, 0, 3, (1,)),
        core_plan.Run(0, core_plan.RunKind.FIRST, 3, 1),
        core_plan.Run(1, core_plan.RunKind.DECODE, 9, 1),
    ),
)

_KEY_VALUES: tuple[key_value_table.Request, ...] = (
    key_value_table.SetRequest(1, "key", b"value"),
    key_value_table.GetRequest(2, "key"),
    key_value_table.AddRequest(3, "counter", 1),
    key_value_table.WaitRequest(4, ["key", "other"]),
    key_value_table.CheckRequest(5, ["key"]),
    key_value_table.CompareSetRequest(6, "key", b"value", b"next"),
    key_value_table.DeleteRequest(7, "key"),
    key_value_table.CountRequest(8),
    key_value_table.CancelRequest(4),
)

_COMMANDS: list[core_request.Command] = [
    core_request.AddRequest(core_request.EngineRequest(request_id="a", token_ids=bytes(8), params=_PARAMS)),
    core_request.CancelRequest("a"),
    core_request.ResetCache("r", Tier.DEVICE),
    core_request.Drain(),
    core_request.Stop(),
]
_USAGE = core_request.Usage(prompt_tokens=4, completion_tokens=1, cached_tokens={Tier.DISK: 3})
_EVENTS: list[core_request.EngineEvent] = [
    core_request.Tokens("a", (1, 2), (_LOGPROBS, _LOGPROBS)),
    core_request.PromptLogprobs("a", (_LOGPROBS,)),
    core_request.Progress("a", core_request.Phase.PREFILL, 1, 4),
    core_request.Finished("a", core_request.FinishReason.STOP, _USAGE),
    core_request.Failed("a", "no"),
    core_request.CacheReset("r", Tier.DEVICE),
]
_NOTICES: tuple[worker_protocol.Notice, ...] = (
    worker_protocol.Stage("reading", 1, 2),
    worker_protocol.Ready(vocab_size=259, max_model_len=64, facts=(("model", "bytes"),)),
    worker_protocol.StartFailed("no model", 2),
    worker_protocol.WorkerLost("gone"),
    worker_protocol.DrainAsked(1),
    worker_protocol.SnapshotReply(snapshot.ClusterSnapshot(state="ready")),
)


def _decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind).decode


WIRES: tuple[Wire, ...] = (
    Wire("job", record_link.decode_job, [record_link.JobFrame(RUN_ID, sample_job(op)) for op in JobOp]),
    Wire("started", record_link.decode_started, [record_link.Started(RUN_ID, 1, 7)]),
    Wire(
        "acknowledgement",
        record_link.decode_ack,
        [record_link.Ack(RUN_ID, 1, JobResult(job_id=7, status=status, reason="why")) for status in JobStatus],
    ),
    Wire("progress", record_link.decode_progress, [record_link.Progress(3, 2)]),
    Wire("join", join_messages.decode_message, JOIN_SAMPLES),
    Wire("pool agreement", agreement_messages.decode_pool_message, pool_samples.AGREEMENT),
    Wire("pool request", pool_messages.decode_request, [(1, one) for one in pool_samples.REQUESTS]),
    Wire("pool reply", pool_messages.decode_reply, [(1, one) for one in pool_samples.REPLIES]),
    Wire("pool manifest", manifest.decode_manifest, [pool_samples.MANIFEST]),
    Wire("pool operator", admin_messages.decode_admin_request, pool_samples.ADMIN_REQUESTS),
    Wire("plan", core_plan.decode_plan, [_PLAN]),
    Wire("commands", core_request.decode_commands, [_COMMANDS]),
    Wire("events", core_request.decode_events, [_EVENTS]),
    Wire("notice", worker_protocol.decode_notice, _NOTICES),
    Wire("key-value request", _decoder(key_value_table.Request), _KEY_VALUES),
    Wire("key-value reply", _decoder(key_value_table.Reply), [key_value_table.Reply(1, b"value")]),
    Wire("link offer", _decoder(LinkOffer), [LinkOffer("records", "127.0.0.1", 7000, bytes(32))]),
    Wire(
        "agreement",
        lambda data: agreement.decode_offers([data])[0],
        [agreement.Offer({"dtype": "float32"}, {"pages": 100}, "")],
    ),
)
"""Every decoder that reads what another process sent."""
