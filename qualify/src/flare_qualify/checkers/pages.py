"""The device's pages at rest: every one is accounted for, and none is held by nobody."""

from __future__ import annotations

import time
from typing import Any

from flare_qualify.client import get_json
from flare_qualify.group import Group
from flare_qualify.run_context import Context
from flare_qualify.verdict import Damage

__all__ = ["check_pages_at_rest", "snapshot"]


def snapshot(group: Group) -> dict[str, Any]:
    """``/v1/cluster`` now."""
    found: dict[str, Any] = get_json(group.url, "/v1/cluster")
    return found


def check_pages_at_rest(context: Context, group: Group, when: str, *, timeout: float = 20.0) -> None:
    """Wait until no request is in work; then free + cached must be all pages, with none held or quarantined.

    A page too many is one that two owners have: it was given away before its transfer was accounted for.
    """
    deadline = time.monotonic() + timeout
    while True:
        cluster = snapshot(group)
        engine = cluster["engine"]
        is_idle = engine["running"] + engine["waiting"] + engine["fetching"] == 0
        if is_idle and engine["pages_held"] == 0:
            break
        if time.monotonic() > deadline:
            held = engine["pages_held"]
            context.check(False, f"{when}: after {timeout:g} s {held} pages are held and idle is {is_idle}")
            break
        time.sleep(0.05)
    total = sum(engine[f"pages_{state}"] for state in ("free", "held", "cached", "quarantined"))
    context.damage(Damage.PAGES_REUSED, abs(total - cluster["num_pages"]), f"{when}: {total} of {cluster['num_pages']}")
    context.check(engine["pages_quarantined"] == 0, f"{when}: {engine['pages_quarantined']} pages are quarantined")
