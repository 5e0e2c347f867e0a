"""Key files: what is accepted, what is refused and the remedy named; keys derived per purpose."""

import io
import os

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from flare_transport import KeyFileError, derive_key, generate_key, load_key_file, write_key


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "cluster.key"
    path.write_text(generate_key() + "\n")
    path.chmod(0o600)
    return path


def test_a_generated_key_loads_as_32_bytes(key_file):
    assert load_key_file(key_file) == bytes.fromhex(key_file.read_text())
    assert len(load_key_file(str(key_file))) == 32


def test_two_keys_differ():
    assert generate_key() != generate_key()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620])
def test_a_key_open_to_others_is_refused_with_the_remedy(key_file, mode):
    key_file.chmod(mode)
    with pytest.raises(KeyFileError, match=f"chmod 600 {key_file}"):
        load_key_file(key_file)


@pytest.mark.parametrize("content", ["", "ab" * 31, "ab" * 33, "zz" * 32, "ab" * 32 + "\n" + "ab" * 32, "é" * 32])
def test_what_is_not_64_hexadecimal_digits_is_not_a_key(key_file, content):
    key_file.write_text(content)
    with pytest.raises(KeyFileError, match=r"does not hold a key.*flare key"):
        load_key_file(key_file)


def test_a_malformed_key_is_not_shown(key_file):
    key_file.write_text("secret" * 9)
    with pytest.raises(KeyFileError) as caught:
        load_key_file(key_file)
    assert "secret" not in str(caught.value)


def test_a_missing_key_file_is_named_with_the_remedy(tmp_path):
    with pytest.raises(KeyFileError, match=r"absent\.key: No such file.*flare key >"):
        load_key_file(tmp_path / "absent.key")


def test_a_directory_is_not_a_key_file(tmp_path):
    with pytest.raises(KeyFileError, match=f"key file {tmp_path}"):
        load_key_file(tmp_path)


def test_a_device_is_not_a_key_file():
    with pytest.raises(KeyFileError, match="not a regular file"):
        load_key_file("/dev/null")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_another_user_is_refused(key_file):
    os.chown(key_file, 12345, -1)
    with pytest.raises(KeyFileError, match="belongs to user 12345"):
        load_key_file(key_file)


def test_a_key_written_to_a_file_loads_under_any_umask(tmp_path):
    path = tmp_path / "cluster.key"
    with path.open("w") as file:
        path.chmod(0o644)
        write_key(file)
    assert len(load_key_file(path)) == 32


def test_a_key_can_be_written_to_a_stream_without_a_descriptor_and_to_a_pipe():
    stream = io.StringIO()
    write_key(stream)
    assert len(bytes.fromhex(stream.getvalue())) == 32
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "w") as file:
        write_key(file)
    with os.fdopen(read_end) as file:
        assert len(file.read()) == 65


@given(st.binary(min_size=1, max_size=64), st.text(max_size=30), st.binary(max_size=64), st.integers(1, 200))
def test_derived_keys_are_hkdf_sha256(key, purpose, salt, num_bytes):
    expected = HKDF(hashes.SHA256(), num_bytes, salt or None, purpose.encode()).derive(key)
    assert derive_key(key, purpose, salt=salt, num_bytes=num_bytes) == expected
