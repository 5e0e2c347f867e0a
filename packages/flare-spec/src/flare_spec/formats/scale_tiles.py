"""Owns the order in which block-scaled matrix products want the block scales: tiles of 128 rows and 4 columns.

cuBLAS' layout for block scales (``SWIZZLE_32_4_4`` in torch). A tile is 512 bytes; in it the scale of row r, column c
lies at ``(r % 32) * 16 + (r // 32) * 4 + c``; tiles follow one another along columns, then rows. What the last tiles
have too much is zero. Knows no number format: scales are bytes.
"""

from __future__ import annotations

from typing import Final

import torch

from flare_core.errors import UsageError

__all__ = ["scales_from_tiles", "scales_to_tiles"]

_ROWS: Final = 128
_COLUMNS: Final = 4


def scales_to_tiles(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` (uint8, or a float8 dtype, [R, C]) in tiles: the same dtype, one axis, R and C rounded up to tiles."""
    num_rows, num_columns = scales.shape
    tile_rows, tile_columns = -(-num_rows // _ROWS), -(-num_columns // _COLUMNS)
    padded = torch.zeros((tile_rows * _ROWS, tile_columns * _COLUMNS), dtype=torch.uint8, device=scales.device)
    padded[:num_rows, :num_columns] = scales.view(torch.uint8)
    quarters = padded.view(tile_rows, 4, 32, tile_columns, _COLUMNS)
    return quarters.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def scales_from_tiles(tiles: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """The scales [R, C] = ``shape`` in ``tiles``, without what fills the last ones; ``UsageError`` if sizes differ."""
    num_rows, num_columns = shape
    tile_rows, tile_columns = -(-num_rows // _ROWS), -(-num_columns // _COLUMNS)
    if tiles.numel() != tile_rows * tile_columns * _ROWS * _COLUMNS:
        raise UsageError(
            f"{tiles.numel()} bytes of scale tiles are not those of {num_rows} rows and {num_columns} columns"
        )
    quarters = tiles.view(torch.uint8).view(tile_rows, tile_columns, 32, 4, _COLUMNS)
    padded = quarters.permute(0, 3, 2, 1, 4).reshape(tile_rows * _ROWS, tile_columns * _COLUMNS)
    return padded[:num_rows, :num_columns].contiguous().view(tiles.dtype)
