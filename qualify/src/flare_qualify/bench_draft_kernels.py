"""Kernels of drafting on a GPU: products with quantised heads and the Markov walk, each beside its floor.

A floor is the time that the bytes a kernel has to read or write take at the rate of a copy measured here; products have
a second one, their arithmetic at the rate of a large bf16 product, and the greater counts. Run as
``python -m flare_qualify.bench_draft_kernels --json FILE`` on a machine with a Hopper GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from flare_spec.dspark.block_sampling import MarkovBlock, markov_sample_block
from flare_spec.dspark.config import MarkovKind
from flare_spec.dspark.markov import MarkovHead
from flare_spec.formats.fp8 import Fp8Weight
from flare_spec.formats.heads import PreparedHead, prepare_head
from flare_spec.formats.row_chunks import project_by_chunks
from flare_spec.kernels.markov import markov_sample_block_cuda

__all__ = ["HeadCell", "WalkCell", "main"]

DATASHEET_BYTES_PER_SECOND = 4.8e12
LEAST_RATIO = 0.7
FORMATS = ("fp8", "mxfp8", "nvfp4")
VOCABULARY, HIDDEN, RANK = 129_280, 4096, 256
NUM_ROWS = (1, 16, 64)
WALKS = ((1, 128), (1, 1024), (32, 128), (128, 128), (128, 1024))
"""Sequences and candidates of a slot."""
GAMMA = 7


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device does: bytes a second (read and written) of a copy, operations a second of a bf16 product."""

    bytes_per_second: float
    operations_per_second: float


@dataclass(frozen=True, slots=True)
class HeadCell:
    """A product's times in seconds. ``floor_seconds`` is the greater of its bytes' and its arithmetic's."""

    head_format: str
    num_rows: int
    kernel_seconds: float
    eager_seconds: float
    bf16_seconds: float
    scaled_mm_seconds: float | None
    bytes_floor_seconds: float
    datasheet_floor_seconds: float
    floor_seconds: float

    @property
    def ratio(self) -> float:
        """Of the floor that a bandwidth alone sets, by the measured copy."""
        return self.bytes_floor_seconds / self.kernel_seconds


@dataclass(frozen=True, slots=True)
class WalkCell:
    """The walk over a block of ``GAMMA`` slots: times in seconds."""

    batch: int
    num_candidates: int
    kernel_seconds: float
    eager_seconds: float
    floor_seconds: float


def time_of(work: Callable[[], object], *, num_calls: int = 20, num_rounds: int = 7) -> float:
    """Seconds of a call: the median round of calls one behind the other, by the device's clock."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    rounds: list[float] = []
    for _ in range(num_rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(num_calls):
            work()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / num_calls / 1e3)
    return median(rounds)


def time_of_graph(work: Callable[[], object], *, num_calls: int = 20) -> float:
    """Like :func:`time_of`, of a graph of ``num_calls`` calls: without the host's time."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            work()
    return time_of(graph.replay, num_calls=1) / num_calls


def measure_ceilings(device: torch.device) -> Ceilings:
    """Rates of a copy of 2 GiB and of a product of 8192 x 8192 x 8192, on random numbers."""
    source = torch.randint(0, 1 << 62, (1 << 28,), device=device)
    target = torch.empty_like(source)
    copy_seconds = time_of(lambda: target.copy_(source), num_calls=5)
    side = 8192
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
    product_seconds = time_of(lambda: left @ right, num_calls=5)
    return Ceilings(2 * source.nbytes / copy_seconds, 2 * side**3 / product_seconds)


def measure_heads(device: torch.device, ceilings: Ceilings) -> list[HeadCell]:
    """Every format with every number of rows, at ``HIDDEN`` and ``VOCABULARY``."""
    weight = torch.randn(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device=device) * 0.02
    heads = {name: prepare_head(weight, name) for name in FORMATS}
    cells = []
    for num_rows in NUM_ROWS:
        rows = torch.randn(num_rows, HIDDEN, dtype=torch.bfloat16, device=device)
        bf16_seconds = time_of_graph(lambda rows=rows: rows @ weight.T)  # type: ignore[misc]
        for name, head in heads.items():
            cells.append(_head_cell(name, head, rows, bf16_seconds, ceilings))
    return cells


def _head_cell(name: str, head: PreparedHead, rows: torch.Tensor, bf16_seconds: float, ceilings: Ceilings) -> HeadCell:
    num_rows = rows.shape[0]
    bytes_floor = head.num_bytes / ceilings.bytes_per_second
    operations = 2 * num_rows * VOCABULARY * HIDDEN
    return HeadCell(
        head_format=name,
        num_rows=num_rows,
        kernel_seconds=time_of_graph(lambda: head.project(rows)),
        eager_seconds=time_of(lambda: project_by_chunks(head, rows), num_calls=1, num_rounds=3),
        bf16_seconds=bf16_seconds,
        scaled_mm_seconds=_scaled_mm_seconds(head, num_rows) if isinstance(head, Fp8Weight) else None,
        bytes_floor_seconds=bytes_floor,
        datasheet_floor_seconds=head.num_bytes / DATASHEET_BYTES_PER_SECOND,
        floor_seconds=max(bytes_floor, operations / ceilings.operations_per_second),
    )


