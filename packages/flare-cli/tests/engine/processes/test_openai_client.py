"""The official client, and curl, against a real server."""

import json
import shutil
import subprocess
import urllib.request

import openai
import pytest

from flare_core.testing.oracle_config import OracleConfig

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[bot]"


@pytest.fixture
def server(make_ranks, tmp_path):
    ranks = make_ranks(config=OracleConfig(eos_bias=-1e9), options=("--served-model-name", "oracle"), disk=False)
    (ranks.model / "chat_template.jinja").write_text(TEMPLATE)
    return ranks.start()


def test_the_official_client_works_unchanged(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["oracle"]
        check_completions(client)
        check_chat(client)
        check_streams(client)
        check_errors(client)


def check_completions(client):
    answer = client.completions.create(model="oracle", prompt=["one", "two"], max_tokens=5, n=2, temperature=0, seed=1)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text == answer.choices[1].text != answer.choices[2].text
    assert answer.usage.completion_tokens == 20
    scored = client.completions.create(model="oracle", prompt="one", max_tokens=2, logprobs=3, echo=True, temperature=0)
    logprobs = scored.choices[0].logprobs
    assert "".join(logprobs.tokens[:3]) == "one"
    assert logprobs.token_logprobs[0] is None
    assert all(len(top) >= 3 for top in logprobs.top_logprobs[1:])
    varied = client.completions.create(model="oracle", prompt="one", max_tokens=8, n=3, temperature=1.5, seed=7)
    again = client.completions.create(model="oracle", prompt="one", max_tokens=8, n=3, temperature=1.5, seed=7)
    assert [choice.text for choice in varied.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in varied.choices}) > 1
    extra = client.completions.create(model="oracle", prompt="one", max_tokens=4, extra_body={"min_p": 0.1, "top_k": 5})
    assert extra.choices[0].finish_reason == "length"


def check_chat(client):
    messages = [{"role": "developer", "content": "short"}, {"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(
        model="oracle", messages=messages, max_completion_tokens=6, logprobs=True, top_logprobs=2, temperature=0
    )
    message = answer.choices[0].message
    content = answer.choices[0].logprobs.content
    assert message.role == "assistant"
    assert b"".join(bytes(token.bytes) for token in content).decode("utf-8", "replace") == message.content
    assert answer.usage.prompt_tokens == len("[system]short[user]hi[bot]")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    again = client.chat.completions.create(model="oracle", messages=messages, max_completion_tokens=6, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens - 1
    assert again.choices[0].message.content == message.content


def check_streams(client):
    whole = client.chat.completions.create(
        model="oracle", messages=[{"role": "user", "content": "count"}], max_tokens=40, temperature=0
    )
    stream = client.chat.completions.create(
        model="oracle",
        messages=[{"role": "user", "content": "count"}],
        max_tokens=40,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 40
    text = whole.choices[0].message.content
    stopped = client.chat.completions.create(
        model="oracle", messages=[{"role": "user", "content": "count"}], max_tokens=40, temperature=0, stop=text[5:8]
    )
    assert stopped.choices[0].message.content == text[: text.index(text[5:8])]
    assert stopped.choices[0].finish_reason == "stop"


def check_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="tools") as refused:
        client.chat.completions.create(
            model="oracle",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="oracle", prompt=[5] * 200_000)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_works_unchanged(server):
    body = json.dumps({"model": "oracle", "prompt": "hello", "max_tokens": 3})
    command = ["curl", "-sS", f"{server.url}/v1/completions", "-H", "Content-Type: application/json", "-d", body]
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert answer["usage"]["completion_tokens"] == 3
    stream = subprocess.run([*command[:-1], body[:-1] + ', "stream": true}'], capture_output=True, check=True).stdout
    assert stream.endswith(b"data: [DONE]\n\n")
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        assert b"flare_request_output_tokens_total 6.0" in response.read()
