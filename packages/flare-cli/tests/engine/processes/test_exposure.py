"""What a running group shows to the network and to other users: ports, traffic, files, processes."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import struct
from pathlib import Path

import httpx
import numpy as np
import pytest

from flare_cache.record import decode_header
from flare_core.keys import tenant_salt
from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_core.testing.exposure import listening, loopback_traffic
from flare_transport import derive_key

MEETING = "127.0.0.4"
PROMPT = "0123456789abcdef" * 10


def all_listening(ranks) -> set[tuple[str, int]]:
    pids = [process.pid for process in ranks.processes.values()] + [ranks.worker_pid()]
    return {address for pid in pids for address in listening(pid)}


def meeting_at(make_ranks, **options):
    """Two ranks that meet at an address of their own."""
    ranks = make_ranks(world_size=2, **options)
    ranks.options = (*ranks.options, "--rendezvous", f"{MEETING}:{ranks.rendezvous}")
    return ranks.start()


def test_a_running_group_listens_for_http_alone(make_ranks):
    ranks = meeting_at(make_ranks)
    assert all_listening(ranks) == {("127.0.0.1", ranks.port)}


def test_collectives_listen_on_the_rendezvous_interface_alone(make_ranks, tmp_path):
    """One port a rank, gloo's, at the rank's own end of its control link."""
    model = make_tiny_checkpoint(tmp_path / "checkpoint", "llama")
    ranks = meeting_at(make_ranks, model=model, options=("--threads", "1", "--kv-memory", "64pages"))
    assert listening(ranks.processes[0].pid) == {("127.0.0.1", ranks.port)}
    ((at_zero, port),) = listening(ranks.worker_pid())
    assert at_zero == MEETING
    assert port != ranks.rendezvous
    # The peer's end: where the kernel sends from to an address of the same host.
    ((at_peer, _),) = listening(ranks.processes[1].pid)
    with socket.create_connection((MEETING, port)) as like_the_peer:
        assert at_peer == like_the_peer.getsockname()[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may capture what crosses loopback")
@pytest.mark.parametrize("is_plaintext", [False, True])
def test_no_key_salt_or_prompt_crosses_between_ranks(make_ranks, tmp_path, is_plaintext):
    token = secrets.token_hex(16)
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {token}\n")
    keys.chmod(0o600)
    plain = ("--insecure-plaintext",) if is_plaintext else ()
    with loopback_traffic(MEETING) as seen:
        ranks = meeting_at(make_ranks, options=("--api-key-file", str(keys), *plain))
        body = {"prompt": PROMPT, "max_tokens": 4, "cache_salt": "a-salt-of-alice"}
        response = ranks.post("/v1/completions", body, headers={"Authorization": f"Bearer {token}"})
        assert response.status_code == 200
        ranks.stop()
    cluster_key = bytes.fromhex((ranks.root / "cluster.key").read_text())
    salt_key = derive_key(cluster_key, "flare/salt/1")
    never = [cluster_key, salt_key, tenant_salt(salt_key, "alice", "a-salt-of-alice"), token.encode()]
    never += [secret.hex().encode() for secret in never[:3]] + [b"a-salt-of-alice"]
    assert len(seen) > 4096
    for secret in never:
        assert secret not in seen
    # Token ids travel to the peer with a plan: inside TLS, unless that was switched off.
    ids = b"".join(struct.pack("<I", byte + 3) for byte in PROMPT.encode())
    first = b"".join(struct.pack("<I", byte) for byte in PROMPT.encode())
    assert any(form in seen for form in (ids, first)) is is_plaintext


def test_records_and_directories_are_the_users_own_and_hold_the_prompt(make_ranks):
    ranks = make_ranks(options=("--page-tokens", "16"))
    before = os.umask(0)
    try:
        ranks.start()
    finally:
        os.umask(before)
    ranks.complete(PROMPT)
    ranks.stop()
    directory = ranks.directory(0)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    files = list(directory.iterdir())
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    records = b"".join(file.read_bytes() for file in directory.glob("*.rec"))
    ids = [b"".join(struct.pack("<I", byte + first) for byte in PROMPT.encode()[:16]) for first in range(8)]
    assert any(form in records for form in ids), "a record names the tokens of its prompt, as SECURITY.md says"


def test_unused_slots_of_a_stored_tail_are_zero(make_ranks, tmp_path):
    """Few pages and many prompts: the pages of the last tail have held other tenants' keys and values."""
    model = make_tiny_checkpoint(tmp_path / "checkpoint", "llama")
    options = ("--threads", "1", "--page-tokens", "16", "--kv-memory", "12pages")
    ranks = make_ranks(model=model, options=options).start()
    for first in range(6):
        ids = [(first * 150 + at) % 3000 for at in range(150)]
        ranks.complete(ids, max_tokens=1, cache_salt=f"tenant {first}")
    ranks.stop()
    config = json.loads((model / "config.json").read_text())
    shape = (config["num_hidden_layers"], 2, 16, config["num_key_value_heads"], config["head_dim"])
    num_tails = 0
    for path in ranks.directory(0).glob("*.rec"):
        data = path.read_bytes()
        header = decode_header(data)
        tail = header.identity.tail_tokens
        if not tail or len(data) < header.layout.tail_end:  # a longer record has its tokens
            continue
        num_tails += 1
        at = header.layout.pages_end
        page = np.frombuffer(data[at : at + header.layout.page_bytes], dtype=np.float32)
        assert not page[np.prod(shape) :].any()
        entries = page[: np.prod(shape)].reshape(shape)
        assert entries[:, :, :tail].any(axis=(3, 4)).all()
        assert not entries[:, :, tail:].any()
    assert num_tails >= 6


