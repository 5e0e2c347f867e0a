"""The page-major pool as memory that transfers read and write."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from flare_core.compute.huge_pages import collapse_large_mappings
from flare_core.compute.kv_memory import KvMemory, geometry_for, pages_for_bytes
from flare_core.compute.model_config import read_config
from flare_core.errors import UsageError


@pytest.fixture
def config(checkpoint):
    return read_config(checkpoint("llama"))


def test_a_page_is_one_aligned_segment_of_the_geometrys_size(config):
    geometry = geometry_for(config, 0, 1, page_tokens=16)
    memory = KvMemory.allocate(geometry, 5, torch.device("cpu"))
    segments = [memory.page_segments(page) for page in range(5)]
    assert all(len(segment) == 1 for segment in segments)
    addresses = [segment[0][0] for segment in segments]
    assert addresses == [addresses[0] + page * geometry.page_bytes for page in range(5)]
    assert addresses[0] % 4096 == 0
    assert memory.device == "cpu"
    assert memory.row_segments(0) == ()
    with pytest.raises(IndexError):
        memory.page_segments(5)


def test_bytes_written_at_a_pages_address_are_what_attention_sees(config):
    memory = KvMemory.allocate(geometry_for(config, 0, 1, page_tokens=16), 3, torch.device("cpu"))
    ((address, length),) = memory.page_segments(1)
    assert not any(ctypes.string_at(address, length))
    ctypes.memset(address, 0x41, length)
    assert (memory.views[1].view(torch.int32) == 0x41414141).all()
    assert not memory.views[0].any()
    assert not memory.views[2].any()


def test_ranks_share_heads_unevenly_and_pages_are_counted_by_the_largest(config):
    geometries = [geometry_for(config, rank, 2, page_tokens=64) for rank in range(2)]
    heads = [geometry.planes[0].axes[3].size for geometry in geometries]
    assert heads == [2, 1]
    assert pages_for_bytes(geometries, 10 * geometries[0].page_bytes) == 10
    with pytest.raises(UsageError, match="give more"):
        pages_for_bytes(geometries, geometries[0].page_bytes)


def test_huge_pages_change_no_byte():
    block = np.arange(12 << 20, dtype=np.uint64)
    expected = int(block.sum())
    assert collapse_large_mappings() >= (block.nbytes if Path("/proc/self/smaps").exists() else 0)
    assert int(block.sum()) == expected


def test_the_axes_are_layer_kv_token_head_dim(config):
    (plane,) = geometry_for(config, 0, 1, page_tokens=32, kv_dtype="bfloat16").planes
    assert [(axis.name, axis.size) for axis in plane.axes] == [
        ("layer", 2),
        ("kv", 2),
        ("token", 32),
        ("head", 3),
        ("dim", 16),
    ]
