"""Real groups of ``flare run`` processes over the oracle model, each rank with its own directory and log."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from flare_cache.pool.core_words import PoolLimits
from flare_cache.pool.local_storage import open_local_storage
from flare_cache.pool.server import PoolServer, ServerSettings
from flare_core.testing.oracle_config import OracleConfig, write_oracle_model
from flare_transport import Address, Security

START_SECONDS = 60.0
POOL_KEY = "a5" * 32


def free_port() -> int:
    """A port that was free a moment ago, and that the kernel gives to no outgoing connection meanwhile."""
    while True:
        port = 10_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass
class Ranks:
    """A group of rank processes; ``start`` waits until the API answers."""

    model: Path | None
    root: Path
    world_size: int = 1
    options: Sequence[str] = ()
    rank_options: dict[int, Sequence[str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    disk: bool = True
    port: int = field(default_factory=free_port)
    rendezvous: int = field(default_factory=free_port)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def directory(self, rank: int) -> Path:
        return self.root / f"rank{rank}"

    def log(self, rank: int) -> str:
        path = self.root / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def pool(self, query: str = "") -> dict[str, Any]:
        """What ``/v1/cluster`` says of the pool."""
        return httpx.get(f"{self.url}/v1/cluster{query}", timeout=20).json()["cache"]["pool"]

    def launch(self, ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.world_size) if ranks is None else ranks:
            self.launch_one(rank)

    def launch_one(self, rank: int, *options: str, log: str | None = None) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "flare_cli", "run", "--port", str(self.port)]
        command += [] if self.model is None else [str(self.model)]
        if self.world_size > 1:
            key = self.root / "cluster.key"
            if not key.exists():
                key.touch(mode=0o600)
                key.write_text("5a" * 32 + "\n")
            command += ["--rank", str(rank), "--world-size", str(self.world_size), "--key-file", str(key)]
            command += ["--rendezvous", f"127.0.0.1:{self.rendezvous}"]
        if self.disk:
            command += ["--prefix-cache-disk", str(self.directory(rank)), "--prefix-cache-min-tail", "0"]
        command += [*self.options, *self.rank_options.get(rank, ()), *options]
        with (self.root / (log or f"rank{rank}.log")).open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | self.environment,
            )
        self.processes[rank if log is None else 1000 + len(self.processes)] = process
        return process

    def start(self) -> Ranks:
        self.launch()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for rank, process in self.processes.items():
                assert process.poll() is None, f"rank {rank} exited with {process.returncode}\n{self.log(rank)}"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.02)
        raise AssertionError("\n".join(self.log(rank) for rank in self.processes))

    def wait(self, seconds: float = 30.0) -> dict[int, int]:
        """Exit codes by rank, once all have ended."""
        return {rank: process.wait(seconds) for rank, process in self.processes.items()}

    def stop(self) -> dict[int, int]:
        self.processes[0].send_signal(signal.SIGTERM)
        codes = self.wait()
        self.processes.clear()
        return codes

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def worker_pid(self) -> int:
        """Of rank zero's worker process."""
        children = Path(f"/proc/{self.processes[0].pid}/task/{self.processes[0].pid}/children").read_text().split()
        return int(children[0])

    def post(self, path: str, body: object, **options: object) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60, **options)

    def complete(self, prompt: object, *, max_tokens: int = 8, **fields: object) -> dict:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | fields
        response = self.post("/v1/completions", body)
        assert response.status_code == 200, response.text
        return response.json()

    def cached(self, prompt: object, **fields: object) -> tuple[str, dict[str, int]]:
        """The text, and tokens restored by tier (those with any)."""
        answer = self.complete(prompt, **fields)
        tiers = answer["usage"]["flare"]["cached_tokens"]
        return answer["choices"][0]["text"], {tier: count for tier, count in tiers.items() if count}

    def cluster(self) -> dict:
        return httpx.get(f"{self.url}/v1/cluster", timeout=10).json()

    def record_names(self, rank: int) -> set[str]:
        return {path.name for path in self.directory(rank).glob("*.rec")}


@pytest.fixture
def make_ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*, config: OracleConfig | None = None, model: Path | None = None, **options: object) -> Ranks:
        root = tmp_path / f"group{len(made)}"
        root.mkdir()
        ranks = Ranks(model or write_oracle_model(tmp_path / "model", config), root, **options)
        made.append(ranks)
        return ranks

    yield make
    for ranks in made:
        ranks.close()


class Manager:
    """A manager in this process over a directory; started anew on the same port."""

    def __init__(self, root: Path, security: Security) -> None:
        self.root = root
        self.security = security
        self.port = 0
        self.key_file = root.with_suffix(".key")
        self.key_file.touch(mode=0o600)
        self.key_file.write_text(POOL_KEY + "\n")
        self.server: PoolServer | None = None

    def start(self) -> None:
        settings = ServerSettings(
            address=Address("127.0.0.1", self.port),
            key=bytes.fromhex(POOL_KEY),
            security=self.security,
            name="test",
            limits=PoolLimits(),
            memory_bytes=1 << 20,
            place=str(self.root),
        )
        self.storage = open_local_storage(self.root)
        self.server = PoolServer(settings, self.storage)
        self.server.start()
        self.port = self.server.port

    def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            self.storage.close()
        self.server = None

    @property
    def options(self) -> tuple[str, ...]:
        """Of a rank that uses it; the oracle is so quick that restores would seldom be worth it."""
        return "--pool", self.url, "--pool-key-file", str(self.key_file), "--pool-restore", "always"

    @property
    def url(self) -> str:
        return f"{'selenes' if self.security is Security.TLS else 'selene'}://127.0.0.1:{self.port}"


@pytest.fixture
def new_manager(tmp_path: Path) -> Iterator[Callable[..., Manager]]:
    made: list[Manager] = []

    def make(security: Security = Security.TLS) -> Manager:
        manager = Manager(tmp_path / "pool", security)
        manager.start()
        made.append(manager)
        return manager

    yield make
    for manager in made:
        manager.stop()
