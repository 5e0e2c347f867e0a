"""Files with keys: closed to other users or refused; of an API key a digest is kept and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os

import pytest

from flare_cli.server import keys
from flare_cli.server.keys import load_key_ring
from flare_core.errors import UsageError
from flare_transport import KeyFileError, load_key_file


@pytest.fixture
def key_file(tmp_path):
    def write(text: str, mode: int = 0o600, name: str = "keys"):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o606, 0o644])
def test_an_api_or_admin_key_file_open_to_others_is_refused_with_the_remedy(key_file, mode):
    api = key_file("alice: key-a\n", mode)
    with pytest.raises(UsageError, match=f"chmod 600 {api}"):
        load_key_ring(api, None)
    admin = key_file("key-admin\n", mode, "admin")
    with pytest.raises(UsageError, match=f"chmod 600 {admin}"):
        load_key_ring(None, admin)


def test_a_pipe_in_a_key_files_place_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "keys"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(UsageError, match="not a regular file"):
        load_key_ring(pipe, None)
    with pytest.raises(KeyFileError, match="not a regular file"):
        load_key_file(pipe)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_key_file_is_read(key_file, mode):
    assert load_key_ring(key_file("alice: key-a\n", mode), None).tenant("Bearer key-a") == "alice"


def test_no_api_key_is_kept_or_shown(key_file):
    ring = load_key_ring(key_file("alice: key-a\nbob: key-b\n"), key_file("key-admin\n", name="admin"))
    assert ring.tenants == {
        "alice": hashlib.sha256(b"key-a").digest(),
        "bob": hashlib.sha256(b"key-b").digest(),
    }
    assert ring.admin == hashlib.sha256(b"key-admin").digest()
    for secret in ("key-a", "key-b", "key-admin"):
        assert secret not in repr(ring)


def test_every_key_is_compared_whatever_matches_first(key_file, monkeypatch):
    compared = []
    in_constant_time = hmac.compare_digest

    def compare(left, right):
        compared.append((len(left), len(right)))
        return in_constant_time(left, right)

    ring = load_key_ring(key_file("alice: key-a\nbob: key-b\ncarol: key-c\n"), None)
    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    assert ring.tenant("Bearer key-a") == "alice"
    assert ring.tenant("Bearer nobody's") is None
    assert compared == [(32, 32)] * 6


@pytest.mark.parametrize("name", ["ali\x00ce", "ali\x1bce", "ali\u2028ce"])
def test_a_tenants_name_is_printable(key_file, name):
    with pytest.raises(UsageError, match="line 1"):
        load_key_ring(key_file(f"{name}: key-a\n"), None)


def test_a_malformed_line_is_named_without_its_content(key_file):
    with pytest.raises(UsageError) as caught:
        load_key_ring(key_file("the-secret-itself\n"), None)
    assert "the-secret-itself" not in str(caught.value)
