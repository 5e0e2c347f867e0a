"""Record headers, as a directory that someone wrote to may hold them. Checksums are made right behind the changes."""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator

import numpy as np

from flare_cache.header_columns import sound_headers
from flare_cache.jobs import RecordIdentity
from flare_cache.record import (
    BLOCK_BYTES,
    BOUND,
    BOUND_ALIGNMENT,
    INVARIANT,
    MAX_HEADER_BYTES,
    PREFIX,
    SHA256_BYTES,
    TOKENS_AT,
    RecordError,
    RecordHeader,
    check_header,
    decode_header,
    encode_header,
    file_layout,
    header_length,
    identity_problem,
)
from flare_core.geometry import Axis, Geometry, Plane, align_up
from flare_qualify.fuzz.choices import Choices
from flare_qualify.fuzz.target import Execute, Target, require

__all__ = ["GEOMETRY", "RECORD", "SET", "sample_header", "sample_identities", "sealed"]

SET = hashlib.sha256(b"the set of the fuzz targets").digest()
PAGE_TOKENS = 4
GEOMETRY = Geometry(0, 2, PAGE_TOKENS, (Plane("kv", "float32", (Axis("token", PAGE_TOKENS), Axis("dim", 256))),), 5000)

_NUMBERS = (0, 1, 2, 3, 4, 8, 14, 4096, 4097, 8192, MAX_HEADER_BYTES, 1 << 32, 1 << 40, (1 << 64) - 1)


def sample_identities() -> tuple[RecordIdentity, ...]:
    """A record with everything, one without tail and row at the root, and one that is a tail alone."""
    made: list[RecordIdentity] = []
    for number, (start, num_pages, tail, has_row) in enumerate(((8, 3, 2, True), (0, 2, 0, False), (4, 0, 3, False))):
        digest = hashlib.sha256(bytes([number])).digest()
        made.append(
            RecordIdentity(
                key=digest,
                store_id=digest[16:],
                parent_key=hashlib.sha256(digest).digest() if start else b"",
                start_key=hashlib.sha256(digest + b"start").digest(),
                start=start,
                end=start + num_pages * PAGE_TOKENS + tail,
                page_tokens=PAGE_TOKENS,
                tail_tokens=tail,
                has_row=has_row,
            )
        )
    return tuple(made)


def sample_header(identity: RecordIdentity) -> bytes:
    """A sound header of this rank."""
    token_ids = b"".join(token.to_bytes(4, "little") for token in range(identity.start, identity.end))
    digests = bytes(16 * (identity.num_sections + identity.has_row))
    return encode_header(identity, token_ids, set_fingerprint=SET, geometry=GEOMETRY, digests=digests)


def sealed(header: bytearray) -> bytes:
    """``header`` with the SHA-256 that its length asks for, wherever that leads."""
    length = PREFIX.unpack_from(header)[3] if len(header) >= PREFIX.size else 0
    if SHA256_BYTES <= length <= len(header):
        at = length - SHA256_BYTES
        header[at:length] = hashlib.sha256(memoryview(header)[:at]).digest()
    return bytes(header)


def _fields(num_tokens: int) -> list[tuple[int, int]]:
    """Offset and size of every number in a header of so many tokens."""
    at = align_up(TOKENS_AT + 4 * num_tokens, BOUND_ALIGNMENT)
    return [*_integers(INVARIANT, 0), *_integers(BOUND, at)]


def _integers(layout: struct.Struct, base: int) -> Iterator[tuple[int, int]]:
    offset, count = 0, ""
    for sign in layout.format.lstrip("<"):
        if sign.isdigit():
            count += sign
            continue
        size = {"s": int(count or 1), "x": int(count or 1)}.get(sign) or struct.calcsize(f"<{sign}")
        if sign not in "sx":
            yield base + offset, size
        offset, count = offset + size, ""


