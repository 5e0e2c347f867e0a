"""API key files, and who a key stands for."""

import pytest

from flare_cli.server.keys import load_key_ring
from flare_core.errors import UsageError


def ring(tmp_path, text, admin=None):
    keys = tmp_path / "keys"
    keys.write_text(text)
    keys.chmod(0o600)
    root = tmp_path / "admin"
    if admin is not None:
        root.write_text(admin)
        root.chmod(0o600)
    return load_key_ring(keys, root if admin is not None else None)


def test_a_key_stands_for_its_tenant_whatever_the_schemes_case(tmp_path):
    keys = ring(tmp_path, "# comment\n\nalice: a:b\nbob:c\n", "root\n")
    assert keys.tenant("Bearer a:b") == "alice"
    assert keys.tenant("bearer c") == "bob"
    assert keys.tenant("Basic c") is keys.tenant("c") is keys.tenant(None) is keys.tenant("Bearer ") is None
    assert keys.is_admin("Bearer root")
    assert not keys.is_admin("Bearer c")
    assert "a:b" not in repr(keys)


def test_without_keys_everybody_is_the_default_tenant():
    keys = load_key_ring(None, None)
    assert keys.tenant(None) == keys.tenant("Bearer x") == "default"
    assert not keys.is_admin("Bearer ")


@pytest.mark.parametrize("text", ["", "alice\n", ": key\n", "alice:\n", "a: k\na: l\n", "a: k\nb: k\n"])
def test_a_line_that_is_no_key_is_named(tmp_path, text):
    with pytest.raises(UsageError, match="--api-key-file"):
        ring(tmp_path, text)


def test_an_admin_file_holds_one_key(tmp_path):
    with pytest.raises(UsageError, match="--admin-key-file"):
        ring(tmp_path, "a: k\n", "one\ntwo\n")
