"""Fails when a module that must be covered has less than 95 % of its branches taken. Reads coverage's JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

GATED = (
    "flare_transport/framing",
    "flare_transport/handshake",
    "flare_cache/record",
    "flare_cache/join",
    "flare_cache/sharded",
)
REQUIRED_PERCENT = 95.0


def main(report: Path) -> int:
    files = json.loads(report.read_text(encoding="utf-8"))["files"]
    failures = []
    for prefix in GATED:
        matching = {path: entry["summary"] for path, entry in files.items() if f"/src/{prefix}" in path}
        if not matching:
            failures.append(f"{prefix}: no module of that name was measured")
        for path, summary in sorted(matching.items()):
            branches, covered = summary["num_branches"], summary["covered_branches"]
            percent = 100.0 * covered / branches if branches else 100.0
            print(f"{percent:6.1f} %  {covered:4d}/{branches:<4d} branches  {path}")
            if percent < REQUIRED_PERCENT:
                failures.append(f"{path}: {percent:.1f} % of branches, {REQUIRED_PERCENT:.0f} % required")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
