"""A whole group of ranks in one process, with real directories, threads and links: for tests and benchmarks.

Every token's bytes in every page depend on the rank and on all tokens up to it, and a row's on all tokens; so a wrong,
stale or foreign byte after a restore is seen. Nothing of flare's serving uses this module.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flare_cache.directory import RecordDirectory
from flare_cache.disk_shelf import DiskShelf
from flare_cache.host_memory import DirectPassage
from flare_cache.host_pages import HostPages
from flare_cache.jobs import JobResult
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.outcomes import ShardedLimits
from flare_cache.peer_service import ServiceEnd
from flare_cache.pool.setup import PoolSetup
from flare_cache.record_group import LeaderGroup, PeerGroup, RankSetup, start_leader, start_peer
from flare_cache.settings import CacheSettings
from flare_cache.staged import DEFAULT_NUM_THREADS, StagedTransport
from flare_cache.transfer import PoolPort, Shelf
from flare_core.geometry import Axis, Geometry, Plane, SetIdentity
from flare_core.keys import TokenIds, chain_keys, root_key, token_array
from flare_core.prefix import FetchFinished, PrefixQuery, Restorable, StoreEvent, StoreFinished, StoreRequest, Tier
from flare_transport.link import Link
from flare_transport.local_link import local_link

__all__ = ["RUN_ID", "GroupPlan", "LocalGroup", "LocalRank", "make_rank", "token_geometries"]

RUN_ID = hashlib.sha256(b"one run of a local group").digest()[:16]
SALT_KEY_ID = bytes(16)
_WAIT_SECONDS = 60.0


def token_geometries(
    world_size: int, *, page_tokens: int = 4, dims: Sequence[int] | None = None, row_bytes: int = 0
) -> tuple[Geometry, ...]:
    """Geometries with one plane ``[token, dim]`` of float32; ``dims`` by rank, 256 on every rank by default."""
    return tuple(
        Geometry(
            rank,
            world_size,
            page_tokens,
            (Plane("kv", "float32", (Axis("token", page_tokens), Axis("dim", dims[rank] if dims else 256))),),
            row_bytes,
        )
        for rank in range(world_size)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What a group is made of.

    Attributes:
        geometries: by rank.
        root: directory below which each rank has one; None: no disk tier.
        num_pages, num_slots: of each rank's pool.
        memory_bytes: of the memory tier, or None.
        disk_limits: by rank; a rank not named derives its own.
        settings: further arguments of :class:`CacheSettings`, for all ranks or (by rank) for one.
        limits: of the sharded transport.
        change_shelf: wraps a rank's disk shelf, to make it fail.
        num_threads: disk threads of each rank.
        pool: what a rank brings for the pool, and how its transport reaches it, given the shelf that is put from.
    """

    geometries: tuple[Geometry, ...]
    root: Path | None = None
    num_pages: int = 64
    num_slots: int = 2
    memory_bytes: int | None = None
    disk_limits: Mapping[int, int] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    rank_settings: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    limits: ShardedLimits = field(default_factory=ShardedLimits)
    change_shelf: Callable[[int, Shelf], Shelf] = lambda _, shelf: shelf
    num_threads: int = DEFAULT_NUM_THREADS
    pool: Callable[[int, Shelf], tuple[PoolSetup, PoolPort]] | None = None

    def cache_settings(self, rank: int) -> CacheSettings:
        """One rank's settings."""
        page_tokens = self.geometries[0].page_tokens
        arguments: dict[str, object] = {
            "identity": SetIdentity(bytes(32), page_tokens, "float32", "float32", "cpu", 1, self.geometries),
            "salt_key_id": SALT_KEY_ID,
            "has_disk": self.root is not None,
            "disk_limit_bytes": self.disk_limits.get(rank),
            "memory_bytes": self.memory_bytes,
            "min_tail_tokens": 0,
            **self.settings,
            **self.rank_settings.get(rank, {}),
        }
        return CacheSettings(**arguments)  # type: ignore[arg-type]


