"""What ranks agree on at a start: the records, the smallest limit, equal settings; and a rank that cannot take part."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.processes import exit_codes
from flare_qualify.checkers.records import check_digests, check_parity, records_of, subtree
from flare_qualify.client import get_json
from flare_qualify.group import Group
from flare_qualify.models import cache_off_text
from flare_qualify.process_facts import wait_gone
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.failpoints import arm, disarm, fired
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ANSWER_TOKENS, ask, drop_device_copies

__all__ = ["SCENARIOS"]

EXIT_USAGE, EXIT_MISMATCH = 2, 78
_REFUSE_SECONDS = 10.0
_NUM_TURNS = 6


def run_disagreement(context: Context, *, model: str, world_size: int) -> None:
    """One rank lost a record, another one a row or tail: exactly what all hold is kept, and the rest computed anew."""
    group = context.group(model, world_size)
    references = References(context)
    group.start()
    for number in range(3):
        references.learn(str(number), ask(group.url, prompt_of(number)))
    group.wait_stored()
    group.stop()
    records = records_of(group, 0)
    deleted = min(name for name, record in records.items() if record.depth == 0)
    lost = subtree(group, deleted)
    cut = min(name for name in set(records) - lost if records[name].has_row or records[name].has_tail)
    (group.record_directory(1) / deleted).unlink()
    last = world_size - 1
    record = records_of(group, last)[cut]
    layout = record.header.layout
    os.truncate(group.record_directory(last) / cut, layout.tail_end if record.has_row else layout.pages_end)
    context.fault_fired("record deleted on one rank", f"{deleted[:12]} on rank 1")
    context.fault_fired("row or tail cut on another rank", f"{cut[:12]} on rank {last}")

    group.start()
    check_parity(context, group, "after the join")
    for rank in range(world_size):
        names = set(records_of(group, rank))
        context.check(names == set(records) - lost, f"rank {rank} kept {len(names)} of {len(records)} records")
        kept = records_of(group, rank).get(cut)
        is_cut = kept is not None and not (kept.has_row if records[cut].has_row else kept.has_tail)
        context.check(is_cut, f"rank {rank}: the row or tail that one rank lost is still there")
    num_restored = 0
    for number in range(3):
        answer = ask(group.url, prompt_of(number))
        references.compare(str(number), answer)
        num_restored += context.restored(answer, tier="disk")
    context.check(0 < num_restored < 3, f"{num_restored} of 3 prompts were restored")
    context.check(set(group.stop().values()) == {0}, "the group did not end in order")
    check_parity(context, group, "stopped")
    check_digests(context, group, "stopped")


def run_small_limit(context: Context, *, model: str, world_size: int) -> None:
    """After every request all ranks hold the same files, of the sizes that their geometry implies, within the limit."""
    group = context.group(model, world_size)
    references = References(context)
    group.start()
    references.learn("0", ask(group.url, prompt_of(0)))
    group.wait_stored()
    group.stop()
    largest = max(sum(file.num_bytes for file in group.record_files(rank)) for rank in range(world_size))
    limit = int(2.5 * largest)
    small = context.group(model, world_size, "--prefix-cache-disk-limit", str(limit))
    small.start()
    seen: set[str] = set()
    evicted = 0
    for number in range(24 if context.is_long else 8):
        references.learn(str(number), ask(small.url, prompt_of(number)))
        small.wait_stored()
        when = f"request {number}"
        check_parity(context, small, when)
        names = {file.name for file in small.record_files(0)}
        for rank in range(world_size):
            used = sum(file.num_bytes for file in small.record_files(rank))
            context.check(used <= limit, f"{when}: rank {rank} holds {used} of {limit} bytes")
        evicted += len(seen - names)
        seen |= names
        drop_device_copies(small.url)
        answer = ask(small.url, prompt_of(number))
        references.compare(str(number), answer)
        context.check(context.restored(answer, tier="disk"), f"{when}: what was just stored was not restored")
    context.require(evicted > 0, "nothing was evicted")
    context.fault_fired("eviction under a small limit", f"{evicted} records evicted, limit {limit} bytes")
    context.figure("records_evicted", evicted)
    small.stop()
    check_digests(context, small, "stopped")


def run_compaction(context: Context, *, model: str, world_size: int, share: float) -> None:
    """Rows and tails that others make superfluous are cut on every rank alike, for a small limit or longer prompts."""
    group = context.group(model, world_size)
    references = References(context)
    turns = [prompt_of(0, 120)]
    for turn in range(_NUM_TURNS - 1):
        turns.append(turns[-1] + prompt_of(100 + turn, 70))
    group.start()
    for turn, prompt in enumerate(turns):
        text = cache_off_text(model, prompt, max_tokens=ANSWER_TOKENS, world_size=world_size)
        references.expect(str(turn), text)
        references.compare(str(turn), ask(group.url, prompt))
    group.wait_stored()
    largest = max(sum(file.num_bytes for file in group.record_files(rank)) for rank in range(world_size))
    group.stop()
    tight = context.group(model, world_size, "--prefix-cache-disk-limit", str(int(share * largest)))
    tight.start()
    for turn, prompt in enumerate(turns):
        references.compare(str(turn), ask(tight.url, prompt))
        tight.wait_stored()
        check_parity(context, tight, f"turn {turn}")
    cluster = get_json(tight.url, "/v1/cluster")
    cuts = sum(sum(job["counts"]) for job in cluster["cache"]["jobs"] if job["op"] == "truncate")
    context.require(cuts > 0, "nothing was compacted")
    context.fault_fired("compaction", f"{cuts} truncate jobs over {world_size} ranks")
    context.figure("truncate_jobs", cuts)
    tight.stop()
    check_digests(context, tight, "compacted")
    tight.start()
    check_parity(context, tight, "restarted")
    answer = ask(tight.url, turns[-1])
    references.compare(str(_NUM_TURNS - 1), answer)
    context.check(context.restored(answer, tier="disk"), f"restarted: {answer.cached_tokens}")
    tight.stop()


def run_smallest_limit(context: Context) -> None:
    """Limits that differ, one of them derived from free space: the smallest counts, and every rank says so."""
    limits = {0: ("--prefix-cache-disk-limit", "40M"), 1: ("--prefix-cache-disk-limit", "24M")}
    group = context.group("oracle", 3, rank_options=limits)
    group.start()
    tiers = get_json(group.url, "/v1/cluster")["cache"]["tiers"]
    found = {tier["tier"]: tier["limit_bytes"] for tier in tiers}
    context.check(found.get("disk") == 24_000_000, f"the cluster says {found}")
    for rank in range(3):
        context.check(
            "24" in _limit_line(group, rank), f"rank {rank} does not name the limit: {group.log(rank)[-400:]}"
        )
    references = References(context)
    references.learn("prompt", ask(group.url, prompt_of(1)))
    group.wait_stored()
    drop_device_copies(group.url)
    answer = ask(group.url, prompt_of(1))
    references.compare("prompt", answer)
    context.restored(answer, tier="disk")
    group.stop()


def _limit_line(group: Group, rank: int) -> str:
    return next((line for line in group.log(rank).splitlines() if "disk limit" in line), "")


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A start that must be refused: what rank one is given, the exit codes, and words that the message must have."""

    name: str
    options: tuple[str, ...]
    codes: tuple[int, ...]
    words: tuple[str, ...]


