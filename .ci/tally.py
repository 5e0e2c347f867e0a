"""Adds up the test reports of a run: ``tally.py DIRECTORY NUM_FAILED_TARGETS``. Exits 1 unless all is well."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree


def main(directory: Path, num_failed_targets: int) -> int:
    """Print one line for each report and the sum as the last line; 1 if anything failed or nothing ran."""
    tests = failed = skipped = 0
    for report in sorted(directory.glob("*.xml")):
        root = ElementTree.parse(report)  # noqa: S314 - pytest wrote it
        for suite in root.iter("testsuite"):
            tests += int(suite.get("tests", 0))
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
            print(f"{report.stem}: {suite.get('tests')} tests in {suite.get('time')} s")
    passed = tests - failed - skipped
    failed = max(failed, num_failed_targets)
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
