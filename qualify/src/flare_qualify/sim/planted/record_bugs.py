"""Bugs in how records are written, read, judged and joined."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import xxhash

from flare_cache import disk_shelf, header_columns, join_set, memory_shelf, record, transfer
from flare_cache.digest import DIGEST_BYTES
from flare_cache.disk_shelf import DiskFetch, DiskShelf, DiskStore
from flare_cache.header_columns import FileEnds
from flare_cache.host_memory import aligned_buffer
from flare_cache.jobs import record_file_name
from flare_cache.join import JoinLeader
from flare_cache.join_messages import Confirmed
from flare_cache.join_set import Verdict
from flare_cache.record import FileLayout, encode_header
from flare_cache.record_file import read_sections, write_sections
from flare_cache.record_table import KEEP_ROW, KEEP_TAIL, find_digests
from flare_cache.transfer import Part, flat_views, verify_items
from flare_qualify.sim.planted.patching import PlantedBug, exchange
from flare_qualify.sim.records import format_digest

__all__ = ["RECORD_BUGS"]

_STORE_ID_AT = 80
_STORE_ID_END = 96


def _published_first() -> AbstractContextManager[None]:
    begin = DiskShelf.store

    def store(self: Any, job: Any, memory: Any) -> DiskStore:
        started = begin(self, job, memory)
        for part in started.parts:
            with self.passage.outgoing([item.segments for item in part]) as window:
                for item, views in zip(part, window.sections, strict=True):
                    at = item.position * DIGEST_BYTES
                    started.digests[at : at + DIGEST_BYTES] = format_digest(
                        job.record.store_id, self.geometry.rank, index=item.index, payload=b"".join(views)
                    )
        header = encode_header(
            job.record,
            job.token_ids,
            set_fingerprint=self.set_fingerprint,
            geometry=self.geometry,
            digests=bytes(started.digests),
        )
        files = self.directory.files
        write_sections(files, started.fd, views=[memoryview(bytearray(header))], offset=0)
        started._inode = files.fstat(started.fd).st_ino
        self.directory.publish(started.temporary, record_file_name(job.record.key))
        return started

    def finish(self: Any) -> int:
        self._close()
        size: int = self.layout.row_end
        return size

    return exchange((DiskShelf, "store", store), (DiskStore, "finish", finish))


def _any_size() -> AbstractContextManager[None]:
    def legal_size(self: FileLayout, size: int) -> int:
        del size
        return self.row_end

    def parts(self: FileEnds, file_sizes: Any) -> Any:
        del file_sizes
        has_tail, has_row = self.tail_end > self.pages_end, self.row_end > self.tail_end
        return self.row_end, (np.where(has_tail, KEEP_TAIL, 0) | np.where(has_row, KEEP_ROW, 0)).astype(np.uint8)

    return exchange((FileLayout, "legal_size", legal_size), (FileEnds, "parts", parts))


def _unbound_digest() -> AbstractContextManager[None]:
    def section_digest(store_id: bytes, rank: int, *, index: int, payload: Iterable[memoryview]) -> bytes:
        del store_id, rank, index
        digest = xxhash.xxh3_128()
        for piece in payload:
            digest.update(piece)
        found: bytes = digest.digest()
        return found

    return exchange(*((module, "section_digest", section_digest) for module in (disk_shelf, memory_shelf, transfer)))


def _verified_elsewhere() -> AbstractContextManager[None]:
    def run(self: Any, part: Part) -> None:
        shelf = self.shelf
        with shelf.passage.incoming([item.segments for item in part]) as window:
            read_sections(shelf.directory.files, self.fd, views=flat_views(window), offset=part[0].offset)
            scratch = type(window)([[aligned_buffer(item.num_bytes)] for item in part], window.deliver)
            read_sections(shelf.directory.files, self.fd, views=flat_views(scratch), offset=part[0].offset)
            verify_items(part, scratch, header=self.header, geometry=shelf.geometry)
            window.deliver()

    return exchange((DiskFetch, "run", run))


def _verified_late() -> AbstractContextManager[None]:
    def run(self: Any, part: Part) -> None:
        shelf = self.shelf
        with shelf.passage.incoming([item.segments for item in part]) as window:
            read_sections(shelf.directory.files, self.fd, views=flat_views(window), offset=part[0].offset)
            window.deliver()
            verify_items(part, window, header=self.header, geometry=shelf.geometry)

    return exchange((DiskFetch, "run", run))


def _closure_off_by_one() -> AbstractContextManager[None]:
    def _drop_unrooted(tree: Any, fates: Any, parts: Any) -> None:
        before = fates.copy()
        for at in tree.parents_first.tolist():
            parent = int(tree.parents[at])
            if before[at] != Verdict.KEPT:
                continue
            if not tree.fits[at] or (parent >= 0 and before[parent] != Verdict.KEPT):
                fates[at] = Verdict.ORPHANED
            elif not tree.has_pages[at] and not parts[at] & KEEP_TAIL:
                fates[at] = Verdict.EMPTY

    return exchange((join_set, "_drop_unrooted", _drop_unrooted))


def _most_parts() -> AbstractContextManager[None]:
    shared = join_set._shared

    def _shared(own: Any, others: Any) -> Any:
        fates, parts = shared(own, others)
        for other in others.values():
            at = find_digests(own.digests, other.digests)
            parts = np.where(at < 0, parts, parts | join_set._taken(other.parts, at))
        return fates, parts

    return exchange((join_set, "_shared", _shared))


def _unconfirmed() -> AbstractContextManager[None]:
    propose, receive = JoinLeader._propose, JoinLeader.receive

    def _propose(self: Any) -> Any:
        effects = propose(self)
        if self._agreement is not None and not self._confirmed and self._world_size > 1:
            self._confirmed = set(range(1, self._world_size))
            effects = [*effects, *self._go_on()]
        return effects

    def _receive(self: Any, rank: int, message: Any) -> Any:
        return [] if isinstance(message, Confirmed) else receive(self, rank, message)

    return exchange((JoinLeader, "_propose", _propose), (JoinLeader, "receive", _receive))


def _synced_again() -> AbstractContextManager[None]:
    def _sync(self: Any, sync: Any) -> None:
        del self
        try:
            sync()
        except OSError:
            sync()

    return exchange((DiskStore, "_sync", _sync))


def _any_store() -> AbstractContextManager[None]:
    digested = header_columns._digested

    def rank_invariant_digest(header: Any, num_tokens: int) -> bytes:
        head = bytearray(memoryview(header)[: record.TOKENS_AT + 4 * num_tokens])
        head[_STORE_ID_AT:_STORE_ID_END] = bytes(_STORE_ID_END - _STORE_ID_AT)
        return hashlib.sha256(head).digest()

    def _digested(blocks: Any, places: Any, num_tokens: Any, *, with_token_ids: bool) -> Any:
        sound, digests, token_ids = digested(blocks, places, num_tokens, with_token_ids=with_token_ids)
        kept = [at for at, is_sound in enumerate(sound.tolist()) if is_sound]
        digests = [rank_invariant_digest(blocks[places[at]].tobytes(), num_tokens[at]) for at in kept]
        return sound, digests, token_ids

    return exchange((record, "rank_invariant_digest", rank_invariant_digest), (header_columns, "_digested", _digested))


RECORD_BUGS = (
    PlantedBug(
        "published-before-written", "a file gets its name when it is whole, not before its pages", _published_first
    ),
    PlantedBug(
        "size-unchecked", "what a file's size says of tail, row and pages is believed, not its header", _any_size
    ),
    PlantedBug("digest-unbound", "a digest is bound to store, rank and index of its section", _unbound_digest),
    PlantedBug(
        "digest-of-other-buffer", "the bytes that are verified are the bytes that are used", _verified_elsewhere
    ),
    PlantedBug("verified-after-delivery", "nothing unverified is handed to the device", _verified_late),
    PlantedBug(
        "closure-off-by-one", "a record stays only if what it extends stays, all the way up", _closure_off_by_one
    ),
    PlantedBug("most-rows", "a row counts where every rank has it, not where any has", _most_parts),
    PlantedBug("join-unconfirmed", "nothing is removed before every rank has confirmed the set", _unconfirmed),
    PlantedBug("fsync-retried", "a failed fsync is never repeated", _synced_again),
    PlantedBug("store-id-uncompared", "shards of two computations are not taken for one record", _any_store),
)
