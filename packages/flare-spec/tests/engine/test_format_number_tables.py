"""E2M1, E4M3 and E8M0 code by code: values, every midpoint and its neighbours, saturation, zero, infinity, NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flare_spec.formats.e2m1 import decode_e2m1, decode_packed_e2m1, encode_e2m1, pack_nibbles, unpack_nibbles
from flare_spec.formats.e4m3 import decode_e4m3, encode_e4m3
from flare_spec.formats.e8m0 import E8M0Rounding, decode_e8m0, encode_e8m0

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
pytestmark = pytest.mark.parametrize("device", DEVICES)

E2M1_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Written out from the format's definition: exponent field 0 is subnormal, the bias is 7, code 0x7F is NaN.
E4M3_MAGNITUDES = [
    (code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7) for code in range(127)
]
INFINITY, NAN = float("inf"), float("nan")
ENCODINGS = {
    "E2M1": (encode_e2m1, E2M1_MAGNITUDES, 0x8),
    "E4M3": (encode_e4m3, E4M3_MAGNITUDES, 0x80),
}


def floats(values: object, device: str) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.float32)).to(device)


def beside(values: object, towards: float) -> np.ndarray:
    """The next fp32 number of each, in one direction."""
    return np.nextafter(np.asarray(values, dtype=np.float32), np.float32(towards))


def every(device: str, count: int = 256) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8, device=device)


def bits(values: torch.Tensor) -> list[int]:
    """The bits of fp32 values: unlike numbers, they tell zeros apart."""
    return values.cpu().view(torch.int32).tolist()


def test_each_of_the_16_codes_of_e2m1_has_its_value_and_gets_its_code_back(device: str) -> None:
    values = decode_e2m1(every(device, 16))
    assert bits(values) == bits(floats([*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES)], "cpu"))
    assert encode_e2m1(values).tolist() == list(range(16))


def test_each_byte_of_packed_e2m1_has_the_even_element_in_its_low_nibble(device: str) -> None:
    packed = every(device)
    low, high = decode_e2m1(packed & 15), decode_e2m1(packed >> 4)
    assert bits(decode_packed_e2m1(packed.view(16, 16))) == bits(torch.stack((low, high), dim=1).view(16, 32))
    assert pack_nibbles(unpack_nibbles(packed)).tolist() == list(range(256))
    assert pack_nibbles(torch.tensor([1, 2, 3, 4], dtype=torch.uint8, device=device)).tolist() == [0x21, 0x43]


def test_each_of_the_256_codes_of_e4m3_has_the_value_that_torch_gives_it(device: str) -> None:
    values = decode_e4m3(every(device)).cpu()
    assert values[:127].tolist() == E4M3_MAGNITUDES
    torch_values = every("cpu").view(torch.float8_e4m3fn).float()
    assert values.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert bits(values.nan_to_num(1.0)) == bits(torch_values.nan_to_num(1.0))
    assert torch.equal(
        decode_e4m3(every(device).view(torch.float8_e4m3fn)).cpu().nan_to_num(1.0), values.nan_to_num(1.0)
    )


def test_each_of_the_256_codes_of_e4m3_gets_its_code_back_and_both_nans_one_of_theirs(device: str) -> None:
    assert encode_e4m3(decode_e4m3(every(device))).tolist() == [*range(255), 0x7F]


def test_every_bf16_and_fp16_number_becomes_the_e4m3_code_that_torch_gives_it(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
        numbers = numbers[~numbers.isnan()]
        expected = numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(encode_e4m3(numbers.to(device)).cpu(), expected)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_midpoint_goes_to_the_even_code_and_its_neighbours_to_the_nearer(device: str, name: str) -> None:
    encode, magnitudes, sign = ENCODINGS[name]
    lower = np.arange(len(magnitudes) - 1)
    middle = (np.float64(magnitudes[:-1]) + np.float64(magnitudes[1:])) / 2
    for flip, offset in ((1.0, 0), (-1.0, sign)):
        assert encode(floats(flip * middle, device)).tolist() == (lower + lower % 2 + offset).tolist()
        assert encode(floats(flip * beside(middle, 0.0), device)).tolist() == (lower + offset).tolist()
        assert encode(floats(flip * beside(middle, INFINITY), device)).tolist() == (lower + 1 + offset).tolist()


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_number_beside_a_value_goes_to_it(device: str, name: str) -> None:
    encode, magnitudes, _ = ENCODINGS[name]
    codes = list(range(len(magnitudes)))
    assert encode(floats(beside(magnitudes, INFINITY), device)).tolist() == codes
    assert encode(floats(beside(magnitudes[1:], 0.0), device)).tolist() == codes[1:]


@pytest.mark.parametrize("name", ENCODINGS)
def test_what_is_too_large_saturates_and_zeros_keep_their_sign(device: str, name: str) -> None:
    encode, magnitudes, sign = ENCODINGS[name]
    largest, top = magnitudes[-1], len(magnitudes) - 1
    large = [float(beside(largest, INFINITY)), largest * 1.2, 1e4, 3.4e38, INFINITY]
    assert encode(floats(large, device)).tolist() == [top] * 5
    assert encode(floats([-value for value in large], device)).tolist() == [top + sign] * 5
    assert encode(floats([0.0, -0.0, 1e-45, -1e-45], device)).tolist() == [0, sign, 0, sign]


def test_nan_stays_nan_in_e4m3_and_saturates_in_e2m1_which_has_none(device: str) -> None:
    assert encode_e4m3(floats([NAN, -NAN], device)).tolist() == [0x7F, 0xFF]
    assert encode_e2m1(floats([NAN, -NAN], device)).tolist() == [7, 15]


def test_each_of_the_256_codes_of_e8m0_has_the_value_that_torch_gives_it(device: str) -> None:
    values = decode_e8m0(every(device)).cpu()
    assert values[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert values.isnan().nonzero().flatten().tolist() == [255]
    assert torch.equal(values[:255], every("cpu", 255).view(torch.float8_e8m0fnu).float())
    assert torch.equal(decode_e8m0(every(device).view(torch.float8_e8m0fnu)).cpu()[:255], values[:255])


def test_each_power_of_two_and_its_neighbours_get_the_e8m0_code_below_or_above(device: str) -> None:
    codes = np.arange(255)
    powers = np.float32(2.0) ** np.arange(-127, 128, dtype=np.float32)
    down, up = E8M0Rounding.DOWN, E8M0Rounding.UP
    above, below = np.minimum(codes + 1, 254).tolist(), np.maximum(codes - 1, 0).tolist()
    for rounding in (down, up):
        assert encode_e8m0(floats(powers, device), rounding).tolist() == codes.tolist()
        assert encode_e8m0(floats(-powers, device), rounding).tolist() == codes.tolist()
    for between in (beside(powers, INFINITY), powers * np.float32(1.5)):
        assert encode_e8m0(floats(between, device), down).tolist() == codes.tolist()
        assert encode_e8m0(floats(between, device), up).tolist() == above
    assert encode_e8m0(floats(beside(powers, 0.0), device), down).tolist() == below
    assert encode_e8m0(floats(beside(powers, 0.0), device), up).tolist() == codes.tolist()


@pytest.mark.parametrize("rounding", E8M0Rounding)
def test_e8m0_has_no_zero_and_no_infinity_but_nan(device: str, rounding: E8M0Rounding) -> None:
    values = floats([0.0, -0.0, 1e-45, 3.4e38, INFINITY, NAN], device)
    assert encode_e8m0(values, rounding).tolist() == [0, 0, 0, 254, 254, 255]
