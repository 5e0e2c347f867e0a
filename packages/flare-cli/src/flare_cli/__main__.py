"""Entry point of the ``flare`` command: errors as one clear message, and signals that end in order from the start.

Importing it must stay cheap (``flare --help`` answers at once), and more so what runs before ``main``: until then a
signal to end is the interpreter's.
"""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0, 2 for a usage error, 78 for ranks that disagree, 70 for a lost group."""
    given = sys.argv[1:] if arguments is None else arguments
    is_server = given[:1] == ["run"]
    if is_server:
        # Nothing is served yet, so that a signal to end is obeyed by ending.
        _answer_signals(_stop)
    try:
        code = _run(arguments)
    except KeyboardInterrupt:
        if is_server:
            print("flare: stopped before it was ready", file=sys.stderr)
        code = 0 if is_server else 130
    if is_server:
        # It is ending, and why is settled.
        _answer_signals(signal.SIG_IGN)
    sys.exit(code)


class _Stopped(KeyboardInterrupt):
    """A signal to end. A plain KeyboardInterrupt that passed through exec() makes the interpreter die of SIGINT."""


def _stop(*_: object) -> None:
    raise _Stopped


def _answer_signals(answer: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, answer)


def _run(arguments: list[str] | None) -> int:
    import click

    from flare_cli.command_tree import flare
    from flare_core.errors import FlareError

    try:
        code = flare.main(args=arguments, prog_name="flare", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return 2
    except click.exceptions.Abort:
        raise KeyboardInterrupt from None
    except FlareError as error:
        click.echo(f"flare: {error}", err=True)
        return error.exit_code
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
