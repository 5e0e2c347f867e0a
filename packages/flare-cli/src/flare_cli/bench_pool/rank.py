"""The pool's side: a manager in a process of its own, and one rank's lane of shard transfers in this one.

The rank is a real one from the transport down: jobs go through :class:`flare_cache.staged.StagedTransport` to its
:class:`flare_cache.pool.shelf.PoolShelf`, digests on. Rank zero's planning is not part of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import queue
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flare_cache.host_memory import DirectPassage
from flare_cache.host_pages import HostPages
from flare_cache.jobs import Extent, Job, JobOp, JobResult, JobStatus, RecordIdentity, Section
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.outcomes import ShardedLimits
from flare_cache.pool.client import PoolClient, connect_to_pool
from flare_cache.pool.manifest import namespace_id
from flare_cache.pool.messages import POOL_PROTOCOL, Commit, Committed, Register
from flare_cache.pool.shelf import NUM_CONNECTIONS, NUM_THREADS, PoolShelf, staging_bytes
from flare_cache.pool.staging import allocate_staging
from flare_cache.staged import StagedTransport
from flare_core.errors import FlareError
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.prefix import Tier
from flare_transport import Address, Security, generate_key

__all__ = ["BenchRank", "Made", "Shape", "open_bench_rank", "running_manager"]

Made = Sequence[tuple[RecordIdentity, bytes]]
"""Records and their token ids."""

_SESSION = bytes(range(16))
_PAGE_TOKENS = 64
_SET = hashlib.sha256(b"flare bench pool").digest()


@dataclass(frozen=True, slots=True)
class Shape:
    """What is moved: ``num_records`` shards of ``num_pages`` pages of ``page_bytes``."""

    page_bytes: int
    num_pages: int
    num_records: int
    num_connections: int

    @property
    def num_bytes(self) -> int:
        """Of pages, all records together."""
        return self.page_bytes * self.num_pages * self.num_records


@dataclass(slots=True)
class BenchRank:
    """One rank with records in memory, connected to a manager."""

    shape: Shape
    pages: HostPages
    transport: StagedTransport
    client: PoolClient
    results: queue.Queue[JobResult]
    next_job: int = 1

    def store(self) -> list[tuple[RecordIdentity, bytes]]:
        """New records, of what the pages hold, in this rank's memory tier."""
        made = [_record(self.shape, number) for number in range(self.shape.num_records)]
        self._run(
            [
                Job(job_id=0, op=JobOp.STORE, tier=Tier.MEMORY, record=record, sections=self._sections(number),
                    token_ids=token_ids)
                for number, (record, token_ids) in enumerate(made)
            ]
        )  # fmt: skip
        return made

    def forget(self, made: Made) -> None:
        """Give the memory tier's records back."""
        self._run([Job(job_id=0, op=JobOp.UNLINK, tier=Tier.MEMORY, record=record) for record, _ in made])

    def put(self, made: Made) -> float:
        """Seconds until every shard is durable in the pool."""
        return self._run(
            [Job(job_id=0, op=JobOp.PUT, tier=Tier.POOL, record=record, pool_session=_SESSION) for record, _ in made]
        )

    def commit(self, made: Made) -> None:
        """Make them visible."""
        for record, token_ids in made:
            reply = self.client.request(
                Commit(record=record, extent=Extent.ROW, token_ids=token_ids), timeout_seconds=30.0
            )
            if not isinstance(reply, Committed):
                raise FlareError(f"a commit was answered with {reply}")

    def get(self, made: Made) -> float:
        """Seconds until every page holds its bytes again, verified. The pages are wiped before and compared after."""
        before = [bytes(self.pages.page(page)[:4096]) for page in range(self.pages.num_pages)]
        for page in range(self.pages.num_pages):
            self.pages.page(page)[:4096] = bytes(4096)
        seconds = self._run(
            [
                Job(job_id=0, op=JobOp.FETCH, tier=Tier.POOL, record=record, sections=self._sections(number),
                    pool_session=_SESSION)
                for number, (record, _) in enumerate(made)
            ]
        )  # fmt: skip
        if before != [bytes(self.pages.page(page)[:4096]) for page in range(self.pages.num_pages)]:
            raise FlareError("a page that came from the pool is not what was put")
        return seconds

    def _sections(self, number: int) -> tuple[Section, ...]:
        first = number * self.shape.num_pages
        return tuple(Section(index, first + index) for index in range(self.shape.num_pages))

    def _run(self, jobs: Sequence[Job]) -> float:
        """As many jobs at a time as rank zero has credits for; seconds until the last has ended."""
        waiting, running = list(reversed(jobs)), 0
        start = time.perf_counter()
        while waiting or running:
            while waiting and running < _CREDITS.get(waiting[-1].op, 8):
                job = waiting.pop()
                fields = {name: getattr(job, name) for name in job.__struct_fields__}
                self.transport.submit(Job(**{**fields, "job_id": self.next_job}))
                self.next_job += 1
                running += 1
            result = self.results.get(timeout=120)
            running -= 1
            if result.status is not JobStatus.OK:
                raise FlareError(f"a job failed: {result.reason}")
        return time.perf_counter() - start


