"""Block scales in tiles of 128 rows and 4 columns: each has its place, and comes back from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_core.errors import UsageError
from flare_spec.formats.scale_tiles import scales_from_tiles, scales_to_tiles


def random_scales(num_rows: int, num_columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randint(1, 255, (num_rows, num_columns), generator=generator).to(torch.uint8)


@settings(max_examples=30)
@given(num_rows=st.integers(1, 300), num_columns=st.integers(1, 13))
def test_scales_come_back_from_tiles_and_the_rest_of_the_tiles_is_zero(num_rows: int, num_columns: int) -> None:
    scales = random_scales(num_rows, num_columns)
    tiles = scales_to_tiles(scales)
    assert tiles.shape == (-(-num_rows // 128) * 128 * -(-num_columns // 4) * 4,)
    assert torch.equal(scales_from_tiles(tiles, (num_rows, num_columns)), scales)
    assert int((tiles == 0).sum()) == tiles.numel() - scales.numel()


def test_a_scale_lies_where_the_layout_says() -> None:
    scales = random_scales(200, 6)
    tiles = scales_to_tiles(scales)
    for row in range(200):
        for column in range(6):
            tile = (row // 128) * 2 + column // 4
            place = 512 * tile + (row % 32) * 16 + (row // 32 % 4) * 4 + column % 4
            assert tiles[place] == scales[row, column]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_scales_keep_their_dtype(dtype: torch.dtype) -> None:
    scales = random_scales(5, 3).view(dtype)
    tiles = scales_to_tiles(scales)
    assert tiles.dtype == dtype
    assert torch.equal(scales_from_tiles(tiles, (5, 3)).view(torch.uint8), scales.view(torch.uint8))


def test_tiles_of_another_size_are_refused() -> None:
    with pytest.raises(UsageError, match="512 bytes of scale tiles are not those of 129 rows and 4 columns"):
        scales_from_tiles(torch.zeros(512, dtype=torch.uint8), (129, 4))
