"""The pool's manager: what it takes from strangers and from ranks that have proven the pool's key."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator

import msgspec

from flare_cache.pool.core import PoolCore
from flare_cache.pool.core_words import Answer, LandShard, PoolLimits, PutManifest
from flare_cache.pool.messages import Refused, RefusedReason, decode_request, encode_request
from flare_cache.pool.shard_check import check_shard
from flare_cache.record import RecordError
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require
from flare_qualify.fuzz.targets.messages import odd_message
from flare_qualify.fuzz.targets.pool_samples import MANIFEST, REQUESTS
from flare_transport import BulkUnit, RemoteProtocolError, Security, ServiceSession, UnitAnswer, encode_frame
from flare_transport.bulk_unit import ANSWER_BYTES, UNIT_BYTES
from flare_transport.frame_types import SERVICE_HELLO, SERVICE_PROOF, SERVICE_REFUSE
from flare_transport.service_handshake import ServiceHandshake, ServiceTerms
from flare_transport.service_messages import BulkAccept, BulkHello, ServiceHello

__all__ = ["POOL", "SERVICE"]

_KEY = hashlib.sha256(b"the pool's key, which the attacker does not have").digest()
_SESSION = b"session of a link"


def _service(data: bytes) -> None:
    """A stranger speaks to the handshake, and to the codecs of bulk connections."""
    choices = Choices(data)
    terms = ServiceTerms(_KEY, Security.PLAINTEXT, bytes(32), None)
    machine = ServiceHandshake(terms, session_id=bytes(16), epoch=bytes(16))
    for _ in range(6):
        if choices.is_spent or machine.outcome is not None:
            break
        way = choices.integer(0, 4)
        if way == 0:
            versions = (choices.integer(0, 2), choices.integer(0, 3))
            hello = ServiceHello(versions, choices.pick(tuple(Security)), choices.take(32).ljust(32, b"n"), b"")
            message = encode_frame(SERVICE_HELLO, hello.encode())
        elif way == 1:
            message = encode_frame(SERVICE_PROOF, choices.take(32).ljust(32, b"p"))
        elif way == 2:
            frame_type = choices.pick((SERVICE_HELLO, SERVICE_PROOF, SERVICE_REFUSE))
            message = encode_frame(frame_type, choices.piece(frame_type.max_bytes))
        else:
            message = choices.piece(100)
        try:
            answer = machine.receive(message)
        except RemoteProtocolError:
            break
        require(len(answer) < 5000, f"a stranger was answered {len(answer)} bytes")
    require(not isinstance(machine.outcome, ServiceSession), "a stranger without the key has a session")
    rest = choices.rest()
    for decode, size in ((BulkUnit.decode, UNIT_BYTES), (UnitAnswer.decode, ANSWER_BYTES)):
        with contextlib.suppress(RemoteProtocolError):
            decode(rest[:size].ljust(size, b"\0"))
    for codec in (BulkHello, BulkAccept):
        with contextlib.suppress(RemoteProtocolError):
            codec.decode(rest)


def _pool(data: bytes) -> None:
    """A rank asks whatever it likes; storage does what the core wants, or fails."""
    choices = Choices(data)
    transfers = itertools.count()
    core = PoolCore(
        epoch=bytes(16),
        name="m",
        limits=PoolLimits(limit_bytes=1 << 20, quota_bytes=1 << 19, grace_seconds=1.0),
        draw_transfer=lambda: next(transfers).to_bytes(16, "big"),
    )
    landed: set[int] = set()
    effects = list(core.handle(_SESSION, 0, REQUESTS[0], 0.0))
    for number in range(1, 20):
        if choices.is_spent:
            break
        sample = choices.pick(REQUESTS)
        message = encode_request(number, sample)
        if choices.flag():
            message = msgspec.msgpack.encode([number, msgspec.Raw(odd_message(sample, choices))])
        try:
            _, request = decode_request(message)
        except msgspec.DecodeError:
            continue
        effects += core.handle(_SESSION, number, request, float(number))
        while effects:
            effect = effects.pop()
            if isinstance(effect, LandShard):
                landed.add(effect.transfer.rank)
                effects += core.landed(effect.transfer, effect.number, Refused(reason=RefusedReason.STORAGE))
            elif isinstance(effect, PutManifest):
                require(False, "a record was committed whose shards were never accepted")
            elif isinstance(effect, Answer):
                require(effect.session == _SESSION, "an answer went to another session")
    core.ended(_SESSION, 100.0)
    require(not core.num_transfers, "transfers outlive their session")
    held = [found.reserved_bytes for found in core.space.namespaces.values()]
    require(not any(held), f"bytes stay reserved: {held}")
    require(not core.num_bytes, "something is visible that nobody put")
    with contextlib.suppress(RecordError):
        check_shard(
            memoryview(choices.rest()),
            record=MANIFEST.record,
            extent=MANIFEST.extent,
            set_fingerprint=bytes(32),
            rank=0,
            world_size=1,
        )


@contextlib.contextmanager
def _open_service() -> Iterator[Execute]:
    yield _service


@contextlib.contextmanager
def _open_pool() -> Iterator[Execute]:
    yield _pool


def _service_seeds() -> Iterator[bytes]:
    yield bytes((0, 1, 1, 0)) + bytes(32) + bytes((1,)) + b"p" * 32
    yield bytes((2, 0, 40)) + bytes(range(60))
    yield bytes((3, 90)) + bytes(range(100))


def _pool_seeds() -> Iterator[bytes]:
    yield bytes(each for number in range(len(REQUESTS)) for each in (number, 0))
    yield bytes((4, 0, 5, 0, 7, 0, 6, 0))
    yield bytes((4, 1, 0, 1, 3, 0, 2, 9, 9)) * 3
    yield b"\4\0\5\0" + b"FLAREREC" + bytes(200)


SERVICE = Target(
    "service",
    "Without its key a service gives nobody a session, and bytes are taken or refused by name.",
    _open_service,
    _service_seeds,
    words=(b"flre\1\17", b"flre\1\21"),
)
POOL = Target(
    "pool",
    "Whatever a rank asks, the manager's core answers, takes back what it lent, and shows nothing that was not put.",
    _open_pool,
    _pool_seeds,
    words=(b"\x91" * 8, b"\xc4\x20", b"\xcf" + b"\xff" * 8),
)
