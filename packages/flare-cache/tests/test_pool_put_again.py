"""A record that goes from the pool and comes back within the grace of its shards keeps them."""

from itertools import count

from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.core import PoolCore
from flare_cache.pool.core_words import DeleteObjects, PoolLimits
from flare_cache.pool.manifest import Manifest, Shard, shard_name
from flare_cache.pool.messages import POOL_PROTOCOL, Grant, PutStart, Refused, RefusedReason, Register

NAMESPACE, KEY, STORE = bytes(32), b"k" * 32, b"s" * 16
RECORD = RecordIdentity(
    key=KEY,
    store_id=STORE,
    parent_key=b"",
    start_key=b"r" * 32,
    start=0,
    end=4,
    page_tokens=4,
    tail_tokens=0,
    has_row=False,
)
MANIFEST = Manifest(
    record=RECORD,
    extent=Extent.ROW,
    token_ids=bytes(16),
    shards=(Shard(8192, bytes(32)), Shard(8192, bytes(32))),
    created_at=0.0,
)


def _core() -> PoolCore:
    numbers = count(1)
    core = PoolCore(
        epoch=bytes(16),
        name="test",
        limits=PoolLimits(grace_seconds=5.0),
        draw_transfer=lambda: next(numbers).to_bytes(16, "little"),
    )
    core.adopt(NAMESPACE, [MANIFEST])
    for rank in range(2):
        register = Register(
            protocol=POOL_PROTOCOL,
            namespace=NAMESPACE,
            set_fingerprint=bytes(32),
            world_size=2,
            rank=rank,
            session=bytes(16),
            instance="one",
            model="m",
            buffers=(),
        )
        core.handle(bytes([rank]) * 16, 1, register, 0.0)
    return core


def _deleted(effects) -> set[str]:
    return {name for effect in effects if isinstance(effect, DeleteObjects) for name in effect.names}


def test_shards_go_when_their_grace_is_over():
    core = _core()
    core.condemn(NAMESPACE, KEY, 0.0)
    assert _deleted(core.tick(4.9)) == set()
    assert _deleted(core.tick(5.0)) == {shard_name(NAMESPACE, KEY, STORE, rank) for rank in range(2)}


def test_a_shard_that_is_put_again_within_the_grace_is_not_deleted_at_its_end():
    core = _core()
    core.condemn(NAMESPACE, KEY, 0.0)
    put = PutStart(record=RECORD, extent=Extent.ROW, rank=0, num_bytes=8192)
    effects = core.handle(bytes([0]) * 16, 2, put, 1.0)
    assert isinstance(effects[0].reply, Grant)
    assert _deleted(core.tick(5.0)) == {shard_name(NAMESPACE, KEY, STORE, 1)}


def test_a_shard_is_not_put_again_while_what_was_there_is_being_deleted():
    core = _core()
    core.condemn(NAMESPACE, KEY, 0.0)
    names = [name for effect in core.tick(5.0) if isinstance(effect, DeleteObjects) for name in effect.names]
    put = PutStart(record=RECORD, extent=Extent.ROW, rank=0, num_bytes=8192)
    refusal = core.handle(bytes([0]) * 16, 2, put, 6.0)[0].reply
    assert isinstance(refusal, Refused)
    assert refusal.reason is RefusedReason.BUSY
    core.deleted(names)
    assert isinstance(core.handle(bytes([0]) * 16, 3, put, 7.0)[0].reply, Grant)
