"""Checkpoints and packages: slices, damage named by file and tensor, identity, export."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from flare_core.compute.checkpoint import open_checkpoint
from flare_core.compute.export import export_package
from flare_core.compute.identity import model_identity
from flare_core.compute.loading import load_runner
from flare_core.compute.tensor_layout import rank_shard, tensor_slices
from flare_core.errors import CheckpointError, UsageError


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A private copy of a tiny checkpoint, to damage."""

    def make(**overrides):
        target = tmp_path / "model"
        shutil.copytree(checkpoint("llama", **overrides), target)
        return target

    return make


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_missing_tensor_is_named_with_its_directory(copy):
    directory = copy()
    rewrite(directory / "model.safetensors", lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"model has no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load_runner(directory, digest_cache=directory / "digests.json")


def test_a_misshapen_tensor_is_named_with_file_and_both_shapes(copy):
    directory = copy()
    rewrite(directory / "model.safetensors", lambda tensors: tensors.update({"model.norm.weight": torch.ones(95)}))
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor model\.norm\.weight has shape \(95,\), not \(96,\)"
    ):
        load_runner(directory, digest_cache=directory / "digests.json")


def test_a_tensor_of_integers_is_refused(copy):
    directory = copy()
    norm = {"model.norm.weight": torch.ones(96, dtype=torch.int8)}
    rewrite(directory / "model.safetensors", lambda tensors: tensors.update(norm))
    with pytest.raises(CheckpointError, match=r"norm\.weight holds I8"):
        load_runner(directory, digest_cache=directory / "digests.json")


@pytest.mark.parametrize("kept", [0, 4, 5000, -1])
def test_a_truncated_file_is_named(copy, kept):
    directory = copy()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        load_runner(directory, digest_cache=directory / "digests.json")


def test_a_missing_shard_file_is_named(copy):
    directory = copy(max_shard_size="1MB")
    victim = sorted(directory.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"names {victim.name}, which is missing"):
        load_runner(directory, digest_cache=directory / "digests.json")


def test_an_index_that_leaves_the_directory_is_refused(copy):
    directory = copy(max_shard_size="1MB")
    index = directory / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="not a file beside it"):
        load_runner(directory, digest_cache=directory / "digests.json")


@pytest.mark.parametrize("victim", ["config.json", "model.safetensors"])
def test_a_directory_without_config_or_weights_is_refused(copy, victim):
    directory = copy()
    (directory / victim).unlink()
    with pytest.raises(CheckpointError, match=victim):
        load_runner(directory, digest_cache=directory / "digests.json")


def test_slices_of_all_ranks_put_together_are_the_whole_tensor(checkpoint, digest_cache):
    directory = checkpoint("qwen2", max_shard_size="1MB")
    whole = {
        path_tensor: value for path in directory.glob("*.safetensors") for path_tensor, value in load_file(path).items()
    }
    parts = {}
    for rank in range(3):
        opened = open_checkpoint(directory, rank, 3, digest_cache=digest_cache)
        for part in tensor_slices(opened.config, rank_shard(opened.config, rank, 3)):
            parts.setdefault(part.name, []).append((part, opened.read(part)))
    assert set(parts) == set(whole)
    for name, pieces in parts.items():
        for part, tensor in pieces:
            assert torch.equal(tensor, whole[name][tuple(slice(span.start, span.stop) for span in part.spans)])
        divided = [axis for axis, size in enumerate(whole[name].shape) if len(pieces[0][0].spans[axis]) != size]
        if divided:
            assert torch.equal(torch.cat([tensor for _, tensor in pieces], dim=divided[0]), whole[name])


def test_identity_changes_with_a_weight_and_is_read_from_the_cache_otherwise(copy, digest_cache):
    directory = copy()
    read = []

    def progress(what, done, total):
        read.append((what, done, total))

    before = model_identity(directory, cache=digest_cache, progress=progress)
    assert read[-1][1] == read[-1][2]
    read.clear()
    assert model_identity(directory, cache=digest_cache, progress=progress) == before
    assert read == []
    rewrite(directory / "model.safetensors", lambda tensors: tensors["model.norm.weight"].add_(1.0))
    assert model_identity(directory, cache=digest_cache, progress=progress) != before
    assert read


def test_a_digest_cache_of_garbage_is_a_miss(copy, digest_cache):
    directory = copy()
    expected = model_identity(directory, cache=digest_cache)
    digest_cache.write_text("[not a cache")
    assert model_identity(directory, cache=digest_cache) == expected


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_package_gives_the_same_tokens_and_identity_as_its_source(
    world_size, checkpoint, on_ranks, tmp_path, prompt, digest_cache
):
    source = checkpoint("qwen3", tie_word_embeddings=True)
    package = tmp_path / "package"
    export_package(source, world_size, package, digest_cache=digest_cache)

    def body(driver):
        return driver.complete(prompt, 4), driver.loaded.identity.fingerprint(), driver.loaded.eos_token_ids

    assert on_ranks(package, world_size, body) == on_ranks(source, world_size, body)
    assert (package / "tokenizer.json").exists()


def test_a_package_for_another_world_size_names_both(checkpoint, tmp_path, digest_cache):
    export_package(checkpoint("llama"), 2, tmp_path / "package", digest_cache=digest_cache)
    with pytest.raises(CheckpointError, match="world size 2, not 1"):
        load_runner(tmp_path / "package", digest_cache=digest_cache)


def test_a_narrower_dtype_gives_a_package_an_identity_of_its_own(checkpoint, tmp_path, digest_cache):
    source = checkpoint("llama")
    same = export_package(source, 1, tmp_path / "same", dtype="float32", digest_cache=digest_cache)
    narrow = export_package(source, 1, tmp_path / "narrow", dtype="bfloat16", digest_cache=digest_cache)
    assert bytes.fromhex(same.model_identity) == model_identity(source, cache=digest_cache)
    assert narrow.model_identity != same.model_identity


def test_a_damaged_package_names_the_file(checkpoint, tmp_path, digest_cache):
    package = tmp_path / "package"
    export_package(checkpoint("llama"), 1, package, digest_cache=digest_cache)
    path = package / "rank-0-of-1.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank-0-of-1\.safetensors is damaged"):
        load_runner(package, digest_cache=digest_cache)
    path.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="the manifest says"):
        load_runner(package, digest_cache=digest_cache)
    path.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        load_runner(package, digest_cache=digest_cache)


def test_export_leaves_nothing_behind_when_it_fails(copy, tmp_path, digest_cache):
    directory = copy()
    rewrite(directory / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(CheckpointError):
        export_package(directory, 1, tmp_path / "out" / "package", digest_cache=digest_cache)
    assert list((tmp_path / "out").iterdir()) == []


def test_export_refuses_an_existing_directory_and_an_unknown_dtype(checkpoint, tmp_path, digest_cache):
    with pytest.raises(UsageError, match="exists already"):
        export_package(checkpoint("llama"), 1, tmp_path, digest_cache=digest_cache)
    with pytest.raises(UsageError, match="float8"):
        export_package(checkpoint("llama"), 1, tmp_path / "x", dtype="float8", digest_cache=digest_cache)
