"""Namespaces, and a peer behind a proxy: what is made, what parts the ranks, and that nothing stays behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flare_qualify.faults.commands import run
from flare_qualify.faults.line_faults import Flip
from flare_qualify.faults.names import NETNS_ROOT, sweep_leftovers
from flare_qualify.faults.namespaces import listen_in, network, opened_namespace
from flare_qualify.faults.proxied_peer import CONTROL, RECORDS, listening_ports, proxied_peer
from flare_qualify.faults.proxy import Direction

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("listening", flush=True)
while True:
    connection, _ = server.accept()
    while data := connection.recv(1000):
        connection.sendall(data)
"""


def own_names() -> set[str]:
    found = {path.name for path in NETNS_ROOT.iterdir()} if NETNS_ROOT.is_dir() else set()
    found |= {path.name for path in Path("/sys/class/net").iterdir()}
    return {name for name in found if name.startswith(f"fq{os.getpid()}x")}


def test_a_socket_made_inside_is_reached_from_inside_alone(needs) -> None:
    needs("root", "netns")
    with opened_namespace() as namespace, listen_in(namespace, "127.0.0.1", 4321) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", 4321))
        dial = "import socket; socket.create_connection(('127.0.0.1', 4321)).sendall(b'hello')"
        with subprocess.Popen([*namespace.prefix, sys.executable, "-c", dial]):
            connection, _ = listener.accept()
            with connection:
                assert connection.recv(100) == b"hello"
    assert own_names() == set()


@pytest.fixture
def echo(needs):
    """A network of two with a process that echoes at rank 1, and a connection to it."""
    needs("root", "netns")
    with network(2) as net:
        command = [*net.namespaces[1].prefix, sys.executable, "-c", ECHO, net.address(1), "4321"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout.readline() == b"listening\n"
                with socket.create_connection((net.address(1), 4321), timeout=10) as connection:
                    connection.sendall(b"ping")
                    assert connection.recv(10) == b"ping"
                    yield net, connection
            finally:
                process.kill()
    assert own_names() == set()


@pytest.mark.parametrize("how", ["pull", "to the peer", "to rank zero"])
def test_a_parted_network_takes_bytes_and_answers_nothing(echo, how) -> None:
    net, connection = echo
    if how == "pull":
        assert "DOWN" in net.pull(1)
    elif how == "to the peer":
        assert net.lose_packets(sender=0, receiver=1)
    else:
        assert net.lose_packets(sender=1, receiver=0)
    connection.sendall(b"lost")
    connection.settimeout(0.3)
    with pytest.raises(TimeoutError):
        connection.recv(10)
    if how == "pull":
        net.plug(1)
    elif how == "to the peer":
        net.find_packets(sender=0, receiver=1)
    else:
        net.find_packets(sender=1, receiver=0)
    connection.settimeout(20)
    assert connection.recv(10) == b"lost"


def test_a_slow_network_makes_packets_wait(echo) -> None:
    net, connection = echo
    net.slow_down(1, bits_per_second=400_000)
    connection.sendall(bytes(20_000))
    received = 0
    while received < 20_000:
        received += len(connection.recv(1000))
    assert net.num_delayed(1) > 0


def test_every_connection_of_a_proxied_peer_passes_the_proxy(needs) -> None:
    """Rank zero here is this process: it listens at the rendezvous, and somewhere else before it says where."""
    needs("root", "netns")
    with socket.create_server(("127.0.0.1", 0)) as rendezvous, socket.socket() as second:
        second.bind(("127.0.0.1", 0))
        port = second.getsockname()[1]
        own = os.getsid(0)
        with proxied_peer(lambda: listening_ports(own) & {port, rendezvous.getsockname()[1]}) as peer:
            peer.meet_at(rendezvous.getsockname()[1])
            peer.proxy.arm(RECORDS, Direction.FROM_CALLER, Flip(0, 1))
            dial = (
                "import socket, sys\n"
                "control = socket.create_connection(('127.0.0.1', int(sys.argv[1])))\n"
                "port = int(control.recv(100))\n"
                "socket.create_connection(('127.0.0.1', port)).sendall(b'\\0')\n"
            )
            command = [*peer.prefix, sys.executable, "-c", dial, str(rendezvous.getsockname()[1])]
            with subprocess.Popen(command):
                control, source = rendezvous.accept()
                with control:
                    second.listen()
                    control.sendall(str(port).encode())
                    records, other_source = second.accept()
                    with records:
                        assert source[0] == other_source[0]
                        assert records.recv(1) == b"\1"
                        assert peer.proxy.num_connections(CONTROL) == 1
                        assert peer.proxy.num_connections(RECORDS) == 1
    assert own_names() == set()


def test_what_a_killed_run_left_is_swept(needs) -> None:
    needs("root", "netns")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    name = f"fq{process.pid}x0001"
    run("ip", "netns", "add", name)
    assert name in sweep_leftovers()
    assert not (NETNS_ROOT / name).exists()
