"""Damage to record files: each kind changes the file, and the record path finds it where the kind says."""

from __future__ import annotations

import random
import shutil

import pytest

from flare_qualify.faults.corruption import (
    DAMAGES,
    Consequence,
    damage_file,
    make_foreign_names,
    read_record,
    swap_first_pages,
)
from flare_qualify.faults.directories import immutable, removed, replaced
from flare_qualify.faults.record_trial import read_back, started_child


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Directories of two ranks with three records each."""
    root = tmp_path_factory.mktemp("stored") / "ranks"
    root.mkdir(mode=0o700)
    with started_child(root, num_records=3) as child:
        assert child.wait() == 0
        assert child.stored == [0, 1, 2]
    return root


@pytest.fixture
def root(stored, tmp_path):
    """A copy of them, without hints."""
    copy = tmp_path / "ranks"
    shutil.copytree(stored, copy)
    for hint in copy.glob("rank*/join.idx"):
        hint.unlink()
    return copy


def files(root, rank=0):
    return sorted((root / f"rank{rank}").glob("*.rec"))


def test_sound_records_are_read_back_whole(root) -> None:
    found = read_back(root, range(4))
    assert found.restored == [0, 1, 2]
    assert found.missing == [3]
    assert not found.wrong
    assert not found.partial


@pytest.mark.parametrize("kind", DAMAGES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_damaged_record_is_never_restored_whole(root, kind, rank) -> None:
    path = files(root, rank)[1]
    before, inode = path.read_bytes(), path.stat().st_ino
    damaged = damage_file(path, DAMAGES[kind], random.Random(f"{kind} {rank}"))
    assert damaged is not None
    assert path.read_bytes() == damaged.data != before
    assert path.stat().st_ino == inode
    found = read_back(root, range(3))
    assert not found.wrong
    if damaged.consequence is Consequence.HARMLESS:
        assert found.restored == [0, 1, 2]
    else:
        assert len(found.restored) == 2
    if damaged.consequence is Consequence.LEFT_ALONE:
        assert path.read_bytes() == damaged.data
    elif damaged.consequence is not Consequence.HARMLESS:
        assert not found.partial


@pytest.mark.parametrize("kind", DAMAGES)
def test_the_same_seed_damages_the_same_bytes(root, kind) -> None:
    record = read_record(files(root)[0])
    one, other = (DAMAGES[kind](record, random.Random(7)) for _ in range(2))
    assert one == other


def test_pages_that_changed_places_are_found_out(root) -> None:
    swap_first_pages(files(root, 0)[0], files(root, 0)[1])
    found = read_back(root, range(3))
    assert not found.wrong
    assert len(found.restored) == 1


def test_foreign_names_stay(root) -> None:
    names = make_foreign_names(root / "rank1")
    found = read_back(root, range(3))
    assert found.restored == [0, 1, 2]
    assert {name: (root / "rank1" / name).lstat().st_ino for name in names} == names


def test_a_replaced_directory_is_put_back(tmp_path) -> None:
    directory = tmp_path / "records"
    for by_link in (False, True):
        directory.mkdir(mode=0o700, exist_ok=True)
        (directory / "kept").write_text("kept")
        inode = directory.stat().st_ino
        with replaced(directory, by_link=by_link) as displaced:
            assert displaced.strangers() == []
            (directory / "stranger").write_text("")
            assert displaced.strangers() == ["stranger"]
            assert (displaced.moved / "kept").exists()
        assert directory.stat().st_ino == inode
        assert not directory.is_symlink()
    assert "1 files" in removed(directory)
    assert list(tmp_path.iterdir()) == []


def test_an_immutable_file_cannot_be_removed_by_anyone(needs, tmp_path) -> None:
    needs("root")
    path = tmp_path / "file"
    path.write_text("")
    with immutable(path) as evidence:
        assert "i" in evidence
        with pytest.raises(PermissionError):
            path.unlink()
    path.unlink()
