"""The two routes that generate: body to prompt ids, prompt ids to outputs, outputs to an answer or a stream."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from flare_cli.server.answer import OutputTotals, Renderer, usage_object
from flare_cli.server.bodies import ChatBody, CompletionBody, decode_body
from flare_cli.server.chat import ChatRenderer, chat_prompt, chat_request
from flare_cli.server.completions import CompletionRenderer, completion_requests, prompt_texts
from flare_cli.server.generation import Generation, OutputRequest
from flare_cli.server.model import ServedModel
from flare_cli.server.params import check_model_name
from flare_cli.server.service import Service, service_of
from flare_cli.server.streaming import EventStream, collect, unless_gone

__all__ = ["chat_completions", "completions"]

LONG_TEXT_CHARS = 4096
"""Longer texts are tokenized outside the event loop."""


async def completions(request: Request) -> ASGIApp:
    """``POST /v1/completions``."""
    service = service_of(request)
    tenant = service.tenant(request)
    body = decode_body(await service.body(request), CompletionBody)
    model = service.ready_model()
    check_model_name(body.model, model)
    prompts = prompt_texts(body)
    prompt_ids = [await _encode(model, prompt) for prompt in prompts]
    requests = completion_requests(
        body, prompt_ids, model, service.limits, tenant=tenant, random_seed=secrets.randbits(64)
    )
    texts: list[str] = []
    if body.echo:
        texts = [p if isinstance(p, str) else model.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
    renderer = CompletionRenderer(
        answer_id=f"cmpl-{secrets.token_hex(16)}",
        created=int(time.time()),
        model=model,
        body=body,
        prompts=texts,
        prompt_ids=prompt_ids,
        n=requests[0].n,
    )
    return await _answer(request, service, requests, renderer, body)


async def chat_completions(request: Request) -> ASGIApp:
    """``POST /v1/chat/completions``."""
    service = service_of(request)
    tenant = service.tenant(request)
    body = decode_body(await service.body(request), ChatBody)
    model = service.ready_model()
    check_model_name(body.model, model)
    token_ids = await asyncio.to_thread(chat_prompt, body.messages, model, body.chat_template_kwargs)
    output = chat_request(body, token_ids, model, service.limits, tenant=tenant, random_seed=secrets.randbits(64))
    renderer = ChatRenderer(f"chatcmpl-{secrets.token_hex(16)}", int(time.time()), model, body)
    return await _answer(request, service, [output], renderer, body)


async def _encode(model: ServedModel, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    if len(prompt) < LONG_TEXT_CHARS:
        return model.tokenizer.encode(prompt, add_special_tokens=True)
    return await asyncio.to_thread(model.tokenizer.encode, prompt, add_special_tokens=True)


async def _answer(
    request: Request,
    service: Service,
    requests: Sequence[OutputRequest],
    renderer: Renderer,
    body: CompletionBody | ChatBody,
) -> ASGIApp:
    model = service.ready_model()
    num_outputs = sum(output.n for output in requests)
    generation = Generation(service.engine, model.tokenizer, requests)
    usage = _usage(requests)
    if body.stream:
        return EventStream(
            generation,
            renderer,
            num_outputs=num_outputs,
            usage=usage,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            admission=service.admitted(),
        )
    with service.admitted():
        outputs = await unless_gone(collect(generation, num_outputs), request.receive)
    return Response(msgspec.json.encode(renderer.whole(outputs, usage(outputs))), media_type="application/json")


def _usage(requests: Sequence[OutputRequest]) -> Callable[[Sequence[OutputTotals]], dict[str, Any]]:
    num_prompt_tokens = sum(len(output.request.token_ids) for output in requests)
    first_choices = [output.first_index for output in requests]
    return lambda outputs: usage_object(num_prompt_tokens, outputs, first_choices)