def _scaled_mm_seconds(head: Fp8Weight, num_rows: int) -> float | None:
    """Torch's product of FP8 by FP8, whose rows would have to be quantised too; None where it has none."""
    device = head.codes.device
    rows = torch.randn(num_rows, HIDDEN, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(num_rows, 1, device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(
            rows, head.codes.T, scale_a=scales, scale_b=head.row_scales.unsqueeze(0), out_dtype=torch.bfloat16
        )

    try:
        return time_of_graph(product)
    except RuntimeError:
        return None


def measure_walks(device: torch.device, ceilings: Ceilings) -> list[WalkCell]:
    """The walk of every number of sequences and candidates, sampled; ids differ from call to call of the kernel."""
    w1, w2 = (torch.randn(VOCABULARY, RANK, dtype=torch.bfloat16, device=device) for _ in range(2))
    head = MarkovHead(MarkovKind.VANILLA, w1, w2, None)
    return [_walk_cell(head, batch, columns, ceilings) for batch, columns in WALKS]


def _walk_cell(head: MarkovHead, batch: int, columns: int, ceilings: Ceilings) -> WalkCell:
    device = head.w1.device
    base = torch.randn(batch, GAMMA, columns, device=device).bfloat16()
    # As many sets as keep the rows of one from being found in the cache by the next.
    bytes_of_rows = batch * GAMMA * columns * RANK * 2
    num_sets = max(2, min(64, (1 << 28) // bytes_of_rows))
    sets = [
        torch.rand(batch, GAMMA, VOCABULARY if batch * columns < 8192 else 4 * columns, device=device)
        .topk(columns, dim=2)
        .indices
        for _ in range(num_sets)
    ]
    numbers, temperatures = torch.arange(batch, device=device), torch.ones(batch, device=device)
    hidden = torch.zeros(batch, GAMMA, 1, device=device)

    def walk() -> list[MarkovBlock]:
        return [
            markov_sample_block_cuda(
                base, ids, head, anchors=numbers, temperatures=temperatures, seeds=numbers, positions=numbers
            )
            for ids in sets
        ]

    def walk_eagerly() -> MarkovBlock:
        return markov_sample_block(
            base,
            sets[0],
            head,
            hidden=hidden,
            anchors=numbers,
            temperatures=temperatures,
            seeds=numbers,
            positions=numbers,
        )

    # Rows of w2, ids, base logits and scores once; rows of w1 and features once a slot.
    num_bytes = batch * GAMMA * (columns * (RANK * 2 + 8 + 2 + 2) + 2 * RANK * 2)
    return WalkCell(
        batch=batch,
        num_candidates=columns,
        kernel_seconds=time_of_graph(walk, num_calls=1) / num_sets,
        eager_seconds=time_of(walk_eagerly, num_calls=3, num_rounds=5),
        floor_seconds=num_bytes / ceilings.bytes_per_second,
    )


def _report(console: Console, ceilings: Ceilings, heads: Sequence[HeadCell], walks: Sequence[WalkCell]) -> None:
    rate, speed = ceilings.bytes_per_second / 1e12, ceilings.operations_per_second / 1e12
    console.print(f"copy {rate:.2f} TB/s, bf16 product {speed:.0f} TFLOP/s")
    columns = ("head", "rows", "kernel µs", "bytes' floor", "ratio", "of 4.8 TB/s", "of greater floor", "bf16", "eager")
    table = Table(*columns, "scaled_mm", title=f"[{VOCABULARY} x {HIDDEN}]")
    for cell in heads:
        numbers = (cell.bytes_floor_seconds * 1e6, cell.ratio, cell.datasheet_floor_seconds / cell.kernel_seconds)
        other = "" if cell.scaled_mm_seconds is None else f"{cell.scaled_mm_seconds * 1e6:.0f}"
        table.add_row(
            cell.head_format,
            str(cell.num_rows),
            f"{cell.kernel_seconds * 1e6:.1f}",
            f"{numbers[0]:.1f}",
            f"{numbers[1]:.2f}",
            f"{numbers[2]:.2f}",
            f"{cell.floor_seconds / cell.kernel_seconds:.2f}",
            f"{cell.bf16_seconds * 1e6:.0f}",
            f"{cell.eager_seconds * 1e6:.0f}",
            other,
        )
    console.print(table)
    table = Table("sequences", "candidates", "fused µs", "floor µs", "ratio", "eager µs", "eager / fused")
    for walk in walks:
        table.add_row(
            str(walk.batch),
            str(walk.num_candidates),
            f"{walk.kernel_seconds * 1e6:.1f}",
            f"{walk.floor_seconds * 1e6:.2f}",
            f"{walk.floor_seconds / walk.kernel_seconds:.2f}",
            f"{walk.eager_seconds * 1e6:.0f}",
            f"{walk.eager_seconds / walk.kernel_seconds:.0f}",
        )
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write figures; 1 where a product is below ``LEAST_RATIO`` of its floor."""
    parser = argparse.ArgumentParser(prog="flare_qualify.bench_draft_kernels", description=__doc__)
    parser.add_argument("--json", type=Path, help="where the figures go")
    settings = parser.parse_args(arguments)
    console = Console(width=140)
    if not torch.cuda.is_available():
        console.print("no CUDA device: these kernels have nothing to run on")
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    ceilings = measure_ceilings(device)
    walks = measure_walks(device, ceilings)
    heads = measure_heads(device, ceilings)
    _report(console, ceilings, heads, walks)
    if settings.json is not None:
        figures = {
            "device": torch.cuda.get_device_name(device),
            "ceilings": asdict(ceilings),
            "heads": [asdict(cell) for cell in heads],
            "walks": [asdict(cell) for cell in walks],
        }
        settings.json.write_text(json.dumps(figures, indent=2))
    return int(any(cell.floor_seconds / cell.kernel_seconds < LEAST_RATIO for cell in heads))


if __name__ == "__main__":
    sys.exit(main())
