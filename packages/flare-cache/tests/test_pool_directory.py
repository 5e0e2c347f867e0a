"""A pool's directory: private, one manager's, nothing half-written, no byte in another file."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from flare_cache.host_memory import aligned_buffer
from flare_cache.pool.local_storage import open_local_storage
from flare_cache.pool.storage import PoolStorage

MIB = 1 << 20


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


def test_files_of_a_directory_are_private_and_what_a_dead_manager_left_is_removed(tmp_path) -> None:
    root = tmp_path / "pool"
    storage = open_local_storage(root)
    put(storage, "v1/a/shards/x", b"x" * 4096)
    storage.put_if_absent("v1/a/manifests/x", b"m")
    storage.begin("v1/a/shards/y", 4096)
    assert len(list((root / "tmp").iterdir())) == 1
    storage.close()
    modes = {path.relative_to(root).as_posix(): path.stat().st_mode & 0o777 for path in root.rglob("*")}
    assert {mode for name, mode in modes.items() if (root / name).is_dir()} == {0o700}
    assert {mode for name, mode in modes.items() if not (root / name).is_dir()} == {0o600}
    again = open_local_storage(root)
    assert not list((root / "tmp").iterdir())
    assert names(again) == {"v1/a/shards/x", "v1/a/manifests/x"}
    again.close()


@pytest.mark.parametrize("name", ["../x", "v1//x", "v1/../x", "", "/etc/x", "v1/\0"])
def test_no_name_leads_out_of_the_directory(tmp_path, name) -> None:
    storage = open_local_storage(tmp_path / "pool")
    for act in (storage.put_if_absent, storage.begin):
        with pytest.raises(ValueError, match="no object name"):
            act(name, b"" if act == storage.put_if_absent else 0)
    storage.close()


def test_a_symbolic_link_in_the_directory_is_not_followed(tmp_path) -> None:
    storage = open_local_storage(tmp_path / "pool")
    put(storage, "v1/a", b"x")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (tmp_path / "pool/v1/link").symlink_to(secret)
    with pytest.raises(OSError, match="symbolic"):
        read(storage, "v1/link", 0, 6)
    storage.close()


def test_after_a_failed_sync_nothing_is_stored_and_what_is_there_is_read(tmp_path, monkeypatch) -> None:
    storage = open_local_storage(tmp_path / "pool")
    put(storage, "v1/kept", b"x" * 4096)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            put(storage, "v1/lost", b"x" * 4096)
    for attempt in (lambda: put(storage, "v1/more", b"x"), lambda: storage.put_if_absent("v1/m", b"x")):
        with pytest.raises(OSError, match="nothing is stored until the next start"):
            attempt()
    assert names(storage) == {"v1/kept"}
    assert not list(Path(storage.root, "tmp").iterdir())
    assert read(storage, "v1/kept", 0, 1) == b"x"
    storage.close()


def test_an_upload_given_up_while_a_connection_writes_touches_no_other_file(tmp_path) -> None:
    """The descriptor of a file that was closed is the next file's: a late writer must not have it."""
    storage = open_local_storage(tmp_path / "pool")
    upload = storage.begin("v1/a", 64 * MIB)
    is_ended = threading.Event()
    data = in_blocks(b"a" * 4096)
    faults: list[OSError] = []

    def write() -> None:
        at = 0
        try:
            while True:
                upload.write(at % (64 * MIB), data)
                at += 4096
        except OSError as error:
            faults.append(error)

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    upload.abort()
    others = [storage.begin(f"v1/{number}", 4096) for number in range(20)]
    is_ended.set()
    for writer in writers:
        writer.join()
    assert [error.strerror for error in faults] == ["given up while it was received"] * 2
    for number, other in enumerate(others):
        view = in_blocks(bytes([number]) * 4096)
        other.write(0, view)
        other.commit(view)
    assert [read(storage, f"v1/{number}", 0, 4096) for number in range(20)] == [bytes([n]) * 4096 for n in range(20)]
    storage.close()
