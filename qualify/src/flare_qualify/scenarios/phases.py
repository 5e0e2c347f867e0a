"""The phases of the original's qualification script, on every kind of model: device, evicted, restarted, memory."""

from __future__ import annotations

from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.pages import check_pages_at_rest
from flare_qualify.checkers.records import ReportedRecords, check_digests, check_parity
from flare_qualify.group import Group
from flare_qualify.models import ORACLES
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.prompts import extend, prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies

__all__ = ["SCENARIOS"]


def _prompts(model: str) -> dict[str, list[int]]:
    """Two prompts with nothing in common, and one that branches off the first."""
    length = 600 if model == "default" else 150
    first = prompt_of(1, length)
    return {"first": first, "second": prompt_of(2, length + 37), "branch": extend(first[: length - 20], 3, 60)}


def _salt(model: str, name: str) -> str:
    """The oracle's branch begins with pages of the first prompt. A real model's bits depend on where a prefill begins.

    There, every prompt has a salt of its own: what is cold and what is restored are then computed alike.
    """
    return "shared" if model in ORACLES else f"cold {name}"


def _learn(context: Context, group: Group, model: str) -> References:
    references = References(context)
    for name, prompt in _prompts(model).items():
        answer = ask(group.url, prompt, cache_salt=f"cold {name}")
        if model in ORACLES:
            references.learn_oracle(name, answer, model=model, prompt=prompt, world_size=group.world_size)
            references.compare(name, ask(group.url, prompt, cache_salt=_salt(model, name)))
        else:
            references.learn(name, answer)
    return references


def _phase(context: Context, group: Group, references: References, model: str, phase: str, *, tier: str) -> None:
    """Every prompt once; all but its last token must come from ``tier``, and the answer must not change."""
    for name, prompt in _prompts(model).items():
        answer = ask(group.url, prompt, cache_salt=_salt(model, name))
        references.compare(name, answer)
        # The branch finds the pages that it shares on the device, or in memory, since the first prompt was restored.
        is_whole = answer.total_cached == len(prompt) - 1 and answer.cached_tokens[tier] > 0
        context.check(is_whole, f"{phase}, {name}: {answer.cached_tokens}, not all but one, or nothing from {tier}")
        if tier != "device":
            context.restored(answer, tier=tier)
    group.wait_stored()
    check_parity(context, group, phase)
    check_pages_at_rest(context, group, phase)


def run_phases(context: Context, *, model: str, world_size: int) -> None:
    """Cold, device, disk after eviction, disk after restarting every rank; record parity after each."""
    group = context.group(model, world_size)
    group.start()
    references = _learn(context, group, model)
    reported = ReportedRecords(context)
    reported.note(group)
    check_parity(context, group, "cold")
    _phase(context, group, references, model, "device", tier="device")
    drop_device_copies(group.url)
    _phase(context, group, references, model, "evicted", tier="disk")
    reported.note(group)
    context.check(group.stop() == dict.fromkeys(range(world_size), 0), "the group did not end in order")
    check_parity(context, group, "stopped")
    group.start()
    reported.check(group, "restarted")
    _phase(context, group, references, model, "restarted", tier="disk")
    check_digests(context, group, "restarted")
    group.stop()


def run_memory_tier(context: Context, *, model: str, world_size: int) -> None:
    """With a memory tier: memory answers before the disk, the disk when memory is emptied, memory again after that."""
    group = context.group(model, world_size, "--prefix-cache-memory", "16M")
    group.start()
    references = _learn(context, group, model)
    group.wait_stored()
    drop_device_copies(group.url)
    _phase(context, group, references, model, "memory", tier="memory")
    group.stop()
    group.start()
    _phase(context, group, references, model, "memory lost, disk", tier="disk")
    group.stop()


def _phases(model: str, world_size: int, seconds: float, *needs: str) -> Scenario:
    return Scenario(
        name=f"phases-{model}-tp{world_size}",
        proves="Device, evicted and restarted runs equal the cold one bit for bit, and all ranks keep the same files.",
        rows=("D4", "A4", "A8") if world_size == 2 else ("D4", "A18"),
        needs=needs,
        seconds=seconds,
        faults_due=False,
        run=partial(run_phases, model=model, world_size=world_size),
    )


SCENARIOS = (
    _phases("oracle", 2, 6),
    _phases("oracle-rows", 2, 6),
    _phases("oracle-rows", 3, 8),
    _phases("tiny-llama", 2, 22, "torch"),
    _phases("default", 2, 50, "torch", "default-model"),
    Scenario(
        name="memory-tier",
        proves="A memory tier on every rank answers before the disk, and its loss costs nothing but time.",
        rows=("A14",),
        seconds=8,
        faults_due=False,
        run=partial(run_memory_tier, model="oracle-rows", world_size=2),
    ),
)
