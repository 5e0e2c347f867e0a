"""NVFP4 weights as ModelOpt and compressed-tensors spell them, and the look-alikes that must not load."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flare_core.errors import CheckpointError
from flare_spec.formats.nvfp4 import Nvfp4Weight, quantise_nvfp4
from flare_spec.formats.nvfp4_dialects import pack_compressed_tensors, pack_modelopt, parse_nvfp4


def some_weight() -> Nvfp4Weight:
    return quantise_nvfp4(torch.randn(6, 64, generator=torch.Generator().manual_seed(1)))


def test_a_modelopt_weight_has_its_names_dtypes_and_shapes() -> None:
    tensors = pack_modelopt(some_weight())
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "weight": (torch.uint8, (6, 32)),
        "weight_scale": (torch.float8_e4m3fn, (6, 4)),
        "weight_scale_2": (torch.float32, ()),
    }


def test_a_compressed_tensors_weight_has_its_names_dtypes_and_shapes() -> None:
    tensors = pack_compressed_tensors(some_weight())
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == {
        "weight_packed": (torch.uint8, (6, 32)),
        "weight_scale": (torch.float8_e4m3fn, (6, 4)),
        "weight_global_scale": (torch.float32, (1,)),
    }


def test_a_modelopt_weight_by_hand_reads_as_the_numbers_its_exporter_meant() -> None:
    tensors = {
        "weight": torch.tensor([[0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F]], dtype=torch.uint8),
        "weight_scale": torch.tensor([[2.0]]).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.25),
        "input_scale": torch.tensor(1.0),
    }
    values = parse_nvfp4(tensors, layer="lm_head").dequantise(torch.float32)
    halves = [0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6, 0]
    assert values.tolist() == [[value / 2 for value in halves]]


def test_the_global_scale_of_compressed_tensors_is_a_divisor() -> None:
    tensors = {
        "weight_packed": torch.full((1, 8), 0x22, dtype=torch.uint8),
        "weight_scale": torch.tensor([[2.0]]).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([4.0]),
        "input_global_scale": torch.tensor([1.0]),
    }
    assert parse_nvfp4(tensors, layer="lm_head").dequantise(torch.float32).tolist() == [[0.5] * 16]


def test_a_weight_written_for_modelopt_is_read_back_bit_for_bit() -> None:
    weight = some_weight()
    again = parse_nvfp4(pack_modelopt(weight), layer="lm_head")
    assert torch.equal(again.dequantise(torch.float32), weight.dequantise(torch.float32))


def test_a_weight_written_for_compressed_tensors_is_read_back_but_for_a_last_bit_of_the_tensor_scale() -> None:
    weight = some_weight()
    again = parse_nvfp4(pack_compressed_tensors(weight), layer="lm_head")
    assert torch.equal(again.packed, weight.packed)
    assert torch.equal(again.block_scales.view(torch.uint8), weight.block_scales.view(torch.uint8))
    scale, read = np.float32(weight.tensor_scale.item()), np.float32(again.tensor_scale.item())
    assert np.nextafter(scale, np.float32(0)) <= read <= np.nextafter(scale, np.float32(1))


MXFP4 = {
    "in ModelOpt, scales as bytes": {
        "weight": torch.zeros(6, 32, dtype=torch.uint8),
        "weight_scale": torch.full((6, 2), 120, dtype=torch.uint8),
        "weight_scale_2": torch.tensor(1.0),
    },
    "with NVFP4's names, E8M0 scales": {
        "weight_packed": torch.zeros(6, 32, dtype=torch.uint8),
        "weight_scale": torch.full((6, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "weight_global_scale": torch.tensor([1.0]),
    },
    "of DeepSeek": {
        "weight": torch.zeros(6, 32, dtype=torch.int8),
        "scale": torch.full((6, 2), 120, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    },
}


@pytest.mark.parametrize("kind", MXFP4)
def test_mxfp4_is_refused_by_name(kind: str) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head.*E8M0 scales.*MXFP4"):
        parse_nvfp4(MXFP4[kind], layer="lm_head")


def damaged(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A ModelOpt weight with some tensors replaced, added or, by None, left out."""
    return {name: tensor for name, tensor in (pack_modelopt(some_weight()) | changes).items() if tensor is not None}


E4M3_ONES = torch.ones(6, 8).to(torch.float8_e4m3fn)
DAMAGED = {
    "blocks of 32": (damaged(weight_scale=E4M3_ONES[:, :2]), r"head.weight_scale: float8_e4m3fn \[6, 2\].*\[6, 4\]"),
    "scales of other rows": (damaged(weight_scale=E4M3_ONES[:4, :4]), r"head.weight_scale: float8_e4m3fn \[4, 4\]"),
    "scales in tiles": (damaged(weight_scale=torch.ones(512).to(torch.float8_e4m3fn)), r"head.weight_scale: .*\[512\]"),
    "scales in fp32": (damaged(weight_scale=torch.ones(6, 4)), "head.weight_scale: float32"),
    "negative scales": (
        damaged(weight_scale=torch.full((6, 4), -1.0).to(torch.float8_e4m3fn)),
        "negative numbers or NaN",
    ),
    "NaN scales": (
        damaged(weight_scale=torch.full((6, 4), torch.nan).to(torch.float8_e4m3fn)),
        "negative numbers or NaN",
    ),
    "rows of half a block": (damaged(weight=torch.zeros(6, 28, dtype=torch.uint8)), "56 elements are no blocks of 16"),
    "bf16 elements": (damaged(weight=torch.zeros(6, 64, dtype=torch.bfloat16)), r"head.weight: bfloat16 \[6, 64\]"),
    "elements of experts": (
        damaged(weight=torch.zeros(2, 6, 32, dtype=torch.uint8)),
        r"head.weight: uint8 \[2, 6, 32\]",
    ),
    "no elements": (damaged(weight=torch.zeros(0, 32, dtype=torch.uint8)), r"head.weight: uint8 \[0, 32\]"),
    "a tensor scale a row": (damaged(weight_scale_2=torch.ones(6)), r"head.weight_scale_2: float32 \[6\]"),
    "a tensor scale in bf16": (damaged(weight_scale_2=torch.tensor(1.0).bfloat16()), "head.weight_scale_2: bfloat16"),
    "a tensor scale of zero": (damaged(weight_scale_2=torch.tensor(0.0)), "head.weight_scale_2: is 0.0"),
    "a tensor scale of NaN": (damaged(weight_scale_2=torch.tensor(torch.nan)), "head.weight_scale_2: is nan"),
    "no tensor scale": (damaged(weight_scale_2=None), r"no NVFP4 weight.*found weight uint8 \[6, 32\], weight_scale"),
    "scales before quantising": (damaged(pre_quant_scale=torch.ones(64)), "head.pre_quant_scale: no part of an NVFP4"),
    "nothing": ({}, "found nothing"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_what_is_not_nvfp4_is_refused_with_the_name_of_its_tensor(kind: str) -> None:
    tensors, said = DAMAGED[kind]
    with pytest.raises(CheckpointError, match=said):
        parse_nvfp4(tensors, layer="head")
