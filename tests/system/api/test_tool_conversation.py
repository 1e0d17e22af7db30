"""A model with scripted logits calls a tool, is given the result, and answers with it: over real workers, a real router
and the `openai` package."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessage, ChatCompletionMessageFunctionToolCall

from tandem import AsyncClient
from tests.system.rigs.members.successor_model import successor_model
from tests.system.rigs.processes.local_cluster import LocalCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

_CALL = ["<tool_call>", '{"name": "get_weather", ', '"arguments": ', '{"city": ', '"Paris"', "}}", "</tool_call>"]
_SCRIPTS = [
    ["<ask>", "<think>", "Where?", "</think>", "I look.", *_CALL],
    ["<tell>", "It is ", "warm."],
    ["<lost>", "What?"],
]
# The model is told of the result only if it, the call and the tool have reached the template.
_TEMPLATE = (
    "{% set last = messages[-1] %}"
    "{% if last.role == 'user' and tools[0].function.name == 'get_weather' %}<ask>"
    "{% elif last.content == 'warm' and messages[-2].tool_calls[0].id == last.tool_call_id"
    " and messages[-2].tool_calls[0].function.arguments.city == 'Paris' %}<tell>"
    "{% else %}<lost>{% endif %}"
)
_TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
_QUESTION: Any = {"role": "user", "content": "How is the weather?"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    folder: Path = successor_model(tmp_path_factory.mktemp("successor_model"), _SCRIPTS, _TEMPLATE)
    flags = ("--dtype", "float32", "--num-blocks", "64")
    cluster = LocalCluster(redis_url, tmp_path_factory.mktemp("tools"), model=folder, flags=flags)
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    try:
        await cluster.start(prefill=2, decode=2, router_flags=parsers)
        yield cluster
    finally:
        await cluster.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{cluster.members['router0'].ready['http']}/v1"
    http = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, http_client=http) as client:
        yield client


def _only_call(message: ChatCompletionMessage) -> ChatCompletionMessageFunctionToolCall:
    calls = message.tool_calls or []
    assert len(calls) == 1
    assert isinstance(calls[0], ChatCompletionMessageFunctionToolCall)
    return calls[0]


async def test_the_model_calls_the_tool_and_answers_with_its_result(client: openai.AsyncOpenAI) -> None:
    create = client.chat.completions.create
    asked = await create(model="", messages=[_QUESTION], tools=_TOOLS, temperature=0)
    message = asked.choices[0].message
    assert asked.choices[0].finish_reason == "tool_calls"
    assert (message.content, (message.model_extra or {})["reasoning_content"]) == ("I look.", "Where?")
    call = _only_call(message)
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    history: Any = [_QUESTION, message.model_dump(exclude_none=True), result]
    told = await create(model="", messages=history, tools=_TOOLS, temperature=0)
    assert (told.choices[0].message.content, told.choices[0].finish_reason) == ("It is warm.", "stop")


async def test_the_streamed_conversation_is_the_same(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="", messages=[_QUESTION], tools=_TOOLS, temperature=0) as stream:
        message = (await stream.get_final_completion()).choices[0].message
    assert message.content == "I look."
    call = _only_call(message)
    assert call.function.arguments == '{"city": "Paris"}'


async def test_the_conversation_over_grpc_is_the_same(cluster: LocalCluster) -> None:
    async with AsyncClient(cluster.members["router0"].ready["grpc"]) as client:
        asked = (await client.generate(messages=[_QUESTION], tools=_TOOLS, temperature=0).result()).choices[0]
        assert (asked.content, asked.reasoning) == ("I look.", "Where?")
        (call,) = asked.tool_calls
        assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}')
        said = {"role": "assistant", "content": asked.content, "tool_calls": [call.message()]}
        result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
        told = client.generate(messages=[_QUESTION, said, result], tools=_TOOLS, temperature=0)
        assert (await told.result()).choices[0].content == "It is warm."
