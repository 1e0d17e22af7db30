"""The routes of Anthropic's Messages API, and its responses, whole or as events."""

import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Header, Request
from starlette.responses import Response

from cluster.errors import TandemError
from cluster.messages import FinishReason
from router.http.anthropic.bodies import (
    AnthropicError,
    CountTokensRequest,
    Message,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)
from router.http.bodies.openapi import answers, generation_responses, refusals
from router.http.bodies.request_headers import RequestHeaders
from router.http.endpoints import json_response
from router.http.errors import anthropic_refusal, internal_error, json_bytes
from router.http.openai_responses import Envelope, Json
from router.http.openai_stream import DeltaEvents, EventStream, Generates, LastEvents, WholeResponse
from router.request.divided_answers import ChatSettings, Division
from router.request.live_requests import LiveRequests
from router.request.validation import check_model
from router.requests import Accepted, ChoiceDelta, Ledger, Output, Usage
from router.text.tokenization import Tokenization, TokenizerThreads
from router.tools.source import Arguments, CallBegun, Content, Piece, Reasoning

_Headers = Annotated[RequestHeaders, Header()]


def add_messages(
    app: FastAPI, pipeline: Generates, live_requests: LiveRequests, tokenization: Tokenization, chats: ChatSettings
) -> None:
    model, threads = tokenization.model_info, TokenizerThreads()

    @app.post(
        "/v1/messages",
        summary="Continues a conversation (Anthropic's Messages API)",
        responses=generation_responses(Message, MessageEvent, error=AnthropicError),
    )
    async def messages(body: MessagesRequest, headers: _Headers, request: Request) -> Response:
        label: str = request.state.request_id
        answer_id = f"msg_{label}"
        use = body.tool_use
        division = chats.division(body.chat, use, tokenization, answer_id, has_reasoning=body.shows_thinking)
        asked = chats.constrained(body.request(label), use, tokenization)
        requests = headers.apply([asked], request)
        shape = MessageShape(division)
        envelope = MessageEnvelope(answer_id, model.name, int(time.time()), "message", "message", False)
        if body.stream:
            return MessageStream(pipeline, live_requests, requests, shape, envelope)
        return WholeResponse(pipeline, live_requests, requests, shape, envelope)

    @app.post(
        "/v1/messages/count_tokens",
        summary="Counts a conversation's tokens (Anthropic's Messages API)",
        responses=answers(TokenCount) | refusals(400, 404, 413, 429, 500, body=AnthropicError),
    )
    async def count_tokens(body: CountTokensRequest) -> Response:
        check_model(body.model, model)
        chat = body.chat
        encode = partial(
            tokenization.encode_chat, rendered_at_us=int(time.time() * 1e6), options=chat.options, is_whole=True
        )
        return json_response({"input_tokens": len(await threads.run(encode, chat.messages))})


_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(slots=True)
class MessageShape:
    """The content of a message. It has one choice."""

    division: Division

    def chunks(self, delta: ChoiceDelta) -> Iterator[Json]:
        raise NotImplementedError("messages have events of their own")

    def plain(self, choice: int, text: str) -> Json | None:
        return None

    def whole(self, deltas: Sequence[ChoiceDelta]) -> Json:
        parser = self.division.new_parser()
        pieces = self.division.wanted([*parser.push("".join(delta.text for delta in deltas)), *parser.end()])
        blocks: list[Json] = []
        for piece in pieces:
            begun = begin_block(piece, self.division, blocks[-1] if blocks else None)
            if begun is not None:
                blocks.append(begun)
            _grow(blocks[-1], piece)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = arguments_object(block.pop("text", ""))
        return {"content": blocks} | stop(deltas, any(isinstance(piece, CallBegun) for piece in pieces))


@dataclass(frozen=True, slots=True)
class MessageEnvelope(Envelope):
    """The fields of a message around its content."""

    def answer(self, choices: list[Json], usage: Usage, ledgers: Sequence[Ledger]) -> Json:
        return self.message() | choices[0] | {"usage": message_usage(usage)}

    def message(self) -> Json:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}


