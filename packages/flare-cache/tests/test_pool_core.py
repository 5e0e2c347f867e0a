"""The manager's machine under any order of puts, commits and failures: what is visible is whole, nothing is left."""

from __future__ import annotations

import itertools
from collections import deque

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.core import PoolCore
from flare_cache.pool.core_words import (
    Answer,
    CheckShard,
    CoreEffect,
    DeleteObjects,
    LandShard,
    PoolLimits,
    PutManifest,
    ShardFacts,
)
from flare_cache.pool.manifest import Manifest, decode_manifest, manifest_name, shard_name
from flare_cache.pool.messages import (
    POOL_PROTOCOL,
    Commit,
    Committed,
    Done,
    GetStart,
    Grant,
    PutFinish,
    PutStart,
    Refused,
    RefusedReason,
    Register,
    Reply,
    ReportBad,
    Request,
)

NAMESPACE, WORLD, SHARD_BYTES = bytes(32), 2, 8192
RECORD_BYTES = WORLD * SHARD_BYTES
PAGE_TOKENS = 4


def make_record(name: str, parent: RecordIdentity | None = None) -> RecordIdentity:
    start = parent.end if parent is not None else 0
    return RecordIdentity(
        key=name.encode() * 32, store_id=b"1" * 16, parent_key=parent.key if parent is not None else b"",
        start_key=parent.key if parent is not None else name.upper().encode() * 32, start=start,
        end=start + PAGE_TOKENS, page_tokens=PAGE_TOKENS, tail_tokens=0, has_row=False,
    )  # fmt: skip


def token_ids(record: RecordIdentity) -> bytes:
    return record.key[:1] * (4 * PAGE_TOKENS)


A = make_record("a")
B = make_record("b", A)
RECORDS = (A, B, make_record("c", B), make_record("d"), make_record("e", A))


class Manager:
    """A core, its storage as a set of names, and work for storage that is done in its order, when the test says so."""

    def __init__(self, **limits) -> None:
        numbers = itertools.count(1)
        self.core = PoolCore(
            epoch=bytes(16), name="test", limits=PoolLimits(**limits),
            draw_transfer=lambda: next(numbers).to_bytes(16, "little"),
        )  # fmt: skip
        self.now = 0.0
        self.storage: dict[str, bytes] = {}
        self.work: deque[CoreEffect] = deque()
        self.replies: dict[int, Reply] = {}
        self.numbers = itertools.count(1)
        for rank in range(WORLD):
            self.register(rank)

    def register(self, rank: int) -> None:
        register = Register(
            protocol=POOL_PROTOCOL, namespace=NAMESPACE, set_fingerprint=bytes(32), world_size=WORLD, rank=rank,
            session=bytes(16), instance="test", model="m", buffers=(),
        )  # fmt: skip
        self.ask(rank, register)

    def ask(self, rank: int, request: Request) -> Reply | None:
        number = next(self.numbers)
        self.take(self.core.handle(bytes([rank]) * 16, number, request, self.now))
        return self.replies.get(number)

    def take(self, effects: list[CoreEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Answer):
                self.replies[effect.number] = effect.reply
            else:
                self.work.append(effect)

    def do_work(self, count: int = 1_000_000) -> None:
        while self.work and count:
            count -= 1
            match effect := self.work.popleft():
                case LandShard(transfer, number):
                    self.storage[transfer.name] = b""
                    self.take(self.core.landed(transfer, number, facts_of(transfer.record)))
                case PutManifest(namespace, key, name, data):
                    found = self.storage.get(name)
                    outcome = None if found is None else decode_manifest(found)
                    self.storage.setdefault(name, data)
                    self.take(self.core.manifest_put(namespace, key, outcome, self.now))
                case CheckShard():
                    self.take(self.core.checked(effect, "bad", self.now))
                case DeleteObjects(names):
                    for name in names:
                        self.storage.pop(name, None)
                    self.take(self.core.deleted(names))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.core.tick(self.now))

    def put(self, rank: int, record: RecordIdentity) -> Reply | None:
        start = PutStart(record=record, extent=Extent.ROW, rank=rank, num_bytes=SHARD_BYTES)
        granted = self.ask(rank, start)
        if not isinstance(granted, Grant):
            return granted
        transfer = self.core.transfer(bytes([rank]) * 16, granted.transfer, self.now)
        assert transfer is not None
        assert transfer.claim(0, SHARD_BYTES)
        transfer.num_received += SHARD_BYTES
        return self.ask(rank, PutFinish(transfer=granted.transfer))

    def commit(self, record: RecordIdentity) -> Reply | None:
        return self.ask(0, Commit(record=record, extent=Extent.ROW, token_ids=token_ids(record)))

    def share(self, record: RecordIdentity) -> Reply | None:
        for rank in range(WORLD):
            self.put(rank, record)
        self.do_work()
        number = next(self.numbers)
        message = Commit(record=record, extent=Extent.ROW, token_ids=token_ids(record))
        self.take(self.core.handle(bytes(16), number, message, self.now))
        self.do_work()
        return self.replies[number]

    @property
    def visible(self) -> dict[bytes, Manifest]:
        return self.core.namespaces[NAMESPACE].manifests if NAMESPACE in self.core.namespaces else {}


