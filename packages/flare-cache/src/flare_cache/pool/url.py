"""``--pool``: where the managers are and how they are reached. Parses; connects to nothing."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from flare_core.errors import UsageError

__all__ = ["DEFAULT_POOL_PORT", "PoolUrl", "parse_pool_url"]

DEFAULT_POOL_PORT = 7420
_SCHEMES = {"selene": False, "selenes": True}
_PLACE = re.compile(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class PoolUrl:
    """Managers over one storage: any of them serves.

    Attributes:
        is_tls: ``selenes://``: TLS; ``selene://``: authenticated, not encrypted.
        places: (host, port), in the order in which they are tried.
    """

    is_tls: bool
    places: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        shown = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.places)
        return f"{'selenes' if self.is_tls else 'selene'}://{','.join(shown)}"

    @property
    def is_loopback(self) -> bool:
        """No manager is reached over a network."""
        return all(_is_loopback(host) for host, _ in self.places)


def parse_pool_url(text: str) -> PoolUrl:
    """``selene://HOST[:PORT][,HOST[:PORT]...]``, or ``selenes://`` for TLS.

    Raises:
        UsageError: another scheme, or a place that is none; names it.
    """
    scheme, separator, rest = text.strip().partition("://")
    if not separator or scheme not in _SCHEMES:
        msg = f"{text!r} is not selene://HOST:PORT (TCP) or selenes://HOST:PORT (TLS)"
        raise UsageError(msg)
    places: list[tuple[str, int]] = []
    for part in rest.rstrip("/").split(","):
        match = _PLACE.fullmatch(part.strip())
        port = int(match[3] or DEFAULT_POOL_PORT) if match is not None else 0
        if match is None or not 0 < port < 65536:
            msg = f"{text!r}: {part!r} is not HOST or HOST:PORT (IPv6: [HOST]:PORT)"
            raise UsageError(msg)
        places.append((match[1] or match[2], port))
    return PoolUrl(_SCHEMES[scheme], tuple(places))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
