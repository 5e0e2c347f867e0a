"""Owns how checkpoints spell an NVFP4 weight: NVIDIA ModelOpt's names and those of compressed-tensors. Reads no files.

=====================  ====================  ========================  =========================================
what                   ModelOpt              compressed-tensors        dtype and shape
=====================  ====================  ========================  =========================================
elements               ``weight``            ``weight_packed``         uint8 [N, K/2], even k in the low nibble
block scales           ``weight_scale``      ``weight_scale``          float8_e4m3fn [N, K/16], row-major
tensor scale           ``weight_scale_2``    ``weight_global_scale``   fp32, one number: times | its reciprocal
activations (not used) ``input_scale``       ``input_global_scale``    fp32, one number
=====================  ====================  ========================  =========================================

MXFP4 has packed elements of the same shape, but E8M0 scales for blocks of 32, which read as E4M3 are garbage: it and
whatever else is not NVFP4 is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from flare_core.errors import CheckpointError
from flare_spec.formats.nvfp4 import NVFP4_BLOCK, Nvfp4Weight

__all__ = ["pack_compressed_tensors", "pack_modelopt", "parse_nvfp4"]


@dataclass(frozen=True, slots=True)
class _Dialect:
    elements: str
    tensor_scale: str
    activations: str

    @property
    def names(self) -> frozenset[str]:
        return frozenset((self.elements, _BLOCK_SCALES, self.tensor_scale))


_BLOCK_SCALES: Final = "weight_scale"
_MODELOPT: Final = _Dialect("weight", "weight_scale_2", "input_scale")
_COMPRESSED_TENSORS: Final = _Dialect("weight_packed", "weight_global_scale", "input_global_scale")


def pack_modelopt(weight: Nvfp4Weight) -> dict[str, torch.Tensor]:
    """The tensors of ``weight`` under ModelOpt's names; they share its memory."""
    return {
        _MODELOPT.elements: weight.packed,
        _BLOCK_SCALES: weight.block_scales,
        _MODELOPT.tensor_scale: weight.tensor_scale,
    }


def pack_compressed_tensors(weight: Nvfp4Weight) -> dict[str, torch.Tensor]:
    """The tensors of ``weight`` under the names of compressed-tensors; all but the tensor scale share its memory.

    A reciprocal taken twice may differ from the number in its last bit: so may the tensor scale that is read back.
    """
    return {
        _COMPRESSED_TENSORS.elements: weight.packed,
        _BLOCK_SCALES: weight.block_scales,
        _COMPRESSED_TENSORS.tensor_scale: weight.tensor_scale.reciprocal().reshape(1),
    }


def parse_nvfp4(tensors: Mapping[str, torch.Tensor], *, layer: str) -> Nvfp4Weight:
    """The weight in ``tensors``, the tensors of one layer by the last part of their names, in either dialect.

    ``layer`` (such as ``lm_head``) is for messages. The weight shares the tensors' memory. Raises ``CheckpointError``,
    which names the tensor, for missing or unknown names, wrong dtypes or shapes, and scales that no NVFP4 weight has.
    """
    dialect = _dialect_of(tensors, layer)
    unknown = sorted(tensors.keys() - dialect.names - {dialect.activations})
    if unknown:
        raise CheckpointError(
            f"{layer}.{unknown[0]}: no part of an NVFP4 weight, and to leave it out could change the weight's meaning"
        )
    packed = tensors[dialect.elements]
    if packed.dtype != torch.uint8 or packed.ndim != 2 or packed.numel() == 0:
        raise CheckpointError(
            f"{layer}.{dialect.elements}: {_said(packed)}; NVFP4 has two elements a byte, uint8 [N, K/2]"
        )
    scales = _checked_block_scales(tensors[_BLOCK_SCALES], packed, layer)
    tensor_scale = _checked_tensor_scale(tensors[dialect.tensor_scale], f"{layer}.{dialect.tensor_scale}")
    if dialect is _COMPRESSED_TENSORS:
        tensor_scale = tensor_scale.reciprocal()
    return Nvfp4Weight(packed, scales, tensor_scale)


def _dialect_of(tensors: Mapping[str, torch.Tensor], layer: str) -> _Dialect:
    for dialect in (_MODELOPT, _COMPRESSED_TENSORS):
        if dialect.names <= tensors.keys():
            return dialect
    found = ", ".join(f"{name} {_said(tensor)}" for name, tensor in sorted(tensors.items())) or "nothing"
    if any(tensor.dtype == torch.float8_e8m0fnu for tensor in tensors.values()):
        found += ", whose E8M0 scales are those of MXFP4 or MXFP8"
    raise CheckpointError(
        f"{layer}: no NVFP4 weight, which is {_MODELOPT.elements}, {_BLOCK_SCALES} and {_MODELOPT.tensor_scale} in "
        f"ModelOpt, {_COMPRESSED_TENSORS.elements}, {_BLOCK_SCALES} and {_COMPRESSED_TENSORS.tensor_scale} in "
        f"compressed-tensors; found {found}"
    )


def _checked_block_scales(scales: torch.Tensor, packed: torch.Tensor, layer: str) -> torch.Tensor:
    name = f"{layer}.{_BLOCK_SCALES}"
    num_rows, num_columns = packed.shape[0], 2 * packed.shape[1]
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"{name}: {_said(scales)} are E8M0 scales, those of MXFP4; NVFP4's are float8_e4m3fn")
    if num_columns % NVFP4_BLOCK:
        raise CheckpointError(
            f"{layer}: rows of {num_columns} elements are no blocks of {NVFP4_BLOCK}, which NVFP4 has"
        )
    expected = (num_rows, num_columns // NVFP4_BLOCK)
    if scales.dtype != torch.float8_e4m3fn or tuple(scales.shape) != expected:
        raise CheckpointError(
            f"{name}: {_said(scales)} does not fit elements of {tuple(packed.shape)} bytes; "
            f"NVFP4 has a scale for each {NVFP4_BLOCK} elements, float8_e4m3fn {list(expected)}"
        )
    codes = scales.view(torch.uint8)
    if bool((codes >= 0x7F).any()):
        raise CheckpointError(f"{name}: holds negative numbers or NaN, which no NVFP4 scale is; the scales may be E8M0")
    return scales


def _checked_tensor_scale(scale: torch.Tensor, name: str) -> torch.Tensor:
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise CheckpointError(f"{name}: {_said(scale)}; the scale of a whole NVFP4 tensor is one float32")
    if not bool((scale > 0).all() & scale.isfinite().all()):
        raise CheckpointError(f"{name}: is {float(scale)}; a scale is finite and greater than zero")
    return scale.reshape(())


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
