"""The HTTP API of a router: bodies of every endpoint through the whole application, and raw bytes through its server.

Only the workers' tokens are scripted: no input may be answered with 500, in a status or in an event of a stream.
"""

import asyncio
import json
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from starlette.types import ASGIApp, Message

from cluster.accounts.audit import Audit
from cluster.accounts.keys import Gate
from cluster.clock import MonotonicClock
from cluster.messages import FinishReason, SampledToken
from cluster.observe.telemetry import Telemetry
from router.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from router.http.connection import HttpLimits
from router.http.endpoints import DetokenizeRequest, TokenizeRequest
from router.http.openai_api import build_app
from router.http.openai_schema import ChatCompletionRequest, CompletionRequest
from router.http.server import HttpServer
from router.request.divided_answers import ChatSettings
from router.request.live_requests import LiveRequests
from router.request.validation import ResolvedRequest
from router.text.tokenization import Tokenization
from router.tools.formats import AnswerFormat
from tests.fuzz.mutations import mutated_json
from tests.fuzz.target import Refused, Target
from tests.unit.router.http.scripted_pipeline import ScriptedPipeline

_MODEL = Path(__file__).parents[2] / "examples" / "demo_model"
_MAX_BYTES = 100_000
_MOST_TOKENS = 60
_CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
_FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "array"}}}}
_CHAT = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning": "why"},
    {"role": "tool", "tool_call_id": "1", "content": "warm", "name": "f"},
    {"role": "user", "content": "and now?"},
]
_SAMPLING = {
    "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "max_tokens": 3, "min_tokens": 1,
    "stop": ["x", "yz"], "stop_token_ids": [3], "logit_bias": {"5": 1.5}, "presence_penalty": 0.1,
    "frequency_penalty": 0.2, "repetition_penalty": 1.1, "bad_words": ["no"], "cache_salt": "s", "priority": 1,
    "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, "request_id": "r",
}  # fmt: skip
_COMPLETIONS: list[Any] = [
    {"prompt": ["ab", "cd"], "logprobs": 2, "echo": True, "prompt_logprobs": 1, **_SAMPLING},
    {"prompt": [[5, 6], [7]], "max_tokens": 2, "allowed_token_ids": [5, 6], "return_token_ids": True},
    {"prompt": "x", "guided_json": {"type": "object"}, "max_tokens": 2, "truncate_prompt_tokens": 4},
]
_CHATS: list[Any] = [
    {"messages": _CHAT, "logprobs": True, "top_logprobs": 2, "tools": [{"type": "function", "function": _FUNCTION}],
     "tool_choice": "auto", "parallel_tool_calls": False, **_SAMPLING},
    {"messages": _CHAT[1:2], "max_completion_tokens": 2, "response_format": {"type": "json_schema", "json_schema":
     {"name": "s", "schema": {"type": "object"}}}, "chat_template_kwargs": {"a": 1}, "documents": [{"text": "d"}]},
]  # fmt: skip
_MESSAGES: list[Any] = [
    {"model": "demo_model", "max_tokens": 2, "stream": True, "system": [{"type": "text", "text": "s"}],
     "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"type": "tool_use", "id": "1",
     "name": "f", "input": {"a": 1}}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1",
     "content": "b"}]}], "tools": [{"name": "f", "input_schema": {"type": "object"}}], "stop_sequences": ["x"],
     "tool_choice": {"type": "auto"}, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "metadata": {"user_id": "u"}},
]  # fmt: skip
_COUNTED = [{name: _MESSAGES[0][name] for name in ("model", "system", "messages", "tools")}]
_TOKENIZED: list[Any] = [
    {"prompt": "hello", "add_special_tokens": False, "return_token_strs": True},
    {"messages": _CHAT, "tools": [{"type": "function", "function": _FUNCTION}], "continue_final_message": True,
     "add_generation_prompt": False},
]  # fmt: skip
_REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
_RAW = (
    b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    _REQUEST + b"content-type: application/json\r\ncontent-length: 31\r\n\r\n" + b'{"prompt": "x", "max_tokens":2}',
    _REQUEST + b'transfer-encoding: chunked\r\n\r\n10\r\n{"prompt": "x"  \r\n1\r\n}\r\n0\r\na: b\r\n\r\n',
    _REQUEST + b"upgrade: h2c\r\nconnection: upgrade\r\ncontent-length: 2\r\n\r\n{}GET / HTTP/1.0\r\n\r\n",
    b"HEAD /v1/models/x%00%ff?a=b HTTP/1.1\r\nauthorization: Bearer \xff\r\nx-request-id: \xe9\r\nexpect: 100-continue"
    b"\r\nx-request-timeout: 1e999\r\n\r\n",
)
_WORDS = (b"\r\n", b"\r\n\r\n", b"\0", b": ", b"content-length: 99999999999999999999999\r\n", b"HTTP/1.1",
          b"a" * 20_000, b"a: b\r\n" * 3000, b"transfer-encoding: chunked\r\n", b"CONNECT ", b"%c3%28",
          b"\xff\xfe", b"[[[[", b"{}")  # fmt: skip


