"""The OpenAI endpoint over a real server, called by the real `openai` package; only the workers' tokens are
scripted.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import jsonschema
import openai

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.clock import MonotonicClock
from cluster.observe.telemetry import Telemetry
from router.http.openai_api import build_app
from router.request.divided_answers import ChatSettings
from router.request.live_requests import LiveRequests
from router.text.tokenization import Tokenization
from tests.unit.router.http.scripted_pipeline import ScriptedPipeline, served

SCRIPT = "The quick brown fox."
USER: Any = [{"role": "user", "content": "hello"}]


class Endpoint:
    """A served app, its scripted pipeline, and clients for it."""

    def __init__(self, url: str, pipeline: ScriptedPipeline, telemetry: Telemetry) -> None:
        self.url = url
        self.pipeline = pipeline
        self.telemetry = telemetry
        # One without certificates to load: that would take longer than most tests.
        self.http = httpx.Client(transport=httpx.HTTPTransport(verify=False), base_url=url, timeout=20)
        self.client = self.client_with("sk-test")

    def client_with(self, api_key: str) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, http_client=http)

    def post(self, path: str, content: object, **headers: str) -> httpx.Response:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        return self.http.post(path, content=body, headers={"content-type": "application/json"} | headers)


@contextmanager
def endpoint(
    tokenization: Tokenization,
    *,
    ready: bool = True,
    api_key: str = "",
    max_buffered_tokens: int = 100_000,
    chats: ChatSettings | None = None,
    allowed_origins: Sequence[str] = (),
    **behaviour: Any,
) -> Iterator[Endpoint]:
    pipeline, telemetry = ScriptedPipeline(tokenization, **behaviour), Telemetry()
    live_requests = LiveRequests(
        max_live_requests=64, max_buffered_tokens=max_buffered_tokens, clock=MonotonicClock(), telemetry=telemetry
    )
    app = build_app(
        pipeline=pipeline,
        live_requests=live_requests,
        tokenization=tokenization,
        telemetry=telemetry,
        ready=lambda: ready,
        gate=Gate(api_key=api_key),
        audit=Audit(),
        max_message_bytes=100_000,
        chats=chats or ChatSettings(),
        allowed_origins=allowed_origins,
    )
    with served(app) as url:
        running = Endpoint(url, pipeline, telemetry)
        with running.http, running.client:
            yield running
    assert live_requests.num_buffered_tokens == 0
    live_requests.check()


def refused(answer: httpx.Response, status: int, code: str, param: str | None, *words: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param), error
    assert all(word in error["message"] for word in words), error
    assert "Traceback" not in answer.text


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the objects of a stream's events."""
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]


def check_stream(path: str, text: str, document: dict[str, Any]) -> None:
    """Assert that each event of a stream is what the OpenAPI document declares for the path. `data` is compared with
    its `contentSchema` too, which validators of JSON schemas ignore."""
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    event, components = content["itemSchema"], {"components": document["components"]}
    events = [line.partition("data: ")[2] for line in text.split("\n\n") if not line.startswith(":")][:-1]
    assert len(events) > 2, text
    *texts, inner = event["properties"]["data"]["anyOf"]
    for data in events:
        jsonschema.Draft202012Validator(event).validate({"data": data})
        if {"const": data} not in texts:
            jsonschema.Draft202012Validator(inner["contentSchema"] | components).validate(json.loads(data))
