"""Does a job fit this rank? Checked before any I/O, against the rank's own geometry and bounds."""

from __future__ import annotations

from flare_cache.jobs import Job, JobOp, RecordIdentity
from flare_cache.record import MAX_HEADER_BYTES, file_layout, identity_problem
from flare_core.geometry import Geometry
from flare_core.prefix import Tier

__all__ = ["POOL_SESSION_BYTES", "job_problem"]

POOL_SESSION_BYTES = 16


def job_problem(job: Job, geometry: Geometry, *, num_pages: int, num_slots: int) -> str | None:
    """Why this rank cannot run ``job`` as planned, or None.

    A problem means that ranks disagree about the plan: nothing of the job was touched.
    """
    problem = _tier_problem(job) or _record_problem(job.record, geometry)
    if problem is not None:
        return problem
    if job.op in (JobOp.TRUNCATE, JobOp.UNLINK, JobOp.PUT):
        return None if not job.sections and job.row_slot is None else f"{job.op} names pages or a row slot"
    return _sections_problem(job, num_pages) or _row_problem(job, num_slots) or _store_problem(job)


def _tier_problem(job: Job) -> str | None:
    match job.tier:
        case Tier.DISK | Tier.MEMORY if job.op is not JobOp.PUT:
            return None if not job.pool_session else f"a pool session for the {job.tier} tier"
        case Tier.POOL if job.op in (JobOp.FETCH, JobOp.PUT):
            num_bytes = len(job.pool_session)
            return None if num_bytes == POOL_SESSION_BYTES else f"a pool session of {num_bytes} bytes"
        case _:
            return f"{job.op} in the {job.tier} tier"


def _record_problem(record: RecordIdentity, geometry: Geometry) -> str | None:
    problem = identity_problem(record)
    if problem is not None:
        return problem
    if record.page_tokens != geometry.page_tokens:
        return f"pages of {record.page_tokens} tokens, this rank has {geometry.page_tokens}"
    if record.has_row and not geometry.row_bytes:
        return "the record has a row, this rank's model has none"
    layout = file_layout(record, page_bytes=geometry.page_bytes, row_stride=geometry.row_stride)
    if layout.header_bytes > MAX_HEADER_BYTES:
        return f"a header of {layout.header_bytes} bytes is over the limit of {MAX_HEADER_BYTES}"
    return None


def _sections_problem(job: Job, num_pages: int) -> str | None:
    previous = -1
    for section in job.sections:
        if not previous < section.index < job.record.num_sections:
            return f"section {section.index} after {previous} of {job.record.num_sections}"
        if not 0 <= section.page < num_pages:
            return f"page {section.page} of {num_pages}"
        previous = section.index
    if len({section.page for section in job.sections}) != len(job.sections):
        return "a page is named twice"
    return None


def _row_problem(job: Job, num_slots: int) -> str | None:
    if job.row_slot is None:
        return None if job.sections else "nothing to move"
    if not job.record.has_row:
        return "a row slot for a record without a row"
    return None if 0 <= job.row_slot < num_slots else f"row slot {job.row_slot} of {num_slots}"


def _store_problem(job: Job) -> str | None:
    if job.op is not JobOp.STORE:
        return None
    record = job.record
    if len(job.sections) != record.num_sections:
        return f"{len(job.sections)} of {record.num_sections} sections to store"
    if record.has_row != (job.row_slot is not None):
        return "a row to store without its slot"
    if len(job.token_ids) != 4 * (record.end - record.start):
        return f"{len(job.token_ids)} bytes of token ids for [{record.start}, {record.end})"
    return None