class MessageStream(EventStream):
    """A message as Anthropic's events. Blocks follow each other, each begun and ended by events of its own."""

    def failure(self, error: Exception) -> bytes:
        reported = error if isinstance(error, TandemError) else internal_error(error, self._requests[0].label)
        return _event(anthropic_refusal(reported))

    def _new_events(self) -> DeltaEvents:
        assert isinstance(self._shape, MessageShape)
        assert isinstance(self._envelope, MessageEnvelope)
        return _Writer(self._shape.division, self._envelope)

    async def _events(self, outputs: AsyncIterator[Output], events_of: DeltaEvents) -> AsyncIterator[bytes]:
        assert isinstance(events_of, _Writer)
        usage = Usage(0, 0)
        async for output in outputs:
            if output.accepted is not None:
                events_of.begin(output.accepted)
            events = events_of.of(output.deltas)
            if output.summary is not None:
                usage = output.summary.usage
            if events:
                yield events
            elif not output.deltas and output.summary is None and output.accepted is None:
                yield _PING
        yield LastEvents(events_of.end(usage))


class _Writer:
    """Writes the events of one message."""

    def __init__(self, division: Division, envelope: MessageEnvelope) -> None:
        self._division, self._envelope = division, envelope
        self._parser = division.new_parser()
        self._block: Json | None = None
        self._num_blocks = 0
        self._has_begun = self._has_calls = False
        self._end: list[ChoiceDelta] = []
        self._num_prompt_tokens = 0

    def begin(self, accepted: Accepted) -> None:
        self._num_prompt_tokens = accepted.num_prompt_tokens

    def of(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def _delta(self, delta: ChoiceDelta) -> bytes:
        pieces = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._parser.end()
            self._end.append(delta)
        return self._begin() + b"".join(self._piece(piece) for piece in self._division.wanted(pieces))

    def end(self, usage: Usage) -> bytes:
        ended = {"delta": stop(self._end, self._has_calls), "usage": message_usage(usage)}
        return self._end_block() + _event({"type": "message_delta"} | ended) + _event({"type": "message_stop"})

    def _begin(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        open_ended: Json = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self._num_prompt_tokens, "output_tokens": 0}
        message = self._envelope.message() | open_ended | {"usage": usage}
        return _event({"type": "message_start", "message": message})

    def _piece(self, piece: Piece) -> bytes:
        begun, events = begin_block(piece, self._division, self._block), b""
        if begun is not None:
            events = self._end_block()
            self._block = begun
            start = {"index": self._num_blocks, "content_block": begun}
            events += _event({"type": "content_block_start"} | start)
        self._has_calls = self._has_calls or isinstance(piece, CallBegun)
        match piece:
            case Content(text):
                delta = {"type": "text_delta", "text": text}
            case Reasoning(text):
                delta = {"type": "thinking_delta", "thinking": text}
            case Arguments(_, text):
                delta = {"type": "input_json_delta", "partial_json": text}
            case CallBegun():
                return events
        return events + _event({"type": "content_block_delta", "index": self._num_blocks, "delta": delta})

    def _end_block(self) -> bytes:
        if self._block is None:
            return b""
        self._block = None
        self._num_blocks += 1
        return _event({"type": "content_block_stop", "index": self._num_blocks - 1})


def begin_block(piece: Piece, division: Division, last: Json | None) -> Json | None:
    """Return the block that begins with a piece; None if the piece continues the last block."""
    match piece:
        case Content():
            return None if last is not None and last["type"] == "text" else {"type": "text", "text": ""}
        case Reasoning():
            is_last = last is not None and last["type"] == "thinking"
            return None if is_last else {"type": "thinking", "thinking": "", "signature": ""}
        case CallBegun(index, name):
            return {"type": "tool_use", "id": division.call_id(0, index), "name": name, "input": {}}
        case Arguments():
            return None


def _grow(block: Json, piece: Piece) -> None:
    name = "thinking" if isinstance(piece, Reasoning) else "text"
    if not isinstance(piece, CallBegun):
        block[name] = block.get(name, "") + piece.text


def stop(deltas: Sequence[ChoiceDelta], has_calls: bool) -> Json:
    """Return why a message ended."""
    last = next((delta for delta in deltas if delta.finish_reason is not None), None)
    if last is not None and last.finish_reason is FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if has_calls:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if last is not None and isinstance(last.stop_cause, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_cause}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def arguments_object(text: str) -> Json:
    """Return a call's arguments; a text that is no JSON object is kept under its own name."""
    try:
        value = json.loads(text or "{}")
        json.dumps(value)  # a text that is nested too deeply for an answer is no object either
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"invalid_json": text}


def message_usage(usage: Usage) -> Json:
    """Return the usage, in which cached tokens are counted apart from computed ones, as Anthropic does."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def _event(value: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (str(value["type"]).encode(), json_bytes(value))
