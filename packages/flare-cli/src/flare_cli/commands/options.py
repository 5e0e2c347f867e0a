"""Options of ``run`` and ``config``, made from the table of settings, so that no flag can be missing in one of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from flare_cli.settings import RUN_SETTINGS, Setting

if TYPE_CHECKING:
    from flare_cli.resolve import Resolved

__all__ = ["resolve_from", "run_options"]

Function = TypeVar("Function", bound=Callable[..., Any])


def run_options(function: Function) -> Function:
    """Adds every setting and ``--config`` to a command; the command receives them as keyword arguments."""
    for setting in reversed(RUN_SETTINGS):
        function = _option(setting)(function)
    return click.option("--config", "config_file", metavar="FILE", help="TOML file with settings; flags go first.")(
        function
    )


def _option(setting: Setting) -> Callable[[Function], Function]:
    if setting.name == "model":
        return click.argument("model", required=False, metavar="[MODEL]")
    if not setting.metavar:
        return click.option(f"{setting.flag}/--no-{setting.key}", setting.name, default=None, help=setting.text)
    show = "" if setting.default is None else f"  [default: {setting.show(setting.default)}]"
    return click.option(setting.flag, setting.name, metavar=setting.metavar, help=setting.text + show)


def resolve_from(arguments: dict[str, Any]) -> Resolved:
    """The configuration from a command's arguments, this process's environment and the file; not yet checked.

    Raises:
        UsageError: a value cannot be read.
    """
    from flare_cli.resolve import resolve

    given = {name: value for name, value in arguments.items() if value is not None}
    file = given.pop("config_file", None) or os.environ.get("FLARE_CONFIG")
    return resolve(given, os.environ, file=Path(file) if file else None)
