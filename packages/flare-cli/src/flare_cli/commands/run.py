"""``flare run``: serve a model; on rank zero with the HTTP API, on other ranks as a peer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from flare_cli.commands.options import resolve_from, run_options

if TYPE_CHECKING:
    from flare_cli.resolve import Resolved

__all__ = ["run"]


@click.command(short_help="Serve a model.")
@run_options
def run(**arguments: Any) -> int:
    """Serve MODEL, a Hugging Face directory or a package made by 'flare export'.

    Without MODEL the embedded default model is served. With --world-size N, start one process a rank; rank 0 serves
    HTTP. torchrun, Slurm (srun) and LeaderWorkerSet are recognised by their variables. Every setting can also stand
    in a variable (FLARE_PAGE_TOKENS) or in a TOML file; 'flare config' shows what came of them.
    """
    from flare_cli.config import check_config
    from flare_cli.failpoints import arm_failpoints

    resolved = resolve_from(arguments)
    check_config(resolved.config)
    arm_failpoints(os.environ)
    # Until the group has met there is nothing to drain, and ``main`` obeys signals; later the processes' own do.
    return _serve(resolved)


def _serve(resolved: Resolved) -> int:
    if resolved.config.rank:
        from flare_cli.peer_process import run_peer

        return run_peer(resolved.config)
    from flare_cli.worker_launch import launched_worker

    with launched_worker() as worker:
        # Both processes import at the same time.
        from flare_cli.api_process import run_api

        return run_api(resolved.config, resolved.unknown, worker)
