"""What the pool's scenarios and benchmarks are made of: the manager's process, ratios, and the simulated manager."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from flare_cache.jobs import Extent, RecordIdentity
from flare_cache.pool.messages import Commit, Grant, Has, Presence, PutFinish, PutStart, Refused, RefusedReason
from flare_cli.bench_pool.rank import Shape
from flare_core.errors import UsageError
from flare_core.geometry import Axis, Geometry, Plane, SetIdentity
from flare_qualify.bench_pool_restore import Cell
from flare_qualify.client import get_json
from flare_qualify.group import GroupError
from flare_qualify.peers_pool import Rates, mooncake_side, ratio
from flare_qualify.pool_process import PoolProcess, pool_of, wait_flushed, wait_pool
from flare_qualify.sim.loop import EventLoop
from flare_qualify.sim.pool_manager import SimConnection, SimManager
from flare_qualify.workloads.prompts import prompt_of
from flare_qualify.workloads.requests import ask


def _manager() -> SimManager:
    axes = (Axis("token", 4), Axis("dim", 8))
    geometries = tuple(Geometry(rank, 2, 4, (Plane("kv", "uint8", axes),), 0) for rank in range(2))
    identity = SetIdentity(bytes(32), 4, "uint8", "uint8", "cpu", 1, geometries)
    manager = SimManager(loop=EventLoop(), rng=Random(1), identity=identity, latency_seconds=0.001, counts=Counter())
    manager.start()
    return manager


def _connect(manager: SimManager, rank: int, lost: list[str] | None = None) -> SimConnection:
    on_lost = (lost if lost is not None else []).append
    return manager.connect(rank, bytes(16), after=lambda _, __, call: call(), on_lost=on_lost)


RECORD = RecordIdentity(
    key=bytes(32),
    store_id=bytes(16),
    parent_key=b"",
    start_key=bytes(32),
    start=0,
    end=4,
    page_tokens=4,
    tail_tokens=0,
    has_row=False,
)


def test_the_simulated_manager_makes_nothing_visible_whose_shards_are_missing():
    connection = _connect(_manager(), 0)
    reply = connection.ask(Commit(record=RECORD, extent=Extent.ROW, token_ids=bytes(16)))
    assert isinstance(reply, Refused)
    assert reply.reason is RefusedReason.INCOMPLETE
    assert connection.ask(Has(keys=RECORD.key)) == Presence(present=b"\0")


def test_the_simulated_manager_takes_no_shard_that_is_another_records():
    manager = _manager()
    connection = _connect(manager, 0)
    grant = connection.ask(PutStart(record=RECORD, extent=Extent.ROW, rank=0, num_bytes=4096))
    assert isinstance(grant, Grant)
    transfer = manager.transfer(connection, grant.transfer)
    assert transfer is not None
    transfer.num_received = 4096
    manager.received[grant.transfer] = bytes(4096)
    reply = connection.ask(PutFinish(transfer=grant.transfer))
    assert isinstance(reply, Refused)
    assert reply.reason is RefusedReason.CORRUPT
    assert not manager.storage.objects


def test_a_simulated_manager_that_was_started_anew_has_another_epoch_and_loses_its_connections():
    manager = _manager()
    lost: list[str] = []
    connection = _connect(manager, 0, lost)
    manager.crash()
    with pytest.raises(ConnectionRefusedError):
        _connect(manager, 0)
    manager.start()
    assert lost == ["the manager is gone"]
    assert manager.epoch != connection.epoch


def test_ratios_of_restores_compare_one_round():
    cell = Cell("m", 10, 8.0, {"disk": [1.0, 4.0], "pool, TCP": [2.0, 4.0]})
    assert cell.speedup("disk") == pytest.approx(3.2)
    assert cell.of_disk("pool, TCP") == 1.5


def test_ratios_to_a_peer_compare_one_round():
    assert ratio([1.0, 2.0, 1.0], [2.0, 4.0, 5.0]) == 2.0
    rates = Rates(10, (2.0,), (5.0,))
    assert (rates.put, rates.get) == (5.0, 2.0)


def test_an_interpreter_without_mooncake_is_named(tmp_path):
    with (
        pytest.raises(UsageError, match="has no Mooncake"),
        mooncake_side(tmp_path / "bin" / "python", Shape(1 << 20, 1, 1, 1), 1),
    ):
        pytest.fail("it started")


@pytest.mark.parametrize("is_tls", [True, False])
def test_a_group_of_processes_uses_a_manager_that_is_killed_and_started_again(make_group, model, tmp_path, is_tls):
    pool = PoolProcess(tmp_path / "pool", is_tls=is_tls)
    pool.start()
    try:
        group = make_group(model, 1, *pool.group_options())
        group.start()
        assert wait_pool(group, "on") is not None
        ask(group.url, prompt_of(1), logprobs=1)
        assert wait_flushed(group)
        assert pool.num_manifests() == pool_of(group)["records_put"] > 0
        pool.kill()
        assert wait_pool(group, "off") is not None
        pool.start()
        assert wait_pool(group, "on", sessions=2) is not None
        assert get_json(group.url, "/health")
        assert pool.ask("status", pool.url, "--key-file", str(pool.key_file)).returncode == 0
        group.stop()
        assert pool.stop() == 0
    finally:
        pool.kill()


def test_a_manager_that_cannot_start_is_told_with_its_log(tmp_path):
    pool = PoolProcess(tmp_path / "pool", options=("--limit", "much"))
    with pytest.raises(GroupError, match="much"):
        pool.start()