MISMATCHES = (
    _Refusal("page size", ("--page-tokens", "32"), (EXIT_MISMATCH,), ("--page-tokens", "16", "32")),
    _Refusal("least tail", ("--prefix-cache-min-tail", "4"), (EXIT_MISMATCH,), ("--prefix-cache-min-tail",)),
    _Refusal("durability", ("--prefix-cache-durability", "power"), (EXIT_MISMATCH,), ("durability",)),
    _Refusal("memory tier on one rank", ("--prefix-cache-memory", "8M"), (EXIT_MISMATCH,), ("memory",)),
    _Refusal("sequences", ("--max-sequences", "3"), (EXIT_MISMATCH,), ("--max-sequences",)),
    _Refusal("context", ("--max-model-len", "512"), (EXIT_MISMATCH,), ("--max-model-len",)),
)


def run_mismatches(context: Context) -> None:
    """Settings that differ between ranks stop all of them with the setting, the ranks and both values named."""
    for case in context.cases([mismatch.name for mismatch in MISMATCHES]):
        mismatch = next(each for each in MISMATCHES if each.name == case)
        group = context.group("oracle", 2, rank_options={1: mismatch.options})
        _expect_refusal(context, group, mismatch)


def _expect_refusal(context: Context, group: Group, refusal: _Refusal) -> None:
    start = time.monotonic()
    group.launch()
    pids = {f"rank{rank}": process.pid for rank, process in group.processes.items()}
    gone = wait_gone(pids, timeout=_REFUSE_SECONDS + 5.0)
    if context.check(len(gone) == len(pids), f"{refusal.name}: {sorted(pids.keys() - gone.keys())} went on"):
        context.timed("a start that must be refused ends", time.monotonic() - start, limit=_REFUSE_SECONDS)
    for rank, code in exit_codes(group).items():
        context.check(code in refusal.codes, f"{refusal.name}: rank {rank} exited with {code}, not {refusal.codes}")
        missing = [word for word in refusal.words if word not in group.log(rank)]
        context.check(not missing, f"{refusal.name}: rank {rank} does not say {missing}: {group.log(rank)[-600:]}")
        context.check("Traceback" not in group.log(rank), f"{refusal.name}: rank {rank} printed a traceback")
    context.fault_fired(f"mismatch: {refusal.name}", f"exit codes {exit_codes(group)}")
    group.kill_all()


