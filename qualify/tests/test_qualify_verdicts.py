"""A verdict is folded from a history: vacuous without fault or hit, and adding up over attempts."""

from __future__ import annotations

import pytest

from flare_qualify.history import History, read_history, seal_history
from flare_qualify.verdict import Damage, Verdict, outcome_of

FAULT = {"kind": "fault", "what": "kill", "evidence": "signal 9"}
HIT = {"kind": "restored", "tokens": 100, "tier": "disk", "seconds": 0.1}
BEGIN, END = {"kind": "begin"}, {"kind": "end"}


def judge(*events, faults_due=True, restores_due=True):
    numbered = [{"at": float(number)} | event for number, event in enumerate(events)]
    return outcome_of(numbered, faults_due=faults_due, restores_due=restores_due)


def case(name):
    return {"kind": "case", "name": name}


def damage(what, count):
    return {"kind": "damage", "what": what, "count": count}


def test_a_scenario_with_a_fault_and_a_hit_passes():
    outcome = judge(BEGIN, FAULT, HIT, END)
    assert outcome.verdict is Verdict.PASS
    assert (outcome.tally.faults, outcome.tally.restores, outcome.tally.restored_tokens) == (1, 1, 100)
    assert outcome.seconds == 3.0


@pytest.mark.parametrize("events", [(HIT,), (FAULT,), ()])
def test_without_its_fault_or_its_hit_it_is_vacuous(events):
    assert judge(BEGIN, *events, END).verdict is Verdict.VACUOUS


def test_what_is_not_due_may_be_missing():
    assert judge(BEGIN, HIT, END, faults_due=False).verdict is Verdict.PASS
    assert judge(BEGIN, FAULT, END, restores_due=False).verdict is Verdict.PASS


def test_one_case_whose_fault_did_not_fire_is_enough_to_be_vacuous():
    outcome = judge(BEGIN, FAULT, HIT, case("a"), {"kind": "vacuous", "reason": "b: not reached"}, case("b"), END)
    assert (outcome.verdict, outcome.reason) == (Verdict.VACUOUS, "b: not reached")


@pytest.mark.parametrize("what", list(Damage))
def test_damage_fails_it_whatever_else_happened(what):
    outcome = judge(BEGIN, FAULT, HIT, damage(what, 2), END)
    assert outcome.verdict is Verdict.FAIL
    assert outcome.tally.damage[what] == 2
    assert str(what) in outcome.reason


def test_a_failed_check_fails_it_with_its_reason():
    outcome = judge(BEGIN, FAULT, HIT, {"kind": "failed", "reason": "too late"}, END)
    assert (outcome.verdict, outcome.reason) == (Verdict.FAIL, "too late")


def test_a_skip_has_its_reason():
    outcome = judge(BEGIN, {"kind": "skipped", "reason": "needs root"})
    assert (outcome.verdict, outcome.reason) == (Verdict.SKIP, "needs root")


def test_a_history_that_was_cut_off_is_unfinished():
    assert judge(BEGIN, FAULT, HIT).verdict is Verdict.UNFINISHED


def test_an_attempt_that_was_cut_off_leaves_its_good_cases_and_nothing_else():
    outcome = judge(BEGIN, FAULT, HIT, case("a"), FAULT, BEGIN, FAULT, HIT, case("b"), END)
    assert outcome.verdict is Verdict.PASS
    assert outcome.done_cases == {"a", "b"}
    assert (outcome.tally.faults, outcome.tally.cases) == (2, 2)


def test_a_case_that_failed_is_to_be_run_again_and_then_counts_once():
    failed = {"kind": "failed", "reason": "late"}
    first = (BEGIN, FAULT, HIT, case("a"), FAULT, failed, case("b"), END)
    assert judge(*first).verdict is Verdict.FAIL
    assert judge(*first).done_cases == {"a"}
    outcome = judge(*first, BEGIN, FAULT, HIT, case("b"), END)
    assert outcome.verdict is Verdict.PASS
    assert outcome.tally.faults == 2


def test_no_rerun_undoes_damage():
    outcome = judge(BEGIN, FAULT, damage(Damage.WRONG_TOKENS, 3), END, BEGIN, FAULT, HIT, END)
    assert outcome.verdict is Verdict.FAIL
    assert outcome.tally.damage[Damage.WRONG_TOKENS] == 3


def test_figures_add_up():
    figure = {"kind": "figure", "name": "kills", "number": 2}
    assert judge(BEGIN, FAULT, HIT, figure, figure, END).tally.figures == {"kills": 4}


def test_a_line_cut_by_a_kill_costs_that_line_alone(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.append("begin")
    with history.path.open("a") as file:
        file.write('{"kind": "fau')
    seal_history(history.path)
    history.append("end")
    assert [event["kind"] for event in read_history(history.path)] == ["begin", "end"]


def test_no_history_is_no_events(tmp_path):
    assert list(read_history(tmp_path / "none")) == []
