"""The record directory: private, locked, of one rank of one set, and nobody else's business."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from flare_cache.directory import RecordDirectory, temporary_name
from flare_cache.directory_lock import current_holder
from flare_cache.set_file import check_set_file, new_set_file
from flare_core.errors import UsageError
from flare_core.geometry import SetIdentity

HOLD = """
import sys
from pathlib import Path
from flare_cache.directory import RecordDirectory
directory = RecordDirectory.open(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds ``tmp_path / "records"``."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "records")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def test_a_missing_directory_is_made_private(tmp_path) -> None:
    directory = RecordDirectory.open(tmp_path / "records")
    assert (tmp_path / "records").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "records" / "LOCK").stat().st_mode & 0o777 == 0o600
    assert directory.free_bytes() > 0
    assert directory.file_system().endswith(f"/{tmp_path.stat().st_dev}")
    directory.close()


def test_records_are_readable_by_their_user_only(open_rank, new_identity) -> None:
    rank = open_rank()
    rank.store(new_identity())
    assert rank.path(new_identity()).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", [0o710, 0o701, 0o770, 0o755])
def test_a_directory_open_to_others_is_refused(tmp_path, mode) -> None:
    path = tmp_path / "records"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode 0{mode:o}; .* chmod 700 "):
        RecordDirectory.open(path)
    assert list(path.iterdir()) == []


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(UsageError, match="this process runs as 4242"):
        RecordDirectory.open(tmp_path / "records")


def test_a_symbolic_link_is_refused(tmp_path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(UsageError, match="symbolic link"):
        RecordDirectory.open(tmp_path / "link")


def test_what_is_no_directory_or_has_no_parent_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be opened as a directory"):
        RecordDirectory.open(tmp_path / "file")
    with pytest.raises(UsageError, match=r"missing does not exist"):
        RecordDirectory.open(tmp_path / "missing" / "records")
    with pytest.raises(UsageError, match="cannot be created: Not a directory"):
        RecordDirectory.open(tmp_path / "file" / "records")


def test_a_directory_in_use_names_its_holder(tmp_path, holder) -> None:
    with pytest.raises(UsageError, match=rf"in use by process {holder.pid} on ") as caught:
        RecordDirectory.open(tmp_path / "records", lock_timeout_seconds=0.0)
    assert "directory of its own" in str(caught.value)
    fd = os.open(tmp_path / "records", os.O_RDONLY)
    assert current_holder(fd).pid == holder.pid
    os.close(fd)


def test_a_directory_is_free_when_its_holder_was_killed(tmp_path, holder) -> None:
    holder.send_signal(signal.SIGKILL)
    RecordDirectory.open(tmp_path / "records", lock_timeout_seconds=15.0).close()
    fd = os.open(tmp_path / "records", os.O_RDONLY)
    assert current_holder(fd) is None
    os.close(fd)


def test_a_lock_without_a_name_in_it_is_still_a_lock(tmp_path, holder) -> None:
    (tmp_path / "records" / "LOCK").write_text("scribble")
    with pytest.raises(UsageError, match="in use by another process"):
        RecordDirectory.open(tmp_path / "records", lock_timeout_seconds=0.0)
    fd = os.open(tmp_path / "records", os.O_RDONLY)
    assert str(current_holder(fd)) == "process 0 on an unknown host"
    os.close(fd)


def test_a_directory_never_locked_has_no_holder(tmp_path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    assert current_holder(fd) is None
    os.close(fd)


def test_temporaries_of_a_killed_store_are_swept_and_others_kept(tmp_path) -> None:
    path = tmp_path / "records"
    path.mkdir(mode=0o700)
    (path / temporary_name(bytes(32), bytes(16))).write_bytes(b"half a record")
    (path / "set.json.tmp").write_bytes(b"half a set")
    (path / "join.idx.tmp").write_bytes(b"half a hint")
    (path / "mine.tmp").write_bytes(b"not flare's")
    RecordDirectory.open(path).close()
    assert sorted(entry.name for entry in path.iterdir()) == ["LOCK", "mine.tmp"]


def test_a_temporary_that_cannot_be_removed_is_an_error(tmp_path) -> None:
    path = tmp_path / "records"
    path.mkdir(mode=0o700)
    (path / temporary_name(bytes(32), bytes(16))).mkdir()
    with pytest.raises(UsageError, match="cannot be removed"):
        RecordDirectory.open(path)


def test_nothing_is_charged_twice(tmp_path) -> None:
    directory = RecordDirectory.open(tmp_path / "records")
    directory.charge("a", 10)
    directory.charge_all({"a": 7, "b": 5})
    directory.charge_all({"b": 6})
    assert directory.charged_bytes == 13
    assert directory.charge("a", 0) == 7
    assert directory.remove("b") == 6
    assert directory.charged_bytes == 0
    directory.close()


@pytest.fixture
def identity(new_geometry) -> SetIdentity:
    geometries = (new_geometry(0), new_geometry(1))
    return SetIdentity(bytes(32), 4, "float32", "float32", "cpu", 1, geometries)


def set_file(identity, rank=0, **changes):
    content = new_set_file(identity, rank, set_id=bytes(range(16)), salt_key_id=bytes(16))
    return msgspec.structs.replace(content, **changes)


def test_set_json_is_written_once_and_readable_by_people(tmp_path, identity) -> None:
    directory = RecordDirectory.open(tmp_path / "records")
    assert directory.read_set() is None
    directory.adopt(set_file(identity))
    assert directory.read_set() == set_file(identity)
    check_set_file(directory.read_set(), set_file(identity), "here")
    text = (tmp_path / "records" / "set.json").read_text()
    assert json.loads(text)["set_id"] == bytes(range(16)).hex()
    assert len(text.splitlines()) > 10
    assert sorted(path.name for path in (tmp_path / "records").iterdir()) == ["LOCK", "set.json"]
    directory.close()


def test_a_set_json_that_cannot_be_written_is_an_error(tmp_path, identity, monkeypatch) -> None:
    directory = RecordDirectory.open(tmp_path / "records")

    def fail(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UsageError, match=r"set\.json cannot be written: No space left"):
        directory.adopt(set_file(identity))
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: 3)
    with pytest.raises(UsageError, match=r"set\.json cannot be written"):
        directory.adopt(set_file(identity))
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["LOCK"]
    directory.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is damaged"),
        (b"{}", "is damaged"),
        (b'{"set_id": 3', "is damaged"),
        (b"\xff\x00", "is damaged"),
        (
            b'{"set_id":"4\x20g1","set_fingerprint":"","rank":0,"world_size":1,"salt_key_id":"","fields":{}}',
            "is damaged",
        ),
    ],
)
def test_a_damaged_set_json_is_refused(tmp_path, content, words) -> None:
    directory = RecordDirectory.open(tmp_path / "records")
    (tmp_path / "records" / "set.json").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        directory.read_set()
    directory.close()


