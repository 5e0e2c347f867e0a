"""The state of an interrupted training run: parameters, both moments of AdamW and the next step, in one file.

safetensors with JSON in its metadata; nothing that is read can run code. The file is replaced whole.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open

from flare_core.errors import CheckpointError
from flare_spec.dspark.training_model import Trainee
from flare_spec.training.conversations import save_whole

__all__ = ["read_state", "write_state"]

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")


def write_state(path: Path, trainee: Trainee, optimiser: torch.optim.AdamW, *, next_step: int, run: str) -> None:
    """Replace ``path``; ``run`` says what is trained how. Blocks on the device and the disk."""
    tensors = {}
    for name, parameter in trainee.parameters.items():
        tensors[f"parameter.{name}"] = parameter.detach().cpu().contiguous()
        for moment in _MOMENTS:
            if parameter in optimiser.state:
                tensors[f"{moment}.{name}"] = optimiser.state[parameter][moment].cpu().contiguous()
    steps = {int(optimiser.state[each]["step"]) for each in trainee.parameters.values() if each in optimiser.state}
    position = {"next_step": next_step, "updates": max(steps, default=0), "run": run}
    save_whole(path, tensors, {"flare": json.dumps(position)})


def read_state(path: Path, trainee: Trainee, optimiser: torch.optim.AdamW, *, run: str) -> int:
    """Put back what :func:`write_state` wrote and return the step to go on with; 0 where there is no such file.

    Raises:
        CheckpointError: the file is damaged, or of a run with other settings.
    """
    if not path.exists():
        return 0
    try:
        with safe_open(path, framework="pt") as file:
            position = json.loads((file.metadata() or {})["flare"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
        if position["run"] != run:
            raise CheckpointError(
                f"{path} is of a run with other settings; give the same ones to go on, or another output directory"
            )
        for name, parameter in trainee.parameters.items():
            parameter.data.copy_(tensors[f"parameter.{name}"])
            if f"{_MOMENTS[0]}.{name}" in tensors:
                moments = {each: tensors[f"{each}.{name}"].to(parameter.device) for each in _MOMENTS}
                optimiser.state[parameter] = {"step": torch.tensor(float(position["updates"])), **moments}
        return int(position["next_step"])
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a state of this training run: {error}; remove it to begin anew") from error
