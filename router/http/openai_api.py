"""The HTTP API of a router: OpenAI's completions and chat completions, the list of models, health and metrics.

This module owns the routes only. openai_schema.py reads requests, openai_responses.py shapes responses,
openai_stream.py sends them, and errors.py shapes refusals. The pipeline, which gRPC shares, generates.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.errors import TandemError
from cluster.observe.telemetry import Telemetry
from cluster.observe.trace_context import TRACE_PARENT_KEY
from cluster.settings.config import CLIENT_STALL_S
from router.http.anthropic.api import add_messages
from router.http.anthropic.bodies import MessageEvent
from router.http.bodies.openapi import complete_document, generation_responses
from router.http.bodies.openapi_bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    ErrorBody,
)
from router.http.bodies.request_headers import RequestHeaders
from router.http.divided_chat import chat_shape
from router.http.edge import ClientGone, Edge
from router.http.endpoints import add_models, add_operations, add_tokens
from router.http.errors import error_response, invalid_body, status_response
from router.http.openai_responses import CompletionShape, Envelope, PromptFields, Shape
from router.http.openai_schema import ChatCompletionRequest, CompletionRequest
from router.http.openai_stream import EventStream, Generates, PromptsOnly, WholeResponse
from router.request.divided_answers import ChatSettings
from router.request.live_requests import LiveRequests
from router.requests import GenerateRequest
from router.text.tokenization import Tokenization

_Headers = Annotated[RequestHeaders, Header()]
_NO_WISHES = RequestHeaders.model_validate({})
_WISHES = frozenset(name.replace("_", "-").encode() for name in RequestHeaders.model_fields if name != TRACE_PARENT_KEY)
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
    endpoints: dict[str, _Endpoint] = {}
    app.add_middleware(ShortPath, endpoints=endpoints)
    app.add_middleware(
        Edge,
        gate=gate,
        audit=audit,
        limits=live_requests.limits,
        begin_trace=live_requests.begin_trace,
        max_message_bytes=max_message_bytes,
        client_stall_s=client_stall_s,
        telemetry=telemetry,
    )
    if allowed_origins:
        _serve_pages_of(app, allowed_origins)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(TandemError, _tandem_error)
    endpoints |= _add_generation(app, pipeline, live_requests, tokenization, chats)
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


def _serve_pages_of(app: FastAPI, allowed_origins: Sequence[str]) -> None:
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(allowed_origins),
        allow_methods=["GET", "HEAD", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id", "retry-after", TRACE_PARENT_KEY],
    )


def _add_generation(
    app: FastAPI, pipeline: Generates, live_requests: LiveRequests, tokenization: Tokenization, chats: ChatSettings
) -> "dict[str, _Endpoint]":
    """Return the endpoints by their paths."""
    answers = _Answers(pipeline, live_requests, tokenization.model_info.name)

    @app.post(
        "/v1/completions",
        summary="Continues one or more prompts",
        responses=generation_responses(Completion, CompletionChunk, ErrorBody, last="[DONE]"),
    )
    async def completions(body: CompletionRequest, headers: _Headers, request: Request) -> Response:
        prompts = body.prompt_fields(tokenization, is_chat=False)
        shape = CompletionShape(
            tokenization,
            body.return_token_ids,
            body.return_tokens_as_token_ids,
            body.skip_special_tokens,
            body.echoes(),
            body.logprobs,
            prompts,
        )
        names = "cmpl", "text_completion", "text_completion"
        requests = headers.apply(body.requests(_label(body, request)), request)
        return answers.answer(body, requests, headers, shape, names, prompts)

    @app.post(
        "/v1/chat/completions",
        summary="Continues a conversation",
        responses=generation_responses(ChatCompletion, ChatCompletionChunk, ErrorBody, last="[DONE]"),
    )
    async def chat_completions(body: ChatCompletionRequest, headers: _Headers, request: Request) -> Response:
        names = "chatcmpl", "chat.completion", "chat.completion.chunk"
        label, use = _label(body, request), body.tool_use
        shape = chat_shape(chats, body, use, tokenization, f"chatcmpl-{label}")
        asked = [chats.constrained(each, use, tokenization) for each in body.requests(label)]
        requests = headers.apply(asked, request)
        return answers.answer(body, requests, headers, shape, names, body.prompt_fields(tokenization, is_chat=True))

    routes = {route.path: route for route in app.routes if isinstance(route, Route)}
    hot = (
        _Endpoint(routes["/v1/completions"], CompletionRequest, completions),
        _Endpoint(routes["/v1/chat/completions"], ChatCompletionRequest, chat_completions),
    )
    return {endpoint.route.path: endpoint for endpoint in hot}


@dataclass(frozen=True, slots=True)
class _Answers:
    """Makes the response of a generation: whole, or as a stream of events."""

    pipeline: Generates
    live_requests: LiveRequests
    model: str

    def answer(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        requests: list[GenerateRequest],
        headers: RequestHeaders,
        shape: Shape,
        names: tuple[str, str, str],
        prompts: PromptFields | None,
    ) -> Response:
        prefix, kind, chunk_kind = names
        options = body.stream_options
        envelope = Envelope(
            f"{prefix}-{requests[0].label}",
            self.model,
            int(time.time()),
            kind,
            chunk_kind,
            options.include_usage,
            options.include_usage and options.continuous_usage_stats,
            headers.wants_ledger,
        )
        pipeline = PromptsOnly(self.pipeline) if body.max_tokens == 0 else self.pipeline
        if body.stream:
            return EventStream(pipeline, self.live_requests, requests, shape, envelope, prompts)
        return WholeResponse(pipeline, self.live_requests, requests, shape, envelope, prompts)


@dataclass(frozen=True, slots=True)
class _Endpoint:
    route: Route
    body: type[CompletionRequest] | type[ChatCompletionRequest]
    answer: Callable[[Any, RequestHeaders, Request], Awaitable[Response]]


class ShortPath:
    """ASGI middleware that answers requests of the hot endpoints without the framework's routing and dependencies. It
    passes on every request that is not plain JSON with a valid body, because the framework makes the refusals.
    """

    def __init__(self, app: ASGIApp, *, endpoints: Mapping[str, _Endpoint]) -> None:
        self._app, self._endpoints = app, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None or scope["method"] != "POST" or not _is_plain(scope["headers"]):
            await self._app(scope, receive, send)
            return
        body = await _whole_body(receive)
        try:
            parsed = endpoint.body.model_validate(read_json(body))
        except Exception:  # noqa: BLE001  # the framework meets it again, and answers
            await self._app(scope, _replayed(body, receive), send)
            return
        scope["route"] = endpoint.route
        response = await endpoint.answer(parsed, _NO_WISHES, Request(scope, receive))
        await response(scope, receive, send)


def read_json(body: bytes) -> object:
    """Read a body as the framework does, in 0.6 of its time. Raises ValueError, also for a few bodies that the
    framework reads, such as those with half of a surrogate pair."""
    return from_json(body, cache_strings="keys")


def _is_plain(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return whether the body is JSON and no header has an option."""
    is_json = False
    for name, value in headers:
        if name in _WISHES:
            return False
        if name == b"content-type":
            if value != b"application/json":
                return False
            is_json = True
    return is_json


async def _whole_body(receive: Receive) -> bytes:
    """Return the whole body. Raises ClientGone, and the errors of the body's bounds."""
    parts, has_more = list[bytes](), True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        has_more = message.get("more_body", False)
    return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


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
        allowed = ", ".join(sorted(_methods(request)))
        message, headers = f"{request.method} is not possible here; use {allowed}", {"allow": allowed}
    return status_response(error.status_code, message, headers, path=request.url.path)


def _methods(request: Request) -> set[str]:
    """Return the methods of all routes with this path: the framework would name only those of the first."""
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return {method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()}


async def _tandem_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(error, request.url.path)
