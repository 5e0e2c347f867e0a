"""Prepared heads: sizes, products in chunks, rows by index, and the estimate of what a format costs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flare_core.errors import UsageError
from flare_spec.formats.bf16 import Bf16Weight
from flare_spec.formats.head_error import HeadError, head_error
from flare_spec.formats.heads import prepare_head
from flare_spec.formats.mxfp8 import Mxfp8Scaling, quantise_mxfp8
from flare_spec.formats.names import HeadFormat
from flare_spec.formats.row_chunks import project_by_chunks

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
on_each_device = pytest.mark.parametrize("device", DEVICES)
each_format = pytest.mark.parametrize("head_format", HeadFormat)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize(
    ("head_format", "num_bytes"),
    [("bf16", 2 * 6 * 64), ("fp8", 6 * 64 + 4 * 6), ("nvfp4", 6 * 32 + 6 * 4 + 4), ("mxfp8", 6 * 64 + 6 * 2)],
)
def test_a_head_takes_the_bytes_of_its_elements_and_scales(head_format: str, num_bytes: int) -> None:
    head = prepare_head(random(6, 64), head_format)
    assert head.num_bytes == num_bytes
    assert head.shape == (6, 64)


def test_a_format_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="'int4' is not known; use one of bf16, fp8, nvfp4, mxfp8"):
        prepare_head(random(6, 64), "int4")


def test_a_bf16_head_shares_the_memory_of_a_bf16_weight() -> None:
    weight = random(6, 64).bfloat16()
    head = prepare_head(weight, HeadFormat.BF16)
    assert isinstance(head, Bf16Weight)
    assert head.values.data_ptr() == weight.data_ptr()


def test_amax_reaches_the_format_that_has_a_scale_for_it() -> None:
    weight, amax = random(6, 64), torch.tensor(100.0)
    alone, shard = prepare_head(weight, "nvfp4"), prepare_head(weight, "nvfp4", amax=amax)
    assert not torch.equal(alone.dequantise(torch.float32), shard.dequantise(torch.float32))


@on_each_device
@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_with_the_dequantised_weight(device: str, head_format: str, dtype: torch.dtype) -> None:
    # Several chunks on a CPU, the last of them shorter.
    head = prepare_head(random(2311, 512, scale=0.05).to(device), head_format)
    rows = random(5, 512, seed=1).to(device=device, dtype=dtype)
    logits = head.project(rows)
    expected = rows.double() @ head.dequantise(torch.float32).double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


@each_format
def test_rows_chosen_by_index_or_by_slice_are_the_rows_of_the_whole(head_format: str) -> None:
    head = prepare_head(random(40, 64), head_format)
    index = torch.tensor([39, 0, 7, 7])
    whole = head.dequantise(torch.bfloat16)
    assert torch.equal(head.select(index).dequantise(torch.bfloat16), whole[index])
    assert torch.equal(head.select(slice(3, 9)).dequantise(torch.bfloat16), whole[3:9])
    assert head.select(index).shape == (4, 64)


@each_format
def test_a_slice_of_a_head_takes_no_memory(head_format: str) -> None:
    head = prepare_head(random(40, 64), head_format)
    fields = [getattr(head, name) for name in type(head).__dataclass_fields__]
    parts = [getattr(head.select(slice(0, 9)), name) for name in type(head).__dataclass_fields__]
    assert [part.data_ptr() for part in parts] == [field.data_ptr() for field in fields]


class Recorder:
    """A weight of ones that keeps how many elements were dequantised at a time."""

    def __init__(self, shape: tuple[int, int], seen: list[int]) -> None:
        self.shape = shape
        self.seen = seen

    def select(self, rows: slice) -> Recorder:
        return Recorder((rows.stop - rows.start, self.shape[1]), self.seen)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        self.seen.append(self.shape[0] * self.shape[1])
        return torch.ones(self.shape, dtype=dtype)


def test_a_product_dequantises_a_small_part_of_the_weight_at_a_time() -> None:
    seen: list[int] = []
    logits = project_by_chunks(Recorder((30_001, 256), seen), torch.ones(2, 256))
    assert torch.equal(logits, torch.full((2, 30_001), 256.0))
    assert sum(seen) == 30_001 * 256
    assert max(seen) <= 1 << 20


@pytest.mark.parametrize("rows", [torch.ones(64), torch.ones(2, 63)])
def test_rows_that_do_not_fit_a_head_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="do not fit a head of shape"):
        prepare_head(random(6, 64), "fp8").project(rows)


def test_a_bf16_head_is_without_error() -> None:
    weight, rows = random(100, 64), random(9, 64, seed=1)
    error = head_error(weight, prepare_head(weight, "bf16"), rows)
    assert error == HeadError(relative_logit_error=0.0, top1_agreement=1.0, mean_total_variation=0.0)


def test_the_error_of_a_head_is_that_of_its_definition() -> None:
    weight, rows = random(50, 64, scale=0.3), random(20, 64, seed=1)
    prepared = prepare_head(weight, "nvfp4")
    error = head_error(weight, prepared, rows)
    exact = rows.double().numpy() @ weight.bfloat16().double().numpy().T
    approximate = rows.double().numpy() @ prepared.dequantise(torch.float32).double().numpy().T

    def softmax(row: np.ndarray) -> np.ndarray:
        return np.exp(row) / np.exp(row).sum()

    variations = [np.abs(softmax(p) - softmax(q)).sum() / 2 for p, q in zip(exact, approximate, strict=True)]
    relative = math.sqrt(((approximate - exact) ** 2).sum() / (exact**2).sum())
    assert error.relative_logit_error == pytest.approx(relative, rel=1e-4)
    assert error.mean_total_variation == pytest.approx(np.mean(variations), rel=1e-4)
    assert error.top1_agreement == pytest.approx((exact.argmax(1) == approximate.argmax(1)).mean())


def test_an_estimate_in_several_batches_is_that_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = random(100, 64), random(9, 64, seed=1)
    prepared = prepare_head(weight, "fp8")
    whole = head_error(weight, prepared, rows)
    monkeypatch.setattr("flare_spec.formats.head_error._LOGITS_AT_ONCE", 250)
    batched = head_error(weight, prepared, rows)
    assert batched.top1_agreement == whole.top1_agreement
    assert batched.relative_logit_error == pytest.approx(whole.relative_logit_error, rel=1e-4)
    assert batched.mean_total_variation == pytest.approx(whole.mean_total_variation, rel=1e-4)


@on_each_device
def test_four_bits_err_more_than_eight_and_floor_more_than_rceil(device: str) -> None:
    weight, rows = random(4000, 256, scale=0.2).to(device), random(200, 256, seed=1).to(device)
    nvfp4, fp8, rceil = (head_error(weight, prepare_head(weight, name), rows) for name in ("nvfp4", "fp8", "mxfp8"))
    floor = head_error(weight, quantise_mxfp8(weight, scaling=Mxfp8Scaling.FLOOR), rows)
    assert nvfp4.relative_logit_error > 2 * fp8.relative_logit_error
    assert nvfp4.mean_total_variation > floor.mean_total_variation > rceil.mean_total_variation
    assert nvfp4.top1_agreement < rceil.top1_agreement


@pytest.mark.parametrize("rows", [torch.ones(0, 64), torch.ones(64)])
def test_an_error_of_no_rows_is_refused(rows: torch.Tensor) -> None:
    weight = random(6, 64)
    with pytest.raises(UsageError, match="at least one row"):
        head_error(weight, prepare_head(weight, "fp8"), rows)


def test_a_head_made_from_another_weight_is_refused() -> None:
    with pytest.raises(UsageError, match="not made from a weight"):
        head_error(random(7, 64), prepare_head(random(6, 64), "fp8"), random(2, 64))