def run_foreign_layouts(context: Context) -> None:
    """A directory of another rank, world size, model or page size is refused by name; left alone, and used later."""
    group = context.group("oracle", 2, name="own")
    references = References(context)
    group.start()
    references.learn("prompt", ask(group.url, prompt_of(3)))
    group.wait_stored()
    group.stop()
    before = {rank: group.record_files(rank) for rank in range(2)}
    own = group.root
    swapped = {0: ("--prefix-cache-disk", str(own / "rank1")), 1: ("--prefix-cache-disk", str(own / "rank0"))}
    same = {rank: ("--prefix-cache-disk", str(own / f"rank{rank}")) for rank in range(3)}
    trials = (
        (context.group("oracle", 2, disk=False, rank_options=swapped), "swapped directories", ("rank",)),
        (context.group("oracle-rows", 2, disk=False, rank_options=same), "another model", ("model",)),
        (context.group("oracle", 2, "--page-tokens", "32", disk=False, rank_options=same), "page size", ("page",)),
        (context.group("oracle", 3, disk=False, rank_options=same), "world size", ("world size",)),
    )
    for other, name, words in trials:
        _expect_refusal(context, other, _Refusal(name, (), (EXIT_USAGE, EXIT_MISMATCH), words))
    context.check({rank: group.record_files(rank) for rank in range(2)} == before, "a refused start changed records")
    group.start()
    answer = ask(group.url, prompt_of(3))
    references.compare("prompt", answer)
    context.check(context.restored(answer, at_least=len(prompt_of(3)) - 1), f"restored {answer.cached_tokens}")
    group.stop()


def run_cannot_start(context: Context) -> None:
    """A rank whose directory or threads cannot be opened fails the join, not serving (A9)."""
    group = context.group("oracle", 2, name="good")
    references = References(context)
    group.start()
    references.learn("prompt", ask(group.url, prompt_of(4)))
    group.wait_stored()
    group.stop()
    for rank in (0, 1):
        path = context.directory / f"file{rank}"
        path.write_text("a file, not a directory\n")
        other = context.group("oracle", 2, rank_options={rank: ("--prefix-cache-disk", str(path))})
        _expect_refusal(context, other, _Refusal(f"rank {rank}: no directory", (), (EXIT_USAGE,), (str(path),)))
    for rank, error in ((0, "EIO"), (1, "EMFILE")):
        arm(group, rank, f"join.scan:error={error}")
        _expect_refusal(context, group, _Refusal(f"rank {rank}: {error} at its scan", (), (1, 2, 70), ()))
        context.check(bool(fired(group, rank, "join.scan")), f"rank {rank} did not come to its scan")
        disarm(group)
    group.start()
    answer = ask(group.url, prompt_of(4))
    references.compare("prompt", answer)
    context.check(context.restored(answer, at_least=len(prompt_of(4)) - 1), f"restored {answer.cached_tokens}")
    group.stop()


def _scenario(name: str, proves: str, rows: str, seconds: float, run: object, **fields: object) -> Scenario:
    rows_of = tuple(rows.split())
    return Scenario(name=name, proves=proves, rows=rows_of, seconds=seconds, run=run, **fields)  # type: ignore[arg-type]


_DISAGREEMENT = "Ranks that lost different things keep exactly what all hold, and recompute the rest."
_LIMIT = "Under a small limit all ranks hold the same files after every request, within the limit."
_COMPACTION = "Compaction cuts rows and tails on all ranks alike, and what is left restores."

SCENARIOS = (
    _scenario(
        "disagreement-rows-tp3",
        _DISAGREEMENT,
        "A16 A6",
        8,
        partial(run_disagreement, model="oracle-rows", world_size=3),
    ),
    _scenario(
        "disagreement-tails-tp2", _DISAGREEMENT, "A16 A6", 6, partial(run_disagreement, model="oracle", world_size=2)
    ),
    _scenario("small-limit-tp3", _LIMIT, "A17", 10, partial(run_small_limit, model="oracle-rows", world_size=3)),
    _scenario(
        "compaction-rows-tp2",
        _COMPACTION,
        "A6",
        10,
        partial(run_compaction, model="oracle-rows", world_size=2, share=0.5),
    ),
    _scenario(
        "compaction-tails-tp3", _COMPACTION, "A6", 10, partial(run_compaction, model="oracle", world_size=3, share=0.8)
    ),
    _scenario(
        "smallest-limit",
        "The smallest disk limit of all ranks, given or derived, counts for all, and every rank reports it.",
        "A8",
        4,
        run_smallest_limit,
        faults_due=False,
    ),
    _scenario(
        "settings-mismatch",
        "Settings that differ between ranks stop all of them, naming the setting.",
        "A10 B3",
        12,
        run_mismatches,
        restores_due=False,
    ),
    _scenario(
        "foreign-layout",
        "A directory of another rank, world size, model or page size is refused by name and left as it is.",
        "A1 A10",
        14,
        run_foreign_layouts,
    ),
    _scenario(
        "rank-cannot-start",
        "A rank that cannot open its directory or read it fails the start of all before anything is served.",
        "A9",
        14,
        run_cannot_start,
    ),
)
