"""The one frozen configuration of ``flare run``: what every setting came to, checked as far as one process can.

Does not know where a value came from (``resolve``), nor any class that it configures (``wiring``).
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

import msgspec

from flare_cache.pool.url import PoolUrl
from flare_core.errors import UsageError

__all__ = ["HostPort", "KvMemory", "RunConfig", "check_config", "decode_config", "encode_config", "is_loopback"]

DEFAULT_PAGE_TOKENS = 64


class HostPort(msgspec.Struct, frozen=True):
    """An address as written by people; IPv6 in brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class KvMemory(msgspec.Struct, frozen=True):
    """How large a rank's KV pool is: in bytes of the largest rank, or in pages. Exactly one is set."""

    num_bytes: int | None = None
    num_pages: int | None = None

    def __str__(self) -> str:
        return f"{self.num_pages} pages" if self.num_bytes is None else f"{self.num_bytes} bytes"


LOOPBACK = "127.0.0.1"


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting of ``flare run``. Names are those of the flags; sizes in bytes, durations in seconds.

    ``None`` means: derived from the model, the machine or the other ranks, and reported at start-up.
    """

    model: str | None
    rank: int
    world_size: int
    rendezvous: HostPort | None
    rendezvous_timeout: float
    key_file: Path | None
    insecure_plaintext: bool
    host: str | None
    port: int
    served_model_name: str | None
    max_model_len: int | None
    dtype: Literal["auto", "float32", "bfloat16"]
    device: str
    kv_memory: KvMemory | None
    page_tokens: int
    max_sequences: int
    max_batch_tokens: int
    threads: int | None
    plan_lead: int | None
    speculative_config: str | None
    prefix_cache_disk: Path | None
    prefix_cache_disk_limit: int | None
    prefix_cache_disk_transport: Literal["auto", "direct", "buffered"]
    prefix_cache_memory: int
    prefix_cache_durability: Literal["process", "power"]
    prefix_cache_min_tail: int
    prefix_cache_salt_key_file: Path | None
    prefix_cache_accept_loss: bool
    pool: PoolUrl | None
    pool_key_file: Path | None
    pool_restore: Literal["auto", "always"]
    pool_pending: int
    pool_flush_timeout: float
    api_key_file: Path | None
    admin_key_file: Path | None
    max_body: int
    max_n: int
    max_output_tokens: int | None
    max_concurrent_requests: int
    drain_timeout: float
    log_json: bool

    @property
    def hosts(self) -> list[str]:
        """Addresses to serve HTTP on: those given, else loopback and the address at which the ranks meet."""
        if self.host is not None:
            return [host for host in self.host.split(",") if host]
        if self.rendezvous is None or is_loopback(self.rendezvous.host):
            return [LOOPBACK]
        return [LOOPBACK, self.rendezvous.host]


def check_config(config: RunConfig) -> RunConfig:
    """``config`` if its settings go together.

    Raises:
        UsageError: a value out of range or a combination that cannot work; names the flags and the remedy.
    """
    for name, least in _LEAST.items():
        value = getattr(config, name)
        if value is not None and value < least:
            msg = f"--{name.replace('_', '-')} {value}: must be at least {least}"
            raise UsageError(msg)
    if config.page_tokens & (config.page_tokens - 1) or config.page_tokens > 1024:
        msg = f"--page-tokens {config.page_tokens}: must be a power of two, at most 1024"
        raise UsageError(msg)
    if config.plan_lead is not None and config.plan_lead > 1:
        msg = f"--plan-lead {config.plan_lead}: must be 0 or 1"
        raise UsageError(msg)
    if config.plan_lead and config.speculative_config is not None:
        msg = f"--plan-lead {config.plan_lead}: with --speculative-config no step is planned ahead; leave it out"
        raise UsageError(msg)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", config.device):
        msg = f"--device {config.device}: must be auto, cpu, cuda or cuda:N"
        raise UsageError(msg)
    if not config.hosts:
        msg = f"--host {config.host!r} names no address"
        raise UsageError(msg)
    if config.port > 65535:
        msg = f"--port {config.port}: must be at most 65535"
        raise UsageError(msg)
    _check_placement(config)
    _check_files(config)
    _check_pool(config)
    return config


_LEAST = {
    "world_size": 1,
    "rank": 0,
    "port": 0,
    "max_model_len": 2,
    "page_tokens": 1,
    "max_sequences": 1,
    "max_batch_tokens": 1,
    "threads": 1,
    "plan_lead": 0,
    "prefix_cache_min_tail": 0,
    "max_body": 1024,
    "max_n": 1,
    "max_output_tokens": 1,
    "max_concurrent_requests": 1,
}


def _check_placement(config: RunConfig) -> None:
    if config.rank >= config.world_size:
        msg = (
            f"--rank {config.rank} does not exist in --world-size {config.world_size}: "
            f"ranks are 0 to {config.world_size - 1}"
        )
        raise UsageError(msg)
    if config.world_size == 1:
        return
    if config.rendezvous is None:
        msg = (
            f"--world-size {config.world_size} needs --rendezvous HOST:PORT, the same on every rank: "
            "an address of rank 0 that the others reach"
        )
        raise UsageError(msg)
    if config.key_file is None:
        msg = (
            f"--world-size {config.world_size} needs --key-file FILE, the same key on every rank: "
            "make it once with 'flare key > cluster.key' and copy it to every host"
        )
        raise UsageError(msg)


def _check_files(config: RunConfig) -> None:
    for name in ("key_file", "prefix_cache_salt_key_file", "pool_key_file", "api_key_file", "admin_key_file"):
        path: Path | None = getattr(config, name)
        if path is not None and not path.is_file():
            msg = f"--{name.replace('_', '-')} {path}: no such file"
            raise UsageError(msg)
    if config.prefix_cache_disk is None:
        for name in ("prefix_cache_disk_limit", "prefix_cache_accept_loss"):
            if getattr(config, name):
                msg = f"--{name.replace('_', '-')} needs --prefix-cache-disk DIR"
                raise UsageError(msg)


def _check_pool(config: RunConfig) -> None:
    if config.pool is None and config.pool_key_file is not None:
        msg = f"--pool-key-file {config.pool_key_file} needs --pool URL"
        raise UsageError(msg)
    if config.pool is not None and config.pool_key_file is None:
        msg = f"--pool {config.pool} needs --pool-key-file FILE: the key that 'flare pool serve' was started with"
        raise UsageError(msg)


def is_loopback(host: str) -> bool:
    """Whether an address or name can only be reached from this host."""
    if host in {"localhost", ""}:
        return host == "localhost"
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def encode_config(config: RunConfig) -> bytes:
    """The bytes that the worker process is given."""
    return msgspec.json.encode(config, enc_hook=str)


def decode_config(data: bytes) -> RunConfig:
    """The inverse of :func:`encode_config`."""
    return msgspec.json.decode(data, type=RunConfig, dec_hook=_decode_path)


def _decode_path(kind: type, value: object) -> object:
    if kind is Path or issubclass(kind, Path):
        return Path(str(value))
    msg = f"cannot decode {kind}"
    raise TypeError(msg)
