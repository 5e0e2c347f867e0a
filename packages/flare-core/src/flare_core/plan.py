"""The step plan: what rank zero decides and every rank executes, in order, without a decision of its own.

A plan holds no sampled ids: each rank keeps the last token of each slot on its device, so that plan t+1 may be
sent before token t is known. Plans are immutable and travel as msgpack.
"""

from __future__ import annotations

import enum

import msgspec

from flare_core.sampling import SamplingParams

__all__ = [
    "PageCopy",
    "RowCopy",
    "Run",
    "RunKind",
    "SampledToken",
    "SequenceStart",
    "StepPlan",
    "StepResult",
    "TokenLogprobs",
    "decode_plan",
    "encode_plan",
]


class RunKind(enum.IntEnum):
    """What a run of tokens is for, which fixes the shape it is computed in."""

    PREFILL = 0
    """Tokens [start, start + num_tokens) of known ids; nothing is sampled."""
    FIRST = 1
    """The last known token, computed as one row alone (so that cold and restored runs compare bit for bit)."""
    DECODE = 2
    """One row in the step's batch; its input is the slot's last sampled token."""
    VERIFY = 3
    """As DECODE, and behind it a row for each token that the rank's drafter proposes, up to ``num_tokens`` rows in
    all. Gives one token more than the drafts that were accepted. No earlier step of the slot may be under way."""


class PageCopy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Before the step's runs: page ``target`` := the first ``num_tokens`` entries of ``source``, zeros behind."""

    source: int
    target: int
    num_tokens: int


class RowCopy(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Before the step's runs: row slot ``target`` := row slot ``source`` (-1: the zero row)."""

    source: int
    target: int


class SequenceStart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A sequence takes a slot, at its admission or after a preemption.

    Attributes:
        slot: index below the engine's ``max_sequences``; also the sequence's row slot.
        token_ids: all tokens known so far, prompt and outputs, u32 little endian.
        num_prompt_tokens: how many of them are the prompt; the rest are outputs (they count for penalties).
        params: how its tokens are chosen.
    """

    slot: int
    token_ids: bytes
    num_prompt_tokens: int
    params: SamplingParams


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tokens of one slot that this step computes.

    Attributes:
        slot: whose tokens.
        kind: shape and purpose; FIRST and DECODE runs have one token and sample the next, VERIFY runs one or more.
        start: position of the first token.
        num_tokens: how many.
        new_pages: page ids appended to the slot's page table before the run.
    """

    slot: int
    kind: RunKind
    start: int
    num_tokens: int
    new_pages: tuple[int, ...] = ()


class StepPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True, forbid_unknown_fields=True):
    """One step.

    Order on every rank: wait for ``needs_jobs``; row and page copies; starts; runs: PREFILL (sequences may share
    products), FIRST (with the bits that each has alone), DECODE and VERIFY as one batch in the order given.

    Attributes:
        step: numbered from 1 without gaps.
        needs_jobs: transfer jobs that this rank must have finished before.
    """

    step: int
    needs_jobs: tuple[int, ...] = ()
    row_copies: tuple[RowCopy, ...] = ()
    page_copies: tuple[PageCopy, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    runs: tuple[Run, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Raw log-probability of one token, and the most likely alternatives as (id, log-probability), best first."""

    token_id: int
    logprob: float
    rank: int
    """1 + number of ids that are more likely."""
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A token chosen by a FIRST, DECODE or VERIFY run; ``logprobs`` where the request asked for them."""

    slot: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class StepResult(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a step gave: equal on every rank; only rank zero reads it.

    Attributes:
        step: the plan's number.
        tokens: one for each FIRST and DECODE run, one or more for each VERIFY run, in the plan's order.
        num_drafts: how many tokens were proposed in each VERIFY run, in the plan's order.
        prompt_logprobs: (slot, entries) for PREFILL and FIRST runs of slots with ``prompt_logprobs``: the entry for
            the token at position p+1 comes with the run that computed position p.
    """

    step: int
    tokens: tuple[SampledToken, ...] = ()
    num_drafts: tuple[int, ...] = ()
    prompt_logprobs: tuple[tuple[int, tuple[TokenLogprobs, ...]], ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    """The plan's bytes on the control link."""
    return _encoder.encode(plan)


def decode_plan(data: bytes | memoryview) -> StepPlan:
    """The plan in ``data``.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: not a plan.
    """
    return _decoder.decode(data)
