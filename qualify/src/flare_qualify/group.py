"""A group of rank processes on this host: one ``flare run`` a rank, each with its own record directory and log.

Knows how to start, stop, kill and restart them and where their files lie; knows nothing of what is asked of them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flare_qualify.client import ServerError, get_json

__all__ = ["Group", "GroupError", "RecordFile", "free_port"]


class GroupError(Exception):
    """A rank did not start or did not stop; the message ends with the tail of its log."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True, order=True)
class RecordFile:
    """One record file of one rank: its name and size in bytes."""

    name: str
    num_bytes: int


@dataclass(slots=True)
class Group:
    """Rank processes over one model.

    Attributes:
        model: directory of a model or package.
        world_size: number of ranks; one process each.
        root: run directory: ``rank0/`` … hold the records, ``rank0.log`` … the logs.
        options: flags for every rank. rank_options: flags for one rank, by rank.
        disk: give every rank a record directory.
        environment: variables added to every rank's.
    """

    model: Path
    world_size: int
    root: Path
    options: Sequence[str] = ()
    rank_options: dict[int, Sequence[str]] = field(default_factory=dict)
    disk: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Base address of rank zero's API."""
        return f"http://127.0.0.1:{self.port}"

    def record_directory(self, rank: int) -> Path:
        """Where this rank keeps its records."""
        return self.root / f"rank{rank}"

    def log(self, rank: int) -> str:
        """What this rank has printed in its last run."""
        path = self.root / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def launch(self) -> None:
        """Start every rank's process without waiting for anything."""
        self.root.mkdir(parents=True, exist_ok=True)
        key = self.root / "cluster.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_text(secrets.token_hex(32) + "\n")
        self.port = free_port()
        rendezvous = f"127.0.0.1:{free_port()}"
        for rank in range(self.world_size):
            self.processes[rank] = self._spawn(rank, self._command(rank, rendezvous, key))

    def start(self, *, timeout: float = 120.0) -> None:
        """Start every rank and wait until the API answers.

        Raises:
            GroupError: a rank ended, or the API was not healthy within ``timeout`` seconds.
        """
        self.launch()
        self.wait_healthy(timeout=timeout)

    def _command(self, rank: int, rendezvous: str, key: Path) -> list[str]:
        command = [sys.executable, "-m", "flare_cli", "run", str(self.model)]
        command += ["--rank", str(rank), "--world-size", str(self.world_size)]
        if self.world_size > 1:
            command += ["--rendezvous", rendezvous, "--key-file", str(key)]
        if rank == 0:
            command += ["--port", str(self.port)]
        if self.disk:
            command += ["--prefix-cache-disk", str(self.record_directory(rank))]
        return [*command, *self.options, *self.rank_options.get(rank, ())]

    def _spawn(self, rank: int, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.root / f"rank{rank}.log").open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                start_new_session=True,
            )

    def wait_healthy(self, *, timeout: float = 120.0) -> None:
        """Block until ``/health`` answers 200; raises as :meth:`start`."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._raise_if_ended()
            try:
                get_json(self.url, "/health", timeout=5.0)
            except (OSError, ServerError):
                time.sleep(0.05)
            else:
                return
        logs = "\n".join(f"--- rank {rank}\n{self.log(rank)[-1500:]}" for rank in self.processes)
        self.kill_all()
        msg = f"the group was not healthy within {timeout:.0f} s\n{logs}"
        raise GroupError(msg)

    def wait_stored(self, *, timeout: float = 60.0) -> None:
        """Block until no request runs and no store or other job is left at rank zero.

        Raises:
            GroupError: there still was one after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            cluster = get_json(self.url, "/v1/cluster")
            cache, engine = cluster["cache"], cluster["engine"]
            num_jobs = cache["num_jobs_waiting"] + cache["num_jobs_outstanding"]
            num_jobs += sum(tier["num_stores_pending"] for tier in cache["tiers"])
            if num_jobs + engine["running"] + engine["waiting"] + engine["fetching"] == 0:
                return
            time.sleep(0.02)
        msg = f"requests or jobs were still pending after {timeout:.0f} s"
        raise GroupError(msg)

    def _raise_if_ended(self) -> None:
        for rank, process in self.processes.items():
            if process.poll() is not None:
                log = self.log(rank)[-3000:]
                self.kill_all()
                msg = f"rank {rank} exited with code {process.returncode} during start-up\n{log}"
                raise GroupError(msg)

    def stop(self, *, timeout: float = 30.0) -> dict[int, int]:
        """SIGTERM to rank zero, which drains and ends the group; exit codes by rank.

        Raises:
            GroupError: a rank was still alive after ``timeout`` seconds (all are then killed).
        """
        self.processes[0].send_signal(signal.SIGTERM)
        return self.wait(timeout=timeout)

    def wait(self, *, timeout: float = 30.0) -> dict[int, int]:
        """Block until every rank has exited; exit codes by rank; raises as :meth:`stop`."""
        deadline = time.monotonic() + timeout
        codes: dict[int, int] = {}
        for rank, process in self.processes.items():
            try:
                codes[rank] = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log = self.log(rank)[-2000:]
                self.kill_all()
                msg = f"rank {rank} was still running after {timeout:.0f} s\n{log}"
                raise GroupError(msg) from None
        self.kill_all()
        return codes

    def kill(self, rank: int) -> None:
        """SIGKILL one rank (for rank zero its API process; its worker dies with it)."""
        self.processes[rank].kill()

    def kill_all(self) -> None:
        """SIGKILL what is left of every rank's process group and reap it."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()

    def record_files(self, rank: int) -> tuple[RecordFile, ...]:
        """This rank's record files, by name."""
        directory = self.record_directory(rank)
        if not directory.is_dir():
            return ()
        return tuple(sorted(RecordFile(path.name, path.stat().st_size) for path in directory.glob("*.rec")))

    def same_record_names(self) -> bool:
        """Whether every rank holds files of the same names, and at least one."""
        names = [{file.name for file in self.record_files(rank)} for rank in range(self.world_size)]
        return bool(names[0]) and all(other == names[0] for other in names)
