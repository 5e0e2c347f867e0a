"""The key-value service: torch's semantics, waiting across ranks, bounds, and what a lost link does."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare_transport import (
    EndCause,
    KeyValueError,
    KeyValueService,
    KeyValueTimeoutError,
    Link,
    LinkLost,
    LocalProtocolError,
    Router,
    encode_frame,
    key_value_over,
)
from flare_transport.frame_types import KEY_VALUE_REPLY, KEY_VALUE_REQUEST
from flare_transport.key_value_table import (
    MAX_WAITING,
    AddRequest,
    CancelRequest,
    CheckRequest,
    GetRequest,
    KeyValueTable,
    Reply,
    SetRequest,
    WaitRequest,
)


@pytest.fixture
def clients(gather_group):
    """Key-value clients of three ranks, rank zero first, over real links."""
    groups = gather_group(3)
    service = KeyValueService()
    found = [service.client()]
    for peer in groups[0].peers.values():
        router = Router()
        service.attach(router)
        peer.link.start(router)
    for group in groups[1:]:
        router = Router()
        found.append(key_value_over(group.peers[0].link, router))
        group.peers[0].link.start(router)
    return found


def test_what_one_rank_sets_every_rank_gets(clients):
    for index, client in enumerate(clients):
        client.set(f"key {index}", bytes([index]) * 1000)
    for client in clients:
        assert [client.get(f"key {index}") for index in range(3)] == [bytes([i]) * 1000 for i in range(3)]
        assert client.num_keys() == 3
    clients[1].set("key 0", b"again")
    assert clients[0].get("key 0") == b"again"


def test_a_get_waits_on_every_rank_until_the_key_is_set(clients):
    with ThreadPoolExecutor(3) as ranks:
        waiting = [ranks.submit(client.get, "late") for client in clients]
        clients[2].set("late", b"here")
        assert [each.result(timeout=20) for each in waiting] == [b"here"] * 3


def test_a_wait_ends_when_the_last_key_is_set(clients):
    with ThreadPoolExecutor(1) as ranks:
        waiting = ranks.submit(clients[1].wait, ["a", "b", "c"])
        for key in "abc":
            assert not waiting.done()
            clients[0].set(key, b"")
        waiting.result(timeout=20)
    clients[2].wait(["a", "c"])


def test_counters_add_up_over_all_ranks(clients):
    with ThreadPoolExecutor(3) as ranks:
        list(ranks.map(lambda client: [client.add("counter", 2) for _ in range(20)], clients))
    assert clients[0].add("counter", -120) == 0
    assert clients[1].get("counter") == b"0"


def test_compare_set_sets_only_what_is_as_expected(clients):
    zero, one, two = clients
    assert one.compare_set("key", b"something", b"new") == b"something"
    assert not zero.check(["key"])
    assert two.compare_set("key", b"", b"first") == b"first"
    assert zero.compare_set("key", b"other", b"second") == b"first"
    assert one.compare_set("key", b"first", b"second") == b"second"
    assert zero.get("key") == b"second"


def test_check_and_delete_tell_whether_a_key_is_set(clients):
    clients[0].set("key", b"value")
    assert clients[1].check(["key"])
    assert not clients[2].check(["key", "other"])
    assert clients[2].delete("key")
    assert not clients[1].delete("key")
    assert clients[0].num_keys() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_key_that_is_not_set_in_time_is_named_and_later_calls_go_on(clients, rank):
    with pytest.raises(KeyValueTimeoutError, match=r"key 'never' was not set within 0\.05 s"):
        clients[rank].get("never", timeout_seconds=0.05)
    with pytest.raises(TimeoutError, match="not every key of never, ever was set"):
        clients[rank].wait(["never", "ever"], timeout_seconds=0.05)
    clients[rank].set("never", b"after all")
    assert clients[rank].get("never") == b"after all"


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_table_refuses_is_an_error_of_that_call_alone(clients, rank):
    client = clients[rank]
    client.set("text", b"no number")
    with pytest.raises(KeyValueError, match="'text' does not hold a number"):
        client.add("text", 1)
    with pytest.raises(KeyValueError, match="would leave 64 bits"):
        client.set("big", b"9223372036854775807") or client.add("big", 1)
    with pytest.raises((KeyValueError, LocalProtocolError), match=r"1048576 bytes|1049600 bytes"):
        client.set("huge", bytes(2 << 20))
    assert client.add("counter", 1) == 1


def test_a_value_of_a_mebibyte_travels(clients):
    value = bytes((1 << 20) - 3)
    clients[1].set("big", value)
    assert clients[2].get("big") == clients[0].get("big") == value


def test_a_lost_link_fails_waiting_and_later_calls_and_rank_zero_forgets_them(gather_group):
    zero, one = gather_group(2)
    service, gone = KeyValueService(), threading.Event()
    router, peer_router = Router(), Router()
    service.attach(router)
    router.on_end(lambda link, end: gone.set())
    zero.peers[1].link.start(router)
    client = key_value_over(one.peers[0].link, peer_router)
    one.peers[0].link.start(peer_router)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.get, "never")
        while not service._table._waiting:
            continue
        zero.peers[1].link.fail("cut")
        with pytest.raises(LinkLost):
            waiting.result(timeout=20)
    with pytest.raises(LinkLost):
        client.set("key", b"")
    assert gone.wait(20)
    assert not service._table._waiting
    service.client().set("never", b"goes nowhere")


@pytest.fixture
def bare_peer(tcp_pair, closing):
    """A function that starts a link with this router; returns the other end's bare socket and the end's future."""

    def start(prepare):
        near, far = tcp_pair()
        router, ends, done = Router(), [], threading.Event()
        link = Link(near, name="near")
        closing.append(link)
        made = prepare(link, router)
        router.on_end(lambda link, end: (ends.append(end), done.set()))
        link.start(router)

        def end():
            assert done.wait(20)
            return ends[0]

        return far, end, made

    return start


@pytest.mark.parametrize("garbage", [b"", b"\xff", msgspec.msgpack.encode(["set", 1]), msgspec.msgpack.encode([1, 2])])
def test_a_request_that_cannot_be_read_ends_the_link(bare_peer, garbage):
    far, end, _ = bare_peer(lambda link, router: KeyValueService().attach(router))
    far.sendall(encode_frame(KEY_VALUE_REQUEST, garbage))
    assert end().cause is EndCause.PROTOCOL


def test_a_reply_that_cannot_be_read_ends_the_link(bare_peer):
    far, end, _ = bare_peer(key_value_over)
    far.sendall(encode_frame(KEY_VALUE_REPLY, b"\xff"))
    assert end().cause is EndCause.PROTOCOL


def test_a_reply_of_the_wrong_kind_is_a_fault_and_an_unasked_one_is_dropped(bare_peer):
    far, _, client = bare_peer(key_value_over)
    far.sendall(encode_frame(KEY_VALUE_REPLY, msgspec.msgpack.encode(Reply(77, b"unasked"))))
    far.sendall(b"")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.num_keys)
        far.recv(4096)
        far.sendall(encode_frame(KEY_VALUE_REPLY, msgspec.msgpack.encode(Reply(0, b"not a number"))))
        with pytest.raises(Exception, match="answered with bytes, not int"):
            asked.result(timeout=20)


def test_a_peer_that_does_not_read_its_replies_is_failed(bare_peer):
    far, end, _service = bare_peer(lambda link, router: KeyValueService().attach(router))
    set_it = encode_frame(KEY_VALUE_REQUEST, msgspec.msgpack.encode(SetRequest(0, "big", bytes(1 << 19))))
    get_it = encode_frame(KEY_VALUE_REQUEST, msgspec.msgpack.encode(GetRequest(1, "big")))
    with contextlib.suppress(OSError):
        far.sendall(set_it + get_it * 10_000)
    assert "does not read its key-value replies" in end().detail


def test_a_cancelled_wait_is_forgotten_and_only_it():
    table = KeyValueTable()
    for client in "ab":
        assert table.handle(client, GetRequest(1, "key")) == []
        assert table.handle(client, WaitRequest(2, ["key", "other"])) == []
    assert table.handle("a", CancelRequest(1)) == []
    table.drop("b")
    assert table.handle("c", SetRequest(9, "key", b"value")) == [("c", Reply(9))]
    assert table.handle("c", SetRequest(10, "other", b"")) == [("c", Reply(10)), ("a", Reply(2))]


def test_the_table_and_its_waiters_are_bounded():
    table = KeyValueTable(max_bytes=10)
    assert table.handle(0, SetRequest(0, "key", b"1234567")) == [(0, Reply(0))]
    ((_, refused),) = table.handle(0, SetRequest(1, "x", b""))
    assert "full (10 bytes)" in refused.fault
    assert table.handle(0, SetRequest(2, "key", b"1")) == [(0, Reply(2))]
    assert table.handle(0, SetRequest(3, "x", b"")) == [(0, Reply(3))]
    for number in range(MAX_WAITING):
        assert table.handle(0, GetRequest(number, "never")) == []
    ((_, refused),) = table.handle(0, GetRequest(-1, "never"))
    assert "wait already" in refused.fault


keys = st.sampled_from("abc")
requests = st.one_of(
    st.builds(SetRequest, st.just(0), keys, st.binary(max_size=5)),
    st.builds(AddRequest, st.just(0), keys, st.integers(-5, 5)),
    st.builds(CheckRequest, st.just(0), st.lists(keys, max_size=3)),
)


@given(st.lists(requests, max_size=30))
def test_the_table_behaves_as_a_dictionary(sequence):
    table, model = KeyValueTable(), {}
    for request in sequence:
        ((_, reply),) = table.handle(0, request)
        match request:
            case SetRequest(key=key, value=value):
                model[key] = value
            case AddRequest(key=key, amount=amount):
                try:
                    model[key] = b"%d" % (int(model.get(key, b"0")) + amount)
                except ValueError:
                    assert "does not hold a number" in reply.fault
                else:
                    assert reply.answer == int(model[key])
            case CheckRequest(keys=checked):
                assert reply.answer == all(key in model for key in checked)
    assert {key: table.handle(0, GetRequest(0, key))[0][1].answer for key in model} == model
