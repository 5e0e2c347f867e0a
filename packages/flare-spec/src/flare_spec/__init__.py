"""Speculative decoding for flare (drafters, proposals, verification). Importing it loads no torch."""

from flare_spec.__about__ import __version__

__all__ = ["__version__"]
