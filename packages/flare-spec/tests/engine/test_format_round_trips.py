"""NVFP4, MXFP8 and FP8 against a reference in plain Python, number by number, and the bounds their errors keep."""

from __future__ import annotations

import math
from fractions import Fraction

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flare_core.errors import UsageError
from flare_spec.formats.fp8 import quantise_fp8
from flare_spec.formats.mxfp8 import Mxfp8Scaling, quantise_mxfp8
from flare_spec.formats.nvfp4 import quantise_nvfp4

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
F32 = np.float32
TINY = F32(2.0**-126)


def nearest(value: float, magnitudes: list[float]) -> int:
    """The code whose magnitude is nearest, the even one of two; past the last, the last."""
    return min(range(len(magnitudes)), key=lambda code: (abs(magnitudes[code] - abs(value)), code & 1))


def signed(value: float, magnitudes: list[float]) -> float:
    return math.copysign(magnitudes[nearest(value, magnitudes)], value)


def blocks(weight: np.ndarray, length: int):
    """(row, block, elements) of each block."""
    for row in range(weight.shape[0]):
        for block in range(weight.shape[1] // length):
            yield row, block, weight[row, block * length : (block + 1) * length]


def reference_nvfp4(weight: np.ndarray, amax: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed bytes, codes of block scales and values of ``weight`` (fp32) in NVFP4."""
    tensor_scale = max(F32(F32(amax) / F32(2688)), TINY)
    packed = np.zeros((weight.shape[0], weight.shape[1] // 2), np.uint8)
    scales = np.zeros((weight.shape[0], weight.shape[1] // 16), np.uint8)
    values = np.zeros_like(weight)
    for row, block, elements in blocks(weight, 16):
        wanted = F32(np.abs(elements).max() / F32(tensor_scale * F32(6)))
        scales[row, block] = max(nearest(float(wanted), E4M3), 1)
        divisor = F32(F32(E4M3[scales[row, block]]) * tensor_scale)
        for place, element in enumerate(elements):
            scaled = float(F32(element / divisor))
            code = nearest(scaled, E2M1) + (8 if math.copysign(1, scaled) < 0 else 0)
            column = 16 * block + place
            packed[row, column // 2] |= code << (4 if column % 2 else 0)
            values[row, column] = F32(F32(signed(scaled, E2M1)) * divisor)
    return packed, scales, values


def reference_mxfp8(weight: np.ndarray, scaling: Mxfp8Scaling) -> tuple[np.ndarray, np.ndarray]:
    """Codes of block scales and values of ``weight`` (fp32) in MXFP8, from exact fractions."""
    scales = np.zeros((weight.shape[0], weight.shape[1] // 32), np.uint8)
    values = np.zeros_like(weight)
    for row, block, elements in blocks(weight, 32):
        amax = Fraction(float(np.abs(elements).max()))
        exponent = -127
        if scaling is Mxfp8Scaling.RCEIL:
            while amax > 448 * Fraction(2) ** exponent:
                exponent += 1
        else:
            while amax >= Fraction(2) ** (exponent + 9):
                exponent += 1
        scales[row, block] = exponent + 127
        for place, element in enumerate(elements):
            scaled = math.ldexp(float(element), -exponent)
            values[row, 32 * block + place] = F32(math.ldexp(signed(scaled, E4M3), exponent))
    return scales, values


def reference_fp8(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row scales and values of ``weight`` (fp32) in FP8."""
    scales = np.maximum(np.abs(weight).max(axis=1) / F32(448), TINY)
    values = np.zeros_like(weight)
    for (row, column), element in np.ndenumerate(weight):
        values[row, column] = F32(F32(signed(float(F32(element / scales[row])), E4M3)) * scales[row])
    return scales, values


def random_weight(num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Blocks of very different size, zeros among them, and the numbers that lie between two codes."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((num_rows, num_columns)) * 2.0 ** generator.integers(-12, 3, (num_rows, 1))
    weight *= 2.0 ** np.repeat(generator.integers(-6, 1, (num_rows, num_columns // 16)), 16, axis=1)
    weight[1, :32] = 0.0
    weight[2, :16] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0]
    weight[3] = 0.0
    return weight.astype(F32)


def magnitudes(smallest: float, largest: float):
    positive = st.floats(F32(smallest), F32(largest), width=32)
    return st.one_of(st.just(0.0), positive, positive.map(lambda value: -value))


def weights(block: int, *, smallest: float = 2.0**-100, largest: float = 2.0**100):
    """Small weights with K a multiple of ``block``, of wild numbers or of numbers that are alike."""
    shape = st.tuples(st.integers(1, 3), st.integers(1, 2).map(lambda count: count * block))
    wild = shape.flatmap(lambda sides: arrays.arrays(F32, sides, elements=magnitudes(smallest, largest)))
    alike = shape.flatmap(lambda sides: arrays.arrays(F32, sides, elements=st.floats(-8, 8, width=16)))
    return st.one_of(wild, alike)


def same_bytes(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    return np.array_equal(tensor.cpu().view(torch.uint8).numpy(), expected)


def same_values(tensor: torch.Tensor, expected: np.ndarray) -> bool:
    return np.array_equal(tensor.cpu().numpy().view(np.int32), expected.view(np.int32))


def check_nvfp4(weight: np.ndarray, device: str) -> None:
    quantised = quantise_nvfp4(torch.from_numpy(weight).to(device))
    packed, scales, values = reference_nvfp4(weight, np.abs(weight).max())
    assert same_bytes(quantised.packed, packed)
    assert same_bytes(quantised.block_scales, scales)
    assert same_values(quantised.dequantise(torch.float32), values)


def check_mxfp8(weight: np.ndarray, scaling: Mxfp8Scaling, device: str) -> None:
    quantised = quantise_mxfp8(torch.from_numpy(weight).to(device), scaling=scaling)
    scales, values = reference_mxfp8(weight, scaling)
    assert same_bytes(quantised.block_scales, scales)
    assert same_values(quantised.dequantise(torch.float32), values)


def check_fp8(weight: np.ndarray, device: str) -> None:
    quantised = quantise_fp8(torch.from_numpy(weight).to(device))
    scales, values = reference_fp8(weight)
    assert same_values(quantised.row_scales, scales)
    assert same_values(quantised.dequantise(torch.float32), values)


@on_each_device
def test_a_weight_in_each_format_is_that_of_the_reference_bit_for_bit(device: str) -> None:
    weight = random_weight(6, 64)
    check_nvfp4(weight, device)
    check_mxfp8(weight, Mxfp8Scaling.RCEIL, device)
    check_mxfp8(weight, Mxfp8Scaling.FLOOR, device)
    check_fp8(weight, device)


@settings(max_examples=60)
@given(weight=weights(16))
def test_any_weight_in_nvfp4_is_that_of_the_reference(weight: np.ndarray) -> None:
    check_nvfp4(weight, "cpu")


@settings(max_examples=40)
@given(weight=weights(32), scaling=st.sampled_from(Mxfp8Scaling))
def test_any_weight_in_mxfp8_is_that_of_the_reference(weight: np.ndarray, scaling: Mxfp8Scaling) -> None:
    check_mxfp8(weight, scaling, "cpu")


@settings(max_examples=30)
@given(weight=weights(8))
def test_any_weight_in_fp8_is_that_of_the_reference(weight: np.ndarray) -> None:
    check_fp8(weight, "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_weight_is_quantised_as_the_fp32_numbers_that_it_holds(dtype: torch.dtype) -> None:
    weight = torch.from_numpy(random_weight(6, 64)).to(dtype)
    for quantise in (quantise_nvfp4, quantise_mxfp8, quantise_fp8):
        halves, wide = quantise(weight).dequantise(dtype), quantise(weight.float()).dequantise(torch.float32).to(dtype)
        assert torch.equal(halves, wide)


def test_a_weight_that_is_a_view_is_quantised_as_its_copy() -> None:
    columns = torch.from_numpy(random_weight(64, 64)).T
    for quantise in (quantise_nvfp4, quantise_mxfp8, quantise_fp8):
        assert torch.equal(
            quantise(columns).dequantise(torch.float32), quantise(columns.clone()).dequantise(torch.float32)
        )


# From subnormals of fp32, where scales run out, to a third of the largest, above which rounding up ends in infinity.
ANY_FLOATS = st.floats(-F32(1e38), F32(1e38), width=32)
HOSTILE = arrays.arrays(F32, (2, 32), elements=st.one_of(ANY_FLOATS, st.floats(-1e-37, 1e-37), st.just(0.0)).map(F32))


@settings(max_examples=80)
@given(weight=HOSTILE)
def test_scales_and_values_are_finite_for_every_finite_weight(weight: np.ndarray) -> None:
    tensor = torch.from_numpy(weight)
    for quantise in (quantise_nvfp4, quantise_mxfp8, quantise_fp8):
        quantised = quantise(tensor)
        assert quantised.dequantise(torch.float32).isfinite().all()
    assert quantise_nvfp4(tensor).block_scales.float().isfinite().all()
    assert quantise_mxfp8(tensor).block_scales.float().isfinite().all()
    assert quantise_fp8(tensor).row_scales.isfinite().all()


@settings(max_examples=60)
@given(weight=weights(16))
def test_an_nvfp4_element_is_within_one_scale_or_within_what_its_block_is_clipped_by(weight: np.ndarray) -> None:
    quantised = quantise_nvfp4(torch.from_numpy(weight))
    scales = np.repeat((quantised.block_scales.float() * quantised.tensor_scale).numpy().astype(np.float64), 16, axis=1)
    error = np.abs(quantised.dequantise(torch.float32).numpy().astype(np.float64) - weight)
    assert (error <= np.maximum(scales, np.abs(weight) - 6 * scales) * (1 + 2.0**-20)).all()


@settings(max_examples=60)
@given(weight=weights(32, smallest=2.0**-60))
def test_an_mxfp8_element_by_rceil_is_within_half_a_step_and_nothing_is_clipped(weight: np.ndarray) -> None:
    quantised = quantise_mxfp8(torch.from_numpy(weight))
    scales = np.repeat(quantised.block_scales.float().numpy().astype(np.float64), 32, axis=1)
    error = np.abs(quantised.dequantise(torch.float32).numpy().astype(np.float64) - weight)
    assert (error <= np.maximum(np.abs(weight) / 16, scales * 2.0**-10)).all()


@settings(max_examples=60)
@given(weight=weights(32, smallest=2.0**-60))
def test_an_mxfp8_element_by_floor_loses_at_most_an_eighth(weight: np.ndarray) -> None:
    quantised = quantise_mxfp8(torch.from_numpy(weight), scaling=Mxfp8Scaling.FLOOR)
    scales = np.repeat(quantised.block_scales.float().numpy().astype(np.float64), 32, axis=1)
    error = np.abs(quantised.dequantise(torch.float32).numpy().astype(np.float64) - weight)
    assert (error <= np.maximum(np.abs(weight) / 8, scales * 2.0**-10)).all()


def test_rceil_keeps_448_and_moves_on_just_above_it_while_floor_clips() -> None:
    weight = torch.zeros(3, 32)
    weight[:, 0] = torch.from_numpy(np.array([448, np.nextafter(F32(448), F32(449)), 511], F32))
    assert quantise_mxfp8(weight).block_scales.view(torch.uint8).flatten().tolist() == [127, 128, 128]
    floor = quantise_mxfp8(weight, scaling=Mxfp8Scaling.FLOOR)
    assert floor.block_scales.view(torch.uint8).flatten().tolist() == [127, 127, 127]
    assert floor.dequantise(torch.float32)[:, 0].tolist() == [448, 448, 448]


def test_a_block_of_zeros_keeps_zeros_and_a_scale_that_is_no_nan() -> None:
    zeros = torch.zeros(2, 64)
    for quantise in (quantise_nvfp4, quantise_mxfp8, quantise_fp8):
        assert not quantise(zeros).dequantise(torch.float32).any()
    assert quantise_mxfp8(zeros).block_scales.view(torch.uint8).flatten().tolist() == [0] * 4
    assert quantise_nvfp4(zeros).block_scales.float().flatten().tolist() == [2.0**-9] * 8


@settings(max_examples=40)
@given(weight=arrays.arrays(F32, (7, 32), elements=magnitudes(2.0**-20, 2.0**20)), cut=st.integers(1, 6))
def test_shards_by_rows_are_the_shards_of_the_whole_when_they_share_its_amax(weight: np.ndarray, cut: int) -> None:
    tensor = torch.from_numpy(weight)
    amax = tensor.abs().max()
    for rows in (slice(0, cut), slice(cut, 7)):
        shard, expected = quantise_nvfp4(tensor[rows], amax=amax), quantise_nvfp4(tensor).select(rows)
        assert torch.equal(shard.packed, expected.packed)
        assert torch.equal(shard.block_scales.view(torch.uint8), expected.block_scales.view(torch.uint8))
        assert torch.equal(shard.tensor_scale, expected.tensor_scale)
        for quantise in (quantise_mxfp8, quantise_fp8):
            whole = quantise(tensor).select(rows).dequantise(torch.float32)
            assert torch.equal(quantise(tensor[rows]).dequantise(torch.float32), whole)


@pytest.mark.parametrize("amax", [0.5, float("nan"), float("inf")])
def test_an_amax_that_cannot_be_that_of_the_whole_is_refused(amax: float) -> None:
    with pytest.raises(UsageError, match="reduce it over all shards"):
        quantise_nvfp4(torch.ones(2, 16), amax=torch.tensor(amax))


@pytest.mark.parametrize(
    ("quantise", "num_columns", "block"), [(quantise_nvfp4, 24, "blocks of 16"), (quantise_mxfp8, 48, "blocks of 32")]
)
def test_rows_that_are_no_whole_blocks_are_refused(quantise, num_columns: int, block: str) -> None:
    with pytest.raises(UsageError, match=block):
        quantise(torch.ones(2, num_columns))


@pytest.mark.parametrize("quantise", [quantise_nvfp4, quantise_mxfp8, quantise_fp8])
@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(2, 32, 1), "needs two axes"),
        (torch.ones(0, 32), "neither empty"),
        (torch.ones(2, 32, dtype=torch.float64), "dtype torch.float64"),
        (torch.ones(2, 32, dtype=torch.uint8), "dtype torch.uint8"),
        (torch.full((2, 32), float("nan")), "infinities or NaN"),
        (torch.full((2, 32), -float("inf")), "infinities or NaN"),
    ],
)
def test_a_weight_that_no_format_holds_is_refused(quantise, weight: torch.Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        quantise(weight)
