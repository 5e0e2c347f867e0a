"""``/v1/completions`` over a scripted engine."""

import asyncio
import hashlib

from flare_cli.server.app import make_app
from flare_cli.server.engine_port import EngineState
from flare_cli.server.keys import KeyRing
from flare_cli.server.model import Limits
from flare_core.prefix import Tier
from flare_core.sampling import choice_seed


def test_an_answer_has_text_finish_reason_and_usage_by_tier(make_server):
    answer = make_server().post("/v1/completions", {"prompt": "abcd", "max_tokens": 5}).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 5,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
        "flare": {"cached_tokens": {"device": 2, "memory": 0, "disk": 1, "pool": 0}},
    }


def test_an_end_token_is_counted_and_not_shown(make_server):
    answer = make_server().post("/v1/completions", {"prompt": "a", "max_tokens": 40}).json()
    assert answer["choices"][0]["text"] == "Hello, world"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 13


def test_prompts_may_be_lists_of_texts_or_of_token_ids(make_server):
    server = make_server()
    texts = server.post("/v1/completions", {"prompt": ["ab", "c"], "max_tokens": 1, "n": 2}).json()
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert texts["usage"]["prompt_tokens"] == 3
    server.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 1})
    server.post("/v1/completions", {"prompt": [[5], [6]], "max_tokens": 1})
    assert [list(request.token_ids) for request in server.engine.requests[-3:]] == [[5, 6], [5], [6]]


def test_choices_after_the_first_have_seeds_of_their_own(make_server):
    server = make_server()
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "n": 3, "seed": 7})
    assert [r.params.seed for r in server.engine.requests] == [choice_seed(7, choice) for choice in range(3)]


def test_an_unseeded_request_gets_random_bits(make_server):
    server = make_server()
    for _ in range(2):
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
    one, other = server.engine.requests
    assert one.params.seed != other.params.seed


def test_a_stop_string_across_tokens_ends_the_text_before_it(make_server):
    server = make_server()
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 12, "stop": ["o, w", "zz"]}).json()
    assert answer["choices"][0]["text"] == "Hell"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 3
    assert (server.engine.ended, server.engine.cancelled) == (["0"], [])


def test_a_stream_never_shows_the_beginning_of_a_stop_string(make_server, sse):
    body = {"prompt": "a", "max_tokens": 12, "stop": "o, w", "stream": True}
    events = sse(make_server().post("/v1/completions", body))
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "Hell"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1] == "[DONE]"


def test_a_stream_with_usage_ends_with_a_chunk_without_choices(make_server, sse):
    body = {"prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    events = sse(make_server().post("/v1/completions", body))
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3
    assert all(event["usage"] is None for event in events[:-2])


def test_echo_with_logprobs_scores_the_prompt(make_server):
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 1}
    choice = make_server().post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == "abcHe"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "H", "e"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
    assert choice["logprobs"]["top_logprobs"][1] == {"b": -0.5}


def test_echo_in_a_stream_comes_with_the_first_chunk_of_each_choice(make_server, sse):
    body = {"prompt": "abc", "max_tokens": 2, "echo": True, "logprobs": 0, "stream": True, "n": 2}
    events = sse(make_server().post("/v1/completions", body))[:-1]
    for index in (0, 1):
        choices = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "abcHe"
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
        assert (tokens, offsets) == (["a", "b", "c", "H", "e"], [0, 1, 2, 3, 4])