_LIMITS = ShardedLimits()
_CREDITS = {JobOp.PUT: _LIMITS.max_pool_puts, JobOp.FETCH: _LIMITS.max_pool_fetches}


def _record(shape: Shape, number: int) -> tuple[RecordIdentity, bytes]:
    key, start_key = secrets.token_bytes(32), secrets.token_bytes(32)
    num_tokens = shape.num_pages * _PAGE_TOKENS
    identity = RecordIdentity(
        key=key, store_id=secrets.token_bytes(16), parent_key=b"", start_key=start_key, start=0, end=num_tokens,
        page_tokens=_PAGE_TOKENS, tail_tokens=0, has_row=False,
    )  # fmt: skip
    return identity, number.to_bytes(4, "little") * num_tokens


@contextlib.contextmanager
def running_manager(
    directory: Path, *, security: Security, memory: str, on_line: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[Address, bytes]]:
    """A manager's process over ``directory``; its address and key."""
    key = generate_key()
    key_file = directory / "pool.key"
    key_file.touch(mode=0o600)
    key_file.write_text(key + "\n")
    store = directory / "store"
    command = [
        sys.executable, "-m", "flare_cli", "pool", "serve", "--store", str(store), "--key-file", str(key_file),
        "--listen", "127.0.0.1:0", "--memory", memory, *(["--plaintext"] if security is Security.PLAINTEXT else []),
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None  # noqa: S101 - it was asked for
        try:
            line = ""
            for line in process.stderr:
                if "serving --pool" in line:
                    break
                on_line(line)
            if "serving --pool" not in line:
                raise FlareError(f"the manager did not start: {line}")
            yield Address("127.0.0.1", int(line.rsplit(":", 1)[1])), bytes.fromhex(key)
        finally:
            process.terminate()
            process.communicate()


@contextlib.contextmanager
def open_bench_rank(shape: Shape, address: Address, key: bytes, security: Security) -> Iterator[BenchRank]:
    """A rank of one with full pages, connected and switched on."""
    axes = (Axis("token", _PAGE_TOKENS), Axis("dim", shape.page_bytes // (4 * _PAGE_TOKENS)))
    geometry = Geometry(0, 1, _PAGE_TOKENS, (Plane("kv", "float32", axes),), 0)
    pages = HostPages.allocate(geometry, num_pages=shape.num_pages * shape.num_records)
    for page in range(pages.num_pages):
        pages.page(page)[:] = secrets.token_bytes(4096) * (shape.page_bytes // 4096)
    passage = DirectPassage(aligned=False)
    memory = MemoryShelf(geometry, _SET, passage, limit_bytes=2 * shape.num_bytes)
    num_threads = shape.num_connections + NUM_THREADS - NUM_CONNECTIONS
    shelf = PoolShelf(
        geometry=geometry,
        set_fingerprint=_SET,
        passage=passage,
        source=memory,
        staging=allocate_staging(num_threads, staging_bytes(geometry)),
        num_connections=shape.num_connections,
    )
    results: queue.Queue[JobResult] = queue.Queue()
    transport = StagedTransport(
        geometry=geometry,
        num_pages=pages.num_pages,
        num_slots=0,
        memory=pages,
        shelves={Tier.MEMORY: memory},
        on_result=results.put,
        on_fault=lambda _: None,
        pool=shelf,
        num_pool_threads=num_threads,
    )
    transport.start()
    register = Register(
        protocol=POOL_PROTOCOL, namespace=namespace_id(_SET, bytes(16)), set_fingerprint=_SET, world_size=1, rank=0,
        session=_SESSION, instance="bench", model="bench", buffers=shelf.staging.sizes,
    )  # fmt: skip
    client = connect_to_pool(address, key=key, security=security, register=register, on_lost=lambda _: None)
    shelf.turn_on(_SESSION, client)
    try:
        yield BenchRank(shape, pages, transport, client, results)
    finally:
        shelf.turn_off("the benchmark ends")
        client.close()
        transport.close(10.0)
