"""The oracle model: any byte of any page or row on any rank changes what it says; its files and plans are checked."""

import threading

import numpy as np
import pytest

from flare_core.errors import CheckpointError, UsageError
from flare_core.geometry import PAGE_ALIGNMENT
from flare_core.keys import token_array
from flare_core.plan import PageCopy, RowCopy, Run, RunKind, SequenceStart, StepPlan
from flare_core.sampling import SamplingParams
from flare_core.testing.collective import SingleRank, thread_collectives
from flare_core.testing.oracle_config import (
    OracleConfig,
    PlaneSpec,
    decode_bytes,
    encode_text,
    load_oracle_config,
    write_oracle_model,
)
from flare_core.testing.oracle_memory import OracleMemory
from flare_core.testing.oracle_reference import oracle_group, oracle_prompt_logprobs, oracle_results, oracle_text
from flare_core.testing.oracle_runner import OracleRunner

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=20)
PROMPT = encode_text("the quick brown fox")
CONFIG = OracleConfig(
    planes=(PlaneSpec(width=2, head_first=True), PlaneSpec(name="index", dtype="uint8", width=3, per_head=False)),
    row_bytes=6,
)
PAGE = 8


def first_result(config, spoil=None, *, world_size=2):
    """Result of the FIRST run, after ``spoil(group)`` had a chance to change memory behind the prefill."""
    group = oracle_group(config, world_size=world_size, page_tokens=PAGE, num_pages=4)
    start = SequenceStart(0, token_array(PROMPT).tobytes(), len(PROMPT), GREEDY)
    last = len(PROMPT) - 1
    group.launch(StepPlan(step=1, starts=(start,), runs=(Run(0, RunKind.PREFILL, 0, last, (0, 1, 2)),)))
    if spoil is not None:
        spoil(group)
    return group.launch(StepPlan(step=2, runs=(Run(0, RunKind.FIRST, last, 1),))).result()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("page", [0, 1, 2])
