"""Entry point of rank zero's worker process: ``python -m flare_cli.worker_process FD``, started by the API process.

Owns the process's last word: a start that failed, a loss, or an end in order. What it runs is ``rank_zero``'s.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import TYPE_CHECKING, NoReturn

from flare_cli.api_link import ApiLink
from flare_cli.exit_codes import EXIT_LOST, exit_code_of
from flare_cli.failpoints import arm_failpoints
from flare_cli.logs import set_up_logs
from flare_cli.process_limits import set_process_limits
from flare_cli.watchdog import Watchdog
from flare_cli.worker_protocol import LOCAL_LINK_SETTINGS, StartFailed, WorkerLost
from flare_core.errors import FlareError
from flare_transport import Link, TransportError, local_link

if TYPE_CHECKING:
    from flare_cli.rank_zero import RankZero

__all__ = ["main"]


def main() -> None:
    """Serve until told to end; never returns.

    Signals to end may reach the whole process group. They are ignored here since ``worker_launch``: the API process
    drains, and this one waits for its word.
    """
    set_process_limits()
    arm_failpoints(os.environ)
    link = local_link(
        socket.socket(fileno=int(sys.argv[1])), name="link to the API process", settings=LOCAL_LINK_SETTINGS
    )
    _end(_Worker(link).run())


def _end(code: int) -> NoReturn:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    # Threads of torch and of gloo may still be there; nothing of theirs is worth waiting for.
    os._exit(code)


class _Worker:
    """One life."""

    def __init__(self, link: Link) -> None:
        self._watchdog = Watchdog(lambda reason: self._api.notify(WorkerLost(reason)))
        self._api = ApiLink(link, on_loss=self._watchdog.doom, on_abandon=self._abandon)
        self._rank: RankZero | None = None

    def run(self) -> int:
        """The exit code."""
        self._watchdog.start()
        self._api.start()
        code = self._serve()
        self._watchdog.disarm()
        self._api.close()
        return code

    def _serve(self) -> int:
        config = self._api.receive_config()
        set_up_logs(as_json=config.log_json, process="rank 0")
        from flare_cli.rank_zero import RankZero

        self._rank = rank = RankZero(config, self._api, self._watchdog)
        try:
            try:
                rank.start()
            except (FlareError, TransportError) as error:
                code = exit_code_of(error)
                self._api.notify(StartFailed(str(error), code))
                rank.close()
                return code
            rank.serve()
            rank.close()
        except FlareError as error:
            self._watchdog.doom(str(error))
            return EXIT_LOST
        except Exception as error:  # noqa: BLE001  the process ends here, and the group with it
            self._watchdog.fail(error, "the engine")
            return EXIT_LOST
        # Only an end in order is told to the peers; after a loss their links just break, so that they end as lost, too.
        return 0

    def _abandon(self) -> None:
        """On the link's thread: the main thread may be blocked in anything, and there is nothing to lose."""
        self._watchdog.disarm()
        if self._rank is not None:
            self._rank.abandon()
        _end(0)


if __name__ == "__main__":
    main()
