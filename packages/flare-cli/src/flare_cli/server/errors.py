"""Errors as the OpenAI API writes them: ``{"error": {"message", "type", "param", "code"}}``. Knows no request."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from flare_core.errors import RequestError

__all__ = ["EngineUnavailable", "error_object", "error_response"]

MAX_MESSAGE_CHARS = 1000
MAX_PARAM_CHARS = 200

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}


class EngineUnavailable(Exception):
    """No engine can take or finish the request: it is starting, draining, or a rank was lost."""


def error_object(message: str, *, status: int, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The JSON object of an error; ``code`` is the status's name where there is none better."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    # Names that a client sent may stand in both, at any length.
    short_param = None if param is None else _clipped(param, MAX_PARAM_CHARS)
    return {
        "error": {"message": _clipped(message, MAX_MESSAGE_CHARS), "type": kind, "param": short_param, "code": code}
    }


def _clipped(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}…"


def error_response(error: RequestError | EngineUnavailable, *, retry_after: int = 1) -> Response:
    """The answer to a request that failed."""
    headers: Mapping[str, str] = {}
    if isinstance(error, RequestError):
        status = error.status
        body = error_object(str(error), status=status, param=error.param, code=error.code)
    else:
        status = 503
        body = error_object(str(error), status=status, code="engine_unavailable")
    if status in {429, 503}:
        headers = {"Retry-After": str(retry_after)}
    elif status == 401:
        headers = {"WWW-Authenticate": "Bearer"}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
