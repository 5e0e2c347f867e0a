"""The command answers at once: help and inspection load nothing heavy."""

import subprocess
import sys

HEAVY = (
    "torch",
    "starlette",
    "uvicorn",
    "cryptography",
    "numpy",
    "rich",
    "transformers",
    "tokenizers",
    "jinja2",
    "ssl",
)


def loaded_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(' '.join(sys.modules))"
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    return set(output.split())


def test_the_command_tree_loads_nothing_heavy():
    assert not loaded_after("import flare_cli.command_tree") & set(HEAVY)


def test_signals_are_minded_before_anything_is_loaded():
    loaded = loaded_after("import flare_cli.__main__")
    assert "click" not in loaded
    assert {name for name in loaded if name.startswith("flare_cli.")} == {"flare_cli.__main__", "flare_cli.__about__"}


def test_the_server_loads_no_torch():
    loaded = loaded_after("import flare_cli.server.app, flare_cli.api_process, flare_cli.wiring")
    assert not loaded & {"torch", "transformers", "cryptography"}
