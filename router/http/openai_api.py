"""The HTTP API of a router: OpenAI's completions and chat completions, the list of models, health and metrics.

This module owns the routes only. openai_schema.py reads requests, openai_responses.py shapes responses,
openai_stream.py sends them, and openai_errors.py shapes refusals. The pipeline, which gRPC shares, generates.
"""

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Annotated

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.errors import TandemError
from cluster.observe.telemetry import Telemetry
from cluster.settings.config import CLIENT_STALL_S
from router.http.anthropic.api import add_messages
from router.http.anthropic.openapi_bodies import MessageEvent
from router.http.bodies.openapi import complete_document, generation_responses
from router.http.bodies.openapi_bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
)
from router.http.bodies.request_headers import RequestHeaders
from router.http.divided_chat import chat_shape
from router.http.edge import Edge
from router.http.endpoints.operations import add_models, add_operations
from router.http.endpoints.tokens import add_tokens
from router.http.openai_errors import error_response, invalid_body, status_response
from router.http.openai_responses import CompletionShape, Envelope, Shape
from router.http.openai_schema import ChatCompletionRequest, CompletionRequest
from router.http.openai_stream import EventStream, Generates, WholeResponse
from router.request.divided_answers import ChatSettings
from router.request.live_requests import LiveRequests
from router.requests import GenerateRequest
from router.text.tokenization import Tokenization

_Headers = Annotated[RequestHeaders, Header()]
_NO_PARSERS = ChatSettings()
_NO_PATH = "there is no such path; GET /openapi.json lists the paths"


def build_app(
    *,
    pipeline: Generates,
    live_requests: LiveRequests,
    tokenization: Tokenization,
    telemetry: Telemetry,
    ready: Callable[[], bool],
    gate: Gate,
    audit: Audit,
    max_message_bytes: int,
    client_stall_s: float = CLIENT_STALL_S,
    chats: ChatSettings = _NO_PARSERS,
    allowed_origins: Sequence[str] = (),
) -> FastAPI:
    """Build the app. `ready` returns whether a request would succeed now.
    `client_stall_s`: the router ends the response of a client that reads nothing of it for this long.
    `allowed_origins`: pages of these origins, or of all for "*", may use the API from browsers."""
    app = FastAPI(
        title="Tandem",
        description="LLM serving with prefill and decode on separate pools. OpenAI-compatible; docs/api.md.",
        separate_input_output_schemas=False,
        docs_url=None,  # these pages would load their scripts from another site
        redoc_url=None,
    )
    app.add_middleware(
        Edge,
        gate=gate,
        audit=audit,
        limits=live_requests.limits,
        max_message_bytes=max_message_bytes,
        client_stall_s=client_stall_s,
        telemetry=telemetry,
    )
    if allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allowed_origins),
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(TandemError, _tandem_error)
    _add_generation(app, pipeline, live_requests, tokenization, chats)
    add_messages(app, pipeline, live_requests, tokenization, chats)
    add_models(app, tokenization.model_info)
    add_operations(app, telemetry, ready)
    add_tokens(app, tokenization)
    events = (CompletionChunk, ChatCompletionChunk, MessageEvent)
    complete_document(
        app,
        tokenization.model_info,
        events=events,
        asks_for_key=gate.asks_for_keys,
        takes_templates=chats.trusts_templates,
        takes_tools=chats.answers.tools is not None,
    )
    return app


def _add_generation(
    app: FastAPI, pipeline: Generates, live_requests: LiveRequests, tokenization: Tokenization, chats: ChatSettings
) -> None:
    model = tokenization.model_info.name

    @app.post(
        "/v1/completions",
        summary="Continues one or more prompts",
        responses=generation_responses(Completion, CompletionChunk),
    )
    async def completions(body: CompletionRequest, headers: _Headers, request: Request) -> Response:
        shape = CompletionShape(
            tokenization,
            body.return_token_ids,
            body.return_tokens_as_token_ids,
            body.skip_special_tokens,
            body.echoes(),
        )
        names = "cmpl", "text_completion", "text_completion"
        requests = headers.apply(body.requests(_label(body, request)), request.state.caller)
        return await answer(body, requests, headers, shape, names)

    @app.post(
        "/v1/chat/completions",
        summary="Continues a conversation",
        responses=generation_responses(ChatCompletion, ChatCompletionChunk),
    )
    async def chat_completions(body: ChatCompletionRequest, headers: _Headers, request: Request) -> Response:
        names = "chatcmpl", "chat.completion", "chat.completion.chunk"
        label, use = _label(body, request), body.tool_use
        shape = chat_shape(chats, body, use, tokenization, f"chatcmpl-{label}")
        asked = [chats.constrained(each, use, tokenization) for each in body.requests(label)]
        requests = headers.apply(asked, request.state.caller)
        return await answer(body, requests, headers, shape, names)

    async def answer(
        body: CompletionRequest | ChatCompletionRequest,
        requests: list[GenerateRequest],
        headers: RequestHeaders,
        shape: Shape,
        names: tuple[str, str, str],
    ) -> Response:
        prefix, kind, chunk_kind = names
        options = body.stream_options
        envelope = Envelope(
            f"{prefix}-{requests[0].label}",
            model,
            int(time.time()),
            kind,
            chunk_kind,
            options.include_usage,
            options.include_usage and options.continuous_usage_stats,
            headers.wants_ledger,
        )
        if body.stream:
            return EventStream(pipeline, requests, shape, envelope)
        return WholeResponse(pipeline, live_requests, requests, shape, envelope)


def _label(body: CompletionRequest | ChatCompletionRequest, request: Request) -> str:
    label: str = body.request_id or request.state.request_id
    return label


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid_body(error.errors()), request.url.path)


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, TandemError):  # what refused the body while it was read
        return error_response(error.__cause__, request.url.path)
    message, headers = _NO_PATH if error.status_code == HTTPStatus.NOT_FOUND else str(error.detail), error.headers
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = {"allow": ", ".join(sorted(_methods(request)))}
    return status_response(error.status_code, message, headers, path=request.url.path)


def _methods(request: Request) -> set[str]:
    """Return the methods of all routes with this path: the framework names those of the first."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return {method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()}


async def _tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(error, request.url.path)
