"""What the join makes durable where records are to outlive a power cut."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flare_cache.disk_shelf import Durability
from flare_cache.testing import GroupPlan, LocalGroup, token_geometries


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """Paths of every descriptor that was synced."""
    paths: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        paths.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    return paths


@pytest.mark.parametrize("durability", Durability)
def test_a_join_makes_the_names_that_it_keeps_durable(tmp_path, synced, durability) -> None:
    plan = GroupPlan(geometries=token_geometries(2), root=tmp_path, settings={"durability": durability})
    group = LocalGroup.start(plan)
    group.store(range(8))
    group.close()
    # As a process leaves it that dies between giving a record its name and syncing the directory.
    synced.clear()
    group = LocalGroup.start(plan)
    try:
        directories = sorted(path for path in synced if path.startswith(str(tmp_path / "rank")))
        assert directories == (
            [str(tmp_path / "rank0"), str(tmp_path / "rank1")] if durability is Durability.POWER else []
        )
        assert group.lookup(range(9)).num_tokens == 8
    finally:
        group.close()
