"""Clients that go away in the middle of a restore or of an answer: the transfer drains, and no page is lost."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.pages import check_pages_at_rest, snapshot
from flare_qualify.checkers.records import check_parity
from flare_qualify.group import Group
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.workloads.chains import Chain
from flare_qualify.workloads.failpoints import arm, disarm, hits
from flare_qualify.workloads.prompts import extend, prompt_of
from flare_qualify.workloads.requests import ask, begin, drop_device_copies

__all__ = ["SCENARIOS"]


def _leave_after(group: Group, body: dict[str, Any], seconds: float) -> None:
    data = json.dumps({"stream": True, "max_tokens": 64, "ignore_eos": True} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    with socket.create_connection((group.host, group.port), timeout=30) as connection:
        connection.sendall(head + data)
        time.sleep(seconds)


def run_leaving(context: Context) -> None:
    """Slow every read of one rank, leave during restores at random moments, and look whether pages come back."""
    group = context.group("oracle-rows", 2)
    chain = Chain(context)
    group.start()
    chain.grow(group)
    group.stop()
    arm(group, 1, "fetch.read:pause=30ms@1+")
    group.start()
    disarm(group)
    count = 60 if context.is_long else 15
    num_caught = 0
    for number in range(count):
        drop_device_copies(group.url)
        before = len(hits(group, 1, "fetch.read"))
        _leave_after(group, {"prompt": chain.prompt} | chain.request_options(), context.rng.uniform(0.02, 0.35))
        context.answered()
        fetching = snapshot(group)["engine"]["fetching"]
        if fetching or 0 < len(hits(group, 1, "fetch.read")) - before < len(chain.reported.names):
            num_caught += 1
            context.fault_fired("client left during its restore", f"{fetching} fetching as it left, number {number}")
        if number % 5 == 4:
            check_pages_at_rest(context, group, f"client {number}")
    context.check(num_caught > 0, "no client left during a restore")
    context.check(chain.restore(group), "the chain was not restored whole afterwards")
    check_pages_at_rest(context, group, "at the end")
    context.check(set(group.stop().values()) == {0}, "the group did not end in order")
    check_parity(context, group, "stopped")


def run_crowd(context: Context) -> None:
    """Many clients with shared prefixes at once, restores among them, under a pool too small for all: equal answers."""
    group = context.group("oracle-rows", 3, "--kv-memory", "96pages", "--max-sequences", "16")
    references = References(context)
    trunk = prompt_of(30, 96)
    prompts = {f"branch {number}": extend(trunk, number, 20 + 5 * number) for number in range(16)}
    group.start()
    for name, prompt in prompts.items():
        references.learn(name, ask(group.url, prompt, cache_salt=f"cold {name}"))
    group.wait_stored()
    group.stop()
    group.start()
    rounds = 40 if context.is_long else 6
    with ThreadPoolExecutor(16) as pool:
        for _ in range(rounds):
            names = [context.rng.choice(list(prompts)) for _ in range(24)]
            salts = [context.rng.choice(["shared", f"cold {name}"]) for name in names]
            asked = [
                begin(pool, group.url, prompts[name], cache_salt=salt) for name, salt in zip(names, salts, strict=True)
            ]
            for name, future in zip(names, asked, strict=True):
                result = future.result()
                if context.check(result.answer is not None, f"{name}: {result.message}") and result.answer:
                    # Which tokens share a step differs from run to run; the oracle's answers do not depend on it.
                    references.compare(name, result.answer)
                    context.restored(result.answer, tier="disk")
            drop_device_copies(group.url)
    group.wait_stored()
    check_pages_at_rest(context, group, "at the end")
    context.check(set(group.stop().values()) == {0}, "the group did not end in order")
    check_parity(context, group, "stopped")


SCENARIOS = (
    Scenario(
        name="clients-leave-during-restores",
        proves="A client that leaves during its restore costs no page and no record; the transfer drains.",
        rows=("A4", "A11"),
        seconds=10,
        long_seconds=60,
        run=run_leaving,
    ),
    Scenario(
        name="crowd-of-clients",
        proves="Many clients at once, on few pages, with restores among them, get the answers that each gets alone.",
        rows=("A4", "A18"),
        seconds=12,
        long_seconds=90,
        faults_due=False,
        run=run_crowd,
    ),
)