def facts_of(record: RecordIdentity | None) -> ShardFacts:
    assert record is not None
    return ShardFacts(record, Extent.ROW, token_ids(record), record.store_id * 2, SHARD_BYTES, bytes(32))


def objects_of(manifest: Manifest) -> set[str]:
    record = manifest.record
    shards = {shard_name(NAMESPACE, record.key, record.store_id, rank) for rank in range(WORLD)}
    return shards | {manifest_name(NAMESPACE, record.key)}


def check(manager: Manager, limit_bytes: int) -> None:
    going = {name for effect in manager.work if isinstance(effect, DeleteObjects) for name in effect.names}
    for manifest in manager.visible.values():
        assert objects_of(manifest) <= manager.storage.keys() - going
        assert not manifest.record.parent_key or manifest.record.parent_key in manager.visible
    assert manager.core.num_bytes == sum(manifest.num_bytes for manifest in manager.visible.values())
    assert sum(found.held_bytes for found in manager.core.space.namespaces.values()) <= limit_bytes


records = st.builds(
    lambda record, store: msgspec.structs.replace(record, store_id=store * 16),
    st.sampled_from(RECORDS),
    st.sampled_from([b"1", b"1", b"1", b"2"]),
)
steps = st.one_of(
    st.tuples(st.just("put"), st.integers(0, WORLD - 1), records),
    *[st.tuples(st.just("share"), st.just(0), records)] * 4,
    st.tuples(st.just("commit"), st.just(0), records),
    st.tuples(st.just("use"), st.integers(0, WORLD - 1), records),
    st.tuples(st.just("bad"), st.integers(0, WORLD - 1), records),
    st.tuples(st.just("lose"), st.integers(0, WORLD - 1), records),
    st.tuples(st.just("work"), st.integers(1, 3), records),
    st.tuples(st.just("wait"), st.sampled_from([20, 160, 310]), records),
)


def take_step(manager: Manager, step: tuple[str, int, RecordIdentity]) -> None:
    match step:
        case "put", rank, record:
            manager.put(rank, record)
        case "share", _, record:
            manager.share(record)
        case "commit", _, record:
            manager.commit(record)
        case "use", rank, record:
            manager.ask(rank, GetStart(key=record.key, store_id=record.store_id, rank=rank))
        case "bad", rank, record:
            manager.ask(rank, ReportBad(key=record.key, store_id=record.store_id, rank=rank, detail=""))
        case "lose", rank, _:
            manager.take(manager.core.ended(bytes([rank]) * 16, manager.now))
            manager.register(rank)
        case "work", count, _:
            manager.do_work(count)
        case "wait", seconds, _:
            manager.pass_time(seconds)


@settings(max_examples=200, deadline=None)
@given(st.lists(steps, min_size=10, max_size=60))
def test_what_is_visible_is_whole_and_within_the_limit_and_at_rest_nothing_else_is_stored(taken) -> None:
    limit_bytes = 3 * RECORD_BYTES
    manager = Manager(limit_bytes=limit_bytes)
    for step in taken:
        take_step(manager, step)
        check(manager, limit_bytes)
    manager.do_work()
    for _ in range(4):
        manager.pass_time(500.0)
        manager.do_work()
        check(manager, limit_bytes)
    assert set(manager.storage) == set().union(*(objects_of(manifest) for manifest in manager.visible.values()))
    assert manager.core.num_transfers == 0


