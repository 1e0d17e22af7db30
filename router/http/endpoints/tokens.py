"""Texts and conversations as token ids, and token ids as text, by vLLM's names: /tokenize and /detokenize."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import FastAPI
from pydantic import FailFast, Field, WithJsonSchema
from starlette.responses import Response

from cluster.errors import InvalidRequest
from router.http.bodies.messages import MAX_MESSAGES, MAX_TOOLS, Message, Tool
from router.http.bodies.openapi import ANY_TOKEN_IDS, answers, refusals
from router.http.bodies.openapi_bodies import Text, Tokens
from router.http.bodies.strict_body import StrictBody
from router.http.endpoints.operations import json_response
from router.request.validation import check_model
from router.requests import ChatOptions
from router.text.tokenization import Tokenization, TokenizerThreads


class TokenizeRequest(StrictBody):
    """Exactly one of `prompt` and `messages`."""

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

    def options(self) -> ChatOptions:
        return ChatOptions(
            tools=tuple(tool.value() for tool in self.tools),
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
