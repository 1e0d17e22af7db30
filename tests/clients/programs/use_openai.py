"""Use the package `openai` as applications do. Arguments: the URL of a router."""

import asyncio
import sys
from typing import Literal

import openai
import pydantic
import pytest

URL = sys.argv[1] + "/v1"


class City(pydantic.BaseModel):
    name: Literal["Paris", "Rome"]
    people: int = pydantic.Field(ge=0, le=999)


CHAT = [{"role": "user", "content": "Write a function that reads a file."}]


def synchronous() -> str:
    client = openai.OpenAI(base_url=URL, api_key="-")
    assert [model.id for model in client.models.list()] == ["demo_model"]
    whole = client.completions.create(model="demo_model", prompt="def f(x):", max_tokens=12, temperature=0, best_of=1)
    streamed = client.completions.create(
        model="demo_model",
        prompt="def f(x):",
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
    )
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage == whole.usage
    chat = client.chat.completions.create(
        model="demo_model",
        messages=CHAT,
        max_completion_tokens=12,
        n=2,
        seed=3,
        user="me",
        safety_identifier="me",
        prompt_cache_key="key",
        metadata={"trace": "7"},
        store=False,
        parallel_tool_calls=True,
    )
    assert len(chat.choices) == 2
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="demo_model", messages=CHAT, temperature=5)
    tools(client)
    greedy = client.chat.completions.create(model="demo_model", messages=CHAT, max_completion_tokens=12, temperature=0)
    return str(greedy.choices[0].message.content)


def tools(client: openai.OpenAI) -> None:
    """A forced call follows the tool's schema, and `parse` returns what its model says."""
    asked = {
        "model": "demo_model",
        "messages": CHAT,
        "max_completion_tokens": 400,
        "seed": 1,
        "reasoning_effort": "none",
    }
    tool = openai.pydantic_function_tool(City)
    for choice, end in ("required", "tool_calls"), ({"type": "function", "function": {"name": "City"}}, "stop"):
        forced = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
        answer = client.chat.completions.create(**asked, **forced).choices[0]
        assert answer.finish_reason == end
        (call,) = answer.message.tool_calls
        City.model_validate_json(call.function.arguments)
        with client.chat.completions.stream(**asked, **forced) as stream:
            (parsed,) = stream.get_final_completion().choices[0].message.tool_calls
        assert isinstance(parsed.function.parsed_arguments, City)
        assert parsed.function.arguments == call.function.arguments
    parsed = client.chat.completions.parse(**asked, response_format=City).choices[0].message.parsed
    assert isinstance(parsed, City)


async def asynchronous_tools(client: openai.AsyncOpenAI) -> None:
    """A tool's call and the conversation that goes on after it; then two streams of such calls at once."""
    asked = {"model": "demo_model", "seed": 1, "reasoning_effort": "none", "max_completion_tokens": 400}
    tools = {"tools": [openai.pydantic_function_tool(City)]}
    forced = tools | {"tool_choice": {"type": "function", "function": {"name": "City"}}}
    message = (await client.chat.completions.create(messages=CHAT, **asked, **forced)).choices[0].message
    (call,) = message.tool_calls
    City.model_validate_json(call.function.arguments)

    async def streamed() -> str:
        async with client.chat.completions.stream(messages=CHAT, **asked, **forced) as stream:
            events = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            (found,) = (await stream.get_final_completion()).choices[0].message.tool_calls
        assert "".join(event.arguments_delta for event in events) == found.function.arguments
        return found.function.arguments

    assert await asyncio.gather(streamed(), streamed()) == [call.function.arguments] * 2
    result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
    told = await client.chat.completions.create(messages=[*CHAT, message, result], **asked, **tools, tool_choice="none")
    assert told.choices[0].message.role == "assistant" and not told.choices[0].message.tool_calls


async def asynchronous() -> str:
    async with openai.AsyncOpenAI(base_url=URL, api_key="-") as client:
        parsed = await client.chat.completions.parse(
            model="demo_model",
            messages=CHAT,
            max_completion_tokens=400,
            seed=1,
            reasoning_effort="none",
            response_format=City,
        )
        assert isinstance(parsed.choices[0].message.parsed, City)
        await asynchronous_tools(client)
        stream = await client.chat.completions.create(
            model="demo_model", messages=CHAT, max_completion_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


assert synchronous() == asyncio.run(asynchronous())
for too_long in {"max_completion_tokens": 2_000}, {"messages": [{"role": "user", "content": "import os\n" * 1_100}]}:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as refused:
        openai.OpenAI(base_url=URL, api_key="-").chat.completions.create(
            **{"model": "demo_model", "messages": CHAT} | too_long
        )
    assert refused.value.code == "context_length_exceeded"
