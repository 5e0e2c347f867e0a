"""The words everyone shares, the ports the engine needs, and the engine. Importing it loads no torch."""

from flare_core.__about__ import __version__

__all__ = ["__version__"]
