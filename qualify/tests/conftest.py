"""Models and groups for the tests that run real rank processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flare_core.testing.checkpoints import make_tiny_checkpoint
from flare_core.testing.oracle_config import OracleConfig, write_oracle_model
from flare_qualify.group import Group

ROWS = OracleConfig(row_bytes=5000)


@pytest.fixture(scope="session", params=["oracle with rows", "llama"])
def model(request, tmp_path_factory):
    """A model directory: one with state rows, and a real one."""
    directory = tmp_path_factory.mktemp("model")
    if request.param == "llama":
        return make_tiny_checkpoint(directory, "llama", num_attention_heads=6, num_key_value_heads=3, head_dim=16)
    write_oracle_model(directory, ROWS)
    return directory


@pytest.fixture
def make_group(tmp_path) -> Iterator[Callable[..., Group]]:
    """Groups over a model, killed at the end of the test whatever happened."""
    groups: list[Group] = []

    def make(model, world_size, *options, **rest) -> Group:
        common = ["--page-tokens", "16", "--prefix-cache-min-tail", "0", "--threads", "1", "--kv-memory", "256pages"]
        group = Group(model, world_size, tmp_path / f"group{len(groups)}", [*common, *options], **rest)
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.kill_all()
