"""The package from outside: its public names, what importing it brings in, and where strangers find room."""

import queue
import socket
import subprocess
import sys
import threading

import pytest

import flare_transport
from flare_transport import GreetingSettings
from flare_transport.greeting import Reception

PUBLIC_NAMES = """
FIRST_CONSUMER_CODE HEADER_BYTES HEARTBEAT Address AddressError CertificateError EndCause Frame FrameDecoder FrameType
GreetingSettings Group HeartbeatSettings KeyFileError KeyValue KeyValueError KeyValueService KeyValueTimeoutError Link
LinkEnd LinkListener LinkLost LinkOffer LinkSettings LinkState Liveness LocalProtocolError Peer PeerIdentity QueueFull
RemoteProtocolError RendezvousError RendezvousRefused RendezvousSettings Router SecondLinkError Security Session
Sighting StarExchange TransportError __version__ derive_key dial_link encode_frame generate_key key_value_over
load_key_file local_link meet open_link_listener parse_address write_key
BulkUnit ServiceListener ServiceRefused ServiceSession UnitAnswer UnitOp UnitStatus dial_bulk dial_service open_service
transfer_key
"""


def test_the_public_names_are_these():
    assert sorted(flare_transport.__all__) == sorted(PUBLIC_NAMES.split())
    assert all(hasattr(flare_transport, name) for name in flare_transport.__all__)


def test_importing_brings_in_no_heavy_module_and_no_other_part_of_flare():
    script = "import sys, flare_transport; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    roots = {name.partition(".")[0] for name in loaded}
    assert not roots & {"torch", "numpy", "cryptography", "ssl", "asyncio"}
    assert {root for root in roots if root.startswith("flare_")} == {"flare_transport"}


@pytest.fixture
def reception(closing):
    """A function that opens a reception whose greeters wait for the end of their connection.

    Returns it and `call(source)`, which connects and returns once it is being greeted.
    """
    stop, pumps = threading.Event(), []

    def start(**settings):
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        greeted = queue.Queue()

        def greet(caller):
            greeted.put(caller)
            caller.socket.recv(1)
            caller.socket.close()

        reception = Reception([listener], greet, GreetingSettings(**settings))
        closing.extend([listener, reception])

        def pump():
            while not stop.is_set():
                reception.turn(0.02)

        def call(source):
            sock = socket.create_connection(listener.getsockname(), source_address=(source, 0))
            closing.append(sock)
            assert greeted.get(timeout=20).source == source
            return sock

        pumps.append(threading.Thread(target=pump))
        pumps[-1].start()
        return reception, call

    yield start
    stop.set()
    for pump in pumps:
        pump.join()


def is_open(sock):
    sock.settimeout(0.2)
    try:
        return sock.recv(1) != b""
    except TimeoutError:
        return True


def test_a_crowded_source_loses_its_own_oldest_connection(reception):
    _, call = reception(max_pending=10, max_pending_per_source=2)
    other = call("127.0.0.2")
    first, second, third = (call("127.0.0.1") for _ in range(3))
    assert [is_open(sock) for sock in (other, first, second, third)] == [True, False, True, True]


def test_without_room_the_source_that_holds_most_loses_one(reception):
    _, call = reception(max_pending=3, max_pending_per_source=3)
    first, second = call("127.0.0.1"), call("127.0.0.1")
    other, newest = call("127.0.0.2"), call("127.0.0.3")
    assert [is_open(sock) for sock in (first, second, other, newest)] == [False, True, True, True]


def test_whoever_is_being_greeted_is_sent_away_at_the_end(closing):
    listener = socket.create_server(("127.0.0.1", 0))
    greeted, ended = threading.Event(), threading.Event()

    def greet(caller):
        with caller.socket:
            greeted.set()
            caller.socket.recv(1)
        ended.set()

    reception = Reception([listener], greet, GreetingSettings())
    closing += [listener, reception]
    with socket.create_connection(listener.getsockname()) as sock:
        while not greeted.is_set():
            reception.turn(0.05)
        reception.close()
        reception.close()
        assert ended.wait(20)
        assert not is_open(sock)


def test_a_greeter_that_raises_closes_its_connection_and_the_rest_goes_on(closing, caplog):
    listener = socket.create_server(("127.0.0.1", 0))
    raised = threading.Event()

    def greet(caller):
        raised.set()
        raise ValueError("a bug")

    reception = Reception([listener], greet, GreetingSettings())
    closing += [listener, reception]
    with socket.create_connection(listener.getsockname()) as sock:
        while not raised.is_set():
            reception.turn(0.05)
        assert not is_open(sock)
    assert "greeting a connection from 127.0.0.1 failed" in caplog.text


def test_a_connection_that_its_greeter_kept_survives_the_close_of_the_reception(closing):
    listener = socket.create_server(("127.0.0.1", 0))
    kept, go_on = threading.Event(), threading.Event()
    sockets = []

    def greet(caller):
        assert caller.keep()
        sockets.append(caller.socket)
        kept.set()
        go_on.wait(20)

    reception = Reception([listener], greet, GreetingSettings())
    closing += [listener, reception]
    with socket.create_connection(listener.getsockname()) as sock:
        while not kept.is_set():
            reception.turn(0.05)
        reception.close()
        go_on.set()
        sockets[0].sendall(b"still here")
        assert sock.recv(10) == b"still here"
        sockets[0].close()
