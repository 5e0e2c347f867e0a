"""What every storage promises the pool's manager: a directory, obstore's stores, and a server that speaks S3."""

from __future__ import annotations

import os
import threading

import pytest
from obstore.store import LocalStore, MemoryStore

from flare_cache.host_memory import aligned_buffer
from flare_cache.pool.local_storage import open_local_storage
from flare_cache.pool.object_storage import ObjectStorage
from flare_cache.pool.storage import PoolStorage, StoredObject

MIB = 1 << 20


@pytest.fixture(params=["directory", "obstore-directory", "obstore-memory", "s3"])
def storage(request, tmp_path):
    match request.param:
        case "directory":
            opened = open_local_storage(tmp_path / "pool")
            yield opened
            opened.close()
        case "s3":
            yield ObjectStorage(request.getfixturevalue("open_bucket")())
        case kind:
            local = kind == "obstore-directory"
            yield ObjectStorage(LocalStore(tmp_path / "pool", mkdir=True) if local else MemoryStore())


def put(storage: PoolStorage, name: str, data: bytes, piece: int = MIB) -> None:
    upload = storage.begin(name, len(data))
    view = in_blocks(data)
    for at in range(0, len(data), piece):
        upload.write(at, view[at : at + piece])
    upload.commit(view)


def in_blocks(data: bytes) -> memoryview:
    view = aligned_buffer(len(data))
    view[:] = data
    return view


def read(storage: PoolStorage, name: str, offset: int, length: int) -> bytes:
    view = memoryview(bytearray(length))
    storage.read(name, offset, view)
    return bytes(view)


def names(storage: PoolStorage, prefix: str = "v1/") -> set[str]:
    return {found.name for found in storage.list(prefix)}


def test_an_object_is_read_back_range_by_range(storage) -> None:
    data = os.urandom(6 * MIB)
    put(storage, "v1/a/shards/x", data)
    assert read(storage, "v1/a/shards/x", 0, len(data)) == data
    assert read(storage, "v1/a/shards/x", 4097, 100_000) == data[4097:104_097]


def test_an_object_put_again_is_the_last_one(storage) -> None:
    put(storage, "v1/a", b"1" * 4096)
    put(storage, "v1/a", b"22")
    assert read(storage, "v1/a", 0, 2) == b"22"
    assert [found.num_bytes for found in storage.list("v1/")] == [2]


def test_an_object_that_is_given_up_leaves_nothing(storage) -> None:
    upload = storage.begin("v1/a", 8192)
    upload.write(0, in_blocks(bytes(4096)))
    upload.abort()
    assert names(storage) == set()
    with pytest.raises(FileNotFoundError):
        read(storage, "v1/a", 0, 1)


def test_of_many_that_put_if_absent_one_does(storage) -> None:
    answers: list[tuple[bool, bytes]] = []
    start = threading.Barrier(4)

    def offer(data: bytes) -> None:
        start.wait()
        answers.append((storage.put_if_absent("v1/a/manifests/k", data), data))

    threads = [threading.Thread(target=offer, args=(bytes([number]) * 10,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [data for was_absent, data in answers if was_absent]
    assert len(answers) == 4
    assert winners == [read(storage, "v1/a/manifests/k", 0, 10)]
    assert not storage.put_if_absent("v1/a/manifests/k", b"later")


def test_a_listing_has_what_begins_with_the_prefix_and_nothing_else(storage) -> None:
    for name in ("v1/a/manifests/k1", "v1/a/manifests/k12", "v1/a/shards/k1.0", "v1/b/manifests/k1", "other"):
        put(storage, name, b"x" * 4096)
    assert names(storage) == {"v1/a/manifests/k1", "v1/a/manifests/k12", "v1/a/shards/k1.0", "v1/b/manifests/k1"}
    assert names(storage, "v1/a/manifests/") == {"v1/a/manifests/k1", "v1/a/manifests/k12"}
    assert names(storage, "v1/a/manifests/k12") == {"v1/a/manifests/k12"}
    assert names(storage, "v1/a/manifests/k1") == {"v1/a/manifests/k1", "v1/a/manifests/k12"}
    assert names(storage, "v1/c/") == set()
    found = next(storage.list("v1/b/"))
    assert isinstance(found, StoredObject)
    assert found.num_bytes == 4096
    assert found.modified_at > 1e9


def test_what_is_deleted_is_gone_and_what_is_not_there_is_no_fault(storage) -> None:
    put(storage, "v1/a", b"x")
    put(storage, "v1/b", b"x")
    storage.delete(["v1/a", "v1/never"])
    storage.delete(["v1/a"])
    assert names(storage) == {"v1/b"}


def test_a_read_beyond_the_end_is_a_fault_in_one_line_that_names_the_object(storage) -> None:
    put(storage, "v1/a", b"x" * 4096)
    for offset in (4000, 9000):
        with pytest.raises(OSError, match="v1/a") as caught:
            read(storage, "v1/a", offset, 200)
        assert "\n" not in str(caught.value)
