"""Fails when a part that must be covered has less than 95 % of its branches taken. Reads coverage's JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

# A part is every module whose name begins so; its branches are added up, since a small module has few.
PARTS = {
    "framing and handshake": ("flare_transport/framing", "flare_transport/handshake"),
    "records": ("flare_cache/record",),
    "join": ("flare_cache/join",),
    "sharded transport": ("flare_cache/sharded",),
}
REQUIRED_PERCENT = 95.0


def main(report: Path) -> int:
    files = json.loads(report.read_text(encoding="utf-8"))["files"]
    failures = []
    for part, prefixes in PARTS.items():
        covered = total = 0
        for path, entry in sorted(files.items()):
            if any(f"/src/{prefix}" in path for prefix in prefixes):
                summary = entry["summary"]
                covered += summary["covered_branches"]
                total += summary["num_branches"]
                print(f"{summary['covered_branches']:4d} of {summary['num_branches']:4d} branches  {path}")
        percent = 100.0 * covered / total if total else 0.0
        print(f"{percent:.1f} % of the branches of {part}\n")
        if percent < REQUIRED_PERCENT:
            failures.append(f"{part}: {percent:.1f} % of {total} branches, {REQUIRED_PERCENT:.0f} % required")
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
