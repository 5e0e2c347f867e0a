"""The application: routes, the errors' shape, and the count of what was answered."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import h11
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flare_cli.server.answer import token_string
from flare_cli.server.bodies import CacheResetBody, DetokenizeBody, TokenizeBody, decode_body
from flare_cli.server.chat import chat_prompt
from flare_cli.server.engine_port import EngineState
from flare_cli.server.errors import EngineUnavailable, error_response
from flare_cli.server.generate import chat_completions, completions
from flare_cli.server.metrics import CONTENT_TYPE
from flare_cli.server.params import check_token_ids
from flare_cli.server.service import Service, service_of
from flare_cli.server.streaming import ClientGone
from flare_core.errors import RequestError
from flare_core.prefix import Tier

__all__ = ["MAX_HEADER_BYTES", "make_app"]

_LOG = logging.getLogger("flare.http")

MAX_HEADER_BYTES = 16 << 10

Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def make_app(service: Service) -> ASGIApp:
    """The ASGI application over ``service``."""
    routes = [
        ("/v1/models", models, "GET"),
        ("/v1/models/{name:path}", one_model, "GET"),
        ("/v1/completions", completions, "POST"),
        ("/v1/chat/completions", chat_completions, "POST"),
        ("/tokenize", tokenize, "POST"),
        ("/detokenize", detokenize, "POST"),
        ("/health", health, "GET"),
        ("/metrics", metrics, "GET"),
        ("/v1/cluster", cluster, "GET"),
        ("/v1/cache/reset", cache_reset, "POST"),
    ]
    app = Starlette(
        routes=[Route(path, _guarded(endpoint), methods=[method]) for path, endpoint, method in routes],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.service = service
    return _Edge(app, service, {path for path, _, _ in routes})


def _guarded(endpoint: Endpoint) -> Endpoint:
    """The endpoint with every failure as an answer: a request's mistake stays in the request."""

    async def answer(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except (RequestError, EngineUnavailable) as error:
            return error_response(error)
        except ClientGone:
            return Response(status_code=499)
        except Exception:  # noqa: BLE001  a bug in one request must not be one of all
            _LOG.exception("%s %s failed", request.method, request.url.path)
            return error_response(
                RequestError("the server failed; its log says why", status=500, code="internal_error")
            )

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "there is nothing at", 405: "the method is not allowed at"}.get(status, "cannot be served:")
    return error_response(RequestError(f"{what} {request.method} {request.url.path[:200]}", status=status))


class _Edge:
    """Around the application: bounds headers, counts answers by route and status, and outlives broken connections.

    A path that is no route counts as "other".
    """

    def __init__(self, app: ASGIApp, service: Service, paths: set[str]) -> None:
        self._app = app
        self._service = service
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEADER_BYTES:
            # uvicorn bounds a header that is still incomplete only.
            error = RequestError(f"the header is larger than {MAX_HEADER_BYTES} bytes", status=431)
            await error_response(error)(scope, receive, send)
            return

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.metrics.http_requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, counted_send)
        except h11.LocalProtocolError:
            # The client broke the protocol within its body: uvicorn has answered and given the connection up.
            _LOG.info("a client broke off within the body of %s", path)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def models(request: Request) -> ASGIApp:
    """``GET /v1/models``."""
    service = service_of(request)
    service.tenant(request)
    return _json({"object": "list", "data": [_model_object(service)]})


async def one_model(request: Request) -> ASGIApp:
    """``GET /v1/models/NAME``."""
    service = service_of(request)
    service.tenant(request)
    name = request.path_params["name"]
    if name != service.described_model().name:
        msg = f"the model {name[:200]!r} does not exist here"
        raise RequestError(msg, status=404, code="model_not_found")
    return _json(_model_object(service))


def _model_object(service: Service) -> dict[str, object]:
    model = service.described_model()
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "flare",
        "max_model_len": model.max_model_len,
    }


async def tokenize(request: Request) -> ASGIApp:
    """``POST /tokenize``: the ids of a text, or of messages in the model's template."""
    service = service_of(request)
    service.tenant(request)
    body = decode_body(await service.body(request), TokenizeBody)
    model = service.described_model()
    if (body.prompt is None) == (body.messages is None):
        msg = "prompt: exactly one of prompt and messages is needed"
        raise RequestError(msg, param="prompt")
    if body.messages is not None:
        ids = await asyncio.to_thread(chat_prompt, body.messages, model, body.chat_template_kwargs)
    else:
        ids = await asyncio.to_thread(
            model.tokenizer.encode, body.prompt or "", add_special_tokens=body.add_special_tokens
        )
    answer: dict[str, object] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [token_string(model.tokenizer, token_id) for token_id in ids]
    return _json(answer)


async def detokenize(request: Request) -> ASGIApp:
    """``POST /detokenize``: the text of ids."""
    service = service_of(request)
    service.tenant(request)
    body = decode_body(await service.body(request), DetokenizeBody)
    model = service.described_model()
    check_token_ids(body.tokens, model, param="tokens")
    text = await asyncio.to_thread(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return _json({"prompt": text})


async def health(request: Request) -> ASGIApp:
    """``GET /health``: 200 while requests are taken, else 503; what for, in words."""
    service = service_of(request)
    engine = service.engine
    if engine.state is EngineState.READY and service.model is None:
        return _json({"status": EngineState.STARTING, "detail": "reading the tokenizer"}, 503)
    return _json({"status": engine.state, "detail": engine.detail}, 200 if engine.state is EngineState.READY else 503)


async def metrics(request: Request) -> ASGIApp:
    """``GET /metrics``."""
    service = service_of(request)
    service.require_observer(request)
    text = service.metrics.exposition(await service.engine.snapshot())
    return Response(text, headers={"content-type": CONTENT_TYPE})


async def cluster(request: Request) -> ASGIApp:
    """``GET /v1/cluster``; ``?records=1``: with what the pool has of every record."""
    service = service_of(request)
    service.require_observer(request)
    return _json(await service.engine.snapshot(with_records=request.query_params.get("records") == "1"))


async def cache_reset(request: Request) -> ASGIApp:
    """``POST /v1/cache/reset``: forget what a tier (device or memory) holds and nothing uses."""
    service = service_of(request)
    service.require_admin(request)
    body = decode_body(await service.body(request), CacheResetBody)
    if body.tier not in {Tier.DEVICE, Tier.MEMORY}:
        msg = f"tier: {body.tier[:40]!r} cannot be reset; device and memory can"
        raise RequestError(msg, param="tier")
    await service.engine.reset(Tier(body.tier))
    return _json({"tier": body.tier, "reset": True})