class ShortAnswers(ScriptedPipeline):
    """A pipeline that ends every answer early, also one with thousands of requested tokens."""

    def _sampled(self, token_id: int, index: int, resolved: ResolvedRequest) -> SampledToken:
        sampled = super()._sampled(token_id, index, resolved)
        return replace(sampled, finish_reason=FinishReason.LENGTH) if index >= _MOST_TOKENS else sampled


def targets() -> Iterator[Target]:
    bodies: list[tuple[str, list[Any], type[BaseModel]]] = [
        ("/v1/completions", _COMPLETIONS, CompletionRequest),
        ("/v1/chat/completions", _CHATS, ChatCompletionRequest),
        ("/v1/messages", _MESSAGES, MessagesRequest),
        ("/v1/messages/count_tokens", _COUNTED, CountTokensRequest),
        ("/tokenize", _TOKENIZED, TokenizeRequest),
        ("/detokenize", [{"model": "", "tokens": [1, 2, 3]}], DetokenizeRequest),
    ]
    for path, values, body in bodies:
        yield _body_target(path, values, sorted(_names(body)))
    yield Target("http requests", _RAW, _send_raw, words=_WORDS)


def _body_target(path: str, values: list[Any], names: Sequence[str]) -> Target:
    def made(draw: random.Random) -> bytes:
        value = mutated_json(draw, values, names)
        return json.dumps(value, ensure_ascii=draw.random() < 0.9).encode("utf-8", "surrogatepass")

    seeds = [json.dumps(value).encode() for value in values]
    return Target(f"http {path}", seeds, lambda data: _answer_of(path, data), made, (b'"', b"{", b"[", b"\\ud800"))


def _names(body: type[BaseModel]) -> set[str]:
    """Return the names of all fields of a body, including those of its parts."""
    text = json.dumps(body.model_json_schema())
    return set(json.loads(text).get("properties", {})) | {
        name for part in json.loads(text).get("$defs", {}).values() for name in part.get("properties", {})
    }


def _answer_of(path: str, body: bytes) -> str:
    """Return the outcome of one request, through the whole application in this process."""
    status, answer = _runner().run(_call(_app(), path, body))
    if status >= 500 or b'"internal' in answer:
        raise AssertionError(f"{status} {answer[-500:]!r}")
    if status >= 400:
        error = json.loads(answer)["error"]
        raise Refused(f"{error.get('code')} {error['message']}")
    return str(status)


async def _call(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    status, received, sent = 0, [], False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # the client stays
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        received.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "path": path,
             "raw_path": path.encode(), "query_string": b"", "headers": headers, "scheme": "http", "root_path": "",
             "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}  # fmt: skip
    async with asyncio.timeout(30):
        await app(scope, receive, send)
    return status, b"".join(received)


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


@cache
def tokenization() -> Tokenization:
    return Tokenization.load(str(_MODEL))


def live_requests(telemetry: Telemetry) -> LiveRequests:
    return LiveRequests(max_live_requests=64, max_buffered_tokens=100_000, clock=MonotonicClock(), telemetry=telemetry)


@cache
def _app() -> ASGIApp:
    telemetry = Telemetry()
    return build_app(
        pipeline=ShortAnswers(tokenization(), script='<think>a</think><tool_call>{"name": "f"}</tool_call>'),
        live_requests=live_requests(telemetry),
        tokenization=tokenization(),
        telemetry=telemetry,
        ready=lambda: True,
        gate=Gate(),
        audit=Audit(),
        max_message_bytes=_MAX_BYTES,
        chats=ChatSettings(AnswerFormat.named("hermes", "qwen3")),
    )


def _send_raw(data: bytes) -> str:
    """Send the bytes over a socket to the router's own server, and read until it has closed the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", _port()), 20) as client:
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
    if b"HTTP/1.1 5" in received or b'"internal' in received:
        raise AssertionError(f"{received[-800:]!r}")
    return received[:12].decode(errors="replace")


@cache
def _port() -> int:
    """Return the port of a server of the application, which runs on a thread until the process ends."""
    server = HttpServer(host="127.0.0.1", port=0, limits=HttpLimits(head_s=5, request_s=5))
    server._socket.listen(64)
    serving = server.serve(_app(), max_connections=100, telemetry=Telemetry(), stop=asyncio.Event(), grace_s=1.0)
    threading.Thread(target=asyncio.run, args=(serving,), daemon=True).start()
    return server.port
