"""Scenarios run to a history, go on where they were cut off, and come to one result file and one report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from flare_qualify.client import Answer
from flare_qualify.commands import qualify
from flare_qualify.models import ModelLibrary
from flare_qualify.report import headline, write_report
from flare_qualify.run_context import Context
from flare_qualify.run_directory import RunDirectory
from flare_qualify.scenario import SUITES, Scenario, all_scenarios, choose
from flare_qualify.scenario_process import run_here
from flare_qualify.verdict import Damage, Verdict

RESTORED = Answer("text", 0.25, 0.5, 100, 4, {"disk": 99})


@pytest.fixture
def directory(tmp_path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.begin(suite="standard", seed=7, resumed=False)
    return found


def run(directory, action, **fields):
    scenario = Scenario(name=fields.pop("name", "one"), proves="It holds.", run=action, **fields)
    models = ModelLibrary(directory.models)
    run_here(scenario, directory.scenario(scenario.name), suite="standard", seed=7, models=models)
    return scenario, directory.outcome(scenario)


def good(context: Context) -> None:
    context.fault_fired("kill a rank", "signal 9")
    context.restored(RESTORED)


def test_a_good_scenario_passes(directory):
    _, outcome = run(directory, good)
    assert outcome.verdict is Verdict.PASS


def test_a_hit_on_the_device_is_no_restore(directory):
    def action(context):
        context.fault_fired("kill a rank", "signal 9")
        assert not context.restored(Answer("", 0.1, 0.1, 100, 4, {"device": 99}))

    assert run(directory, action)[1].verdict is Verdict.VACUOUS


def test_a_fault_without_evidence_is_none(directory):
    _, outcome = run(directory, lambda context: context.fault_fired("kill a rank", ""))
    assert outcome.verdict is Verdict.FAIL
    assert "evidence" in outcome.reason
    assert outcome.tally.faults == 0


def test_what_a_scenario_raises_is_its_failure(directory):
    def action(context):
        good(context)
        raise OSError("no such group")

    _, outcome = run(directory, action)
    assert outcome.verdict is Verdict.FAIL
    assert "no such group" in outcome.reason


def test_a_requirement_ends_the_scenario_and_a_check_does_not(directory):
    def action(context):
        good(context)
        context.check(False, "first")
        context.require(False, "second")
        context.check(False, "third")

    assert run(directory, action)[1].tally.failures == ["first", "second"]


def test_a_scenario_may_be_skipped_with_a_reason(directory):
    _, outcome = run(directory, lambda context: context.skip("no such disk"))
    assert (outcome.verdict, outcome.reason) == (Verdict.SKIP, "no such disk")


def test_a_duration_over_its_limit_fails(directory):
    def action(context):
        good(context)
        assert context.timed("the end", 1.0, limit=2.0)
        assert not context.timed("the end", 3.0, limit=2.0)

    assert "the end took 3.0 s" in run(directory, action)[1].reason


def test_a_run_cut_off_goes_on_with_the_first_case_that_is_not_done(directory):
    names = [f"case {number}" for number in range(5)]
    seen: list[str] = []
    chances: dict[str, float] = {}

    def action(context):
        for name in context.cases(names):
            seen.append(name)
            chances.setdefault(name, context.rng.random())
            if len(seen) == 3:
                raise KeyboardInterrupt
            good(context)
            assert chances[name] == chances[name]

    with pytest.raises(KeyboardInterrupt):
        run(directory, action)
    scenario, outcome = run(directory, action)
    assert seen == [*names[:3], *names[2:]]
    assert outcome.verdict is Verdict.PASS
    assert (outcome.tally.faults, outcome.tally.cases) == (5, 5)
    assert directory.result([scenario]).total.faults == 5


def test_chance_in_a_case_does_not_depend_on_the_cases_before_it(directory):
    drawn: dict[str, list[float]] = {}

    def action(context):
        for name in context.cases(["a", "b"]):
            drawn.setdefault(name, []).append(context.rng.random())
            good(context)
            context.check(name == "a" or len(drawn["b"]) == 2, "b fails the first time")

    run(directory, action)
    assert run(directory, action)[1].verdict is Verdict.PASS
    assert len(drawn["a"]) == 1
    assert drawn["b"][0] == drawn["b"][1] != drawn["a"][0]


def results(directory):
    def bad(context):
        good(context)
        context.damage(Damage.WRONG_TOKENS, 4, "text differs")
        context.figure("kills", 3)

    scenarios = [
        run(directory, good, name="good")[0],
        run(directory, bad, name="bad")[0],
        run(directory, lambda context: None, name="empty")[0],
        run(directory, lambda context: context.skip("<no> disk"), name="skipped")[0],
    ]
    return scenarios, directory.result(scenarios)


def test_the_result_file_has_the_counts_at_its_top(directory):
    _, result = results(directory)
    document = json.loads(directory.write_result(result).read_text())
    assert document["faults_injected"] == 2
    assert document["wrong_tokens"] == 4
    for what in Damage:
        assert document[what] == (4 if what is Damage.WRONG_TOKENS else 0)
    assert document["seeds"] == [7]
    assert document["commit"]
    assert document["is_good"] is False
    assert (document["scenarios_run"], document["scenarios_skipped"]) == (3, 1)
    assert document["figures"] == {"kills": 3}
    verdicts = {each["name"]: (each["verdict"], each["faults"]) for each in document["scenarios"]}
    assert verdicts == {"good": ("pass", 1), "bad": ("fail", 1), "empty": ("fail-vacuous", 0), "skipped": ("skip", 0)}
    assert all({"seconds", "proves"} <= each.keys() for each in document["scenarios"])


def test_the_report_stands_alone_and_escapes_what_it_shows(directory):
    _, result = results(directory)
    page = write_report(directory, result).read_text()
    assert headline(result) in page
    assert "Over 2 injected faults in 3 scenarios" in page
    assert page.count("<svg") == 2
    assert "&lt;no&gt; disk" in page
    assert "<no>" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_run_of_skips_alone_is_not_good(directory):
    scenario, _ = run(directory, lambda context: context.skip("none"))
    assert not directory.result([scenario]).is_good


def test_every_declared_scenario_is_well_formed():
    known = all_scenarios()
    assert len(known) >= 30
    for scenario in known.values():
        assert scenario.proves.endswith(".")
        assert scenario.name == scenario.name.lower()
        assert scenario.seconds > 0 or "standard" not in scenario.suites


def test_the_standard_suite_fits_its_time():
    chosen = choose(all_scenarios(), (), "standard")
    assert len(chosen) >= 30
    alone = sum(scenario.seconds for scenario in chosen if scenario.alone)
    beside_another = sum(scenario.seconds for scenario in chosen if not scenario.alone)
    # Two at a time use the waits of each other: measured, they take 0.6 of the time that one after the other takes.
    assert alone + 0.6 * beside_another <= 20 * 60


def test_an_unknown_scenario_is_refused_by_name(tmp_path):
    result = CliRunner().invoke(qualify, ["run", "no-such", "--directory", str(tmp_path)])
    assert result.exit_code == 2
    assert "no-such" in result.output


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    name = next(iter(all_scenarios()))
    result = CliRunner().invoke(qualify, ["run", name, "--directory", str(tmp_path)])
    assert result.exit_code == 2
    assert Path(tmp_path / "thesis.txt").read_text() == "mine"


def test_a_run_of_one_suite_does_not_go_on_as_another(directory):
    name = next(iter(all_scenarios()))
    arguments = ["run", name, "--suite", "long", "--resume", "--directory", str(directory.root)]
    result = CliRunner().invoke(qualify, arguments)
    assert result.exit_code == 2
    assert "holds a run of the suite standard" in result.output


def test_a_report_of_no_run_says_so(tmp_path):
    result = CliRunner().invoke(qualify, ["report", "--directory", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no run" in result.output


def test_suites_are_those_that_exist():
    assert SUITES == ("standard", "long")