def test_any_byte_of_any_attached_page_on_any_rank_changes_the_answer(rank, page):
    expected = first_result(CONFIG)
    geometry = CONFIG.geometries(2, PAGE)[rank]
    num_tokens = min(PAGE, len(PROMPT) - 1 - page * PAGE)
    for offset, plane in zip(geometry.plane_offsets, geometry.planes, strict=True):
        for at in range(0, plane.num_bytes, 5):

            def spoil(group, at=at + offset):
                group.runners[rank].memory.pages[page, at] ^= 1

            entry = np.unravel_index(at, [axis.size for axis in plane.axes] + [plane.num_bytes // _elements(plane)])
            is_used = entry[[axis.name for axis in plane.axes].index("token")] < num_tokens
            assert (first_result(CONFIG, spoil) != expected) == is_used


def _elements(plane):
    return int(np.prod([axis.size for axis in plane.axes]))


@pytest.mark.parametrize("rank", [0, 1])
def test_any_byte_of_the_row_changes_the_answer(rank):
    expected = first_result(CONFIG)
    for at in range(CONFIG.geometries(2, PAGE)[rank].row_bytes):

        def spoil(group, at=at):
            group.runners[rank].memory.rows[0, at] ^= 1

        assert first_result(CONFIG, spoil) != expected


def test_a_late_write_to_an_attached_page_changes_a_later_token():
    expected = oracle_results(CONFIG, PROMPT, GREEDY, page_tokens=PAGE)
    group = oracle_group(CONFIG, world_size=1, page_tokens=PAGE, num_pages=4)
    start = SequenceStart(0, token_array(PROMPT).tobytes(), len(PROMPT), GREEDY)
    last = len(PROMPT) - 1
    group.launch(StepPlan(step=1, starts=(start,), runs=(Run(0, RunKind.PREFILL, 0, last, (0, 1, 2, 3)),)))
    results = [group.launch(StepPlan(step=2, runs=(Run(0, RunKind.FIRST, last, 1),))).result()]
    group.runners[0].memory.pages[0, 3] ^= 1
    decodes = [StepPlan(step=step, runs=(Run(0, RunKind.DECODE, last + step - 2, 1),)) for step in range(3, 7)]
    results.extend(group.launch(plan).result() for plan in decodes)
    assert results[0] == expected[1]
    assert results[1:] != expected[2:6]


def test_chunks_of_any_size_give_the_same_text():
    for chunk in (1, 3, 8):
        group = oracle_group(CONFIG, world_size=1, page_tokens=PAGE, num_pages=4)
        starts = (SequenceStart(0, token_array(PROMPT).tobytes(), len(PROMPT), GREEDY),)
        last = len(PROMPT) - 1
        pages = (0, 1, 2)
        step = 0
        for at in range(0, last, chunk):
            step += 1
            run = Run(0, RunKind.PREFILL, at, min(chunk, last - at), pages)
            group.launch(StepPlan(step=step, starts=starts, runs=(run,)))
            starts, pages = (), ()
        result = group.launch(StepPlan(step=step + 1, runs=(Run(0, RunKind.FIRST, last, 1),))).result()
        assert result.tokens == oracle_results(CONFIG, PROMPT, GREEDY, page_tokens=PAGE)[1].tokens


def test_ranks_as_threads_agree_with_ranks_in_lockstep():
    world_size = 3
    results = [[] for _ in range(world_size)]
    starts = (SequenceStart(0, token_array(PROMPT).tobytes(), len(PROMPT), GREEDY),)
    last = len(PROMPT) - 1
    plans = [
        StepPlan(step=1, starts=starts, runs=(Run(0, RunKind.PREFILL, 0, last, (0, 1, 2, 3)),)),
        StepPlan(step=2, runs=(Run(0, RunKind.FIRST, last, 1),)),
        *(StepPlan(step=3 + i, runs=(Run(0, RunKind.DECODE, last + 1 + i, 1),)) for i in range(5)),
    ]

    def serve(rank, geometry, collective):
        runner = OracleRunner(CONFIG, OracleMemory(geometry, num_pages=4, num_row_slots=1), collective)
        results[rank].extend(runner.launch(plan).result() for plan in plans)

    threads = [
        threading.Thread(target=serve, args=(rank, geometry, collective))
        for rank, (geometry, collective) in enumerate(
            zip(CONFIG.geometries(world_size, PAGE), thread_collectives(world_size), strict=True)
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1] == results[2]
    tokens = [token.token_id for result in results[0] for token in result.tokens]
    assert tokens == oracle_text(CONFIG, PROMPT, GREEDY, world_size=world_size, page_tokens=PAGE)


def test_an_aborted_group_wakes_its_ranks():
    first, second = thread_collectives(2)
    woken = []

    def wait():
        with pytest.raises(threading.BrokenBarrierError):
            first.all_gather(b"")
        woken.append(True)

    waiter = threading.Thread(target=wait)
    waiter.start()
    second.abort()
    waiter.join(10)
    assert woken == [True]
    assert SingleRank().all_gather(b"x") == [b"x"]


def test_sampling_parameters_are_obeyed():
    text = oracle_text(CONFIG, PROMPT, GREEDY)
    banned = SamplingParams(max_tokens=6, temperature=0.0, logit_bias=((text[0], -100.0),))
    assert oracle_text(CONFIG, PROMPT, banned)[0] != text[0]
    narrow = [
        SamplingParams(max_tokens=6, seed=5, top_k=1),
        SamplingParams(max_tokens=6, seed=5, top_p=1e-9),
        SamplingParams(max_tokens=6, seed=5, min_p=1.0),
    ]
    assert all(oracle_text(CONFIG, PROMPT, params) == text for params in narrow)
    seeded = [oracle_text(CONFIG, PROMPT, SamplingParams(max_tokens=6, seed=seed)) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    stop = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(text[2],))
    assert oracle_text(CONFIG, PROMPT, stop) == text[:3]
    late = SamplingParams(max_tokens=6, temperature=0.0, stop_token_ids=(text[2],), min_tokens=4)
    assert oracle_text(CONFIG, PROMPT, late)[:2] == text[:2]
    assert oracle_text(CONFIG, PROMPT, late)[2] != text[2]
    repeated = SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=100.0, presence_penalty=2.0)
    tokens = oracle_text(CONFIG, PROMPT, repeated)
    assert len(set(tokens)) == len(tokens)


def test_log_probabilities_are_normalised_and_ordered():
    entry = oracle_results(CONFIG, PROMPT, GREEDY)[1].tokens[0].logprobs
    assert entry.rank == 1
    assert entry.top[0] == (entry.token_id, entry.logprob)
    assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
    assert len(entry.top) == 20
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    entries = oracle_prompt_logprobs(CONFIG, PROMPT, params)
    assert [entry.token_id for entry in entries] == PROMPT[1:]


def test_memory_is_aligned_and_a_copied_page_is_zero_behind_its_tokens():
    memory = OracleMemory(CONFIG.geometries(1, PAGE)[0], num_pages=3, num_row_slots=2)
    assert all(memory.page_segments(page)[0][0] % PAGE_ALIGNMENT == 0 for page in range(3))
    assert memory.row_segments(1)[0][1] == memory.geometry.row_stride
    assert memory.device == "cpu"
    memory.pages[0] = 7
    memory.pages[1] = 9
    memory.copy_page(0, 1, 3)
    assert memory.page_digest(0, 3) == memory.page_digest(1, 3)
    assert memory.is_zero_behind(1, 3)
    assert not memory.is_zero_behind(1, 2)


def test_prefill_takes_the_time_it_is_told_to():
    slept = []
    config = OracleConfig(prefill_cost_seconds=0.5)
    memory = OracleMemory(config.geometries(1, PAGE)[0], num_pages=1, num_row_slots=1)
    runner = OracleRunner(config, memory, SingleRank(), sleep=slept.append)
    start = SequenceStart(0, token_array([5] * 5).tobytes(), 5, GREEDY)
    runner.launch(StepPlan(step=1, starts=(start,), runs=(Run(0, RunKind.PREFILL, 0, 4, (0,)),)))
    assert slept == [2.0]


BAD_PLANS = {
    "follows step 0": StepPlan(step=2),
    "pages for": StepPlan(step=1, runs=(Run(0, RunKind.PREFILL, 0, 9, (0,)),)),
    "known tokens": StepPlan(step=1, runs=(Run(0, RunKind.FIRST, 3, 1, (0,)),)),
    "decode at 3": StepPlan(step=1, runs=(Run(0, RunKind.DECODE, 3, 1, (0,)),)),
    "page copies": StepPlan(step=1, page_copies=(PageCopy(0, 1, 1), PageCopy(1, 2, 1))),
    "row copies": StepPlan(step=1, row_copies=(RowCopy(-1, 0), RowCopy(-1, 0))),
}


@pytest.mark.parametrize("message", sorted(BAD_PLANS))
def test_a_plan_that_cannot_be_executed_is_refused(message):
    group = oracle_group(CONFIG, world_size=1, page_tokens=PAGE, num_pages=4)
    plan = BAD_PLANS[message]
    start = SequenceStart(0, token_array(PROMPT).tobytes(), len(PROMPT), GREEDY)
    with pytest.raises(RuntimeError, match=message):
        group.launch(
            StepPlan(
                step=plan.step,
                starts=(start,),
                runs=plan.runs,
                page_copies=plan.page_copies,
                row_copies=plan.row_copies,
            )
        )


def test_a_model_directory_is_read_back(tmp_path):
    assert load_oracle_config(write_oracle_model(tmp_path / "model", CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        (b"{", "config.json"),
        (b'{"model_type": "llama"}', "'llama'"),
        (b'{"vocab_size": 7}', "vocab_size 7"),
        (b'{"planes": []}', "planes is empty"),
        (b'{"planes": [{"dtype": "int3"}]}', "int3"),
    ],
)
def test_a_directory_that_is_no_oracle_model_is_refused_by_name(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        load_oracle_config(tmp_path)


def test_a_page_size_that_a_plane_does_not_divide_is_refused():
    config = OracleConfig(planes=(PlaneSpec(tokens_per_entry=4),))
    with pytest.raises(UsageError, match="tokens_per_entry 4"):
        config.geometries(1, 6)


def test_identity_depends_on_the_model_and_not_on_its_speed():
    slow, other = OracleConfig(prefill_cost_seconds=1.0), OracleConfig(seed=1)
    fingerprint = OracleConfig().identity(2, PAGE).fingerprint()
    assert slow.identity(2, PAGE).fingerprint() == fingerprint
    assert other.identity(2, PAGE).fingerprint() != fingerprint
    assert OracleConfig().identity(3, PAGE).fingerprint() != fingerprint


def test_text_and_ids_are_converted_by_bytes():
    assert decode_bytes([1, *encode_text("grüß"), 999]).decode() == "grüß"