def test_a_set_json_that_is_a_link_or_newer_is_refused(tmp_path, identity) -> None:
    directory = RecordDirectory.open(tmp_path / "records")
    path = tmp_path / "records" / "set.json"
    directory.adopt(set_file(identity, format=2))
    with pytest.raises(UsageError, match="has format 2, this version reads 1"):
        directory.read_set()
    path.unlink()
    path.symlink_to("/etc/hostname")
    with pytest.raises(UsageError, match="cannot be opened"):
        directory.read_set()
    directory.close()


def test_a_directory_of_another_run_names_every_field_with_both_values(identity, new_geometry) -> None:
    other_model = SetIdentity(b"\x01" * 32, 4, "float32", "float32", "cpu", 1, identity.geometries)
    with pytest.raises(UsageError) as caught:
        check_set_file(set_file(other_model), set_file(identity), "/records")
    message = str(caught.value)
    assert f"model is {'01' * 32}, this run has {'00' * 32}" in message
    assert "rank is" not in message
    assert "another directory" in message

    bigger = SetIdentity(bytes(32), 4, "float32", "float32", "cpu", 1, (*identity.geometries, new_geometry(2, 3)))
    with pytest.raises(UsageError, match="world size is 3, this run has 2"):
        check_set_file(set_file(bigger), set_file(identity), "/records")
    with pytest.raises(UsageError, match="rank is 1, this run has 0"):
        check_set_file(set_file(identity, 1), set_file(identity), "/records")


def test_another_salt_key_is_refused_and_the_remedy_is_the_key(identity) -> None:
    with pytest.raises(UsageError, match=r"salt key id is 05.*, this run has 00.*: give the key file"):
        check_set_file(set_file(identity, salt_key_id="05" * 16), set_file(identity), "/records")


def test_the_set_id_is_left_to_the_join(identity) -> None:
    check_set_file(set_file(identity, set_id="00"), set_file(identity), "/records")


def test_a_holder_that_leaves_in_time_is_waited_for(tmp_path, holder, monkeypatch) -> None:
    def leave(seconds: float) -> None:
        holder.kill()
        holder.wait()

    monkeypatch.setattr(time, "sleep", leave)
    RecordDirectory.open(tmp_path / "records", lock_timeout_seconds=15.0).close()