def test_scoring_alone_needs_no_output(make_server):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = make_server().post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == "abc"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_name_ids_and_ranks(make_server):
    body = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 1}
    choice = make_server().post("/v1/completions", body).json()["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"101": {"logprob": -0.5, "rank": 1, "decoded_token": "b"}}]


def test_multi_byte_characters_are_never_cut(make_server, scripted_engine, sse):
    server = make_server(engine=scripted_engine(script="a\u00e4\U0001f600z".encode()))
    events = sse(server.post("/v1/completions", {"prompt": "a", "max_tokens": 20, "stream": True}))
    pieces = [event["choices"][0]["text"] for event in events[:-1]]
    assert [piece for piece in pieces if piece] == ["a", "\u00e4", "\U0001f600", "z"]


def test_harmless_unknown_fields_are_ignored(make_server):
    extra = {"user": "u", "metadata": {"a": "b"}, "prompt_cache_key": "k", "store": True, "service_tier": "auto"}
    assert make_server().post("/v1/completions", {"prompt": "a"} | extra | {"guided_json": None}).status_code == 200


def test_fields_that_would_change_the_output_are_refused_by_name(make_server):
    server = make_server()
    for extra in ({"best_of": 2}, {"suffix": "x"}, {"response_format": {"type": "json_object"}}, {"typical_p": 0.5}):
        response = server.post("/v1/completions", {"prompt": "a"} | extra)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == next(iter(extra))
        assert response.json()["error"]["type"] == "invalid_request_error"
    assert server.engine.requests == []


def test_wrong_values_are_refused_with_the_field_in_the_message(make_server):
    server = make_server(limits=Limits(max_n=4, max_output_tokens=32))
    for field, value in [
        ("prompt", None),
        ("prompt", []),
        ("prompt", ""),
        ("prompt", [1, "a"]),
        ("prompt", [300]),
        ("prompt", {"a": 1}),
        ("max_tokens", -1),
        ("max_tokens", "5"),
        ("max_tokens", 33),
        ("temperature", 1e9),
        ("top_p", 0),
        ("n", 5),
        ("n", 0),
        ("logprobs", 21),
        ("seed", 1 << 70),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop_token_ids", [259]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"300": 1}),
        ("min_tokens", 30),
        ("cache_salt", "s" * 1025),
        ("stream_options", 3),
    ]:
        response = server.post("/v1/completions", {"prompt": "a", field: value})
        assert response.status_code == 400, (field, value, response.text)
        error = response.json()["error"]
        assert error["param"].startswith(field), (field, error)
        assert field in error["message"], (field, error)


def test_a_prompt_over_the_context_is_refused(make_server):
    response = make_server().post("/v1/completions", {"prompt": "a" * 64})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "64 tokens" in response.json()["error"]["message"]


def test_garbage_bodies_are_refused(make_server):
    server = make_server(limits=Limits(max_body_bytes=2048))
    for content in (b"", b"{", b"[]", b"\xff\xfe", b"[" * 2000, b'{"prompt": "\xff"}'):
        response = server.request("POST", "/v1/completions", content=content)
        assert response.status_code == 400, content
        assert "message" in response.json()["error"]
    assert server.request("POST", "/v1/completions", content=b" " * 4000).status_code == 413


def test_an_unknown_model_is_404_and_default_names_the_served_one(make_server):
    server = make_server()
    assert server.post("/v1/completions", {"prompt": "a", "model": "gpt"}).status_code == 404
    for name in ("bytes", "default"):
        assert server.post("/v1/completions", {"prompt": "a", "model": name}).status_code == 200


def test_tenant_and_salt_reach_the_engine(make_server):
    keys = KeyRing({"alice": hashlib.sha256(b"k1").digest(), "bob": hashlib.sha256(b"k2").digest()})
    server = make_server(keys=keys)
    body = {"prompt": "a", "cache_salt": "s"}
    assert server.post("/v1/completions", body).status_code == 401
    assert server.post("/v1/completions", body, headers={"Authorization": "Bearer k3"}).status_code == 401
    assert server.post("/v1/completions", body, headers={"Authorization": "Bearer k2"}).status_code == 200
    assert [(r.tenant, r.cache_salt) for r in server.engine.requests] == [("bob", "s")]


def test_a_lost_rank_is_503_before_the_first_token(make_server, scripted_engine):
    for stream in (False, True):
        server = make_server(engine=scripted_engine(lose_after=0))
        response = server.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert response.status_code == 503
        assert response.headers["retry-after"]
        assert "rank 1" in response.json()["error"]["message"]


def test_a_begun_stream_ends_without_finish_reason_and_done(make_server, scripted_engine, sse):
    server = make_server(engine=scripted_engine(lose_after=3))
    response = server.post("/v1/completions", {"prompt": "a", "stream": True})
    assert response.status_code == 200
    events = sse(response)
    assert "error" in events[-1]
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])


def test_nothing_is_taken_while_the_engine_is_not_ready(make_server, scripted_engine):
    for state in (EngineState.STARTING, EngineState.DRAINING, EngineState.LOST):
        server = make_server(engine=scripted_engine(state=state, detail="why"))
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 503
        health = server.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": str(state), "detail": "why"}


def test_more_requests_than_places_are_429(make_server):
    server = make_server(limits=Limits(max_concurrent_requests=1))
    with server.service.admitted():
        for stream in (False, True):
            response = server.post("/v1/completions", {"prompt": "a", "stream": stream})
            assert response.status_code == 429
    assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


def test_cache_reset_needs_the_admin_key_or_this_host(make_server):
    server = make_server(keys=KeyRing({}, hashlib.sha256(b"root").digest()))
    far = ("10.0.0.9", 5)
    assert server.post("/v1/cache/reset", {"tier": "device"}, client=far).status_code == 403
    assert server.post("/v1/cache/reset", {"tier": "device"}, headers={"Origin": "http://evil"}).status_code == 403
    allowed = server.post("/v1/cache/reset", {"tier": "memory"}, client=far, headers={"Authorization": "Bearer root"})
    assert allowed.json() == {"tier": "memory", "reset": True}
    assert server.post("/v1/cache/reset", {"tier": "device"}).status_code == 200
    assert server.post("/v1/cache/reset", {"tier": "disk"}).status_code == 400
    assert server.engine.resets == [Tier.MEMORY, Tier.DEVICE]


def test_a_comment_keeps_a_waiting_stream_alive(make_server, scripted_engine, monkeypatch):
    monkeypatch.setattr("flare_cli.server.streaming.KEEP_ALIVE_SECONDS", 0.01)
    engine = scripted_engine(holds=True)
    server = make_server(engine=engine)
    sent: list[bytes] = []

    async def run() -> None:
        gone = asyncio.Event()
        body = [{"type": "http.request", "body": b'{"prompt": "a", "stream": true}', "more_body": False}]

        async def receive():
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message.get("body", b""))
            if len(sent) == 4:
                gone.set()

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
            "client": ("127.0.0.1", 1),
        }
        await make_app(server.service)(scope, receive, send)

    asyncio.run(run())
    assert sent[1:4] == [b": waiting\n\n"] * 3
    assert engine.cancelled == ["0"]
