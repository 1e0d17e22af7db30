"""Use the package `anthropic` as applications do. Arguments: the URL of a router."""

import asyncio
import json
import sys

import anthropic
import pytest

SETTINGS = {"base_url": sys.argv[1], "api_key": "-"}
QUESTION = [{"role": "user", "content": "Write a function that reads a file."}]
GREEDY = {"model": "demo_model", "messages": QUESTION, "max_tokens": 12, "system": "Be brief."}
GREEDY["extra_body"] = {"temperature": 0}


async def asynchronous() -> str:
    async with anthropic.AsyncAnthropic(**SETTINGS) as client, client.messages.stream(**GREEDY) as stream:
        return "".join([text async for text in stream.text_stream])


client = anthropic.Anthropic(**SETTINGS)
whole = client.messages.create(**GREEDY)
assert whole.content[0].type == "text"
assert whole.stop_reason in ("max_tokens", "end_turn")
with client.messages.stream(**GREEDY) as stream:
    final = stream.get_final_message()
assert final.content[0].text == whole.content[0].text == asyncio.run(asynchronous())
assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
CITY = {"type": "object", "properties": {"people": {"type": "integer", "minimum": 0, "maximum": 999}}}
CITY |= {"required": ["people"], "additionalProperties": False}
for choice in {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "city"}:
    forced = GREEDY | {"tools": [{"name": "city", "input_schema": CITY}], "tool_choice": choice, "max_tokens": 400}
    forced["thinking"] = {"type": "disabled"}
    (use,) = [block for block in client.messages.create(**forced).content if block.type == "tool_use"]
    assert use.name == "city" and 0 <= use.input["people"] <= 999
    with client.messages.stream(**forced) as stream:
        assert use.input in [block.input for block in stream.get_final_message().content if block.type == "tool_use"]


async def asynchronous_tools() -> None:
    """A tool's call, the conversation that goes on after it, and two streams of such calls at once."""
    tools = {"tools": [{"name": "city", "input_schema": CITY}]}
    asked = GREEDY | tools | {"max_tokens": 400, "thinking": {"type": "disabled"}}
    asked["tool_choice"] = {"type": "tool", "name": "city"}
    async with anthropic.AsyncAnthropic(**SETTINGS) as client:

        async def streamed() -> tuple[object, str]:
            async with client.messages.stream(**asked) as stream:
                parts = [event.partial_json async for event in stream if event.type == "input_json"]
                message = await stream.get_final_message()
            (use,) = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == "tool_use"
            return use.input, "".join(parts)

        message = await client.messages.create(**asked)
        (use,) = [block for block in message.content if block.type == "tool_use"]
        for found, text in await asyncio.gather(streamed(), streamed()):
            assert found == use.input == json.loads(text)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": "found"}
        turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
        told = await client.messages.create(**GREEDY | tools | {"messages": QUESTION + turns})
        assert told.role == "assistant" and told.usage.output_tokens <= 12


asyncio.run(asynchronous_tools())
count = client.messages.count_tokens(model="demo_model", messages=QUESTION, system="Be brief.")
assert count.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
with pytest.raises(anthropic.BadRequestError, match="temperature"):
    client.messages.create(**GREEDY | {"extra_body": {"temperature": 5}})
with pytest.raises(anthropic.NotFoundError):
    client.messages.create(**GREEDY | {"model": "claude"})
