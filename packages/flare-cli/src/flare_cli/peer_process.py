"""A peer's process: ``flare run --rank N``. Executes rank zero's plans and jobs, and ends when rank zero does.

The main thread is the engine thread. A signal to end is passed on to rank zero, which drains the whole group; only when
nobody drains it, the peer ends by itself.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

import msgspec

from flare_cli.agreement import Offer, RankRefuses
from flare_cli.cache_wiring import open_peer_cache
from flare_cli.config import RunConfig
from flare_cli.control_group import ControlGroup, describe_sighting, join_group
from flare_cli.exit_codes import EXIT_LOST, exit_code_of
from flare_cli.logs import set_up_logs
from flare_cli.model_source import find_model
from flare_cli.process_limits import set_process_limits
from flare_cli.rank_zero import equal_settings
from flare_cli.startup_display import StartupDisplay
from flare_cli.watchdog import Watchdog
from flare_cli.wiring import open_model
from flare_core.engine.engine import PeerLoop
from flare_core.errors import ConfigurationMismatch, FlareError, PoisonReason
from flare_transport import Sighting, TransportError

__all__ = ["run_peer"]

_LOG = logging.getLogger("flare")

DRAIN_MARGIN_SECONDS = 15.0


def run_peer(config: RunConfig) -> int:
    """Serve as a peer until rank zero ends the group. Does not return once the group has met: the process ends.

    Raises:
        UsageError: a file or a model that cannot be used; nothing was started then.
    """
    set_up_logs(as_json=config.log_json, process=f"rank {config.rank}")
    set_process_limits()
    source = find_model(config)
    code = _Peer(msgspec.structs.replace(config, model=str(source.directory))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch and of gloo may still be there; nothing of theirs is worth waiting for.
    os._exit(code)


class _Peer:
    """One life."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._watchdog = Watchdog(lambda _: None)
        self._display = StartupDisplay(as_json=config.log_json)
        self._group: ControlGroup | None = None
        self._is_asked = threading.Event()

    def run(self) -> int:
        """The exit code."""
        self._watchdog.start()
        try:
            return self._live()
        except (FlareError, TransportError) as error:
            if self._is_abandoned:
                return 0
            if self._group is not None:
                if not isinstance(error, ConfigurationMismatch | RankRefuses):
                    self._group.tell_failure(str(error))
                self._group.wait_for_end()
                self._group.close()
            self._display.close()
            print(f"flare: {error}", file=sys.stderr)
            return exit_code_of(error)
        except Exception as error:  # noqa: BLE001  the process ends here, and the group with it
            self._watchdog.fail(error, f"rank {self._config.rank}")
            return EXIT_LOST

    def _live(self) -> int:
        config = self._config
        self._display.stage(f"joining the group at {config.rendezvous}", 0, 0)
        self._group = group = ControlGroup(
            join_group(config, self._observe), on_loss=self._lose, on_called_off=self._called_off
        )
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._asked_to_end())
        group.agree(Offer(equal_settings(config)))
        model = open_model(config, group, agree_pages=self._agree_pages, report=self._display.stage)
        group.agree(Offer({"model identity": model.identity.fingerprint().hex()}))
        group.expect_heartbeats()
        cache = open_peer_cache(config, group, model, on_loss=self._lose)
        title = f"flare rank {config.rank} of {config.world_size} is ready"
        self._display.ready(title, [*model.facts, *cache.facts])
        loop = PeerLoop(model.runner, gate=cache.gate)
        while (plan := group.plans.get()) is not None:
            group.last_step = loop.execute(plan)
        self._watchdog.disarm()
        cache.close()
        group.close()
        _LOG.info("rank zero has ended the group")
        return 0

    @property
    def _is_abandoned(self) -> bool:
        """Told to end before the group has done anything: that it then breaks up is no loss."""
        return self._is_asked.is_set() and (self._group is None or self._group.last_step == 0)

    def _lose(self, reason: str) -> None:
        if self._is_abandoned:
            _LOG.info("stopping before anything was served")
            os._exit(0)  # this is a link's thread; the main thread may be blocked in anything
        self._watchdog.doom(reason)

    def _called_off(self) -> None:
        _LOG.info("rank zero was stopped before anything was served")
        os._exit(0)  # this is a link's thread; the main thread may be blocked in anything

    def _agree_pages(self, num_pages: int) -> int:
        return 0 if self._group is None else self._group.agree(Offer({}, {"pages": num_pages}))["pages"]

    def _observe(self, sighting: Sighting) -> None:
        _LOG.info("rendezvous: %s", describe_sighting(sighting))

    def _asked_to_end(self) -> None:
        """On the main thread, between two of its instructions: must not block, nor take a lock that it may hold."""
        if not self._is_asked.is_set():
            self._is_asked.set()
            threading.Thread(target=self._pass_on, name="flare drain", daemon=True).start()

    def _pass_on(self) -> None:
        _LOG.info("told to end: asking rank zero to drain the group")
        if self._group is not None:
            try:
                self._group.ask_to_drain()
            except TransportError as error:
                _LOG.warning("rank zero cannot be asked: %s", error)
        seconds = self._config.drain_timeout + DRAIN_MARGIN_SECONDS
        threading.Event().wait(seconds)
        self._watchdog.doom(
            f"{PoisonReason.DRAIN_OVERDUE}: nobody has drained the group within {seconds:g} s of the signal"
        )
