"""The byte tables of docs/record-format.md are those of the codec."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from flare_cache.digest import ROW_INDEX
from flare_cache.record import FORMAT, MAGIC, MAX_HEADER_BYTES, decode_header, encode_header

DOCUMENT = Path(__file__).parents[3] / "docs" / "record-format.md"
ROW = re.compile(r"^\| (\+?)(\d+) \| (\d+)( . \w+)? \| (\w+) \| (\w+)", re.MULTILINE)
TOKENS, DIGESTS, SET = bytes(range(56)), bytes(range(80)), bytes(range(100, 132))


@pytest.fixture
def text() -> str:
    return DOCUMENT.read_text(encoding="utf-8")


@pytest.fixture
def header(new_identity, new_geometry) -> bytes:
    return encode_header(new_identity(), TOKENS, set_fingerprint=SET, geometry=new_geometry(1), digests=DIGESTS)


def read_by_the_document(text: str, header: bytes) -> dict[str, int | bytes]:
    """Every field of the tables, read at the offset they give."""
    values: dict[str, int | bytes] = {}
    bound_at = (192 + len(TOKENS) + 63) // 64 * 64
    for relative, offset, size, times, kind, name in ROW.findall(text):
        at = int(offset) + (bound_at if relative else 0)
        count = {"token_ids": 14, "digests": 5}[name] if times else 1
        data = header[at : at + int(size) * count]
        values[name] = data if kind in ("bytes", "zero") or times else int.from_bytes(data, "little")
    return values


def test_every_field_lies_where_the_document_says(text, header, new_identity, new_geometry) -> None:
    identity, geometry, layout = new_identity(), new_geometry(1), decode_header(header).layout
    flags = int(identity.has_row) + 2 * bool(identity.parent_key)
    expected = {
        "magic": MAGIC, "format": FORMAT, "min_reader": 1, "header_bytes": len(header), "set_fingerprint": SET,
        "key": identity.key, "store_id": identity.store_id, "parent_key": identity.parent_key,
        "start_key": identity.start_key, "start": identity.start, "end": identity.end,
        "page_tokens": identity.page_tokens, "tail_tokens": identity.tail_tokens, "flags": flags, "reserved": bytes(4),
        "token_ids": TOKENS, "layout_fingerprint": geometry.layout_fingerprint, "rank": 1, "world_size": 2,
        "pages_offset": layout.header_bytes, "page_bytes": geometry.page_bytes, "tail_offset": layout.pages_end,
        "tail_bytes": geometry.page_bytes, "row_offset": layout.tail_end, "row_bytes": geometry.row_stride,
        "file_bytes": layout.row_end, "num_pages": identity.num_pages, "digest_algorithm": 1, "digests": DIGESTS,
    }  # fmt: skip
    assert read_by_the_document(text, header) == expected


def test_the_tables_leave_no_gap(text, header) -> None:
    for relative, end in (("", 192), ("+", 104)):
        at = 0
        for sign, offset, size, times, _, name in ROW.findall(text):
            if sign == relative and not times:
                assert int(offset) == at, name
                at += int(size)
        assert at == end


def test_the_header_ends_with_its_sha_256(header) -> None:
    assert header[-32:] == hashlib.sha256(header[:-32]).digest()


def test_the_limits_are_those_of_the_code(text) -> None:
    assert f"at most {MAX_HEADER_BYTES >> 20} MiB" in text
    assert f"that of the row is {ROW_INDEX}" in text
