"""Requests of every bad kind: each costs its own request at most; the group answers, and its processes are the same."""

from __future__ import annotations

from functools import partial

from flare_qualify.checkers.answers import References
from flare_qualify.checkers.pages import check_pages_at_rest
from flare_qualify.checkers.records import check_parity
from flare_qualify.client import ServerError, get_json
from flare_qualify.group import Group
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario
from flare_qualify.verdict import Damage
from flare_qualify.workloads.hostile import Hostile, hostile_requests, mutated_requests, send
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask, drop_device_copies

__all__ = ["SCENARIOS"]

_VOCAB_SIZES = {"oracle-rows": 259, "tiny-llama": 3100}
_PROMPT = prompt_of(20)


def _is_well(group: Group) -> bool:
    try:
        return bool(get_json(group.url, "/health", timeout=20.0)["status"] == "ready")
    except (OSError, ServerError):
        return False


def _send_all(context: Context, group: Group, requests: list[Hostile], references: References) -> None:
    members = group.members()
    for number, request in enumerate(requests):
        try:
            status = send(group.url, request)
        except OSError as error:
            status = -1
            context.check(False, f"{request.name}: {error!r}")
        context.answered()
        context.check(status < 500, f"{request.name}: status {status}")
        # A dead worker shows a moment later, so that each request is followed by a good one now and then.
        if number % 10 == 0 or number == len(requests) - 1:
            is_same = _is_well(group) and group.members() == members
            context.damage(Damage.DEATHS_BY_REQUEST, not is_same, f"after {request.name}: {group.log(0)[-600:]}")
            if not is_same:
                group.kill_all()
                group.start()
                members = group.members()
            references.compare("prompt", ask(group.url, _PROMPT))


def run_hostile(context: Context, *, model: str, world_size: int) -> None:
    """The whole list, mutations by chance; then everything is at rest as before, and restores."""
    group = context.group(model, world_size, "--max-body", "4M")
    references = References(context)
    group.start()
    references.learn("prompt", ask(group.url, _PROMPT))
    max_len = get_json(group.url, "/v1/cluster")["max_model_len"]
    fixed = list(hostile_requests(vocab_size=_VOCAB_SIZES[model], max_len=max_len))
    _send_all(context, group, fixed, references)
    context.figure("hostile_requests", len(fixed))
    number = 20_000 if context.is_long else 300
    _send_all(context, group, list(mutated_requests(context.rng, number)), references)
    context.figure("hostile_requests", number)
    context.fault_fired("hostile requests", f"{len(fixed) + number} sent")
    group.wait_stored()
    check_pages_at_rest(context, group, "after the hostile requests")
    for rank in range(world_size):
        context.check("Traceback" not in group.log(rank), f"rank {rank} printed a traceback: {group.log(rank)[-800:]}")
    drop_device_copies(group.url)
    answer = ask(group.url, _PROMPT)
    references.compare("prompt", answer)
    context.restored(answer, at_least=len(_PROMPT) - 1, tier="disk")
    context.check(set(group.stop().values()) == {0}, "the group did not end in order")
    check_parity(context, group, "stopped")


SCENARIOS = (
    Scenario(
        name="hostile-requests-oracle",
        proves="No content of a request, and no client's going away, ends a process or leaks a page.",
        rows=("D1",),
        seconds=8,
        long_seconds=200,
        run=partial(run_hostile, model="oracle-rows", world_size=2),
    ),
    Scenario(
        name="hostile-requests-tiny-llama",
        proves="The same with a real tokenizer, chat template and model.",
        rows=("D1",),
        needs=("torch",),
        seconds=15,
        long_seconds=300,
        run=partial(run_hostile, model="tiny-llama", world_size=1),
    ),
)
