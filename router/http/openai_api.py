"""The HTTP API of a router: OpenAI's completions and chat completions, the list of models, health and metrics.

This module owns the routes only. openai_schema.py reads requests, openai_responses.py shapes responses,
openai_stream.py sends them, and openai_errors.py shapes refusals. The pipeline, which gRPC shares, generates.
"""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response

from cluster.errors import TandemError
from cluster.observe.telemetry import CONTENT_TYPE, Telemetry
from cluster.settings.config import CLIENT_STALL_S
from router.http.bodies.openapi import answers, complete_document, generation_responses, refusals
from router.http.bodies.openapi_bodies import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Model,
    ModelList,
    Status,
)
from router.http.divided_chat import ChatSettings
from router.http.edge import Edge
from router.http.openai_errors import error_response, invalid_body, json_bytes, status_response
from router.http.openai_responses import CompletionShape, Envelope, Shape
from router.http.openai_schema import ChatCompletionRequest, CompletionRequest, SloHeaders
from router.http.openai_stream import EventStream, Generates, WholeResponse
from router.request.live_requests import LiveRequests
from router.request.validation import check_model
from router.text.model_files import ModelInfo
from router.text.tokenization import Tokenization

_SloHeaders = Annotated[SloHeaders, Header()]
_NO_PARSERS = ChatSettings()
_NO_PATH = "there is no such path; GET /docs lists the paths"


def build_app(
    *,
    pipeline: Generates,
    live_requests: LiveRequests,
    tokenization: Tokenization,
    telemetry: Telemetry,
    ready: Callable[[], bool],
    api_key: str,
    max_message_bytes: int,
    client_stall_s: float = CLIENT_STALL_S,
    chats: ChatSettings = _NO_PARSERS,
) -> FastAPI:
    """Build the app. `ready` returns whether a request would succeed now. An empty `api_key` requires none.
    `client_stall_s`: the router ends the response of a client that reads nothing of it for this long."""
    app = FastAPI(
        title="Tandem",
        description="LLM serving with prefill and decode on separate pools. OpenAI-compatible; docs/api.md.",
        separate_input_output_schemas=False,
    )
    app.add_middleware(
        Edge,
        api_key=api_key,
        max_message_bytes=max_message_bytes,
        client_stall_s=client_stall_s,
        telemetry=telemetry,
    )
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(TandemError, _tandem_error)
    _add_generation(app, pipeline, live_requests, tokenization, chats)
    _add_models(app, tokenization.model_info)
    _add_operations(app, telemetry, ready)
    events = (CompletionChunk, ChatCompletionChunk)
    complete_document(
        app,
        tokenization.model_info,
        events=events,
        asks_for_key=bool(api_key),
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
    async def completions(body: CompletionRequest, slo: _SloHeaders, request: Request) -> Response:
        shape = CompletionShape(
            tokenization,
            body.return_token_ids,
            body.return_tokens_as_token_ids,
            body.skip_special_tokens,
            body.echoes(),
        )
        return await answer(body, slo, request, shape, ("cmpl", "text_completion", "text_completion"))

    @app.post(
        "/v1/chat/completions",
        summary="Continues a conversation",
        responses=generation_responses(ChatCompletion, ChatCompletionChunk),
    )
    async def chat_completions(body: ChatCompletionRequest, slo: _SloHeaders, request: Request) -> Response:
        names = "chatcmpl", "chat.completion", "chat.completion.chunk"
        shape = chats.shape(body, tokenization, f"chatcmpl-{body.request_id or request.state.request_id}")
        return await answer(body, slo, request, shape, names)

    async def answer(
        body: CompletionRequest | ChatCompletionRequest,
        slo: SloHeaders,
        request: Request,
        shape: Shape,
        names: tuple[str, str, str],
    ) -> Response:
        prefix, kind, chunk_kind = names
        label: str = body.request_id or request.state.request_id
        requests = slo.apply(body.requests(label))
        options = body.stream_options
        envelope = Envelope(
            f"{prefix}-{label}",
            model,
            int(time.time()),
            kind,
            chunk_kind,
            options.include_usage,
            options.include_usage and options.continuous_usage_stats,
        )
        if body.stream:
            return EventStream(pipeline, requests, shape, envelope)
        return WholeResponse(pipeline, live_requests, requests, shape, envelope)


def _add_models(app: FastAPI, model: ModelInfo) -> None:
    started = int(time.time())
    entry = {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "tandem",
        "max_model_len": model.max_model_len,
    }

    @app.get("/v1/models", summary="The model that is served", responses=answers(ModelList))
    async def models() -> Response:
        return _json({"object": "list", "data": [entry]})

    @app.get("/v1/models/{name:path}", summary="One model by name", responses=answers(Model) | refusals(404))
    async def one_model(name: str) -> Response:
        check_model(name, model)
        return _json(entry)


def _add_operations(app: FastAPI, telemetry: Telemetry, ready: Callable[[], bool]) -> None:
    @app.get("/health", summary="This process answers", responses=answers(Status))
    async def health() -> Response:
        return _json({"status": "alive"})

    @app.get("/ready", summary="A request would succeed now; 503 while not", responses=answers(Status, 200, 503))
    async def readiness() -> Response:
        return _json({"status": "ready"}) if ready() else _json({"status": "not ready"}, status=503)

    @app.get("/metrics", summary="Figures for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(telemetry.render(), media_type=CONTENT_TYPE)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")


async def _invalid_body(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid_body(error.errors()))


async def _http_exception(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, TandemError):  # what refused the body while it was read
        return error_response(error.__cause__)
    message = _NO_PATH if error.status_code == HTTPStatus.NOT_FOUND else str(error.detail)
    return status_response(error.status_code, message, error.headers)


async def _tandem_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, TandemError)
    return error_response(error)
