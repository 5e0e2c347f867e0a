"""Where each setting comes from: flag > environment > TOML file > the launcher's variables > default.

Pure: takes mappings, gives a ``RunConfig`` and the origin of every value. Does not know click.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flare_cli.config import HostPort, RunConfig
from flare_cli.settings import RUN_SETTINGS, Setting
from flare_core.errors import UsageError

__all__ = ["DEFAULT_RENDEZVOUS_PORT", "Placement", "Resolved", "rank_directory", "read_config_file", "resolve"]

DEFAULT_RENDEZVOUS_PORT = 7000
"""Used where a launcher gives rank zero's host but no port."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration with the origin of each value, by setting name; ``unknown`` are FLARE_* nobody reads."""

    config: RunConfig
    origins: Mapping[str, str]
    unknown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """What a launcher's variables say; ``names`` gives the variable that each value was read from."""

    values: Mapping[str, object]
    names: Mapping[str, str]


def resolve(flags: Mapping[str, str | bool], environ: Mapping[str, str], *, file: Path | None = None) -> Resolved:
    """The configuration, not yet checked as a whole; ``flags`` holds only what was given on the command line.

    Raises:
        UsageError: a value that cannot be read; names its source.
    """
    tables = read_config_file(file) if file is not None else {}
    placement = launcher_placement(environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for setting in RUN_SETTINGS:
        values[setting.name], origins[setting.name] = _one(
            setting, flags=flags, environ=environ, tables=tables, file=file, placement=placement
        )
    directory = values["prefix_cache_disk"]
    if directory is not None:
        values["prefix_cache_disk"] = rank_directory(directory, values["rank"])
    known = {setting.variable for setting in RUN_SETTINGS} | {"FLARE_CONFIG", "FLARE_FAILPOINT"}
    unknown = tuple(sorted(name for name in environ if name.startswith("FLARE_") and name not in known))
    return Resolved(RunConfig(**values), origins, unknown)


def rank_directory(directory: Path, rank: int) -> Path:
    """``{rank}`` in the path stands for the rank, so that ranks of one host can be started by one command line."""
    return Path(str(directory).replace("{rank}", str(rank)))


def _one(
    setting: Setting,
    *,
    flags: Mapping[str, str | bool],
    environ: Mapping[str, str],
    tables: Mapping[str, object],
    file: Path | None,
    placement: Placement,
) -> tuple[object, str]:
    if setting.name in flags:
        return _read(setting, flags[setting.name], setting.flag), f"flag {setting.flag}"
    if setting.variable in environ:
        return _read(setting, environ[setting.variable], setting.variable), f"env {setting.variable}"
    if setting.name in tables:
        return _read(setting, tables[setting.name], f"{file}: {setting.key}"), f"file {file}"
    if setting.name in placement.values:
        return placement.values[setting.name], f"env {placement.names[setting.name]}"
    return setting.default, "default"


def _read(setting: Setting, value: object, source: str) -> object:
    if isinstance(value, bool):
        if setting.metavar:
            msg = f"{source}: true or false is no value for this setting"
            raise UsageError(msg)
        return value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float):
        msg = f"{source}: a {type(value).__name__} is no value for this setting"
        raise UsageError(msg)
    try:
        return setting.parse(str(value))
    except UsageError as error:
        msg = f"{source}: {error}"
        raise UsageError(msg) from None


def read_config_file(path: Path) -> dict[str, object]:
    """The settings in a TOML file, by setting name (dashes or underscores).

    Raises:
        UsageError: not readable, not TOML, or a key that is no setting; names the nearest one.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"--config {path}: {error.strerror}"
        raise UsageError(msg) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"--config {path}: not TOML: {error}"
        raise UsageError(msg) from None
    names = {setting.name for setting in RUN_SETTINGS}
    values: dict[str, object] = {}
    for key, value in document.items():
        name = key.replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            msg = f"{path}: unknown setting {key!r}{hint}"
            raise UsageError(msg)
        values[name] = value
    return values


def launcher_placement(environ: Mapping[str, str]) -> Placement:
    """Rank, world size and rendezvous from the variables of torchrun, LeaderWorkerSet or Slurm, if one is there.

    Slurm sets its variables in every shell of an allocation: they count only inside a step (``SLURM_STEP_ID``) of
    more than one task.

    Raises:
        UsageError: a launcher's number is not a number.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        # torchrun's agent itself listens at MASTER_PORT when it hosts the store.
        shift = 1 if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
        return _placement(environ, "RANK", "WORLD_SIZE", host="MASTER_ADDR", port="MASTER_PORT", shift=shift)
    if "LWS_GROUP_SIZE" in environ and "LWS_WORKER_INDEX" in environ:
        return _placement(environ, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", host="LWS_LEADER_ADDRESS")
    if "SLURM_PROCID" in environ and environ.get("SLURM_NTASKS", "1") != "1" and "SLURM_STEP_ID" in environ:
        return _placement(environ, "SLURM_PROCID", "SLURM_NTASKS", host=_slurm_host(environ))
    return Placement({}, {})


def _placement(
    environ: Mapping[str, str], rank: str, size: str, *, host: str, port: str = "", shift: int = 0
) -> Placement:
    values: dict[str, object] = {}
    names: dict[str, str] = {}
    for setting, variable in (("rank", rank), ("world_size", size)):
        if not environ[variable].isdecimal():
            msg = f"{variable}={environ[variable]!r} is not a number"
            raise UsageError(msg)
        values[setting] = int(environ[variable])
        names[setting] = variable
    address = environ.get(host, "")
    if address:
        given = environ.get(port, "") if port else ""
        values["rendezvous"] = HostPort(address, int(given) + shift if given.isdecimal() else DEFAULT_RENDEZVOUS_PORT)
        names["rendezvous"] = host
    return Placement(values, names)


def _slurm_host(environ: Mapping[str, str]) -> str:
    """srun gives the address of the node it was started on; inside sbatch that is the first node, where rank 0 is."""
    return next((name for name in ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST") if name in environ), "")
