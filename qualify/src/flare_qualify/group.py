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
from flare_qualify.process_facts import children_of, is_alive

__all__ = ["Group", "GroupError", "RecordFile", "free_port"]


class GroupError(Exception):
    """A rank did not start or did not stop; the message ends with the tail of its log."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago, and that the kernel gives to no outgoing connection."""
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


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
        environment: variables added to every rank's. rank_environment: variables of one rank, by rank.
        rank_prefix: words before the command of one rank, by rank (``strace …``, ``ip netns exec …``).
        host: address at which the ranks meet, and rank zero serves unless ``api_host`` is another one.
        run: number of the last start; each start's logs are kept.
    """

    model: Path
    world_size: int
    root: Path
    options: Sequence[str] = ()
    rank_options: dict[int, Sequence[str]] = field(default_factory=dict)
    disk: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    rank_environment: dict[int, dict[str, str]] = field(default_factory=dict)
    rank_prefix: dict[int, Sequence[str]] = field(default_factory=dict)
    host: str = "127.0.0.1"
    api_host: str = ""
    run: int = 0
    port: int = 0
    rendezvous_port: int = 0
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Base address of rank zero's API."""
        return f"http://{self.api_host or self.host}:{self.port}"

    def record_directory(self, rank: int) -> Path:
        """Where this rank keeps its records."""
        return self.root / f"rank{rank}"

    def log(self, rank: int) -> str:
        """What this rank has printed in its last run; earlier runs' are in ``rankN.runM.log``."""
        path = self.root / f"rank{rank}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def worker_pid(self) -> int:
        """The process of rank zero's worker, the child of its API process.

        Raises:
            GroupError: there is none.
        """
        children = children_of(self.api_pid())
        if not children:
            raise GroupError("rank zero has no worker process")
        return children[0]

    def api_pid(self) -> int:
        """The process that serves HTTP; the last of those that a prefix of rank zero starts."""
        return self._rank_pid(0)

    def _rank_pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        if self.rank_prefix.get(rank):
            # ``strace`` runs its command as a child; ``ip netns exec`` and ``env`` become it.
            while b"flare_cli" not in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:6] and children_of(pid):
                pid = children_of(pid)[0]
        return pid

    def members(self) -> dict[str, int]:
        """Process ids by role: ``api``, ``worker``, ``rank1``, … Those that have ended already are left out."""
        found: dict[str, int] = {}
        for rank, process in self.processes.items():
            if process.poll() is not None:
                continue
            pid = self._rank_pid(rank)
            found["api" if rank == 0 else f"rank{rank}"] = pid
            if rank == 0 and children_of(pid):
                found["worker"] = children_of(pid)[0]
        return {name: pid for name, pid in found.items() if is_alive(pid)}

    def wait_log(self, rank: int, words: str, *, timeout: float = 10.0) -> bool:
        """Block until this rank has printed ``words``; whether it did within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while words not in self.log(rank):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def launch(self) -> None:
        """Start every rank's process without waiting for anything."""
        self.prepare()
        for rank in range(self.world_size):
            self.launch_rank(rank)

    def prepare(self, *, keep_ports: bool = False) -> None:
        """Choose ports for a new start, unless the last ones are kept, and make the cluster key before the first."""
        self.root.mkdir(parents=True, exist_ok=True)
        key = self.root / "cluster.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_text(secrets.token_hex(32) + "\n")
        self.run += 1
        if not keep_ports:
            self.port = self.rendezvous_port = free_port()
            while self.rendezvous_port == self.port:
                self.rendezvous_port = free_port()

    def launch_rank(self, rank: int) -> None:
        """Start one rank's process after :meth:`prepare`; returns at once."""
        rendezvous = f"{self.host}:{self.rendezvous_port}"
        self.processes[rank] = self._spawn(rank, self._command(rank, rendezvous, self.root / "cluster.key"))

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
            command += ["--host", self.api_host or self.host, "--port", str(self.port)]
        if self.disk:
            command += ["--prefix-cache-disk", str(self.record_directory(rank))]
        return [*self.rank_prefix.get(rank, ()), *command, *self.options, *self.rank_options.get(rank, ())]

    def _spawn(self, rank: int, command: list[str]) -> subprocess.Popen[bytes]:
        path = self.root / f"rank{rank}.log"
        if path.exists():
            path.rename(self.root / f"rank{rank}.run{self.run - 1}.log")
        with path.open("wb") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment | self.rank_environment.get(rank, {}),
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
        os.kill(self.api_pid(), signal.SIGTERM)
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