def test_a_store_that_came_second_is_told_the_first_and_its_shards_go_after_the_grace() -> None:
    manager = Manager(grace_seconds=300.0)
    second = msgspec.structs.replace(A, store_id=b"2" * 16)
    for record in (A, second):
        for rank in range(WORLD):
            manager.put(rank, record)
    manager.do_work()
    manager.ask(0, Commit(record=A, extent=Extent.ROW, token_ids=token_ids(A)))
    # Another manager of the same storage is first.
    manager.storage[manifest_name(NAMESPACE, A.key)] = encode_second(second)
    manager.do_work()
    assert manager.visible[A.key].record == second
    manager.pass_time(299.0)
    manager.do_work()
    names = {shard_name(NAMESPACE, A.key, A.store_id, rank) for rank in range(WORLD)}
    assert names <= manager.storage.keys()
    manager.pass_time(2.0)
    manager.do_work()
    assert not names & manager.storage.keys()
    assert objects_of(manager.visible[A.key]) <= manager.storage.keys()


def encode_second(record: RecordIdentity) -> bytes:
    manager = Manager()
    assert manager.share(record) == Committed(store_id=record.store_id)
    return manager.storage[manifest_name(NAMESPACE, record.key)]


def test_shards_that_nobody_commits_are_deleted_when_a_commit_can_no_more_be_expected() -> None:
    manager = Manager(grace_seconds=300.0, transfer_seconds=130.0)
    for rank in range(WORLD):
        manager.put(rank, A)
    manager.do_work()
    for seconds in (1.0, 428.0):
        manager.pass_time(seconds)
        manager.do_work()
        assert len(manager.storage) == WORLD
    assert manager.core.space.namespaces[NAMESPACE].held_bytes == RECORD_BYTES
    manager.pass_time(10.0)
    manager.do_work()
    assert manager.storage == {}
    assert manager.core.space.namespaces[NAMESPACE].held_bytes == 0
    reply = manager.commit(A)
    assert isinstance(reply, Refused)
    assert reply.reason is RefusedReason.INCOMPLETE


def test_room_for_a_record_is_not_made_by_evicting_what_it_extends() -> None:
    manager = Manager(limit_bytes=2 * RECORD_BYTES)
    other = RECORDS[3]
    manager.share(A)
    manager.share(other)
    assert manager.share(B) == Committed(store_id=B.store_id)
    assert set(manager.visible) == {A.key, B.key}


def test_a_put_is_acknowledged_only_when_storage_has_it() -> None:
    manager = Manager()
    assert manager.put(0, A) is None
    manager.do_work()
    assert Done(num_bytes=SHARD_BYTES) in manager.replies.values()


def test_a_transfer_ends_with_its_time_and_with_its_link() -> None:
    manager = Manager(transfer_seconds=130.0)
    manager.share(A)
    get = GetStart(key=A.key, store_id=A.store_id, rank=0)
    first, second = manager.ask(0, get), manager.ask(0, get)
    assert isinstance(first, Grant)
    assert isinstance(second, Grant)
    session = bytes(16)
    assert manager.core.transfer(session, first.transfer, 129.0) is not None
    assert manager.core.transfer(session, first.transfer, 130.0) is None
    assert manager.core.transfer(b"other" * 3 + b"!", first.transfer, 1.0) is None
    manager.take(manager.core.ended(session, 1.0))
    assert manager.core.transfer(session, second.transfer, 1.0) is None
    assert manager.core.num_transfers == 0


def test_a_shard_that_comes_again_while_its_record_is_committed_stays() -> None:
    manager = Manager()
    for rank in range(WORLD):
        manager.put(rank, A)
    manager.do_work()
    manager.commit(A)
    manager.put(0, A)
    manager.do_work()
    for _ in range(3):
        manager.pass_time(500.0)
        manager.do_work()
    assert set(manager.storage) == objects_of(manager.visible[A.key])


def test_a_commit_whose_parent_goes_meanwhile_is_refused_and_leaves_nothing() -> None:
    manager = Manager()
    manager.share(A)
    for rank in range(WORLD):
        manager.put(rank, B)
    manager.do_work()
    manager.commit(B)
    manager.take(manager.core.condemn(NAMESPACE, A.key, manager.now))
    manager.do_work()
    assert any(isinstance(reply, Refused) and "has gone" in reply.detail for reply in manager.replies.values())
    for _ in range(2):
        manager.pass_time(500.0)
        manager.do_work()
    assert manager.storage == {}
