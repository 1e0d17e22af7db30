"""The routes of Anthropic's Messages API."""

import time
from functools import partial
from typing import Annotated

from fastapi import FastAPI, Header, Request
from starlette.responses import Response

from router.http.anthropic.bodies import CountTokensRequest, MessagesRequest
from router.http.anthropic.openapi_bodies import AnthropicError, Message, MessageEvent, TokenCount
from router.http.anthropic.responses import MessageEnvelope, MessageShape, MessageStream
from router.http.bodies.openapi import answers, generation_responses, refusals
from router.http.bodies.request_headers import RequestHeaders
from router.http.endpoints.operations import json_response
from router.http.openai_stream import Generates, WholeResponse
from router.request.divided_answers import ChatSettings
from router.request.live_requests import LiveRequests
from router.request.validation import check_model
from router.text.tokenization import Tokenization, TokenizerThreads

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
        division = chats.division(body.chat, use, tokenization, answer_id)
        asked = chats.constrained(body.request(label), use, tokenization)
        requests = headers.apply([asked], request)
        shape = MessageShape(division)
        envelope = MessageEnvelope(answer_id, model.name, int(time.time()), "message", "message", False)
        if body.stream:
            return MessageStream(pipeline, requests, shape, envelope)
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
