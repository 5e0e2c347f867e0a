"""flare-cli. Importing it loads no torch."""

from flare_cli.__about__ import __version__

__all__ = ["__version__"]
