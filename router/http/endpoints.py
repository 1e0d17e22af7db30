"""The endpoints that generate nothing: health, readiness, metrics, version, the list of models, and texts as tokens."""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI
from pydantic import FailFast, Field, WithJsonSchema
from starlette.responses import PlainTextResponse, Response

from cluster.errors import InvalidRequest
from cluster.observe.telemetry import CONTENT_TYPE, Telemetry
from cluster.process import installed_version
from router.http.bodies.messages import MAX_MESSAGES, MAX_TOOLS, Message, TemplateArguments, Tool
from router.http.bodies.openapi import ANY_TOKEN_IDS, answers, refusals
from router.http.bodies.openapi_bodies import Model, ModelList, Status, Text, Tokens, Version
from router.http.bodies.strict_body import NeutralValues, StrictBody
from router.http.errors import json_bytes
from router.request.validation import check_model
from router.requests import ChatOptions
from router.text.model_files import ModelInfo
from router.text.tokenization import Tokenization, TokenizerThreads


def add_models(app: FastAPI, model: ModelInfo) -> None:
    """Answer with the fields of OpenAI's and of Anthropic's lists of models at once. `created` is the time when this
    router started."""
    started = datetime.now(UTC).replace(microsecond=0)
    entry = {
        "id": model.name,
        "object": "model",
        "created": int(started.timestamp()),
        "owned_by": "tandem",
        "max_model_len": model.max_model_len,
        "type": "model",
        "display_name": model.name,
        "created_at": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    page = {"object": "list", "data": [entry], "has_more": False, "first_id": model.name, "last_id": model.name}

    @app.get("/v1/models", summary="Returns the served model", responses=answers(ModelList))
    @app.get("/v1/models/", include_in_schema=False)
    @app.head("/v1/models", summary="Returns the same without a body")
    async def models() -> Response:
        return json_response(page)

    @app.get("/v1/models/{name:path}", summary="Returns one model by name", responses=answers(Model) | refusals(404))
    async def one_model(name: str) -> Response:
        check_model(name, model)
        return json_response(entry)


def add_operations(app: FastAPI, telemetry: Telemetry, ready: Callable[[], bool]) -> None:
    installed = {"version": installed_version()}

    @app.get("/health", summary="Returns 200 while this process answers", responses=answers(Status))
    @app.head("/health", summary="Returns the same without a body")
    @app.get("/ping", summary="Returns the same as /health", responses=answers(Status))
    @app.post("/ping", summary="Returns the same as /health", responses=answers(Status))
    @app.head("/ping", summary="Returns the same without a body")
    async def health() -> Response:
        return json_response({"status": "alive"})

    @app.get(
        "/ready",
        summary="Returns 200 if a request would succeed now, and 503 otherwise",
        responses=answers(Status, 200, 503),
    )
    @app.head("/ready", summary="Returns the same without a body", responses=answers(Status, 503))
    async def readiness() -> Response:
        return json_response({"status": "ready"}) if ready() else json_response({"status": "not ready"}, status=503)

    @app.get("/version", summary="Returns the version of Tandem", responses=answers(Version))
    @app.head("/version", summary="Returns the same without a body")
    async def tandem_version() -> Response:
        return json_response(installed)

    @app.get("/metrics", summary="Returns metrics for Prometheus", response_class=PlainTextResponse)
    @app.head("/metrics", summary="Returns the same without a body", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(telemetry.render(), media_type=CONTENT_TYPE)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(json_bytes(value), status, media_type="application/json")


class TokenizeRequest(StrictBody):
    """Exactly one of `prompt` and `messages`."""

    asks_for_nothing: ClassVar[NeutralValues] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }
    rules: ClassVar[Mapping[str, Any]] = {
        "oneOf": [
            {
                "required": ["prompt"],
                "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}},
            },
            {
                "required": ["messages"],
                "properties": {"messages": {"type": "array", "minItems": 1}, "prompt": {"type": "null"}},
            },
        ]
    }

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], FailFast()] = Field([], max_length=MAX_MESSAGES)
    add_special_tokens: bool = Field(
        default=True, description="true: the tokenizer's special tokens are added around a prompt"
    )
    return_token_strs: bool = False
    tools: Annotated[list[Tool], FailFast()] = Field([], max_length=MAX_TOOLS)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateArguments = Field({}, description="further values for the chat template")

    def options(self) -> ChatOptions:
        return ChatOptions(
            tools=tuple(tool.value() for tool in self.tools),
            arguments=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class DetokenizeRequest(StrictBody):
    model: str = ""
    tokens: Annotated[
        list[int],
        FailFast(),
        WithJsonSchema({"title": ANY_TOKEN_IDS, "type": "array", "items": {"type": "integer", "minimum": 0}}),
    ]


def add_tokens(app: FastAPI, tokenization: Tokenization) -> None:
    threads, model = TokenizerThreads(), tokenization.model_info

    @app.post(
        "/tokenize",
        summary="Returns the tokens of a text or a conversation",
        responses=answers(Tokens) | refusals(400, 404, 413, 429, 500),
    )
    async def tokenize(body: TokenizeRequest) -> Response:
        check_model(body.model, model)
        if (body.prompt is None) == (not body.messages):
            raise InvalidRequest("give exactly one of prompt and messages")
        if body.messages:
            now_us = int(time.time() * 1e6)
            options = body.options()
            encode = partial(tokenization.encode_chat, rendered_at_us=now_us, options=options, is_whole=True)
            token_ids = await threads.run(encode, [message.value() for message in body.messages])
        else:
            encode_text = partial(tokenization.encode, add_special_tokens=body.add_special_tokens)
            token_ids = await threads.run(encode_text, body.prompt or "")
        names = [tokenization.token_name(token_id) for token_id in token_ids] if body.return_token_strs else None
        count = {"count": len(token_ids), "max_model_len": model.max_model_len}
        return json_response(count | {"tokens": list(token_ids), "token_strs": names})

    @app.post(
        "/detokenize", summary="Returns the text of tokens", responses=answers(Text) | refusals(400, 404, 413, 429, 500)
    )
    async def detokenize(body: DetokenizeRequest) -> Response:
        check_model(body.model, model)
        return json_response({"prompt": await threads.run(tokenization.decode, tuple(body.tokens))})
