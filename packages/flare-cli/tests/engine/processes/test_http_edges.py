"""A real server's edges: keys, tenants, limits, and what does not speak HTTP properly."""

import hashlib
import json
import socket

import httpx
import pytest

from flare_core.testing.oracle_config import OracleConfig

PROMPT = "0123456789abcdef" * 10


@pytest.fixture
def server(make_ranks, tmp_path):
    (tmp_path / "keys").write_text("alice: key-a\nbob: key-b\n# nobody: key-c\n")
    (tmp_path / "admin").write_text("key-admin\n")
    for name in ("keys", "admin"):
        (tmp_path / name).chmod(0o600)
    options = ("--api-key-file", str(tmp_path / "keys"), "--admin-key-file", str(tmp_path / "admin"))
    return make_ranks(
        config=OracleConfig(eos_bias=-1e9),
        disk=False,
        options=(*options, "--max-body", "100k", "--max-n", "3", "--max-concurrent-requests", "8"),
    ).start()


def bearer(key):
    return {"headers": {"Authorization": f"Bearer {key}"}}


def test_tenants_and_salts_share_no_prefix(server):
    def cached(key, **fields):
        response = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 1} | fields, **bearer(key))
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached("key-a"), cached("key-b"), cached("key-a", cache_salt="s")] == [0, 0, 0]
    assert [cached("key-a"), cached("key-b"), cached("key-a", cache_salt="s")] == [len(PROMPT) - 1] * 3
    for key in ("x", "key-c", "key-admin", "key-"):
        assert server.post("/v1/completions", {"prompt": "x"}, **bearer(key)).status_code == 401


def test_limits_hold(server):
    assert server.post("/v1/completions", {"prompt": "x" * 200_000}, **bearer("key-a")).status_code == 413
    assert server.post("/v1/completions", {"prompt": "x", "n": 4}, **bearer("key-a")).status_code == 400
    assert httpx.get(f"{server.url}/health", headers={"x": "y" * 20_000}).status_code == 431


GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
    b"GARBAGE\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\n\r\n",
)


def test_garbage_and_headers_that_never_end_cost_their_connection_only(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        for data in GARBAGE:
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.sendall(data)
                received = connection.recv(4096)
            assert received == b"" or received.startswith(b"HTTP/1.1 4")
            assert httpx.get(f"{server.url}/health").status_code == 200
        assert slow.recv(4096) == b""
    assert "Traceback" not in server.log(0)


def test_the_admin_key_and_this_host_may_reset_the_cache(server):
    assert server.post("/v1/cache/reset", {"tier": "device"}).status_code == 200
    assert server.post("/v1/cache/reset", {"tier": "memory"}).status_code in {200, 409}
    assert hashlib.sha256(b"key-admin").hexdigest() not in server.log(0)


def test_metrics_add_up(server):
    for _ in range(2):
        server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 2}, **bearer("key-a"))
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    values = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}
    hits = sum(value for name, value in values.items() if name.startswith("flare_cache_hit_tokens_total"))
    assert hits == len(PROMPT) - 1
    assert values["flare_cache_miss_tokens_total"] + hits == values["flare_cache_lookup_tokens_total"]
    assert values["flare_request_ttft_seconds_count"] == 2
    assert json.loads(json.dumps(values))
