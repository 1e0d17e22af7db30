"""Health, readiness, metrics, version and the list of models. Each is answered to HEAD too."""

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.responses import PlainTextResponse, Response

from cluster.observe.telemetry import CONTENT_TYPE, Telemetry
from router.http.bodies.openapi import answers, refusals
from router.http.bodies.openapi_bodies import Model, ModelList, Status, Version
from router.http.openai_errors import json_bytes
from router.request.validation import check_model
from router.text.model_files import ModelInfo


def add_models(app: FastAPI, model: ModelInfo) -> None:
    started = int(time.time())
    entry = {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "tandem",
        "max_model_len": model.max_model_len,
    }

    @app.get("/v1/models", summary="Returns the served model", responses=answers(ModelList))
    @app.head("/v1/models", summary="Returns the same without a body")
    async def models() -> Response:
        return json_response({"object": "list", "data": [entry]})

    @app.get("/v1/models/{name:path}", summary="Returns one model by name", responses=answers(Model) | refusals(404))
    async def one_model(name: str) -> Response:
        check_model(name, model)
        return json_response(entry)


def add_operations(app: FastAPI, telemetry: Telemetry, ready: Callable[[], bool]) -> None:
    installed = {"version": version("tandem-serving")}

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