@dataclass(slots=True)
class LocalRank:
    """One rank: its pages, directory and transport, and how its service ended."""

    rank: int
    geometry: Geometry
    pages: HostPages
    directory: RecordDirectory | None
    setup: RankSetup
    peer: PeerGroup | None = None
    end: ServiceEnd | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def ended_with(self, end: ServiceEnd) -> None:
        """Listener of the peer service."""
        self.end = end
        self.ended.set()

    def token_bytes(self, token_ids: TokenIds, position: int) -> bytes:
        """What this rank's page holds for the token at ``position``."""
        page_tokens = self.geometry.page_tokens
        digest = hashlib.sha256(bytes((self.rank,)) + token_ids[: position + 1].tobytes()).digest()
        size = self.geometry.planes[0].num_bytes // page_tokens
        return hashlib.shake_128(digest).digest(size)

    def row_bytes(self, token_ids: TokenIds) -> bytes:
        """What this rank's row holds behind all of ``token_ids``."""
        seed = b"row" + bytes((self.rank,)) + token_ids.tobytes()
        return hashlib.shake_128(seed).digest(self.geometry.row_bytes)

    def write(self, token_ids: TokenIds, pages: Sequence[int], row_slot: int | None) -> None:
        """Compute ``token_ids``: fill ``pages`` and the row."""
        page_tokens = self.geometry.page_tokens
        for number, page in enumerate(pages):
            end = min((number + 1) * page_tokens, len(token_ids))
            data = b"".join(self.token_bytes(token_ids, at) for at in range(number * page_tokens, end))
            view = self.pages.page(page)
            view[:] = data + bytes(len(view) - len(data))
        if row_slot is not None:
            self.pages.row(row_slot)[: self.geometry.row_bytes] = self.row_bytes(token_ids)

    def holds(self, token_ids: TokenIds, pages: Sequence[int], row_slot: int | None) -> bool:
        """Whether ``pages``, the sequence's from its start on, hold exactly ``token_ids``, and the slot its row."""
        page_tokens = self.geometry.page_tokens
        size = self.geometry.planes[0].num_bytes // page_tokens
        for position in range(len(token_ids)):
            at = position % page_tokens * size
            found = self.pages.page(pages[position // page_tokens])[at : at + size]
            if bytes(found) != self.token_bytes(token_ids, position):
                return False
        if row_slot is None:
            return True
        return bytes(self.pages.row(row_slot)[: self.geometry.row_bytes]) == self.row_bytes(token_ids)

    def file_sizes(self) -> dict[str, int]:
        """Record files by name."""
        if self.directory is None:
            return {}
        return {path.name: path.stat().st_size for path in sorted(self.directory.path.glob("*.rec"))}


class LocalGroup:
    """A joined group; use :meth:`start`. The calling thread is the engine's."""

    def __init__(self, plan: GroupPlan, ranks: Sequence[LocalRank], leader: LeaderGroup, wake: threading.Event) -> None:
        self.plan = plan
        self.ranks = ranks
        self.leader = leader
        self.root = root_key(plan.cache_settings(0).identity.fingerprint(), b"salt")
        self._wake = wake
        self._step = 0
        self._next_page = 0
        self._seen: dict[int, StoreEvent] = {}

    @classmethod
    def start(cls, plan: GroupPlan, *, on_poison: Callable[[str], None] = lambda _: None) -> LocalGroup:
        """Bring up every rank, each peer on a thread; raises what rank zero's start raises."""
        ranks = [make_rank(plan, rank) for rank in range(len(plan.geometries))]
        wake = threading.Event()
        links: dict[int, Link] = {}
        threads: list[threading.Thread] = []
        failures: dict[int, BaseException] = {}
        for rank in ranks[1:]:
            here, there = socket.socketpair()
            links[rank.rank] = local_link(here, name=f"record link to rank {rank.rank}")
            link = local_link(there, name="record link to rank 0")
            threads.append(threading.Thread(target=_run_peer, args=(rank, link, failures), daemon=True))
            threads[-1].start()
        try:
            leader = start_leader(
                ranks[0].setup,
                links,
                run_id=RUN_ID,
                on_outcome=wake.set,
                on_poison=on_poison,
                limits=plan.limits,
                timeout_seconds=_WAIT_SECONDS,
            )
        except BaseException as error:
            for thread in threads:
                thread.join()
            for rank in ranks:
                if rank.directory is not None:
                    rank.directory.close()
            error.add_note(f"peers: {failures!r}")
            raise
        for thread in threads:
            thread.join()
        return cls(plan, ranks, leader, wake)

    def close(self) -> None:
        """End every rank in order."""
        self.leader.close(_WAIT_SECONDS)
        for rank in self.ranks:
            if rank.peer is not None:
                rank.peer.close(_WAIT_SECONDS)
            if rank.directory is not None:
                rank.directory.close()

    def finish_step(self) -> int:
        """A step ends on every rank; its number."""
        self._step += 1
        self.leader.dispatcher.step_finished(self._step)
        for rank in self.ranks:
            if rank.peer is not None:
                rank.peer.service.step_finished(self._step)
        return self._step

    def take_pages(self, count: int) -> list[int]:
        """Page ids that were not in use lately."""
        pages = [(self._next_page + number) % self.plan.num_pages for number in range(count)]
        self._next_page += count
        return pages

    def wait(self, ticket: int) -> StoreEvent:
        """The event of ``ticket``. Raises Poisoned."""
        while ticket not in self._seen:
            for event in self.leader.store.poll():
                self._seen[event.ticket] = event
            if ticket not in self._seen and not self._wake.wait(_WAIT_SECONDS):
                raise TimeoutError(f"ticket {ticket}")
            self._wake.clear()
        return self._seen.pop(ticket)

    def settle(self) -> None:
        """Wait until nothing is on its way."""
        while not self.leader.store.is_idle:
            for event in self.leader.store.poll():
                self._seen[event.ticket] = event
            self._wake.wait(0.01)
            self._wake.clear()

    def query(self, tokens: Sequence[int]) -> PrefixQuery:
        """A lookup of ``tokens`` without a device's share."""
        ids = token_array(tokens)
        return PrefixQuery(self.root, ids, chain_keys(self.root, ids, self.plan.geometries[0].page_tokens))

    def begin_store(self, tokens: Sequence[int]) -> int | None:
        """Compute ``tokens`` on every rank and store them; the ticket."""
        ids = token_array(tokens)
        page_tokens = self.plan.geometries[0].page_tokens
        keys = chain_keys(self.root, ids, page_tokens)
        pages = self.take_pages(-(-len(ids) // page_tokens))
        row_slot = 0 if self.plan.geometries[0].row_bytes else None
        for rank in self.ranks:
            rank.write(ids, pages, row_slot)
        tail = pages[len(keys)] if len(ids) % page_tokens else None
        return self.leader.store.store(
            StoreRequest(self.root, ids, keys, pages[: len(keys)], tail, row_slot, after_step=self.finish_step())
        )

    def store(self, tokens: Sequence[int]) -> StoreFinished | None:
        """Compute and store ``tokens``; None when there was nothing to store."""
        ticket = self.begin_store(tokens)
        if ticket is None:
            return None
        event = self.wait(ticket)
        if not isinstance(event, StoreFinished):
            raise AssertionError(f"a store ended with {event}")
        return event

    def lookup(self, tokens: Sequence[int]) -> Restorable:
        """What could be restored of ``tokens``."""
        return self.leader.store.lookup(self.query(tokens))

    def begin_restore(self, tokens: Sequence[int], *, after_step: int = 0) -> tuple[int, list[int]]:
        """Look ``tokens`` up and fetch what there is; the ticket and the pages."""
        query = self.query(tokens)
        page_tokens = self.plan.geometries[0].page_tokens
        restorable = self.leader.store.lookup(query)
        pages = self.take_pages(-(-restorable.num_tokens // page_tokens))
        for rank in self.ranks:
            for page in pages:
                rank.pages.page(page)[:] = bytes(rank.geometry.page_bytes)
        row_slot = 1 if self.plan.geometries[0].row_bytes else None
        ticket = self.leader.store.fetch(query, restorable, pages=pages, row_slot=row_slot, after_step=after_step)
        return ticket, pages

    def restore(self, tokens: Sequence[int]) -> FetchFinished:
        """Restore ``tokens`` and check what was restored on every rank, byte for byte."""
        ticket, pages = self.begin_restore(tokens)
        event = self.wait(ticket)
        if not isinstance(event, FetchFinished):
            raise AssertionError(f"a fetch ended with {event}")
        ids = token_array(tokens[: event.num_tokens])
        for rank in self.ranks:
            if not rank.holds(ids, pages, 1 if event.row_restored else None):
                raise AssertionError(f"rank {rank.rank} restored other bytes")
        return event

    def tiers(self) -> set[Tier]:
        """Configured tiers."""
        return set(self.leader.store.statistics().tiers)


def make_rank(plan: GroupPlan, rank: int) -> LocalRank:
    """Open one rank: its pages, directory and shelves."""
    geometry = plan.geometries[rank]
    settings = plan.cache_settings(rank)
    pages = HostPages.allocate(geometry, num_pages=plan.num_pages, num_slots=plan.num_slots)
    fingerprint = settings.identity.fingerprint()
    shelves: dict[Tier, Shelf] = {}
    directory = None
    if plan.root is not None:
        directory = RecordDirectory.open(plan.root / f"rank{rank}")
        disk = DiskShelf(directory, geometry, fingerprint, DirectPassage(aligned=False), direct=False)
        shelves[Tier.DISK] = plan.change_shelf(rank, disk)
    if plan.memory_bytes is not None:
        shelves[Tier.MEMORY] = MemoryShelf(geometry, fingerprint, DirectPassage(aligned=False), plan.memory_bytes)

    pool_setup, pool_port = (None, None) if plan.pool is None else plan.pool(rank, next(iter(shelves.values())))

    def make_transport(on_result: Callable[[JobResult], None], on_fault: Callable[[str], None]) -> StagedTransport:
        return StagedTransport(
            geometry=geometry,
            num_pages=plan.num_pages,
            num_slots=plan.num_slots,
            memory=pages,
            shelves=shelves,
            on_result=on_result,
            on_fault=on_fault,
            num_threads=plan.num_threads,
            pool=pool_port,
        )

    setup = RankSetup(settings=settings, rank=rank, directory=directory, make_transport=make_transport, pool=pool_setup)
    return LocalRank(rank, geometry, pages, directory, setup)


def _run_peer(rank: LocalRank, link: Link, failures: dict[int, BaseException]) -> None:
    try:
        rank.peer = start_peer(rank.setup, link, run_id=RUN_ID, on_end=rank.ended_with, timeout_seconds=_WAIT_SECONDS)
    except Exception as error:  # noqa: BLE001 - a thread's boundary: the starter reports it
        failures[rank.rank] = error
