"""Servers over a tiny random Llama on torch: the official client, tensor-parallel ranks, restart, packages."""

import subprocess
import sys

import httpx
import openai
import pytest

from flare_core.testing.checkpoints import make_tiny_checkpoint

PROMPT = "the quick brown fox jumps over the lazy dog and runs away into the wood " * 12
OPTIONS = ("--threads", "1", "--page-tokens", "16", "--kv-memory", "200pages")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def ask(ranks):
    with openai.OpenAI(base_url=f"{ranks.url}/v1", api_key="unused", max_retries=0) as client:
        return client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": PROMPT}],
            max_tokens=12,
            temperature=0,
            logprobs=True,
            top_logprobs=20,
            extra_body={"ignore_eos": True},
        )


def told(answer):
    """The text, every log-probability, and tokens restored by tier."""
    content = answer.choices[0].logprobs.content
    values = [(t.token, t.logprob, tuple((a.token, a.logprob) for a in t.top_logprobs)) for t in content]
    tiers = answer.usage.model_extra["flare"]["cached_tokens"]
    return answer.choices[0].message.content, values, {tier: count for tier, count in tiers.items() if count}


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_tier_gives_the_same_bits(make_ranks, checkpoint, world_size):
    ranks = make_ranks(model=checkpoint, world_size=world_size, options=OPTIONS).start()
    first = ask(ranks)
    num_restored = first.usage.prompt_tokens - 1
    text, values, tiers = told(first)
    assert tiers == {}
    assert told(ask(ranks)) == (text, values, {"device": num_restored})
    ranks.post("/v1/cache/reset", {"tier": "device"})
    assert told(ask(ranks)) == (text, values, {"disk": num_restored})
    assert set(ranks.stop().values()) == {0}
    ranks.start()
    assert told(ask(ranks)) == (text, values, {"disk": num_restored})
    assert all(ranks.record_names(rank) == ranks.record_names(0) for rank in range(world_size))


def test_on_the_cpu_no_step_is_computed_beyond_the_last_token(make_ranks, checkpoint):
    # A launch computes at once there, so planning ahead would hold back every token by a step and waste the last.
    ranks = make_ranks(model=checkpoint, options=OPTIONS, disk=False).start()
    ask(ranks)
    num_steps = ranks.cluster()["engine"]["num_steps"]
    ask(ranks)
    assert ranks.cluster()["engine"]["num_steps"] - num_steps == 12


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafting_changes_no_text_and_voids_no_record(make_ranks, tmp_path, method):
    # Stored in 16 bits, as real models are: a row has the bits then that it has alone.
    model = make_tiny_checkpoint(tmp_path / "model", "llama", dtype="bfloat16")
    ranks = make_ranks(model=model, world_size=2, options=OPTIONS).start()
    first = ask(ranks)
    text, values, _ = told(first)
    assert first.usage.completion_tokens_details is None
    ranks.stop()
    plain = ranks.options
    config = f'{{"method": "{method}", "num_speculative_tokens": 4, "prompt_lookup_min": 1}}'
    ranks.options = (*OPTIONS, "--speculative-config", config)
    ranks.start()
    drafted = ask(ranks)
    assert told(drafted) == (text, values, {"disk": first.usage.prompt_tokens - 1})
    metrics = httpx.get(f"{ranks.url}/metrics", timeout=60).text
    ranks.stop()
    ranks.options = plain
    ranks.start()
    assert told(ask(ranks)) == (text, values, {"disk": first.usage.prompt_tokens - 1})
    details = drafted.usage.completion_tokens_details
    if details is not None:  # whether a random model repeats itself is chance
        num_drafts = details.accepted_prediction_tokens + details.rejected_prediction_tokens
        assert f"flare_spec_proposed_tokens_total {float(num_drafts)}" in metrics
        assert f"flare_spec_accepted_tokens_total {float(details.accepted_prediction_tokens)}" in metrics


def test_a_package_serves_as_its_model_does(make_ranks, checkpoint, tmp_path):
    whole = make_ranks(model=checkpoint, options=OPTIONS, disk=False).start()
    text, _, _ = told(ask(whole))
    whole.stop()
    package = tmp_path / "package"
    command = [sys.executable, "-m", "flare_cli", "export", str(checkpoint), "--world-size", "2", "-o", str(package)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(package)
    sliced = make_ranks(model=package, world_size=2, options=OPTIONS, disk=False).start()
    assert told(ask(sliced))[0] == text
    sliced.stop()
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_a_damaged_checkpoint_ends_every_rank_with_a_clear_message(make_ranks, tmp_path):
    damaged = make_tiny_checkpoint(tmp_path / "damaged", "llama")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    ranks = make_ranks(model=damaged, world_size=2, options=OPTIONS, disk=False)
    ranks.launch()
    assert ranks.wait(60) == {0: 2, 1: 2}
    for rank in (0, 1):
        assert "model.safetensors" in ranks.log(rank)
        assert "Traceback" not in ranks.log(rank)