def _header(choices: Choices) -> bytes:
    identity = choices.pick(sample_identities())
    header = bytearray(sample_header(identity))
    fields = _fields(identity.end - identity.start)
    for _ in range(choices.integer(0, 6)):
        way = choices.integer(0, 3)
        if way == 0:
            at, size = choices.pick(fields)
            value = (choices.pick(_NUMBERS) + choices.integer(-1, 1)) % (1 << 8 * size)
            header[at : at + size] = value.to_bytes(size, "little")
        elif way == 1:
            at = choices.integer(0, len(header) - 1)
            piece = choices.piece(8)
            header[at : at + len(piece)] = piece
        elif way == 2:
            del header[choices.integer(0, len(header)) :]
        else:
            header += bytes(choices.pick((1, 100, BLOCK_BYTES, 3 * BLOCK_BYTES)))
    return sealed(header) if choices.integer(0, 7) else bytes(header)


def _check(header: RecordHeader) -> None:
    """What the decoder lets through is whole and consistent; nothing in it leads outside the file."""
    identity, layout = header.identity, header.layout
    require(identity_problem(identity) is None, f"a record that cannot be: {identity_problem(identity)}")
    num_tokens = identity.end - identity.start
    require(len(header.token_ids) == 4 * num_tokens, "token ids do not fit the range")
    require(len(header.digests) == 16 * layout.num_digests, "digests do not fit the sections")
    require(layout.header_bytes <= MAX_HEADER_BYTES, "a header over its limit")
    require(layout.pages_end <= layout.tail_end <= layout.row_end, "sections that overlap")
    for size in (0, layout.pages_end - 1, layout.pages_end, layout.tail_end, layout.row_end, 1 << 40):
        legal = layout.legal_size(size)
        require(legal is None or legal <= max(0, size), "a size counts as a larger one")
    check_header(header, set_fingerprint=SET, geometry=GEOMETRY)
    own = file_layout(identity, page_bytes=GEOMETRY.page_bytes, row_stride=GEOMETRY.row_stride)
    require(layout == own, f"taken as this rank's own with {layout}, which is not {own}")
    require((header.rank, header.world_size) == (0, 2), "taken as this rank's own from another")
    require(header.set_fingerprint == SET, "taken from another set")
    require(header.layout_fingerprint == GEOMETRY.layout_fingerprint, "taken from another layout")


def _taken_by_the_scan(header: bytes) -> RecordIdentity | None:
    """What the scan, which judges many headers at once, takes this one for, whatever the file is called."""
    block = np.frombuffer(header[:BLOCK_BYTES].ljust(BLOCK_BYTES, b"\0"), dtype=np.uint8).reshape(1, BLOCK_BYTES)
    key_at = PREFIX.size + len(SET)
    places, table = sound_headers(
        block,
        keys=block[0, key_at : key_at + 32].tobytes(),
        file_sizes=np.array([1 << 40], dtype=np.int64),
        geometry=GEOMETRY,
        set_fingerprint=SET,
        with_token_ids=True,
    )
    return table[0].identity if len(places) else None


def _execute(data: bytes) -> None:
    choices = Choices(data)
    header = choices.rest() if choices.integer(0, 15) == 15 else _header(choices)
    taken_at_once = _taken_by_the_scan(header)
    try:
        length = header_length(header[:BLOCK_BYTES])
        require(BLOCK_BYTES <= length <= MAX_HEADER_BYTES, f"a header of {length} bytes")
        decoded = decode_header(header)
        _check(decoded)
    except RecordError as error:
        require(taken_at_once is None, f"the scan takes at once what the decoder refuses: {error}")
        return
    if taken_at_once is not None:
        require(taken_at_once == decoded.identity, "the scan and the decoder read two records")


@contextlib.contextmanager
def _open() -> Iterator[Execute]:
    yield _execute


def _seeds() -> Iterator[bytes]:
    for number in range(3):
        yield bytes((0, number, 0, 0, 1))
        for field in range(26):
            yield bytes((0, number, 1, 0, field, field % 14, field % 3, 1))
    yield bytes((0, 0, 2, 2, 100, 0, 3, 2, 1))
    yield b"\x0f" + sample_header(sample_identities()[1])


RECORD = Target(
    "record",
    "A header is refused by RecordError or is whole and consistent; taken as this rank's own, it equals its geometry.",
    _open,
    _seeds,
    max_bytes=2048,
)
