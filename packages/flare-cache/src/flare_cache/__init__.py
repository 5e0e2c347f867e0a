"""Record format, record directory, jobs, staged and sharded transports, join and the disk store. No torch on import."""

from flare_cache.__about__ import __version__

__all__ = ["__version__"]
