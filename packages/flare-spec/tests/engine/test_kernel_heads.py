"""Products with quantised heads on Hopper against the chunked eager product, and the weights one by one."""

from __future__ import annotations

import pytest
import torch

from flare_core.errors import UsageError
from flare_spec.formats.fp8 import Fp8Weight
from flare_spec.formats.heads import prepare_head
from flare_spec.formats.mxfp8 import Mxfp8Weight
from flare_spec.formats.nvfp4 import Nvfp4Weight
from flare_spec.formats.row_chunks import project_by_chunks
from flare_spec.kernels.head_products import has_head_product
from flare_spec.kernels.launch import can_compile

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or not can_compile(),
        reason="needs a Hopper GPU and NVRTC",
    ),
]
FORMATS = ["fp8", "mxfp8", "nvfp4"]


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def codes_of(head):
    return head.packed if isinstance(head, Nvfp4Weight) else head.codes


@pytest.mark.parametrize("head_format", FORMATS)
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 32, 33, 64, 65, 150])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1000, 576), (777, 512), (70_000, 128), (300, 8192), (9, 96)])
def test_a_product_is_the_reference_within_the_rounding_of_sums(head_format, num_rows, num_outputs, num_inputs):
    head = prepare_head(normal(1, num_outputs, num_inputs) * 0.02, head_format)
    rows = normal(2, num_rows, num_inputs).bfloat16()
    assert has_head_product(codes_of(head))
    logits = head.project(rows)
    values = head.dequantise(torch.float32)
    exact = rows.double() @ values.double().T
    # Both sum in fp32, in orders of their own: each of K terms adds at most one rounding of a partial sum. The matrix
    # unit cuts off where fp32 rounds, so a term counts twice.
    bound = 2 * num_inputs * 2.0**-24 * (rows.double().abs() @ values.double().abs().T) + 1e-30
    assert logits.shape == (num_rows, num_outputs)
    assert ((logits.double() - exact).abs() <= bound).all()
    torch.testing.assert_close(logits, project_by_chunks(head, rows), atol=1e-4, rtol=1e-4)


def unit_products(head, num_inputs):
    """The weight [N, K] as products with unit vectors give it."""
    units = torch.eye(num_inputs, device="cuda").bfloat16()
    return torch.cat([head.project(part) for part in units.split(64)]).T


def test_every_fp8_code_and_scale_is_exact():
    codes = torch.arange(256, dtype=torch.uint8).repeat(3, 1).cuda()
    head = Fp8Weight(codes.view(torch.float8_e4m3fn), torch.tensor([0.37, 1e-30, 12345.6]).cuda())
    # A code that is NaN spoils its own row of logits; with it out of the way all others are bits of the reference.
    head.codes.view(torch.uint8)[:, [127, 255]] = 0
    assert torch.equal(unit_products(head, 256), head.dequantise(torch.float32))


def test_an_fp8_weight_that_is_nan_gives_nan():
    head = Fp8Weight(torch.full((2, 64), 127, dtype=torch.uint8).cuda().view(torch.float8_e4m3fn), torch.ones(2).cuda())
    assert head.project(torch.ones(1, 64).cuda()).isnan().all()


def test_every_mxfp8_code_is_exact_at_scales_of_many_orders():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 255]] = 0
    codes = codes.view(8, 32).repeat(1, 125).view(8, 125 * 32)
    scales = torch.arange(127 - 57, 127 + 68).repeat(8, 1).to(torch.uint8)
    head = Mxfp8Weight(codes.cuda().view(torch.float8_e4m3fn), scales.cuda().view(torch.float8_e8m0fnu))
    assert torch.equal(unit_products(head, 125 * 32), head.dequantise(torch.float32))


def test_every_nvfp4_code_with_every_scale_is_exact_but_for_the_last_product():
    packed = (torch.arange(0, 16, 2) | (torch.arange(1, 16, 2) << 4)).to(torch.uint8).repeat(2, 128)
    scales = torch.arange(128, dtype=torch.uint8).repeat(2, 1)
    scales[:, 127] = 0
    head = Nvfp4Weight(packed.cuda(), scales.cuda().view(torch.float8_e4m3fn), torch.tensor(0.0123).cuda())
    products, values = unit_products(head, 2048), head.dequantise(torch.float32)
    # The reference rounds block scale times tensor scale and that times the code, the kernel their exact product once.
    assert ((products.double() - values.double()).abs() <= values.double().abs() * 2.0**-22).all()
    one = Nvfp4Weight(head.packed, head.block_scales, torch.ones((), device="cuda"))
    assert torch.equal(unit_products(one, 2048), one.dequantise(torch.float32))


@pytest.mark.parametrize("head_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_of_other_dtypes_are_rounded_to_sixteen_bits_at_most(head_format, dtype):
    head = prepare_head(normal(1, 300, 512), head_format)
    rows = normal(2, 5, 512).to(dtype) * torch.tensor([1.0, 1e-6, 1e4, 0.0, 1.0]).cuda().unsqueeze(1).to(dtype)
    exact = rows.double() @ head.dequantise(torch.float64).T
    scale = rows.double().abs() @ head.dequantise(torch.float64).abs().T
    assert ((head.project(rows).double() - exact).abs() <= scale * 2.0**-8 + 1e-30).all()


@pytest.mark.parametrize("head_format", FORMATS)
def test_part_of_a_head_gives_that_part_of_the_logits(head_format):
    head = prepare_head(normal(1, 1200, 256), head_format)
    rows = normal(2, 3, 256)
    assert torch.equal(head.select(slice(500, 700)).project(rows), head.project(rows)[:, 500:700])


@pytest.mark.parametrize("head_format", FORMATS)
def test_a_product_comes_out_the_same_again_and_in_a_graph(head_format):
    head = prepare_head(normal(1, 140_000, 512), head_format)
    rows = normal(2, 20, 512)
    first = head.project(rows)
    for _ in range(20):
        assert torch.equal(head.project(rows), first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = head.project(rows)
    logits.zero_()
    graph.replay()
    assert torch.equal(logits, first)


@pytest.mark.parametrize("head_format", FORMATS)
def test_rows_of_another_width_are_refused(head_format):
    head = prepare_head(normal(1, 64, 128), head_format)
    with pytest.raises(UsageError, match="do not fit a head"):
        head.project(normal(2, 3, 96))


def test_weights_of_odd_rows_stay_with_the_eager_product():
    head = prepare_head(normal(1, 64, 72), "fp8")
    assert not has_head_product(head.codes)
    assert head.project(normal(2, 3, 72)).shape == (3, 64)
