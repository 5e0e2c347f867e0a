"""Worlds of the simulator: they are repeatable, keep every rule, and show bugs that are planted in the machines."""

from __future__ import annotations

import logging

import msgspec
import pytest

from flare_qualify.sim.options import FAULT_KINDS, FaultKind, expand
from flare_qualify.sim.planted import PLANTED_BUGS
from flare_qualify.sim.run import bug_named, hunt, run_seeds
from flare_qualify.sim.seed_file import SeedFile, read_seed_file, seed_files, write_seed_file
from flare_qualify.sim.shrink import shrink
from flare_qualify.sim.world import run_world

FEW_EVENTS = 250
QUICKLY_SEEN = (
    "report-before-last-ack",
    "no-undo",
    "after-step-ignored",
    "needs-jobs-ignored",
    "join-unconfirmed",
    "pool-pin-kept",
)


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_gives_the_same_log_each_time(seed) -> None:
    options = expand(seed, num_events=FEW_EVENTS)
    first, _ = run_world(options)
    second, _ = run_world(options)
    assert first == second
    assert len(first.digest) == 64


def test_other_seeds_give_other_worlds() -> None:
    digests = {run_world(expand(seed, num_events=60))[0].digest for seed in range(3)}
    assert len(digests) == 3


def test_no_rule_is_broken() -> None:
    summary = run_seeds(100, 20, num_events=FEW_EVENTS)
    assert [(one.seed, one.rule, one.detail) for one in summary.violations] == []
    assert summary.num_events > 20 * FEW_EVENTS
    assert summary.counts["tokens"] > 0
    assert summary.counts["fetched disk"] > 0
    assert summary.counts["deaths"] > 0
    assert summary.counts["pool on"] > 0
    assert summary.counts["committed"] > 0


def test_the_pool_restores_what_local_disks_have_lost() -> None:
    num_fetched = 0
    for seed in range(6):
        drawn = expand(seed, num_events=700)
        options = msgspec.structs.replace(drawn, has_pool=True, faults={FaultKind.POOL_ALONE: 1.0}, fault_events=150.0)
        outcome, _ = run_world(options)
        assert (outcome.rule, outcome.detail) == ("", "")
        num_fetched += outcome.counts.get("fetched pool", 0)
    assert num_fetched > 0


def test_every_kind_of_fault_is_drawn_by_some_seed() -> None:
    assert {kind for seed in range(100) for kind in expand(seed).faults} == set(FAULT_KINDS)


def test_thirty_one_bugs_can_be_planted() -> None:
    assert len({bug.name for bug in PLANTED_BUGS}) == 31


@pytest.mark.parametrize("name", QUICKLY_SEEN)
def test_a_planted_bug_is_seen(name) -> None:
    result = hunt(bug_named(name), max_seeds=40, num_hunts=1)
    assert result.is_caught


def test_a_planted_bug_goes_with_its_context() -> None:
    hunt(bug_named("needs-jobs-ignored"), max_seeds=3, num_hunts=1)
    outcome, _ = run_world(expand(0, num_events=60))
    assert outcome.rule == ""


def test_a_failing_world_is_made_smaller_and_kept(tmp_path) -> None:
    bug = bug_named("needs-jobs-ignored")
    options = expand(4)
    with bug.plant():
        outcome, _ = run_world(options)
        assert outcome.rule == "needs_jobs"
        smaller = shrink(options, outcome.rule, max_runs=25)
        assert run_world(smaller)[0].rule == outcome.rule
    assert smaller.num_events < options.num_events
    assert len(smaller.faults) <= len(options.faults)
    path = tmp_path / "kept.json"
    write_seed_file(path, SeedFile(options=smaller, bug=bug.name, rule=outcome.rule))
    assert read_seed_file(path).options == smaller


@pytest.mark.parametrize("path", seed_files(), ids=lambda path: path.stem)
def test_a_kept_world_breaks_its_rule_only_with_its_bug(path) -> None:
    kept = read_seed_file(path)
    if kept.bug:
        with bug_named(kept.bug).plant():
            assert run_world(kept.options)[0].rule == kept.rule
    outcome, _ = run_world(kept.options)
    assert (outcome.rule, outcome.detail) == ("", "")
