"""What a rank sees when another rank's process dies or is frozen: real processes, real signals."""

import os
import signal
import subprocess
import sys

import pytest

from flare_transport import EndCause, HeartbeatSettings, LinkSettings, RendezvousSettings, Security, meet

PEER = """
import sys
import threading
import flare_transport as ft

host, port, rank, world_size, security = sys.argv[1], *map(int, sys.argv[2:])
link_settings = ft.LinkSettings(heartbeat=ft.HeartbeatSettings(0.05, 20.0))
place = ft.Address(host, port)
settings = ft.RendezvousSettings(
    place, rank, world_size, bytes(32), ft.Security(security), deadline_seconds=30, link=link_settings
)
group = ft.meet(settings)
link, done = group.peers[0].link, threading.Event()
router = ft.Router()
word = ft.FrameType(40, "WORD", 100)
router.route(word, lambda link, payload: link.send(word, b"from %d" % rank))
router.on_end(lambda link, end: (print(end.cause.name, flush=True), done.set()))
link.start(router, pulse=lambda: b"")
done.wait(60)
"""


@pytest.fixture
def ranks(loopback_address, make_recorder, closing):
    """A function that starts peers as processes and meets them as rank zero; returns processes, links, recorders."""
    processes = []

    def start(world_size, security):
        address = loopback_address
        for rank in range(1, world_size):
            arguments = [address.host, address.port, rank, world_size, int(security)]
            processes.append(
                subprocess.Popen([sys.executable, "-c", PEER, *map(str, arguments)], stdout=subprocess.PIPE, text=True)
            )
        settings = LinkSettings(heartbeat=HeartbeatSettings(0.05, 1.0))
        group = meet(
            RendezvousSettings(address, 0, world_size, bytes(32), security, deadline_seconds=30, link=settings)
        )
        closing.append(group)
        recorders = {rank: make_recorder() for rank in group.peers}
        links = {rank: peer.link for rank, peer in group.peers.items()}
        for rank, link in links.items():
            link.start(recorders[rank].router, pulse=lambda: b"")
            link.send(make_recorder.WORD, b"")
            assert recorders[rank].word() == b"from %d" % rank
        return processes, links, recorders

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("security", Security)
def test_a_killed_peer_is_a_disconnect_and_the_others_stay(ranks, security):
    processes, links, recorders = ranks(3, security)
    processes[0].kill()
    assert recorders[1].end().cause is EndCause.DISCONNECTED
    links[2].shutdown()
    assert recorders[2].end().cause is EndCause.CLOSED_HERE
    assert processes[1].communicate(timeout=30)[0].split() == ["CLOSED_BY_PEER"]


def test_a_frozen_peer_is_silent_to_death_and_sees_the_loss_when_it_thaws(ranks):
    (process,), _, recorders = ranks(2, Security.TLS)
    os.kill(process.pid, signal.SIGSTOP)
    assert recorders[1].end().cause is EndCause.SILENT
    os.kill(process.pid, signal.SIGCONT)
    assert process.communicate(timeout=30)[0].split() == ["DISCONNECTED"]


def test_a_link_that_rank_zero_gives_up_ends_at_the_peer_too(ranks):
    (process,), links, _ = ranks(2, Security.TLS)
    links[1].fail("a job outlived its deadline")
    assert process.communicate(timeout=30)[0].split() == ["DISCONNECTED"]
