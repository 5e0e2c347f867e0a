"""``/v1/chat/completions`` and the smaller routes over a scripted engine."""

import asyncio

import httpx
import jinja2.sandbox
import pytest

from flare_cli.server.app import make_app
from flare_cli.server.model import Limits
from flare_cli.server.streaming import ClientGone, unless_gone
from flare_cli.text.chat_template import ChatTemplate


def hello(**fields):
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


def test_an_answer_is_a_message(make_server):
    answer = make_server().post("/v1/chat/completions", hello(max_completion_tokens=5)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]


def test_messages_go_through_the_models_template(make_server, make_model):
    server = make_server(model=make_model(max_model_len=512))
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "d"},
    ]
    assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 200
    text = bytes(i - 3 for i in server.engine.requests[0].token_ids).decode()
    assert text == "<system>be brief<user>ab<assistant>c<user>d<bot>"


def test_plain_settings_reach_the_template(make_server, make_model):
    source = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}(no){% endif %}"
    template = ChatTemplate(jinja2.sandbox.ImmutableSandboxedEnvironment().from_string(source), {})
    server = make_server(model=make_model(chat_template=template))
    server.post("/v1/chat/completions", hello(chat_template_kwargs={"enable_thinking": False}))
    server.post("/v1/chat/completions", hello(chat_template_kwargs={"enable_thinking": True}))
    server.post("/v1/chat/completions", hello(chat_template_kwargs=None))
    texts = [bytes(i - 3 for i in request.token_ids).decode() for request in server.engine.requests]
    assert texts == ["hi(no)", "hi", "hi"]
    fields = hello(chat_template_kwargs={"enable_thinking": False})
    assert server.post("/tokenize", fields).json()["count"] == len("hi(no)")


@pytest.mark.parametrize(
    "settings",
    [{"a": {}}, {"a": []}, {"messages": 1}, {"add_generation_prompt": False}, {"bos_token": "x"}, {"a b": 1}, [1]],
)
def test_settings_that_are_not_plain_or_not_the_clients_are_refused(make_server, settings):
    answer = make_server().post("/v1/chat/completions", hello(chat_template_kwargs=settings))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("chat_template_kwargs")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "x" * 70}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "a"}]}, "messages[0].role"),
    ],
)
def test_a_refusal_names_the_field_that_was_sent(make_server, fields, param):
    error = make_server().post("/v1/chat/completions", hello() | fields).json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_a_stream_names_the_role_first_and_joins_to_the_answer(make_server, sse):
    events = sse(make_server().post("/v1/chat/completions", hello(stream=True, max_tokens=5)))
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "Hello"
    assert events[-2]["choices"][0]["finish_reason"] == "length"


def test_logprobs_carry_bytes_and_alternatives(make_server):
    answer = make_server().post("/v1/chat/completions", hello(max_tokens=1, logprobs=True, top_logprobs=2)).json()
    assert answer["choices"][0]["logprobs"]["content"] == [
        {
            "token": "H",
            "logprob": -0.5,
            "bytes": [72],
            "top_logprobs": [
                {"token": "H", "logprob": -0.5, "bytes": [72]},
                {"token": "I", "logprob": -1.5, "bytes": [73]},
            ],
        }
    ]


def test_logprobs_of_a_stop_string_are_not_shown(make_server):
    answer = make_server().post("/v1/chat/completions", hello(max_tokens=9, logprobs=True, stop="lo,")).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == answer["choices"][0]["message"]["content"] == "Hel"


def test_tools_and_structured_output_are_refused_by_name(make_server):
    server = make_server()
    for name, value in [
        ("tools", [{"type": "function"}]),
        ("tool_choice", {"type": "function"}),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_schema"}),
        ("modalities", ["audio"]),
        ("reasoning_effort", "high"),
        ("top_logprobs", 3),
    ]:
        response = server.post("/v1/chat/completions", hello(**{name: value}))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
    neutral = hello(tools=[], tool_choice="auto", response_format={"type": "text"}, parallel_tool_calls=False)
    assert server.post("/v1/chat/completions", neutral).status_code == 200


def test_bad_messages_are_refused_with_their_place(make_server):
    server = make_server()
    for message, param in [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
        ({"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
        ({"role": "user", "content": 5}, "messages[0].content"),
    ]:
        response = server.post("/v1/chat/completions", {"messages": [message]})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert server.post("/v1/chat/completions", {"messages": []}).status_code == 400


def test_a_model_without_a_template_has_completions_only(make_server, make_model):
    response = make_server(model=make_model(chat_template=None)).post("/v1/chat/completions", hello())
    assert response.status_code == 400
    assert "template" in response.json()["error"]["message"]


def test_tokens_go_to_text_and_back(make_server):
    server = make_server()
    ids = server.post("/tokenize", {"prompt": "h\u00e4", "return_token_strs": True}).json()
    assert ids == {
        "count": 3,
        "max_model_len": 64,
        "tokens": [107, 198, 167],
        "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa4"],
    }
    assert server.post("/detokenize", {"tokens": ids["tokens"]}).json() == {"prompt": "h\u00e4"}
    assert server.post("/detokenize", {"tokens": [259]}).status_code == 400
    assert server.post("/tokenize", {}).status_code == 400


def test_models_are_listed(make_server):
    server = make_server()
    assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["bytes"]
    assert server.get("/v1/models/bytes").json()["max_model_len"] == 64
    assert server.get("/v1/models/other").status_code == 404


def test_unknown_paths_and_methods_answer_in_the_apis_shape(make_server):
    server = make_server()
    for method, path, status in (("GET", "/nothing", 404), ("GET", "/v1/completions", 405)):
        response = server.request(method, path)
        assert response.status_code == status
        assert response.json()["error"]["message"]


def test_metrics_name_what_was_answered(make_server):
    server = make_server()
    server.post("/v1/completions", {"prompt": "a"})
    server.get("/nothing")
    text = server.get("/metrics").text
    assert 'flare_http_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert 'flare_http_requests_total{path="other",status="404"} 1.0' in text
    assert "flare_up 1.0" in text


def test_a_client_that_goes_away_cancels_its_outputs(make_server, scripted_engine):
    engine = scripted_engine(holds=True)
    server = make_server(engine=engine)

    async def run(stream: bool) -> None:
        transport = httpx.ASGITransport(app=make_app(server.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            task = asyncio.create_task(client.post("/v1/chat/completions", json=hello(stream=stream, n=2)))
            await engine.submitted.wait()
            engine.submitted.clear()
            task.cancel()
            await asyncio.wait({task})

    asyncio.run(run(stream=False))
    assert engine.cancelled == ["0"]
    assert server.service.num_requests == 0


def test_work_is_cancelled_when_the_client_disconnects_first():
    async def run() -> bool:
        cancelled = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async def receive():
            return {"type": "http.disconnect"}

        with pytest.raises(ClientGone):
            await unless_gone(work(), receive)
        return cancelled.is_set()

    assert asyncio.run(run())


def test_a_request_with_too_many_outputs_is_refused(make_server):
    server = make_server(limits=Limits(max_choices=8))
    assert server.post("/v1/completions", {"prompt": ["a"] * 5, "n": 2}).status_code == 400


def test_health_waits_for_the_tokenizer_too(make_server):
    server = make_server()
    assert server.get("/health").json()["status"] == "ready"
    server.service.model = None
    assert server.get("/health").status_code == 503
    assert server.get("/v1/models").status_code == 503
