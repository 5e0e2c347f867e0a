"""A rank's way to the pool, put together: key, managers, staging, shard transfers. Part of the composition root."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flare_cache.disk_shelf import DiskShelf
from flare_cache.host_memory import Passage
from flare_cache.memory_shelf import MemoryShelf
from flare_cache.pool.agent import PoolConnection
from flare_cache.pool.client import PoolClient, connect_to_pool
from flare_cache.pool.manifest import namespace_id
from flare_cache.pool.messages import POOL_PROTOCOL, Register
from flare_cache.pool.setup import PoolSetup
from flare_cache.pool.shelf import NUM_THREADS, PoolShelf, staging_bytes
from flare_cache.pool.staging import allocate_staging
from flare_cache.pool.url import PoolUrl
from flare_cache.transfer import Shelf
from flare_cli.config import RunConfig
from flare_cli.salt import load_cluster_key, salt_key
from flare_cli.wiring import RankModel
from flare_core.errors import UsageError
from flare_core.keys import salt_key_id
from flare_core.prefix import Tier
from flare_transport import Address, Security

__all__ = ["RankPool", "open_pool"]

CONNECT_SECONDS = 4.0
_LOG = logging.getLogger("flare")


@dataclass(frozen=True, slots=True)
class RankPool:
    """What the record path needs of the pool. ``num_threads`` move shards."""

    setup: PoolSetup
    shelf: PoolShelf
    num_threads: int = NUM_THREADS


@dataclass(frozen=True, slots=True)
class _ShelfSwitch:
    """The agreement knows no kind of connection; the shelf needs bulk transfers over it."""

    shelf: PoolShelf

    def turn_on(self, session: bytes, connection: PoolConnection) -> None:
        """See :class:`flare_cache.pool.agent.PoolSwitch`."""
        if not isinstance(connection, PoolClient):
            raise TypeError(f"{type(connection).__name__} moves no shards")
        self.shelf.turn_on(session, connection)

    def turn_off(self, reason: str) -> None:
        """See :class:`flare_cache.pool.agent.PoolSwitch`."""
        self.shelf.turn_off(reason)


def open_pool(config: RunConfig, model: RankModel, *, shelves: Mapping[Tier, Shelf], passage: Passage) -> RankPool:
    """This rank's; connects to nothing yet, and reads the key files.

    Raises:
        UsageError: no ``--pool``, a key file that cannot be used.
    """
    url, key_file = config.pool, config.pool_key_file
    if url is None or key_file is None:
        msg = "--pool URL needs --pool-key-file FILE"
        raise UsageError(msg)
    key = load_cluster_key(key_file)
    _warn_of_plaintext(url)
    identity = model.identity
    fingerprint = identity.fingerprint()
    salt_id = salt_key_id(salt_key(config))
    source = shelves.get(Tier.DISK, shelves.get(Tier.MEMORY))
    if not isinstance(source, DiskShelf | MemoryShelf):
        msg = "--pool needs a tier of records to be put from"
        raise UsageError(msg)
    geometry = identity.geometries[config.rank]
    staging = allocate_staging(NUM_THREADS, staging_bytes(geometry))
    shelf = PoolShelf(
        geometry=geometry,
        set_fingerprint=fingerprint,
        passage=passage,
        source=source,
        staging=staging,
    )

    def connect(address: int, session: bytes, on_lost: Callable[[str], None]) -> PoolConnection:
        host, port = url.places[address]
        register = Register(
            protocol=POOL_PROTOCOL,
            namespace=namespace_id(fingerprint, salt_id),
            set_fingerprint=fingerprint,
            world_size=config.world_size,
            rank=config.rank,
            session=session,
            instance=f"{socket.gethostname()}:{config.port}",
            model=config.served_model_name or config.model or "",
            buffers=staging.sizes,
        )
        return connect_to_pool(
            Address(host, port),
            key=key,
            security=Security.TLS if url.is_tls else Security.PLAINTEXT,
            register=register,
            on_lost=on_lost,
            timeout_seconds=CONNECT_SECONDS,
        )

    setup = PoolSetup(
        open_connection=connect,
        num_addresses=len(url.places),
        settings=_settings_digest(config, namespace_id(fingerprint, salt_id)),
        shelf=_ShelfSwitch(shelf),
        pending_bytes=config.pool_pending,
        is_always_worth=config.pool_restore == "always",
    )
    return RankPool(setup, shelf)


def _settings_digest(config: RunConfig, namespace: bytes) -> bytes:
    """Of what all ranks must have alike."""
    return hashlib.sha256(b"flare/pool-settings/1" + namespace + str(config.pool).encode()).digest()


def _warn_of_plaintext(url: PoolUrl) -> None:
    if not url.is_tls and not url.is_loopback:
        _LOG.warning("--pool %s: prompts' KV travels unencrypted; use selenes:// beyond trusted networks", url)
