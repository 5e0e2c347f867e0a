"""What every route needs, and the steps they share: who asks, within which limits, with which body.

Knows HTTP requests; does not know the shape of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from flare_cli.server.engine_port import Engine, EngineState
from flare_cli.server.errors import EngineUnavailable
from flare_cli.server.keys import KeyRing
from flare_cli.server.metrics import ServerMetrics
from flare_cli.server.model import Limits, ServedModel
from flare_cli.server.streaming import ClientGone
from flare_core.errors import RequestError

__all__ = ["Service", "service_of"]

MAX_LENGTH_DIGITS = 20
"""Digits of a Content-Length; Python does not even convert thousands of them."""


@dataclass(slots=True)
class Service:
    """One server. ``model`` is None until the engine has said what it serves."""

    engine: Engine
    model: ServedModel | None
    limits: Limits
    keys: KeyRing
    metrics: ServerMetrics
    num_requests: int = 0

    def ready_model(self) -> ServedModel:
        """The model; raises ``EngineUnavailable`` while requests cannot be taken."""
        if self.model is None or self.engine.state is not EngineState.READY:
            msg = f"the server is {self.engine.state}: {self.engine.detail}"
            raise EngineUnavailable(msg)
        return self.model

    def described_model(self) -> ServedModel:
        """The model, for routes that need no engine; raises ``EngineUnavailable`` until it is known."""
        if self.model is None:
            msg = f"the server is {self.engine.state}: {self.engine.detail}"
            raise EngineUnavailable(msg)
        return self.model

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Holds one of the places for requests in work; raises ``RequestError`` (429) where there is none."""
        if self.num_requests >= self.limits.max_concurrent_requests:
            msg = f"{self.num_requests} requests are in work, which is this server's limit; try again"
            raise RequestError(msg, status=429, code="too_many_requests")
        self.num_requests += 1
        self.metrics.requests_in_work.set(self.num_requests)
        try:
            yield
        finally:
            self.num_requests -= 1
            self.metrics.requests_in_work.set(self.num_requests)

    def tenant(self, request: Request) -> str:
        """Whose request it is; raises ``RequestError`` (401) without a known key."""
        tenant = self.keys.tenant(request.headers.get("authorization"))
        if tenant is None:
            msg = "no valid API key: send one as 'Authorization: Bearer KEY'"
            raise RequestError(msg, status=401, code="invalid_api_key")
        return tenant

    def require_admin(self, request: Request) -> None:
        """Raises ``RequestError`` (403) unless the admin key is sent or a process of this host asks."""
        if self.keys.is_admin(request.headers.get("authorization")) or _is_local(request):
            return
        msg = "this needs the admin key, or a request from the server's own host"
        raise RequestError(msg, status=403, code="admin_only")

    def require_observer(self, request: Request) -> None:
        """As ``require_admin``, but any API key will do; everybody may look where no key is asked for."""
        if self.keys.tenant(request.headers.get("authorization")) is None:
            self.require_admin(request)

    async def body(self, request: Request) -> bytes:
        """The request's body.

        Raises:
            RequestError: over the limit (413) or too slow (408). ClientGone: it was cut off.
        """
        limit = self.limits.max_body_bytes
        length = request.headers.get("content-length", "")
        too_large = RequestError(f"the body is larger than this server's limit of {limit} bytes", status=413)
        if length.isdecimal() and (len(length) > MAX_LENGTH_DIGITS or int(length) > limit):
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for part in request.stream():
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
        except TimeoutError:
            msg = f"the body did not arrive within {self.limits.body_seconds:g} s"
            raise RequestError(msg, status=408) from None
        except ClientDisconnect:
            raise ClientGone from None
        return b"".join(parts)


def service_of(request: Request) -> Service:
    """The service that the application was made with."""
    service: Service = request.app.state.service
    return service


def _is_local(request: Request) -> bool:
    """Whether a process of this host asks. A browser's page (``Origin``) or a proxy's client does not count."""
    if request.client is None or "origin" in request.headers or "x-forwarded-for" in request.headers:
        return False
    try:
        return ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
