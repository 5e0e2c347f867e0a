"""A thousand connections that say nothing: few are kept, and the right peer joins all the same."""

import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from flare_transport import Address, GreetingSettings, RendezvousSettings, dial_link, meet, open_link_listener

NUM_STRANGERS = 1000
# Longer than the test: no stranger goes because its time is up.
PATIENT = GreetingSettings(deadline_seconds=120.0)


@pytest.fixture(autouse=True)
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4 * NUM_STRANGERS:
        pytest.skip(f"{hard} descriptors are too few for {NUM_STRANGERS} connections with both their ends")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def num_greeted() -> int:
    return sum(thread.name == "flare greeting" for thread in threading.enumerate())


def connect(address: Address, source: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address.host, address.port), timeout=60, source_address=(source, 0))
        except ConnectionRefusedError:
            continue


@contextmanager
def strangers(address: Address, sources):
    """`NUM_STRANGERS` silent connections, from these addresses in turn."""
    with ExitStack() as stack:
        for number in range(NUM_STRANGERS):
            stack.enter_context(connect(address, sources[number % len(sources)]))
        yield


@contextmanager
def few_at_once():
    """However many connect meanwhile, few are greeted at any time: those that are kept, and some on their way out."""
    peak, over = [0], threading.Event()

    def watch():
        while not over.wait(0.002):
            peak[0] = max(peak[0], num_greeted())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    assert 0 < peak[0] < NUM_STRANGERS // 4


@pytest.mark.parametrize("num_sources", [1, 100])
def test_the_right_peer_joins_past_a_thousand_silent_connections(num_sources, loopback_address, closing):
    place = RendezvousSettings(loopback_address, 0, 2, bytes(32), deadline_seconds=120, greeting=PATIENT)
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(meet, place)
        sources = [f"127.0.1.{number + 1}" for number in range(num_sources)]
        with few_at_once(), strangers(loopback_address, sources):
            began = time.monotonic()
            closing.append(meet(replace(place, rank=1)))
            print(f"joined within {time.monotonic() - began:.3f} s")
            closing.append(zero.result())


@pytest.mark.parametrize("source", ["127.0.0.1", "127.0.1.1"], ids=["the peer's host", "another host"])
def test_the_right_peer_opens_its_second_connection_past_a_thousand_silent_ones(source, gather_group, closing):
    groups = gather_group(2)
    listener = open_link_listener(groups[0].session, [groups[0].peers[1].identity], purpose="record", settings=PATIENT)
    offer = listener.offers[1]
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, timeout_seconds=120)
        with few_at_once(), strangers(Address(offer.host, offer.port), [source]):
            began = time.monotonic()
            closing.append(dial_link(groups[1].session, groups[1].peers[0].identity, offer, timeout_seconds=60))
            print(f"joined within {time.monotonic() - began:.3f} s")
            closing.extend(accepted.result().values())


def test_silent_connections_that_keep_coming_do_not_push_the_right_peer_out(gather_group, closing):
    groups = gather_group(2)
    listener = open_link_listener(groups[0].session, [groups[0].peers[1].identity], purpose="record", settings=PATIENT)
    offer = listener.offers[1]
    begun, over = threading.Event(), threading.Event()

    def flood() -> int:
        with ExitStack() as stack:
            count = 0
            while count < NUM_STRANGERS and not over.is_set():
                try:
                    stack.enter_context(socket.create_connection((offer.host, offer.port), timeout=60))
                except OSError:  # the right peer has come, and the listener is closed
                    break
                count += 1
                if count == 2 * PATIENT.max_pending_per_source:
                    begun.set()
            begun.set()
            over.wait(60)
        return count

    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(listener.accept, timeout_seconds=120)
        flooding = pool.submit(flood)
        assert begun.wait(60)
        closing.append(dial_link(groups[1].session, groups[1].peers[0].identity, offer, timeout_seconds=60))
        closing.extend(accepted.result().values())
        over.set()
        assert flooding.result() > PATIENT.max_pending_per_source
