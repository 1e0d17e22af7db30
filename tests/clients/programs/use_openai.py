"""Use the package `openai` as applications do. Arguments: the URL of a router."""

import asyncio
import sys

import openai
import pytest

URL = sys.argv[1] + "/v1"
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
    greedy = client.chat.completions.create(model="demo_model", messages=CHAT, max_completion_tokens=12, temperature=0)
    return str(greedy.choices[0].message.content)


async def asynchronous() -> str:
    async with openai.AsyncOpenAI(base_url=URL, api_key="-") as client:
        stream = await client.chat.completions.create(
            model="demo_model", messages=CHAT, max_completion_tokens=12, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


assert synchronous() == asyncio.run(asynchronous())
