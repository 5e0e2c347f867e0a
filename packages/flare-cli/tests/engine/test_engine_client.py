"""The engine as the API process sees it, over a link whose other end is the test."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest

from flare_cli.engine_client import EngineClient
from flare_cli.server.engine_port import EngineState
from flare_cli.server.errors import EngineUnavailable
from flare_cli.worker_protocol import COMMANDS, NOTICE, SNAPSHOT_QUERY, Ready, encode_notice
from flare_core.prefix import Tier
from flare_transport import Router
from flare_transport.local_link import local_link


@contextlib.asynccontextmanager
async def connected():
    """A client that is ready, the worker's end of its link, and an event set once a command has come there."""
    here, there = socket.socketpair()
    worker, came = local_link(there, name="worker"), threading.Event()
    router = Router()
    router.route(COMMANDS, lambda _, payload: came.set())
    router.route(SNAPSHOT_QUERY, lambda _, payload: None)
    worker.start(router, pulse=lambda: b"")
    client = EngineClient(
        loop=asyncio.get_running_loop(),
        link=local_link(here, name="api"),
        salt_key=bytes(32),
        model_name="model",
        on_notice=lambda _: None,
        on_end=lambda _: None,
    )
    client.start()
    worker.send(NOTICE, encode_notice(Ready(vocab_size=10, max_model_len=10, facts=())))
    while client.state is not EngineState.READY:
        await asyncio.sleep(0)
    try:
        yield client, worker, came
    finally:
        worker.close()
        client.link.close()


def test_a_reset_that_the_engine_does_not_live_to_answer_is_refused_at_once() -> None:
    async def run() -> None:
        async with connected() as (client, worker, came):
            asked = asyncio.create_task(client.reset(Tier.DEVICE))
            await asyncio.to_thread(came.wait, 10)
            worker.fail("the worker is killed")
            async with asyncio.timeout(10):
                with pytest.raises(EngineUnavailable, match="the engine's process is gone"):
                    await asked
            assert client.state is EngineState.LOST

    asyncio.run(run())
