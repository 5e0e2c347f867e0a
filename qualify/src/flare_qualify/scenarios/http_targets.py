"""``qualify http`` on flare's own server: the phases that any server on a local port can be put under."""

from __future__ import annotations

from functools import partial

from flare_qualify.checkers.pages import check_pages_at_rest
from flare_qualify.http_target import HttpTarget, describe_server
from flare_qualify.run_context import Context
from flare_qualify.scenario import Scenario

__all__ = ["SCENARIOS"]


def run_http_phases(context: Context, *, model: str, world_size: int, prompt_words: int) -> None:
    """Every phase of ``qualify http``; no difference is allowed."""
    group = context.group(model, world_size)
    group.start()
    HttpTarget(context, group.url, describe_server(group.url), prompt_words=prompt_words).run()
    check_pages_at_rest(context, group, "at the end")
    context.check(set(group.stop().values()) == {0}, "the group did not end in order")


SCENARIOS = (
    Scenario(
        name="http-phases-oracle",
        proves="What 'qualify http' asks of any server holds for flare's, without a difference of a bit.",
        rows=("D4",),
        seconds=6,
        run=partial(run_http_phases, model="oracle", world_size=2, prompt_words=200),
    ),
)
