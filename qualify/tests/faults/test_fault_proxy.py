"""The proxy on real sockets: what each fault looks like from both ends."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from flare_qualify.faults.line_faults import BlackHole, Close, Cut, Flip, SlowClose, Stall
from flare_qualify.faults.proxy import Direction, FaultProxy

UP, DOWN = Direction.FROM_CALLER, Direction.TO_CALLER


@dataclass
class Ends:
    """A caller and the target that it reached through the proxy's route ``line``."""

    proxy: FaultProxy
    caller: socket.socket
    target: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    with FaultProxy() as proxy, socket.create_server(("127.0.0.1", 0)) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        proxy.open_route("line", listener, server.getsockname())
        with socket.create_connection(address) as caller:
            target, _ = server.accept()
            with target:
                caller.settimeout(10)
                target.settimeout(10)
                caller.sendall(b"hello")
                assert target.recv(100) == b"hello"
                yield Ends(proxy, caller, target)


def receive(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes and (piece := sock.recv(num_bytes - len(data))):
        data += piece
    return data


def drain(sock: socket.socket) -> None:
    while sock.recv(100):
        pass


def send_on(sock: socket.socket) -> None:
    while True:
        sock.sendall(bytes(1000))


def test_both_directions_are_carried_in_full(ends) -> None:
    data = bytes(range(256)) * 2000
    ends.caller.sendall(data[:300_000])
    assert receive(ends.target, 300_000) == data[:300_000]
    ends.target.sendall(data)
    assert receive(ends.caller, len(data)) == data
    assert ends.proxy.wait_fired(timeout=0.0) == []


def test_a_flip_hits_one_direction_alone(ends) -> None:
    ends.proxy.arm("line", UP, Flip(2, 0xFF))
    ends.caller.sendall(b"\0\0\0\0")
    assert receive(ends.target, 4) == b"\0\0\xff\0"
    ends.target.sendall(b"\0\0\0\0")
    assert receive(ends.caller, 4) == b"\0\0\0\0"
    (firing,) = ends.proxy.wait_fired(timeout=5.0)
    assert (firing.route, firing.direction, firing.what) == ("line", UP, "flipped bits 0xff of byte 2")


def test_a_reset_reaches_both_ends_as_one(ends) -> None:
    ends.proxy.arm("line", DOWN, Cut(3, Close.RESET))
    ends.target.sendall(b"abcdef")
    with pytest.raises(ConnectionResetError):
        drain(ends.caller)
    with pytest.raises(ConnectionError):
        send_on(ends.target)


def test_a_finish_looks_like_an_end_in_order(ends) -> None:
    ends.proxy.arm("line", DOWN, Cut(3, Close.FINISH))
    ends.target.sendall(b"abcdef")
    assert receive(ends.caller, 6) == b"abc"


def test_a_stall_holds_everything_until_it_is_healed(ends) -> None:
    ends.proxy.arm("line", UP, Stall())
    ends.caller.sendall(b"held")
    assert ends.proxy.wait_fired(timeout=5.0)
    ends.target.settimeout(0.1)
    with pytest.raises(TimeoutError):
        ends.target.recv(100)
    ends.target.sendall(b"the other way")
    assert receive(ends.caller, 13) == b"the other way"
    ends.proxy.heal("line")
    ends.target.settimeout(10)
    ends.caller.sendall(b" back")
    assert receive(ends.target, 9) == b"held back"


def test_a_black_hole_takes_everything_without_a_word(ends) -> None:
    ends.proxy.arm("line", UP, BlackHole())
    ends.caller.sendall(bytes(5_000_000))
    ends.target.settimeout(0.1)
    with pytest.raises(TimeoutError):
        ends.target.recv(100)


def test_an_end_in_order_is_passed_on_and_may_come_late(ends) -> None:
    ends.proxy.arm("line", UP, SlowClose(0.05))
    ends.caller.sendall(b"last words")
    ends.caller.shutdown(socket.SHUT_WR)
    assert receive(ends.target, 100) == b"last words"
    ends.target.sendall(b"farewell")
    assert receive(ends.caller, 8) == b"farewell"


def test_a_fault_armed_before_holds_for_the_next_connection_from_its_first_byte() -> None:
    with FaultProxy() as proxy, socket.create_server(("127.0.0.1", 0)) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        proxy.open_route("line", listener, server.getsockname())
        proxy.arm("line", UP, Flip(0, 1))
        with socket.create_connection(address) as caller:
            caller.sendall(b"\0")
            target, _ = server.accept()
            with target:
                assert target.recv(10) == b"\1"


def test_where_nobody_listens_the_caller_is_turned_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = gone.getsockname()
    with FaultProxy() as proxy:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        proxy.open_route("line", listener, nobody)
        with socket.create_connection(address) as caller:
            assert caller.recv(10) == b""
        assert proxy.num_connections("line") == 0


def test_closing_the_proxy_ends_every_connection(ends) -> None:
    ends.proxy.close()
    with pytest.raises(ConnectionError):
        send_on(ends.caller)
    assert ends.proxy.num_connections("line") == 0
