"""Rank zero's first process: serves HTTP, is the parent of the worker process, and decides how both end.

Exit codes: 0 after a drain, the worker's own code where its start failed (2, 78, …), 70 when the engine was lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import uvicorn

from flare_cli import __version__
from flare_cli.config import HostPort, RunConfig, encode_config, is_loopback
from flare_cli.engine_client import EngineClient
from flare_cli.exit_codes import EXIT_LOST
from flare_cli.logs import set_up_logs
from flare_cli.model_source import ModelSource, find_model
from flare_cli.process_limits import set_process_limits
from flare_cli.salt import salt_key
from flare_cli.served_text import ServedText, load_text
from flare_cli.server.app import MAX_HEADER_BYTES, make_app
from flare_cli.server.engine_port import EngineState
from flare_cli.server.errors import EngineUnavailable
from flare_cli.server.guard import guarded_protocol
from flare_cli.server.keys import KeyRing, load_key_ring
from flare_cli.server.metrics import ServerMetrics
from flare_cli.server.model import Limits, ServedModel
from flare_cli.server.service import Service
from flare_cli.startup_display import StartupDisplay
from flare_cli.worker_launch import LaunchedWorker
from flare_cli.worker_protocol import (
    CONFIGURATION,
    LOCAL_LINK_SETTINGS,
    DrainAsked,
    Notice,
    Ready,
    Stage,
    StartFailed,
    WorkerLost,
)
from flare_core.errors import UsageError
from flare_transport import EndCause, Link, LinkEnd, local_link

__all__ = ["run_api"]

_LOG = logging.getLogger("flare")

LOST_GRACE_SECONDS = 0.6
"""How long ``/health`` goes on saying that the engine is lost, while answers to waiting requests go out."""
WORKER_END_SECONDS = 10.0
ABANDON_SECONDS = 3.0
SPARE_CONNECTIONS = 512


def run_api(config: RunConfig, unknown_variables: Sequence[str], worker: LaunchedWorker) -> int:
    """Serve until a signal or the loss of the engine; returns the exit code.

    Raises:
        UsageError: a file, a model or an address that cannot be used; the worker was told nothing then.
    """
    set_up_logs(as_json=config.log_json, process="api")
    set_process_limits()
    source = find_model(config)
    keys = load_key_ring(config.api_key_file, config.admin_key_file)
    salt = salt_key(config)
    listeners = _listen(config)
    for name in unknown_variables:
        _LOG.warning("%s is set and is no setting of flare", name)
    exposed = [host for host in config.hosts if not is_loopback(host)]
    if keys.is_open and exposed:
        where = " and ".join(exposed)
        _LOG.warning("serving on %s without --api-key-file: whoever reaches this port may use the model", where)
    display = StartupDisplay(as_json=config.log_json)
    port = int(listeners[0].getsockname()[1])
    process = _ApiProcess(config=config, source=source, worker=worker.process, display=display, port=port)
    link = local_link(worker.socket, name="link to the worker", settings=LOCAL_LINK_SETTINGS)
    limits = Limits(
        max_body_bytes=config.max_body,
        max_n=config.max_n,
        max_choices=8 * config.max_n,
        max_output_tokens=config.max_output_tokens,
        max_concurrent_requests=config.max_concurrent_requests,
    )
    with contextlib.ExitStack() as open_listeners:
        for listener in listeners:
            open_listeners.enter_context(listener)
        return asyncio.run(process.run(listeners, link, salt=salt, limits=limits, keys=keys))


def _listen(config: RunConfig) -> list[socket.socket]:
    """A listener for each address, all on the port that the first one got."""
    listeners: list[socket.socket] = []
    for host in config.hosts:
        port = int(listeners[0].getsockname()[1]) if listeners else config.port
        where = f"--host {host} --port {port}" if config.host else f"{host} (of --rendezvous), --port {port}"
        listeners.append(_listen_on(host, port, where))
    return listeners


def _listen_on(host: str, port: int, where: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        msg = f"cannot serve on {where}: {error.strerror}; choose another address"
        raise UsageError(msg) from None
    return listener


@dataclass(slots=True)
class _ApiProcess:
    """The life of this process, from the first notice of the worker to the exit code."""

    config: RunConfig
    source: ModelSource
    worker: subprocess.Popen[bytes]
    display: StartupDisplay
    port: int
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    insisting: asyncio.Event = field(default_factory=asyncio.Event)
    facts: Ready | None = None
    start_failure: StartFailed | None = None
    loss: str | None = None
    is_abandoned: bool = False
    """Told to end while it was starting."""

    async def run(
        self, listeners: list[socket.socket], link: Link, *, salt: bytes, limits: Limits, keys: KeyRing
    ) -> int:
        """See :func:`run_api`."""
        loop = asyncio.get_running_loop()
        client = EngineClient(loop, link, salt, self.source.name, on_notice=self._on_notice, on_end=self._on_end)
        service = Service(engine=client, model=None, limits=limits, keys=keys, metrics=ServerMetrics())
        server = uvicorn.Server(_uvicorn_config(service))
        serving = asyncio.create_task(server.serve(sockets=listeners))
        while not server.started and not serving.done():
            await asyncio.sleep(0)
        # After uvicorn's own, so that a signal drains the engine first and uvicorn only when that is done.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        client.start()
        source = str(self.source.directory)
        link.send(CONFIGURATION, encode_config(msgspec.structs.replace(self.config, model=source)))
        try:
            return await self._live(client, service)
        finally:
            self.display.close()
            link.close(wait_seconds=1.0)
            server.should_exit = True
            await serving

    async def _live(self, client: EngineClient, service: Service) -> int:
        text = await asyncio.to_thread(load_text, self.source)
        await _first(self.ready, self.ended, self.stopping)
        if self.facts is not None and not self.ended.is_set() and not self.stopping.is_set():
            service.model = _served_model(self.source.name, self.facts, text)
            title = f"flare {__version__} serves {self.source.name}"
            addresses = [("address", f"http://{HostPort(host, self.port)}") for host in self.config.hosts]
            self.display.ready(title, [*self.facts.facts, *addresses])
            await _first(self.ended, self.stopping)
        if self.stopping.is_set() and not self.ended.is_set():
            await self._drain(client)
        return await self._exit_code(client)

    async def _drain(self, client: EngineClient) -> None:
        """Let the worker finish and end; by force when that takes too long or a second signal insists."""
        if client.state is not EngineState.READY:
            _LOG.info("stopping before anything was served")
            self.is_abandoned = True
            client.abandon()
            await _first(self.ended, timeout=ABANDON_SECONDS)
            self.worker.kill()  # whatever it is blocked in: it has nothing to lose yet
            return
        _LOG.info("draining: %d outputs in work, at most %g s", client.num_pending, self.config.drain_timeout)
        with contextlib.suppress(EngineUnavailable):
            client.drain()
            await _first(self.ended, self.insisting, timeout=self.config.drain_timeout)
            if not self.ended.is_set():
                _LOG.warning("giving up %d outputs", client.num_pending)
                client.stop()
        await _first(self.ended, timeout=WORKER_END_SECONDS)

    async def _exit_code(self, client: EngineClient) -> int:
        is_stopped = self.stopping.is_set()
        code = await asyncio.to_thread(_wait, self.worker, WORKER_END_SECONDS)
        if self.start_failure is not None:
            self.display.close()
            print(f"flare: {self.start_failure.message}", file=sys.stderr)
            return self.start_failure.exit_code
        if self.is_abandoned or (is_stopped and code in {0, -signal.SIGKILL} and self.loss is None):
            return 0
        _LOG.error("the engine is lost: %s", client.detail if client.state is EngineState.LOST else f"exit code {code}")
        await asyncio.sleep(LOST_GRACE_SECONDS)
        return EXIT_LOST

    def _on_notice(self, notice: Notice) -> None:
        match notice:
            case Stage(text, num_done, total):
                self.display.stage(text, num_done, total)
            case Ready():
                self.facts = notice
                self.ready.set()
            case StartFailed():
                self.start_failure = notice
            case DrainAsked(rank):
                _LOG.info("rank %d was told to end", rank)
                self.stopping.set()
            case WorkerLost(message):
                self.loss = message

    def _on_end(self, end: LinkEnd) -> None:
        if end.is_loss and self.start_failure is None:
            self.loss = self.loss or end.detail
        if end.cause is EndCause.SILENT:
            self.worker.kill()  # stopped or stuck as a whole: it will not end by itself
        self.ended.set()

    def _on_signal(self) -> None:
        if self.stopping.is_set():
            self.insisting.set()
        self.stopping.set()


def _uvicorn_config(service: Service) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(service),
        http=guarded_protocol(max_connections=service.limits.max_concurrent_requests + SPARE_CONNECTIONS),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=5,
    )


def _served_model(name: str, facts: Ready, text: ServedText) -> ServedModel:
    return ServedModel(
        name=name,
        created=int(time.time()),
        vocab_size=min(facts.vocab_size, text.tokenizer.num_ids) if facts.vocab_size else text.tokenizer.num_ids,
        max_model_len=facts.max_model_len,
        tokenizer=text.tokenizer,
        chat_template=text.chat_template,
        defaults=text.defaults,
    )


async def _first(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Wait for any of ``events``."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _wait(worker: subprocess.Popen[bytes], seconds: float) -> int:
    """The worker's exit code; it is killed when it does not end by itself."""
    try:
        return worker.wait(seconds)
    except subprocess.TimeoutExpired:
        worker.kill()
        return worker.wait()
