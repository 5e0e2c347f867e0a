"""Which pages hold a sequence never changes a bit of its pages or its log-probabilities."""

from __future__ import annotations

import pytest
import torch

from flare_core.compute.attention import BatchRow
from flare_core.compute.attention_cpu import CpuAttention
from flare_core.compute.attention_cuda import GatherAttention
from flare_core.compute.kv_memory import KvMemory
from flare_core.geometry import Axis, Geometry, Plane
from flare_core.plan import PageCopy, Run, RunKind, SequenceStart
from flare_core.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, logprobs=20)
LAYOUTS = {
    "rising": list(range(8)),
    "falling": list(range(100, 92, -1)),
    "scattered": [5, 90, 17, 3, 44, 45, 46, 2],
}


def run_with_pages(driver, prompt, pages):
    """Prefill in two chunks, FIRST, ten decode steps; the tokens and the bytes of the pages in order."""
    count = len(prompt)
    token_bytes = torch.tensor(prompt, dtype=torch.int32).numpy().astype("<u4").tobytes()
    start = SequenceStart(3, token_bytes, count, PARAMS)
    driver.launch(starts=(start,), runs=(Run(3, RunKind.PREFILL, 0, 40, tuple(pages[:3])),))
    driver.launch(runs=(Run(3, RunKind.PREFILL, 40, count - 41, tuple(pages[3:6])),))
    tokens = [driver.launch(runs=(Run(3, RunKind.FIRST, count - 1, 1, tuple(pages[6:])),)).tokens[0]]
    decode = [Run(3, RunKind.DECODE, count + step, 1) for step in range(10)]
    tokens.extend(driver.launch(runs=(run,)).tokens[0] for run in decode)
    return tokens, [driver.loaded.memory.page_bytes(page) for page in pages]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_page_ids_change_no_bit_of_pages_or_logprobs(family, checkpoint, load, prompt):
    runs = {name: run_with_pages(load(checkpoint(family)), prompt, pages) for name, pages in LAYOUTS.items()}
    assert runs["falling"] == runs["rising"]
    assert runs["scattered"] == runs["rising"]


def test_what_is_beside_a_row_in_the_batch_changes_no_bit_of_its_attention():
    attention, kv = attention_over(num_pages=40)
    generator = torch.Generator().manual_seed(2)
    kv.views.normal_(generator=generator)
    query = torch.randn(3, 6, 16, generator=generator)
    key_value = torch.randn(3, 2, 2, 16, generator=generator)
    rows = [BatchRow([4, 5, 6], 40), BatchRow([9, 1, 30, 7], 63), BatchRow([11], 0)]
    together = attention.batch(rows).attend(1, query, key_value)
    for index, row in enumerate(rows):
        alone = attention.batch([row]).attend(1, query[index : index + 1], key_value[index : index + 1])
        assert torch.equal(alone[0], together[index])


def attention_over(num_pages, backend=CpuAttention):
    plane = Plane(
        "kv", "float32", (Axis("layer", 2), Axis("kv", 2), Axis("token", 16), Axis("head", 2), Axis("dim", 16))
    )
    kv = KvMemory.allocate(Geometry(0, 1, 16, (plane,)), num_pages, torch.device("cpu"))
    return backend(kv), kv


@pytest.mark.parametrize("backend", [CpuAttention, GatherAttention])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 37), (5, 1), (16, 16), (23, 30)])
def test_a_chunk_attends_to_all_earlier_tokens_and_causally_to_itself(backend, start, count):
    attention, _ = attention_over(12, backend)
    generator = torch.Generator().manual_seed(start)
    pages = [7, 3, 11, 0, 5]
    tokens = torch.randn(start + count, 2, 2, 16, generator=generator)
    query = torch.randn(start + count, 6, 16, generator=generator)
    if start:
        attention.chunk(pages, 0, start).attend(0, query[:start], tokens[:start])
    got = attention.chunk(pages, start, count).attend(0, query[start:], tokens[start:])
    keys, values = (tokens[:, part].repeat_interleave(3, dim=1).transpose(0, 1) for part in (0, 1))
    scores = query.transpose(0, 1) @ keys.transpose(1, 2) / 4.0
    mask = torch.ones(start + count, start + count, dtype=torch.bool).tril()
    expected = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ values
    torch.testing.assert_close(got, expected.transpose(0, 1).reshape(start + count, -1)[start:])


@pytest.mark.parametrize("length", [1, 16, 50])
def test_both_backends_agree_on_decode(length):
    outputs = []
    for backend in (CpuAttention, GatherAttention):
        attention, kv = attention_over(12, backend)
        kv.views.normal_(generator=torch.Generator().manual_seed(1))
        generator = torch.Generator().manual_seed(9)
        query, key_value = torch.randn(2, 6, 16, generator=generator), torch.randn(2, 2, 2, 16, generator=generator)
        rows = [BatchRow([2, 9, 4, 1], length - 1), BatchRow([0, 3], 20)]
        outputs.append(attention.batch(rows).attend(1, query, key_value))
    torch.testing.assert_close(outputs[0], outputs[1])


@pytest.mark.parametrize("backend", [CpuAttention, GatherAttention])
def test_nan_behind_a_sequence_or_in_another_one_does_not_reach_it(backend):
    attention, kv = attention_over(12, backend)
    kv.views.fill_(torch.nan)
    kv.views[2, :, :, :4] = 1.0
    rows = [BatchRow([2], 4), BatchRow([3, 4], 20)]
    output = attention.batch(rows).attend(0, torch.ones(2, 6, 16), torch.ones(2, 2, 2, 16))
    assert output[0].isfinite().all()


def test_a_page_copy_holds_the_first_tokens_and_zeros_behind(checkpoint, load, prompt):
    driver = load(checkpoint("llama"))
    driver.start(0, prompt[:16])
    driver.launch(page_copies=(PageCopy(0, 50, 16), PageCopy(0, 51, 5)))
    memory = driver.loaded.memory
    assert memory.page_bytes(50) == memory.page_bytes(0)
    assert torch.equal(memory.views[51, :, :, :5], memory.views[0, :, :, :5])
    assert not memory.views[51, :, :, 5:].any()


def test_a_copied_prefix_restores_the_very_logprobs(checkpoint, load, prompt):
    """A full hit: the pages come from elsewhere, the last token alone is computed."""
    cold = load(checkpoint("llama")).start(0, prompt)
    driver = load(checkpoint("llama"))
    driver.start(0, prompt)
    pages = tuple(range(60, 60 + -(-len(prompt) // 16)))
    copies = [PageCopy(source, target, 16) for source, target in enumerate(pages)]
    copies[-1] = PageCopy(copies[-1].source, copies[-1].target, (len(prompt) - 1) % 16)
    token_bytes = torch.tensor(prompt, dtype=torch.int32).numpy().astype("<u4").tobytes()
    restored = driver.launch(
        page_copies=tuple(copies),
        starts=(SequenceStart(4, token_bytes, len(prompt), SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)),),
        runs=(Run(4, RunKind.FIRST, len(prompt) - 1, 1, pages),),
    )
    assert restored.tokens[0].logprobs == cold.logprobs