def test_a_flare_process_leaves_no_core_dump(make_ranks):
    ranks = make_ranks(world_size=2).start()
    for pid in [*(process.pid for process in ranks.processes.values()), ranks.worker_pid()]:
        (limit,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line]
        assert limit.split()[4:6] == ["1", "1"]  # one byte: a limit of none is ignored where dumps go to a program


def test_no_key_is_on_a_command_line_or_in_a_log(make_ranks, tmp_path):
    token = secrets.token_hex(16)
    keys = tmp_path / "keys"
    keys.write_text(f"alice: {token}\n")
    keys.chmod(0o600)
    ranks = make_ranks(world_size=2, options=("--api-key-file", str(keys))).start()
    assert ranks.post("/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert httpx.get(f"{ranks.url}/v1/models", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    secret = (ranks.root / "cluster.key").read_text().strip()
    lines = [Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in ranks.processes.values()]
    lines.append(Path(f"/proc/{ranks.worker_pid()}/cmdline").read_bytes())
    shown = b"".join(lines).decode() + ranks.log(0) + ranks.log(1)
    shown += httpx.get(f"{ranks.url}/v1/cluster", headers={"Authorization": f"Bearer {token}"}).text
    shown += httpx.get(f"{ranks.url}/metrics", headers={"Authorization": f"Bearer {token}"}).text
    for each in (secret, token):
        assert each not in shown


def test_a_salt_finds_its_own_records_after_a_restart_and_no_other_salts(make_ranks):
    ranks = make_ranks(world_size=2, options=("--page-tokens", "16")).start()
    cold = {salt: ranks.cached(PROMPT, cache_salt=salt) for salt in ("one", "two")}
    assert [tiers for _, tiers in cold.values()] == [{}, {}]
    ranks.stop()
    ranks.start()
    assert ranks.cached(PROMPT, cache_salt="three")[1] == {}
    assert ranks.cached(PROMPT)[1] == {}
    for salt, (text, _) in cold.items():
        again, tiers = ranks.cached(PROMPT, cache_salt=salt)
        assert tiers == {"disk": len(PROMPT) - 1}
        assert again == text
