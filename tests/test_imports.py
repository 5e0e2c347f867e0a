"""What importing a package brings with it, seen by a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest
from repository import PACKAGES

# Stands in for torch and its like whether they are installed or not, and lets no `except ImportError` hide the attempt.
WATCH = """
import sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {forbidden!r}:
            raise SystemExit(f"importing {module} imports {{name}}")
sys.meta_path.insert(0, Watch())
import {module}
"""
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "triton", "cuda")


def importing(module: str, *forbidden: str) -> str:
    """What went wrong when a fresh interpreter imported ``module``, or the empty string."""
    code = WATCH.format(module=module, forbidden=frozenset(forbidden))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_leaves_torch_unloaded(package: str) -> None:
    assert importing(package, *HEAVY) == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_starts_no_event_loop_and_opens_no_screen(package: str) -> None:
    assert importing(package, "asyncio", "uvicorn", "starlette", "textual", "rich", "typer") == ""


def test_the_command_needs_no_torch_until_it_runs_a_model() -> None:
    assert importing("flare_cli.command_tree", *HEAVY, "starlette", "uvicorn") == ""


def test_the_watch_sees_an_import() -> None:
    assert "imports json" in importing("json.tool", "json") + importing("json", "json")
