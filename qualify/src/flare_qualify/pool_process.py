"""The pool's manager as a process on this host, over a store directory, and the flags with which a group uses it.

Knows how to start, stop, kill and restart it; knows nothing of what is asked of it.
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
from typing import Any

from flare_qualify.client import get_json
from flare_qualify.group import Group, GroupError, free_port

__all__ = ["PoolProcess", "clear_records", "pool_of", "wait_flushed", "wait_pool"]

_KEY_BYTES = 32
_LISTEN_SECONDS = 20.0


@dataclass(slots=True)
class PoolProcess:
    """One manager.

    Attributes:
        root: its directory: ``store/``, ``pool.key``, ``salt.key`` and logs.
        is_tls: TLS, or authenticated plaintext.
        options: more flags. store: where it keeps objects, if not in ``root``.
        environment: variables added to its own.
        run: number of the last start; each start's log is kept.
    """

    root: Path
    is_tls: bool = True
    options: Sequence[str] = ()
    store: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    port: int = 0
    run: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """For ``--pool``."""
        return f"{'selenes' if self.is_tls else 'selene'}://127.0.0.1:{self.port}"

    @property
    def key_file(self) -> Path:
        """The pool's key, made when it is first asked for."""
        return self._key("pool.key")

    @property
    def store_directory(self) -> Path:
        """Where its objects are, unless ``store`` names another place."""
        return self.root / "store"

    def _key(self, name: str) -> Path:
        path = self.root / name
        if not path.exists():
            self.root.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(_KEY_BYTES) + "\n")
        return path

    def group_options(self, *, url: str = "") -> tuple[str, ...]:
        """Flags of every rank of an instance that shares this pool; ``url`` where it is reached another way.

        Restores are not left to what is quicker: a small model computes faster than any pool answers.
        """
        pool = ("--pool", url or self.url, "--pool-key-file", str(self.key_file), "--pool-restore", "always")
        return (*pool, "--prefix-cache-salt-key-file", str(self._key("salt.key")))

    def prepare(self) -> None:
        """Choose a port, unless there is one already."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.port = self.port or free_port()

    def start(self, *, timeout: float = _LISTEN_SECONDS) -> None:
        """Start it, and wait until it listens.

        Raises:
            GroupError: it ended, or did not listen within ``timeout`` seconds.
        """
        self.launch()
        deadline = time.monotonic() + timeout
        while not self.is_listening():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline:
                log = self.log()[-2000:]
                self.kill()
                msg = f"the pool's manager does not listen\n{log}"
                raise GroupError(msg)
            time.sleep(0.01)

    def launch(self) -> None:
        """Start it without waiting for anything."""
        self.prepare()
        path = self.root / "pool.log"
        if path.exists():
            path.rename(self.root / f"pool.run{self.run}.log")
        self.run += 1
        command = [sys.executable, "-m", "flare_cli", "pool", "serve", "--listen", f"127.0.0.1:{self.port}"]
        command += ["--store", self.store or str(self.store_directory), "--key-file", str(self.key_file)]
        command += [] if self.is_tls else ["--plaintext"]
        with path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *self.options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment,
                start_new_session=True,
            )

    def is_listening(self) -> bool:
        """Whether somebody takes connections on its port."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def log(self) -> str:
        """What its last run has printed."""
        path = self.root / "pool.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def ask(self, *words: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run ``flare pool WORDS`` against it; its output and exit code."""
        command = [sys.executable, "-m", "flare_cli", "pool", *words]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=os.environ | self.environment,
        )

    def stop(self, *, timeout: float = 30.0) -> int:
        """SIGTERM, and wait; its exit code.

        Raises:
            GroupError: it was still alive after ``timeout`` seconds (it is then killed).
        """
        process = self.process
        if process is None:
            return 0
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            msg = f"the pool's manager was still running after {timeout:.0f} s\n{self.log()[-2000:]}"
            raise GroupError(msg) from None

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def num_manifests(self) -> int:
        """Records that its store directory makes visible."""
        return sum(1 for path in self.store_directory.rglob("manifests/*") if path.is_file() and "." not in path.name)


def pool_of(group: Group) -> dict[str, Any]:
    """What rank zero says of the pool in ``/v1/cluster``."""
    found: dict[str, Any] = get_json(group.url, "/v1/cluster")["cache"]["pool"]
    return found


def wait_pool(group: Group, state: str, *, timeout: float = 15.0, sessions: int = 0) -> dict[str, Any] | None:
    """Block until the pool is in ``state`` for the group, in at least its ``sessions``-th session; None: it was not."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        pool = pool_of(group)
        if pool["state"] == state and pool["sessions"] >= sessions:
            return pool
        time.sleep(0.02)
    return None


def wait_flushed(group: Group, *, timeout: float = 30.0) -> bool:
    """Block until nothing is stored any more and nothing waits to be put; whether that came within ``timeout``."""
    group.wait_stored()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        pool = pool_of(group)
        if pool["state"] == "on" and not pool["pending"] and not pool["backlog"]:
            return True
        time.sleep(0.02)
    return False


def clear_records(group: Group, *ranks: int) -> int:
    """Remove everything in the record directories of a stopped group, or of some ranks; number of files."""
    count = 0
    for rank in ranks or range(group.world_size):
        for path in group.record_directory(rank).glob("*"):
            path.unlink()
            count += 1
    return count
