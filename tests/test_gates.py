"""The two small programs that decide over a run: the sum of its tests, and its branch coverage."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import branch_gate
import pytest
from repository import ROOT


def tally(directory: Path, num_failed_targets: int) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / ".ci" / "tally.py"), str(directory), str(num_failed_targets)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()[-1]


def report(path: Path, *, tests: int, failures: int = 0, errors: int = 0, skipped: int = 0) -> None:
    path.write_text(
        f'<testsuites><testsuite tests="{tests}" failures="{failures}" errors="{errors}" skipped="{skipped}" '
        'time="1"/></testsuites>'
    )


def test_the_last_line_adds_up_all_reports(tmp_path: Path) -> None:
    report(tmp_path / "core.xml", tests=5)
    report(tmp_path / "cache.xml", tests=7, skipped=2)
    assert tally(tmp_path, 0) == (0, "10 passed, 0 failed, 2 skipped")


def test_failures_and_errors_fail_the_run(tmp_path: Path) -> None:
    report(tmp_path / "core.xml", tests=5, failures=1, errors=2)
    assert tally(tmp_path, 1) == (1, "2 passed, 3 failed")


def test_a_target_that_failed_without_a_failed_test_fails_the_run(tmp_path: Path) -> None:
    report(tmp_path / "core.xml", tests=5)
    assert tally(tmp_path, 1) == (1, "5 passed, 1 failed")


def test_a_run_without_any_test_fails(tmp_path: Path) -> None:
    assert tally(tmp_path, 0) == (1, "0 passed, 0 failed")


@pytest.fixture
def coverage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(branch_gate, "PARTS", {"codec": ("flare_x/codec",), "join": ("flare_x/join", "flare_x/scan")})
    return tmp_path / "coverage.json"


def write_coverage(path: Path, branches: dict[str, tuple[int, int]]) -> None:
    files = {
        f"packages/flare-x/src/flare_x/{name}.py": {"summary": {"covered_branches": covered, "num_branches": total}}
        for name, (covered, total) in branches.items()
    }
    path.write_text(json.dumps({"files": files}))


def test_a_part_with_too_few_branches_fails(coverage: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_coverage(coverage, {"codec": (9, 9), "join": (90, 95), "join_set": (4, 5), "scan": (0, 0), "other": (0, 9)})
    assert branch_gate.main(coverage) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "join: 94.0 % of 100 branches, 95 % required"


def test_a_part_that_was_not_measured_fails(coverage: Path) -> None:
    write_coverage(coverage, {"codec": (9, 9)})
    assert branch_gate.main(coverage) == 1


def test_enough_branches_everywhere_pass(coverage: Path) -> None:
    write_coverage(coverage, {"codec": (9, 9), "join": (1, 2), "scan": (94, 98)})
    assert branch_gate.main(coverage) == 0
